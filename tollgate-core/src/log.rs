use std::collections::VecDeque;
use std::time::Duration;

use crate::{Algorithm, Count, Decision, RetryAfter, Time};

/// Every request of the last window, remembered.
///
/// Eight bytes a request (sixteen if its cost is above 255), and a decision touches only the ends of the log: each
/// entry is written once and dropped once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Log {
    limit: u32,
    window_ns: u64,
    count: Count,
}

/// What a log remembers of a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogState {
    /// The instant of the newest entry; no entry lies a window or more before it.
    newest_ns: u64,
    /// The cost of all entries.
    units: u64,
    /// Oldest first. An entry is one word, its instant's low 56 bits above its cost (1 to 255); or, if those cost
    /// bits are 0, two words, and the second is the cost.
    words: VecDeque<u64>,
}

const COST_BITS: u32 = 8;
const COST_MASK: u64 = (1 << COST_BITS) - 1;
/// The instant's bits that an entry keeps. Entries lie within one window (below 2^55 ns) of the newest.
const INSTANT_MASK: u64 = u64::MAX >> COST_BITS;

impl LogState {
    #[inline]
    fn push(&mut self, instant_ns: u64, cost: u64) {
        let (word, more) = entry(instant_ns, cost);
        self.words.push_back(word);
        self.words.extend(more);
        self.newest_ns = instant_ns;
        self.units += cost;
    }

    /// The instant of an entry, from its low bits: entries lie within a window of the newest.
    #[inline]
    fn instant_of(&self, word: u64) -> u64 {
        let age = (self.newest_ns & INSTANT_MASK).wrapping_sub(word >> COST_BITS) & INSTANT_MASK;
        self.newest_ns - age
    }

    /// The entries, oldest first: instant and cost.
    fn entries(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut words = self.words.iter();
        std::iter::from_fn(move || {
            let word = *words.next()?;
            let cost = match word & COST_MASK {
                0 => *words.next()?,
                cost => cost,
            };
            Some((self.instant_of(word), cost))
        })
    }

    #[inline]
    fn oldest(&self) -> Option<(u64, u64)> {
        let word = *self.words.front()?;
        let cost = match word & COST_MASK {
            0 => *self.words.get(1)?,
            cost => cost,
        };
        Some((self.instant_of(word), cost))
    }

    #[inline]
    fn pop_oldest(&mut self) {
        let Some((_, cost)) = self.oldest() else { return };
        if self.words.pop_front().is_some_and(|word| word & COST_MASK == 0) {
            self.words.pop_front();
        }
        self.units -= cost;
    }

    /// Takes `units` off the oldest entry, which holds more.
    fn cut_oldest(&mut self, units: u64) {
        let Some((at, cost)) = self.oldest() else { return };
        self.pop_oldest();
        let (word, more) = entry(at, cost - units);
        for word in more.into_iter().chain([word]) {
            self.words.push_front(word);
        }
        self.units += cost - units;
    }
}

/// An entry as it is stored.
fn entry(instant_ns: u64, cost: u64) -> (u64, Option<u64>) {
    let instant = (instant_ns & INSTANT_MASK) << COST_BITS;
    if cost <= COST_MASK { (instant | cost, None) } else { (instant, Some(cost)) }
}

impl Log {
    pub(crate) fn new(limit: u32, window_ns: u64, count: Count) -> Log {
        Log { limit, window_ns, count }
    }

    /// The most that any window admits.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// The window's length.
    pub fn window(&self) -> Duration {
        Duration::from_nanos(self.window_ns)
    }

    /// Which requests are logged.
    pub fn count(&self) -> Count {
        self.count
    }

    /// Whether the whole log lies more than a window ahead: it comes from a clock that was wrong.
    fn is_too_far_ahead(&self, state: &LogState, now: Time) -> bool {
        state.newest_ns > now.as_nanos().saturating_add(self.window_ns)
    }

    /// The instant at which a key that has seen `newest_ns` takes a request: its log never runs backwards.
    fn instant(state: &LogState, now: Time) -> u64 {
        if state.words.is_empty() { now.as_nanos() } else { now.as_nanos().max(state.newest_ns) }
    }

    /// The cost of the entries that are outside the window at `instant`.
    fn expired(&self, state: &LogState, instant: u64) -> u64 {
        // Mostly none or all.
        if state.newest_ns + self.window_ns <= instant {
            return state.units;
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

    /// The answer to a request while `live` of the state's units count against it.
    #[inline]
    fn answer(&self, state: &LogState, live: u64, now: Time, cost: u32, allowed: bool) -> Decision {
        let limit = u64::from(self.limit);
        Decision {
            allowed,
            limit: self.limit,
            remaining: limit.saturating_sub(live) as u32,
            retry_after: if allowed {
                RetryAfter::Now
            } else if cost > self.limit {
                RetryAfter::Never
            } else {
                RetryAfter::After(self.until_gone(state, now, state.units + u64::from(cost) - limit))
            },
            reset_after: if live == 0 {
                Duration::ZERO
            } else {
                Duration::from_nanos(state.newest_ns + self.window_ns - now.as_nanos())
            },
            delay: Duration::ZERO,
        }
    }

    /// Drops what is outside the window at `now`, and moves a log of a wrong clock to now.
    #[inline]
    fn settle(&self, state: &mut LogState, now: Time) {
        if self.is_too_far_ahead(state, now) {
            let units = std::mem::take(&mut state.units);
            state.words.clear();
            state.push(now.as_nanos(), units);
            return;
        }
        let instant = Log::instant(state, now);
        if state.newest_ns + self.window_ns <= instant {
            state.words.clear();
            (state.newest_ns, state.units) = (0, 0);
            return;
        }
        while state.oldest().is_some_and(|(at, _)| at + self.window_ns <= instant) {
            state.pop_oldest();
        }
    }

    /// Drops the oldest units beyond `limit` + 1: with that many in the window every request is denied, however
    /// many more there were, and they leave it first.
    #[inline]
    fn forget_surplus(&self, state: &mut LogState) {
        let keep = u64::from(self.limit) + 1;
        while state.units > keep {
            let surplus = state.units - keep;
            match state.oldest() {
                Some((_, cost)) if cost > surplus => state.cut_oldest(surplus),
                Some(_) => state.pop_oldest(),
                None => return,
            }
        }
    }
}

impl Algorithm for Log {
    type State = LogState;

    fn fresh(&self) -> LogState {
        LogState::default()
    }

    fn is_fresh(&self, state: &LogState, now: Time) -> bool {
        state.words.is_empty() || state.newest_ns.saturating_add(self.window_ns) <= now.as_nanos()
    }

    #[inline]
    fn decide(&self, state: &mut LogState, now: Time, cost: u32) -> Decision {
        if !state.words.is_empty() {
            self.settle(state, now);
        }
        let instant = Log::instant(state, now);
        let fits = state.units + u64::from(cost) <= u64::from(self.limit);
        if cost > 0 && (fits || self.count == Count::All) {
            state.push(instant, u64::from(cost));
            if !fits {
                self.forget_surplus(state);
            }
        }
        self.answer(state, state.units, now, cost, fits)
    }

    fn look(&self, state: &LogState, now: Time, cost: u32) -> Decision {
        if self.is_too_far_ahead(state, now) {
            let mut moved = state.clone();
            self.settle(&mut moved, now);
            return self.look(&moved, now, cost);
        }
        let live = state.units - self.expired(state, Log::instant(state, now));
        let fits = live + u64::from(cost) <= u64::from(self.limit);
        self.answer(state, live, now, cost, fits)
    }

    fn counts_denied(&self) -> bool {
        self.count == Count::All
    }

    fn heap_bytes(&self, state: &LogState) -> usize {
        state.words.capacity() * size_of::<u64>()
    }

    fn growth_bytes(&self, state: &LogState) -> usize {
        // An entry is two words at most; a log that is full doubles, and begins with four words.
        if state.words.len() + 2 > state.words.capacity() {
            self.heap_bytes(state).max(4 * size_of::<u64>())
        } else {
            0
        }
    }
}
