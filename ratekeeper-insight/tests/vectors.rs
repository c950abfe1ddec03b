//! Every worked example of `vectors/`, through every implementation of the limits, byte for byte.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ratekeeper::Limiter;
use ratekeeper::redis::Settings;
use ratekeeper_core::{Algorithm, Decision, Limit};
use ratekeeper_insight::{Jsonl, Request, Simulator, Trace, replay, replay_batches};
use serde::Deserialize;
use testbed::RedisServer;

/// Decides the requests of one limit, one after the other.
type Decide = Box<dyn FnMut(&Request<'_>) -> Decision>;

/// Creates an implementation without any keys.
type Begin = fn(Limit) -> Decide;

/// The implementations. A new store adds a line.
const STORES: &[(&str, Begin)] = &[("core", core), ("memory", memory), ("redis", redis)];

fn core(limit: Limit) -> Decide {
    fn states<A: Algorithm + 'static>(algorithm: A) -> Decide
    where
        A::State: 'static,
    {
        let mut states: HashMap<String, A::State> = HashMap::new();
        Box::new(move |request| {
            let state = states.entry(request.key.to_owned()).or_insert_with(|| algorithm.fresh());
            algorithm.decide(state, request.time, request.cost)
        })
    }
    match limit {
        Limit::Bucket(it) => states(it),
        Limit::SteppedBucket(it) => states(it),
        Limit::FixedWindow(it) => states(it),
        Limit::Log(it) => states(it),
        Limit::Counter(it) => states(it),
    }
}

fn memory(limit: Limit) -> Decide {
    let simulator = Simulator::new(limit, 1_000).unwrap();
    Box::new(move |request| simulator.decide(request))
}

/// A real server, with the times of the examples.
fn redis(limit: Limit) -> Decide {
    static SERVER: LazyLock<RedisServer> = LazyLock::new(|| RedisServer::start().unwrap());
    static BEGUN: AtomicU32 = AtomicU32::new(0);
    let namespace = BEGUN.fetch_add(1, Ordering::Relaxed).to_string();
    let settings = Settings::new(&SERVER.url()).namespace(&namespace).deadline(Duration::from_secs(10));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limiter = runtime.block_on(async { Limiter::builder(limit).redis(&settings) }).unwrap();
    Box::new(move |request| {
        let decided = runtime.block_on(limiter.check_at(request.time, request.key, request.cost));
        decided.unwrap().decision()
    })
}

/// The first line of an example.
#[derive(Deserialize)]
struct Head {
    why: String,
    limit: String,
}

/// The request of a line; the rest of the line is the expected decision.
#[derive(Deserialize)]
struct VectorRequest {
    time: String,
    key: String,
    cost: u32,
}

struct Example {
    name: String,
    limit: Limit,
    trace: String,
    answers: String,
}

fn examples() -> Vec<Example> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vectors");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    paths.sort();
    paths.iter().map(|path| example(path)).collect()
}

fn example(path: &Path) -> Example {
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    let text = std::fs::read_to_string(path).unwrap();
    let (head, answers) = text.split_once('\n').unwrap_or_else(|| panic!("{name} has one line"));
    let head: Head = serde_json::from_str(head).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(!head.why.is_empty(), "{name} does not say why it is here");
    let mut trace = "time,key,cost\n".to_owned();
    for line in answers.lines() {
        let request: VectorRequest =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{name}: {error}: {line}"));
        trace += &format!("{},\"{}\",{}\n", request.time, request.key.replace('"', "\"\""), request.cost);
    }
    let limit = ratekeeper_config::parse_limit(&head.limit).unwrap_or_else(|error| panic!("{name}: {error}"));
    Example { name, limit, trace, answers: answers.to_owned() }
}

fn simulate(trace: &str, mut decide: Decide) -> String {
    let mut trace = Trace::open("example", trace.as_bytes()).unwrap();
    let mut out = Vec::new();
    let mut lines = Jsonl::new(&mut out);
    replay(&mut trace, |request| decide(request), |request, decision| lines.write(request, decision))
        .unwrap();
    lines.finish().unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn every_store_matches_every_example() {
    let mut wrong = Vec::new();
    for Example { name, limit, trace, answers } in examples() {
        for (store, decide) in STORES {
            let answered = simulate(&trace, decide(limit.clone()));
            let differs =
                answered.lines().zip(answers.lines()).enumerate().find(|(_, (got, want))| got != want);
            match differs {
                // The first line of an example is its limit.
                Some((at, (got, want))) => {
                    wrong.push(format!("{name}:{} {store}\n  want {want}\n   got {got}", at + 2));
                }
                None if answered != answers => {
                    wrong.push(format!("{name} {store}: not the same number of lines, or not ended alike"));
                }
                None => {}
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The simulator reads ahead in batches, which must not change a decision.
#[test]
fn batches_are_decided_like_single_requests() {
    for Example { name, limit, trace, answers } in examples() {
        let simulator = Simulator::new(limit, 1_000).unwrap();
        let mut trace = Trace::open("example", trace.as_bytes()).unwrap();
        let (mut out, mut decisions) = (Vec::new(), Vec::new());
        let mut lines = Jsonl::new(&mut out);
        replay_batches(&mut trace, |batch| {
            simulator.decide_batch(batch, &mut decisions);
            batch
                .requests()
                .zip(&decisions)
                .try_for_each(|(request, decision)| lines.write(&request, decision))
        })
        .unwrap();
        lines.finish().unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), answers, "{name}");
    }
}

#[test]
fn every_algorithm_has_examples() {
    let mut names: Vec<&str> = examples().iter().map(|example| example.limit.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(
        names,
        ["fixed_window", "leaky_bucket", "sliding_window_counter", "sliding_window_log", "token_bucket"]
    );
}

/// An instant has one text, so that comparing bytes compares times.
#[test]
fn times_have_no_trailing_zeros() {
    for Example { name, trace, .. } in examples() {
        let mut trace = Trace::open(&name, trace.as_bytes()).unwrap();
        while let Some(Request { time_text, .. }) = trace.next_request().unwrap() {
            assert!(!(time_text.contains('.') && time_text.ends_with('0')), "{name}: {time_text}");
        }
    }
}
