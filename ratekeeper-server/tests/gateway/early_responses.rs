//! Requests that are answered before their bodies have arrived. CVE-2025-4366: the rest of a body must never be
//! parsed as the next request.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use testbed::TEST_TIMEOUT;
use testbed::http::{get, header, read_head, read_response, status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::peers::{ConfigFile, scripted};
use super::support::{TestGateway, Upstream, run};

const SMUGGLED: &str = "GET /open/smuggled HTTP/1.1\r\nHost: a\r\n\r\n";

/// A smuggled request would be allowed, because its route has no limits; everything else is denied from now on.
async fn denying(upstream: &Upstream) -> TestGateway {
    let at = upstream.address;
    let gateway = run(&format!(
        "limits: {{ one: {{ fixed_window: {{ limit: 1, window: 1h, align: first_request }} }} }}
gateway:
  listen: 127.0.0.1:0
  routes:
    - {{ id: open, path: /open/**, upstream: http://{at}, limits: [] }}
    - {{ id: rest, limits: all, upstream: http://{at} }}
"
    ))
    .await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    gateway
}

/// Reads to the end of the connection, or until `done` accepts the text read so far.
async fn read_until(stream: &mut (impl AsyncReadExt + Unpin), done: impl Fn(&str) -> bool) -> (String, bool) {
    let (mut all, mut bytes) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let text = String::from_utf8_lossy(&all).into_owned();
        if done(&text) {
            return (text, false);
        }
        match timeout(TEST_TIMEOUT, stream.read(&mut bytes))
            .await
            .expect("neither a response nor the end of the connection")
        {
            Ok(read) if read > 0 => all.extend_from_slice(&bytes[..read]),
            _ => return (text, true),
        }
    }
}

/// Whether a response is complete: its body has the length that its head states.
fn is_complete(text: &str) -> bool {
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    header(head, "content-length").is_some_and(|length| length.parse::<usize>().unwrap() <= body.len())
}

/// Sends a request with a body, reads the whole 429, sends the rest of the body and then a valid request. The valid
/// request is answered or the connection is closed; no other response may arrive.
async fn check(name: &str, head: &str, now: &str, later: &str) {
    let upstream = Upstream::start().await;
    let gateway = denying(&upstream).await;
    let stream = TcpStream::connect(gateway.address).await.unwrap();
    let (mut reading, mut writing) = stream.into_split();
    let first = format!("POST /denied HTTP/1.1\r\nHost: a\r\n{head}\r\n{now}");
    let rest = format!("{later}GET /open/honest HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    let sending = tokio::spawn(async move {
        // The gateway need not read all of a denied request.
        let _ = writing.write_all(first.as_bytes()).await;
        writing
    });
    let (denied, is_closed) = read_until(&mut reading, is_complete).await;
    assert_eq!(status(&denied), 429, "{name}: {denied}");
    assert!(is_complete(&denied) && denied.contains("problem+json"), "{name}: {denied}");
    let mut writing = sending.await.unwrap();
    let mut response = String::new();
    if !is_closed {
        let _ = writing.write_all(rest.as_bytes()).await;
        response = read_until(&mut reading, |_| false).await.0;
    }
    let paths: Vec<String> = upstream.requests().iter().map(|seen| seen.uri.path().to_owned()).collect();
    match response.is_empty() {
        true => assert_eq!(paths, ["/"], "{name}"),
        false => {
            assert_eq!(
                (status(&response), response.matches("HTTP/1.1 ").count()),
                (200, 1),
                "{name}: {response}"
            );
            assert_eq!(paths, ["/", "/open/honest"], "{name}");
            assert_eq!(header(&denied, "connection"), None, "{name}: the response announced a close");
        }
    }
    let wanted = 2 + usize::from(!response.is_empty());
    let lines = gateway.log.lines(wanted).await;
    assert!(
        lines.len() == wanted && !lines.iter().any(|line| line.contains("smuggled")),
        "{name}: {lines:?}"
    );
}

#[tokio::test]
async fn small_unread_body_is_not_parsed_as_a_request() {
    check("sent at once", &format!("Content-Length: {}\r\n", SMUGGLED.len()), SMUGGLED, "").await;
    check(
        "nothing sent before the response",
        &format!("Content-Length: {}\r\n", SMUGGLED.len()),
        "",
        SMUGGLED,
    )
    .await;
    let (first, second) = SMUGGLED.split_at(10);
    check("half sent before the response", &format!("Content-Length: {}\r\n", SMUGGLED.len()), first, second)
        .await;
}

#[tokio::test]
async fn large_unread_body_is_not_parsed_as_a_request() {
    let body = SMUGGLED.repeat(8 << 20 >> 5);
    check("sent before anything is read", &format!("Content-Length: {}\r\n", body.len()), &body, "").await;
    let (first, second) = body.split_at(100_000);
    check("sent in two", &format!("Content-Length: {}\r\n", body.len()), first, second).await;
}

#[tokio::test]
async fn chunked_unread_body_is_not_parsed_as_a_request() {
    let chunked = "Transfer-Encoding: chunked\r\n";
    let chunk = format!("{:x}\r\n{SMUGGLED}\r\n", SMUGGLED.len());
    check("small and complete", chunked, &format!("{chunk}0\r\n\r\n"), "").await;
    check("last chunk sent later", chunked, &chunk, &format!("{chunk}0\r\n\r\n")).await;
    let many = chunk.repeat(50_000);
    check("many chunks", chunked, &many, &format!("{many}0\r\n\r\n")).await;
}

#[tokio::test]
async fn denied_expect_continue_body_is_not_parsed_as_a_request() {
    let head = format!("Expect: 100-continue\r\nContent-Length: {}\r\n", SMUGGLED.len());
    check("client waits for 100 Continue", &head, "", SMUGGLED).await;
    check("client does not wait for 100 Continue", &head, SMUGGLED, "").await;
}

/// The upstream, not the gateway, responds early.
#[tokio::test]
async fn early_upstream_response_leaves_no_body_to_parse() {
    let heads = Arc::new(Mutex::new(Vec::new()));
    let kept = heads.clone();
    let address = scripted(move |mut stream, _| {
        let heads = kept.clone();
        async move {
            let head = read_head(&mut stream).await;
            heads.lock().unwrap().push(head);
            let response = b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlarge";
            let _ = stream.write_all(response).await;
        }
    })
    .await;
    let gateway = run(&ConfigFile::default().to(&[address])).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let body = SMUGGLED.repeat(1_000);
    let (now, later) = body.split_at(100);
    let head = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{now}", body.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    let (response, is_closed) = read_until(&mut stream, is_complete).await;
    assert!(status(&response) == 413 && response.ends_with("large"), "{response}");
    if !is_closed {
        let _ = stream.write_all(later.as_bytes()).await;
        let (more, _) = read_until(&mut stream, |_| false).await;
        assert_eq!(more, "");
    }
    assert_eq!(heads.lock().unwrap().len(), 1);
}

/// Many clients read nothing before they have sent everything.
#[tokio::test]
async fn client_that_sends_its_whole_body_first_gets_the_response() {
    let upstream = Upstream::start().await;
    let gateway = denying(&upstream).await;
    let body = SMUGGLED.repeat(8 << 20 >> 5);
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let head = format!("POST /denied HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let _ = timeout(TEST_TIMEOUT, stream.write_all(head.as_bytes()))
        .await
        .expect("the request was neither read nor rejected");
    let (response, _) = read_until(&mut stream, is_complete).await;
    assert!(status(&response) == 429 && is_complete(&response), "{response}");
    assert_eq!(upstream.requests().len(), 1);
}

/// On HTTP/2, the unread body of one request must not use up the flow-control window of the others.
#[tokio::test]
async fn unread_http2_bodies_do_not_exhaust_the_connection_window() {
    use super::peers::{connect_http2, request_http2};
    let upstream = Upstream::start().await;
    let gateway = denying(&upstream).await;
    let mut sender = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    let body = bytes::Bytes::from(vec![b'x'; 1 << 20]);
    let post = |path: &str| {
        http::Request::post(format!("http://a{path}")).body(http_body_util::Full::new(body.clone())).unwrap()
    };
    for number in 0..20 {
        assert_eq!(request_http2(&mut sender, post("/denied")).await.head.status, 429, "{number}");
    }
    assert_eq!(request_http2(&mut sender, post("/open/honest")).await.head.status, 200);
    assert_eq!(upstream.requests()[1].body, body);
}

/// A server may respond before it has read the request. Until the request is sent, its connection is not reused.
#[tokio::test]
async fn request_does_not_wait_for_the_upload_of_another() {
    let early_responder = scripted(|mut stream, _| async move {
        while !read_head(&mut stream).await.is_empty() {
            let response = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
            if stream.write_all(response.as_bytes()).await.is_err() {
                return;
            }
        }
    })
    .await;
    let gateway = run(
        &ConfigFile { gateway: "timeouts: { body: 1h }", ..ConfigFile::default() }.to(&[early_responder])
    )
    .await;
    let mut uploads = Vec::new();
    // Enough for each worker to have one.
    for _ in 0..8 {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        let begun = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nbegun";
        stream.write_all(begun.as_bytes()).await.unwrap();
        assert_eq!(status(&read_response(&mut stream).await), 200);
        uploads.push(stream);
        let sent = timeout(Duration::from_secs(10), get(gateway.address, "/", "")).await;
        assert_eq!(status(&sent.expect("the request waits for another upload")), 200);
    }
}
