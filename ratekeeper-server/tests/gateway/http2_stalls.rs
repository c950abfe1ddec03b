//! HTTP/2 clients with small flow-control windows.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use testbed::http::{get, header, read_head, status};
use testbed::http2::kind::{DATA, RST_STREAM, SETTINGS, WINDOW_UPDATE};
use testbed::http2::{frame, get as request};
use testbed::wait_until_stable;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, copy, duplex, split};
use tokio::net::TcpStream;
use tokio::time::sleep;

use super::http2_abuse::CANCEL;
use super::peers::{ConfigFile, RawHttp2 as Client, connect_http2, request_http2, scripted};
use super::support::run;

const INITIAL_WINDOW_SIZE: u16 = 4;
const LARGE: usize = 200_000;

/// A server that sends a large body, or half of a small one and the rest a second later, or five bytes.
async fn server() -> SocketAddr {
    scripted(|mut stream, _| async move {
        loop {
            let head = read_head(&mut stream).await;
            if head.is_empty() {
                return;
            }
            let (length, pause) = match head.split(' ').nth(1) {
                Some("/large") => (LARGE, Duration::ZERO),
                Some("/pauses") => (10, Duration::from_secs(1)),
                _ => (5, Duration::ZERO),
            };
            let body = "x".repeat(length);
            let (begin, end) = body.split_at(length / 2);
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{begin}");
            // The gateway closes the connection during these tests.
            let _ = stream.write_all(head.as_bytes()).await;
            // Longer than the timeouts of the client.
            sleep(pause).await;
            let _ = stream.write_all(end.as_bytes()).await;
        }
    })
    .await
}

fn window(stream: u32, more: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, &more.to_be_bytes())
}

/// A client with an initial stream window of zero.
async fn without_window(gateway: &super::support::TestGateway) -> Client {
    let mut client = Client::connect(gateway.address).await;
    let setting = [&INITIAL_WINDOW_SIZE.to_be_bytes()[..], &0_u32.to_be_bytes()].concat();
    client.0.write_all(&frame(SETTINGS, 0, 0, &setting)).await.unwrap();
    client
}

#[tokio::test]
async fn only_the_stalled_stream_is_reset() {
    let file = ConfigFile {
        gateway: "timeouts: { header: 200ms, idle: 400ms }\n  max_in_flight: 2",
        route: ", critical: true",
        ..ConfigFile::default()
    };
    let gateway = run(&file.to(&[server().await])).await;
    let mut client = without_window(&gateway).await;
    client.0.write_all(&[request(1, "/large"), request(3, "/pauses")].concat()).await.unwrap();
    gateway.wait_for_in_flight(2).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 503, "both permits are in use");
    // The client opens this window late, but before its stream stalls.
    sleep(Duration::from_millis(100)).await;
    client.0.write_all(&window(3, 1_000)).await.unwrap();
    let reset = client.next_of(RST_STREAM).await.expect("the connection ended");
    assert_eq!((reset.stream, reset.payload), (1, CANCEL.to_be_bytes().to_vec()));
    // The other stream waits for its upstream, for longer than the client timeout.
    assert_eq!(status(&get(gateway.address, "/", "").await), 200, "a permit is free");
    let end = client.next_of(DATA).await.expect("the connection ended");
    assert_eq!((end.stream, end.payload.len()), (3, 5));
}

/// Reads a large response at about 100 KB per second. Returns whether the gateway resets the stream.
async fn is_slow_reader_reset(timeouts: &str) -> bool {
    let file = ConfigFile { gateway: timeouts, ..ConfigFile::default() };
    let gateway = run(&file.to(&[server().await])).await;
    let mut client = without_window(&gateway).await;
    client.0.write_all(&[request(1, "/large"), window(0, 1_000_000)].concat()).await.unwrap();
    let mut got = 0;
    while got < LARGE {
        client.0.write_all(&window(1, 4_000)).await.unwrap();
        let mut part = 0;
        while part < 4_000.min(LARGE - got) {
            let frame = client.next().await.expect("the connection ended");
            if frame.kind == RST_STREAM {
                return true;
            }
            part += if frame.kind == DATA { frame.payload.len() } else { 0 };
        }
        got += part;
        // A slow reader: all of its pauses together are longer than the timeout.
        sleep(Duration::from_millis(35)).await;
    }
    assert_eq!(got, LARGE);
    false
}

#[tokio::test]
async fn slowly_reading_http2_client_gets_the_whole_response() {
    assert!(!is_slow_reader_reset("timeouts: { header: 200ms, idle: 500ms }").await);
}

#[tokio::test]
async fn http2_client_that_reads_below_the_minimum_rate_is_reset() {
    assert!(is_slow_reader_reset("timeouts: { header: 200ms, idle: 500ms, min_rate: 1000000 }").await);
}

/// A connection, and the number of bytes that its client has sent.
async fn counted(address: SocketAddr) -> (DuplexStream, Arc<AtomicUsize>) {
    let (client, other_end) = duplex(64 << 10);
    let (mut from_client, mut to_client) = split(other_end);
    let (mut from_server, mut to_server) = TcpStream::connect(address).await.unwrap().into_split();
    tokio::spawn(async move { copy(&mut from_server, &mut to_client).await });
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    tokio::spawn(async move {
        let mut bytes = vec![0; 64 << 10];
        loop {
            let length = from_client.read(&mut bytes).await.unwrap();
            if length == 0 || to_server.write_all(&bytes[..length]).await.is_err() {
                return;
            }
            count.fetch_add(length, Ordering::Relaxed);
        }
    });
    (client, sent)
}

/// Several uploads share a connection, and so the window of that connection.
#[tokio::test]
async fn upload_that_its_upstream_does_not_read_does_not_stall_others() {
    // More than the sockets on the way buffer.
    const LONG: usize = 64 << 20;
    let upstream = scripted(|mut stream, _| async move {
        let head = read_head(&mut stream).await;
        if head.starts_with("POST /stuck") {
            return std::future::pending().await;
        }
        let length = header(&head, "content-length").unwrap().parse().unwrap();
        stream.read_exact(&mut vec![0; length]).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
    })
    .await;
    let gateway = run(&ConfigFile { route: ", timeout: 10m", ..ConfigFile::default() }.to(&[upstream])).await;
    let (client, sent) = counted(gateway.address).await;
    let mut sender = connect_http2(client).await;
    let body = Bytes::from(vec![b'x'; LONG]);
    let post = |path: &str, length: usize| {
        Request::post(format!("http://a{path}")).body(Full::new(body.slice(..length))).unwrap()
    };
    let mut stuck = Vec::new();
    for _ in 0..4 {
        let (mut sender, request) = (sender.clone(), post("/stuck", LONG));
        stuck.push(tokio::spawn(async move { sender.send_request(request).await }));
    }
    gateway.wait_for_in_flight(4).await;
    // Until the buffers on the way are full.
    wait_until_stable(|| sent.load(Ordering::Relaxed)).await;
    for _ in 0..3 {
        assert_eq!(request_http2(&mut sender, post("/read", 4 << 20)).await.head.status, 200);
    }
    assert!(stuck.iter().all(|stuck| !stuck.is_finished()));
}
