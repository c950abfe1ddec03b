//! HTTP/2 floods: frames that are cheap to send, and their cost for the gateway and its other clients.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use testbed::http2::kind::{DATA, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS, WINDOW_UPDATE};
use testbed::http2::{ACK, END_HEADERS, HEAD_BYTES, Head, PREFACE, block, frame, get, request_head};
use testbed::{TEST_TIMEOUT, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::run::support::{Folder, Load, Process, Upstream, one_route};

/// Maximum growth of memory: buffers of a few connections, and caches of the allocator.
const GROWTH_BYTES_MAX: u64 = 16 << 20;
/// The stream of the request after a flood; no later stream is possible.
const LAST: u32 = 0x7fff_ffff;
/// Frames per write.
const BATCH: u32 = 200;

const PROTOCOL_ERROR: u32 = 1;
const ENHANCE_YOUR_CALM: u32 = 11;

/// Builds the frames of one step of a flood, by its number.
type Frames = fn(u32) -> Vec<u8>;

/// The outcome of a flood.
#[derive(Debug, Default)]
struct FloodResult {
    /// Received frames, by type.
    frames: BTreeMap<u8, u64>,
    /// The error code of the gateway's GOAWAY.
    go_away: Option<u32>,
    /// Whether the request after the flood was answered.
    is_answered: bool,
    sent: u64,
    took: Duration,
}

impl FloodResult {
    fn of(&self, kind: u8) -> u64 {
        self.frames.get(&kind).copied().unwrap_or(0)
    }

    /// Whether the gateway answered no more frames than its bound per second permits.
    fn is_within_bound(&self, kind: u8) -> bool {
        // 10,000 in each second or part of one; the bytes of the answers permit one percent more.
        self.of(kind) <= 10_100 * (self.took.as_secs() + 2)
    }
}

/// Sends `begin`, `count` parts by their numbers with a pause after each batch, and then a request. Ends with the answer
/// to it, or when the gateway closes the connection.
async fn flood(
    address: SocketAddr,
    begin: &[u8],
    part: Frames,
    count: u32,
    pause: Option<Duration>,
) -> FloodResult {
    let begun = Instant::now();
    let (reading, mut writing) = TcpStream::connect(address).await.unwrap().into_split();
    let preface = [PREFACE, &frame(SETTINGS, 0, 0, &[]), begin].concat();
    writing.write_all(&preface).await.unwrap();
    // The client answers pings, because the gateway closes the connection of one that does not.
    let (pinged, mut pings) = mpsc::unbounded_channel::<Vec<u8>>();
    let sent = Arc::new(AtomicU64::new(0));
    let counting = sent.clone();
    let sending = tokio::spawn(async move {
        for from in (0..count).step_by(BATCH as usize) {
            let numbers = from..count.min(from.saturating_add(BATCH));
            let mut bytes: Vec<u8> = numbers.clone().flat_map(part).collect();
            while let Ok(ping) = pings.try_recv() {
                bytes.extend(frame(PING, ACK, 0, &ping));
            }
            // A gateway that has closed the connection stops reading.
            if writing.write_all(&bytes).await.is_err() {
                return writing;
            }
            counting.fetch_add(numbers.count() as u64, Ordering::Relaxed);
            if let Some(pause) = pause {
                // A flood at a rate, not as fast as the sockets allow.
                sleep(pause).await;
            }
        }
        let _ = writing.write_all(&get(LAST, "/")).await;
        writing
    });
    let mut result = FloodResult::default();
    let mut reading = BufReader::new(reading);
    let reading_frames = async {
        let mut head = [0; HEAD_BYTES];
        while reading.read_exact(&mut head).await.is_ok() {
            let head = Head::of(head);
            let mut payload = vec![0; head.length];
            if reading.read_exact(&mut payload).await.is_err() {
                return;
            }
            *result.frames.entry(head.kind).or_default() += 1;
            if head.kind == GOAWAY {
                result.go_away = Some(u32::from_be_bytes([payload[4], payload[5], payload[6], payload[7]]));
            }
            if head.kind == PING && head.flags & ACK == 0 {
                let _ = pinged.send(payload);
            }
            if head.kind == HEADERS && head.stream == LAST {
                result.is_answered = true;
                return;
            }
        }
    };
    timeout(TEST_TIMEOUT, reading_frames).await.expect("the flood did not end");
    sending.abort();
    (result.sent, result.took) = (sent.load(Ordering::Relaxed), begun.elapsed());
    result
}

/// The outcome of several floods.
struct FloodResults {
    all: Vec<FloodResult>,
    /// Number of their requests that reached the upstream.
    forwarded: usize,
}

/// A gateway under load from other clients.
struct LoadedGateway {
    upstream: Upstream,
    process: Process,
    address: SocketAddr,
    load: Load,
    _folder: Folder,
}

impl LoadedGateway {
    async fn start(name: &str, gateway: &str) -> LoadedGateway {
        let (folder, upstream) = (Folder::new(name), Upstream::start().await);
        let file = folder.write("ratekeeper.yaml", &one_route(&upstream, "", gateway));
        let (process, address) = Process::serving(&file).await;
        let load = Load::get(address, 4, "/");
        load.more(500).await;
        LoadedGateway { upstream, process, address, load, _folder: folder }
    }

    /// Runs floods from `clients` clients one after the other, and checks what holds for any flood.
    async fn run_floods(
        self,
        what: &str,
        begin: Vec<u8>,
        part: Frames,
        count: u32,
        clients: usize,
    ) -> FloodResults {
        let LoadedGateway { upstream, process, address, load, _folder } = self;
        let (before, answered_before, begun) = (process.resident_bytes(), load.answered(), Instant::now());
        let flooding = tokio::spawn(async move {
            let mut all = Vec::new();
            for _ in 0..clients {
                all.push(flood(address, &begin, part, count, None).await);
            }
            all
        });
        let mut highest = before;
        wait_until(|| {
            highest = highest.max(process.resident_bytes());
            flooding.is_finished()
        })
        .await;
        let (took, answered) = (begun.elapsed(), load.answered() - answered_before);
        let all = flooding.await.unwrap();
        load.more(100).await;
        let tally = load.stop().await;
        let growth = highest - before;
        tally.assert_all(200);
        let forwarded = upstream.requests() - usize::try_from(tally.of(200)).unwrap();
        println!(
            "{what}, {clients} times in {took:.1?}: memory {} KiB and {} more; {forwarded} requests were forwarded; \
             other clients got {answered} responses meanwhile, in total {tally}; the first: {:?}",
            before >> 10,
            growth >> 10,
            all[0]
        );
        assert!(answered > 0, "no other client was served");
        assert!(growth < GROWTH_BYTES_MAX, "{growth}");
        // No request of the floods is still in flight.
        process.until_metric("ratekeeper_requests_in_flight", 0).await;
        FloodResults { all, forwarded }
    }
}

/// CVE-2025-8671, "MadeYouReset": requests followed by a frame that makes the server reset them. For the server the
/// stream is closed and no longer counts, but the upstream has started its work.
#[tokio::test(flavor = "multi_thread")]
async fn streams_reset_by_window_overflow_close_the_connection() {
    const STREAMS: u32 = 20_000;
    let overflow = |number| {
        let stream = 2 * number + 1;
        [get(stream, "/hold"), frame(WINDOW_UPDATE, 0, stream, &0x7fff_ffff_u32.to_be_bytes())].concat()
    };
    let gateway = LoadedGateway::start("reset", "").await;
    let results = gateway.run_floods("window overflows", Vec::new(), overflow, STREAMS, 5).await;
    for result in &results.all {
        assert_eq!((result.go_away, result.is_answered), (Some(ENHANCE_YOUR_CALM), false), "{result:?}");
        assert!(result.of(RST_STREAM) < u64::from(STREAMS) / 10, "{result:?}");
    }
    assert!(results.forwarded < 5 * STREAMS as usize / 10, "{}", results.forwarded);
}

/// The same, with a body after the end of the request.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_after_the_end_of_their_requests_close_the_connection() {
    let late_body = |number| {
        let stream = 2 * number + 1;
        [get(stream, "/hold"), frame(DATA, 0, stream, b"late")].concat()
    };
    let gateway = LoadedGateway::start("late-body", "").await;
    for result in gateway.run_floods("bodies after the end", Vec::new(), late_body, 20_000, 5).await.all {
        assert!(!result.is_answered && result.go_away.is_some(), "{result:?}");
        assert!(result.of(RST_STREAM) < 2_000, "{result:?}");
    }
}

/// The same, with a window update of 0: a connection error, so the first one closes the connection.
#[tokio::test(flavor = "multi_thread")]
async fn window_update_of_zero_closes_the_connection_immediately() {
    let nothing = |number| {
        let stream = 2 * number + 1;
        [get(stream, "/hold"), frame(WINDOW_UPDATE, 0, stream, &[0; 4])].concat()
    };
    let gateway = LoadedGateway::start("nothing", "").await;
    for result in gateway.run_floods("windows of 0", Vec::new(), nothing, 20_000, 20).await.all {
        assert_eq!((result.go_away, result.is_answered), (Some(PROTOCOL_ERROR), false), "{result:?}");
    }
}

/// RUSTSEC-2026-0258: empty frames, which flow control does not limit.
#[tokio::test(flavor = "multi_thread")]
async fn empty_data_frames_close_the_connection() {
    let post = frame(HEADERS, END_HEADERS, 1, &block(request_head("POST", "/echo")));
    let gateway = LoadedGateway::start("empty", "").await;
    for result in gateway.run_floods("empty DATA", post, |_| frame(DATA, 0, 1, &[]), 100_000, 20).await.all {
        assert_eq!((result.go_away, result.is_answered), (Some(ENHANCE_YOUR_CALM), false), "{result:?}");
    }
}

/// The gateway answers each PING and each SETTINGS; a connection that sends many more than any client needs is closed.
#[tokio::test(flavor = "multi_thread")]
async fn ping_flood_closes_the_connection() {
    const PINGS: u32 = 500_000;
    let gateway = LoadedGateway::start("pings", "").await;
    for result in gateway.run_floods("PING", Vec::new(), ping, PINGS, 2).await.all {
        assert!(result.go_away.is_some() && !result.is_answered, "{result:?}");
        assert!(result.is_within_bound(PING), "{result:?}");
    }
}

/// Settings that repeatedly change the window of every stream.
#[tokio::test(flavor = "multi_thread")]
async fn settings_flood_closes_the_connection() {
    const SENT: u32 = 500_000;
    let gateway = LoadedGateway::start("settings", "").await;
    let open: Vec<u8> = (0..100).flat_map(|number| get(2 * number + 1, "/hold")).collect();
    for result in gateway.run_floods("SETTINGS", open, settings, SENT, 2).await.all {
        assert!(result.go_away.is_some() && !result.is_answered, "{result:?}");
        assert!(result.is_within_bound(SETTINGS), "{result:?}");
    }
}

/// Clients send pings to measure the round trip and to keep the connection open: one per round trip at most.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_pings_and_settings_are_answered() {
    const SENT: u32 = 4_000;
    let gateway = LoadedGateway::start("answered", "").await;
    let part = |number| [ping(number), settings(number)].concat();
    let result = gateway.run_floods("PING and SETTINGS", Vec::new(), part, SENT, 1).await.all.remove(0);
    assert!(result.is_answered && result.go_away.is_none(), "{result:?}");
    // One more if the gateway has sent a ping itself.
    assert!((SENT..=SENT + 1).contains(&u32::try_from(result.of(PING)).unwrap()), "{result:?}");
    // The gateway's own settings, an acknowledgement of the preface, and one of each sent here.
    assert_eq!(result.of(SETTINGS), u64::from(SENT) + 2, "{result:?}");
}

fn ping(number: u32) -> Vec<u8> {
    frame(PING, 0, 0, &u64::from(number).to_be_bytes())
}

fn settings(number: u32) -> Vec<u8> {
    const INITIAL_WINDOW_SIZE: u16 = 4;
    let size = 65_535 + number % 2;
    frame(SETTINGS, 0, 0, &[&INITIAL_WINDOW_SIZE.to_be_bytes()[..], &size.to_be_bytes()].concat())
}

/// Frames that nothing answers: the client can send them as fast as its connection is.
#[tokio::test(flavor = "multi_thread")]
async fn floods_of_unanswered_frames_close_the_connection() {
    const SENT: u32 = 500_000;
    const PRIORITY: u8 = 2;
    const UNKNOWN: u8 = 0x42;
    const RST_STREAM: u8 = 3;
    let floods: [(&str, Frames); 6] = [
        ("RST_STREAM", |_| frame(RST_STREAM, 0, 1, &8_u32.to_be_bytes())),
        ("GOAWAY", |_| frame(GOAWAY, 0, 0, &[0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0])),
        ("PRIORITY", |number| frame(PRIORITY, 0, 2 * (number % 1_000) + 1, &[0, 0, 0, 0, 15])),
        ("unknown frames", |_| frame(UNKNOWN, 0, 0, &[])),
        ("WINDOW_UPDATE", |_| frame(WINDOW_UPDATE, 0, 0, &1_u32.to_be_bytes())),
        ("PING ACK", |_| frame(PING, ACK, 0, &[7; 8])),
    ];
    for (what, part) in floods {
        let gateway = LoadedGateway::start("unanswered", "").await;
        for result in gateway.run_floods(what, get(1, "/hold"), part, SENT, 2).await.all {
            assert!(result.go_away.is_some() && !result.is_answered, "{what}: {result:?}");
            assert!(result.sent < u64::from(SENT), "{what}: {result:?}");
        }
    }
}

/// The gateway must check its timeouts even while it processes frames, here fewer per second than the bound.
#[tokio::test(flavor = "multi_thread")]
async fn flood_does_not_outlast_the_connection_timeout() {
    const PAUSE: Duration = Duration::from_millis(40);
    let gateway = LoadedGateway::start("outlast", "  timeouts: { header: 1s, idle: 1s }").await;
    let floods: [(&str, Frames); 2] = [("PING", ping), ("PING ACK", |_| frame(PING, ACK, 0, &[7; 8]))];
    for (what, part) in floods {
        for begin in [Vec::new(), get(1, "/")] {
            let begun = Instant::now();
            let result = flood(gateway.address, &begin, part, u32::MAX, Some(PAUSE)).await;
            let took = begun.elapsed();
            println!("{what} without end: closed after {took:.1?}, {} sent", result.sent);
            assert!(!result.is_answered && took < TEST_TIMEOUT / 3, "{took:?}: {result:?}");
        }
    }
    gateway.load.stop().await.assert_all(200);
}
