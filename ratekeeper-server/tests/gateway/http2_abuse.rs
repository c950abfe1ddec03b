//! Clients that abuse HTTP/2, frame by frame.

use std::time::Duration;

use testbed::TEST_TIMEOUT;
use testbed::http::{get, read_all, status};
use testbed::http2::kind::{CONTINUATION, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS, WINDOW_UPDATE};
use testbed::http2::{END_HEADERS, END_STREAM, block, frame, get as request, request_head};
use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, timeout};

use super::peers::{ConfigFile, Frame, RawHttp2 as Client};
use super::support::{Upstream, in_front_of, run};

const MAX_CONCURRENT_STREAMS: u16 = 3;
const FLOW_CONTROL_ERROR: u32 = 3;
pub(crate) const REFUSED_STREAM: u32 = 7;
pub(crate) const CANCEL: u32 = 8;
const ENHANCE_YOUR_CALM: u32 = 11;

/// CVE-2023-44487: requests that are reset immediately cost the client nothing, and the server all the work.
#[tokio::test]
async fn rapid_resets_end_the_connection() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let client = Client::connect(gateway.address).await;
    let mut flood = Vec::new();
    for number in 0..10_000 {
        let stream = 2 * number + 1;
        flood.extend(request(stream, "/hold"));
        flood.extend(frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes()));
    }
    let (mut reading, mut writing) = client.0.into_split();
    // The gateway stops reading long before the end.
    let sending = tokio::spawn(async move {
        let _ = writing.write_all(&flood).await;
        writing
    });
    read_all(&mut reading).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200, "other connections are served");
    assert!(upstream.requests().len() < 1_000, "the upstream saw {} of 10000", upstream.requests().len());
    drop(sending.await.unwrap());
}

/// Here each request reaches the upstream before it is reset: requests in flight never exceed the stream limit.
#[tokio::test]
async fn slow_resets_stay_within_the_stream_limit() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let mut client = Client::connect(gateway.address).await;
    for number in 0..300 {
        let stream = 2 * number + 1;
        client.0.write_all(&request(stream, "/hold")).await.unwrap();
        testbed::wait_until(|| upstream.requests().len() == number as usize + 1).await;
        client.0.write_all(&frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes())).await.unwrap();
    }
    gateway.wait_for_in_flight(0).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
}

/// CVE-2025-8671, "MadeYouReset": a window update beyond the maximum makes the gateway itself reset a request that
/// the upstream has already started. After a number of these resets, the gateway closes the connection.
#[tokio::test]
async fn provoked_resets_end_the_connection() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let mut client = Client::connect(gateway.address).await;
    let (mut resets, mut sent) = (0, 0);
    let enough = loop {
        let stream = 2 * sent + 1;
        client.0.write_all(&request(stream, "/hold")).await.unwrap();
        sent += 1;
        assert!(sent < 10_000, "no limit on resets");
        upstream.wait_for_held(sent as usize).await;
        client.0.write_all(&frame(WINDOW_UPDATE, 0, stream, &u32::MAX.to_be_bytes())).await.unwrap();
        match client.next_end().await.unwrap() {
            Frame { kind: RST_STREAM, stream: its, payload } if its == stream => {
                assert_eq!(payload, FLOW_CONTROL_ERROR.to_be_bytes());
                resets += 1;
            }
            frame => break frame,
        }
    };
    println!("{resets} resets before the connection was closed");
    assert_eq!((enough.kind, &enough.payload[4..8]), (GOAWAY, &ENHANCE_YOUR_CALM.to_be_bytes()[..]));
    assert!(client.next().await.is_none());
    gateway.wait_for_in_flight(0).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
}

#[tokio::test]
async fn streams_above_the_limit_are_refused() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let mut client = Client::connect(gateway.address).await;
    let settings = client.next_of(SETTINGS).await.unwrap().payload;
    let max = settings.chunks(6).find_map(|one| {
        let name = u16::from_be_bytes([one[0], one[1]]);
        (name == MAX_CONCURRENT_STREAMS).then(|| u32::from_be_bytes([one[2], one[3], one[4], one[5]]))
    });
    let max = max.expect("MAX_CONCURRENT_STREAMS is not set");
    assert!((100..=250).contains(&max), "{max}");
    for number in 0..=max {
        client.0.write_all(&request(2 * number + 1, "/hold")).await.unwrap();
    }
    let refused = client.next_of(RST_STREAM).await.unwrap();
    assert_eq!((refused.stream, refused.payload), (2 * max + 1, REFUSED_STREAM.to_be_bytes().to_vec()));
    upstream.wait_for_held(max as usize).await;
    upstream.release(max as usize);
    for _ in 0..max {
        client.next_of(HEADERS).await.expect("those that were taken are answered");
    }
}

#[tokio::test]
async fn oversized_http2_head_is_rejected() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let mut client = Client::connect(gateway.address).await;
    let large = "a".repeat(10_000);
    let more: Vec<(&str, &str)> =
        ["x-a", "x-b", "x-c", "x-d", "x-e", "x-f", "x-g"].map(|name| (name, &*large)).into();
    let whole = block(request_head("GET", "/").into_iter().chain(more));
    let mut parts = whole.chunks(16_000).enumerate().peekable();
    while let Some((number, part)) = parts.next() {
        let kind = if number == 0 { HEADERS } else { CONTINUATION };
        let flags = u8::from(number == 0) * END_STREAM + if parts.peek().is_none() { END_HEADERS } else { 0 };
        client.0.write_all(&frame(kind, flags, 1, part)).await.unwrap();
    }
    // Status 431, or the end of this stream or connection.
    let response = loop {
        match client.next().await {
            Some(frame) if matches!(frame.kind, HEADERS | RST_STREAM | GOAWAY) => break Some(frame.kind),
            Some(_) => {}
            None => break None,
        }
    };
    assert!(upstream.requests().is_empty(), "{response:?}");
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
}

/// RUSTSEC-2024-0332: a head that never ends.
#[tokio::test]
async fn endless_continuation_frames_end_the_connection() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    let mut client = Client::connect(gateway.address).await;
    let part = frame(CONTINUATION, 0, 1, &block([("x-a", &*"a".repeat(16_000))]));
    let begin = frame(HEADERS, END_STREAM, 1, &block(request_head("GET", "/")));
    client.0.write_all(&begin).await.unwrap();
    let flooding = async { while client.0.write_all(&part).await.is_ok() {} };
    timeout(TEST_TIMEOUT, flooding).await.expect("the connection stayed open");
    assert!(upstream.requests().is_empty());
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
}

/// A ping is not the start of a request, which would have to be complete within the header timeout.
#[tokio::test]
async fn ping_does_not_shorten_the_idle_timeout() {
    let upstream = Upstream::start().await;
    let file = ConfigFile { gateway: "timeouts: { header: 100ms, idle: 1s }", ..ConfigFile::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    let mut client = Client::connect(gateway.address).await;
    let begin = Instant::now();
    client.0.write_all(&request(1, "/")).await.unwrap();
    client.next_of(HEADERS).await.unwrap();
    client.0.write_all(&frame(PING, 0, 0, &[7; 8])).await.unwrap();
    assert_eq!(client.next_of(PING).await.unwrap().payload, [7; 8]);
    // The idle timeout still closes the connection, with GOAWAY.
    client.next_of(GOAWAY).await.unwrap();
    assert!(begin.elapsed() > Duration::from_millis(900), "{:?}", begin.elapsed());
}
