//! The gateway beside nginx, HAProxy and Envoy: the same upstream and requests, on one machine in one run.
//!
//! A contender's figure is the processor time of all its processes per request: the cost of a proxy,
//! independent of the load on the machine. All contenders run throughout and receive their requests in turns; ratios
//! compare figures of the same round.
//!
//! | module | purpose |
//! |---|---|
//! | `needs` | the programs, installed where possible |
//! | `peers` | the other proxies, configured as their manuals recommend |
//! | `ours` | the gateway, with and without each of its features |
//! | `report` | the figures and the goals |
#![allow(clippy::float_arithmetic, reason = "figures for people; nothing is decided by them")]

mod needs;
mod ours;
mod peers;
mod report;

use std::error::Error;
use std::path::PathBuf;

use testbed::RedisServer;
use testbed::process::{Folder, Running};

use self::needs::Programs;
use self::report::{GatewayFigure, GatewayReport, GatewayRow};
use crate::install::ratekeeper;
use crate::wrk::{self, WrkResult};

/// The extent of a run.
pub(crate) struct GatewaySize {
    quick: bool,
    rounds: usize,
}

impl GatewaySize {
    pub(crate) const FULL: GatewaySize = GatewaySize { quick: false, rounds: 13 };
    pub(crate) const QUICK: GatewaySize = GatewaySize { quick: true, rounds: 1 };
}

/// The number of workers of every contender, equal to the gateway's default.
fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The expected decisions.
#[derive(Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
enum GatewayJob {
    /// Every request is within its limit and is forwarded to the upstream.
    Allowed,
    /// The limit is exhausted.
    Denied,
}

impl GatewayJob {
    const ALL: [GatewayJob; 2] = [GatewayJob::Allowed, GatewayJob::Denied];

    fn path(self) -> &'static str {
        match self {
            GatewayJob::Allowed => "/allowed",
            GatewayJob::Denied => "/denied",
        }
    }
}

/// A running proxy.
struct Proxy {
    name: &'static str,
    process: Running,
    port: u16,
    is_limited: bool,
}

/// Runs all contenders. Progress goes to stderr.
pub(crate) fn run(size: &GatewaySize, binary: Option<PathBuf>) -> Result<GatewayReport, Box<dyn Error>> {
    let programs = Programs::provide()?;
    let binary = ratekeeper(binary)?;
    let folder = Folder::new()?;
    let redis = RedisServer::start()?;
    let (upstream, upstream_port) = peers::upstream(&folder)?;
    let mut contenders = peers::start(&programs, &folder, upstream_port)?;
    contenders.extend(ours::start(&binary, &folder, upstream_port, &redis.url())?);

    // A contender without limits denies nothing.
    let takes_part = |contender: &&Proxy, job| contender.is_limited || job == GatewayJob::Allowed;
    let mut visits: Vec<Vec<(&Proxy, GatewayRow)>> = Vec::new();
    for job in GatewayJob::ALL {
        let participants = contenders.iter().filter(|contender| takes_part(contender, job));
        visits
            .push(participants.map(|contender| (contender, GatewayRow::new(contender.name, job))).collect());
        if size.quick {
            continue;
        }
        // Warm-up: opens connections to the upstream and exhausts limits.
        for (contender, _) in visits.last().into_iter().flatten() {
            eprintln!("{}: {}", contender.name, job.path());
            send(contender, job)?;
        }
    }
    for round in 0..size.rounds {
        eprintln!("round {} of {}", round + 1, size.rounds);
        for (job, rows) in GatewayJob::ALL.into_iter().zip(&mut visits) {
            for turn in 0..rows.len() {
                let index = (turn + round) % rows.len();
                let (contender, row) = &mut rows[index];
                row.rounds.push(visit(contender, job)?);
            }
        }
    }
    let rows = visits.into_iter().flatten().map(|(_, row)| row).collect();
    drop((contenders, upstream, redis));
    Ok(GatewayReport::new(size.quick, programs.left_out, rows))
}

fn visit(contender: &Proxy, job: GatewayJob) -> Result<GatewayFigure, Box<dyn Error>> {
    let before = contender.process.cpu_us()?;
    let WrkResult { requests, per_second, p50_us, p99_us, .. } = send(contender, job)?;
    let spent = contender.process.cpu_us()? - before;
    Ok(GatewayFigure { cpu_us: spent as f64 / requests as f64, per_second, p50_us, p99_us })
}

/// Sends requests for one second. Fails unless the responses match the job.
fn send(contender: &Proxy, job: GatewayJob) -> Result<WrkResult, Box<dyn Error>> {
    let url = format!("http://127.0.0.1:{}{}", contender.port, job.path());
    let result = wrk::run(&["--header", "X-User-Id: user123", &url])
        .map_err(|error| format!("{}: {error}", contender.name))?;
    let is_right = match job {
        GatewayJob::Allowed => result.not_2xx == 0,
        // The first few requests are allowed, until the limit is exhausted.
        GatewayJob::Denied => result.not_2xx + 16 >= result.requests && result.requests > 16,
    };
    match is_right {
        true => Ok(result),
        false => {
            let (name, path) = (contender.name, job.path());
            Err(format!("{name}: {path}: unexpected responses: {result:?}").into())
        }
    }
}
