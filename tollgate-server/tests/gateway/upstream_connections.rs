//! Connections to upstreams: how long they live, and how many there are.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::peers::{File, read_answer, read_head, scripted};
use super::support::{parse, run, status, until};

/// An upstream that answers everything, and how many connections to it were opened and are open.
struct Counting {
    address: std::net::SocketAddr,
    opened: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
}

async fn counting() -> Counting {
    let (opened, open) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let counts = (opened.clone(), open.clone());
    let address = scripted(move |mut stream, _| {
        let (opened, open) = counts.clone();
        async move {
            opened.fetch_add(1, Ordering::Relaxed);
            open.fetch_add(1, Ordering::Relaxed);
            while !read_head(&mut stream).await.is_empty() {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
            }
            open.fetch_sub(1, Ordering::Relaxed);
        }
    })
    .await;
    Counting { address, opened, open }
}

/// A connection was kept alive by the task that worked on it, and so was the upstream that a reload had replaced: each
/// reload left its connections open for ever.
#[tokio::test]
async fn a_reload_closes_the_connections_of_what_it_replaces() {
    let upstream = counting().await;
    let file = |idle: usize| {
        let setting = format!(", idle_timeout: {idle}s");
        File { upstream: &setting, ..File::default() }.to(&[upstream.address])
    };
    let gateway = run(&file(3_000)).await;
    // Its clients stay, and hold nothing back.
    let mut client = TcpStream::connect(gateway.address).await.unwrap();
    for number in 1..=5 {
        client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        assert_eq!(status(&read_answer(&mut client).await), 200);
        assert_eq!(upstream.opened.load(Ordering::Relaxed), number);
        gateway.gateway.reload(&parse(&file(3_000 + number))).unwrap();
        until(|| upstream.open.load(Ordering::Relaxed) == 0).await;
    }
}
