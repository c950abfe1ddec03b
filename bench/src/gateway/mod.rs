//! Our gateway beside nginx, HAProxy and Envoy: the same upstream, the same requests, on one machine in one run.
//!
//! A contender's figure is the processor time of all its processes over the requests that it answered: that is what a
//! proxy costs, however busy the machine is. All run all the time, and get their requests in turns; a ratio is that of
//! one round's figures.
//!
//! | file | what it does |
//! |---|---|
//! | `needs` | the programs, installed where that is possible |
//! | `peers` | the others, set up as their manuals say |
//! | `ours` | the gateway, with and without each of its features |
//! | `report` | the figures, and what was promised |
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
use self::report::{Figure, Report, Row};
use crate::install::tollgate;
use crate::wrk::{self, Asked};

/// How much is done.
pub(crate) struct Size {
    quick: bool,
    rounds: usize,
}

impl Size {
    pub(crate) const FULL: Size = Size { quick: false, rounds: 13 };
    pub(crate) const QUICK: Size = Size { quick: true, rounds: 1 };
}

/// As many for everybody as our gateway has.
fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What a client asks for.
#[derive(Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
enum Job {
    /// Every request is within its limit, and goes to the upstream.
    Allowed,
    /// The limit is used up.
    Denied,
}

impl Job {
    const ALL: [Job; 2] = [Job::Allowed, Job::Denied];

    fn path(self) -> &'static str {
        match self {
            Job::Allowed => "/allowed",
            Job::Denied => "/denied",
        }
    }
}

/// A proxy that runs.
struct Contender {
    name: &'static str,
    process: Running,
    port: u16,
    is_limited: bool,
}

/// Runs everything. Progress goes to standard error.
pub(crate) fn run(size: &Size, binary: Option<PathBuf>) -> Result<Report, Box<dyn Error>> {
    let programs = Programs::provide()?;
    let binary = tollgate(binary)?;
    let folder = Folder::new()?;
    let redis = RedisServer::start()?;
    let (upstream, upstream_port) = peers::upstream(&folder)?;
    let mut contenders = peers::start(&programs, &folder, upstream_port)?;
    contenders.extend(ours::start(&binary, &folder, upstream_port, &redis.url())?);

    // Without limits nothing is denied.
    let takes_part = |contender: &&Contender, job| contender.is_limited || job == Job::Allowed;
    let mut visits: Vec<Vec<(&Contender, Row)>> = Vec::new();
    for job in Job::ALL {
        let their = contenders.iter().filter(|contender| takes_part(contender, job));
        visits.push(their.map(|contender| (contender, Row::new(contender.name, job))).collect());
        if size.quick {
            continue;
        }
        // Connections to the upstream are opened, and limits are used up.
        for (contender, _) in visits.last().into_iter().flatten() {
            eprintln!("{}: {}", contender.name, job.path());
            ask(contender, job)?;
        }
    }
    for round in 0..size.rounds {
        eprintln!("round {} of {}", round + 1, size.rounds);
        for (job, rows) in Job::ALL.into_iter().zip(&mut visits) {
            for turn in 0..rows.len() {
                let index = (turn + round) % rows.len();
                let (contender, row) = &mut rows[index];
                row.rounds.push(visit(contender, job)?);
            }
        }
    }
    let rows = visits.into_iter().flatten().map(|(_, row)| row).collect();
    drop((contenders, upstream, redis));
    Ok(Report::new(size.quick, programs.left_out, rows))
}

fn visit(contender: &Contender, job: Job) -> Result<Figure, Box<dyn Error>> {
    let before = contender.process.cpu_us()?;
    let Asked { requests, per_second, p50_us, p99_us, .. } = ask(contender, job)?;
    let spent = contender.process.cpu_us()? - before;
    Ok(Figure { cpu_us: spent as f64 / requests as f64, per_second, p50_us, p99_us })
}

/// Asks for a second. Every answer must be the one that the job is about.
fn ask(contender: &Contender, job: Job) -> Result<Asked, Box<dyn Error>> {
    let url = format!("http://127.0.0.1:{}{}", contender.port, job.path());
    let asked = wrk::ask(&["--header", "X-User-Id: user123", &url])
        .map_err(|error| format!("{}: {error}", contender.name))?;
    let is_right = match job {
        Job::Allowed => asked.refused == 0,
        // The first use up the limit.
        Job::Denied => asked.refused + 16 >= asked.requests && asked.requests > 16,
    };
    match is_right {
        true => Ok(asked),
        false => {
            let (name, path) = (contender.name, job.path());
            Err(format!("{name}: {path}: not the answers that were asked for: {asked:?}").into())
        }
    }
}
