//! Goal: a decision within the deadline whatever the server does, and exact limits again once it is available.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ratekeeper::redis::{FailurePolicy, Redis, Settings};
use ratekeeper::{Clock as _, Limit, Limiter, RetryAfter, SystemClock, Verdict, WindowAlign};
use testbed::{Fault, FaultProxy, RedisServer, ordinary_or_long, wait_for, wait_until};

use crate::redis::network::percentile_99;
use crate::redis::{PATIENT, all_expire, limiter};

pub(crate) fn ten_an_hour() -> Limit {
    Limit::fixed_window(10, Duration::from_secs(3_600), WindowAlign::FirstRequest).unwrap()
}

/// Checks until a verdict fits. While the breaker is open, one request every 100 ms reaches the server.
pub(crate) async fn until(limiter: &Limiter<Redis>, fits: impl Fn(&Verdict) -> bool) -> Verdict {
    wait_for(async || Some(limiter.check("until").await).filter(&fits)).await
}

/// A key that was never used, so that no denial is cached for it.
fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Checks until the server decides, and returns how long that took.
pub(crate) async fn healthy(limiter: &Limiter<Redis>) -> Duration {
    let clock = SystemClock::new();
    let start = clock.now();
    wait_for(async || (!limiter.check(&fresh()).await.is_degraded()).then_some(())).await;
    clock.now().saturating_since(start)
}

/// Each policy makes its decision and marks it as degraded.
#[tokio::test]
async fn failure_policy_decides_without_a_server() {
    let unreachable = Settings::new("redis://127.0.0.1:1").deadline(Duration::from_millis(20));

    let open = limiter(&[ten_an_hour()], &unreachable.clone().on_store_failure(FailurePolicy::Open));
    for _ in 0..50 {
        let verdict = open.check_n("key", 11).await;
        assert!(verdict.allowed() && verdict.is_degraded());
    }
    assert!(open.is_degraded());

    let closed = limiter(&[ten_an_hour()], &unreachable.clone().on_store_failure(FailurePolicy::Closed));
    for _ in 0..50 {
        let verdict = closed.check("key").await;
        assert!(!verdict.allowed() && verdict.is_degraded());
        assert!(matches!(verdict.decision().retry_after, RetryAfter::After(wait) if wait > Duration::ZERO));
    }

    // Ten units shared by three processes: three for each.
    let local = limiter(
        &[ten_an_hour()],
        &unreachable.clone().on_store_failure(FailurePolicy::Local { instances: 3 }),
    );
    let mut admitted = 0;
    for _ in 0..50 {
        let verdict = local.check("key").await;
        assert!(verdict.is_degraded());
        admitted += u32::from(verdict.allowed());
    }
    assert_eq!(admitted, 3);

    let too_many =
        limiter(&[ten_an_hour()], &unreachable.on_store_failure(FailurePolicy::Local { instances: 11 }));
    assert!(!too_many.check("key").await.allowed(), "a share of less than one is none");
}

/// Each limit of a request has its own policy.
#[tokio::test]
async fn each_limit_has_its_own_failure_policy() {
    let unreachable = Settings::new("redis://127.0.0.1:1").on_store_failure(FailurePolicy::Open);
    let both = [ten_an_hour(), ten_an_hour()];
    let local =
        limiter(&both, &unreachable.clone().on_store_failure_of(1, FailurePolicy::Local { instances: 5 }));
    for remaining in [1, 0] {
        let verdict = local.check("key").await;
        assert!(verdict.allowed() && verdict.is_degraded());
        let left: Vec<_> = verdict.decisions().iter().map(|decision| decision.known_remaining()).collect();
        assert_eq!(left, [None, Some(remaining)], "nobody knows what remains of a limit that fails open");
    }
    assert!(!local.check("key").await.allowed());
    let closed = limiter(&both, &unreachable.on_store_failure_of(0, FailurePolicy::Closed));
    let verdict = closed.check("key").await;
    assert_eq!(verdict.decisions().iter().map(|it| it.allowed).collect::<Vec<_>>(), [false, true]);
}

/// The server is killed and restarted, empty and without the functions: decisions continue and become exact again.
#[tokio::test]
async fn restarted_server_is_used_again() {
    let mut server = RedisServer::start().unwrap();
    let settings = Settings::new(&server.url())
        .deadline(Duration::from_millis(500))
        .on_store_failure(FailurePolicy::Closed);
    let limiter = limiter(&[ten_an_hour()], &settings);
    for round in 0..5 {
        let verdict = until(&limiter, |verdict| !verdict.is_degraded()).await;
        assert!(verdict.allowed(), "round {round}: an empty server has no counters");
        assert_eq!(verdict.decision().remaining, 9, "round {round}");
        server.kill().unwrap();
        until(&limiter, Verdict::is_degraded).await;
        server.restart().unwrap();
    }
    all_expire(&server);
}

/// Decisions of the tasks of one limiter, by the server and by the failure policy.
#[derive(Debug, Default)]
struct Totals {
    admitted: AtomicU64,
    degraded: AtomicU64,
    degraded_admitted: AtomicU64,
    slowest_ns: AtomicU64,
}

impl Totals {
    /// Checks until stopped: a shared key and a fresh one.
    async fn check_until_over(&self, limiter: &Limiter<Redis>, is_over: &AtomicBool) {
        let clock = SystemClock::new();
        while !is_over.load(Ordering::Relaxed) {
            let start = clock.now();
            let verdict = limiter.check("shared").await;
            let took = clock.now().saturating_since(start);
            self.slowest_ns.fetch_max(took.as_nanos() as u64, Ordering::Relaxed);
            let (admitted, degraded) = (u64::from(verdict.allowed()), u64::from(verdict.is_degraded()));
            self.admitted.fetch_add(admitted & !degraded, Ordering::Relaxed);
            self.degraded.fetch_add(degraded, Ordering::Relaxed);
            self.degraded_admitted.fetch_add(admitted & degraded, Ordering::Relaxed);
            // A fresh key is never in the denial cache, so the server is called each time.
            limiter.check(&fresh()).await;
            // A steady load that leaves the processor to the servers.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Killed and restarted twenty times while 32 tasks check: no request hangs, each policy is applied, and an empty
/// server allows at most one extra limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_hold_through_twenty_kills_under_load() {
    const KILLS: u64 = 20;
    const NODES: u32 = 2;

    let mut server = RedisServer::start().unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let policies = [FailurePolicy::Open, FailurePolicy::Closed, FailurePolicy::Local { instances: NODES }];
    let limiters = policies.map(|policy| {
        let settings =
            Settings::new(&server.url()).namespace(&format!("{policy:?}")).on_store_failure(policy);
        (policy, Arc::new(limiter(&[ten_an_hour()], &settings)), Arc::new(Totals::default()))
    });
    for (_, limiter, _) in &limiters {
        healthy(limiter).await;
    }
    let tasks = limiters.iter().cycle().take(32).map(|(_, limiter, totals)| {
        let (limiter, totals, is_over) = (limiter.clone(), totals.clone(), is_over.clone());
        tokio::spawn(async move { totals.check_until_over(&limiter, &is_over).await })
    });
    let tasks: Vec<_> = tasks.collect();

    let mut slowest = Duration::ZERO;
    for _ in 0..KILLS {
        server.kill().unwrap();
        for (_, limiter, _) in &limiters {
            wait_until(|| limiter.is_degraded()).await;
        }
        server.restart().unwrap();
        for (_, limiter, _) in &limiters {
            slowest = slowest.max(healthy(limiter).await);
        }
    }
    is_over.store(true, Ordering::Relaxed);
    for task in tasks {
        tokio::time::timeout(PATIENT, task).await.unwrap().unwrap();
    }
    println!("{KILLS} kills: healthy after {slowest:.1?} at most");

    let limit = u64::from(ten_an_hour().limit());
    for (policy, _, totals) in &limiters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        println!("{policy:?}: {totals:?}");
        assert!(read(&totals.admitted) <= limit * (KILLS + 1), "{policy:?}: {totals:?}");
        let passed = read(&totals.degraded_admitted);
        match policy {
            FailurePolicy::Open => assert_eq!(passed, read(&totals.degraded)),
            FailurePolicy::Closed => assert_eq!(passed, 0),
            FailurePolicy::Local { .. } => assert!(passed <= limit / u64::from(NODES), "{totals:?}"),
        }
        let slowest = Duration::from_nanos(read(&totals.slowest_ns));
        assert!(slowest <= Duration::from_millis(20 + 250), "{policy:?}: a decision after {slowest:?}");
    }
    assert!(slowest <= Duration::from_secs(5), "healthy after {slowest:?}");
    all_expire(&server);
}

/// The server is paused for up to ten seconds: no request waits much longer than the deadline, and once the breaker
/// is open almost none waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_server_delays_no_request_beyond_the_deadline() {
    let standstill = Duration::from_secs(ordinary_or_long(3, 10));
    const LATEST: Duration = Duration::from_millis(20 + 5);

    let server = RedisServer::start().unwrap();
    let settings = Settings::new(&server.url()).on_store_failure(FailurePolicy::Local { instances: 1 });
    let limiter = Arc::new(limiter(&[ten_an_hour()], &settings));
    until(&limiter, |verdict| !verdict.is_degraded()).await;
    server.pause().unwrap();
    let tasks: Vec<_> = (0..64)
        .map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let clock = SystemClock::new();
                let (start, mut took) = (clock.now(), Vec::new());
                while clock.now().saturating_since(start) < standstill {
                    let sent_at = clock.now();
                    assert!(limiter.check(&fresh()).await.is_degraded());
                    took.push(clock.now().saturating_since(sent_at));
                    // A steady load for as long as the standstill lasts.
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                took
            })
        })
        .collect();
    let mut took = Vec::new();
    for task in tasks {
        took.extend(task.await.unwrap());
    }
    assert!(limiter.is_degraded());
    server.resume().unwrap();
    let back = healthy(&limiter).await;
    let (count, waited) = (took.len(), took.iter().filter(|took| **took >= LATEST / 2).count());
    let last = took.iter().max().copied().unwrap_or_default();
    let p99 = percentile_99(took);
    println!(
        "ten seconds of standstill: p99 of {count} decisions {p99:.1?}, {waited} waited, the last {last:.1?}; healthy \
         after {back:.1?}"
    );
    assert!(p99 <= LATEST, "p99 {p99:?}");
    assert!(last <= Duration::from_millis(20 + 250), "a decision after {last:?}");
    all_expire(&server);
}

/// The functions are loaded again after FUNCTION FLUSH, and the request is decided.
#[tokio::test]
async fn flushed_functions_are_loaded_again() {
    let server = RedisServer::start().unwrap();
    let limiter = limiter(&[ten_an_hour()], &Settings::new(&server.url()).deadline(PATIENT));
    for remaining in (0..10).rev() {
        let verdict = limiter.check("key").await;
        assert_eq!((verdict.is_degraded(), verdict.decision().remaining), (false, remaining));
        assert_eq!(server.cli(&["FUNCTION", "FLUSH"]).unwrap(), "OK");
    }
    all_expire(&server);
}

/// A server that becomes a replica rejects writes: the connection is replaced, and works once the server is a master
/// again.
#[tokio::test]
async fn demoted_server_is_used_again_after_promotion() {
    let server = RedisServer::start().unwrap();
    let settings = Settings::new(&server.url())
        .deadline(Duration::from_millis(500))
        .on_store_failure(FailurePolicy::Closed);
    let limiter = limiter(&[ten_an_hour()], &settings);
    until(&limiter, |verdict| !verdict.is_degraded()).await;
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]).unwrap();
    until(&limiter, Verdict::is_degraded).await;
    server.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    until(&limiter, |verdict| !verdict.is_degraded()).await;
    all_expire(&server);
}

/// A foreign value in a key is an error, not a decision.
#[tokio::test]
async fn foreign_value_is_an_error() {
    let server = RedisServer::start().unwrap();
    let settings = Settings::new(&server.url()).deadline(PATIENT).on_store_failure(FailurePolicy::Closed);
    let limiter = limiter(&[ten_an_hour()], &settings);
    assert!(limiter.check("key").await.allowed());
    let key = server.cli(&["--scan"]).unwrap();
    for value in ["", "x", "a much longer text than any state would be"] {
        server.cli(&["SET", &key, value, "PX", "100000"]).unwrap();
        let verdict = limiter.check("key").await;
        assert!(verdict.is_degraded() || verdict.allowed(), "{value:?}");
    }
    assert_eq!(server.cli(&["PING"]).unwrap(), "PONG");
    all_expire(&server);
}

/// Callers whose timeout is shorter than the deadline also open the breaker.
#[tokio::test]
async fn short_caller_timeouts_open_the_breaker() {
    let server = RedisServer::start().unwrap();
    let proxy = FaultProxy::start(server.port()).unwrap();
    let limiter = limiter(&[ten_an_hour()], &Settings::new(&proxy.url()));
    healthy(&limiter).await;
    proxy.set(Fault::HalfOpen);
    let finding_out = async {
        while !limiter.is_degraded() {
            let _ = tokio::time::timeout(Duration::from_millis(15), limiter.check(&fresh())).await;
        }
    };
    tokio::time::timeout(PATIENT, finding_out).await.unwrap();
    let mut unanswered = 0;
    for _ in 0..100 {
        let result = tokio::time::timeout(Duration::from_millis(15), limiter.check(&fresh())).await;
        unanswered += u32::from(result.is_err());
    }
    assert!(unanswered <= 50, "{unanswered} of 100 were not even answered by the policy");
    all_expire(&server);
}

/// Connections that take longer to open than a decision may take, as with TLS: the first that is open is used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_connections_are_used_once_open() {
    let server = RedisServer::start().unwrap();
    let proxy = FaultProxy::start(server.port()).unwrap();
    // Delays the handshake in both directions.
    proxy.set(Fault::Delay(Duration::from_millis(15)));
    let limiter = limiter(&[ten_an_hour()], &Settings::new(&proxy.url()).connections(32));
    // Several attempts to connect, each longer than a decision may take.
    tokio::time::sleep(Duration::from_millis(200)).await;
    proxy.set(Fault::Pass);
    let took = healthy(&limiter).await;
    println!("32 connections: decided by Redis after {took:.1?}");
    assert!(took <= Duration::from_secs(1), "{took:?}");
    all_expire(&server);
}
