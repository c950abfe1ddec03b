//! Graceful shutdown: which requests are served, and for how long.

use std::time::Duration;
use testbed::wait_until;
use tokio::time::Instant;

use nix::sys::signal::Signal;
use tokio::task::JoinSet;

use crate::run::support::{Client, Folder, Process, Tally, Upstream, get, one_route};

/// Sends `count` requests that the upstream holds.
async fn hold(address: std::net::SocketAddr, upstream: &Upstream, count: usize) -> JoinSet<Tally> {
    let mut clients = JoinSet::new();
    for _ in 0..count {
        clients.spawn(async move {
            let (begun, mut tally) = (Instant::now(), Tally::default());
            let response = Client::new(address).get("/hold", "").await;
            tally.add(begun.elapsed(), &response);
            tally
        });
    }
    wait_until(|| {
        if let Some(early) = clients.try_join_next() {
            panic!("{} requests wait, and one ended: {:?}", upstream.waiting(), early.unwrap());
        }
        upstream.waiting() == count
    })
    .await;
    clients
}

async fn sum(mut clients: JoinSet<Tally>) -> Tally {
    let mut all = Tally::default();
    while let Some(tally) = clients.join_next().await {
        all.merge(tally.unwrap());
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn thousand_requests_in_flight_are_answered_during_shutdown() {
    let (folder, upstream) = (Folder::new("drain"), Upstream::start().await);
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let at = upstream.address();
        let text = format!(
            "admin: 127.0.0.1:0\n\
             gateway:\n  listen: 127.0.0.1:0\n  \
             upstreams: {{ it: {{ addresses: http://{at}, timeouts: {{ connect: 10s }}, max_connections: 2000 }} }}\n  \
             routes: [{{ id: all, limits: all, upstream: it }}]\n"
        );
        let (mut process, address) = Process::serving(&folder.write("ratekeeper.yaml", &text)).await;
        let admin = process.admin().await;
        let clients = hold(address, &upstream, 1000).await;
        // An idle keep-alive connection, which may send one more request.
        let mut idle = Client::new(address);
        assert_eq!(idle.get("/", "").await.unwrap().status, 200);
        process.signal(signal);
        process.line("graceful shutdown started").await;
        assert_eq!(get(admin, "/readyz").await.status, 503, "load balancers must stop sending requests");
        let last = idle.get("/", "").await.unwrap();
        assert_eq!((last.status, last.header("connection")), (200, Some("close")));
        wait_until(|| std::net::TcpStream::connect(address).is_err()).await;
        assert!(!process.has_ended());
        upstream.release(1000);
        let tally = sum(clients).await;
        println!("{signal} with 1000 requests in flight: {tally}");
        tally.assert_all(200);
        assert_eq!(tally.of(200), 1000);
        assert_eq!(process.ended().await, 0);
        process.line(r#""message":"shut down""#).await;
        wait_until(|| process.stdout().len() == 1002).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_longer_than_the_drain_timeout_are_cut_off_and_counted() {
    let (folder, upstream) = (Folder::new("cut"), Upstream::start().await);
    let file = folder.write("ratekeeper.yaml", &one_route(&upstream, "", "  timeouts: { drain: 1s }"));
    let (mut process, address) = Process::serving(&file).await;
    let clients = hold(address, &upstream, 3).await;
    let begun = Instant::now();
    process.signal(Signal::SIGTERM);
    assert_eq!(process.ended().await, 0);
    assert!(begun.elapsed() >= Duration::from_secs(1));
    process.line("some connections were still open after the drain timeout").await;
    assert_eq!(sum(clients).await.failed.len(), 3);
}

#[tokio::test]
async fn silent_client_does_not_delay_shutdown() {
    let (folder, upstream) = (Folder::new("silent"), Upstream::start().await);
    let file =
        folder.write("ratekeeper.yaml", &one_route(&upstream, "", "  timeouts: { header: 1h, drain: 1h }"));
    let (mut process, address) = Process::serving(&file).await;
    let silent = std::net::TcpStream::connect(address).unwrap();
    process.until_metric("ratekeeper_connections", 1).await;
    process.signal(Signal::SIGTERM);
    assert_eq!(process.ended().await, 0);
    drop(silent);
}

#[tokio::test(flavor = "multi_thread")]
async fn second_signal_stops_immediately() {
    let (folder, upstream) = (Folder::new("second"), Upstream::start().await);
    let file = folder.write("ratekeeper.yaml", &one_route(&upstream, "", "  timeouts: { drain: 1h }"));
    let (mut process, address) = Process::serving(&file).await;
    let clients = hold(address, &upstream, 1).await;
    process.signal(Signal::SIGTERM);
    process.line("graceful shutdown started").await;
    process.signal(Signal::SIGINT);
    assert_eq!(process.ended().await, 0);
    process.line("stopped immediately by a second signal").await;
    assert_eq!(sum(clients).await.failed.len(), 1);
}
