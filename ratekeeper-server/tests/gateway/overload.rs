//! Limits of the gateway itself: requests in flight and connections.

use testbed::http::{get, header, read_all, read_response, status};
use testbed::{TEST_TIMEOUT, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::peers::ConfigFile;
use super::support::{TestGateway, Upstream, run};

async fn bounded(upstream: &Upstream) -> TestGateway {
    let at = upstream.address;
    run(&format!(
        "gateway:
  listen: 127.0.0.1:0
  max_in_flight: 10
  routes:
    - {{ id: pay, limits: all, path: /hold/pay, upstream: http://{at}, critical: true }}
    - {{ id: rest, limits: all, upstream: http://{at} }}
"
    ))
    .await
}

async fn hold(gateway: &TestGateway, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).await.unwrap();
    stream
}

/// Connections to the only address of the only upstream.
pub(crate) fn upstream_connections(gateway: &TestGateway) -> usize {
    let metrics = gateway.gateway.status().metrics();
    let line = metrics.lines().find(|line| line.starts_with("ratekeeper_upstream_connections{")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn assert_shed(response: &str) {
    assert_eq!(status(response), 503, "{response}");
    assert_eq!(header(response, "retry-after"), Some("1"), "{response}");
    assert_eq!(header(response, "content-type"), Some("application/problem+json"), "{response}");
}

#[tokio::test]
async fn routes_that_are_not_critical_are_shed_first() {
    let upstream = Upstream::start().await;
    let gateway = bounded(&upstream).await;
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(hold(&gateway, "/hold").await);
    }
    upstream.wait_for_held(8).await;
    assert_shed(&get(gateway.address, "/", "").await);
    for _ in 0..2 {
        held.push(hold(&gateway, "/hold/pay").await);
    }
    upstream.wait_for_held(10).await;
    assert_shed(&get(gateway.address, "/hold/pay", "").await);
    assert_eq!(gateway.metric("ratekeeper_requests_in_flight"), 10);

    // Permits are released when responses have been sent.
    upstream.release(10);
    for stream in &mut held {
        assert_eq!(status(&read_response(stream).await), 200);
    }
    gateway.wait_for_in_flight(0).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    let line = gateway.log.lines(13).await.into_iter().find(|line| line.contains("503")).unwrap();
    assert!(line.contains(r#""decision":"shed""#), "{line}");
}

#[tokio::test]
async fn disconnected_clients_release_their_permits() {
    let upstream = Upstream::start().await;
    let gateway = bounded(&upstream).await;
    for _ in 0..3 {
        let mut held = Vec::new();
        for _ in 0..8 {
            held.push(hold(&gateway, "/hold").await);
        }
        gateway.wait_for_in_flight(8).await;
        assert_shed(&get(gateway.address, "/", "").await);
        drop(held);
        gateway.wait_for_in_flight(0).await;
    }
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
}

/// A byte of a further request hides the disconnect from a reader that waits for the response first.
#[tokio::test]
async fn clients_that_disconnect_after_another_byte_release_their_permits() {
    let silent = super::peers::scripted(|mut stream, _| async move {
        let head = testbed::http::read_head(&mut stream).await;
        // A response that has begun is awaited as well.
        if head.starts_with("GET /begun") {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n").await.unwrap();
        }
        let _ = stream.read_u8().await;
    })
    .await;
    let gateway = run(&ConfigFile {
        gateway: "max_in_flight: 6",
        upstream: ", timeouts: { read: 10m }",
        route: ", timeout: 10m, critical: true",
        ..ConfigFile::default()
    }
    .to(&[silent]))
    .await;
    for is_reset in [true, false] {
        let mut clients = Vec::new();
        for number in 0..6 {
            let path = if number % 2 == 0 { "/" } else { "/begun" };
            let mut stream = TcpStream::connect(gateway.address).await.unwrap();
            let sent = format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\nG");
            stream.write_all(sent.as_bytes()).await.unwrap();
            clients.push(stream);
        }
        gateway.wait_for_in_flight(6).await;
        wait_until(|| upstream_connections(&gateway) == 6).await;
        assert_shed(&get(gateway.address, "/", "").await);
        for stream in clients {
            if is_reset {
                socket2::SockRef::from(&stream).set_linger(Some(std::time::Duration::ZERO)).unwrap();
            }
        }
        gateway.wait_for_in_flight(0).await;
        wait_until(|| upstream_connections(&gateway) == 0).await;
    }
}

/// A response counts until its last byte is sent or the client disconnects.
#[tokio::test]
async fn unread_response_keeps_its_permit() {
    let address = super::peers::scripted(|mut stream, _| async move {
        testbed::http::read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await.unwrap();
        while stream.write_all(b"4\r\nmore\r\n").await.is_ok() {}
    })
    .await;
    let gateway =
        run(&ConfigFile { gateway: "max_in_flight: 1", ..ConfigFile::default() }.to(&[address])).await;
    let mut stream = hold(&gateway, "/").await;
    assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 1);
    assert_shed(&get(gateway.address, "/", "").await);
    drop(stream);
    gateway.wait_for_in_flight(0).await;
}

#[tokio::test]
async fn connections_above_the_limit_are_closed() {
    let upstream = Upstream::start().await;
    let gateway =
        run(&ConfigFile { gateway: "max_connections: 3", ..ConfigFile::default() }.to(&[upstream.address]))
            .await;
    let mut kept = Vec::new();
    for number in 1..=3 {
        kept.push(hold(&gateway, "/hold").await);
        upstream.wait_for_held(number).await;
    }
    let mut fourth = TcpStream::connect(gateway.address).await.unwrap();
    assert_eq!(read_all(&mut fourth).await, "", "closed immediately");
    assert_eq!(gateway.metric("ratekeeper_connections"), 3);
    assert_eq!(gateway.metric(r#"ratekeeper_connections_rejected_total{reason="max_connections"}"#), 1);
    // Existing connections with requests are unaffected.
    upstream.release(3);
    for stream in &mut kept {
        assert_eq!(status(&read_response(stream).await), 200);
    }
    kept.pop();
    wait_until(|| gateway.metric("ratekeeper_connections") == 2).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
}

#[tokio::test]
async fn idle_connections_are_closed_when_the_limit_is_near() {
    let upstream = Upstream::start().await;
    let file = ConfigFile { gateway: "max_connections: 10", ..ConfigFile::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    let busy = hold(&gateway, "/hold").await;
    upstream.wait_for_held(1).await;
    let mut kept = Vec::new();
    for number in 0..40 {
        let mut stream = hold(&gateway, "/").await;
        assert_eq!(status(&read_response(&mut stream).await), 200, "connection {number}");
        kept.push(stream);
    }
    let mut oldest = kept.remove(0);
    assert_eq!(read_all(&mut oldest).await, "", "closed");
    let mut latest = kept.pop().unwrap();
    latest.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    assert_eq!(status(&read_response(&mut latest).await), 200);
    assert!(gateway.metric("ratekeeper_connections") <= 10);
    wait_until(|| gateway.metric("ratekeeper_connections_reaped_total") >= 30).await;
    assert_eq!(gateway.metric(r#"ratekeeper_connections_rejected_total{reason="max_connections"}"#), 0);
    upstream.release(1);
    let mut busy = busy;
    assert_eq!(status(&read_response(&mut busy).await), 200, "a connection with a request is not closed");
}

/// Connects from a loopback address and sends the begin of a request.
async fn begin_request(gateway: &TestGateway, from: &str, sent: impl AsRef<[u8]>) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(from.parse().unwrap()).unwrap();
    let mut stream = socket.connect(gateway.address).await.unwrap();
    stream.write_all(sent.as_ref()).await.unwrap();
    stream
}

#[tokio::test]
async fn incomplete_request_heads_do_not_take_all_connections() {
    const MAX: usize = 20;
    let upstream = Upstream::start().await;
    let file = ConfigFile { gateway: "max_connections: 20", ..ConfigFile::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    let mut silent = Vec::new();
    for sent in ["", "G", "GET / HTTP/1.1\r\nHo", "PRI * HT", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        for number in 0..MAX {
            let from = if number % 2 == 0 { "127.0.0.2:0" } else { "127.0.0.3:0" };
            silent.push(begin_request(&gateway, from, sent).await);
        }
        // All at once, so that the gateway has no time between them.
        let clients: Vec<_> = (0..MAX / 2)
            .map(|_| {
                let address = gateway.address;
                tokio::spawn(async move { status(&get(address, "/", "").await) })
            })
            .collect();
        for client in clients {
            assert_eq!(client.await.unwrap(), 200, "after incomplete request heads {sent:?}");
        }
    }
    assert!(gateway.metric("ratekeeper_connections") <= MAX);
    assert_eq!(gateway.metric(r#"ratekeeper_connections_rejected_total{reason="max_connections"}"#), 0);
    let mut oldest = silent.remove(0);
    assert_eq!(read_all(&mut oldest).await, "", "closed");
}

/// Opens connections that send the begin of a request, from two clients. They are accepted before later ones.
async fn begin_requests(gateway: &TestGateway, count: usize, sent: impl AsRef<[u8]>) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    for number in 0..count {
        let from = if number % 2 == 0 { "127.0.0.2:0" } else { "127.0.0.3:0" };
        streams.push(begin_request(gateway, from, &sent).await);
    }
    streams
}

#[tokio::test]
async fn connections_that_have_ended_do_not_delay_new_ones() {
    const MAX: usize = 40;
    let upstream = Upstream::start().await;
    let file = ConfigFile { gateway: "max_connections: 40", ..ConfigFile::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    let silent = begin_requests(&gateway, MAX, "GET / HTTP/1.1\r\nHo").await;
    // Chooses the next connections to close.
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    drop(silent);
    wait_until(|| gateway.metric("ratekeeper_connections") == 0).await;
    let silent = begin_requests(&gateway, MAX, "GET / HTTP/1.1\r\nHo").await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    assert_eq!(gateway.metric(r#"ratekeeper_connections_rejected_total{reason="max_connections"}"#), 0);
    drop(silent);
}

/// The gateway reads on for two seconds after its last response on a connection.
#[tokio::test]
async fn connections_after_their_last_response_do_not_delay_new_ones() {
    const MAX: usize = 20;
    let upstream = Upstream::start().await;
    let file = ConfigFile { gateway: "max_connections: 20", ..ConfigFile::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    let mut lingering = begin_requests(&gateway, MAX, "GET / HTTP/9.9\r\n").await;
    for stream in &mut lingering {
        assert_eq!(status(&read_all(stream).await), 400);
    }
    for _ in 0..MAX {
        assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    }
    assert_eq!(gateway.metric(r#"ratekeeper_connections_rejected_total{reason="max_connections"}"#), 0);
}

/// The client does not answer the PING of a graceful shutdown, so the shutdown does not end.
#[tokio::test]
async fn http2_client_that_ignores_a_graceful_shutdown_is_disconnected() {
    // The preface, SETTINGS, and a request for `/` of the host `a`.
    const REQUEST: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\
        \0\0\x06\x01\x05\0\0\0\x01\x82\x84\x86\x41\x01a";
    let upstream = Upstream::start().await;
    let file = ConfigFile { gateway: "max_connections: 10", ..ConfigFile::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    let mut idle = begin_requests(&gateway, 9, REQUEST).await;
    wait_until(|| upstream.requests().len() == 9).await;
    gateway.wait_for_in_flight(0).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    let mut received = Vec::new();
    let read = tokio::time::timeout(TEST_TIMEOUT, idle[0].read_to_end(&mut received)).await;
    let _ = read.expect("the connection stayed open");
    wait_until(|| gateway.metric("ratekeeper_connections_reaped_total") == 1).await;
}

#[tokio::test]
async fn connections_of_one_client_are_bounded() {
    let upstream = Upstream::start().await;
    let file = ConfigFile { gateway: "max_connections_per_client: 3", ..ConfigFile::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    let mut kept = Vec::new();
    for _ in 0..3 {
        let mut stream = hold(&gateway, "/").await;
        assert_eq!(status(&read_response(&mut stream).await), 200);
        kept.push(stream);
    }
    let mut fourth = TcpStream::connect(gateway.address).await.unwrap();
    assert_eq!(read_all(&mut fourth).await, "", "closed immediately");
    let name = r#"ratekeeper_connections_rejected_total{reason="max_connections_per_client"}"#;
    assert_eq!(gateway.metric(name), 1);
    // Another client is served.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut other = socket.connect(gateway.address).await.unwrap();
    other.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    assert_eq!(status(&read_response(&mut other).await), 200);
    kept.pop();
    wait_until(|| gateway.metric("ratekeeper_connections") == 3).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    // A trusted proxy connects for many clients.
    let above = "client: { trusted_proxies: [127.0.0.1] }";
    let file =
        ConfigFile { limits: above, gateway: "max_connections_per_client: 3", ..ConfigFile::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    let mut kept = Vec::new();
    for _ in 0..5 {
        let mut stream = hold(&gateway, "/").await;
        assert_eq!(status(&read_response(&mut stream).await), 200);
        kept.push(stream);
    }
}
