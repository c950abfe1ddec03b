//! Goal: a limit whose budget is taken ahead in slices asks Redis seldom, never admits more than the limit, and what
//! nobody spends comes back.

use std::sync::Arc;
use std::time::Duration;

use testbed::RedisServer;
use tollgate::redis::{Failure, Lease, Redis, Settings, SettingsError};
use tollgate::{Align, Count, Edge, Limit, Limiter, Mode, Rate, Style};

use crate::known_denials::calls;
use crate::{PATIENT, all_expire, limiter};

const LIMIT: u32 = 20_000;

/// Windows and rates so slow that nothing comes back during the test.
fn every_leased() -> Vec<Limit> {
    let window = Duration::from_secs(300 * 86_400);
    let rate = Rate::new(u64::from(LIMIT), window).unwrap();
    [
        Limit::token_bucket(LIMIT, rate, Style::Smooth),
        Limit::token_bucket(LIMIT, Rate::new(1, window).unwrap(), Style::Stepped),
        Limit::leaky_bucket(LIMIT, rate, Mode::Police),
        Limit::fixed_window(LIMIT, window, Align::Clock),
        Limit::fixed_window(LIMIT, window, Align::FirstRequest),
        Limit::sliding_window_log(LIMIT, window, Count::Admitted),
        Limit::sliding_window_counter(LIMIT, window, 1, Edge::Weigh),
        Limit::sliding_window_counter(LIMIT, window, 6, Edge::Keep),
    ]
    .map(Result::unwrap)
    .to_vec()
}

/// Asks until it is denied for good: also after what others held has come back.
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
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
    }
    admitted
}

/// Three processes' worth of limiters, eight tasks each: what they admit together is the limit, for a bucket less by the
/// one unit that its hold costs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_add_up_to_the_limit() {
    let server = RedisServer::start().unwrap();
    for (round, limit) in every_leased().into_iter().enumerate() {
        let settings = Settings::new(&server.url()).namespace(&round.to_string()).deadline(PATIENT);
        let settings = settings.lease(0, Lease { most: 500, hold: Duration::from_millis(50) });
        let before = calls(&server);
        let tasks = (0..3).flat_map(|_| {
            let limiter = Arc::new(limiter(std::slice::from_ref(&limit), &settings));
            (0..8).map(move |_| {
                let limiter = limiter.clone();
                tokio::spawn(async move { ask_until_denied(&limiter).await })
            })
        });
        let mut admitted = 0;
        for task in tasks.collect::<Vec<_>>() {
            admitted += task.await.unwrap();
        }
        let asked = calls(&server) - before;
        println!("{}: {admitted} of {LIMIT} admitted with {asked} calls", limit.name());
        let expected = LIMIT - u32::from(matches!(limit, Limit::Bucket(_) | Limit::Steps(_)));
        assert_eq!(admitted, expected, "{limit:?}");
        assert!(asked < u64::from(LIMIT) / 5, "{asked} calls");
    }
    all_expire(&server);
}

/// A key that falls silent keeps nothing from the others for long.
#[tokio::test]
async fn what_a_process_does_not_spend_comes_back() {
    let server = RedisServer::start().unwrap();
    let limit = Limit::fixed_window(1_000, Duration::from_secs(86_400), Align::FirstRequest).unwrap();
    let settings = Settings::new(&server.url()).deadline(PATIENT).lease(0, Lease::of(1_000));
    let (busy, other) = (limiter(std::slice::from_ref(&limit), &settings), limiter(&[limit], &settings));
    for _ in 0..400 {
        assert!(busy.check("key").await.allowed());
    }
    let coming_back = async {
        while other.peek("key").await.decision().remaining != 600 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENT, coming_back).await.unwrap();
    all_expire(&server);
}

/// With two limits, of which one is leased and the other denies: the lease gets its units back.
#[tokio::test]
async fn a_request_that_another_limit_denies_spends_nothing() {
    let server = RedisServer::start().unwrap();
    let day = Duration::from_secs(86_400);
    let limits = [
        Limit::fixed_window(1_000, day, Align::FirstRequest).unwrap(),
        Limit::fixed_window(100, day, Align::FirstRequest).unwrap(),
    ];
    let settings = Settings::new(&server.url()).deadline(PATIENT).lease(0, Lease::of(200));
    let limiter = limiter(&limits, &settings);
    let mut admitted = 0;
    for _ in 0..500 {
        let verdict = limiter.check("key").await;
        admitted += u32::from(verdict.allowed());
        assert_eq!(verdict.decisions()[0].limit, 1_000);
    }
    assert_eq!(admitted, 100);
    let coming_back = async {
        while limiter.peek("key").await.decisions()[0].remaining != 900 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENT, coming_back).await.unwrap();
    all_expire(&server);
}

/// The server dies: what is held is spent, and then the policy decides.
#[tokio::test]
async fn what_is_held_when_the_server_dies_is_spent() {
    let mut server = RedisServer::start().unwrap();
    let limit = Limit::fixed_window(1_000_000, Duration::from_secs(86_400), Align::FirstRequest).unwrap();
    let lease = Lease { most: 100, hold: Duration::from_secs(1) };
    let settings = Settings::new(&server.url()).failure(Failure::Closed).lease(0, lease);
    let limiter = limiter(&[limit], &settings);
    // Until there is a slice: a hundred in a row without a wait.
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
async fn what_cannot_be_leased_is_an_error() {
    let limit = Limit::sliding_window_log(10, Duration::from_secs(1), Count::All).unwrap();
    let settings = Settings::new("redis://127.0.0.1:1");
    let build = |settings: &Settings| Limiter::builder(limit.clone()).redis(settings).unwrap_err();
    assert_eq!(build(&settings.clone().lease(0, Lease::of(5))), SettingsError::Lease { limit: 0 });
    let unknown = SettingsError::UnknownLimit { limit: 1, limits: 1 };
    assert_eq!(build(&settings.clone().lease(1, Lease::of(5))), unknown);
    assert_eq!(build(&settings.failure_of(1, Failure::Open)), unknown);
}
