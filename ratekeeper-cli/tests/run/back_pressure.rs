//! Back pressure: if the receiver does not read, the sender must wait, and the gateway does not buffer the data.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use testbed::http2::kind::{SETTINGS, WINDOW_UPDATE};
use testbed::http2::{PREFACE, frame, get as get_http2};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::run::support::{Folder, PATIENCE, Process, until};

const MUCH: usize = 200 << 20;
/// Maximum growth of the gateway's memory.
const GROWTH_BYTES_MAX: u64 = 8 << 20;

/// Returns the bytes that the kernel buffers for two connections, on both ends of each.
fn buffered_max() -> usize {
    let most = |name: &str| -> usize {
        let text = std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap();
        text.split_whitespace().nth(2).unwrap().parse().unwrap()
    };
    2 * (most("tcp_rmem") + most("tcp_wmem"))
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

/// Reads a head, and nothing beyond it.
async fn read_head(reading: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(PATIENCE, reading.read_u8()).await.expect("no head came").unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// Sends `MUCH` bytes and counts those accepted.
async fn pour(writing: &mut (impl AsyncWrite + Unpin), taken: &AtomicUsize) {
    let part = vec![b'x'; 64 << 10];
    while taken.load(Ordering::Relaxed) < MUCH {
        writing.write_all(&part).await.unwrap();
        taken.fetch_add(part.len(), Ordering::Relaxed);
    }
}

/// Reads `MUCH` bytes. A few more, of frames, may follow.
async fn drink(reading: &mut (impl AsyncRead + Unpin)) {
    let (mut left, mut bytes) = (MUCH, vec![0; 256 << 10]);
    while left > 0 {
        let read = timeout(PATIENCE, reading.read(&mut bytes)).await.expect("nothing comes").unwrap();
        assert!(read > 0, "{left} bytes are missing");
        left = left.saturating_sub(read);
    }
}

/// Waits until the sender is blocked, and samples the gateway's memory meanwhile.
async fn check_stuck(what: &str, process: &Process, before: u64, taken: &AtomicUsize) {
    let (mut last, mut same, mut highest) = (0, 0, before);
    until("a sender that waits", || {
        highest = highest.max(process.resident_bytes());
        let now = taken.load(Ordering::Relaxed);
        same = if now == last && now > 0 { same + 1 } else { 0 };
        last = now;
        // 200 samples, two milliseconds apart.
        same == 200
    })
    .await;
    let growth = highest.saturating_sub(before);
    println!("{what}: {} KiB were taken, and memory grew by {} KiB", last >> 10, growth >> 10);
    assert!(last < buffered_max() + GROWTH_BYTES_MAX as usize, "the gateway took {last} bytes");
    assert!(growth < GROWTH_BYTES_MAX, "{growth}");
}

/// Checks that memory did not grow afterwards either.
fn check_memory(process: &Process, before: u64) {
    let now = process.resident_bytes();
    assert!(now < before + GROWTH_BYTES_MAX, "{before} {now}");
}

/// Starts a server that answers with `MUCH` bytes; returns its address and the count of bytes accepted.
async fn generous() -> (SocketAddr, Arc<AtomicUsize>) {
    let taken = Arc::new(AtomicUsize::new(0));
    let ((listener, address), count) = (listen().await, taken.clone());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_head(&mut stream).await;
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {MUCH}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        pour(&mut stream, &count).await;
    });
    (address, taken)
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_does_not_read_blocks_the_upstream() {
    let (folder, (upstream, taken)) = (Folder::new("thirsty"), generous().await);
    let (process, address) = gateway(&folder, upstream).await;
    let before = process.resident_bytes();
    let mut stream = BufReader::new(TcpStream::connect(address).await.unwrap());
    stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    check_stuck("a client of HTTP/1 reads nothing", &process, before, &taken).await;
    let head = read_head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    drink(&mut stream).await;
    check_memory(&process, before);
}

/// CVE-2019-9517: the HTTP/2 flow control windows are open, but the socket's buffer is full.
#[tokio::test(flavor = "multi_thread")]
async fn http2_client_with_open_windows_that_does_not_read_blocks_the_upstream() {
    const INITIAL_WINDOW_SIZE: u16 = 4;
    const ALL: u32 = 0x7fff_ffff;
    let (folder, (upstream, taken)) = (Folder::new("roomy"), generous().await);
    let (process, address) = gateway(&folder, upstream).await;
    let before = process.resident_bytes();
    let mut stream = BufReader::new(TcpStream::connect(address).await.unwrap());
    let settings = [&INITIAL_WINDOW_SIZE.to_be_bytes()[..], &ALL.to_be_bytes()].concat();
    let room = (ALL - 65_535).to_be_bytes();
    let begin =
        [PREFACE, &frame(SETTINGS, 0, 0, &settings), &frame(WINDOW_UPDATE, 0, 0, &room), &get_http2(1, "/")];
    stream.write_all(&begin.concat()).await.unwrap();
    check_stuck("a client of HTTP/2 reads nothing", &process, before, &taken).await;
    assert!(!stream.fill_buf().await.unwrap().is_empty());
    drink(&mut stream).await;
    check_memory(&process, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_that_does_not_read_blocks_the_client() {
    let folder = Folder::new("full");
    let (taken, may_read) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
    let ((listener, upstream), may) = (listen().await, may_read.clone());
    tokio::spawn(async move {
        let mut stream = BufReader::new(listener.accept().await.unwrap().0);
        read_head(&mut stream).await;
        may.acquire().await.unwrap().forget();
        drink(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
        let _ = stream.read_u8().await;
    });
    let (process, address) = gateway(&folder, upstream).await;
    let before = process.resident_bytes();
    let (mut reading, mut writing) = TcpStream::connect(address).await.unwrap().into_split();
    let count = taken.clone();
    let sending = tokio::spawn(async move {
        let head = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {MUCH}\r\n\r\n");
        writing.write_all(head.as_bytes()).await.unwrap();
        pour(&mut writing, &count).await;
        writing
    });
    check_stuck("an upstream reads nothing", &process, before, &taken).await;
    may_read.add_permits(1);
    let head = read_head(&mut reading).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    drop(sending.await.unwrap());
    check_memory(&process, before);
}
