//! Decisions inside Redis: ours beside the scripts that people write, on one server in one run.
//!
//! A contender's figure is the server's own processor time (`INFO cpu`) over the decisions, since that is what is
//! shared; the commands are pipelined, so that neither side waits for the network. The contenders take turns.
//!
//! | file | what it does |
//! |---|---|
//! | `*.lua` | the baseline: the usual script for each algorithm |
//! | `wire` | the protocol by hand |
//! | `together` | whole programs: many tasks that ask at the same time |
#![allow(clippy::float_arithmetic, reason = "figures for people; nothing is decided by them")]

mod together;
mod wire;

use std::error::Error;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use testbed::RedisServer;
use tollgate::{Align, Count, Edge, Limit, Mode, Rate, Style};

use self::wire::{Wire, pack};
use crate::goals::Goal;
use crate::timing;

/// How much is done.
pub(crate) struct Size {
    quick: bool,
    rounds: usize,
    /// Pipelines a contender sends in one round.
    pipelines: usize,
    pub(super) checks_per_task: usize,
}

impl Size {
    pub(crate) const FULL: Size = Size { quick: false, rounds: 9, pipelines: 300, checks_per_task: 2_000 };
    pub(crate) const QUICK: Size = Size { quick: true, rounds: 3, pipelines: 4, checks_per_task: 20 };
}

/// Decisions in one pipeline.
const DEPTH: usize = 64;
const KEYS: usize = 10_000;
/// Decisions in one call, where calls are shared.
const SHARED: usize = 16;

/// One contender: what it is called, and its figure in each round.
#[derive(Serialize)]
pub(crate) struct Row {
    name: String,
    server_us_per_decision: Vec<f64>,
    decisions_per_second: Vec<f64>,
}

/// A log that is full.
#[derive(Serialize)]
struct LogBytes {
    limit: u32,
    ours: u64,
    ours_value: u64,
    sorted_set: u64,
}

#[derive(Serialize)]
pub(crate) struct Report {
    quick: bool,
    rows: Vec<Row>,
    logs: Vec<LogBytes>,
    together: Vec<together::Row>,
    known_denials: together::Denials,
    goals: Vec<Goal>,
}

/// Commands that are packed and ready.
struct Contender {
    name: String,
    pipelines: Vec<Vec<u8>>,
    replies: usize,
    decisions: usize,
}

/// An algorithm with both its forms: our limit, and the baseline's script and arguments.
struct Algorithm {
    name: &'static str,
    limit: Limit,
    script: &'static str,
    arguments: [&'static str; 4],
}

fn algorithms() -> Result<Vec<Algorithm>, Box<dyn Error>> {
    let (hour, second) = (Duration::from_secs(3_600), Duration::from_secs(1));
    let rate = Rate::new(1, second)?;
    Ok(vec![
        Algorithm {
            name: "token bucket",
            limit: Limit::token_bucket(1_000_000, rate, Style::Smooth)?,
            script: include_str!("token_bucket.lua"),
            arguments: ["1000000", "1", "1", "3600"],
        },
        Algorithm {
            name: "leaky bucket",
            limit: Limit::leaky_bucket(1_000_000, rate, Mode::Police)?,
            script: include_str!("leaky_bucket.lua"),
            arguments: ["1000000", "1", "1", "3600"],
        },
        Algorithm {
            name: "fixed window",
            limit: Limit::fixed_window(1_000_000, hour, Align::Clock)?,
            script: include_str!("fixed_window.lua"),
            arguments: ["1000000", "3600", "", ""],
        },
        Algorithm {
            name: "counter",
            limit: Limit::sliding_window_counter(1_000_000, hour, 1, Edge::Weigh)?,
            script: include_str!("sliding_window_counter.lua"),
            arguments: ["1000000", "3600", "", ""],
        },
        Algorithm {
            name: "log",
            limit: Limit::sliding_window_log(1_000, hour, Count::Admitted)?,
            script: include_str!("sliding_window_log.lua"),
            arguments: ["1000", "3600", "", ""],
        },
        Algorithm {
            name: HOT_LOG,
            limit: Limit::sliding_window_log(100, second, Count::Admitted)?,
            script: include_str!("sliding_window_log.lua"),
            arguments: ["100", "1", "", ""],
        },
    ])
}

/// One key that is over its limit of 100 a second, all the time.
const HOT_LOG: &str = "hot log";

/// The server with everything loaded.
struct Bench {
    server: RedisServer,
    wire: Wire,
    function: String,
}

impl Bench {
    fn start() -> Result<Bench, Box<dyn Error>> {
        let server = RedisServer::start()?;
        let mut wire = Wire::connect(server.port())?;
        let (library, function) = tollgate::redis::wire::library();
        wire.text(&["FUNCTION", "LOAD", "REPLACE", &library])?;
        Ok(Bench { server, wire, function })
    }

    /// `make` packs one command, given the number of its first key.
    fn contender(
        &self,
        name: String,
        decisions_per_command: usize,
        pipelines: usize,
        mut make: impl FnMut(&mut Vec<u8>, usize),
    ) -> Contender {
        let commands = DEPTH / decisions_per_command;
        let mut number = 0;
        let pipelines = (0..pipelines)
            .map(|_| {
                let mut packed = Vec::new();
                for _ in 0..commands {
                    make(&mut packed, number);
                    number += decisions_per_command;
                }
                packed
            })
            .collect();
        Contender { name, pipelines, replies: commands, decisions: DEPTH }
    }

    fn contenders(&mut self, pipelines: usize) -> Result<Vec<Contender>, Box<dyn Error>> {
        let mut all = Vec::new();
        for Algorithm { name, limit, script, arguments } in algorithms()? {
            let sha = self.wire.text(&["SCRIPT", "LOAD", script])?;
            // Keys in an order that no cache likes, the same for both.
            let key = |number: usize| if name == HOT_LOG { 0 } else { number * 7_919 % KEYS };
            all.push(self.contender(format!("{name}, baseline"), 1, pipelines, |packed, number| {
                let key = format!("rate_limit:{name}:user{}", key(number));
                let mut parts: Vec<&[u8]> = vec![b"EVALSHA", sha.as_bytes(), b"1", key.as_bytes()];
                parts.extend(arguments.iter().map(|part| part.as_bytes()));
                pack(packed, &parts);
            }));
            let charge = tollgate::redis::wire::charge(&limit, 1);
            let function = self.function.clone();
            for (name, together) in
                [(format!("{name}, ours"), 1), (format!("{name}, ours, {SHARED} a call"), SHARED)]
            {
                if together > 1 && !matches!(limit, Limit::Bucket(_)) {
                    continue;
                }
                let kind = limit.name();
                all.push(self.contender(name.clone(), together, pipelines, |packed, number| {
                    let keys: Vec<String> = (number..number + together)
                        .map(|number| format!("rate_limit:{kind}:{{{:032x}}}{together}", key(number)))
                        .collect();
                    let count = together.to_string();
                    let mut parts: Vec<&[u8]> = vec![b"FCALL", function.as_bytes(), count.as_bytes()];
                    parts.extend(keys.iter().map(|key| key.as_bytes()));
                    parts.push(b"");
                    parts.extend(std::iter::repeat_n(charge.as_slice(), together));
                    pack(packed, &parts);
                }));
            }
        }
        let empty = self.wire.text(&["SCRIPT", "LOAD", "return 1"])?;
        all.push(self.contender("an empty script".to_owned(), 1, pipelines, |packed, _| {
            pack(packed, &[b"EVALSHA", empty.as_bytes(), b"1", b"k"]);
        }));
        all.push(self.contender("INCR".to_owned(), 1, pipelines, |packed, number| {
            pack(packed, &[b"INCR", format!("count:{}", number * 7_919 % KEYS).as_bytes()]);
        }));
        Ok(all)
    }

    /// Seconds of processor time that the server has used.
    fn cpu_seconds(&mut self) -> Result<f64, Box<dyn Error>> {
        let info = self.wire.text(&["INFO", "cpu"])?;
        let of =
            |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
        of("used_cpu_user:")
            .zip(of("used_cpu_sys:"))
            .map(|(user, sys)| user + sys)
            .ok_or("no INFO cpu".into())
    }

    fn round(&mut self, contender: &Contender, row: &mut Row) -> Result<(), Box<dyn Error>> {
        let before = self.cpu_seconds()?;
        let (sent, spent) = timing::timed(|| {
            contender
                .pipelines
                .iter()
                .try_for_each(|packed| self.wire.send(packed, contender.replies).map(|_| ()))
        });
        sent?;
        let decisions = (contender.pipelines.len() * contender.decisions) as f64;
        row.server_us_per_decision.push((self.cpu_seconds()? - before) * 1e6 / decisions);
        row.decisions_per_second.push(decisions / spent.as_secs_f64());
        Ok(())
    }

    /// Bytes of a full log, ours and the baseline's.
    fn log_bytes(&mut self, limit: u32) -> Result<LogBytes, Box<dyn Error>> {
        let day = Duration::from_secs(86_400);
        let charge =
            tollgate::redis::wire::charge(&Limit::sliding_window_log(limit, day, Count::Admitted)?, 1);
        let sha = self.wire.text(&["SCRIPT", "LOAD", include_str!("sliding_window_log.lua")])?;
        let (function, text) = (self.function.clone(), limit.to_string());
        for _ in 0..limit {
            self.wire.ask(&[b"FCALL", function.as_bytes(), b"1", b"full", b"", &charge])?;
            self.wire.ask(&[b"EVALSHA", sha.as_bytes(), b"1", b"set", text.as_bytes(), b"86400"])?;
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

/// Runs everything. Progress goes to standard error.
pub(crate) fn run(size: &Size) -> Result<Report, Box<dyn Error>> {
    let mut bench = Bench::start()?;
    let contenders = bench.contenders(size.pipelines)?;
    let mut rows: Vec<Row> = contenders
        .iter()
        .map(|it| Row {
            name: it.name.clone(),
            server_us_per_decision: Vec::new(),
            decisions_per_second: Vec::new(),
        })
        .collect();
    for round in 0..size.rounds {
        eprintln!("round {} of {}", round + 1, size.rounds);
        for turn in 0..contenders.len() {
            let index = (turn + round) % contenders.len();
            bench.round(&contenders[index], &mut rows[index])?;
        }
    }
    eprintln!("full logs");
    let limits: &[u32] = if size.quick { &[10, 100] } else { &[10, 100, 1_000, 10_000] };
    let logs = limits.iter().map(|&limit| bench.log_bytes(limit)).collect::<Result<Vec<_>, _>>()?;
    eprintln!("whole programs");
    let (together, known_denials) = together::run(&bench.server, size)?;
    let goals = goals(&rows, &logs, &known_denials);
    Ok(Report { quick: size.quick, rows, logs, together, known_denials, goals })
}

fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Ours over the baseline, round by round.
fn ratio(rows: &[Row], ours: &str, baseline: &str) -> f64 {
    let find = |name: &str| rows.iter().find(|row| row.name == name);
    let Some((ours, baseline)) = find(ours).zip(find(baseline)) else { return f64::NAN };
    let pairs = ours.server_us_per_decision.iter().zip(&baseline.server_us_per_decision);
    median(&pairs.map(|(ours, baseline)| ours / baseline).collect::<Vec<_>>())
}

fn goals(rows: &[Row], logs: &[LogBytes], denials: &together::Denials) -> Vec<Goal> {
    let mut goals = Vec::new();
    for (name, how, most, words) in [
        ("token bucket", "", 0.4, "1/2.5"),
        ("leaky bucket", "", 0.4, "1/2.5"),
        ("fixed window", "", 0.5, "1/2"),
        ("counter", "", 2.0 / 3.0, "2/3"),
        (HOT_LOG, "", 1.0 / 3.0, "1/3"),
        ("token bucket", ", 16 a call", 0.25, "1/4"),
        ("leaky bucket", ", 16 a call", 0.25, "1/4"),
    ] {
        let figure = ratio(rows, &format!("{name}, ours{how}"), &format!("{name}, baseline"));
        let promise = format!("<= {words} of the baseline's server time, {name}{how}");
        goals.push(Goal::new(promise, format!("{figure:.2}"), figure <= most));
    }
    for log in logs.iter().filter(|log| log.limit >= 100) {
        let figure = log.ours_value as f64 / f64::from(log.limit);
        let promise = format!("<= 9 bytes a slot, a full log of {}", log.limit);
        goals.push(Goal::new(promise, format!("{figure:.2}"), figure <= 9.0));
    }
    let promise = "denied keys inside their wait cost Redis nothing".to_owned();
    let figure =
        format!("{} calls for {} checks (it asks again once a second)", denials.calls, denials.checks);
    goals.push(Goal::new(promise, figure, denials.calls * 1_000 <= denials.checks));
    let promise = ">= 20x the exact mode's decisions per second, leased".to_owned();
    goals.push(Goal::new(promise, "not built".to_owned(), false));
    goals
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.quick {
            writeln!(f, "QUICK: a smoke test with few requests. These figures are not to be quoted.\n")?;
        }
        writeln!(
            f,
            "The server's processor time per decision, {DEPTH} in a pipeline, {KEYS} keys; medians of interleaved rounds.\n"
        )?;
        writeln!(f, "{:<34}  {:>12}  {:>12}", "", "server us", "decisions/s")?;
        for row in &self.rows {
            let (us, per_second) = (median(&row.server_us_per_decision), median(&row.decisions_per_second));
            writeln!(f, "{:<34}  {us:>12.2}  {per_second:>12.0}", row.name)?;
        }
        writeln!(f, "\nBytes of a full log (MEMORY USAGE), and of its value.\n")?;
        writeln!(f, "{:<34}  {:>12}  {:>12}  {:>12}", "limit", "sorted set", "ours", "our value")?;
        for log in &self.logs {
            writeln!(
                f,
                "{:<34}  {:>12}  {:>12}  {:>12}",
                log.limit, log.sorted_set, log.ours, log.ours_value
            )?;
        }
        writeln!(
            f,
            "\nWhole programs, decisions per second: tasks that ask one after the other, all at the same time.\n"
        )?;
        writeln!(f, "{:<34}  {:>12}  {:>12}", "tasks", "baseline", "ours")?;
        for row in &self.together {
            writeln!(f, "{:<34}  {:>12.0}  {:>12.0}", row.tasks, row.baseline, row.ours)?;
        }
        writeln!(f, "{:<34}  {:>12}  {:>12.0}", "1, denied and known", "-", self.known_denials.per_second)?;
        writeln!(f, "\nGoals\n")?;
        self.goals.iter().try_for_each(|goal| writeln!(f, "{goal}"))
    }
}
