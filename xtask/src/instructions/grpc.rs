//! Calls of the Envoy API as bytes: a client with a fixed request, so that only the server computes.

use std::io::{BufRead, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, bail, ensure};

/// Frame types of HTTP/2 (RFC 9113, section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;

const END_STREAM: u8 = 0x1;
const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;

/// Bytes that the server may send on the connection before it needs another window update: more than a run receives.
const WINDOW_BYTES: u32 = 1 << 30;

const METADATA: [(&str, &str); 6] = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
];

/// `RateLimitRequest { domain: "edge", descriptors: [{ entries: [{ key: "user", value: "alice" }] }] }`.
const MESSAGE: &[u8] = b"\x0a\x04edge\x12\x0f\x0a\x0d\x0a\x04user\x12\x05alice";

/// What a client sends first.
pub(super) fn preface() -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    push_frame(&mut bytes, SETTINGS, 0, 0, &[]);
    push_frame(&mut bytes, WINDOW_UPDATE, 0, 0, &WINDOW_BYTES.to_be_bytes());
    bytes
}

/// A call on a stream of its own.
pub(super) fn call(number: u64) -> Result<Vec<u8>> {
    let stream = u32::try_from(2 * number + 1)?;
    let mut headers = Vec::new();
    for (name, value) in METADATA {
        // A literal field without indexing (RFC 7541, section 6.2.2). The lengths fit into seven bits.
        headers.push(0);
        for text in [name, value] {
            headers.push(u8::try_from(text.len())?);
            headers.extend(text.as_bytes());
        }
    }
    // Not compressed, then the length.
    let mut message = vec![0];
    message.extend(u32::try_from(MESSAGE.len())?.to_be_bytes());
    message.extend(MESSAGE);
    let mut bytes = Vec::new();
    push_frame(&mut bytes, HEADERS, END_HEADERS, stream, &headers);
    push_frame(&mut bytes, DATA, END_STREAM, stream, &message);
    Ok(bytes)
}

/// Reads frames up to the end of a stream, and returns the code in the response.
pub(super) fn read_code(frames: &mut impl BufRead, mut stream: &TcpStream) -> Result<String> {
    let mut code = String::new();
    loop {
        let mut head = [0; 9];
        frames.read_exact(&mut head).context("the server closed the connection")?;
        let [high, middle, low, kind, flags, ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
        frames.read_exact(&mut payload)?;
        match kind {
            // The first field of the response, after its prefix of five bytes.
            DATA => code = payload.get(6).map(u8::to_string).unwrap_or_default(),
            SETTINGS | PING if flags & ACK == 0 => {
                let mut answer = Vec::new();
                push_frame(&mut answer, kind, ACK, 0, if kind == PING { &payload } else { &[] });
                stream.write_all(&answer)?;
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

fn push_frame(bytes: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let [_, length @ ..] = (payload.len() as u32).to_be_bytes();
    bytes.extend(length);
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
}
