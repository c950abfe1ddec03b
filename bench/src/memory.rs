//! The scenarios of the in-memory limiters, and their run.
//!
//! In each scenario every contender stores all keys before timing starts. Then the contenders take turns, round after
//! round, each with an untimed warm-up; the figure is the median of the rounds. Every contender gets the same keys in
//! the same order.

use std::error::Error;
use std::fs;
use std::time::Duration;

use ratekeeper::{EdgePolicy, LeakyMode, Limit, LogPolicy, Rate, WindowAlign};
use serde::Serialize;

use crate::contenders::{self, Budget, Contender, ContenderKind, KeyType};
use crate::goals;
use crate::keys::{self, Key, Popularity};
use crate::report::{BytesPerKey, MemoryFigure, MemoryReport, MemoryScenario};
use crate::resident;
use crate::timing::{Cores, Share};

/// The extent of a run. Many short rounds instead of few long ones, so that other load on the machine affects only
/// some of them.
pub(crate) struct MemorySize {
    pub(crate) quick: bool,
    /// The number of keys that stands for a million.
    million: usize,
    rounds: usize,
    /// Chunks of requests that a worker times per round: if all keys fit the caches, and if they do not.
    chunks_cached: usize,
    chunks_uncached: usize,
}

/// Requests per chunk: whole batches of `check_many`, and few enough to stay cached.
const CHUNK: usize = 256;

impl MemorySize {
    pub(crate) const FULL: MemorySize =
        MemorySize { quick: false, million: 1_000_000, rounds: 25, chunks_cached: 400, chunks_uncached: 256 };
    pub(crate) const QUICK: MemorySize =
        MemorySize { quick: true, million: 10_000, rounds: 3, chunks_cached: 8, chunks_uncached: 8 };
}

/// The keys of a scenario and their popularity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KeySet {
    Hot,
    Thousand,
    Uniform,
    Zipf,
}

impl KeySet {
    pub(crate) fn name(self) -> &'static str {
        match self {
            KeySet::Hot => "one hot key",
            KeySet::Thousand => "1 thousand",
            KeySet::Uniform => "1 million uniform",
            KeySet::Zipf => "1 million Zipf",
        }
    }
}

/// The decision of every request of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// Allowed, and written to the key's state.
    Allowed,
    /// Denied, because the key's budget is exhausted.
    Denied,
}

impl Outcome {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Outcome::Allowed => "allowed",
            Outcome::Denied => "denied",
        }
    }
}

/// Key sets that share one table.
struct Table {
    keys: usize,
    sets: &'static [KeySet],
    /// Chunks in a worker's stream, and chunks that it times per round.
    stream_chunks: usize,
    visit_chunks: usize,
}

impl Table {
    fn hot(size: &MemorySize) -> Table {
        Table { keys: 1, sets: &[KeySet::Hot], stream_chunks: 1, visit_chunks: size.chunks_cached }
    }

    fn thousand(size: &MemorySize) -> Table {
        Table { keys: 1000, sets: &[KeySet::Thousand], stream_chunks: 32, visit_chunks: size.chunks_cached }
    }

    fn million(size: &MemorySize, sets: &'static [KeySet]) -> Table {
        let visit_chunks = size.chunks_uncached;
        Table { keys: size.million, sets, stream_chunks: visit_chunks * 16, visit_chunks }
    }
}

const WORKERS: usize = 2;

/// Contenders by how they store keys; Ratekeeper's storage does not depend on the call.
const STORES: [(&str, ContenderKind); 3] = [
    (RATEKEEPER, ContenderKind::Check),
    ("governor", ContenderKind::Governor),
    ("throttlecrab", ContenderKind::Throttlecrab),
];
pub(crate) const RATEKEEPER: &str = "ratekeeper";

/// Runs all scenarios. Progress goes to stderr.
pub(crate) fn run(size: &MemorySize) -> Result<MemoryReport, Box<dyn Error>> {
    let run = Run { size, cores: Cores::for_workers(WORKERS)? };
    let load_average = fs::read_to_string("/proc/loadavg")?.split(' ').next().unwrap_or_default().to_owned();

    let mut contenders = Vec::new();
    for outcome in [Outcome::Allowed, Outcome::Denied] {
        run.all_tables::<u64>(outcome, &mut contenders)?;
        run.all_tables::<String>(outcome, &mut contenders)?;
    }
    let mut algorithms = Vec::new();
    for table in [Table::hot(size), Table::million(size, &[KeySet::Uniform])] {
        let limiters = our_algorithms(&table)?;
        run.table::<String>(&table, Outcome::Allowed, &limiters, &mut algorithms)?;
    }
    let mut bytes_per_key = Vec::new();
    for (name, kind) in STORES {
        eprintln!("bytes per key: {name}");
        bytes_per_key.push(BytesPerKey::new(name, resident::measure(kind, size.million)?, size.million));
    }
    let goals = goals::check(&contenders, &algorithms, &bytes_per_key);
    Ok(MemoryReport {
        quick: size.quick,
        rounds: size.rounds,
        load_average,
        contenders,
        algorithms,
        bytes_per_key,
        goals,
    })
}

struct Run<'a> {
    size: &'a MemorySize,
    cores: Cores,
}

/// A contender and the name of its column.
type NamedContender<K> = (&'static str, Box<dyn Contender<K>>);

impl Run<'_> {
    fn all_tables<K: Key + KeyType>(
        &self,
        outcome: Outcome,
        scenarios: &mut Vec<MemoryScenario>,
    ) -> Result<(), Box<dyn Error>> {
        let size = self.size;
        let million = Table::million(size, &[KeySet::Uniform, KeySet::Zipf]);
        for table in [Table::hot(size), Table::thousand(size), million] {
            let budget = match outcome {
                Outcome::Allowed => Budget::AMPLE,
                Outcome::Denied => Budget::SCANT,
            };
            let contenders = K::CONTENDERS
                .iter()
                .map(|&kind| Ok((kind.name(), K::contender(kind, budget, table.keys)?)))
                .collect::<Result<Vec<NamedContender<K>>, Box<dyn Error>>>()?;
            self.table(&table, outcome, &contenders, scenarios)?;
        }
        Ok(())
    }

    /// Runs every scenario of one table.
    fn table<K: Key + KeyType>(
        &self,
        table: &Table,
        outcome: Outcome,
        contenders: &[NamedContender<K>],
        scenarios: &mut Vec<MemoryScenario>,
    ) -> Result<(), Box<dyn Error>> {
        let population = keys::population::<K>(table.keys);
        for (_, contender) in contenders {
            let passes = if outcome == Outcome::Denied { Budget::SPENT_BY } else { 1 };
            for _ in 0..passes {
                contender.decide_all(&population);
            }
        }
        drop(population);
        for &set in table.sets {
            let popularity = if set == KeySet::Zipf { Popularity::Zipf } else { Popularity::Uniform };
            let streams: Vec<Vec<K>> = (1..=WORKERS as u64)
                .map(|seed| {
                    let requests = table.stream_chunks * CHUNK;
                    keys::stream(&keys::requests(&popularity, table.keys, requests, seed))
                })
                .collect();
            for threads in 1..=WORKERS {
                let mut scenario =
                    MemoryScenario { keys: set, key_type: K::NAME, threads, outcome, figures: Vec::new() };
                eprintln!("{scenario}");
                scenario.figures = self.rounds(table, outcome, contenders, &streams[..threads])?;
                scenarios.push(scenario);
            }
        }
        Ok(())
    }

    /// Runs one scenario: the contenders take turns.
    fn rounds<K: Key>(
        &self,
        table: &Table,
        outcome: Outcome,
        contenders: &[NamedContender<K>],
        streams: &[Vec<K>],
    ) -> Result<Vec<MemoryFigure>, Box<dyn Error>> {
        let mut figures: Vec<MemoryFigure> =
            contenders.iter().map(|(name, _)| MemoryFigure { name, ns_per_decision: Vec::new() }).collect();
        for round in 0..self.size.rounds {
            let shares: Vec<Share<'_, K>> =
                streams.iter().map(|stream| share(stream, table, round)).collect();
            // Rotate the order, so that the same contender does not always follow the one that uses the most cache.
            for turn in 0..contenders.len() {
                let index = (turn + round) % contenders.len();
                let (name, contender) = &contenders[index];
                let visit = self.cores.visit(contender.as_ref(), &shares);
                let expected = match outcome {
                    Outcome::Allowed => visit.decisions,
                    Outcome::Denied => 0,
                };
                if visit.allowed != expected {
                    let (allowed, decisions) = (visit.allowed, visit.decisions);
                    return Err(format!("{name} allowed {allowed} of {decisions}, not {expected}").into());
                }
                figures[index].ns_per_decision.push(visit.ns_per_decision);
            }
        }
        Ok(figures)
    }
}

/// Returns a worker's requests in one round: the next part of its stream, which wraps around.
fn share<'a, K>(stream: &'a [K], table: &Table, round: usize) -> Share<'a, K> {
    let warm_up = table.visit_chunks / 4;
    let mut chunks =
        stream.chunks(CHUNK).cycle().skip(round * (warm_up + table.visit_chunks) % table.stream_chunks);
    Share {
        warm_up: chunks.by_ref().take(warm_up).collect(),
        timed: chunks.take(table.visit_chunks).collect(),
    }
}

/// The column of the token bucket, the reference for the other algorithms.
pub(crate) const TOKEN_BUCKET: &str = "token_bucket";

/// Creates Ratekeeper's limiter with each algorithm, with budgets that are never exhausted.
fn our_algorithms(table: &Table) -> Result<Vec<NamedContender<String>>, Box<dyn Error>> {
    let Budget { capacity, period } = Budget::AMPLE;
    let month = Duration::from_secs(30 * 86_400);
    // A log stores every request, so a hot key cannot have an ample budget for long: a window of one millisecond
    // keeps its log at some ten thousand requests. Each of a million keys stores only its few requests of this run.
    let (log_limit, log_window) = if table.keys == 1 {
        (10_000_000, Duration::from_millis(1))
    } else {
        (1000, Duration::from_secs(600))
    };
    let limits = [
        Budget::AMPLE.token_bucket()?,
        Limit::leaky_bucket(capacity, Rate::new(1, period)?, LeakyMode::Police)?,
        Limit::fixed_window(capacity, month, WindowAlign::Clock)?,
        Limit::sliding_window_log(log_limit, log_window, LogPolicy::Admitted)?,
        Limit::sliding_window_counter(capacity, month, 1, EdgePolicy::Weigh)?,
    ];
    limits
        .into_iter()
        .map(|limit| {
            let name = limit.name();
            let contender: Box<dyn Contender<String>> = Box::new(contenders::ratekeeper(limit, table.keys)?);
            Ok((name, contender))
        })
        .collect()
}
