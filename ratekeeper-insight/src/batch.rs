//! Batches of requests read ahead of their decisions.

use std::hash::BuildHasher;

use foldhash::SharedSeed;
use foldhash::quality::SeedableRandomState;
use ratekeeper::Time;

use crate::Request;

/// Consecutive requests of a trace, in trace order.
///
/// The states of their keys are scattered in memory. With the next requests known, all of them are prefetched before
/// the first is used; waiting for each cache miss in turn would dominate a long replay.
#[derive(Debug, Default)]
pub struct Batch {
    /// The time and key of every request as written in the trace, concatenated: time, key, time, key...
    text: String,
    lines: Vec<Line>,
    /// True if the next request has not arrived yet.
    pub(crate) is_all_for_now: bool,
}

/// A request; its text is in [`Batch`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    pub(crate) key: KeyHash,
    pub(crate) time: Time,
    pub(crate) cost: u32,
    /// The end of the time's text and the start of the key's.
    time_end: usize,
    key_end: usize,
}

/// A key as a 64-bit seeded hash, computed once. The limiter identifies keys in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeyHash(pub(crate) u64);

impl KeyHash {
    /// Hashes a key. The seed is random and constant for the life of the process.
    #[inline]
    pub(crate) fn of(key: &str) -> KeyHash {
        KeyHash(SeedableRandomState::with_seed(0, SharedSeed::global_random()).hash_one(key))
    }
}

/// Enough requests to keep memory busy, few enough that the first is still cached when the last has been fetched.
const LINES_MAX: usize = 64;
/// Bytes of text that also fill a batch, because keys may be long.
const TEXT_BYTES_MAX: usize = 64 << 10;

impl Batch {
    /// Returns the requests in trace order.
    #[inline]
    pub fn requests(&self) -> impl ExactSizeIterator<Item = Request<'_>> {
        let mut start = 0;
        self.lines.iter().map(move |line| {
            let time_text = &self.text[start..line.time_end];
            start = line.key_end;
            Request { time: line.time, time_text, key: self.key(line), cost: line.cost }
        })
    }

    /// Returns true if the next request has not arrived yet, so that buffered output should be flushed now.
    pub fn is_all_for_now(&self) -> bool {
        self.is_all_for_now
    }

    /// Returns true if the batch has no requests.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    #[inline]
    pub(crate) fn lines(&self) -> &[Line] {
        &self.lines
    }

    #[inline]
    pub(crate) fn key(&self, line: &Line) -> &str {
        &self.text[line.time_end..line.key_end]
    }

    pub(crate) fn is_full(&self) -> bool {
        self.lines.len() >= LINES_MAX || self.text.len() >= TEXT_BYTES_MAX
    }

    pub(crate) fn clear(&mut self) {
        self.text.clear();
        self.lines.clear();
    }

    #[inline]
    pub(crate) fn push(&mut self, request: &Request<'_>) {
        let Request { time, time_text, key, cost } = *request;
        self.text.push_str(time_text);
        let time_end = self.text.len();
        self.text.push_str(key);
        self.lines.push(Line { key: KeyHash::of(key), time, cost, time_end, key_end: self.text.len() });
    }
}
