//! Goal: a leased limit calls Redis rarely and is never exceeded, and unspent leases are refunded.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use ratekeeper::redis::{FailurePolicy, Lease, Redis, Settings, SettingsError};
use ratekeeper::{EdgePolicy, LeakyMode, Limit, Limiter, LogPolicy, Rate, RefillStyle, WindowAlign};
use testbed::{Fault, FaultProxy, RedisServer, wait_for};

use crate::redis::denial_cache::calls;
use crate::redis::{PATIENT, all_expire, limiter, sum};

const LIMIT: u32 = 20_000;

/// Windows and rates too slow to refill during the test.
fn every_leased() -> Vec<Limit> {
    let window = Duration::from_secs(300 * 86_400);
    let rate = Rate::new(u64::from(LIMIT), window).unwrap();
    [
        Limit::token_bucket(LIMIT, rate, RefillStyle::Smooth),
        Limit::token_bucket(LIMIT, Rate::new(1, window).unwrap(), RefillStyle::Stepped),
        Limit::leaky_bucket(LIMIT, rate, LeakyMode::Police),
        Limit::fixed_window(LIMIT, window, WindowAlign::Clock),
        Limit::fixed_window(LIMIT, window, WindowAlign::FirstRequest),
        Limit::sliding_window_log(LIMIT, window, LogPolicy::Admitted),
        Limit::sliding_window_counter(LIMIT, window, 1, EdgePolicy::Weigh),
        Limit::sliding_window_counter(LIMIT, window, 6, EdgePolicy::Keep),
    ]
    .map(Result::unwrap)
    .to_vec()
}

/// Checks until requests are denied permanently, even after other limiters have refunded their leases.
async fn ask_until_denied(limiter: &Limiter<Redis>) -> u32 {
    let mut admitted = 0;
    let mut denied = 0;
    while denied < 5 {
        let verdict = limiter.check("key").await;
        assert!(!verdict.is_degraded());
        if verdict.allowed() {
            admitted += 1;
            denied = 0;
        } else {
            denied += 1;
            // Longer than the hold of a lease, after which unspent units are refunded.
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
    }
    admitted
}

/// Three limiters in place of three processes, eight tasks each: together they allow exactly the limit, or one unit
/// less for a bucket, because of the hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_add_up_to_the_limit() {
    let server = RedisServer::start().unwrap();
    for (round, limit) in every_leased().into_iter().enumerate() {
        let settings = Settings::new(&server.url()).namespace(&round.to_string()).deadline(PATIENT);
        let settings = settings.lease(0, Lease { max: 500, hold: Duration::from_millis(50) });
        let before = calls(&server);
        let tasks = (0..3).flat_map(|_| {
            let limiter = Arc::new(limiter(std::slice::from_ref(&limit), &settings));
            (0..8).map(move |_| {
                let limiter = limiter.clone();
                tokio::spawn(async move { ask_until_denied(&limiter).await })
            })
        });
        let admitted = sum(tasks).await;
        let sent = calls(&server) - before;
        println!("{}: {admitted} of {LIMIT} admitted with {sent} calls", limit.name());
        let expected = LIMIT - u32::from(matches!(limit, Limit::Bucket(_) | Limit::SteppedBucket(_)));
        assert_eq!(admitted, expected, "{limit:?}");
        assert!(sent < u64::from(LIMIT) / 5, "{sent} calls");
    }
    all_expire(&server);
}

/// The lease of an idle key is refunded soon.
#[tokio::test]
async fn unspent_lease_is_refunded_to_other_processes() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::fixed_window(1_000, Duration::from_secs(86_400), WindowAlign::FirstRequest).unwrap();
    let settings = Settings::new(&server.url()).deadline(PATIENT).lease(0, Lease::new(1_000));
    let (busy, other) = (limiter(std::slice::from_ref(&limit), &settings), limiter(&[limit], &settings));
    for _ in 0..400 {
        assert!(busy.check("key").await.allowed());
    }
    left_is(&other, 600).await;
    all_expire(&server);
}

/// Two limits, one leased; the other denies, so the spend from the lease is reversed.
#[tokio::test]
async fn request_denied_by_another_limit_spends_no_lease() {
    let server = RedisServer::start().unwrap();
    let day = Duration::from_secs(86_400);
    let limits = [
        Limit::fixed_window(1_000, day, WindowAlign::FirstRequest).unwrap(),
        Limit::fixed_window(100, day, WindowAlign::FirstRequest).unwrap(),
    ];
    let settings = Settings::new(&server.url()).deadline(PATIENT).lease(0, Lease::new(200));
    let limiter = limiter(&limits, &settings);
    let mut admitted = 0;
    for _ in 0..500 {
        let verdict = limiter.check("key").await;
        admitted += u32::from(verdict.allowed());
        assert_eq!(verdict.decisions()[0].limit, 1_000);
    }
    assert_eq!(admitted, 100);
    left_is(&limiter, 900).await;
    all_expire(&server);
}

/// The server is killed: held leases are spent, then the failure policy decides.
#[tokio::test]
async fn held_lease_is_spent_after_the_server_dies() {
    let mut server = RedisServer::start().unwrap();
    let limit =
        Limit::fixed_window(1_000_000, Duration::from_secs(86_400), WindowAlign::FirstRequest).unwrap();
    let lease = Lease { max: 100, hold: Duration::from_secs(1) };
    let settings = Settings::new(&server.url()).on_store_failure(FailurePolicy::Closed).lease(0, lease);
    let limiter = limiter(&[limit], &settings);
    // Long enough to obtain a lease.
    let leasing = async {
        while !limiter.check("key").await.allowed() {}
        for _ in 0..2_000 {
            limiter.check("key").await;
        }
    };
    tokio::time::timeout(PATIENT, leasing).await.unwrap();
    server.kill().unwrap();
    let (mut spent, mut denied) = (0, 0);
    for _ in 0..1_000 {
        let verdict = limiter.check("key").await;
        assert_eq!(verdict.is_degraded(), !verdict.allowed());
        spent += u32::from(verdict.allowed());
        denied += u32::from(!verdict.allowed());
    }
    assert!(spent <= 200 && denied >= 800, "{spent} spent");
}

#[tokio::test]
async fn unsupported_lease_is_an_error() {
    let limit = Limit::sliding_window_log(10, Duration::from_secs(1), LogPolicy::All).unwrap();
    let settings = Settings::new("redis://127.0.0.1:1");
    let build = |settings: &Settings| Limiter::builder(limit.clone()).redis(settings).unwrap_err();
    assert_eq!(build(&settings.clone().lease(0, Lease::new(5))), SettingsError::Lease { limit: 0 });
    let unknown = SettingsError::UnknownLimit { limit: 1, limits: 1 };
    assert_eq!(build(&settings.clone().lease(1, Lease::new(5))), unknown);
    assert_eq!(build(&settings.on_store_failure_of(1, FailurePolicy::Open)), unknown);
}

fn a_day(limit: u32) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(86_400), WindowAlign::FirstRequest).unwrap()
}

/// Checks until the limiter holds unspent units of 1000, and returns how many it has spent.
async fn make_busy(limiter: &Limiter<Redis>, watch: &Limiter<Redis>) -> u32 {
    for spent in 1.. {
        assert!(limiter.check("key").await.allowed());
        if spent >= 300 && watch.peek("key").await.decision().remaining + spent + 50 <= 1_000 {
            return spent;
        }
    }
    0
}

/// Waits until a key has `left` units of the first limit remaining in Redis.
async fn left_is(watch: &Limiter<Redis>, left: u32) {
    wait_for(async || (watch.peek("key").await.decisions()[0].remaining == left).then_some(())).await;
}

/// A process that was denied before can use refunded units as soon as the hold time is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_denial_expires_with_the_lease_hold() {
    let server = RedisServer::start().unwrap();
    let settings = Settings::new(&server.url()).deadline(PATIENT).lease(0, Lease::new(1_000));
    let [busy, other, watch] = [(); 3].map(|()| limiter(&[a_day(1_000)], &settings));
    let spent = make_busy(&busy, &watch).await;
    let wanted = 1_000 - spent;
    assert!(!other.check_n("key", wanted).await.allowed());
    left_is(&watch, wanted).await;
    let passing = wait_for(async || other.check_n("key", wanted).await.allowed().then_some(()));
    tokio::time::timeout(Duration::from_millis(500), passing).await.unwrap();
    all_expire(&server);
}

/// After a reset one full limit is allowed, plus the leases that were held before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reset_allows_at_most_the_held_leases_extra() {
    let server = RedisServer::start().unwrap();
    let plain = Settings::new(&server.url()).deadline(PATIENT);
    let leasing = plain.clone().lease(0, Lease { max: 500, hold: Duration::from_secs(1) });
    let window = Limit::fixed_window(1_000, Duration::from_secs(300 * 86_400), WindowAlign::Clock).unwrap();
    let (holds, resets) = (limiter(std::slice::from_ref(&window), &leasing), limiter(&[window], &plain));
    make_busy(&holds, &resets).await;
    resets.reset("key").await.unwrap();
    holds.release().await;
    let mut admitted = 0;
    while resets.check("key").await.allowed() {
        admitted += 1;
    }
    // At most two leases are held at a time.
    assert!((1_000..=1_000 + 2 * 500).contains(&admitted), "{admitted} admitted");
    all_expire(&server);
}

/// A limiter refunds its leases on release and when it is dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_and_drop_refund_held_leases() {
    let server = RedisServer::start().unwrap();
    let plain = Settings::new(&server.url()).deadline(PATIENT);
    let settings = plain.clone().lease(0, Lease { max: 1_000, hold: Duration::from_secs(1) });
    let watch = limiter(&[a_day(1_000)], &plain);
    let holds = limiter(&[a_day(1_000)], &settings);
    let spent = make_busy(&holds, &watch).await;
    holds.release().await;
    left_is(&watch, 1_000 - spent).await;
    watch.reset("key").await.unwrap();
    let spent = make_busy(&holds, &watch).await;
    drop(holds);
    left_is(&watch, 1_000 - spent).await;
    all_expire(&server);
}

/// Leases whose reply arrives later than a request would wait are not lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_lease_is_refunded() {
    let server = RedisServer::start().unwrap();
    let proxy = FaultProxy::start(server.port()).unwrap();
    let settings = Settings::new(&proxy.url())
        .on_store_failure(FailurePolicy::Closed)
        .lease(0, Lease::new(1_000))
        .connections(1);
    let watch = limiter(&[a_day(10_000)], &Settings::new(&server.url()).deadline(PATIENT));
    let limiter = limiter(&[a_day(10_000)], &settings);
    let mut admitted = 0;
    for round in 0..1_500 {
        if round == 1_000 {
            proxy.set(Fault::Delay(Duration::from_millis(30)));
        }
        admitted += u32::from(limiter.check("key").await.allowed());
    }
    proxy.set(Fault::Pass);
    let taken = async || 10_000 - watch.peek("key").await.decision().remaining;
    // Requests that timed out may have been charged: one or two calls.
    wait_for(async || (taken().await <= admitted + 64).then_some(())).await;
    all_expire(&server);
}

/// Makes a limiter hold leases of many keys.
async fn hold_many(limiter: &Limiter<Redis>, keys: u32) {
    for _ in 0..2 {
        join_all((0..keys).map(|key| async move { limiter.check(&key).await })).await;
    }
    // Until the limiter has the replies to its last calls, which the server does not show.
    tokio::time::sleep(Duration::from_millis(20)).await;
}

/// The number of keys with unspent leases.
async fn held(watch: &Limiter<Redis>, keys: u32) -> usize {
    let peeks = (0..keys).map(|key| async move { watch.peek(&key).await.decision().remaining });
    join_all(peeks).await.iter().filter(|left| **left < 998).count()
}

/// Many keys become idle at the same time, and the server is remote: their refunds are sent concurrently.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_leases_are_refunded_concurrently() {
    let server = RedisServer::start().unwrap();
    let proxy = FaultProxy::start(server.port()).unwrap();
    let settings = Settings::new(&proxy.url()).deadline(PATIENT).lease(0, Lease::new(8));
    let watch = limiter(&[a_day(1_000)], &Settings::new(&server.url()).deadline(PATIENT));
    let holds = limiter(&[a_day(1_000)], &settings);
    hold_many(&holds, 1_000).await;
    proxy.set(Fault::Delay(Duration::from_millis(5)));
    let coming_back = wait_for(async || (held(&watch, 1_000).await == 0).then_some(()));
    // One after the other they would take more than ten seconds.
    tokio::time::timeout(Duration::from_secs(5), coming_back).await.unwrap();
    all_expire(&server);
}

/// The server is unavailable briefly while refunds are due: refunds that were not sent are retried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn brief_outage_loses_at_most_one_call_of_refunds() {
    const KEYS: u32 = 400;
    /// In flight when the connection failed: one call.
    const UNCERTAIN: usize = 64;

    let server = RedisServer::start().unwrap();
    let proxy = FaultProxy::start(server.port()).unwrap();
    let settings = Settings::new(&proxy.url()).deadline(PATIENT).connections(1).lease(0, Lease::new(8));
    let watch = limiter(&[a_day(1_000)], &Settings::new(&server.url()).deadline(PATIENT));
    let holds = limiter(&[a_day(1_000)], &settings);
    hold_many(&holds, KEYS).await;
    proxy.set(Fault::Reset);
    // An outage that begins before the refunds are due, and ends after their first attempts.
    tokio::time::sleep(Duration::from_millis(400)).await;
    proxy.set(Fault::Pass);
    wait_for(async || (held(&watch, KEYS).await <= UNCERTAIN).then_some(())).await;
    all_expire(&server);
}

/// A cancelled request spends nothing of a lease. Charges already sent to the other limit are kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_request_spends_no_lease() {
    let server = RedisServer::start().unwrap();
    let proxy = FaultProxy::start(server.port()).unwrap();
    let limits = [a_day(1_000), a_day(100_000)];
    let settings = Settings::new(&proxy.url()).deadline(PATIENT).connections(1);
    let settings = settings.lease(0, Lease { max: 100, hold: Duration::from_secs(1) });
    let watch = limiter(&limits, &Settings::new(&server.url()).deadline(PATIENT));
    let limiter = limiter(&limits, &settings);
    for _ in 0..60 {
        assert!(limiter.check("key").await.allowed());
    }
    proxy.set(Fault::Delay(Duration::from_millis(100)));
    for _ in 0..30 {
        // The connection is busy.
        let _ = tokio::time::timeout(Duration::from_millis(2), limiter.check("key")).await;
    }
    proxy.set(Fault::Pass);
    left_is(&watch, 940).await;
    let other = 100_000 - watch.peek("key").await.decisions()[1].remaining;
    assert!((60..=60 + 2).contains(&other), "{other} taken of the other");
    all_expire(&server);
}
