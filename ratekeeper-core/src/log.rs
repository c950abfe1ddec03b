use std::fmt;
use std::time::Duration;

use crate::{Algorithm, Decision, LogPolicy, RetryAfter, Time};

/// A log of every request in the last window.
///
/// A request takes eight bytes (sixteen if its cost is above 255). A decision touches only the ends of the log: each
/// entry is written once and dropped once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Log {
    limit: u32,
    window_ns: u64,
    count: LogPolicy,
    /// The highest limit since the process started: units beyond it need not be logged.
    kept_max: u32,
}

/// The state of one key of a log: one allocation, of which a decision touches the head and the ends of a ring.
#[derive(Clone, Default)]
pub struct LogState {
    /// Empty, or a head of [`HEAD`] words and a ring of words, oldest first. An entry is one word, the low 56 bits of
    /// its instant above its cost (1 to 255); if those cost bits are 0, it is two words, and the second is the cost.
    memory: Box<[u64]>,
}

// The head.
/// The instant of the newest entry. Every entry is less than a window older.
const NEWEST: usize = 0;
/// The total cost of all entries.
const UNITS: usize = 1;
/// Index of the oldest word in the ring.
const FIRST: usize = 2;
/// Number of words in the ring.
const WORDS: usize = 3;
const HEAD: usize = 4;
/// Initial size of head and ring: one cache line.
const MEMORY_MIN: usize = 8;
/// A log that must not grow keeps at most 60 words of separate entries (this minus the head).
const IN_PLACE_WORDS: usize = 64;

const COST_BITS: u32 = 8;
const COST_MASK: u64 = (1 << COST_BITS) - 1;
/// The bits of an instant that an entry keeps. Entries lie within one window (below 2^55 ns) of the newest.
const INSTANT_MASK: u64 = u64::MAX >> COST_BITS;

impl LogState {
    #[inline]
    fn head(&self, at: usize) -> u64 {
        self.memory.get(at).copied().unwrap_or(0)
    }

    #[inline]
    fn newest_ns(&self) -> u64 {
        self.head(NEWEST)
    }

    #[inline]
    fn units(&self) -> u64 {
        self.head(UNITS)
    }

    #[inline]
    fn words(&self) -> usize {
        self.head(WORDS) as usize
    }

    fn is_empty(&self) -> bool {
        self.words() == 0
    }

    /// Memory index of the ring word at `index`; the ring wraps around.
    #[inline]
    fn position(&self, index: usize) -> usize {
        let at = HEAD + self.head(FIRST) as usize + index;
        if at < self.memory.len() { at } else { at - (self.memory.len() - HEAD) }
    }

    #[inline]
    fn word(&self, index: usize) -> Option<u64> {
        if index < self.words() { self.memory.get(self.position(index)).copied() } else { None }
    }

    /// Ensures that an entry of any size fits.
    #[inline]
    fn reserve(&mut self) {
        if self.words() + 2 > self.memory.len().saturating_sub(HEAD) {
            self.grow();
        }
    }

    #[cold]
    fn grow(&mut self) {
        let mut memory = vec![0; (2 * self.memory.len()).max(MEMORY_MIN)].into_boxed_slice();
        for index in 0..self.words() {
            memory[HEAD + index] = self.memory[self.position(index)];
        }
        for at in [NEWEST, UNITS, WORDS] {
            memory[at] = self.head(at);
        }
        self.memory = memory;
    }

    #[inline]
    fn push_word(&mut self, word: u64) {
        let at = self.position(self.words());
        self.memory[at] = word;
        self.memory[WORDS] += 1;
    }

    #[inline]
    fn push(&mut self, instant_ns: u64, cost: u64) {
        self.reserve();
        self.push_in_place(instant_ns, cost);
    }

    #[inline]
    fn push_in_place(&mut self, instant_ns: u64, cost: u64) {
        let (word, more) = entry(instant_ns, cost);
        let words = 1 + usize::from(more.is_some());
        if self.words() + words > self.memory.len() - HEAD {
            self.make_room(words);
        }
        self.push_word(word);
        if let Some(more) = more {
            self.push_word(more);
        }
        self.memory[NEWEST] = instant_ns;
        self.memory[UNITS] += cost;
    }

    /// Frees space for an entry of `words` words without growing: merges the oldest entries into one, at the instant
    /// of the youngest of them.
    #[cold]
    fn make_room(&mut self, words: usize) {
        while self.memory.len() - HEAD - self.words() < words {
            let Some(((_, cost), first)) = self.entry_at(0) else { return };
            let Some(((at, more), second)) = self.entry_at(first) else { return };
            self.replace_oldest(first + second, at, cost + more);
        }
    }

    /// Replaces the oldest `words` words by one entry, written at their end. The entry never needs more words than
    /// these.
    fn replace_oldest(&mut self, words: usize, at: u64, cost: u64) {
        let (word, more) = entry(at, cost);
        let kept = 1 + usize::from(more.is_some());
        let position = self.position(words - kept);
        self.memory[position] = word;
        if let Some(more) = more {
            let position = self.position(words - 1);
            self.memory[position] = more;
        }
        self.memory[FIRST] = (position - HEAD) as u64;
        self.memory[WORDS] -= (words - kept) as u64;
    }

    /// Removes all entries; the memory stays allocated.
    fn clear(&mut self) {
        for word in self.memory.iter_mut().take(HEAD) {
            *word = 0;
        }
    }

    /// The instant of an entry, from its low bits: entries lie within a window of the newest.
    #[inline]
    fn instant_of(&self, word: u64) -> u64 {
        let newest_ns = self.newest_ns();
        let age = (newest_ns & INSTANT_MASK).wrapping_sub(word >> COST_BITS) & INSTANT_MASK;
        newest_ns - age
    }

    /// The entries, oldest first: instant and cost.
    fn entries(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut index = 0;
        std::iter::from_fn(move || {
            let (entry, words) = self.entry_at(index)?;
            index += words;
            Some(entry)
        })
    }

    /// The entry that begins at word `index`, as instant and cost, and its length in words.
    #[inline]
    fn entry_at(&self, index: usize) -> Option<((u64, u64), usize)> {
        let word = self.word(index)?;
        Some(match word & COST_MASK {
            0 => ((self.instant_of(word), self.word(index + 1)?), 2),
            cost => ((self.instant_of(word), cost), 1),
        })
    }

    #[inline]
    fn oldest(&self) -> Option<(u64, u64)> {
        Some(self.entry_at(0)?.0)
    }

    #[inline]
    fn pop_oldest(&mut self) {
        let Some(((_, cost), words)) = self.entry_at(0) else { return };
        self.memory[FIRST] = (self.position(words) - HEAD) as u64;
        self.memory[WORDS] -= words as u64;
        self.memory[UNITS] -= cost;
    }

    /// Subtracts `units` from entry `number`, which holds at least as many, and removes an entry that becomes empty.
    fn take_off(&mut self, number: usize, units: u64) {
        let entries: Vec<(u64, u64)> = self.entries().collect();
        self.clear();
        for (index, (at, cost)) in entries.into_iter().enumerate() {
            let cost = if index == number { cost - units } else { cost };
            if cost > 0 {
                // There are no more entries than before, so they fit.
                self.push_in_place(at, cost);
            }
        }
    }

    /// Subtracts `units` from the oldest entry, which holds more.
    fn cut_oldest(&mut self, units: u64) {
        let Some(((at, cost), words)) = self.entry_at(0) else { return };
        self.replace_oldest(words, at, cost - units);
        self.memory[UNITS] -= units;
    }
}

/// Logs with the same entries are equal, wherever the entries are in their rings.
impl PartialEq for LogState {
    fn eq(&self, other: &LogState) -> bool {
        self.entries().eq(other.entries())
    }
}

impl Eq for LogState {}

impl fmt::Debug for LogState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.entries()).finish()
    }
}

/// The stored form of an entry.
fn entry(instant_ns: u64, cost: u64) -> (u64, Option<u64>) {
    let instant = (instant_ns & INSTANT_MASK) << COST_BITS;
    if cost <= COST_MASK { (instant | cost, None) } else { (instant, Some(cost)) }
}

impl Log {
    pub(crate) fn new(limit: u32, window_ns: u64, count: LogPolicy) -> Log {
        Log { limit, window_ns, count, kept_max: limit }
    }

    /// See [`Limit::following`](crate::Limit::following).
    pub(crate) fn following(&self, from: &Log) -> Log {
        Log { kept_max: self.limit.max(from.kept_max), ..self.clone() }
    }

    /// See [`Limit::following_both`](crate::Limit::following_both).
    pub(crate) fn following_both(&self, from: &Log) -> Log {
        Log { kept_max: self.kept_max.max(from.kept_max), ..self.clone() }
    }

    /// Maximum units that any window allows.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// The window's length.
    pub fn window(&self) -> Duration {
        Duration::from_nanos(self.window_ns)
    }

    /// Which requests are logged.
    pub fn count(&self) -> LogPolicy {
        self.count
    }

    /// Whether the newest entry lies more than a window ahead, so that a wrong clock wrote the log.
    fn is_too_far_ahead(&self, state: &LogState, now: Time) -> bool {
        state.newest_ns() > now.as_nanos().saturating_add(self.window_ns)
    }

    /// The instant at which a request is logged: never before the newest entry, so the log stays ordered.
    fn instant(state: &LogState, now: Time) -> u64 {
        if state.is_empty() { now.as_nanos() } else { now.as_nanos().max(state.newest_ns()) }
    }

    /// The cost of the entries that are outside the window at `instant`.
    fn expired(&self, state: &LogState, instant: u64) -> u64 {
        // Usually none or all have expired.
        if state.newest_ns() + self.window_ns <= instant {
            return state.units();
        }
        state.entries().take_while(|(at, _)| at + self.window_ns <= instant).map(|(_, cost)| cost).sum()
    }

    /// Time from `now` until the oldest `units` of the entries have left the window.
    #[inline]
    fn until_gone(&self, state: &LogState, now: Time, units: u64) -> Duration {
        let mut gone = 0;
        for (at, cost) in state.entries() {
            gone += cost;
            if gone >= units {
                return Duration::from_nanos((at + self.window_ns).saturating_sub(now.as_nanos()));
            }
        }
        Duration::ZERO
    }

    /// The decision for a request while `live` of the state's units count against it.
    #[inline]
    fn answer(&self, state: &LogState, live: u64, now: Time, cost: u32, allowed: bool) -> Decision {
        let surplus = || state.units() + u64::from(cost) - u64::from(self.limit);
        self.decision(live, state.newest_ns(), now, cost, allowed, || self.until_gone(state, now, surplus()))
    }

    /// The decision for any representation of the log: `live` units are in the window, the newest since `newest_ns`.
    /// `wait` computes how long a denied request has to wait.
    #[inline]
    pub fn decision(
        &self,
        live: u64,
        newest_ns: u64,
        now: Time,
        cost: u32,
        allowed: bool,
        wait: impl FnOnce() -> Duration,
    ) -> Decision {
        Decision {
            allowed,
            limit: self.limit,
            remaining: u64::from(self.limit).saturating_sub(live) as u32,
            retry_after: RetryAfter::of(allowed, cost, self.limit, wait),
            reset_after: if live == 0 {
                Duration::ZERO
            } else {
                Duration::from_nanos((newest_ns + self.window_ns).saturating_sub(now.as_nanos()))
            },
            delay: Duration::ZERO,
        }
    }

    /// Drops the entries outside the window at `now`, and moves a log of a wrong clock to now.
    #[inline]
    fn settle(&self, state: &mut LogState, now: Time) {
        if self.is_too_far_ahead(state, now) {
            let units = state.units();
            state.clear();
            // A log that is not empty has memory for at least one entry.
            state.push_in_place(now.as_nanos(), units);
            return;
        }
        let instant = Log::instant(state, now);
        if state.newest_ns() + self.window_ns <= instant {
            state.clear();
            return;
        }
        while state.oldest().is_some_and(|(at, _)| at + self.window_ns <= instant) {
            state.pop_oldest();
        }
    }

    /// Drops the oldest units beyond `kept_max` + 1. With that many in the window every request is denied, and surplus
    /// units would leave the window first, so dropping them changes no decision.
    #[inline]
    fn forget_surplus(&self, state: &mut LogState) {
        let keep = u64::from(self.kept_max) + 1;
        while state.units() > keep {
            let surplus = state.units() - keep;
            match state.oldest() {
                Some((_, cost)) if cost > surplus => state.cut_oldest(surplus),
                Some(_) => state.pop_oldest(),
                None => return,
            }
        }
    }
}

impl Log {
    #[inline(always)]
    fn decide_by(
        &self,
        push: impl Fn(&mut LogState, u64, u64),
        state: &mut LogState,
        now: Time,
        cost: u32,
    ) -> Decision {
        if !state.is_empty() {
            self.settle(state, now);
        }
        let instant = Log::instant(state, now);
        let fits = state.units() + u64::from(cost) <= u64::from(self.limit);
        if cost > 0 && (fits || self.count == LogPolicy::All) {
            push(state, instant, u64::from(cost));
            if !fits {
                self.forget_surplus(state);
            }
        }
        self.answer(state, state.units(), now, cost, fits)
    }
}

impl Algorithm for Log {
    type State = LogState;

    fn fresh(&self) -> LogState {
        LogState::default()
    }

    fn is_fresh(&self, state: &LogState, now: Time) -> bool {
        state.is_empty() || state.newest_ns().saturating_add(self.window_ns) <= now.as_nanos()
    }

    #[inline]
    fn decide(&self, state: &mut LogState, now: Time, cost: u32) -> Decision {
        self.decide_by(LogState::push, state, now, cost)
    }

    fn decide_in_place(&self, state: &mut LogState, now: Time, cost: u32) -> Decision {
        self.decide_by(LogState::push_in_place, state, now, cost)
    }

    /// Subtracts the cost from an entry at that instant, the youngest if there are several, and removes an entry that
    /// becomes empty. If the clock had stepped back and is still behind, the charge was logged at the newest instant.
    /// A log that counts all requests refunds nothing.
    fn refund(&self, state: &mut LogState, now: Time, cost: u32, at: Option<Time>) {
        if self.count == LogPolicy::All || state.is_empty() || self.is_too_far_ahead(state, now) {
            return;
        }
        let mut left = u64::from(cost);
        match at {
            None => {
                self.settle(state, now);
                while let Some((_, cost)) = state.oldest().filter(|_| left > 0) {
                    match cost > left {
                        true => state.cut_oldest(left),
                        false => state.pop_oldest(),
                    }
                    left = left.saturating_sub(cost);
                }
            }
            Some(at) => {
                let is_behind = now.as_nanos() < state.newest_ns() && at <= now;
                let youngest_of = |instant: u64| {
                    let is_it = |(its_instant, cost): (u64, u64)| its_instant == instant && cost >= left;
                    state.entries().enumerate().filter(|(_, it)| is_it(*it)).last()
                };
                let found = youngest_of(at.as_nanos());
                let found = found.or_else(|| youngest_of(state.newest_ns()).filter(|_| is_behind));
                if let Some((number, _)) = found {
                    state.take_off(number, left);
                }
            }
        }
        if state.is_empty() {
            state.clear();
        }
    }

    fn fresh_in_place(&self) -> LogState {
        LogState { memory: vec![0; IN_PLACE_WORDS].into() }
    }

    fn window(&self) -> Duration {
        Log::window(self)
    }

    fn peek(&self, state: &LogState, now: Time, cost: u32) -> Decision {
        if self.is_too_far_ahead(state, now) {
            let mut moved = state.clone();
            self.settle(&mut moved, now);
            return self.peek(&moved, now, cost);
        }
        let live = state.units() - self.expired(state, Log::instant(state, now));
        let fits = live + u64::from(cost) <= u64::from(self.limit);
        self.answer(state, live, now, cost, fits)
    }

    fn counts_denied(&self) -> bool {
        self.count == LogPolicy::All
    }

    fn heap_bytes(&self, state: &LogState) -> usize {
        size_of_val(&*state.memory)
    }

    fn growth_bytes(&self, state: &LogState) -> usize {
        if state.words() + 2 > state.memory.len().saturating_sub(HEAD) {
            self.heap_bytes(state).max(MEMORY_MIN * size_of::<u64>())
        } else {
            0
        }
    }

    #[inline]
    fn touch(&self, state: &LogState) -> u64 {
        if state.memory.is_empty() {
            return 0;
        }
        let ends = [state.position(0), state.position(state.words())];
        ends.iter().fold(0, |all, &end| all ^ state.head(end))
    }
}
