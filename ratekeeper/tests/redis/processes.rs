//! Goal: four processes with 64 connections share a limit, and exactly the limit is allowed.
//!
//! Each process runs this test binary. The processes prepare a round, report that they are ready, and start it
//! together.

use std::sync::Arc;
use std::time::Duration;

use ratekeeper::redis::{Redis, Settings};
use ratekeeper::{EdgePolicy, LeakyMode, Limit, Limiter, LogPolicy, Rate, RefillStyle, WindowAlign};
use testbed::{RedisServer, ordinary_or_long};

use crate::child::{self, Worker};
use crate::redis::{PATIENT, all_expire, limiter, sum};

pub(crate) const PROCESSES: usize = 4;
const CONNECTIONS: usize = 16;
/// Concurrent requests of a process: several per connection, so that they share calls.
const TASKS: usize = 128;

const LIMIT: u32 = 1_000;
const OTHER_LIMIT: u32 = 5_000;
/// More than the number of requests.
const LOG_LIMIT: u32 = 1_000_000;

/// Requests of all processes in each round.
fn requests() -> usize {
    ordinary_or_long(20_000, 100_000)
}

/// One of each algorithm, too slow to refill during the test.
pub(crate) fn every_algorithm(n: u32) -> [Limit; 5] {
    let window = Duration::from_secs(300 * 86_400);
    let rate = Rate::new(u64::from(n), window).unwrap();
    [
        Limit::token_bucket(n, rate, RefillStyle::Smooth),
        Limit::leaky_bucket(n, rate, LeakyMode::Police),
        Limit::fixed_window(n, window, WindowAlign::FirstRequest),
        Limit::sliding_window_log(n, window, LogPolicy::Admitted),
        Limit::sliding_window_counter(n, window, 1, EdgePolicy::Weigh),
    ]
    .map(Result::unwrap)
}

/// The limits of each round, the same in every process. First each algorithm alone, where a denied process answers
/// from its denial cache. Then each as the first of three limits, which denies most requests, with another algorithm
/// as the second and a log of all requests as the third, so that Redis must decide every request.
fn rounds() -> Vec<Vec<Limit>> {
    let alone = every_algorithm(LIMIT).map(|limit| vec![limit]);
    let mut others = every_algorithm(OTHER_LIMIT);
    others.rotate_left(2);
    let log =
        Limit::sliding_window_log(LOG_LIMIT, Duration::from_secs(300 * 86_400), LogPolicy::All).unwrap();
    let several = every_algorithm(LIMIT).into_iter().zip(others);
    let several = several.map(|(first, second)| vec![first, second, log.clone()]);
    alone.into_iter().chain(several).collect()
}

pub(crate) fn connect(url: &str, round: usize, limits: &[Limit], connections: usize) -> Limiter<Redis> {
    let settings = Settings::new(url).namespace(&round.to_string()).deadline(PATIENT);
    limiter(limits, &settings.connections(connections))
}

#[tokio::test]
async fn four_processes_admit_exactly_the_limit() {
    let server = RedisServer::start().unwrap();
    let mut workers: Vec<Worker> =
        (0..PROCESSES).map(|_| Worker::start("redis::processes::one_of_four", &server.url())).collect();
    for (round, limits) in rounds().iter().enumerate() {
        ready(&mut workers);
        let clients = server.cli(&["CLIENT", "LIST", "TYPE", "normal"]).unwrap();
        let clients = clients.lines().filter(|line| !line.contains("cmd=client")).count();
        assert!(clients >= PROCESSES * CONNECTIONS, "only {clients} connections");
        let admitted = begin(&mut workers);
        let names: Vec<_> = limits.iter().map(Limit::name).collect();
        println!("{names:?}: {admitted:?} admitted");
        assert_eq!(admitted.iter().sum::<u32>(), LIMIT, "{limits:?}: {admitted:?}");

        // A denied request is not charged to the limit that would allow it, and the log has counted all requests.
        let left = connect(&server.url(), round, limits, 1).peek("key").await;
        let left: Vec<u32> = left.decisions().iter().map(|decision| decision.remaining).collect();
        assert_eq!(left, [0, OTHER_LIMIT - LIMIT, LOG_LIMIT - requests() as u32][..left.len()], "{limits:?}");
    }
    all_expire(&server);
}

fn ready(workers: &mut [Worker]) {
    for worker in workers {
        assert_eq!(worker.read_line(), "ready");
    }
}

/// Starts a round in all workers and returns how many requests each allowed.
fn begin(workers: &mut [Worker]) -> Vec<u32> {
    workers.iter_mut().for_each(Worker::go);
    workers.iter_mut().map(|worker| worker.read_line().parse().unwrap()).collect()
}

/// A complete round.
pub(crate) fn round(workers: &mut [Worker]) -> Vec<u32> {
    ready(workers);
    begin(workers)
}

/// The worker process. Does nothing when run as an ordinary test.
#[test]
fn one_of_four() {
    work(&rounds(), CONNECTIONS, requests() / PROCESSES);
}

/// The work of a worker process: `requests` requests in each round.
pub(crate) fn work(rounds: &[Vec<Limit>], connections: usize, requests: usize) {
    let Some(url) = child::task() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for (round, limits) in rounds.iter().enumerate() {
        let limiter = {
            let _inside = runtime.enter();
            Arc::new(connect(&url, round, limits, connections))
        };
        // Connections are used in turn, so this opens all of them.
        for _ in 0..connections {
            assert!(!runtime.block_on(limiter.peek("nobody")).is_degraded());
        }
        child::say("ready");
        child::wait();
        let admitted = runtime.block_on(run(&limiter, requests));
        child::say(&admitted.to_string());
    }
}

/// Makes `requests` requests and returns how many were allowed.
async fn run(limiter: &Arc<Limiter<Redis>>, requests: usize) -> u32 {
    let tasks = (0..TASKS).map(|task| {
        let limiter = limiter.clone();
        // The first tasks make one more request if the number is not a multiple of TASKS.
        let requests = requests / TASKS + usize::from(task < requests % TASKS);
        tokio::spawn(async move {
            let mut admitted = 0;
            for _ in 0..requests {
                let verdict = limiter.check("key").await;
                assert!(!verdict.is_degraded());
                admitted += u32::from(verdict.allowed());
            }
            admitted
        })
    });
    sum(tasks).await
}
