//! Our doors for other protocols beside throttlecrab's server and Redis itself: the same clients, the same keys, on one
//! machine in one run.
//!
//! A contender's figure is the processor time of its process over the decisions that it was asked for: that is what a
//! decision costs, however busy the machine is. The contenders take turns, and a ratio is that of one round's figures.
//!
//! | file | what it does |
//! |---|---|
//! | `ours` | tollgate, with all of its doors open |
//! | `peers` | the others, installed where that is possible |
//! | `ask` | asks a contender: redis-benchmark, wrk with `check.lua`, or this program again |
//! | `grpc` | who asks over gRPC |
//! | `report` | the figures, and what was promised |
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
use crate::install::{debian, tollgate};

/// How much is done.
pub(crate) struct Size {
    quick: bool,
    rounds: usize,
    /// As many keys are asked about, in no order.
    keys: usize,
    /// Decisions in one round; over HTTP it is a second of them.
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

/// What the answers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Job {
    /// Every key has plenty.
    Allowed,
    /// Every key has two, and then no more for an hour. With one, throttlecrab 0.4.40 denies nothing.
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

/// How a decision is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    /// By the protocol of Redis, so many at a time.
    Piped,
    /// One at a time: most of it is the network's.
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

/// A server that runs, for one of the jobs.
struct Contender {
    job: Job,
    process: Running,
    questions: Vec<Question>,
}

/// What a contender is asked, and where.
struct Question {
    name: &'static str,
    port: u16,
    ask: Ask,
}

/// A question in one way: a row of the report.
struct Visit<'a> {
    process: &'a Running,
    question: &'a Question,
    row: Row,
}

/// Runs everything. Progress goes to standard error.
pub(crate) fn run(size: &Size, binary: Option<PathBuf>) -> Result<Report, Box<dyn Error>> {
    debian("wrk", "wrk")?;
    let throttlecrab = peers::throttlecrab(size.quick);
    let binary = tollgate(binary)?;
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
    // The first round makes the keys known, and uses them up where that is the job.
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

/// Waits for the other doors of a program: it need not open all of them at once.
fn listens_on(ports: &[u16]) -> Result<(), Box<dyn Error>> {
    match ports.iter().find(|port| !listens(**port)) {
        None => Ok(()),
        Some(port) => Err(format!("nobody listens on port {port}").into()),
    }
}
