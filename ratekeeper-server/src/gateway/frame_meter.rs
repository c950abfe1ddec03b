//! HTTP/2 frames that a client can send without end, because nothing answers them: PRIORITY, RST_STREAM, GOAWAY,
//! WINDOW_UPDATE, acknowledgements and frames of unknown types. They cost the client nothing and the gateway most of a
//! core, so each connection has a bound per second.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::client_timeouts::ConnectionActivity;
use super::timer::Ticks;

/// Most unanswered frames per [`INTERVAL`], beside those that written data permits.
const FRAMES_MAX: u64 = 10_000;
const INTERVAL: Duration = Duration::from_secs(1);
/// Written bytes that permit one more frame: clients send WINDOW_UPDATE as they read, some for every few kilobytes.
const BYTES_PER_FRAME: u64 = 1 << 10;

const PREFACE_BYTES: usize = 24;
const HEAD_BYTES: usize = 9;

const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
/// The largest type that the standard defines.
const CONTINUATION: u8 = 9;
const ACK: u8 = 1;

fn is_unanswered(kind: u8, flags: u8) -> bool {
    match kind {
        PRIORITY | RST_STREAM | GOAWAY | WINDOW_UPDATE => true,
        SETTINGS | PING => flags & ACK != 0,
        _ => kind > CONTINUATION,
    }
}

/// Finds the frames in a stream of bytes.
#[derive(Debug)]
struct FrameScanner {
    /// Bytes until the next frame header.
    skip: usize,
    /// The part of a frame header that has arrived.
    head: [u8; HEAD_BYTES],
    filled: usize,
}

impl FrameScanner {
    /// Returns the number of unanswered frames whose headers end in `bytes`.
    fn scan(&mut self, mut bytes: &[u8]) -> u64 {
        let mut count = 0;
        loop {
            let skipped = self.skip.min(bytes.len());
            (self.skip, bytes) = (self.skip - skipped, &bytes[skipped..]);
            if bytes.is_empty() {
                return count;
            }
            let taken = (HEAD_BYTES - self.filled).min(bytes.len());
            let (front, rest) = bytes.split_at(taken);
            self.head[self.filled..self.filled + taken].copy_from_slice(front);
            (self.filled, bytes) = (self.filled + taken, rest);
            if self.filled == HEAD_BYTES {
                let [first, second, third, kind, flags, ..] = self.head;
                self.skip = u32::from_be_bytes([0, first, second, third]) as usize;
                self.filled = 0;
                count += u64::from(is_unanswered(kind, flags));
            }
        }
    }
}

/// A client's HTTP/2 connection. Above the bound, it reads nothing more and marks its activity as a flood.
#[derive(Debug)]
pub(crate) struct FrameMeter<I> {
    io: I,
    scanner: FrameScanner,
    activity: Arc<ConnectionActivity>,
    /// Begin of the interval, and the frames and written bytes since then.
    begin: Ticks,
    frames: u64,
    written: u64,
}

impl<I> FrameMeter<I> {
    /// `read_ahead` holds the bytes that were read before.
    pub(crate) fn new(io: I, read_ahead: &[u8], activity: Arc<ConnectionActivity>) -> FrameMeter<I> {
        let scanner = FrameScanner { skip: PREFACE_BYTES, head: [0; HEAD_BYTES], filled: 0 };
        let begin = activity.now();
        let mut meter = FrameMeter { io, scanner, activity, begin, frames: 0, written: 0 };
        meter.frames = meter.scanner.scan(read_ahead);
        meter
    }

    fn is_flood(&mut self, bytes: &[u8]) -> bool {
        let frames = self.scanner.scan(bytes);
        if frames == 0 {
            return false;
        }
        let now = self.activity.now();
        if now.since(self.begin) >= INTERVAL {
            (self.begin, self.frames, self.written) = (now, 0, 0);
        }
        self.frames += frames;
        self.frames > FRAMES_MAX + self.written / BYTES_PER_FRAME
    }

    fn count_written(&mut self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(bytes)) = written {
            self.written += *bytes as u64;
        }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for FrameMeter<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let meter = self.get_mut();
        if meter.activity.is_flood() {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut meter.io).poll_read(context, buffer);
        if meter.is_flood(&buffer.filled()[before..]) {
            meter.activity.set_flood();
            context.waker().wake_by_ref();
        }
        read
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for FrameMeter<I> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let meter = self.get_mut();
        let written = Pin::new(&mut meter.io).poll_write(context, bytes);
        meter.count_written(&written);
        written
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let meter = self.get_mut();
        let written = Pin::new(&mut meter.io).poll_write_vectored(context, slices);
        meter.count_written(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, length: u8) -> Vec<u8> {
        let mut frame = vec![0, 0, length, kind, flags, 0, 0, 0, 1];
        frame.extend(vec![WINDOW_UPDATE; usize::from(length)]);
        frame
    }

    #[test]
    fn frames_are_counted_however_they_are_split() {
        let mut bytes = vec![b'P'; PREFACE_BYTES];
        let frames =
            [(0, 0, 200), (1, 5, 20), (PRIORITY, 0, 5), (3, 0, 4), (SETTINGS, 0, 0), (SETTINGS, ACK, 0)];
        let more = [
            (PING, 0, 8),
            (PING, ACK, 8),
            (7, 0, 8),
            (WINDOW_UPDATE, 0, 4),
            (9, 4, 9),
            (10, 0, 0),
            (255, 255, 7),
        ];
        for (kind, flags, length) in frames.into_iter().chain(more) {
            bytes.extend(frame(kind, flags, length));
        }
        for size in [1, 2, 3, 7, 9, 10, 64, 1_000] {
            let mut scanner = FrameScanner { skip: PREFACE_BYTES, head: [0; HEAD_BYTES], filled: 0 };
            let count: u64 = bytes.chunks(size).map(|part| scanner.scan(part)).sum();
            assert_eq!(count, 8, "in parts of {size}");
        }
    }
}
