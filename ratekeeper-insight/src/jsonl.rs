//! Decisions as JSON, one per line, reproducible byte for byte.

use std::io::{self, Write};

use ratekeeper::Decision;
use ratekeeper_config::{push_retry_after, push_seconds};

use crate::Request;

/// Writes decisions as JSON lines.
#[derive(Debug)]
pub struct Jsonl<W: Write> {
    output: W,
    block: Vec<u8>,
}

/// Bytes per write, large enough that system calls cost little.
const BLOCK_BYTES: usize = 1 << 18;

impl<W: Write> Jsonl<W> {
    /// Creates a writer to `output` that writes in blocks of 256 KiB.
    pub fn new(output: W) -> Jsonl<W> {
        Jsonl { output, block: Vec::with_capacity(BLOCK_BYTES + 1024) }
    }

    /// Writes one decision.
    ///
    /// # Errors
    /// Returns an error if the output fails.
    #[inline]
    pub fn write(&mut self, request: &Request<'_>, decision: &Decision) -> io::Result<()> {
        line(&mut self.block, request, decision);
        if self.block.len() >= BLOCK_BYTES {
            self.output.write_all(&self.block)?;
            self.block.clear();
        }
        Ok(())
    }

    /// Writes the buffered lines and flushes the output.
    ///
    /// # Errors
    /// Returns an error if the output fails.
    pub fn flush(&mut self) -> io::Result<()> {
        self.output.write_all(&self.block)?;
        self.block.clear();
        self.output.flush()
    }

    /// Writes the remaining lines.
    ///
    /// # Errors
    /// Returns an error if the output fails.
    pub fn finish(mut self) -> io::Result<()> {
        self.flush()
    }
}

/// Appends one decision as a JSON line.
#[inline]
pub fn line(out: &mut Vec<u8>, request: &Request<'_>, decision: &Decision) {
    out.extend_from_slice(b"{\"time\":\"");
    // The text of a valid time contains no character that JSON escapes.
    out.extend_from_slice(request.time_text.as_bytes());
    out.extend_from_slice(b"\",\"key\":\"");
    escaped(out, request.key);
    out.extend_from_slice(b"\",\"cost\":");
    whole(out, u64::from(request.cost));
    out.extend_from_slice(if decision.allowed {
        b",\"allowed\":true,\"limit\":"
    } else {
        b",\"allowed\":false,\"limit\":"
    });
    whole(out, u64::from(decision.limit));
    out.extend_from_slice(b",\"remaining\":");
    whole(out, u64::from(decision.remaining));
    out.extend_from_slice(b",\"retry_after\":");
    push_retry_after(out, decision.retry_after);
    out.extend_from_slice(b",\"reset_after\":");
    push_seconds(out, decision.reset_after);
    out.extend_from_slice(b",\"delay\":");
    push_seconds(out, decision.delay);
    out.extend_from_slice(b"}\n");
}

#[inline]
fn whole(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

/// Appends the content of a JSON string with only the mandatory escapes.
#[inline]
fn escaped(out: &mut Vec<u8>, text: &str) {
    if text.bytes().all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\') {
        out.extend_from_slice(text.as_bytes());
    } else {
        escaped_slowly(out, text);
    }
}

#[cold]
fn escaped_slowly(out: &mut Vec<u8>, text: &str) {
    for byte in text.bytes() {
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            0x08 => out.extend_from_slice(b"\\b"),
            0x0c => out.extend_from_slice(b"\\f"),
            0..b' ' => out.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            _ => out.push(byte),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratekeeper::{RetryAfter, Time};

    use super::*;

    fn check(request: Request<'_>, decision: Decision, expected: &str) {
        let mut out = Vec::new();
        line(&mut out, &request, &decision);
        assert_eq!(String::from_utf8(out).unwrap(), format!("{expected}\n"));
    }

    const REQUEST: Request<'_> = Request { time: Time::EPOCH, time_text: "1700000000.5", key: "a", cost: 1 };
    const ALLOWED: Decision = Decision {
        allowed: true,
        limit: 10,
        remaining: 9,
        retry_after: RetryAfter::Now,
        reset_after: Duration::from_secs(1),
        delay: Duration::ZERO,
    };

    #[test]
    fn line_has_the_documented_fields() {
        check(
            REQUEST,
            ALLOWED,
            r#"{"time":"1700000000.5","key":"a","cost":1,"allowed":true,"limit":10,"remaining":9,"retry_after":null,"reset_after":1.0,"delay":0}"#,
        );
        check(
            Request { key: "quote \" back \\ line \n tab \t nul \0 é 日", cost: 0, ..REQUEST },
            Decision {
                allowed: false,
                retry_after: RetryAfter::Never,
                reset_after: Duration::ZERO,
                delay: Duration::from_nanos(1),
                ..ALLOWED
            },
            r#"{"time":"1700000000.5","key":"quote \" back \\ line \n tab \t nul \u0000 é 日","cost":0,"allowed":false,"limit":10,"remaining":9,"retry_after":"never","reset_after":0,"delay":0.000001}"#,
        );
    }
}
