//! Clients that flood HTTP/2 with frames that cost them nothing: what it costs the gateway, and those beside them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use testbed::http2::kind::{DATA, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS, WINDOW_UPDATE};
use testbed::http2::{ACK, END_HEADERS, HEAD_BYTES, Head, PREFACE, block, frame, get, request_head};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::run::support::{Folder, Load, PATIENCE, Process, Upstream, one_route, until};

/// What the memory may grow by: buffers of a few connections, and caches of the allocator.
const GROWTH_BYTES_MAX: u64 = 16 << 20;
/// The stream of the request behind a flood. None can come after it.
const LAST: u32 = 0x7fff_ffff;
/// Frames that are sent at once.
const BATCH: u32 = 200;

const PROTOCOL_ERROR: u32 = 1;
const ENHANCE_YOUR_CALM: u32 = 11;

/// A part of a flood, by its number.
type Part = fn(u32) -> Vec<u8>;

/// How a flood ended.
#[derive(Debug, Default)]
struct Heard {
    /// By their kinds.
    frames: BTreeMap<u8, u64>,
    /// What the gateway said when it had had enough.
    enough: Option<u32>,
    /// Whether the request behind the flood had an answer.
    is_answered: bool,
    sent: u64,
}

impl Heard {
    fn of(&self, kind: u8) -> u64 {
        self.frames.get(&kind).copied().unwrap_or(0)
    }
}

/// Sends a beginning and so many parts, each by its number, and behind them a request. Ends with its answer, or when the
/// gateway ends the connection.
async fn flood(address: SocketAddr, begin: &[u8], part: Part, count: u32) -> Heard {
    let (reading, mut writing) = TcpStream::connect(address).await.unwrap().into_split();
    let greeting = [PREFACE, &frame(SETTINGS, 0, 0, &[]), begin].concat();
    writing.write_all(&greeting).await.unwrap();
    // A client that does not answer pings is gone, and nobody would have to wait for it.
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
            // A gateway that has had enough does not read on.
            if writing.write_all(&bytes).await.is_err() {
                return writing;
            }
            counting.fetch_add(numbers.count() as u64, Ordering::Relaxed);
        }
        let _ = writing.write_all(&get(LAST, "/")).await;
        writing
    });
    let mut heard = Heard::default();
    let mut reading = BufReader::new(reading);
    let listening = async {
        let mut head = [0; HEAD_BYTES];
        while reading.read_exact(&mut head).await.is_ok() {
            let head = Head::of(head);
            let mut payload = vec![0; head.length];
            if reading.read_exact(&mut payload).await.is_err() {
                return;
            }
            *heard.frames.entry(head.kind).or_default() += 1;
            if head.kind == GOAWAY {
                heard.enough = Some(u32::from_be_bytes([payload[4], payload[5], payload[6], payload[7]]));
            }
            if head.kind == PING && head.flags & ACK == 0 {
                let _ = pinged.send(payload);
            }
            if head.kind == HEADERS && head.stream == LAST {
                heard.is_answered = true;
                return;
            }
        }
    };
    timeout(PATIENCE, listening).await.expect("the flood goes on and on");
    sending.abort();
    heard.sent = sent.load(Ordering::Relaxed);
    heard
}

/// What became of several floods.
struct Endured {
    all: Vec<Heard>,
    /// How many of their requests came to the upstream.
    forwarded: usize,
}

/// A gateway with a load of others on it.
struct Flooded {
    upstream: Upstream,
    process: Process,
    address: SocketAddr,
    load: Load,
    _folder: Folder,
}

impl Flooded {
    async fn start(name: &str, gateway: &str) -> Flooded {
        let (folder, upstream) = (Folder::new(name), Upstream::start().await);
        let file = folder.write("tollgate.yaml", &one_route(&upstream, "", gateway));
        let (process, address) = Process::serving(&file).await;
        let load = Load::get(address, 4, "/");
        load.more(500).await;
        Flooded { upstream, process, address, load, _folder: folder }
    }

    /// Has so many clients flood it, one after the other. All that is certain whatever they send is looked at here.
    async fn endure(self, what: &str, begin: Vec<u8>, part: Part, count: u32, clients: usize) -> Endured {
        let Flooded { upstream, process, address, load, _folder } = self;
        let (before, answered_before, begun) = (process.resident_bytes(), load.answered(), Instant::now());
        let flooding = tokio::spawn(async move {
            let mut all = Vec::new();
            for _ in 0..clients {
                all.push(flood(address, &begin, part, count).await);
            }
            all
        });
        let mut highest = before;
        until("the end of the floods", || {
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
        let forwarded = upstream.asked() - usize::try_from(tally.of(200)).unwrap();
        println!(
            "{what}, {clients} times in {took:.1?}: memory {} KiB and {} more; {forwarded} requests were forwarded; \
             the others had {answered} answers meanwhile, in all {tally}; the first: {:?}",
            before >> 10,
            growth >> 10,
            all[0]
        );
        assert!(answered > 0, "nobody else was served");
        assert!(growth < GROWTH_BYTES_MAX, "{growth}");
        // Nothing of it is left.
        process.until_metric("tollgate_requests_in_flight", 0).await;
        Endured { all, forwarded }
    }
}

/// CVE-2025-8671, "MadeYouReset": a request, and behind it what makes the server reset it, again and again. For the
/// server it is over, so it does not count; for those behind the server the work has begun.
#[tokio::test(flavor = "multi_thread")]
async fn streams_that_the_gateway_is_made_to_reset_end_the_connection() {
    const STREAMS: u32 = 20_000;
    let overflow = |number| {
        let stream = 2 * number + 1;
        [get(stream, "/hold"), frame(WINDOW_UPDATE, 0, stream, &0x7fff_ffff_u32.to_be_bytes())].concat()
    };
    let flooded = Flooded::start("reset", "").await;
    let endured = flooded.endure("window overflows", Vec::new(), overflow, STREAMS, 5).await;
    for heard in &endured.all {
        assert_eq!((heard.enough, heard.is_answered), (Some(ENHANCE_YOUR_CALM), false), "{heard:?}");
        assert!(heard.of(RST_STREAM) < u64::from(STREAMS) / 10, "{heard:?}");
    }
    assert!(endured.forwarded < 5 * STREAMS as usize / 10, "{}", endured.forwarded);
}

/// The same by a body behind the end of the request.
#[tokio::test(flavor = "multi_thread")]
async fn so_do_bodies_of_requests_that_have_ended() {
    let late_body = |number| {
        let stream = 2 * number + 1;
        [get(stream, "/hold"), frame(DATA, 0, stream, b"late")].concat()
    };
    let flooded = Flooded::start("late-body", "").await;
    for heard in flooded.endure("bodies behind the end", Vec::new(), late_body, 20_000, 5).await.all {
        assert!(!heard.is_answered && heard.enough.is_some(), "{heard:?}");
        assert!(heard.of(RST_STREAM) < 2_000, "{heard:?}");
    }
}

/// And by room for nothing: that is an error of the whole connection to us, so there is no second time.
#[tokio::test(flavor = "multi_thread")]
async fn room_for_nothing_ends_the_connection_at_once() {
    let nothing = |number| {
        let stream = 2 * number + 1;
        [get(stream, "/hold"), frame(WINDOW_UPDATE, 0, stream, &[0; 4])].concat()
    };
    let flooded = Flooded::start("nothing", "").await;
    for heard in flooded.endure("windows of 0", Vec::new(), nothing, 20_000, 20).await.all {
        assert_eq!((heard.enough, heard.is_answered), (Some(PROTOCOL_ERROR), false), "{heard:?}");
    }
}

/// RUSTSEC-2026-0258: frames without a byte, so that no window stops them.
#[tokio::test(flavor = "multi_thread")]
async fn empty_frames_of_a_body_end_the_connection() {
    let post = frame(HEADERS, END_HEADERS, 1, &block(request_head("POST", "/echo")));
    let flooded = Flooded::start("empty", "").await;
    for heard in flooded.endure("empty DATA", post, |_| frame(DATA, 0, 1, &[]), 100_000, 20).await.all {
        assert_eq!((heard.enough, heard.is_answered), (Some(ENHANCE_YOUR_CALM), false), "{heard:?}");
    }
}

/// A ping has an answer, however many there are: nothing bounds their number but the time of the connection. They must
/// be answered one by one, so that those wait who send them, and not what they have sent.
#[tokio::test(flavor = "multi_thread")]
async fn pings_without_number_cost_no_memory() {
    const PINGS: u32 = 200_000;
    let flooded = Flooded::start("pings", "").await;
    let ping = |number: u32| frame(PING, 0, 0, &u64::from(number).to_be_bytes());
    let heard = flooded.endure("PING", Vec::new(), ping, PINGS, 1).await.all.remove(0);
    assert!(heard.is_answered, "{heard:?}");
    // And perhaps one that the gateway has sent itself.
    assert!((PINGS..=PINGS + 1).contains(&u32::try_from(heard.of(PING)).unwrap()), "{heard:?}");
}

/// Settings that change what every stream may send, there and back.
#[tokio::test(flavor = "multi_thread")]
async fn settings_without_number_cost_no_memory() {
    const SENT: u32 = 100_000;
    const INITIAL_WINDOW_SIZE: u16 = 4;
    let flooded = Flooded::start("settings", "").await;
    let settings = |number: u32| {
        let size = 65_535 + number % 2;
        frame(SETTINGS, 0, 0, &[&INITIAL_WINDOW_SIZE.to_be_bytes()[..], &size.to_be_bytes()].concat())
    };
    let open = (0..100).flat_map(|number| get(2 * number + 1, "/hold")).collect();
    let heard = flooded.endure("SETTINGS", open, settings, SENT, 1).await.all.remove(0);
    assert!(heard.is_answered, "{heard:?}");
    // Its own, and an answer to each of ours.
    assert_eq!(heard.of(SETTINGS), u64::from(SENT) + 2, "{heard:?}");
}

/// Whoever is busy with frames must still look at the clock.
#[tokio::test(flavor = "multi_thread")]
async fn no_flood_outlasts_the_time_of_its_connection() {
    let flooded = Flooded::start("outlast", "  timeouts: { header: 1s, idle: 1s }").await;
    let floods: [(&str, Part); 2] =
        [("PING", |_| frame(PING, 0, 0, &[7; 8])), ("PING ACK", |_| frame(PING, ACK, 0, &[7; 8]))];
    for (what, part) in floods {
        for begin in [Vec::new(), get(1, "/")] {
            let begun = Instant::now();
            let heard = flood(flooded.address, &begin, part, u32::MAX).await;
            let took = begun.elapsed();
            println!("{what} without end: over after {took:.1?}, {} sent", heard.sent);
            assert!(!heard.is_answered && took < PATIENCE / 3, "{took:?}: {heard:?}");
        }
    }
    flooded.load.stop().await.assert_all(200);
}
