//! The figures, as a table and as JSON.
#![allow(clippy::float_arithmetic, reason = "figures for people; nothing is decided by them")]

use std::fmt;

use serde::Serialize;

use crate::contenders::{ContenderKind, KeyType};
use crate::figures::{median, sorted};
use crate::goals::Goal;
use crate::memory::{KeySet, Outcome, TOKEN_BUCKET};

/// All measurements of one run.
#[derive(Serialize)]
pub(crate) struct MemoryReport {
    pub(crate) quick: bool,
    pub(crate) rounds: usize,
    /// The one-minute load average before the run.
    pub(crate) load_average: String,
    pub(crate) contenders: Vec<MemoryScenario>,
    pub(crate) algorithms: Vec<MemoryScenario>,
    pub(crate) bytes_per_key: Vec<BytesPerKey>,
    pub(crate) goals: Vec<Goal>,
}

/// One scenario and the figures of all contenders.
#[derive(Serialize)]
pub(crate) struct MemoryScenario {
    pub(crate) keys: KeySet,
    pub(crate) key_type: &'static str,
    pub(crate) threads: usize,
    pub(crate) outcome: Outcome,
    pub(crate) figures: Vec<MemoryFigure>,
}

/// One contender in one scenario: a figure per round.
#[derive(Serialize)]
pub(crate) struct MemoryFigure {
    pub(crate) name: &'static str,
    pub(crate) ns_per_decision: Vec<f64>,
}

#[derive(Serialize)]
pub(crate) struct BytesPerKey {
    pub(crate) name: &'static str,
    pub(crate) bytes: f64,
}

impl BytesPerKey {
    pub(crate) fn new(name: &'static str, bytes: u64, keys: usize) -> BytesPerKey {
        BytesPerKey { name, bytes: bytes as f64 / keys as f64 }
    }
}

/// How many times as long one contender took as another. Ratios are taken per round, so that a slowdown of a whole
/// round cancels out.
#[derive(Clone, Copy)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    pub(crate) lowest: f64,
    pub(crate) highest: f64,
}

impl MemoryScenario {
    fn figure(&self, name: &str) -> Option<&MemoryFigure> {
        self.figures.iter().find(|figure| figure.name == name)
    }

    pub(crate) fn ratio(&self, slow: &str, fast: &str) -> Option<Ratio> {
        let (slow, fast) = (self.figure(slow)?, self.figure(fast)?);
        let pairs = slow.ns_per_decision.iter().zip(&fast.ns_per_decision);
        let ratios = sorted(pairs.map(|(slow, fast)| slow / fast));
        let (lowest, highest) = (*ratios.first()?, *ratios.last()?);
        Some(Ratio { median: median(ratios), lowest, highest })
    }
}

impl MemoryFigure {
    fn median(&self) -> f64 {
        median(self.ns_per_decision.iter().copied())
    }

    /// Returns the interquartile range of the rounds, in percent of the median.
    fn spread_percent(&self) -> f64 {
        let sorted = sorted(self.ns_per_decision.iter().copied());
        let quarter = sorted.len() / 4;
        100.0 * (sorted[sorted.len() - 1 - quarter] - sorted[quarter]) / median(sorted)
    }
}

impl MemoryReport {
    /// Returns the spread of every figure, lowest first.
    fn spreads_percent(&self) -> Vec<f64> {
        let scenarios = self.contenders.iter().chain(&self.algorithms);
        sorted(scenarios.flat_map(|scenario| &scenario.figures).map(MemoryFigure::spread_percent))
    }
}

impl fmt::Display for MemoryScenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryScenario { keys, key_type, threads, outcome, .. } = self;
        let (keys, outcome) = (keys.name(), outcome.name());
        let s = if *threads == 1 { " " } else { "s" };
        write!(f, "{keys:<17}  {key_type:<6}  {threads} thread{s}  {outcome:<7}")
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2}x (rounds {:.2} to {:.2})", self.median, self.lowest, self.highest)
    }
}

/// A column of a table of scenarios.
enum Column<'a> {
    Median { name: &'a str },
    Ratio { head: &'a str, slow: &'a str, fast: &'a str },
    MedianAndRatio { name: &'a str, to: &'a str },
}

impl<'a> Column<'a> {
    fn head(&self) -> &'a str {
        match self {
            Column::Median { name } | Column::MedianAndRatio { name, .. } => name,
            Column::Ratio { head, .. } => head,
        }
    }

    fn cell(&self, scenario: &MemoryScenario) -> Option<String> {
        let median = |name| Some(scenario.figure(name)?.median());
        let ratio = |slow, fast| Some(scenario.ratio(slow, fast)?.median);
        Some(match self {
            Column::Median { name } => format!("{:.1}", median(name)?),
            Column::Ratio { slow, fast, .. } => format!("{:.2}x", ratio(slow, fast)?),
            Column::MedianAndRatio { name, to } => format!("{:.1} {:>5.2}x", median(name)?, ratio(name, to)?),
        })
    }
}

/// Prints a row for each scenario.
fn table(f: &mut fmt::Formatter<'_>, scenarios: &[MemoryScenario], columns: &[Column<'_>]) -> fmt::Result {
    write!(f, "{:<45}", "")?;
    for column in columns {
        write!(f, "  {:>13}", column.head())?;
    }
    writeln!(f)?;
    for scenario in scenarios {
        write!(f, "{:<45}", scenario.to_string())?;
        for column in columns {
            let width = column.head().len().max(13);
            write!(f, "  {:>width$}", column.cell(scenario).unwrap_or_else(|| "-".to_owned()))?;
        }
        writeln!(f)?;
    }
    Ok(())
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.quick {
            writeln!(
                f,
                "QUICK: a smoke test with few keys and few requests. These figures are not to be quoted.\n"
            )?;
        }
        writeln!(
            f,
            "Nanoseconds per decision: the slowest worker's time over the decisions of all workers, each pinned to \
             its core\nand timing itself. Medians of {} interleaved rounds; a ratio is the median of the rounds' \
             ratios. Load average\nbefore the run: {}. `allows` returns yes or no, as governor does; \
             `check` also works out what remains and\nthe waits; `check_at` does so at a time that is \
             read once for 16 keys.\n",
            self.rounds, self.load_average
        )?;
        let governor = ContenderKind::Governor.name();
        let mut columns: Vec<_> =
            String::CONTENDERS.iter().map(|kind| Column::Median { name: kind.name() }).collect();
        for (head, slow, fast) in [
            ("gov./allows", governor, ContenderKind::Allows),
            ("gov./check", governor, ContenderKind::Check),
            ("gov./at", governor, ContenderKind::CheckAt),
            ("gov./many", governor, ContenderKind::CheckMany),
            ("ahash/allows", ContenderKind::GovernorAhash.name(), ContenderKind::Allows),
        ] {
            columns.push(Column::Ratio { head, slow, fast: fast.name() });
        }
        table(f, &self.contenders, &columns)?;

        writeln!(f, "\nOur algorithms, each with its ratio to the token bucket.\n")?;
        let algorithms = self.algorithms.first().map_or(&[][..], |scenario| &scenario.figures);
        let columns: Vec<_> =
            algorithms.iter().map(|it| Column::MedianAndRatio { name: it.name, to: TOKEN_BUCKET }).collect();
        table(f, &self.algorithms, &columns)?;

        let spreads = self.spreads_percent();
        writeln!(
            f,
            "\nNoise: the middle half of a figure's rounds spans {:.0} % of its median (the typical figure), {:.0} % \
             (the worst of {}).",
            median(spreads.iter().copied()),
            spreads[spreads.len() - 1],
            spreads.len()
        )?;

        writeln!(
            f,
            "\nBytes per key: growth of the resident memory (VmRSS) of a fresh process per contender, while it takes \
             in all keys\nof 16-byte text; the caller keeps none of them.\n"
        )?;
        for BytesPerKey { name, bytes } in &self.bytes_per_key {
            writeln!(f, "{name:<45}  {bytes:>14.1}")?;
        }

        writeln!(f, "\nGoals\n")?;
        self.goals.iter().try_for_each(|goal| writeln!(f, "{goal}"))
    }
}
