//! Goal: four processes with 64 connections share a limit, and not one request too many or too few passes.
//!
//! Each process is this program once more. They prepare a round, say so, and begin it together.

use std::sync::Arc;
use std::time::Duration;

use testbed::{RedisServer, ordinary_or_long};
use tollgate::redis::{Redis, Settings};
use tollgate::{Align, Count, Edge, Limit, Limiter, Mode, Rate, Style};

use crate::child::{self, Worker};
use crate::redis::{PATIENT, all_expire, limiter};

pub(crate) const PROCESSES: usize = 4;
const CONNECTIONS: usize = 16;
/// Requests of a process at a time: several for each connection, so that they share calls.
const TASKS: usize = 128;

const LIMIT: u32 = 1_000;
const OTHER_LIMIT: u32 = 5_000;
/// More than there are requests.
const LOG_LIMIT: u32 = 1_000_000;

/// Of all processes, in each round.
fn requests() -> usize {
    ordinary_or_long(20_000, 100_000)
}

/// One of each algorithm, so slow that nothing comes back during the test.
pub(crate) fn every_algorithm(n: u32) -> [Limit; 5] {
    let window = Duration::from_secs(300 * 86_400);
    let rate = Rate::new(u64::from(n), window).unwrap();
    [
        Limit::token_bucket(n, rate, Style::Smooth),
        Limit::leaky_bucket(n, rate, Mode::Police),
        Limit::fixed_window(n, window, Align::FirstRequest),
        Limit::sliding_window_log(n, window, Count::Admitted),
        Limit::sliding_window_counter(n, window, 1, Edge::Weigh),
    ]
    .map(Result::unwrap)
}

/// The limits of each round, the same in every process. First each algorithm alone: once a process has been denied, it
/// knows that for a while, and asks no more. Then each as the first of two limits, which denies most, with another as
/// the second, and a log that counts every request, also the denied: so that each must be asked.
fn rounds() -> Vec<Vec<Limit>> {
    let alone = every_algorithm(LIMIT).map(|limit| vec![limit]);
    let mut others = every_algorithm(OTHER_LIMIT);
    others.rotate_left(2);
    let log = Limit::sliding_window_log(LOG_LIMIT, Duration::from_secs(300 * 86_400), Count::All).unwrap();
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

        // A denied request took nothing from the limit that would have let it pass, and the log has counted them all.
        let left = connect(&server.url(), round, limits, 1).peek("key").await;
        let left: Vec<u32> = left.decisions().iter().map(|decision| decision.remaining).collect();
        assert_eq!(left, [0, OTHER_LIMIT - LIMIT, LOG_LIMIT - requests() as u32][..left.len()], "{limits:?}");
    }
    all_expire(&server);
}

fn ready(workers: &mut [Worker]) {
    for worker in workers {
        assert_eq!(worker.says(), "ready");
    }
}

/// How many each admits in a round that they begin together.
fn begin(workers: &mut [Worker]) -> Vec<u32> {
    workers.iter_mut().for_each(Worker::go);
    workers.iter_mut().map(|worker| worker.says().parse().unwrap()).collect()
}

/// A whole round.
pub(crate) fn round(workers: &mut [Worker]) -> Vec<u32> {
    ready(workers);
    begin(workers)
}

/// The worker. Does nothing when it is run with the other tests.
#[test]
fn one_of_four() {
    work(&rounds(), CONNECTIONS, requests() / PROCESSES);
}

/// What a worker does: so many requests in each round.
pub(crate) fn work(rounds: &[Vec<Limit>], connections: usize, requests: usize) {
    let Some(url) = child::task() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for (round, limits) in rounds.iter().enumerate() {
        let limiter = {
            let _inside = runtime.enter();
            Arc::new(connect(&url, round, limits, connections))
        };
        // Connections take turns, so these make every one of them.
        for _ in 0..connections {
            assert!(!runtime.block_on(limiter.peek("nobody")).is_degraded());
        }
        child::say("ready");
        child::wait();
        let admitted = runtime.block_on(run(&limiter, requests));
        child::say(&admitted.to_string());
    }
}

/// Makes so many requests, and says how many passed.
async fn run(limiter: &Arc<Limiter<Redis>>, requests: usize) -> u32 {
    let tasks = (0..TASKS).map(|task| {
        let limiter = limiter.clone();
        // The first take one more where it does not come out even.
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
    let mut admitted = 0;
    for task in tasks.collect::<Vec<_>>() {
        admitted += task.await.unwrap();
    }
    admitted
}
