//! Goal: whatever happens on the way to the server, a decision comes in time, is what the policy says, costs no memory,
//! and is exact again when the way is free. Method: a proxy of our own, whose faults are switched on and off.

use std::sync::Arc;
use std::time::Duration;

use testbed::{Fault, FaultProxy, RedisServer};
use tollgate::redis::{Failure, Redis, Settings, StoreError};
use tollgate::{Align, Clock as _, Limit, Limiter, SystemClock, Time};

use crate::child::{self, Worker};
use crate::redis::faults::{healthy, ten_an_hour};
use crate::redis::{PATIENT, all_expire, limiter};

const DEADLINE: Duration = Duration::from_millis(20);
/// How much later than the deadline a decision may come on a busy test machine. The goal is [`GOAL`].
const LATE_MAX: Duration = Duration::from_millis(250);
/// How much later it should come at most, but for one in a hundred. Told, not demanded: machines are busy.
const GOAL: Duration = Duration::from_millis(5);
/// How long it may take on a busy test machine until decisions are exact again. The goal is a second.
const HEALTHY_WITHIN: Duration = Duration::from_secs(5);

const POLICIES: [Failure; 3] = [Failure::Open, Failure::Closed, Failure::Local { nodes: 3 }];
/// Limiters of each policy. Each has its own breaker, so each waits for the server a few times.
const LIMITERS: usize = 4;
const CHECKS: usize = 120;

/// What one limiter went through: how long each decision took, and how many were admitted.
struct Told {
    policy: Failure,
    took: Vec<Duration>,
    admitted: usize,
}

/// Asks again and again while the server cannot be reached.
async fn ask_in_vain(limiter: &Limiter<Redis>, policy: Failure, fault: Fault) -> Told {
    let clock = SystemClock::new();
    let mut told = Told { policy, took: Vec::new(), admitted: 0 };
    for _ in 0..CHECKS {
        let start = clock.now();
        let verdict = limiter.check("key").await;
        let took = clock.now().saturating_since(start);
        assert!(took <= DEADLINE + LATE_MAX, "{fault:?}, {policy:?}: a decision after {took:?}");
        assert!(verdict.is_degraded(), "{fault:?}, {policy:?}");
        told.took.push(took);
        told.admitted += usize::from(verdict.allowed());
        if limiter.is_degraded() {
            // Long enough in all that a few more try whether the server is back.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    told
}

pub(crate) fn percentile_99(mut lengths: Vec<Duration>) -> Duration {
    lengths.sort_unstable();
    lengths.get(lengths.len() * 99 / 100).or(lengths.last()).copied().unwrap_or_default()
}

async fn a_fault_passes(fault: Fault) {
    let server = RedisServer::start().unwrap();
    let proxy = FaultProxy::start(server.port()).unwrap();
    let connect = |number: usize, policy| {
        let settings = Settings::new(&proxy.url()).namespace(&format!("{policy:?}/{number}"));
        let settings = settings.deadline(DEADLINE).failure(policy).connections(1);
        (policy, Arc::new(limiter(&[ten_an_hour()], &settings)))
    };
    let limiters: Vec<_> =
        POLICIES.iter().flat_map(|policy| (0..LIMITERS).map(move |n| connect(n, *policy))).collect();
    for (_, limiter) in &limiters {
        healthy(limiter).await;
    }

    proxy.set(fault);
    let asking = limiters.iter().map(|(policy, limiter)| {
        let (policy, limiter) = (*policy, limiter.clone());
        tokio::spawn(async move { ask_in_vain(&limiter, policy, fault).await })
    });
    let mut took = Vec::new();
    for task in asking.collect::<Vec<_>>() {
        let told = task.await.unwrap();
        let expected = match told.policy {
            Failure::Open => CHECKS,
            Failure::Closed => 0,
            Failure::Local { nodes } => (ten_an_hour().limit() / nodes) as usize,
        };
        assert_eq!(told.admitted, expected, "{fault:?}, {:?}", told.policy);
        took.extend(told.took);
    }

    proxy.set(Fault::Pass);
    let recovering = limiters.iter().map(|(_, limiter)| {
        let limiter = limiter.clone();
        tokio::spawn(async move { healthy(&limiter).await })
    });
    let mut slowest = Duration::ZERO;
    for task in recovering.collect::<Vec<_>>() {
        slowest = slowest.max(task.await.unwrap());
    }
    assert!(slowest <= HEALTHY_WITHIN, "{fault:?}: healthy after {slowest:?}");
    for (_, limiter) in limiters.iter().filter(|(policy, _)| *policy == Failure::Closed) {
        is_exact(limiter).await;
    }
    // Whatever failed is closed: one connection is left for each.
    let closing = async {
        while proxy.connections() > limiters.len() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENT, closing).await.unwrap();
    all_expire(&server);

    let waited: Vec<_> = took.iter().filter(|took| **took >= DEADLINE / 2).copied().collect();
    let (all, waits) = (took.len(), waited.len());
    let (last, waited) = (took.iter().max().copied().unwrap_or_default(), percentile_99(waited));
    let goal = DEADLINE + GOAL;
    let is_met = if waited <= goal { "met" } else { "not met" };
    println!(
        "{fault:?}: p99 of {all} decisions {:.1?}, of the {waits} that waited {waited:.1?} (goal {goal:?}: {is_met}), \
         last {last:.1?}; healthy after {slowest:.1?}",
        percentile_99(took),
    );
}

/// Exactly ten of twenty pass. A decision may come too late on a busy machine, and is then denied although it was
/// charged: never more than ten pass, and soon all are in time.
async fn is_exact(limiter: &Limiter<Redis>) {
    let trying = async {
        for attempt in 0_u64.. {
            healthy(limiter).await;
            let (mut admitted, mut late) = (0, 0);
            for _ in 0..20 {
                let verdict = limiter.check(&("exact", attempt)).await;
                admitted += u32::from(verdict.allowed());
                late += u32::from(verdict.is_degraded());
            }
            assert!(admitted <= 10, "{admitted} admitted");
            if late == 0 {
                assert_eq!(admitted, 10);
                return;
            }
        }
    };
    tokio::time::timeout(PATIENT, trying).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_byte_is_late() {
    a_fault_passes(Fault::Delay(Duration::from_millis(30))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_drip() {
    a_fault_passes(Fault::Drip(Duration::from_millis(10))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_half_open() {
    a_fault_passes(Fault::HalfOpen).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_reset() {
    a_fault_passes(Fault::Reset).await;
}

/// Five thousand requests at once while the server stands still: some wait, and the others are turned away at once.
#[tokio::test]
async fn more_requests_than_may_wait_are_turned_away() {
    const REQUESTS: usize = 5_000;
    /// What may wait for one connection, and what its driver has taken in hand.
    const WAITING_MAX: usize = 1_024 + 2 * 64;

    let server = RedisServer::start().unwrap();
    let limit = Limit::fixed_window(100_000, Duration::from_secs(3_600), Align::FirstRequest).unwrap();
    // So long that all have asked before the first gives up.
    let settings = Settings::new(&server.url()).deadline(Duration::from_millis(500)).connections(1);
    let connect =
        |failure| Arc::new(limiter(std::slice::from_ref(&limit), &settings.clone().failure(failure)));
    let (told_why, open) = (connect(Failure::Closed), connect(Failure::Open));
    healthy(&told_why).await;
    healthy(&open).await;
    server.pause().unwrap();

    let asking = (0..REQUESTS).map(|_| {
        let limiter = told_why.clone();
        tokio::spawn(async move { limiter.check_at(Time::from_secs(1_700_000_000), "many", 1).await })
    });
    let (mut late, mut busy, mut away) = (0, 0, 0);
    for task in asking.collect::<Vec<_>>() {
        match task.await.unwrap().unwrap_err() {
            StoreError::TimedOut => late += 1,
            StoreError::Busy => busy += 1,
            StoreError::Away => away += 1,
            other => assert_eq!(other, StoreError::TimedOut),
        }
    }
    println!("{REQUESTS} at once: {late} waited in vain, {busy} found the queue full, {away} did not ask");
    assert!(late > 0 && busy > 0 && late <= WAITING_MAX, "{late} late, {busy} turned away, {away} not asked");

    let asking = (0..REQUESTS).map(|_| {
        let limiter = open.clone();
        tokio::spawn(async move { limiter.check("many").await })
    });
    for task in asking.collect::<Vec<_>>() {
        let verdict = task.await.unwrap();
        assert!(verdict.is_degraded() && verdict.allowed());
    }

    server.resume().unwrap();
    healthy(&told_why).await;
    healthy(&open).await;
    // Of those that gave up, only what was already on its way is charged: a call or two of each limiter.
    let used = limit.limit() - open.peek("many").await.decision().remaining;
    println!("charged for those that gave up: {used}");
    assert!(used <= 4 * 64, "{used} charged of those that gave up");
    all_expire(&server);
}

/// A server that never answers, 20 000 requests: this process grows by no more than a few buffers, and leaves no
/// connections behind. The worker is a process of its own, so that no other test's memory is in the figures.
#[test]
fn a_server_that_never_answers_costs_no_memory() {
    let server = RedisServer::start().unwrap();
    let proxy = FaultProxy::start(server.port()).unwrap();
    let mut worker = Worker::start("redis::network::asks_in_vain", &proxy.url());
    assert_eq!(worker.says(), "ready");
    proxy.set(Fault::HalfOpen);
    worker.go();
    let said = worker.says();
    let (before, after) = said.split_once(' ').unwrap();
    let (before, after): (u64, u64) = (before.parse().unwrap(), after.parse().unwrap());
    println!(
        "20000 requests in vain: {before} kB before, {after} kB after, {} connections",
        proxy.connections()
    );
    assert!(after <= before + 20_000, "{before} kB before, {after} kB after");
    // Seven limiters with two each, of which one may just be closing as the next is made.
    assert!(proxy.connections() <= 7 * 2 * 2, "{} connections", proxy.connections());
    all_expire(&server);
}

/// The worker. Does nothing when it is run with the other tests.
#[tokio::test]
async fn asks_in_vain() {
    let Some(url) = child::task() else { return };
    let connect = || {
        let settings = Settings::new(&url).deadline(DEADLINE).failure(Failure::Local { nodes: 1 });
        let settings = settings.connections(2);
        Arc::new(limiter(&[ten_an_hour()], &settings))
    };
    let steady = connect();
    healthy(&steady).await;
    child::say("ready");
    child::wait();
    // What is allocated once and kept, first.
    at_once(&connect(), 1_000).await;
    let before = resident_kb();
    // Steadily, for so long that it is tried again and again whether the server answers.
    let asking = (0..100_u64).map(|task| {
        let limiter = steady.clone();
        tokio::spawn(async move {
            for request in 0..150_u64 {
                assert!(limiter.check(&(task, request)).await.is_degraded());
                tokio::time::sleep(Duration::from_millis(15)).await;
            }
        })
    });
    for task in asking.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    // And all at once, from limiters that do not know yet.
    for _ in 0..5 {
        at_once(&connect(), 1_000).await;
    }
    child::say(&format!("{before} {}", resident_kb()));
    // Until the test has looked at the connections.
    child::wait();
}

async fn at_once(limiter: &Arc<Limiter<Redis>>, requests: u64) {
    let asking = (0..requests).map(|request| {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.check(&request).await })
    });
    for task in asking.collect::<Vec<_>>() {
        assert!(task.await.unwrap().is_degraded());
    }
}

/// This process's memory. Zero where the system does not tell.
fn resident_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok()).unwrap_or(0)
}
