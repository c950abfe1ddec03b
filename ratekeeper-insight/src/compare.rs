//! Compares the five algorithms on the same trace, at comparable settings.

use std::fmt;

use ratekeeper::{
    BuildError, Decision, EdgePolicy, LeakyMode, Limit, LimitError, LogPolicy, Rate, RefillStyle, WindowAlign,
};

use crate::chart::{self, Bars};
use crate::histogram::Histogram;
use crate::look::{self, Ink, Look, count};
use crate::peak::{Most, Peak, Room};
use crate::summary::{
    PEAK_ENTRIES_MAX, SHARE_COLUMN, described, peak, peak_notes, print_notes, share, window_ns,
};
use crate::table::{Table, cell};
use crate::tally::{KEYS_MAX, Keys, Span, Tally, fetch};
use crate::{Batch, Simulator};

/// Runs a trace through the five algorithms in parallel.
#[derive(Debug)]
pub struct Comparison {
    limit: Limit,
    window_ns: u64,
    lanes: [Lane; ALGORITHMS],
    keys: Keys,
    /// For each key, the peak of the units that each algorithm admitted.
    peaks: Vec<Peak<ALGORITHMS>>,
    room: Room,
    span: Option<Span>,
    /// All requests, then those that each algorithm admitted.
    over_time: Histogram<{ ALGORITHMS + 1 }>,
    /// Key numbers of the current batch.
    numbers: Vec<Option<u32>>,
}

/// One algorithm's limiter and its results.
#[derive(Debug)]
struct Lane {
    limit: Limit,
    simulator: Simulator,
    tally: Tally,
    /// Decisions of the current batch.
    decisions: Vec<Decision>,
}

const ALGORITHMS: usize = 5;

/// An algorithm's label, colour and when to choose it, as the report prints them.
struct Choice {
    name: &'static str,
    ink: Ink,
    when: &'static str,
}

const CHOICES: [Choice; ALGORITHMS] = [
    Choice {
        name: "token bucket",
        ink: Ink::Green,
        when: "Bursts are welcome: an idle client saves up a full bucket, may spend it at once, and then gets the \
               steady rate.",
    },
    Choice {
        name: "leaky bucket",
        ink: Ink::Cyan,
        when: "What stands behind needs steady input. With `mode: shape` it also spaces out what it lets in, so \
               that the outflow is never faster than the leak.",
    },
    Choice {
        name: "fixed window",
        ink: Ink::Yellow,
        when: "The simplest to explain and to keep. But around the edge of two windows, up to twice the limit gets \
               through.",
    },
    Choice {
        name: "sliding log",
        ink: Ink::Magenta,
        when: "The limit must hold exactly, in every window. It remembers every request that passed, 8 bytes each.",
    },
    Choice {
        name: "sliding counter",
        ink: Ink::Blue,
        when: "Not sure? Begin here. Two numbers a key, and close to the log where requests come evenly; with \
               `edge: keep` never above the limit.",
    },
];

/// Returns the five algorithms with the same limit and window. A bucket's capacity is the limit, refilled once per
/// window.
fn comparable(limit: &Limit) -> Result<[Limit; ALGORITHMS], LimitError> {
    let (most, window) = (limit.limit(), limit.window());
    let rate = Rate::new(u64::from(most), window)?;
    Ok([
        Limit::token_bucket(most, rate, RefillStyle::Smooth)?,
        Limit::leaky_bucket(most, rate, LeakyMode::Police)?,
        Limit::fixed_window(most, window, WindowAlign::Clock)?,
        Limit::sliding_window_log(most, window, LogPolicy::Admitted)?,
        Limit::sliding_window_counter(most, window, 1, EdgePolicy::Weigh)?,
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
        let mut lanes = Vec::with_capacity(ALGORITHMS);
        for limit in comparable(limit).map_err(CompareError::Limit)? {
            lanes.push(Lane {
                simulator: Simulator::new(limit.clone(), max_keys).map_err(CompareError::Build)?,
                limit,
                tally: Tally::default(),
                decisions: Vec::new(),
            });
        }
        Ok(Comparison {
            limit: limit.clone(),
            window_ns: window_ns(limit),
            lanes: lanes.try_into().map_err(|_| CompareError::Build(BuildError::NoKeys))?,
            keys: Keys::default(),
            peaks: Vec::new(),
            room: Room(PEAK_ENTRIES_MAX),
            span: None,
            over_time: Histogram::default(),
            numbers: Vec::new(),
        })
    }

    /// Decides the requests of a batch with every algorithm.
    pub fn count(&mut self, batch: &Batch) {
        for lane in &mut self.lanes {
            lane.simulator.decide_batch(batch, &mut lane.decisions);
        }
        self.keys.numbers(batch, &mut self.numbers);
        self.peaks.resize_with(self.keys.len(), Peak::default);
        fetch(&self.peaks, &self.numbers, Peak::touch);
        fetch(&self.peaks, &self.numbers, Peak::touch_entries);
        for (at, (line, number)) in batch.lines().iter().zip(&self.numbers).enumerate() {
            let (at_ns, cost) = (line.time.as_nanos(), line.cost);
            let mut counts = [1; ALGORITHMS + 1];
            let admitted = self.lanes.each_mut().map(|lane| {
                let decision = &lane.decisions[at];
                lane.tally.count(cost, decision);
                decision.allowed
            });
            counts[1..].copy_from_slice(&admitted.map(u64::from));
            if let Some(number) = number
                && cost > 0
                && admitted.contains(&true)
            {
                self.peaks[*number as usize].admit(at_ns, self.window_ns, cost, admitted, &mut self.room);
            }
            Span::include(&mut self.span, line.time);
            self.over_time.add(at_ns, counts);
        }
    }

    /// Returns the number of requests whose key did not fit into memory, for the algorithm with the most of them.
    pub fn overflowed(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.simulator.overflowed()).max().unwrap_or(0)
    }

    /// Returns the report: a table, a chart, and a guide to choosing an algorithm.
    pub fn report(&self, trace: &str, look: Look) -> String {
        let mut out = String::new();
        let all = self.lanes[0].tally;
        let window = look::length(self.limit.window());
        let limit = count(u64::from(self.limit.limit()));
        out.push_str(&format!("  limit  {limit} in {window} for each key, by each algorithm\n"));
        out.push_str(&format!("  trace  {}\n\n", described(trace, &all, &self.keys, self.span)));
        self.table(&window, look, &mut out);
        if all.asked > 0 {
            self.chart(look, &mut out);
        }
        guide(look, self.lanes.each_ref().map(|lane| &lane.limit), &mut out);
        out
    }

    fn table(&self, window: &str, look: Look, out: &mut String) {
        let peak_header = format!("peak in any {window}");
        let mut table =
            Table::new(&["algorithm", "asked", "admitted", "denied", "", "worst wait", &peak_header]);
        let mut worst = Most::default();
        for (at, (lane, choice)) in self.lanes.iter().zip(&CHOICES).enumerate() {
            let most = self.peaks.iter().map(|peak| peak.most(at)).fold(Most::default(), Most::max);
            worst = worst.max(most);
            table.row(vec![
                cell(choice.name).ink(choice.ink),
                cell(count(lane.tally.asked)),
                cell(count(lane.tally.admitted)),
                cell(count(lane.tally.denied())),
                cell(share(lane.tally.admitted, lane.tally.asked)),
                cell(look::wait(lane.tally.worst_wait)),
                peak(most, self.limit.limit()),
            ]);
        }
        table.print(look, SHARE_COLUMN, out);
        let mut notes = peak_notes(worst, &self.limit, window);
        if self.keys.is_full() {
            notes.push(format!("peaks are those of the first {} keys", count(KEYS_MAX as u64)));
        }
        print_notes(&notes, look, out);
    }

    fn chart(&self, look: Look, out: &mut String) {
        let mut bars = vec![Bars { row: 0, label: "asked", ink: Ink::Faint, scale: 0 }];
        bars.extend((1..).zip(&CHOICES).map(|(row, choice)| Bars {
            row,
            label: choice.name,
            ink: choice.ink,
            scale: 1,
        }));
        chart::print(look, "admitted over time", &self.over_time, &bars, out);
    }
}

/// Appends when to choose each algorithm, by its name in the configuration.
fn guide(look: Look, limits: [&Limit; ALGORITHMS], out: &mut String) {
    const NAME_WIDTH: usize = 26;
    out.push_str(&format!("\n  {}\n", look.paint(Ink::Faint, "which one?")));
    for (limit, choice) in limits.iter().zip(&CHOICES) {
        let text_width = look.width.saturating_sub(NAME_WIDTH).max(20);
        let mut name = limit.name();
        for line in look::wrapped(choice.when, text_width) {
            let label = format!("{name:<0$}", NAME_WIDTH - 2);
            out.push_str(&format!("  {}{line}\n", look.paint(choice.ink, &label)));
            name = "";
        }
    }
}

/// Why a comparison cannot start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompareError {
    /// An algorithm does not support this limit and window.
    Limit(LimitError),
    /// A limiter cannot be built.
    Build(BuildError),
}

impl fmt::Display for CompareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompareError::Limit(error) => {
                write!(f, "not every algorithm can have this limit, so there is nothing to compare: {error}")
            }
            CompareError::Build(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CompareError {}
