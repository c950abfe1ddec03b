//! The goals of the in-memory limiter, and whether the figures meet them.

use std::fmt;

use serde::Serialize;

use crate::contenders::ContenderKind;
use crate::memory::{KeySet, Outcome, RATEKEEPER, TOKEN_BUCKET};
use crate::report::{BytesPerKey, MemoryScenario, Ratio};

/// A goal and its figure.
#[derive(Serialize)]
pub(crate) struct Goal {
    promise: String,
    figure: String,
    met: bool,
}

impl Goal {
    pub(crate) fn new(promise: String, figure: String, met: bool) -> Goal {
        Goal { promise, figure, met }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Goal { promise, figure, met } = self;
        write!(f, "{}  {promise}: {figure}", if *met { "met    " } else { "NOT met" })
    }
}

/// At least `times` as fast as governor, in every matching scenario.
struct SpeedGoal {
    times: f64,
    ours: ContenderKind,
    keys: KeySet,
    key_types: &'static [&'static str],
    threads: usize,
    outcome: Outcome,
}

const TEXT: &[&str] = &["String"];
const BOTH: &[&str] = &["String", "u64"];

#[rustfmt::skip]
const FASTER: [SpeedGoal; 6] = [
    SpeedGoal { times: 2.0,  ours: ContenderKind::Check,     keys: KeySet::Hot,     key_types: BOTH, threads: 1, outcome: Outcome::Allowed },
    SpeedGoal { times: 2.0,  ours: ContenderKind::Check,     keys: KeySet::Hot,     key_types: BOTH, threads: 2, outcome: Outcome::Allowed },
    SpeedGoal { times: 2.0,  ours: ContenderKind::Check,     keys: KeySet::Hot,     key_types: BOTH, threads: 2, outcome: Outcome::Denied },
    SpeedGoal { times: 4.0,  ours: ContenderKind::Check,     keys: KeySet::Uniform, key_types: TEXT, threads: 2, outcome: Outcome::Allowed },
    SpeedGoal { times: 2.0,  ours: ContenderKind::Check,     keys: KeySet::Zipf,    key_types: TEXT, threads: 2, outcome: Outcome::Allowed },
    SpeedGoal { times: 12.0, ours: ContenderKind::CheckMany, keys: KeySet::Uniform, key_types: TEXT, threads: 2, outcome: Outcome::Allowed },
];

const BYTES_PER_KEY_MAX: f64 = 34.0;

/// An algorithm, and the maximum ratio of its time to the token bucket's.
const SLOWER: [(&str, f64); 4] = [
    ("leaky_bucket", 2.0),
    ("fixed_window", 2.0),
    ("sliding_window_log", 3.5),
    ("sliding_window_counter", 1.8),
];

pub(crate) fn check(
    contenders: &[MemoryScenario],
    algorithms: &[MemoryScenario],
    bytes: &[BytesPerKey],
) -> Vec<Goal> {
    let mut goals: Vec<Goal> = FASTER.iter().map(|goal| goal.check(contenders)).collect();
    let ours = bytes.iter().find(|row| row.name == RATEKEEPER).map_or(f64::NAN, |row| row.bytes);
    goals.push(Goal {
        promise: format!("<= {BYTES_PER_KEY_MAX} B a key"),
        figure: format!("{ours:.1} B"),
        met: ours <= BYTES_PER_KEY_MAX,
    });
    goals.extend(SLOWER.iter().map(|&(name, times)| slower(name, times, algorithms)));
    goals
}

impl SpeedGoal {
    fn check(&self, scenarios: &[MemoryScenario]) -> Goal {
        let SpeedGoal { times, ours, keys, key_types, threads, outcome } = self;
        let call = ours.name();
        let figures: Vec<(&str, Ratio)> = scenarios
            .iter()
            .filter(|it| (it.keys, it.threads, it.outcome) == (*keys, *threads, *outcome))
            .filter(|it| key_types.contains(&it.key_type))
            .filter_map(|it| Some((it.key_type, it.ratio(ContenderKind::Governor.name(), call)?)))
            .collect();
        let text = figures.iter().map(|(key, ratio)| format!("{key} {ratio}")).collect::<Vec<_>>().join(", ");
        let s = if *threads == 1 { "" } else { "s" };
        let (keys, outcome) = (keys.name(), outcome.name());
        Goal {
            promise: format!(">= {times}x governor, {call}, {keys}, {threads} thread{s}, {outcome}"),
            figure: text,
            met: figures.len() == key_types.len() && figures.iter().all(|(_, ratio)| ratio.median >= *times),
        }
    }
}

/// Compares an algorithm with the token bucket in its worst scenario.
fn slower(name: &str, times: f64, scenarios: &[MemoryScenario]) -> Goal {
    let worst = scenarios
        .iter()
        .filter_map(|it| Some((it, it.ratio(name, TOKEN_BUCKET)?)))
        .max_by(|(_, a), (_, b)| a.median.total_cmp(&b.median));
    Goal {
        promise: format!("<= {times}x the token bucket, {name}"),
        figure: worst.as_ref().map_or_else(String::new, |(scenario, ratio)| {
            let s = if scenario.threads == 1 { "" } else { "s" };
            format!("{ratio} at worst, {}, {} thread{s}", scenario.keys.name(), scenario.threads)
        }),
        met: worst.is_some_and(|(_, ratio)| ratio.median <= times),
    }
}
