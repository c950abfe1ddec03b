//! Slots that processes share through a real Redis.

use std::convert::Infallible;
use std::future::Future;
use std::task::{Context, Waker};
use std::time::Duration;

use http::{Request, Response};
use testbed::{RedisCluster, RedisServer};
use tollgate::redis::{Failure, Redis, Settings, SettingsError};
use tollgate::tower::slots::Slots;
use tollgate::tower::{Builder, LayerError, RateLimitLayer};
use tower::{Layer, ServiceExt, service_fn};

use super::slots::{builder, by_user, check_denial, crowd, held, observed, of, under_way};
use super::{per_client, send, statuses};
use crate::child::{self, Worker};

/// Enough for a busy test machine.
const PATIENT: Duration = Duration::from_secs(20);
/// As long as slots are held here: so short that a test can wait for its end, and long enough that a busy machine renews
/// them in time.
const HOLD: Duration = Duration::from_millis(600);

fn settings(url: &str) -> Settings {
    Settings::new(url).deadline(PATIENT)
}

fn layer(url: &str, most: u32) -> RateLimitLayer<Redis> {
    builder(most).redis(&settings(url)).unwrap()
}

/// Looks again and again until it is so.
async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
    let looking = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENT, looking).await.is_ok(), "{what}");
}

/// Nothing stays in a server: neither slots that nobody holds, nor anything without an expiry.
async fn is_empty_soon(server: &RedisServer) {
    assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
    eventually("slots are left", async || server.ask(&["KEYS", "rate_limit:slots:*"]).unwrap().is_empty())
        .await;
}

/// How often the functions of the library were called.
fn calls(server: &RedisServer) -> u64 {
    let stats = server.ask(&["INFO", "commandstats"]).unwrap();
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls="));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn never_more_are_under_way_in_all_processes_and_all_get_through() {
    let server = RedisServer::start().unwrap();
    let layers = [layer(&server.url(), 3), layer(&server.url(), 3)];
    let most = crowd(&layers).await;
    assert!((1..=3).contains(&most), "{most}");
    assert_eq!((held(&layers[0]), held(&layers[1])), (vec![0], vec![0]));
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn two_processes_share_exactly_what_there_is() {
    let server = RedisServer::start().unwrap();
    let (one, other) = (layer(&server.url(), 3), layer(&server.url(), 3));
    let (first, second) = (under_way(&one, of("a")).await, under_way(&one, of("a")).await);
    let third = under_way(&other, of("a")).await;
    assert!([first.status(), second.status(), third.status()].iter().all(|status| *status == 200));
    check_denial(&send(&one, of("a")).await);
    check_denial(&send(&other, of("a")).await);
    assert_eq!(statuses(&other, [of("b")]).await, [200]);
    assert_eq!((held(&one), held(&other)), (vec![2], vec![1]));
    drop(first);
    eventually("a slot that is given back is free", async || send(&other, of("a")).await.status == 200).await;
    drop((second, third));
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn a_key_that_is_asked_for_all_the_time_costs_few_calls() {
    const REQUESTS: u64 = 500;
    let server = RedisServer::start().unwrap();
    let layer = layer(&server.url(), 3);
    for _ in 0..REQUESTS {
        assert_eq!(send(&layer, of("a")).await.status, 200);
    }
    let calls = calls(&server);
    println!("{REQUESTS} requests one after the other: {calls} calls");
    assert!(calls < REQUESTS / 4, "{calls}");
    is_empty_soon(&server).await;
}

/// A busy process that keeps its slot for the next request would keep all others out for good.
#[tokio::test]
async fn a_busy_process_keeps_no_slot_that_another_wants() {
    let server = RedisServer::start().unwrap();
    let (busy, other) = (layer(&server.url(), 1), layer(&server.url(), 1));
    let busy = tokio::spawn(async move {
        loop {
            send(&busy, of("a")).await;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    for _ in 0..10 {
        eventually("the other gets a slot", async || send(&other, of("a")).await.status == 200).await;
    }
    busy.abort();
    assert!(busy.await.unwrap_err().is_cancelled());
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn a_slot_is_kept_for_as_long_as_its_request_is_under_way() {
    let server = RedisServer::start().unwrap();
    let short = || builder(1).redis(&settings(&server.url()).slots_hold(HOLD)).unwrap();
    let (one, other) = (short(), short());
    let first = under_way(&one, of("a")).await;
    let end = tokio::time::Instant::now() + HOLD + HOLD / 6;
    while tokio::time::Instant::now() < end {
        assert_eq!(send(&other, of("a")).await.status, 429);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(first);
    eventually("it is free", async || send(&other, of("a")).await.status == 200).await;
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn a_process_that_is_killed_gives_its_slots_back() {
    let server = RedisServer::start().unwrap();
    let layer = builder(2).redis(&settings(&server.url()).slots_hold(HOLD)).unwrap();
    let mut worker = Worker::start("tower::slots_redis::a_process_that_holds", &server.url());
    worker.go();
    assert_eq!(worker.says(), "[200, 200]");
    assert_eq!(send(&layer, of("a")).await.status, 429);
    // Kill -9.
    drop(worker);
    let killed = tokio::time::Instant::now();
    eventually("its slots are free", async || send(&layer, of("a")).await.status == 200).await;
    println!("free {:.0?} after the kill, with a hold of {HOLD:?}", killed.elapsed());
    let (first, second) = (under_way(&layer, of("a")).await, under_way(&layer, of("a")).await);
    assert!(first.status() == 200 && second.status() == 200);
    drop((first, second));
    is_empty_soon(&server).await;
}

/// The worker. Does nothing when it is run with the other tests.
#[test]
fn a_process_that_holds() {
    let Some(url) = child::task() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    child::wait();
    let held = runtime.block_on(async {
        let layer = builder(2).redis(&settings(&url).slots_hold(HOLD)).unwrap();
        (under_way(&layer, of("a")).await, under_way(&layer, of("a")).await)
    });
    child::say(&format!("[{}, {}]", held.0.status().as_u16(), held.1.status().as_u16()));
    // It does not come back from this.
    child::wait();
}

#[tokio::test]
async fn a_request_takes_all_its_slots_or_none_and_nothing_from_the_limits() {
    let server = RedisServer::start().unwrap();
    let rules = per_client(4).slots(Slots::new("all", 2)).slots(by_user(1));
    let layer = rules.redis(&settings(&server.url())).unwrap();
    let first = under_way(&layer, of("a")).await;
    for _ in 0..5 {
        let got = send(&layer, of("a")).await;
        assert!(got.status == 429 && got.body.ends_with(r#"["at-once"]}"#), "{got:?}");
    }
    assert_eq!(held(&layer), [1, 1]);
    let second = under_way(&layer, of("b")).await;
    assert_eq!((second.status().as_u16(), held(&layer)), (200, vec![2, 2]));
    drop((first, second));
    let got = send(&layer, of("a")).await;
    assert!(got.header("ratelimit").unwrap().starts_with(r#""per-client";r=1;"#), "{got:?}");
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn shadows_count_and_tell_and_deny_nobody() {
    let server = RedisServer::start().unwrap();
    let (builder, seen) = observed(builder(2).slots(Slots::new("planned", 1).shadow()));
    let layer = builder.redis(&settings(&server.url())).unwrap();
    let (first, second) = (under_way(&layer, of("a")).await, under_way(&layer, of("a")).await);
    assert_eq!((second.status().as_u16(), held(&layer)), (200, vec![2, 1]));
    assert_eq!(send(&layer, of("a")).await.status, 429);
    let free: Vec<_> = seen.lock().unwrap().iter().map(|(rules, _)| (rules[0].1, rules[1].1)).collect();
    assert_eq!(free, [(true, true), (true, false), (false, false)]);
    drop((first, second));
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn a_client_that_leaves_while_it_is_decided_leaves_nothing_behind() {
    let server = RedisServer::start().unwrap();
    let layer = layer(&server.url(), 1);
    let hello = service_fn(|_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    server.pause().unwrap();
    let mut deciding = Box::pin(layer.layer(hello).oneshot(of("a")));
    assert!(deciding.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    // Its claim is on its way.
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(deciding);
    server.resume().unwrap();
    eventually("the slot is free", async || send(&layer, of("a")).await.status == 200).await;
    assert_eq!(held(&layer), [0]);
    is_empty_soon(&server).await;
}

/// A layer whose server has gone.
async fn orphaned(builder: Builder, failure: Failure) -> (RateLimitLayer<Redis>, RedisServer) {
    let mut server = RedisServer::start().unwrap();
    let settings = settings(&server.url()).failure(failure).slots_hold(HOLD);
    let layer = builder.redis(&settings).unwrap();
    assert_eq!(send(&layer, of("a")).await.status, 200);
    server.kill().unwrap();
    (layer, server)
}

#[tokio::test]
async fn without_its_server_the_policy_decides() {
    let (open, _server) = orphaned(builder(1), Failure::Open).await;
    let (first, second) = (under_way(&open, of("b")).await, under_way(&open, of("b")).await);
    assert_eq!((first.status().as_u16(), second.status().as_u16(), held(&open)), (200, 200, vec![2]));

    let (closed, _server) = orphaned(builder(9), Failure::Closed).await;
    let got = send(&closed, of("b")).await;
    assert_eq!((got.status, got.header("retry-after"), held(&closed)), (503, Some("1"), vec![0]));
    assert!(got.body.contains("http-problem-types#temporary-reduced-capacity"), "{}", got.body);

    // A third of what there is, and at least one.
    for (most, nodes, share) in [(7, 3, 2), (2, 3, 1)] {
        let (local, _server) = orphaned(builder(most), Failure::Local { nodes }).await;
        let mut held = Vec::new();
        for _ in 0..share {
            held.push(under_way(&local, of("b")).await);
            assert_eq!(held[held.len() - 1].status(), 200);
        }
        check_denial(&send(&local, of("b")).await);
        held.pop();
        assert_eq!(send(&local, of("b")).await.status, 200);
    }
}

#[tokio::test]
async fn what_passed_without_the_server_is_counted_when_it_is_back() {
    let (one, mut server) = orphaned(builder(2), Failure::Open).await;
    let held =
        [under_way(&one, of("b")).await, under_way(&one, of("b")).await, under_way(&one, of("b")).await];
    server.restart().unwrap();
    let other = layer(&server.url(), 2);
    eventually("the other knows", async || send(&other, of("b")).await.status == 429).await;
    drop(held);
    eventually("all are free", async || send(&other, of("b")).await.status == 200).await;
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn a_key_that_another_program_has_written_to_is_no_answer() {
    let server = RedisServer::start().unwrap();
    let settings = settings(&server.url()).failure(Failure::Closed);
    let layer = builder(2).redis(&settings).unwrap();
    let first = under_way(&layer, of("a")).await;
    let key = server.ask(&["KEYS", "rate_limit:slots:*"]).unwrap();
    for wrong in [["SET", &key, "text"], ["SADD", &key, "member"]] {
        server.ask(&["DEL", &key]).unwrap();
        server.ask(&wrong).unwrap();
        assert_eq!(send(&layer, of("a")).await.status, 503);
        assert_eq!(send(&layer, of("b")).await.status, 200);
    }
    server.ask(&["DEL", &key]).unwrap();
    drop(first);
}

#[tokio::test]
async fn a_hold_must_be_one_that_can_be_renewed() {
    let settings = Settings::new("redis://127.0.0.1:1").slots_hold(Duration::from_millis(1));
    let error = builder(1).redis(&settings).unwrap_err();
    assert_eq!(error, LayerError::Redis(SettingsError::SlotsHold));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_of_a_cluster_keep_slots_like_one_server() {
    let cluster = RedisCluster::start().unwrap();
    let both = || {
        let rules = RateLimitLayer::builder().slots(Slots::new("all", 4)).slots(by_user(2));
        rules.redis(&settings(&cluster.url()).slots_hold(HOLD)).unwrap()
    };
    let (one, other) = (both(), both());
    let mut held = Vec::new();
    for (layer, user) in [(&one, "a"), (&other, "a"), (&one, "b"), (&other, "c")] {
        held.push(under_way(layer, of(user)).await);
    }
    assert!(held.iter().all(|response| response.status() == 200));
    assert_eq!(statuses(&one, [of("a"), of("d")]).await, [429, 429]);
    // Renewed, on several nodes.
    tokio::time::sleep(HOLD + HOLD / 6).await;
    assert_eq!(statuses(&other, [of("a"), of("d")]).await, [429, 429]);
    drop(held);
    eventually("all are free", async || send(&one, of("a")).await.status == 200).await;
    assert_eq!(cluster.keys_without_expiry().unwrap(), Vec::<String>::new());
}
