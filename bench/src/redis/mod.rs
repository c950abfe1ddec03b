//! Decisions inside Redis: Ratekeeper's library beside commonly used scripts, on one server in one run.
//!
//! A contender's figure is the server's processor time (`INFO cpu`) per decision, because the server is the shared
//! resource. Commands are pipelined, so that neither side waits for the network, and also sent one by one. The
//! contenders take turns, and ratios compare figures of the same round.
//!
//! | file | purpose |
//! |---|---|
//! | `*.lua` | the baseline: a commonly used script for each algorithm |
//! | `floor.lua` | the floor: the commands that a decision needs, without the decision |
//! | `scenarios` | the scenarios, as packed commands |
//! | `report` | the figures and the goals |
//! | `wire` | a minimal client of the Redis protocol |
//! | `programs` | whole programs: many concurrent tasks |
#![allow(clippy::float_arithmetic, reason = "figures for people; nothing is decided by them")]

mod programs;
mod report;
mod scenarios;
mod wire;

use std::error::Error;
use std::time::Duration;

use ratekeeper::{Limit, LogPolicy};
use serde::Serialize;
use testbed::RedisServer;

use self::scenarios::{Implementation, LoadSettings, RedisContender, is_allowed, scenarios};
use self::wire::{Reply, Wire, pack};
use crate::goals::Goal;
use crate::timing;

/// The extent of a run.
pub(crate) struct RedisSize {
    quick: bool,
    rounds: usize,
    /// Decisions of a contender per round, unpipelined and pipelined.
    alone: usize,
    piped: usize,
    /// For paced scenarios: ticks that fill the window, and ticks that are measured.
    ticks_before: usize,
    ticks: usize,
    pub(super) checks_per_task: usize,
}

impl RedisSize {
    pub(crate) const FULL: RedisSize = RedisSize {
        quick: false,
        rounds: 11,
        alone: 4_096,
        piped: 16_384,
        ticks_before: 100,
        ticks: 150,
        checks_per_task: 2_000,
    };
    pub(crate) const QUICK: RedisSize = RedisSize {
        quick: true,
        rounds: 1,
        alone: 64,
        piped: 64,
        ticks_before: 5,
        ticks: 5,
        checks_per_task: 20,
    };
}

/// Decisions per pipeline. With one, the network dominates the server's time.
const DEPTHS: [usize; 3] = [64, 16, 1];

/// One contender: its name, and its figures in each round.
#[derive(Serialize)]
pub(crate) struct RedisRow {
    name: String,
    depth: usize,
    server_us_per_decision: Vec<f64>,
    decisions_per_second: Vec<f64>,
    /// Percentage of the measured requests; `None` if the replies do not state it.
    allowed_percent: Option<f64>,
}

/// Sizes of a full log.
#[derive(Serialize)]
struct LogBytes {
    limit: u32,
    ours: u64,
    ours_value: u64,
    sorted_set: u64,
}

#[derive(Serialize)]
pub(crate) struct RedisReport {
    quick: bool,
    rows: Vec<RedisRow>,
    logs: Vec<LogBytes>,
    programs: Vec<programs::ProgramRow>,
    denials: programs::DenialFigures,
    leased: programs::LeaseFigures,
    goals: Vec<Goal>,
}

/// The server with all scripts loaded.
struct RedisBench {
    server: RedisServer,
    wire: Wire,
    function: String,
}

/// The number of allowed requests, out of the replies that say whether a request was allowed.
#[derive(Default)]
struct AllowedCount {
    yes: u64,
    of: u64,
}

impl RedisBench {
    fn start() -> Result<RedisBench, Box<dyn Error>> {
        let server = RedisServer::start()?;
        let mut wire = Wire::connect(server.port())?;
        let (library, function) = ratekeeper::redis::wire::library();
        wire.text(&["FUNCTION", "LOAD", "REPLACE", &library])?;
        wire.text(&["FUNCTION", "LOAD", "REPLACE", include_str!("floor.lua")])?;
        Ok(RedisBench { server, wire, function })
    }

    fn contenders(&mut self, size: &RedisSize, depth: usize) -> Result<Vec<RedisContender>, Box<dyn Error>> {
        let requests = if depth == 1 { size.alone } else { size.piped };
        let mut all = Vec::new();
        for scenario in scenarios()? {
            let sha = self.wire.text(&["SCRIPT", "LOAD", &scenario.script()])?;
            let (function, sha) = (self.function.as_str(), sha.as_str());
            let RedisSize { rounds, ticks_before, ticks, .. } = *size;
            let loaded = LoadSettings { function, sha, depth, requests, rounds, ticks_before, ticks };
            all.extend(scenario.contenders(&loaded));
        }
        all.extend(scenarios::floors(depth, requests)?);
        let empty = self.wire.text(&["SCRIPT", "LOAD", "return 1"])?;
        let name = "an empty script".to_owned();
        all.push(RedisContender::new(name, Implementation::Nothing, depth, requests, |packed, _| {
            pack(packed, &[b"EVALSHA", empty.as_bytes(), b"1", b"k"]);
        }));
        all.push(RedisContender::new(
            "INCR".to_owned(),
            Implementation::Nothing,
            depth,
            requests,
            |packed, number| {
                pack(packed, &[b"INCR", format!("count:{}", number * 7_919 % 10_000).as_bytes()]);
            },
        ));
        Ok(all)
    }

    /// Returns the processor time that the server has used, in seconds.
    fn cpu_seconds(&mut self) -> Result<f64, Box<dyn Error>> {
        let info = self.wire.text(&["INFO", "cpu"])?;
        let of =
            |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
        of("used_cpu_user:")
            .zip(of("used_cpu_sys:"))
            .map(|(user, sys)| user + sys)
            .ok_or("no INFO cpu".into())
    }

    fn send(
        &mut self,
        contender: &RedisContender,
        pipelines: &[Vec<u8>],
        allowed: &mut AllowedCount,
    ) -> Result<(), Box<dyn Error>> {
        let mut count = |reply: Reply| {
            if let Some(is_allowed) = is_allowed(contender.by, &reply) {
                allowed.yes += u64::from(is_allowed);
                allowed.of += 1;
            }
        };
        let Some((tick, pipelines_a_tick)) = contender.tick else {
            for packed in pipelines {
                self.wire.send(packed, contender.replies, &mut count)?;
            }
            return Ok(());
        };
        let watch = timing::Watch::start();
        for (number, pipelines) in (0_u32..).zip(pipelines.chunks(pipelines_a_tick)) {
            watch.wait_until(tick * number);
            for packed in pipelines {
                self.wire.send(packed, contender.replies, &mut count)?;
            }
        }
        Ok(())
    }

    fn round(
        &mut self,
        contender: &RedisContender,
        round: usize,
        row: &mut RedisRow,
        allowed: &mut AllowedCount,
    ) -> Result<(), Box<dyn Error>> {
        let pipelines = &contender.rounds[round % contender.rounds.len()];
        let (warm_up, measured) = pipelines.split_at(contender.warm_up);
        self.send(contender, warm_up, &mut AllowedCount::default())?;
        let before = self.cpu_seconds()?;
        let (sent, spent) = timing::timed(|| self.send(contender, measured, allowed));
        sent?;
        let decisions = (measured.len() * contender.decisions) as f64;
        row.server_us_per_decision.push((self.cpu_seconds()? - before) * 1e6 / decisions);
        row.decisions_per_second.push(decisions / spent.as_secs_f64());
        Ok(())
    }

    /// Runs all contenders in turns.
    fn rows(&mut self, size: &RedisSize, depth: usize) -> Result<Vec<RedisRow>, Box<dyn Error>> {
        let contenders = self.contenders(size, depth)?;
        let mut rows = Vec::new();
        for contender in &contenders {
            self.send(contender, &contender.before, &mut AllowedCount::default())?;
            rows.push(RedisRow {
                name: contender.name.clone(),
                depth,
                server_us_per_decision: Vec::new(),
                decisions_per_second: Vec::new(),
                allowed_percent: None,
            });
        }
        let mut allowed: Vec<AllowedCount> = rows.iter().map(|_| AllowedCount::default()).collect();
        for round in 0..size.rounds {
            eprintln!("{depth} in a pipeline: round {} of {}", round + 1, size.rounds);
            for turn in 0..contenders.len() {
                let index = (turn + round) % contenders.len();
                self.round(&contenders[index], round, &mut rows[index], &mut allowed[index])?;
            }
        }
        for (row, AllowedCount { yes, of }) in rows.iter_mut().zip(allowed) {
            row.allowed_percent = (of > 0).then(|| yes as f64 * 100.0 / of as f64);
        }
        Ok(rows)
    }

    /// Measures the bytes of a full log, ours and the baseline's.
    fn log_bytes(&mut self, limit: u32) -> Result<LogBytes, Box<dyn Error>> {
        let day = Duration::from_secs(86_400);
        let charge =
            ratekeeper::redis::wire::charge(&Limit::sliding_window_log(limit, day, LogPolicy::Admitted)?, 1);
        let sha = self.wire.text(&["SCRIPT", "LOAD", include_str!("sliding_window_log.lua")])?;
        let (function, text) = (self.function.clone(), limit.to_string());
        for _ in 0..limit {
            self.wire.call(&[b"FCALL", function.as_bytes(), b"1", b"full", &charge])?;
            self.wire.call(&[b"EVALSHA", sha.as_bytes(), b"1", b"set", text.as_bytes(), b"86400"])?;
        }
        let mut usage = |key: &str| -> Result<u64, Box<dyn Error>> {
            Ok(self.wire.text(&["MEMORY", "USAGE", key, "SAMPLES", "0"])?.parse()?)
        };
        let (ours, sorted_set) = (usage("full")?, usage("set:log")? + usage("set:seq")?);
        let ours_value = self.wire.text(&["STRLEN", "full"])?.parse()?;
        self.wire.text(&["DEL", "full", "set:log", "set:seq"])?;
        Ok(LogBytes { limit, ours, ours_value, sorted_set })
    }
}

/// Runs all scenarios. Progress goes to stderr.
pub(crate) fn run(size: &RedisSize) -> Result<RedisReport, Box<dyn Error>> {
    let mut bench = RedisBench::start()?;
    let mut rows = Vec::new();
    for depth in DEPTHS {
        rows.extend(bench.rows(size, depth)?);
    }
    eprintln!("full logs");
    let limits: &[u32] = if size.quick { &[10, 100] } else { &[10, 100, 1_000, 10_000] };
    let logs = limits.iter().map(|&limit| bench.log_bytes(limit)).collect::<Result<Vec<_>, _>>()?;
    eprintln!("whole programs");
    let (programs, denials, leased) = programs::run(&bench.server, size)?;
    let goals = report::goals(&rows, &logs, &denials, &leased);
    Ok(RedisReport { quick: size.quick, rows, logs, programs, denials, leased, goals })
}
