//! Compares the five algorithms on the same trace, at comparable settings.

use ratekeeper::{
    BuildError, Decision, EdgePolicy, LeakyMode, Limit, LimitError, LogPolicy, Rate, RefillStyle, WindowAlign,
};

use crate::chart::{self, Bars};
use crate::histogram::Histogram;
use crate::peak::{EntryBudget, Peak, PeakTracker};
use crate::style::{self, Ink, TextStyle, count};
use crate::summary::{
    PEAK_ENTRIES_MAX, SHARE_COLUMN, described, peak, peak_notes, print_notes, share, trace_size, window_ns,
};
use crate::svg::{self, Picture, PictureRow, Plot};
use crate::table::{Table, cell};
use crate::tally::{KEYS_MAX, Keys, Span, Tally, fetch};
use crate::{Batch, Simulator};

/// Runs a trace through the five algorithms in parallel.
#[derive(Debug)]
pub struct Comparison {
    limit: Limit,
    window_ns: u64,
    replays: [AlgorithmReplay; ALGORITHMS],
    keys: Keys,
    /// For each key, the peak of the units that each algorithm allowed.
    peaks: Vec<PeakTracker<ALGORITHMS>>,
    budget: EntryBudget,
    span: Option<Span>,
    /// All requests, then those that each algorithm allowed.
    over_time: Histogram<{ ALGORITHMS + 1 }>,
    /// Key numbers of the current batch.
    numbers: Vec<Option<u32>>,
}

/// One algorithm's limiter and its results.
#[derive(Debug)]
struct AlgorithmReplay {
    limit: Limit,
    simulator: Simulator,
    tally: Tally,
    /// Decisions of the current batch.
    decisions: Vec<Decision>,
}

const ALGORITHMS: usize = 5;

/// An algorithm's label, color and when to choose it, as the report prints them.
struct Choice {
    name: &'static str,
    ink: Ink,
    when: &'static str,
}

const CHOICES: [Choice; ALGORITHMS] = [
    Choice {
        name: "token bucket",
        ink: Ink::Green,
        when: "Bursts are fine: an idle client may use a full bucket at once and then gets the steady rate.",
    },
    Choice {
        name: "leaky bucket",
        ink: Ink::Cyan,
        when: "The service needs steady input. `mode: shape` delays allowed requests, so that they are never \
               faster than the leak rate.",
    },
    Choice {
        name: "fixed window",
        ink: Ink::Yellow,
        when: "The simplest to explain. Around the edge of two windows it allows up to twice the limit.",
    },
    Choice {
        name: "sliding log",
        ink: Ink::Magenta,
        when: "The limit holds exactly in every window. It stores 8 bytes for each allowed request.",
    },
    Choice {
        name: "sliding counter",
        ink: Ink::Blue,
        when: "The default choice. Two numbers per key, and close to the log for even traffic; with `edge: keep` \
               never above the limit.",
    },
];

/// Returns the five algorithms with the same limit and window. A bucket's capacity is the limit, refilled once per
/// window.
fn comparable(limit: &Limit) -> Result<[Limit; ALGORITHMS], LimitError> {
    let (max, window) = (limit.limit(), limit.window());
    let rate = Rate::new(u64::from(max), window)?;
    Ok([
        Limit::token_bucket(max, rate, RefillStyle::Smooth)?,
        Limit::leaky_bucket(max, rate, LeakyMode::Police)?,
        Limit::fixed_window(max, window, WindowAlign::Clock)?,
        Limit::sliding_window_log(max, window, LogPolicy::Admitted)?,
        Limit::sliding_window_counter(max, window, 1, EdgePolicy::Weigh)?,
    ])
}

impl Comparison {
    /// Creates the five algorithms at settings comparable to those of `limit`, each with capacity for `max_keys`
    /// active keys.
    ///
    /// # Errors
    /// Returns an error if an algorithm does not support this limit and window, or if `max_keys` is zero or too
    /// large.
    pub fn new(limit: &Limit, max_keys: usize) -> Result<Comparison, CompareError> {
        let mut replays = Vec::with_capacity(ALGORITHMS);
        for limit in comparable(limit)? {
            replays.push(AlgorithmReplay {
                simulator: Simulator::new(limit.clone(), max_keys)?,
                limit,
                tally: Tally::default(),
                decisions: Vec::new(),
            });
        }
        Ok(Comparison {
            limit: limit.clone(),
            window_ns: window_ns(limit),
            replays: replays.try_into().map_err(|_| CompareError::Build(BuildError::NoKeys))?,
            keys: Keys::default(),
            peaks: Vec::new(),
            budget: EntryBudget(PEAK_ENTRIES_MAX),
            span: None,
            over_time: Histogram::default(),
            numbers: Vec::new(),
        })
    }

    /// Decides the requests of a batch with every algorithm.
    pub fn count(&mut self, batch: &Batch) {
        for replay in &mut self.replays {
            replay.simulator.decide_batch(batch, &mut replay.decisions);
        }
        self.keys.numbers(batch, &mut self.numbers);
        self.peaks.resize_with(self.keys.len(), PeakTracker::default);
        fetch(&self.peaks, &self.numbers, PeakTracker::touch);
        fetch(&self.peaks, &self.numbers, PeakTracker::touch_entries);
        for (at, (line, number)) in batch.lines().iter().zip(&self.numbers).enumerate() {
            let (at_ns, cost) = (line.time.as_nanos(), line.cost);
            let mut counts = [1; ALGORITHMS + 1];
            let allowed = self.replays.each_mut().map(|replay| {
                let decision = &replay.decisions[at];
                replay.tally.count(cost, decision);
                decision.allowed
            });
            counts[1..].copy_from_slice(&allowed.map(u64::from));
            if let Some(number) = number
                && cost > 0
                && allowed.contains(&true)
            {
                self.peaks[*number as usize].add(at_ns, self.window_ns, cost, allowed, &mut self.budget);
            }
            Span::include(&mut self.span, line.time);
            self.over_time.add(at_ns, counts);
        }
    }

    /// Returns the number of requests whose key did not fit into memory, for the algorithm with the most of them.
    pub fn overflowed(&self) -> u64 {
        self.replays.iter().map(|replay| replay.simulator.overflowed()).max().unwrap_or(0)
    }

    /// Returns the report: a table, a chart, and a guide to choosing an algorithm.
    pub fn report(&self, trace: &str, style: TextStyle) -> String {
        let mut out = String::new();
        let all = self.replays[0].tally;
        let window = style::length(self.limit.window());
        let limit = count(u64::from(self.limit.limit()));
        out.push_str(&format!("  limit  {limit} in {window} for each key, by each algorithm\n"));
        out.push_str(&format!("  trace  {}\n\n", described(trace, &all, &self.keys, self.span)));
        self.table(&window, style, &mut out);
        if all.requests > 0 {
            self.chart(style, &mut out);
        }
        guide(style, self.replays.each_ref().map(|replay| &replay.limit), &mut out);
        out
    }

    /// Returns the report as an SVG picture: requests and allowed requests over time, by algorithm.
    pub fn svg(&self, trace: &str) -> String {
        let all = self.replays[0].tally;
        let window = style::length(self.limit.window());
        let limit = count(u64::from(self.limit.limit()));
        let columns = self.over_time.columns(svg::COLUMNS_MAX);
        let rows = self.replays.iter().zip(&CHOICES).enumerate();
        svg::draw(&Picture {
            title: "Five algorithms, one limit, the same requests".to_owned(),
            subtitle: vec![format!(
                "Limit: {limit} in {window} for each key. Trace: {trace}, {}.",
                trace_size(&all, &self.keys, self.span)
            )],
            header: "algorithm",
            limit: self.limit.limit(),
            window,
            rows: rows
                .map(|(at, (replay, choice))| PictureRow {
                    name: choice.name.to_owned(),
                    tally: replay.tally,
                    peak: Some(self.peak_of(at)),
                    plot: Plot::OverTime(columns.pair(0, at + 1)),
                })
                .collect(),
        })
    }

    /// Returns an algorithm's highest peak of all keys.
    fn peak_of(&self, replay: usize) -> Peak {
        self.peaks.iter().map(|tracker| tracker.peak(replay)).fold(Peak::default(), Peak::max)
    }

    fn table(&self, window: &str, style: TextStyle, out: &mut String) {
        let peak_header = format!("peak in any {window}");
        let mut table =
            Table::new(&["algorithm", "requests", "allowed", "denied", "", "max wait", &peak_header]);
        let mut worst = Peak::default();
        for (at, (replay, choice)) in self.replays.iter().zip(&CHOICES).enumerate() {
            let highest = self.peak_of(at);
            worst = worst.max(highest);
            table.row(vec![
                cell(choice.name).ink(choice.ink),
                cell(count(replay.tally.requests)),
                cell(count(replay.tally.allowed)),
                cell(count(replay.tally.denied())),
                cell(share(replay.tally.allowed, replay.tally.requests)),
                cell(style::wait(replay.tally.longest_wait)),
                peak(highest, self.limit.limit()),
            ]);
        }
        table.print(style, SHARE_COLUMN, out);
        let mut notes = peak_notes(worst, &self.limit, window);
        if self.keys.is_full() {
            notes.push(format!("peaks are those of the first {} keys", count(KEYS_MAX as u64)));
        }
        print_notes(&notes, style, out);
    }

    fn chart(&self, style: TextStyle, out: &mut String) {
        let mut bars = vec![Bars { row: 0, label: "requests", ink: Ink::Faint, scale: 0 }];
        bars.extend((1..).zip(&CHOICES).map(|(row, choice)| Bars {
            row,
            label: choice.name,
            ink: choice.ink,
            scale: 1,
        }));
        chart::print(style, "allowed over time", &self.over_time, &bars, out);
    }
}

/// Appends when to choose each algorithm, by its name in the configuration.
fn guide(style: TextStyle, limits: [&Limit; ALGORITHMS], out: &mut String) {
    const NAME_WIDTH: usize = 26;
    out.push_str(&format!("\n  {}\n", style.paint(Ink::Faint, "when to choose which")));
    for (limit, choice) in limits.iter().zip(&CHOICES) {
        let text_width = style.width.saturating_sub(NAME_WIDTH).max(20);
        let mut name = limit.name();
        for line in style::wrapped(choice.when, text_width) {
            let label = format!("{name:<0$}", NAME_WIDTH - 2);
            out.push_str(&format!("  {}{line}\n", style.paint(choice.ink, &label)));
            name = "";
        }
    }
}

/// Why a comparison cannot start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// An algorithm does not support this limit and window.
    #[error("not every algorithm can have this limit, so there is nothing to compare: {0}")]
    Limit(#[from] LimitError),
    /// A limiter cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
}
