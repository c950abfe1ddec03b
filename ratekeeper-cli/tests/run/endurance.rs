//! Slow clients, and a soak test.

use std::time::Duration;
use testbed::TEST_TIMEOUT;
use tokio::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::run::support::{Folder, Load, Process, Upstream, one_route};

/// Incomplete heads of several kinds.
const INCOMPLETE_HEADS: [&str; 4] =
    ["", "G", "GET / HTTP/1.1\r\nHost:", "GET / HTTP/1.1\r\nHost: slow\r\nX-More: "];

/// Returns the number of sockets that the test opens: 2000, or fewer if this process and the gateway may open fewer
/// files.
fn allowed_sockets() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let soft = line.split_whitespace().nth(3).and_then(|it| it.parse::<usize>().ok()).unwrap_or(usize::MAX);
    2000.min(soft.saturating_sub(500))
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_incomplete_heads_are_closed_while_others_are_served() {
    let (folder, upstream) = (Folder::new("slow"), Upstream::start().await);
    let text = one_route(&upstream, "", "  timeouts: { header: 8s }");
    let (process, address) = Process::serving(&folder.write("ratekeeper.yaml", &text)).await;
    let load = Load::get(address, 4, "/");
    let count = allowed_sockets();
    let begun = Instant::now();
    let mut slow = JoinSet::new();
    for number in 0..count {
        slow.spawn(async move {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(INCOMPLETE_HEADS[number % INCOMPLETE_HEADS.len()].as_bytes()).await.unwrap();
            let mut rest = Vec::new();
            // The gateway may send a reason or nothing, but must not keep the connection open.
            timeout(TEST_TIMEOUT, stream.read_to_end(&mut rest)).await.is_ok()
        });
    }
    // All of them are open together, before the first times out.
    let mut open = 0;
    while open < count as u64 {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{open} of {count} were open at once");
        open = process.metric("ratekeeper_connections").await.max(open);
    }
    load.more(1000).await;
    let mut closed = 0;
    while let Some(is_closed) = slow.join_next().await {
        closed += usize::from(is_closed.unwrap());
    }
    let took = begun.elapsed();
    let tally = load.stop().await;
    println!("{count} slow sockets ({open} open at once), all closed within {took:.1?}; the others: {tally}");
    assert_eq!(closed, count);
    tally.assert_all(200);
}

/// Returns the duration of the soak test.
fn soak_time() -> Duration {
    let secs = std::env::var("RATEKEEPER_SOAK_SECS").ok().and_then(|secs| secs.parse().ok());
    Duration::from_secs(secs.unwrap_or(testbed::ordinary_or_long(10, 60)))
}

/// Maximum growth of memory after warm-up: caches of the allocator, not a leak.
const GROWTH_BYTES_MAX: u64 = 16 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn soak_test_leaves_memory_flat() {
    let (folder, upstream) = (Folder::new("soak"), Upstream::start().await);
    let above = "limits: { per-user: { key: { header: X-User-Id, fallback: anonymous }, token_bucket: { capacity: 20, refill: 20/s } } }";
    let text = one_route(&upstream, above, "").replace("access_log: false", "access_log: true");
    let (process, address) = Process::serving(&folder.write("ratekeeper.yaml", &text)).await;
    let large = vec![b'x'; 100_000];
    let load = Load::start(
        address,
        8,
        move |client, count| {
            // Even clients use one key each and are mostly denied; odd clients rotate through a hundred keys.
            let user = if client % 2 == 0 { client as u64 } else { client as u64 + 8 * (count % 100) };
            let head = |line: &str, more: &str| {
                format!("{line} HTTP/1.1\r\nHost: test\r\nX-User-Id: u{user}\r\n{more}\r\n")
            };
            match count % 8 {
                3 => [head("POST /", "Content-Length: 100000\r\n").as_bytes(), &large].concat(),
                5 => head("GET /large", "").into_bytes(),
                7 => head("GET /", "Connection: close\r\n").into_bytes(),
                _ => head("GET /", "").into_bytes(),
            }
        },
        |_| Ok(()),
    );
    let (all, begun) = (soak_time(), Instant::now());
    let mut samples = Vec::new();
    while begun.elapsed() < all {
        load.more(50).await;
        samples.push((begun.elapsed(), process.resident_bytes()));
    }
    let tally = load.stop().await;
    let settled = samples.iter().filter(|(at, _)| *at < all * 2 / 5).map(|(_, bytes)| *bytes).max().unwrap();
    let highest = samples.iter().map(|(_, bytes)| *bytes).max().unwrap();
    let tenths: Vec<u64> = (0..10)
        .filter_map(|tenth| samples.get(samples.len() * (tenth + 1) / 10 - 1))
        .map(|it| it.1 >> 10)
        .collect();
    println!("soak of {all:?}: {tally}; memory in KiB after each tenth: {tenths:?}");
    assert!(highest <= settled + GROWTH_BYTES_MAX, "{settled} {highest}");
    assert!(tally.failed.is_empty(), "{:?}", &tally.failed[..tally.failed.len().min(5)]);
    assert!(tally.statuses.keys().all(|status| matches!(status, 200 | 429)), "{tally}");
    assert!(tally.of(200) > 0 && tally.of(429) > 0);
    assert_eq!(process.metric("ratekeeper_requests_in_flight").await, 0);
}
