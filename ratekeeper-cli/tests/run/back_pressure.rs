//! Back pressure: if the receiver does not read, the sender must wait, and the gateway does not buffer the data.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::Response;
use hyper::body::{Body, Frame};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testbed::http::read_head;
use testbed::http2::kind::{SETTINGS, WINDOW_UPDATE};
use testbed::http2::{PREFACE, frame, get as get_http2};
use testbed::{TEST_TIMEOUT, wait_until_stable};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::run::support::{Folder, Process};

const BODY_BYTES: usize = 200 << 20;
/// Maximum growth of the gateway's memory.
const GROWTH_BYTES_MAX: u64 = 8 << 20;

/// Returns the bytes that the kernel buffers for two connections, on both ends of each.
fn buffered_max() -> usize {
    let max = |name: &str| -> usize {
        let text = std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap();
        text.split_whitespace().nth(2).unwrap().parse().unwrap()
    };
    2 * (max("tcp_rmem") + max("tcp_wmem"))
}

/// Opens a listener for one raw connection.
async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

async fn gateway(folder: &Folder, upstream: SocketAddr) -> (Process, SocketAddr) {
    let text = format!(
        "admin: 127.0.0.1:0\ngateway:\n  listen: 127.0.0.1:0\n  access_log: false\n  \
         routes: [{{ id: all, limits: all, upstream: http://{upstream} }}]\n"
    );
    Process::serving(&folder.write("ratekeeper.yaml", &text)).await
}

/// Sends `BODY_BYTES` bytes and counts those accepted.
async fn write_body(writing: &mut (impl AsyncWrite + Unpin), accepted: &AtomicUsize) {
    let part = vec![b'x'; 64 << 10];
    while accepted.load(Ordering::Relaxed) < BODY_BYTES {
        writing.write_all(&part).await.unwrap();
        accepted.fetch_add(part.len(), Ordering::Relaxed);
    }
}

/// Reads `BODY_BYTES` bytes. A few more, of frames, may follow.
async fn read_body(reading: &mut (impl AsyncRead + Unpin)) {
    let (mut left, mut bytes) = (BODY_BYTES, vec![0; 256 << 10]);
    while left > 0 {
        let read = timeout(TEST_TIMEOUT, reading.read(&mut bytes)).await.expect("no data").unwrap();
        assert!(read > 0, "{left} bytes are missing");
        left = left.saturating_sub(read);
    }
}

/// Waits until the sender is blocked, and samples the gateway's memory meanwhile.
async fn check_blocked(what: &str, process: &Process, before: u64, accepted: &AtomicUsize) {
    let mut highest = before;
    let last = wait_until_stable(|| {
        highest = highest.max(process.resident_bytes());
        accepted.load(Ordering::Relaxed)
    })
    .await;
    let growth = highest.saturating_sub(before);
    println!("{what}: {} KiB were accepted, and memory grew by {} KiB", last >> 10, growth >> 10);
    assert!(last < buffered_max() + GROWTH_BYTES_MAX as usize, "the gateway accepted {last} bytes");
    assert!(growth < GROWTH_BYTES_MAX, "{growth}");
}

/// Checks that memory did not grow afterwards either.
fn check_memory(process: &Process, before: u64) {
    let now = process.resident_bytes();
    assert!(now < before + GROWTH_BYTES_MAX, "{before} {now}");
}

/// Starts a server that answers with `BODY_BYTES` bytes; returns its address and the count of bytes accepted.
async fn start_upstream() -> (SocketAddr, Arc<AtomicUsize>) {
    let accepted = Arc::new(AtomicUsize::new(0));
    let ((listener, address), count) = (listen().await, accepted.clone());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_head(&mut stream).await;
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY_BYTES}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        write_body(&mut stream, &count).await;
    });
    (address, accepted)
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_does_not_read_blocks_the_upstream() {
    let (folder, (upstream, accepted)) = (Folder::new("thirsty"), start_upstream().await);
    let (process, address) = gateway(&folder, upstream).await;
    let before = process.resident_bytes();
    let mut stream = BufReader::new(TcpStream::connect(address).await.unwrap());
    stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    check_blocked("a client of HTTP/1 reads nothing", &process, before, &accepted).await;
    let head = read_head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    read_body(&mut stream).await;
    check_memory(&process, before);
}

/// CVE-2019-9517: the HTTP/2 flow control windows are open, but the socket's buffer is full.
#[tokio::test(flavor = "multi_thread")]
async fn http2_client_with_open_windows_that_does_not_read_blocks_the_upstream() {
    let (folder, (upstream, accepted)) = (Folder::new("roomy"), start_upstream().await);
    let (process, address) = gateway(&folder, upstream).await;
    let before = process.resident_bytes();
    let mut stream = BufReader::new(TcpStream::connect(address).await.unwrap());
    stream.write_all(&[PREFACE, &open_windows(), &get_http2(1, "/")].concat()).await.unwrap();
    check_blocked("a client of HTTP/2 reads nothing", &process, before, &accepted).await;
    assert!(!stream.fill_buf().await.unwrap().is_empty());
    read_body(&mut stream).await;
    check_memory(&process, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_that_does_not_read_blocks_the_client() {
    let folder = Folder::new("full");
    let (accepted, may_read) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
    let ((listener, upstream), may) = (listen().await, may_read.clone());
    tokio::spawn(async move {
        let mut stream = BufReader::new(listener.accept().await.unwrap().0);
        read_head(&mut stream).await;
        may.acquire().await.unwrap().forget();
        read_body(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
        let _ = stream.read_u8().await;
    });
    let (process, address) = gateway(&folder, upstream).await;
    let before = process.resident_bytes();
    let (mut reading, mut writing) = TcpStream::connect(address).await.unwrap().into_split();
    let count = accepted.clone();
    let sending = tokio::spawn(async move {
        let head = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {BODY_BYTES}\r\n\r\n");
        writing.write_all(head.as_bytes()).await.unwrap();
        write_body(&mut writing, &count).await;
        writing
    });
    check_blocked("an upstream reads nothing", &process, before, &accepted).await;
    may_read.add_permits(1);
    let head = read_head(&mut reading).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    drop(sending.await.unwrap());
    check_memory(&process, before);
}

/// Clients that request large responses and do not read them, all at once. An HTTP/2 client can request many.
#[tokio::test(flavor = "multi_thread")]
async fn unread_responses_hold_little_memory_each() {
    const RESPONSES: usize = 256;
    const STREAMS_MAX: usize = 128;
    // Futures are larger without optimisation.
    const BYTES_MAX: u64 = if cfg!(debug_assertions) { 160 << 10 } else { 128 << 10 };
    let cases = [
        ("http1", "http1", 1),
        ("http1", "http2", 1),
        ("http2", "http1", 1),
        ("http2", "http2", 1),
        ("http2", "http1", STREAMS_MAX),
        ("http2", "http2", STREAMS_MAX),
    ];
    for (client, protocol, streams) in cases {
        let (folder, upstream) = (Folder::new(&format!("{client}-{protocol}-{streams}")), listen().await);
        let (listener, at) = upstream;
        let is_http2 = protocol == "http2";
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(endless(stream, is_http2));
            }
        });
        let text = format!(
            "admin: 127.0.0.1:0\ngateway:\n  listen: 127.0.0.1:0\n  access_log: false\n  \
             upstreams: {{ one: {{ addresses: [http://{at}], protocol: {protocol} }} }}\n  \
             routes: [{{ id: all, limits: all, upstream: one }}]\n"
        );
        let (process, address) = Process::serving(&folder.write("ratekeeper.yaml", &text)).await;
        let before = process.resident_bytes();
        let mut clients = Vec::new();
        for _ in 0..RESPONSES / streams {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let begin = match client {
                "http1" => b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
                _ => {
                    let requests = (0..streams as u32).flat_map(|number| get_http2(2 * number + 1, "/"));
                    [PREFACE, &open_windows(), &requests.collect::<Vec<_>>()].concat()
                }
            };
            stream.write_all(&begin).await.unwrap();
            // A byte of the response: its body is on the way.
            assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 1);
            clients.push(stream);
        }
        process.until_metric("ratekeeper_requests_in_flight", RESPONSES as u64).await;
        let mut highest = 0;
        let memory = wait_until_stable(|| {
            highest = process.resident_bytes().max(highest);
            highest as usize
        });
        let each = (memory.await as u64 - before) / RESPONSES as u64;
        let case = format!("{client} to {protocol}, {streams} per connection");
        println!("{case}: {} KiB for each response that is not read", each >> 10);
        assert!(each < BYTES_MAX, "{case}: {each} bytes for each response");
    }
}

struct EndlessBody;

impl Body for EndlessBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 64 << 10])))))
    }
}

/// Answers each request with a body that never ends.
async fn endless(mut stream: TcpStream, is_http2: bool) {
    if !is_http2 {
        read_head(&mut stream).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000000\r\n\r\n").await;
        let part = vec![b'x'; 64 << 10];
        while stream.write_all(&part).await.is_ok() {}
        return;
    }
    let respond = service_fn(|_| async { Ok::<_, Infallible>(Response::new(EndlessBody)) });
    let _ = http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), respond).await;
}

/// SETTINGS and WINDOW_UPDATE that open the HTTP/2 windows as far as they go.
fn open_windows() -> Vec<u8> {
    const INITIAL_WINDOW_SIZE: u16 = 4;
    const ALL: u32 = 0x7fff_ffff;
    let settings = [&INITIAL_WINDOW_SIZE.to_be_bytes()[..], &ALL.to_be_bytes()].concat();
    [frame(SETTINGS, 0, 0, &settings), frame(WINDOW_UPDATE, 0, 0, &(ALL - 65_535).to_be_bytes())].concat()
}
