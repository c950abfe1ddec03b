//! What is sent once more, and what never is; and how many connections that takes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::peers::{File, nobody, read_answer, read_head, scripted};
use super::support::{Upstream, get, header, run, say, status, until};

const OFF: &str = ", eject: off";

async fn ask(address: SocketAddr, method: &str, body: &str) -> u16 {
    let length = body.len();
    let head = format!(
        "{method} / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    status(&say(address, head).await)
}

/// A server that takes requests and closes the connection without a word, and how often.
async fn silent() -> (SocketAddr, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let taken = count.clone();
    let address = scripted(move |mut stream, _| {
        let taken = taken.clone();
        async move {
            read_head(&mut stream).await;
            taken.fetch_add(1, Ordering::Relaxed);
        }
    })
    .await;
    (address, count)
}

/// Nothing was sent, so nothing can happen twice.
#[tokio::test]
async fn whoever_refuses_connections_costs_no_request() {
    let upstream = Upstream::start().await;
    let gateway = run(&File { upstream: OFF, ..File::default() }.to(&[nobody(), upstream.address])).await;
    for (method, body) in [("GET", ""), ("POST", "body"), ("PUT", "body"), ("PATCH", "body"), ("DELETE", "")]
    {
        // Two in turn: one of them goes to the one that is not there.
        assert_eq!(
            (ask(gateway.address, method, body).await, ask(gateway.address, method, body).await),
            (200, 200),
            "{method}"
        );
    }
    assert_eq!(upstream.seen().len(), 10);
    assert!(upstream.seen()[2..8].iter().all(|seen| seen.body == "body"));
}

/// The budget is there so that servers in trouble do not get more to do; one that was never reached has nothing to do.
#[tokio::test]
async fn nor_does_it_cost_the_budget() {
    let upstream = Upstream::start().await;
    let setting = ", eject: off, retries: 0";
    let gateway =
        run(&File { upstream: setting, ..File::default() }.to(&[nobody(), upstream.address, nobody()])).await;
    for number in 0..50 {
        assert_eq!(ask(gateway.address, "POST", "body").await, 200, "{number}");
    }
    assert_eq!(upstream.seen().len(), 50);
    let all_away = run(&File { upstream: setting, ..File::default() }.to(&[nobody(), nobody()])).await;
    assert_eq!(ask(all_away.address, "GET", "").await, 502);
}

#[tokio::test]
async fn only_what_may_happen_twice_is_sent_twice() {
    let (silent, taken) = silent().await;
    let upstream = Upstream::start().await;
    let gateway = run(&File { upstream: OFF, ..File::default() }.to(&[silent, upstream.address])).await;
    let cases = [
        ("GET", "", 200),
        ("HEAD", "", 200),
        ("OPTIONS", "", 200),
        ("PUT", "", 200),
        ("DELETE", "", 200),
        ("POST", "", 502),
        ("POST", "body", 502),
        ("PATCH", "", 502),
        // Its body is gone.
        ("PUT", "body", 502),
    ];
    for (method, body, wanted) in cases {
        let (taken_before, seen_before) = (taken.load(Ordering::Relaxed), upstream.seen().len());
        // One of two goes to the silent one first.
        let mut statuses = Vec::new();
        while taken.load(Ordering::Relaxed) == taken_before {
            statuses.push(ask(gateway.address, method, body).await);
        }
        assert_eq!(statuses.pop(), Some(wanted), "{method} {body}");
        assert_eq!(taken.load(Ordering::Relaxed), taken_before + 1, "{method} {body}");
        let answered = statuses.len() + usize::from(wanted == 200);
        assert_eq!(upstream.seen().len(), seen_before + answered, "{method} {body}");
    }
}

#[tokio::test]
async fn retries_have_a_budget() {
    const REQUESTS: usize = 100;
    for (setting, most) in
        [(", eject: off, retries: 0", REQUESTS), (", eject: off, retries: 20", REQUESTS + 10 + 20)]
    {
        let (address, taken) = silent().await;
        let gateway = run(&File { upstream: setting, ..File::default() }.to(&[address])).await;
        for _ in 0..REQUESTS {
            assert_eq!(ask(gateway.address, "GET", "").await, 502);
        }
        let taken = taken.load(Ordering::Relaxed);
        assert!((REQUESTS..=most).contains(&taken), "{setting}: {taken}");
        assert!(most == REQUESTS || taken > REQUESTS, "{setting}: {taken}");
    }
}

#[tokio::test]
async fn a_post_is_never_sent_twice() {
    let (address, taken) = silent().await;
    let gateway = run(&File { upstream: OFF, ..File::default() }.to(&[address])).await;
    for number in 1..=20 {
        assert_eq!(ask(gateway.address, "POST", "body").await, 502);
        assert_eq!(taken.load(Ordering::Relaxed), number);
    }
}

/// Servers close connections that they have kept for long enough. A request that meets that has not been seen by anybody,
/// so even a POST goes over another connection, and neither the budget nor the server's record pays for it.
#[tokio::test]
async fn a_kept_connection_that_was_closed_is_no_failure() {
    let closed = Arc::new(AtomicUsize::new(0));
    let count = closed.clone();
    let address = scripted(move |mut stream, _| {
        let count = count.clone();
        async move {
            let head = read_head(&mut stream).await;
            let mut body = vec![0; header(&head, "content-length").map_or(0, |it| it.parse().unwrap())];
            stream.read_exact(&mut body).await.unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
            drop(stream);
            count.fetch_add(1, Ordering::Relaxed);
        }
    })
    .await;
    let gateway =
        run(&File { upstream: ", retries: 0, eject: { after: 1, for: 1h }", ..File::default() }
            .to(&[address]))
        .await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    for number in 1..=100 {
        let (method, body) = if number % 2 == 0 { ("GET", "") } else { ("POST", "body") };
        let head = format!("{method} / HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = read_answer(&mut stream).await;
        assert!(status(&answer) == 200 && answer.ends_with("ok"), "{number}: {answer}");
        until(|| closed.load(Ordering::Relaxed) == number).await;
    }
}

/// A worker has its share of the connections, and at least one.
fn workers() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

#[tokio::test]
async fn connections_to_an_upstream_have_a_bound() {
    let upstream = Upstream::start().await;
    let setting = format!(", max_connections: {}, connect_timeout: 100ms", workers());
    let gateway = run(&File { upstream: &setting, ..File::default() }.to(&[upstream.address])).await;
    let address = gateway.address;
    let held: Vec<_> =
        (0..workers()).map(|_| tokio::spawn(async move { get(address, "/hold", "").await })).collect();
    upstream.until_waiting(workers()).await;
    let refused = get(address, "/", "").await;
    assert_eq!(status(&refused), 503, "{refused}");
    assert!(header(&refused, "retry-after").is_some(), "{refused}");
    upstream.let_go(workers());
    for asked in held {
        assert_eq!(status(&asked.await.unwrap()), 200);
    }
    assert_eq!(status(&get(address, "/", "").await), 200);
    assert_eq!(*upstream.connections.lock().unwrap(), workers());
}

#[tokio::test]
async fn whoever_waits_for_a_connection_gets_the_next() {
    let upstream = Upstream::start().await;
    let setting = format!(", max_connections: {}, connect_timeout: 30s", workers());
    let gateway = run(&File { upstream: &setting, ..File::default() }.to(&[upstream.address])).await;
    let address = gateway.address;
    let asked: Vec<_> =
        (0..20).map(|_| tokio::spawn(async move { get(address, "/hold", "").await })).collect();
    upstream.let_go(20);
    for asked in asked {
        assert_eq!(status(&asked.await.unwrap()), 200);
    }
    assert!(*upstream.connections.lock().unwrap() <= workers());
}
