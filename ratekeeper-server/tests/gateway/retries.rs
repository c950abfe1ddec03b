//! Retries, their budget, and upstream connection limits.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testbed::http::{get, header, read_head, read_response, send_raw, status};
use testbed::http2::kind::{DATA, GOAWAY, RST_STREAM, SETTINGS};
use testbed::http2::{PREFACE, frame};
use testbed::wait_until;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::http2_abuse::REFUSED_STREAM;
use super::peers::{ConfigFile, Frame, RawHttp2, closed_address, scripted};
use super::support::{Upstream, run};

pub(crate) const INTERNAL_ERROR: u32 = 2;
const OFF: &str = ", outlier_ejection: off";

async fn request_status(address: SocketAddr, method: &str, body: &str) -> u16 {
    let length = body.len();
    let head = format!(
        "{method} / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    status(&send_raw(address, head).await)
}

/// A server that reads requests and closes the connection without a response, and the number of requests it read.
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
async fn refused_connection_fails_no_request() {
    let upstream = Upstream::start().await;
    let gateway =
        run(&ConfigFile { upstream: OFF, ..ConfigFile::default() }.to(&[closed_address(), upstream.address]))
            .await;
    for (method, body) in [("GET", ""), ("POST", "body"), ("PUT", "body"), ("PATCH", "body"), ("DELETE", "")]
    {
        // Of two requests in turn, one goes to the unreachable address.
        assert_eq!(
            (
                request_status(gateway.address, method, body).await,
                request_status(gateway.address, method, body).await
            ),
            (200, 200),
            "{method}"
        );
    }
    assert_eq!(upstream.requests().len(), 10);
    assert!(upstream.requests()[2..8].iter().all(|seen| seen.body == "body"));
}

/// The budget protects overloaded servers from extra load; a server that was never reached has no load.
#[tokio::test]
async fn refused_connection_does_not_use_the_retry_budget() {
    let upstream = Upstream::start().await;
    let setting = ", outlier_ejection: off, retry_budget: 0%";
    let gateway = run(&ConfigFile { upstream: setting, ..ConfigFile::default() }.to(&[
        closed_address(),
        upstream.address,
        closed_address(),
    ]))
    .await;
    for number in 0..50 {
        assert_eq!(request_status(gateway.address, "POST", "body").await, 200, "{number}");
    }
    assert_eq!(upstream.requests().len(), 50);
    let all_unreachable =
        run(&ConfigFile { upstream: setting, ..ConfigFile::default() }
            .to(&[closed_address(), closed_address()]))
        .await;
    assert_eq!(request_status(all_unreachable.address, "GET", "").await, 502);
}

#[tokio::test]
async fn only_idempotent_requests_without_a_body_are_retried() {
    let (silent, taken) = silent().await;
    let upstream = Upstream::start().await;
    let gateway =
        run(&ConfigFile { upstream: OFF, ..ConfigFile::default() }.to(&[silent, upstream.address])).await;
    let cases = [
        ("GET", "", 200),
        ("HEAD", "", 200),
        ("OPTIONS", "", 200),
        ("PUT", "", 200),
        ("DELETE", "", 200),
        ("POST", "", 502),
        ("POST", "body", 502),
        ("PATCH", "", 502),
        // Its body has already been sent.
        ("PUT", "body", 502),
    ];
    for (method, body, wanted) in cases {
        let (taken_before, seen_before) = (taken.load(Ordering::Relaxed), upstream.requests().len());
        // One of two requests goes to the silent server first.
        let mut statuses = Vec::new();
        while taken.load(Ordering::Relaxed) == taken_before {
            statuses.push(request_status(gateway.address, method, body).await);
        }
        assert_eq!(statuses.pop(), Some(wanted), "{method} {body}");
        assert_eq!(taken.load(Ordering::Relaxed), taken_before + 1, "{method} {body}");
        let answered = statuses.len() + usize::from(wanted == 200);
        assert_eq!(upstream.requests().len(), seen_before + answered, "{method} {body}");
    }
}

#[tokio::test]
async fn retries_stay_within_the_budget() {
    const REQUESTS: usize = 100;
    for (setting, max) in [
        (", outlier_ejection: off, retry_budget: 0%", REQUESTS),
        (", outlier_ejection: off, retry_budget: 20%", REQUESTS + 10 + 20),
    ] {
        let (address, taken) = silent().await;
        let gateway = run(&ConfigFile { upstream: setting, ..ConfigFile::default() }.to(&[address])).await;
        for _ in 0..REQUESTS {
            assert_eq!(request_status(gateway.address, "GET", "").await, 502);
        }
        let taken = taken.load(Ordering::Relaxed);
        assert!((REQUESTS..=max).contains(&taken), "{setting}: {taken}");
        assert!(max == REQUESTS || taken > REQUESTS, "{setting}: {taken}");
    }
}

#[tokio::test]
async fn post_is_never_retried() {
    let (address, taken) = silent().await;
    let gateway = run(&ConfigFile { upstream: OFF, ..ConfigFile::default() }.to(&[address])).await;
    for number in 1..=20 {
        assert_eq!(request_status(gateway.address, "POST", "body").await, 502);
        assert_eq!(taken.load(Ordering::Relaxed), number);
    }
}

/// A server closes a connection just as the next request arrives on it.
#[tokio::test]
async fn idempotent_request_on_a_stale_connection_is_sent_on_a_fresh_one() {
    let count = Arc::new(AtomicUsize::new(0));
    let taken = count.clone();
    // Each connection answers one request and closes at the second; from the fifth on, at the first.
    let address = scripted(move |mut stream, number| {
        let taken = taken.clone();
        async move {
            for is_answered in [number < 4, false] {
                read_head(&mut stream).await;
                taken.fetch_add(1, Ordering::Relaxed);
                if !is_answered {
                    return;
                }
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
            }
        }
    })
    .await;
    let setting = ", retry_budget: 0%, outlier_ejection: { after: 1, for: 1h }, max_connections: 1";
    let gateway = run(&ConfigFile { upstream: setting, ..ConfigFile::default() }.to(&[address])).await;
    let mut client = TcpStream::connect(gateway.address).await.unwrap();
    // One attempt on the first connection, then one on a stale and one on a fresh connection each.
    for (method, wanted, attempts) in
        [("GET", 200, 1), ("GET", 200, 2), ("DELETE", 200, 2), ("OPTIONS", 200, 2), ("POST", 502, 1)]
    {
        let before = count.load(Ordering::Relaxed);
        client.write_all(format!("{method} / HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).await.unwrap();
        assert_eq!(status(&read_response(&mut client).await), wanted, "{method}");
        assert_eq!(count.load(Ordering::Relaxed) - before, attempts, "{method}");
    }
    // A fresh connection that fails is a failure.
    assert_eq!(request_status(gateway.address, "GET", "").await, 502);
}

/// Servers close connections that they have kept for long enough. The server has not seen a request that meets this,
/// so even a POST is sent over another connection, and neither the retry budget nor the failure count is charged.
#[tokio::test]
async fn closed_idle_connection_is_not_a_failure() {
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
    let gateway = run(&ConfigFile {
        upstream: ", retry_budget: 0%, outlier_ejection: { after: 1, for: 1h }",
        ..ConfigFile::default()
    }
    .to(&[address]))
    .await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    for number in 1..=100 {
        let (method, body) = if number % 2 == 0 { ("GET", "") } else { ("POST", "body") };
        let head = format!("{method} / HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(head.as_bytes()).await.unwrap();
        let response = read_response(&mut stream).await;
        assert!(status(&response) == 200 && response.ends_with("ok"), "{number}: {response}");
        wait_until(|| closed.load(Ordering::Relaxed) == number).await;
    }
}

/// Number of workers, used as the connection limit.
fn workers() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

#[tokio::test]
async fn requests_above_the_upstream_connection_limit_get_503() {
    let upstream = Upstream::start().await;
    let setting = format!(", max_connections: {}, timeouts: {{ connect: 100ms }}", workers());
    let gateway =
        run(&ConfigFile { upstream: &setting, ..ConfigFile::default() }.to(&[upstream.address])).await;
    let address = gateway.address;
    let held: Vec<_> =
        (0..workers()).map(|_| tokio::spawn(async move { get(address, "/hold", "").await })).collect();
    upstream.wait_for_held(workers()).await;
    let rejected = get(address, "/", "").await;
    assert_eq!(status(&rejected), 503, "{rejected}");
    assert!(header(&rejected, "retry-after").is_some(), "{rejected}");
    upstream.release(workers());
    for sent in held {
        assert_eq!(status(&sent.await.unwrap()), 200);
    }
    assert_eq!(status(&get(address, "/", "").await), 200);
    assert_eq!(*upstream.connections.lock().unwrap(), workers());
}

#[tokio::test]
async fn waiting_request_gets_the_next_upstream_connection() {
    let upstream = Upstream::start().await;
    let setting = format!(", max_connections: {}, timeouts: {{ connect: 30s }}", workers());
    let gateway =
        run(&ConfigFile { upstream: &setting, ..ConfigFile::default() }.to(&[upstream.address])).await;
    let address = gateway.address;
    let sent: Vec<_> =
        (0..20).map(|_| tokio::spawn(async move { get(address, "/hold", "").await })).collect();
    upstream.release(20);
    for sent in sent {
        assert_eq!(status(&sent.await.unwrap()), 200);
    }
    assert!(*upstream.connections.lock().unwrap() <= workers());
}

/// A server over HTTP/2 whose first connection responds to each request with the frames of `refuse`; later ones answer.
/// Returns its address, and the bodies of the requests that were answered.
async fn refusing(refuse: fn(u32) -> Vec<u8>) -> (SocketAddr, Arc<Mutex<Vec<Bytes>>>, Arc<AtomicUsize>) {
    let (bodies, refused) = (Arc::<Mutex<Vec<Bytes>>>::default(), Arc::<AtomicUsize>::default());
    let shared = (bodies.clone(), refused.clone());
    let address = scripted(move |mut stream, number| {
        let (bodies, refused) = shared.clone();
        async move {
            if number == 0 {
                stream.read_exact(&mut [0; PREFACE.len()]).await.unwrap();
                stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
                let mut connection = RawHttp2(stream);
                // After the body, so that the gateway has to send it again.
                while let Some(Frame { kind, stream, .. }) = connection.next().await {
                    if kind == DATA {
                        refused.fetch_add(1, Ordering::Relaxed);
                        let _ = connection.0.write_all(&refuse(stream)).await;
                    }
                }
                return;
            }
            let respond = service_fn(move |request: Request<Incoming>| {
                let bodies = bodies.clone();
                async move {
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    bodies.lock().unwrap().push(body);
                    Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("ok")))
                }
            });
            let serving = http2::Builder::new(TokioExecutor::new());
            let _ = serving.serve_connection(TokioIo::new(stream), respond).await;
        }
    })
    .await;
    (address, bodies, refused)
}

/// The server states that it has not processed the request, so any method may be retried, without the retry budget.
#[tokio::test]
async fn requests_that_an_http2_server_has_not_processed_are_sent_again() {
    let refusals: [fn(u32) -> Vec<u8>; 2] = [
        |stream| frame(RST_STREAM, 0, stream, &REFUSED_STREAM.to_be_bytes()),
        |_| frame(GOAWAY, 0, 0, &[0; 8]),
    ];
    for refuse in refusals {
        let (address, bodies, refused) = refusing(refuse).await;
        let setting = ", protocol: http2, retry_budget: 0%, outlier_ejection: { after: 1, for: 1h }";
        let gateway = run(&ConfigFile { upstream: setting, ..ConfigFile::default() }.to(&[address])).await;
        assert_eq!(request_status(gateway.address, "POST", "body").await, 200);
        assert_eq!(*bodies.lock().unwrap(), ["body"]);
        assert_eq!(refused.load(Ordering::Relaxed), 1);
    }
}

#[tokio::test]
async fn post_that_an_http2_server_may_have_processed_is_not_sent_again() {
    let (address, bodies, refused) =
        refusing(|stream| frame(RST_STREAM, 0, stream, &INTERNAL_ERROR.to_be_bytes())).await;
    let file = ConfigFile { upstream: ", protocol: http2", ..ConfigFile::default() };
    let gateway = run(&file.to(&[address])).await;
    assert_eq!(request_status(gateway.address, "POST", "body").await, 502);
    assert_eq!((refused.load(Ordering::Relaxed), bodies.lock().unwrap().len()), (1, 0));
}
