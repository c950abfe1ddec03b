//! WebSockets and other protocol upgrades.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use testbed::http::{get, header, read_all, read_head, read_response, status};
use testbed::{TEST_TIMEOUT, wait_until};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::peers::{ConfigFile, Identity, TempDir, scripted};
use super::support::{TestGateway, run};
use super::tls::listener;

const UPGRADE_REQUEST: &str =
    "GET /chat HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n";

/// Accepts the upgrade, sends a greeting and echoes everything. Records the request head.
async fn accept_upgrade(mut stream: impl AsyncRead + AsyncWrite + Unpin, heads: Arc<Mutex<Vec<String>>>) {
    let head = read_head(&mut stream).await;
    heads.lock().unwrap().push(head);
    let agreed =
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\nX-Key: k\r\n\r\n";
    stream.write_all(format!("{agreed}welcome;").as_bytes()).await.unwrap();
    let (mut reading, mut writing) = tokio::io::split(stream);
    let _ = tokio::io::copy(&mut reading, &mut writing).await;
    let _ = writing.write_all(b";bye").await;
    let _ = writing.shutdown().await;
}

/// A server that accepts upgrades and echoes, and the heads it received.
async fn echo() -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let heads = Arc::new(Mutex::new(Vec::new()));
    let kept = heads.clone();
    (scripted(move |stream, _| accept_upgrade(stream, kept.clone())).await, heads)
}

async fn in_front_of(address: SocketAddr) -> TestGateway {
    run(&ConfigFile::default().to(&[address])).await
}

async fn read_exactly(stream: &mut (impl AsyncRead + Unpin), count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    timeout(TEST_TIMEOUT, stream.read_exact(&mut bytes)).await.expect("no bytes received").unwrap();
    bytes
}

#[tokio::test]
async fn accepted_upgrade_forwards_bytes_both_ways() {
    let (address, heads) = echo().await;
    let gateway = in_front_of(address).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(UPGRADE_REQUEST.as_bytes()).await.unwrap();
    let response = read_head(&mut stream).await;
    assert_eq!((status(&response), header(&response, "upgrade")), (101, Some("websocket")), "{response}");
    assert_eq!((header(&response, "connection"), header(&response, "x-key")), (Some("upgrade"), Some("k")));
    assert_eq!(read_exactly(&mut stream, 8).await, b"welcome;");
    let head = heads.lock().unwrap()[0].clone();
    assert_eq!((header(&head, "upgrade"), header(&head, "connection")), (Some("websocket"), Some("upgrade")));

    // Bytes that look like a request are no longer parsed as one.
    for words in ["one", "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n", "\0\u{1}"] {
        stream.write_all(words.as_bytes()).await.unwrap();
        assert_eq!(read_exactly(&mut stream, words.len()).await, words.as_bytes());
    }
    let much = vec![b'x'; 4 << 20];
    let (mut reading, mut writing) = stream.split();
    let mut back = vec![0; much.len()];
    let both = async { tokio::join!(writing.write_all(&much), reading.read_exact(&mut back)) };
    let (written, read) = timeout(TEST_TIMEOUT, both).await.unwrap();
    written.unwrap();
    read.unwrap();
    assert!(back == much);
    // Each direction is closed separately.
    stream.shutdown().await.unwrap();
    assert_eq!(read_all(&mut stream).await, ";bye");
    assert_eq!(heads.lock().unwrap().len(), 1);
    // The request is logged when the tunnel ends.
    let line = gateway.log.lines(1).await.remove(0);
    assert!(line.contains(r#""path":"/chat""#) && line.contains(r#""status":101"#), "{line}");
}

#[tokio::test]
async fn bytes_sent_before_the_upgrade_response_are_forwarded() {
    let (address, heads) = echo().await;
    let gateway = in_front_of(address).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(format!("{UPGRADE_REQUEST}early").as_bytes()).await.unwrap();
    assert_eq!(status(&read_head(&mut stream).await), 101);
    assert_eq!(read_exactly(&mut stream, 13).await, b"welcome;early");
    assert_eq!(heads.lock().unwrap().len(), 1);
}

/// CVE-2026-2833: until the upgrade is accepted, bytes after an upgrade request are the next request.
#[tokio::test]
async fn rejected_upgrade_stays_http() {
    let heads = Arc::new(Mutex::new(Vec::new()));
    let kept = heads.clone();
    let address = scripted(move |mut stream, _| {
        let heads = kept.clone();
        async move {
            loop {
                let head = read_head(&mut stream).await;
                if head.is_empty() {
                    return;
                }
                heads.lock().unwrap().push(head);
                stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno").await.unwrap();
            }
        }
    })
    .await;
    let gateway = in_front_of(address).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(UPGRADE_REQUEST.as_bytes()).await.unwrap();
    let response = read_response(&mut stream).await;
    assert!(status(&response) == 403 && response.ends_with("no"), "{response}");
    stream.write_all(b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    assert_eq!(status(&read_response(&mut stream).await), 403);
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let last = "GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    stream.write_all(format!("{UPGRADE_REQUEST}{last}").as_bytes()).await.unwrap();
    assert_eq!(status(&read_response(&mut stream).await), 403);
    let rest = read_all(&mut stream).await;
    let lines: Vec<String> =
        heads.lock().unwrap().iter().map(|it| it.lines().next().unwrap().to_owned()).collect();
    // A pipelining client may or may not be answered, but the upstream receives only requests that were sent.
    assert!(rest.is_empty() || status(&rest) == 403, "{rest}");
    assert_eq!(lines[..3], ["GET /chat HTTP/1.1", "GET /next HTTP/1.1", "GET /chat HTTP/1.1"]);
    assert!(lines[3..].iter().all(|line| line == "GET /last HTTP/1.1"), "{lines:?}");
}

#[tokio::test]
async fn unsolicited_upgrade_gives_502() {
    let (address, heads) = echo().await;
    let gateway = in_front_of(address).await;
    let response = get(gateway.address, "/", "").await;
    assert_eq!(status(&response), 502, "{response}");
    assert!(!response.contains("welcome"), "{response}");
    // An upgrade to HTTP/2, which would bypass the gateway's checks, is not forwarded.
    let wanted = "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n";
    let request = format!("GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n{wanted}\r\n");
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(status(&read_response(&mut stream).await), 502);
    for head in heads.lock().unwrap().iter() {
        assert_eq!((header(head, "upgrade"), header(head, "http2-settings")), (None, None), "{head}");
    }
}

#[tokio::test]
async fn tunnel_holds_its_in_flight_permit_until_it_ends() {
    let (address, _heads) = echo().await;
    let gateway =
        run(&ConfigFile { gateway: "max_in_flight: 1", ..ConfigFile::default() }.to(&[address])).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(UPGRADE_REQUEST.as_bytes()).await.unwrap();
    assert_eq!(status(&read_head(&mut stream).await), 101);
    assert_eq!(status(&get(gateway.address, "/", "").await), 503);
    drop(stream);
    gateway.wait_for_in_flight(0).await;
    // The 502 shows that the server received the request: it responds with an unsolicited 101.
    assert_eq!(status(&get(gateway.address, "/", "").await), 502);
}

#[tokio::test]
async fn upgrade_request_is_charged_like_any_other() {
    let (address, heads) = echo().await;
    let limits = "limits: { one: { key: ip, fixed_window: { limit: 1, window: 1h, align: first_request } } }";
    let gateway = run(&ConfigFile { limits, ..ConfigFile::default() }.to(&[address])).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(UPGRADE_REQUEST.as_bytes()).await.unwrap();
    assert_eq!(status(&read_head(&mut stream).await), 101);
    assert_eq!(read_exactly(&mut stream, 8).await, b"welcome;");
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(UPGRADE_REQUEST.as_bytes()).await.unwrap();
    assert_eq!(status(&read_response(&mut stream).await), 429);
    assert_eq!(heads.lock().unwrap().len(), 1);
}

/// TLS to the gateway, and plain text or TLS to the upstream.
#[tokio::test]
async fn tunnels_work_over_tls() {
    let (directory, ours, theirs) = (TempDir::new(), Identity::new(), Identity::new());
    let listening = format!(", {}", listener(&directory, "ours", &ours));
    let authority = directory.write("theirs.pem", &theirs.certificate);
    let trusting = format!(", tls: {{ ca: {{ file: {authority} }} }}");
    let heads = Arc::new(Mutex::new(Vec::new()));
    let (kept, acceptor) = (heads.clone(), theirs.acceptor("http/1.1"));
    let secured = scripted(move |stream, _| {
        let (heads, acceptor) = (kept.clone(), acceptor.clone());
        async move { accept_upgrade(acceptor.accept(stream).await.unwrap(), heads).await }
    })
    .await;
    let (plain, plain_heads) = echo().await;
    let cases = [
        (format!("http://{plain}"), "", plain_heads),
        (format!("https://{secured}"), trusting.as_str(), heads),
    ];
    for (url, upstream, heads) in cases {
        let file = ConfigFile { listener: &listening, upstream, ..ConfigFile::default() };
        let gateway = run(&file.to_urls(std::slice::from_ref(&url))).await;
        let mut stream = ours.connect(gateway.address, "http/1.1").await.unwrap();
        stream.write_all(format!("{UPGRADE_REQUEST}early").as_bytes()).await.unwrap();
        let response = read_head(&mut stream).await;
        assert_eq!(
            (status(&response), header(&response, "upgrade")),
            (101, Some("websocket")),
            "{url}: {response}"
        );
        assert_eq!(read_exactly(&mut stream, 13).await, b"welcome;early", "{url}");
        // Larger than a TLS record and than the gateway's buffers.
        let much: Vec<u8> = (0..1_000_000_u32).map(|number| (number % 251) as u8).collect();
        let (mut reading, mut writing) = tokio::io::split(stream);
        let (sent, got) = tokio::join!(writing.write_all(&much), read_exactly(&mut reading, much.len()));
        sent.unwrap();
        assert!(got == much, "{url}: other bytes were echoed");
        writing.shutdown().await.unwrap();
        let mut rest = Vec::new();
        timeout(TEST_TIMEOUT, reading.read_to_end(&mut rest)).await.expect("the tunnel stayed open").unwrap();
        assert_eq!(rest, b";bye", "{url}");
        let head = heads.lock().unwrap()[0].clone();
        let received = (header(&head, "upgrade"), header(&head, "x-forwarded-proto"));
        assert_eq!(received, (Some("websocket"), Some("https")), "{url}: {head}");
    }
}

/// A connection after a successful upgrade.
async fn tunnel(gateway: &TestGateway) -> TcpStream {
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(UPGRADE_REQUEST.as_bytes()).await.unwrap();
    assert_eq!(status(&read_head(&mut stream).await), 101);
    assert_eq!(read_exactly(&mut stream, 8).await, b"welcome;");
    stream
}

#[tokio::test]
async fn silent_tunnel_is_closed_after_its_timeout() {
    let (address, _heads) = echo().await;
    let file = ConfigFile { gateway: "timeouts: { tunnel: 1500ms, idle: 100ms }", ..ConfigFile::default() };
    let gateway = run(&file.to(&[address])).await;
    let (mut talking, mut silent) = (tunnel(&gateway).await, tunnel(&gateway).await);
    let begin = Instant::now();
    let ended = tokio::spawn(async move {
        let rest = read_all(&mut silent).await;
        (rest, begin.elapsed())
    });
    // In total, longer than the tunnel timeout.
    for _ in 0..6 {
        sleep(Duration::from_millis(300)).await;
        talking.write_all(b"still here").await.unwrap();
        assert_eq!(read_exactly(&mut talking, 10).await, b"still here");
    }
    let (rest, elapsed) = ended.await.unwrap();
    assert_eq!(rest, "");
    assert!(elapsed > Duration::from_millis(1_400), "{elapsed:?}");
    assert_eq!(gateway.metric("ratekeeper_requests_in_flight"), 1);
}

#[tokio::test]
async fn tunnel_holds_its_concurrency_permit_until_it_ends() {
    let (address, _heads) = echo().await;
    let limits = "limits: { few: { key: ip, concurrency: { limit: 1 } } }";
    let gateway = run(&ConfigFile { limits, ..ConfigFile::default() }.to(&[address])).await;
    let status_source = gateway.gateway.status();
    let held = |count: usize| {
        status_source
            .metrics()
            .contains(&format!("\nratekeeper_concurrency_permits{{limit=\"few\"}} {count}\n"))
    };
    let stream = tunnel(&gateway).await;
    assert!(held(1), "{}", status_source.metrics());
    assert_eq!(status(&get(gateway.address, "/", "").await), 429);
    drop(stream);
    wait_until(|| held(0)).await;
    tunnel(&gateway).await;
}

/// Otherwise the server with the most tunnels would get the next one, too.
#[tokio::test]
async fn tunnel_counts_for_least_requests_until_it_ends() {
    let (one, one_heads) = echo().await;
    let (other, other_heads) = echo().await;
    let gateway =
        run(&ConfigFile { upstream: ", balance: least_requests", ..ConfigFile::default() }.to(&[one, other]))
            .await;
    let counts = || (one_heads.lock().unwrap().len(), other_heads.lock().unwrap().len());
    let (first, second) = (tunnel(&gateway).await, tunnel(&gateway).await);
    assert_eq!(counts(), (1, 1));
    // The rotation does not matter while one server has fewer requests.
    drop(first);
    gateway.wait_for_in_flight(1).await;
    let third = tunnel(&gateway).await;
    drop(third);
    gateway.wait_for_in_flight(1).await;
    let _fourth = tunnel(&gateway).await;
    let mut counts = [counts().0, counts().1];
    counts.sort_unstable();
    assert_eq!(counts, [1, 3]);
    drop(second);
}

#[tokio::test]
async fn tunnel_is_cut_after_the_drain_timeout() {
    let (address, _heads) = echo().await;
    let file = ConfigFile { gateway: "timeouts: { drain: 300ms }", ..ConfigFile::default() };
    let gateway = run(&file.to(&[address])).await;
    let mut stream = tunnel(&gateway).await;
    let begin = Instant::now();
    assert_eq!(gateway.gateway.drain().await, 1, "one connection was still open");
    assert!(begin.elapsed() >= Duration::from_millis(300));
    assert_eq!(gateway.log.lines(0).await.len(), 1, "the tunnel is logged");
    assert_eq!(read_all(&mut stream).await, "");
}
