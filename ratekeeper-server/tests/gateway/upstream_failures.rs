//! Failures and whether they are the server's or the client's fault.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Request;
use http_body_util::Full;
use testbed::TEST_TIMEOUT;
use testbed::http::{get, header, read_all, read_head, read_response, send_raw, status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::balancing::is_up;
use super::peers::{ConfigFile, connect_http2, request_http2, scripted};
use super::support::{Upstream, in_front_of, run};

/// A server that never responds counts as failing, like one that responds with errors.
#[tokio::test]
async fn hanging_server_is_ejected() {
    let hanging = scripted(|mut stream, _| async move {
        read_head(&mut stream).await;
        std::future::pending::<()>().await;
    })
    .await;
    let upstream = Upstream::start().await;
    let file = ConfigFile {
        upstream: ", outlier_ejection: { after: 2, for: 1h }",
        route: ", timeout: 100ms",
        ..ConfigFile::default()
    };
    let gateway = run(&file.to(&[hanging, upstream.address])).await;
    let mut late = 0;
    for _ in 0..12 {
        late += usize::from(status(&get(gateway.address, "/", "").await) == 504);
    }
    assert_eq!(late, 2);
    assert!(!is_up(&gateway, hanging) && is_up(&gateway, upstream.address));
}

/// A malformed chunked body is rejected and does not eject a server.
#[tokio::test]
async fn malformed_request_body_does_not_eject_the_server() {
    let upstream = Upstream::start().await;
    let file = ConfigFile { upstream: ", outlier_ejection: { after: 1, for: 1h }", ..ConfigFile::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    let broken = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nZZZ\r\n";
    for _ in 0..4 {
        assert!([0, 400].contains(&status(&send_raw(gateway.address, broken).await)));
    }
    assert!(is_up(&gateway, upstream.address));
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
}

/// The route timeout limits the server: the time the client takes to send its body does not count.
#[tokio::test]
async fn slow_upload_does_not_count_against_the_route_timeout() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", ", timeout: 200ms").await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let head = "POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 16\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    // In total, longer than the timeout of the route.
    for _ in 0..8 {
        sleep(Duration::from_millis(75)).await;
        stream.write_all(b"ab").await.unwrap();
    }
    assert_eq!(status(&read_all(&mut stream).await), 200);
    assert_eq!(upstream.only_request().body, "ab".repeat(8));
    // The upload does not extend the server's timeout.
    let late = "POST /hold HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\nab";
    let begin = Instant::now();
    assert_eq!(status(&send_raw(gateway.address, late).await), 504);
    assert!(begin.elapsed() < Duration::from_secs(5));
}

/// A server that does not read the body cannot hold a client forever.
#[tokio::test]
async fn server_that_does_not_read_the_body_times_out() {
    let not_reading = scripted(|mut stream, _| async move {
        read_head(&mut stream).await;
        std::future::pending::<()>().await;
    })
    .await;
    let gateway =
        run(&ConfigFile { route: ", timeout: 200ms", ..ConfigFile::default() }.to(&[not_reading])).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let head = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let (mut reading, mut writing) = stream.split();
    let much = vec![b'x'; 1 << 20];
    let sending = async {
        while writing.write_all(&much).await.is_ok() {}
        std::future::pending::<()>().await;
    };
    let response = tokio::select! {
        response = read_response(&mut reading) => response,
        () = sending => unreachable!(),
    };
    assert_eq!(status(&response), 504);
}

/// If a server stops in the middle of a response, the gateway closes both connections.
#[tokio::test]
async fn stalled_response_is_closed_after_the_read_timeout() {
    let stopping = scripted(|mut stream, _| async move {
        read_head(&mut stream).await;
        let begun = "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun";
        stream.write_all(begun.as_bytes()).await.unwrap();
        // Waits until the gateway closes the connection.
        read_head(&mut stream).await;
    })
    .await;
    let limits = "limits: { at-once: { key: ip, concurrency: { limit: 1 } } }";
    let file = ConfigFile { upstream: ", timeouts: { read: 100ms }", limits, ..ConfigFile::default() };
    let gateway = run(&file.to(&[stopping])).await;
    for _ in 0..3 {
        let response = timeout(TEST_TIMEOUT, get(gateway.address, "/", "")).await.unwrap();
        assert!(status(&response) == 200 && response.ends_with("begun"), "{response}");
        gateway.wait_for_in_flight(0).await;
    }
}

/// The read timeout applies to each part, not to the whole response.
#[tokio::test]
async fn slow_response_in_parts_arrives_complete() {
    let slow = scripted(|mut stream, _| async move {
        read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 8\r\n\r\n").await.unwrap();
        // In total, longer than the read timeout.
        for _ in 0..8 {
            sleep(Duration::from_millis(60)).await;
            stream.write_all(b"x").await.unwrap();
        }
    })
    .await;
    let gateway =
        run(&ConfigFile { upstream: ", timeouts: { read: 300ms }", ..ConfigFile::default() }.to(&[slow]))
            .await;
    assert!(get(gateway.address, "/", "").await.ends_with("\r\n\r\nxxxxxxxx"));
}

/// A response whose length two parsers could read differently is not forwarded, and its connection is closed.
#[tokio::test]
async fn ambiguous_framing_of_an_upstream_gives_502() {
    for lines in [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: gzip",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 5, 5",
    ] {
        let connections = Arc::new(AtomicUsize::new(0));
        let count = connections.clone();
        let ambiguous = scripted(move |mut stream, _| {
            count.fetch_add(1, Ordering::Relaxed);
            async move {
                while let head = read_head(&mut stream).await
                    && !head.is_empty()
                {
                    let body = if head.starts_with("HEAD") { "" } else { "a\r\n0123456789\r\n0\r\n\r\n" };
                    let response = format!("HTTP/1.1 200 OK\r\n{lines}\r\n\r\n{body}");
                    if stream.write_all(response.as_bytes()).await.is_err() {
                        return;
                    }
                }
            }
        })
        .await;
        let gateway = run(&ConfigFile::default().to(&[ambiguous])).await;
        assert_eq!(status(&get(gateway.address, "/", "").await), 502, "{lines}");
        let head = "HEAD / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        assert_eq!(status(&send_raw(gateway.address, head).await), 502, "{lines}");
        let mut client = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
        let request = Request::get("http://a/").body(Full::default()).unwrap();
        assert_eq!(request_http2(&mut client, request).await.head.status, 502, "{lines}");
        assert_eq!(connections.load(Ordering::Relaxed), 3, "{lines}");
    }
}

/// The version of an upstream's response describes its connection, not the client's.
#[tokio::test]
async fn response_of_an_http_1_0_upstream_is_sent_as_http_1_1() {
    let old = scripted(|mut stream, number| async move {
        read_head(&mut stream).await;
        let lines = ["Content-Length: 5\r\n", "", "Connection: keep-alive\r\nContent-Length: 5\r\n"][number];
        stream.write_all(format!("HTTP/1.0 200 OK\r\n{lines}\r\nhello").as_bytes()).await.unwrap();
    })
    .await;
    let gateway = run(&ConfigFile::default().to(&[old])).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let (request, mut heads) = ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", Vec::new());
    stream.write_all(request.as_bytes()).await.unwrap();
    heads.push(read_response(&mut stream).await);
    stream.write_all(request.as_bytes()).await.unwrap();
    heads.push(read_head(&mut stream).await);
    let mut body = [0; "5\r\nhello\r\n0\r\n\r\n".len()];
    stream.read_exact(&mut body).await.unwrap();
    assert_eq!(&body, b"5\r\nhello\r\n0\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    heads.push(read_response(&mut stream).await);
    for head in heads {
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert_eq!(header(&head, "connection"), None, "{head}");
    }
}
