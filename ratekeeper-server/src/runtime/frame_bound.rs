//! A bound on the HTTP/2 frames that neither flow control nor the number of streams limits: PRIORITY, RST_STREAM,
//! SETTINGS, PING, GOAWAY, WINDOW_UPDATE and frames of unknown types. They cost the client nothing and the server most of
//! a core, so each connection has a bound per second.

use std::io;
use std::task::Poll;
use std::time::Duration;

/// Most control frames per [`INTERVAL`], beside those that requests and written data permit.
const FRAMES_MAX: u64 = 10_000;
const INTERVAL: Duration = Duration::from_secs(1);
/// Written bytes that permit one more frame: clients send WINDOW_UPDATE as they read, some for every few kilobytes.
const BYTES_PER_FRAME: u64 = 1 << 10;
/// Frames that a request permits: a client may send WINDOW_UPDATE for its stream and for the connection. RST_STREAM is not
/// permitted by requests or written data: a client that opens and resets streams would have no bound.
const FRAMES_PER_REQUEST: u64 = 2;

const PREFACE_BYTES: usize = 24;
const HEAD_BYTES: usize = 9;

const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
/// The largest type that the standard defines.
const CONTINUATION: u8 = 9;

/// Whether a frame is a control frame other than RST_STREAM.
fn is_control(kind: u8) -> bool {
    matches!(kind, PRIORITY | SETTINGS | PING | GOAWAY | WINDOW_UPDATE) || kind > CONTINUATION
}

/// Numbers of frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FrameCounts {
    /// Control frames other than RST_STREAM.
    control: u64,
    resets: u64,
    requests: u64,
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
    fn new() -> FrameScanner {
        FrameScanner { skip: PREFACE_BYTES, head: [0; HEAD_BYTES], filled: 0 }
    }

    /// Counts the frames whose headers end in `bytes`.
    fn scan(&mut self, mut bytes: &[u8]) -> FrameCounts {
        let mut counts = FrameCounts::default();
        loop {
            let skipped = self.skip.min(bytes.len());
            (self.skip, bytes) = (self.skip - skipped, &bytes[skipped..]);
            if bytes.is_empty() {
                return counts;
            }
            let taken = (HEAD_BYTES - self.filled).min(bytes.len());
            let (front, rest) = bytes.split_at(taken);
            self.head[self.filled..self.filled + taken].copy_from_slice(front);
            (self.filled, bytes) = (self.filled + taken, rest);
            if self.filled == HEAD_BYTES {
                let [first, second, third, kind, ..] = self.head;
                self.skip = u32::from_be_bytes([0, first, second, third]) as usize;
                self.filled = 0;
                counts.control += u64::from(is_control(kind));
                counts.resets += u64::from(kind == RST_STREAM);
                counts.requests += u64::from(kind == HEADERS);
            }
        }
    }
}

/// Counts the control frames of a connection against their bound.
#[derive(Debug)]
pub(crate) struct FrameBound {
    scanner: FrameScanner,
    /// Begin of the interval, and the frames and written bytes since then.
    begin: Duration,
    counts: FrameCounts,
    written: u64,
}

impl FrameBound {
    /// The bound of a connection that begins with the preface. `now` is the time by any clock that never goes back.
    pub(crate) fn new(now: Duration) -> FrameBound {
        let counts = FrameCounts::default();
        FrameBound { scanner: FrameScanner::new(), begin: now, counts, written: 0 }
    }

    /// Counts received bytes. Returns whether there are more control frames than the bound.
    pub(crate) fn is_flood(&mut self, bytes: &[u8], now: impl FnOnce() -> Duration) -> bool {
        let FrameCounts { control, resets, requests } = self.scanner.scan(bytes);
        self.counts.requests += requests;
        if control + resets == 0 {
            return false;
        }
        let now = now();
        if now.saturating_sub(self.begin) >= INTERVAL {
            (self.begin, self.counts, self.written) = (now, FrameCounts::default(), 0);
        }
        self.counts.control += control;
        self.counts.resets += resets;
        let permitted = FRAMES_PER_REQUEST * self.counts.requests + self.written / BYTES_PER_FRAME;
        self.counts.control.saturating_sub(permitted) + self.counts.resets > FRAMES_MAX
    }

    /// Counts the bytes of a write.
    pub(crate) fn count_written(&mut self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(bytes)) = written {
            self.written += *bytes as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: u8 = 0;

    fn frame(kind: u8, length: u8) -> Vec<u8> {
        let mut frame = vec![0, 0, length, kind, 0, 0, 0, 0, 1];
        frame.extend(vec![WINDOW_UPDATE; usize::from(length)]);
        frame
    }

    #[test]
    fn frames_are_counted_however_they_are_split() {
        let mut bytes = vec![b'P'; PREFACE_BYTES];
        let control = [PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, 10, 255];
        for kind in [DATA, HEADERS, CONTINUATION].into_iter().chain(control) {
            bytes.extend(frame(kind, 200 - kind.min(100)));
            bytes.extend(frame(kind, 0));
        }
        for size in [1, 2, 3, 7, 9, 10, 64, 1_000] {
            let (mut scanner, mut sum) = (FrameScanner::new(), FrameCounts::default());
            for part in bytes.chunks(size) {
                let counts = scanner.scan(part);
                sum.control += counts.control;
                sum.resets += counts.resets;
                sum.requests += counts.requests;
            }
            assert_eq!(sum, FrameCounts { control: 14, resets: 2, requests: 2 }, "in parts of {size}");
        }
    }

    #[test]
    fn resets_are_not_paid_for_by_the_requests_they_cancel() {
        let mut bound = FrameBound::new(Duration::ZERO);
        assert!(!bound.is_flood(&[b'P'; PREFACE_BYTES], || Duration::ZERO));
        let reset = [frame(HEADERS, 9), frame(RST_STREAM, 4)].concat();
        bound.count_written(&Poll::Ready(Ok((FRAMES_MAX * BYTES_PER_FRAME) as usize)));
        assert!(!bound.is_flood(&reset.repeat(FRAMES_MAX as usize), || Duration::ZERO));
        assert!(!bound.is_flood(&frame(WINDOW_UPDATE, 4).repeat(10), || Duration::ZERO), "by requests");
        assert!(bound.is_flood(&reset, || Duration::ZERO));
    }

    #[test]
    fn bound_holds_per_second_and_grows_with_requests_and_written_bytes() {
        let second = Duration::from_secs;
        let mut bound = FrameBound::new(second(1));
        let full = frame(PING, 8).repeat(FRAMES_MAX as usize);
        assert!(!bound.is_flood(&[b'P'; PREFACE_BYTES], || second(1)));
        assert!(!bound.is_flood(&full, || second(1)));
        bound.count_written(&Poll::Ready(Ok(BYTES_PER_FRAME as usize)));
        assert!(!bound.is_flood(&frame(PING, 8), || second(1)), "by written bytes");
        assert!(!bound.is_flood(&[frame(HEADERS, 9), frame(PING, 8).repeat(2)].concat(), || second(1)));
        assert!(!bound.is_flood(&frame(DATA, 0).repeat(99), || second(1)), "not a control frame");
        assert!(bound.is_flood(&frame(PING, 8), || second(1)));
        assert!(!bound.is_flood(&full, || second(2)), "in the next second");
        assert!(bound.is_flood(&frame(SETTINGS, 0), || second(2)));
    }
}
