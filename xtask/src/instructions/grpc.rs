//! Calls of the Envoy API as bytes: a client with a fixed request, so that only the server computes.

use std::io::{BufRead, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, bail, ensure};

use self::http2::kind::{DATA, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS, WINDOW_UPDATE};
use self::http2::{ACK, END_HEADERS, END_STREAM, HEAD_BYTES, Head, PREFACE, block, frame, request_head};

// Not as a dependency: that would double the build time of this program.
#[allow(dead_code, unreachable_pub, reason = "the tests use all of it, from another crate")]
#[path = "../../../testbed/src/http2.rs"]
mod http2;

/// Bytes that the server may send on the connection before it needs another window update: more than a run receives.
const WINDOW_BYTES: u32 = 1 << 30;

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const METADATA: [(&str, &str); 2] = [("content-type", "application/grpc"), ("te", "trailers")];

/// `RateLimitRequest { domain: "edge", descriptors: [{ entries: [{ key: "user", value: "alice" }] }] }`.
const MESSAGE: &[u8] = b"\x0a\x04edge\x12\x0f\x0a\x0d\x0a\x04user\x12\x05alice";

/// What a client sends first.
pub(super) fn preface() -> Vec<u8> {
    let window = frame(WINDOW_UPDATE, 0, 0, &WINDOW_BYTES.to_be_bytes());
    [PREFACE, &frame(SETTINGS, 0, 0, &[]), &window].concat()
}

/// A call on a stream of its own.
pub(super) fn call(number: u64) -> Result<Vec<u8>> {
    let stream = u32::try_from(2 * number + 1)?;
    let headers = block(request_head("POST", SHOULD_RATE_LIMIT).into_iter().chain(METADATA));
    // Not compressed, then the length.
    let length = u32::try_from(MESSAGE.len())?.to_be_bytes();
    let message = [&[0][..], &length, MESSAGE].concat();
    Ok([frame(HEADERS, END_HEADERS, stream, &headers), frame(DATA, END_STREAM, stream, &message)].concat())
}

/// Reads frames up to the end of a stream, and returns the code in the response.
pub(super) fn read_code(frames: &mut impl BufRead, mut stream: &TcpStream) -> Result<String> {
    let mut code = String::new();
    loop {
        let mut head = [0; HEAD_BYTES];
        frames.read_exact(&mut head).context("the server closed the connection")?;
        let Head { length, kind, flags, .. } = Head::of(head);
        let mut payload = vec![0; length];
        frames.read_exact(&mut payload)?;
        match kind {
            // The first field of the response, after its prefix of five bytes.
            DATA => code = payload.get(6).map(u8::to_string).unwrap_or_default(),
            SETTINGS | PING if flags & ACK == 0 => {
                stream.write_all(&frame(kind, ACK, 0, if kind == PING { &payload } else { &[] }))?;
            }
            RST_STREAM | GOAWAY => bail!("the server ended the call"),
            _ => {}
        }
        if matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0 {
            ensure!(!code.is_empty(), "the call failed");
            return Ok(code);
        }
    }
}
