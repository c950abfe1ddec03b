//! The APIs beside throttlecrab's server and Redis itself: the same clients and keys, on one machine in one run.
//!
//! A contender's figure is the processor time of its process per decision: the cost of a decision, independent of the
//! load on the machine. The contenders take turns, and ratios compare figures of the same round.
//!
//! | module | purpose |
//! |---|---|
//! | `ours` | Ratekeeper, with all of its APIs open |
//! | `peers` | the other servers, installed where possible |
//! | `load` | sends checks: redis-benchmark, wrk with `check.lua`, or this program |
//! | `grpc` | load generator for gRPC |
//! | `report` | the figures and the goals |
#![allow(clippy::float_arithmetic, reason = "figures for people; nothing is decided by them")]

mod grpc;
mod load;
mod ours;
mod peers;
mod report;

use std::error::Error;
use std::path::PathBuf;

use clap::ValueEnum;
use serde::Serialize;
use testbed::process::{Folder, Running, listens};

pub(crate) use self::grpc::{Load, generate_load};
use self::load::CheckFormat;
use self::report::{ApisReport, ApisRow};
use crate::install::{debian, ratekeeper};

/// The extent of a run.
pub(crate) struct ApisSize {
    quick: bool,
    rounds: usize,
    /// Number of keys, used in random order.
    keys: usize,
    /// Decisions per round; over HTTP, a round is one second.
    piped: usize,
    alone: usize,
    grpc: usize,
}

impl ApisSize {
    pub(crate) const FULL: ApisSize =
        ApisSize { quick: false, rounds: 7, keys: 10_000, piped: 300_000, alone: 60_000, grpc: 40_000 };
    pub(crate) const QUICK: ApisSize =
        ApisSize { quick: true, rounds: 1, keys: 500, piped: 20_000, alone: 5_000, grpc: 5_000 };
}

/// The expected decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ApiJob {
    /// Every key has ample budget.
    Allowed,
    /// Every key has a budget of two per hour. With one, throttlecrab 0.4.40 denies nothing.
    Denied,
}

impl ApiJob {
    const ALL: [ApiJob; 2] = [ApiJob::Allowed, ApiJob::Denied];

    fn name(self) -> &'static str {
        match self {
            ApiJob::Allowed => "allowed",
            ApiJob::Denied => "denied",
        }
    }
}

/// How checks are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Transport {
    /// Over RESP, pipelined.
    Piped,
    /// Over RESP, one at a time: the network dominates.
    Alone,
    Http,
    Grpc,
}

impl Transport {
    const ALL: [Transport; 4] = [Transport::Piped, Transport::Alone, Transport::Http, Transport::Grpc];

    fn name(self) -> &'static str {
        match self {
            Transport::Piped => "RESP, 16 in a pipeline",
            Transport::Alone => "RESP, one at a time",
            Transport::Http => "HTTP",
            Transport::Grpc => "gRPC",
        }
    }
}

/// A running server, configured for one of the jobs.
struct ApiServer {
    job: ApiJob,
    process: Running,
    checks: Vec<ApiCheck>,
}

/// A check that a server supports, and its port.
struct ApiCheck {
    name: &'static str,
    port: u16,
    format: CheckFormat,
}

/// A check sent in one transport: a row of the report.
struct ApiVisit<'a> {
    process: &'a Running,
    check: &'a ApiCheck,
    row: ApisRow,
}

/// Runs all contenders. Progress goes to stderr.
pub(crate) fn run(size: &ApisSize, binary: Option<PathBuf>) -> Result<ApisReport, Box<dyn Error>> {
    debian("wrk", "wrk")?;
    let throttlecrab = peers::throttlecrab(size.quick);
    let binary = ratekeeper(binary)?;
    let folder = Folder::new()?;
    let mut contenders = vec![peers::redis(&folder)?];
    for job in ApiJob::ALL {
        contenders.push(ours::start(&binary, &folder, job)?);
        if let Ok(program) = &throttlecrab {
            contenders.push(peers::start(program, &folder, job)?);
        }
    }

    let mut groups: Vec<Vec<ApiVisit<'_>>> = Vec::new();
    for (job, transport) in
        ApiJob::ALL.into_iter().flat_map(|job| Transport::ALL.map(|transport| (job, transport)))
    {
        let mut group = Vec::new();
        for ApiServer { process, checks, .. } in contenders.iter().filter(|it| it.job == job) {
            for check in checks.iter().filter(|check| check.format.supports(transport)) {
                group.push(ApiVisit { process, check, row: ApisRow::new(check.name, transport, job) });
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
                let ApiVisit { process, check, row } = &mut group[(turn + round) % len];
                let figure = load::visit(process, check, row, size, &folder)
                    .map_err(|error| format!("{}, {}: {error}", row.name, row.transport.name()))?;
                if round >= warm_up {
                    row.rounds.push(figure);
                }
            }
        }
    }
    let rows = groups.into_iter().flatten().map(|visit| visit.row).collect();
    let left_out = throttlecrab.err().map(|why| format!("throttlecrab: {why}"));
    Ok(ApisReport::new(size.quick, left_out, rows))
}

/// Waits for the other APIs of a program, which may open later than the first.
fn listens_on(ports: &[u16]) -> Result<(), Box<dyn Error>> {
    match ports.iter().find(|port| !listens(**port)) {
        None => Ok(()),
        Some(port) => Err(format!("no server listens on port {port}").into()),
    }
}
