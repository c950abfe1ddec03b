//! Requests that were read ahead of their decisions.

use std::hash::BuildHasher;

use foldhash::SharedSeed;
use foldhash::quality::SeedableRandomState;
use tollgate::Time;

use crate::Request;

/// Some requests of a trace, in its order.
///
/// Their keys lie all over memory. Who knows the next few requests can have all of them on the way before the first
/// is needed; waiting for each in turn would be most of a long replay's time.
#[derive(Debug, Default)]
pub struct Batch {
    /// What was typed of all of them: time, key, time, key...
    text: String,
    lines: Vec<Line>,
    /// Whether the next request has yet to arrive.
    pub(crate) is_all_for_now: bool,
}

/// A request whose text is elsewhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    pub(crate) key: KeyHash,
    pub(crate) time: Time,
    pub(crate) cost: u32,
    /// Where the text of the time ends and that of the key begins.
    time_end: usize,
    key_end: usize,
}

/// A key as all here know it: like a limiter, by 64 bits of a seeded hash, which are worked out once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeyHash(pub(crate) u64);

impl KeyHash {
    /// The seed is random, and the same for the life of the process.
    #[inline]
    pub(crate) fn of(key: &str) -> KeyHash {
        KeyHash(SeedableRandomState::with_seed(0, SharedSeed::global_random()).hash_one(key))
    }
}

/// Enough that memory is kept busy, few enough that the first is still in the cache when the last has come.
const LINES_MAX: usize = 64;
/// So much text makes a batch, too: keys may be long.
const TEXT_BYTES_MAX: usize = 64 << 10;

impl Batch {
    /// The requests, in the order of the trace.
    #[inline]
    pub fn requests(&self) -> impl ExactSizeIterator<Item = Request<'_>> {
        let mut start = 0;
        self.lines.iter().map(move |line| {
            let time_text = &self.text[start..line.time_end];
            start = line.key_end;
            Request { time: line.time, time_text, key: self.key(line), cost: line.cost }
        })
    }

    /// Whether the next request has yet to arrive: a good moment to hand on what is known.
    pub fn is_all_for_now(&self) -> bool {
        self.is_all_for_now
    }

    /// Whether there are none.
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
