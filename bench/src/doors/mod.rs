//! Our door of the Redis protocol beside throttlecrab's server and Redis itself: the same client, the same keys, on one
//! machine in one run.
//!
//! A contender's figure is the processor time of its process over the decisions that it was asked for: that is what a
//! decision costs, however busy the machine is. The contenders take turns, and a ratio is that of one round's figures.
//!
//! | file | what it does |
//! |---|---|
//! | `ours` | the door, in a process of its own |
//! | `peers` | the others, installed where that is possible |
//! | `report` | the figures, and what was promised |
#![allow(clippy::float_arithmetic, reason = "figures for people; nothing is decided by them")]

mod ours;
mod peers;
mod report;

use std::error::Error;
use std::process::Command;

pub(crate) use self::ours::serve;
use self::report::{Report, Row};
use testbed::process::{Folder, Running};

/// How much is done.
pub(crate) struct Size {
    quick: bool,
    rounds: usize,
    /// Decisions in one round, with one in a pipeline and with more.
    alone: usize,
    piped: usize,
}

impl Size {
    pub(crate) const FULL: Size = Size { quick: false, rounds: 7, alone: 60_000, piped: 300_000 };
    pub(crate) const QUICK: Size = Size { quick: true, rounds: 1, alone: 5_000, piped: 20_000 };
}

/// Decisions in one pipeline. With one, most of the time is the network's.
const DEPTHS: [usize; 2] = [16, 1];
const CONNECTIONS: &str = "50";
/// As many keys are asked about, by chance.
const KEYS: &str = "10000";

/// Who is asked, and what.
struct Contender {
    name: &'static str,
    process: Running,
    port: u16,
    command: &'static [&'static str],
}

/// Runs everything. Progress goes to standard error.
pub(crate) fn run(size: &Size) -> Result<Report, Box<dyn Error>> {
    let folder = Folder::new()?;
    let mut contenders = ours::start(&folder)?;
    let left_out = peers::start(&folder, &mut contenders)?;
    let mut rows: Vec<Row> = Vec::new();
    for depth in DEPTHS {
        rows.extend(contenders.iter().map(|contender| Row::new(contender.name, depth)));
    }
    let warm_up = usize::from(!size.quick);
    for round in 0..size.rounds + warm_up {
        eprintln!("round {} of {}", round + 1, size.rounds + warm_up);
        for (at, row) in rows.iter_mut().enumerate() {
            let contender = &contenders[at % contenders.len()];
            let requests = if row.depth == 1 { size.alone } else { size.piped };
            let (cpu_us, per_second) = visit(contender, row.depth, requests)?;
            if round >= warm_up {
                row.cpu_us.push(cpu_us);
                row.per_second.push(per_second);
            }
        }
    }
    drop(contenders);
    Ok(Report::new(size.quick, left_out, rows))
}

/// Asks one of them. Processor time per decision, and decisions per second.
fn visit(contender: &Contender, depth: usize, requests: usize) -> Result<(f64, f64), Box<dyn Error>> {
    let before = contender.process.cpu_us()?;
    let output = Command::new("redis-benchmark")
        .args(["-p", &contender.port.to_string(), "-c", CONNECTIONS, "-r", KEYS, "--csv"])
        .args(["-n", &requests.to_string(), "-P", &depth.to_string()])
        .args(contender.command)
        .output()
        .map_err(|error| format!("redis-benchmark: {error}; try `sudo apt-get install redis-tools`"))?;
    let spent = contender.process.cpu_us()? - before;
    let text = String::from_utf8_lossy(&output.stdout);
    let per_second = per_second(&text)
        .ok_or_else(|| format!("{}: {text} {}", contender.name, String::from_utf8_lossy(&output.stderr)))?;
    Ok((spent as f64 / requests as f64, per_second))
}

/// The second field of the last line: requests per second.
fn per_second(csv: &str) -> Option<f64> {
    let line = csv.lines().rfind(|line| line.starts_with('"'))?;
    line.split("\",\"").nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_redis_benchmark_says_is_read() {
        let text = "\"test\",\"rps\",\"avg_latency_ms\"\n\"CL.THROTTLE user 1 1 1\",\"66666.67\",\"0.400\"\n";
        assert_eq!(per_second(text), Some(66666.67));
        assert_eq!(per_second("nothing"), None);
    }
}
