//! The APIs beside throttlecrab's server and Redis itself: the same clients and keys, on one machine in one run.
//!
//! A contender's figure is the processor time of its process per decision: the cost of a decision, independent of the
//! load on the machine. The contenders take turns, and ratios compare figures of the same round.
//!
//! | module | purpose |
//! |---|---|
//! | `ours` | Ratekeeper, with all of its APIs open |
//! | `peers` | the other servers, installed where possible |
//! | `ask` | sends checks: redis-benchmark, wrk with `check.lua`, or this program |
//! | `grpc` | load generator for gRPC |
//! | `report` | the figures and the goals |
#![allow(clippy::float_arithmetic, reason = "figures for people; nothing is decided by them")]

mod ask;
mod grpc;
mod ours;
mod peers;
mod report;

use std::error::Error;
use std::path::PathBuf;

use clap::ValueEnum;
use serde::Serialize;
use testbed::process::{Folder, Running, listens};

use self::ask::Ask;
pub(crate) use self::grpc::{Load, ask_many};
use self::report::{Report, Row};
use crate::install::{debian, ratekeeper};

/// The extent of a run.
pub(crate) struct Size {
    quick: bool,
    rounds: usize,
    /// Number of keys, used in random order.
    keys: usize,
    /// Decisions per round; over HTTP, a round is one second.
    piped: usize,
    alone: usize,
    grpc: usize,
}

impl Size {
    pub(crate) const FULL: Size =
        Size { quick: false, rounds: 7, keys: 10_000, piped: 300_000, alone: 60_000, grpc: 40_000 };
    pub(crate) const QUICK: Size =
        Size { quick: true, rounds: 1, keys: 500, piped: 20_000, alone: 5_000, grpc: 5_000 };
}

/// The expected decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Job {
    /// Every key has ample budget.
    Allowed,
    /// Every key has a budget of two per hour. With one, throttlecrab 0.4.40 denies nothing.
    Denied,
}

impl Job {
    const ALL: [Job; 2] = [Job::Allowed, Job::Denied];

    fn name(self) -> &'static str {
        match self {
            Job::Allowed => "allowed",
            Job::Denied => "denied",
        }
    }
}

/// How checks are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    /// Over RESP, pipelined.
    Piped,
    /// Over RESP, one at a time: the network dominates.
    Alone,
    Http,
    Grpc,
}

impl Way {
    const ALL: [Way; 4] = [Way::Piped, Way::Alone, Way::Http, Way::Grpc];

    fn name(self) -> &'static str {
        match self {
            Way::Piped => "RESP, 16 in a pipeline",
            Way::Alone => "RESP, one at a time",
            Way::Http => "HTTP",
            Way::Grpc => "gRPC",
        }
    }
}

/// A running server, configured for one of the jobs.
struct Contender {
    job: Job,
    process: Running,
    questions: Vec<Question>,
}

/// A check that a contender answers, and its port.
struct Question {
    name: &'static str,
    port: u16,
    ask: Ask,
}

/// A check sent in one way: a row of the report.
struct Visit<'a> {
    process: &'a Running,
    question: &'a Question,
    row: Row,
}

/// Runs all contenders. Progress goes to stderr.
pub(crate) fn run(size: &Size, binary: Option<PathBuf>) -> Result<Report, Box<dyn Error>> {
    debian("wrk", "wrk")?;
    let throttlecrab = peers::throttlecrab(size.quick);
    let binary = ratekeeper(binary)?;
    let folder = Folder::new()?;
    let mut contenders = vec![peers::redis(&folder)?];
    for job in Job::ALL {
        contenders.push(ours::start(&binary, &folder, job)?);
        if let Ok(program) = &throttlecrab {
            contenders.push(peers::start(program, &folder, job)?);
        }
    }

    let mut groups: Vec<Vec<Visit<'_>>> = Vec::new();
    for (job, way) in Job::ALL.into_iter().flat_map(|job| Way::ALL.map(|way| (job, way))) {
        let mut group = Vec::new();
        for Contender { process, questions, .. } in contenders.iter().filter(|it| it.job == job) {
            for question in questions.iter().filter(|question| question.ask.is_asked(way)) {
                group.push(Visit { process, question, row: Row::new(question.name, way, job) });
            }
        }
        groups.push(group);
    }
    // The first round creates the keys, and exhausts their budgets for the `Denied` job.
    let warm_up = usize::from(!size.quick);
    for round in 0..size.rounds + warm_up {
        eprintln!("round {} of {}", round + 1, size.rounds + warm_up);
        for group in &mut groups {
            let len = group.len();
            for turn in 0..len {
                let Visit { process, question, row } = &mut group[(turn + round) % len];
                let figure = ask::visit(process, question, row, size, &folder)
                    .map_err(|error| format!("{}, {}: {error}", row.name, row.way.name()))?;
                if round >= warm_up {
                    row.rounds.push(figure);
                }
            }
        }
    }
    let rows = groups.into_iter().flatten().map(|visit| visit.row).collect();
    let left_out = throttlecrab.err().map(|why| format!("throttlecrab: {why}"));
    Ok(Report::new(size.quick, left_out, rows))
}

/// Waits for the other APIs of a program, which may open later than the first.
fn listens_on(ports: &[u16]) -> Result<(), Box<dyn Error>> {
    match ports.iter().find(|port| !listens(**port)) {
        None => Ok(()),
        Some(port) => Err(format!("nobody listens on port {port}").into()),
    }
}
