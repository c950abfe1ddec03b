//! Concurrency limits that processes share through a real Redis.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use http::{Request, Response};
use ratekeeper::redis::{FailurePolicy, Redis, Settings, SettingsError};
use ratekeeper::tower::concurrency::InFlightLimit;
use ratekeeper::tower::{LayerBuilder, LayerError, RatekeeperLayer};
use testbed::{FaultProxy, RedisCluster, RedisServer, wait_for, wait_until};
use tower::{Layer, ServiceExt, service_fn};

use super::concurrency::{builder, by_user, check_denial, crowd, held, observed, of, under_way};
use super::{per_client, send, statuses};
use crate::child::{self, Worker};

/// Long enough for a busy test machine.
const PATIENT: Duration = Duration::from_secs(20);
/// How long permits are held without renewal: short enough for a test to wait for expiry, and long enough for a busy
/// machine to renew in time.
const HOLD: Duration = Duration::from_millis(600);

fn settings(url: &str) -> Settings {
    Settings::new(url).deadline(PATIENT)
}

fn layer(url: &str, most: u32) -> RatekeeperLayer<Redis> {
    builder(most).redis(&settings(url)).unwrap()
}

/// Sends requests until one gets a permit.
async fn is_free_soon(layer: &RatekeeperLayer<Redis>, key: &str) {
    wait_for(async || (send(layer, of(key)).await.status == 200).then_some(())).await;
}

/// Checks that neither unheld permits nor keys without an expiry remain on the server.
async fn is_empty_soon(server: &RedisServer) {
    assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
    wait_until(|| server.command(&["KEYS", "rate_limit:concurrency:*"]).unwrap().is_empty()).await;
}

/// The number of function calls (FCALL) that the server received.
fn calls(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]).unwrap();
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls="));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrency_stays_within_the_limit_across_processes() {
    let server = RedisServer::start().unwrap();
    let layers = [layer(&server.url(), 3), layer(&server.url(), 3)];
    let most = crowd(&layers).await;
    assert!((1..=3).contains(&most), "{most}");
    assert_eq!((held(&layers[0]), held(&layers[1])), (vec![0], vec![0]));
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn two_processes_share_the_limit_exactly() {
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
    is_free_soon(&other, "a").await;
    drop((second, third));
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn busy_key_needs_few_redis_calls() {
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

/// Otherwise a busy process that keeps its permit for the next request would starve all others.
#[tokio::test]
async fn busy_process_does_not_starve_another() {
    let server = RedisServer::start().unwrap();
    let (busy, other) = (layer(&server.url(), 1), layer(&server.url(), 1));
    let sent = Arc::new(AtomicUsize::new(0));
    let counting = sent.clone();
    let busy = tokio::spawn(async move {
        loop {
            send(&busy, of("a")).await;
            counting.fetch_add(1, Ordering::Relaxed);
            // Longer than the other process waits between its attempts.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    wait_until(|| sent.load(Ordering::Relaxed) >= 5).await;
    for _ in 0..10 {
        is_free_soon(&other, "a").await;
    }
    busy.abort();
    assert!(busy.await.unwrap_err().is_cancelled());
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn permit_is_renewed_while_its_request_is_in_flight() {
    let server = RedisServer::start().unwrap();
    let short = || builder(1).redis(&settings(&server.url()).permit_hold(HOLD)).unwrap();
    let (one, other) = (short(), short());
    let first = under_way(&one, of("a")).await;
    let end = tokio::time::Instant::now() + HOLD + HOLD / 6;
    while tokio::time::Instant::now() < end {
        assert_eq!(send(&other, of("a")).await.status, 429);
        // Until the permit would have expired if it had not been renewed.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(first);
    is_free_soon(&other, "a").await;
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn permits_of_a_killed_process_expire() {
    let server = RedisServer::start().unwrap();
    let layer = builder(2).redis(&settings(&server.url()).permit_hold(HOLD)).unwrap();
    let mut worker = Worker::start("tower::concurrency_redis::a_process_that_holds", &server.url());
    worker.go();
    assert_eq!(worker.read_line(), "[200, 200]");
    assert_eq!(send(&layer, of("a")).await.status, 429);
    // Dropping the worker kills it with SIGKILL.
    drop(worker);
    let killed = tokio::time::Instant::now();
    is_free_soon(&layer, "a").await;
    println!("free {:.0?} after the kill, with a hold of {HOLD:?}", killed.elapsed());
    let (first, second) = (under_way(&layer, of("a")).await, under_way(&layer, of("a")).await);
    assert!(first.status() == 200 && second.status() == 200);
    drop((first, second));
    is_empty_soon(&server).await;
}

/// The worker process. Does nothing when it runs with the other tests.
#[test]
fn a_process_that_holds() {
    let Some(url) = child::task() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    child::wait();
    let held = runtime.block_on(async {
        let layer = builder(2).redis(&settings(&url).permit_hold(HOLD)).unwrap();
        (under_way(&layer, of("a")).await, under_way(&layer, of("a")).await)
    });
    child::say(&format!("[{}, {}]", held.0.status().as_u16(), held.1.status().as_u16()));
    // The process is killed while it waits here.
    child::wait();
}

#[tokio::test]
async fn request_without_all_permits_takes_none_and_charges_nothing() {
    let server = RedisServer::start().unwrap();
    let rules = per_client(4).in_flight_limit(InFlightLimit::new("all", 2)).in_flight_limit(by_user(1));
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
async fn shadow_limits_are_reported_and_never_deny() {
    let server = RedisServer::start().unwrap();
    let (builder, seen) = observed(builder(2).in_flight_limit(InFlightLimit::new("planned", 1).shadow()));
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
async fn request_cancelled_during_decision_releases_its_permit() {
    let server = RedisServer::start().unwrap();
    let proxy = FaultProxy::start(server.port()).unwrap();
    let layer = layer(&proxy.url(), 1);
    let hello = service_fn(|_: Request<String>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    // The connection is open, and its permit is released, before the call.
    assert_eq!(send(&layer, of("a")).await.status, 200);
    is_empty_soon(&server).await;
    let before = proxy.received();
    server.pause().unwrap();
    let mut deciding = Box::pin(layer.layer(hello).oneshot(of("a")));
    assert!(deciding.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    // Until the call is in flight: a paused server does not show it.
    wait_until(|| proxy.received() > before).await;
    drop(deciding);
    server.resume().unwrap();
    is_free_soon(&layer, "a").await;
    assert_eq!(held(&layer), [0]);
    is_empty_soon(&server).await;
}

/// A layer whose Redis server was killed.
async fn orphaned(builder: LayerBuilder, failure: FailurePolicy) -> (RatekeeperLayer<Redis>, RedisServer) {
    let mut server = RedisServer::start().unwrap();
    let settings = settings(&server.url()).on_store_failure(failure).permit_hold(HOLD);
    let layer = builder.redis(&settings).unwrap();
    assert_eq!(send(&layer, of("a")).await.status, 200);
    server.kill().unwrap();
    (layer, server)
}

#[tokio::test]
async fn failure_policy_decides_without_redis() {
    let (open, _server) = orphaned(builder(1), FailurePolicy::Open).await;
    let (first, second) = (under_way(&open, of("b")).await, under_way(&open, of("b")).await);
    assert_eq!((first.status().as_u16(), second.status().as_u16(), held(&open)), (200, 200, vec![2]));

    let (closed, _server) = orphaned(builder(9), FailurePolicy::Closed).await;
    let got = send(&closed, of("b")).await;
    assert_eq!((got.status, got.header("retry-after"), held(&closed)), (503, Some("1"), vec![0]));
    assert!(got.body.contains("http-problem-types#temporary-reduced-capacity"), "{}", got.body);

    // A third of the limit, and at least one permit.
    for (most, nodes, share) in [(7, 3, 2), (2, 3, 1)] {
        let (local, _server) = orphaned(builder(most), FailurePolicy::Local { instances: nodes }).await;
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
async fn permits_taken_during_an_outage_count_after_recovery() {
    let (one, mut server) = orphaned(builder(2), FailurePolicy::Open).await;
    let held =
        [under_way(&one, of("b")).await, under_way(&one, of("b")).await, under_way(&one, of("b")).await];
    server.restart().unwrap();
    let other = layer(&server.url(), 2);
    wait_for(async || (send(&other, of("b")).await.status == 429).then_some(())).await;
    drop(held);
    is_free_soon(&other, "b").await;
    is_empty_soon(&server).await;
}

#[tokio::test]
async fn redis_key_of_a_foreign_type_applies_the_failure_policy() {
    let server = RedisServer::start().unwrap();
    let settings = settings(&server.url()).on_store_failure(FailurePolicy::Closed);
    let layer = builder(2).redis(&settings).unwrap();
    let first = under_way(&layer, of("a")).await;
    let key = server.command(&["KEYS", "rate_limit:concurrency:*"]).unwrap();
    for wrong in [["SET", &key, "text"], ["SADD", &key, "member"]] {
        server.command(&["DEL", &key]).unwrap();
        server.command(&wrong).unwrap();
        assert_eq!(send(&layer, of("a")).await.status, 503);
        assert_eq!(send(&layer, of("b")).await.status, 200);
    }
    server.command(&["DEL", &key]).unwrap();
    drop(first);
}

#[tokio::test]
async fn too_short_hold_is_an_error() {
    let settings = Settings::new("redis://127.0.0.1:1").permit_hold(Duration::from_millis(1));
    let error = builder(1).redis(&settings).unwrap_err();
    assert_eq!(error, LayerError::Redis(SettingsError::PermitHold));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_nodes_enforce_concurrency_limits_like_one_server() {
    let cluster = RedisCluster::start().unwrap();
    let both = || {
        let rules = RatekeeperLayer::builder()
            .in_flight_limit(InFlightLimit::new("all", 4))
            .in_flight_limit(by_user(2));
        rules.redis(&settings(&cluster.url()).permit_hold(HOLD)).unwrap()
    };
    let (one, other) = (both(), both());
    let mut held = Vec::new();
    for (layer, user) in [(&one, "a"), (&other, "a"), (&one, "b"), (&other, "c")] {
        held.push(under_way(layer, of(user)).await);
    }
    assert!(held.iter().all(|response| response.status() == 200));
    assert_eq!(statuses(&one, [of("a"), of("d")]).await, [429, 429]);
    // By now the permits have been renewed, on several nodes.
    tokio::time::sleep(HOLD + HOLD / 6).await;
    assert_eq!(statuses(&other, [of("a"), of("d")]).await, [429, 429]);
    drop(held);
    is_free_soon(&one, "a").await;
    assert_eq!(cluster.keys_without_expiry().unwrap(), Vec::<String>::new());
}

/// Also while Redis is unavailable and each process counts for itself.
#[tokio::test]
async fn permits_stay_held_through_a_change_of_the_limit() {
    for is_outage in [false, true] {
        let mut server = RedisServer::start().unwrap();
        let local = Settings::new(&server.url())
            .deadline(if is_outage { Duration::from_millis(200) } else { PATIENT })
            .on_store_failure(FailurePolicy::Local { instances: 1 });
        let first = builder(2).redis(&local).unwrap();
        if is_outage {
            server.kill().unwrap();
        }
        let held_two = [under_way(&first, of("a")).await, under_way(&first, of("a")).await];
        assert_eq!(held_two.each_ref().map(|response| response.status().as_u16()), [200, 200]);
        let lowered = builder(1).reload_from(&first).unwrap();
        let other = InFlightLimit::new("other", 5);
        let raised = builder(3).in_flight_limit(other).reload_from(&lowered).unwrap();
        drop(first);
        assert_eq!(held(&raised), [2, 0]);
        check_denial(&send(&lowered, of("a")).await);
        let third = under_way(&raised, of("a")).await;
        assert_eq!(third.status(), 200, "outage: {is_outage}");
        check_denial(&send(&raised, of("a")).await);
        drop((held_two, third));
        assert_eq!(held(&raised), [0, 0]);
    }
}
