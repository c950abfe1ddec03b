//! What is said to the library in Redis, and what its answers mean: the two ends of `library.lua`.
//!
//! The library tells the state as it was, and the algorithms of the core say what that means for the request: there is
//! one arithmetic for what people are told, whatever the store.

use tollgate_core::{
    Algorithm, Align, Bucket, Count, Counter, CounterState, Decision, Edge, FixedWindow, FixedWindowState,
    Limit, Log, Mode, Steps, StepsState, Time,
};

use std::time::Duration;

const SECOND: u64 = 1_000_000_000;
const DAY_NS: u64 = 86_400 * SECOND;
/// Ticks in a microsecond, where a tick is a nanosecond.
const MICRO: u128 = 1_000;

const MORE: u8 = 1;
const LOOK: u8 = 2;
const GIVE_BACK: u8 = 4;

const ALLOWED: u8 = 1;
const DECIDED: u8 = 2;
const STATE: u8 = 4;
const GARBLED: u8 = 64;
const NUMBER: u8 = 8;

/// A fixed window as one number: the second at which it began times this, and its count.
const COUNTS: u64 = 1 << 21;

/// A charge as the library takes it, up to the cost: the same for every request.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    limit: Limit,
    /// What people are told of its size.
    told_limit: u32,
    kind: u8,
    /// What the kind needs, and where in it the cost goes once more, as a time.
    own: Vec<u8>,
}

impl Packed {
    pub(crate) fn new(limit: &Limit, told_limit: u32) -> Packed {
        let mut own = Vec::new();
        let kind = match limit {
            Limit::Bucket(it) if is_whole_micros(it) => {
                push_f64(&mut own, micros(it, it.capacity()));
                6
            }
            Limit::Bucket(it) => {
                push_span(&mut own, ticks(it, it.capacity()), it);
                1
            }
            Limit::Steps(it) => {
                push_f64(&mut own, it.rate().count());
                push_instant(&mut own, nanos(it.rate().period()));
                2
            }
            Limit::FixedWindow(it) => {
                push_instant(&mut own, nanos(it.window()));
                own.push(u8::from(it.align() == Align::FirstRequest));
                3
            }
            Limit::Counter(it) => {
                push_instant(&mut own, nanos(it.window()));
                own.extend(it.buckets().to_le_bytes());
                own.push(match it.edge() {
                    Edge::Weigh => 0,
                    Edge::Drop => 1,
                    Edge::Keep => 2,
                });
                4
            }
            Limit::Log(it) => {
                push_instant(&mut own, nanos(it.window()));
                own.push(u8::from(it.count() == Count::All));
                5
            }
        };
        Packed { limit: limit.clone(), told_limit, kind, own }
    }

    /// The charge of a request. `more` says that the next belongs to the same request.
    pub(crate) fn charge(&self, cost: u32, is_look: bool, more: bool) -> Vec<u8> {
        let mut text = Vec::with_capacity(10 + self.own.len() + 32);
        text.push(self.kind);
        text.push(u8::from(more) * MORE + u8::from(is_look) * LOOK);
        text.extend(cost.to_le_bytes());
        text.extend(self.limit.limit().to_le_bytes());
        text.extend(&self.own);
        if let Limit::Bucket(it) = &self.limit {
            let cost = cost.min(it.capacity());
            if is_whole_micros(it) {
                push_f64(&mut text, micros(it, cost));
            } else {
                push_span(&mut text, ticks(it, cost), it);
                push_f64(&mut text, it.ticks_per_ns());
            }
        }
        text
    }

    /// What a state means nothing without: the algorithm with its variant, and the window or rate. Limits that differ in
    /// nothing else than their size can read each other's states, and keep their expiries.
    pub(crate) fn scale(&self) -> Vec<u8> {
        match &self.limit {
            Limit::Bucket(it) => {
                let mode = match it.mode() {
                    None => 0,
                    Some(Mode::Police) => 1,
                    Some(Mode::Shape) => 2,
                };
                let (per_ns, per_unit) = (it.ticks_per_ns().to_le_bytes(), it.ticks_per_unit().to_le_bytes());
                [&[1, mode], per_ns.as_slice(), &per_unit].concat()
            }
            _ => [&[self.kind], self.own.as_slice()].concat(),
        }
    }

    /// Whether denied requests count, too.
    pub(crate) fn counts_all(&self) -> bool {
        matches!(&self.limit, Limit::Log(log) if log.count() == Count::All)
    }

    /// The undoing of a charge that was made at an instant, as its reply told it, or at one that is not known: a request of
    /// its own.
    pub(crate) fn give_back(&self, cost: u32, at: Option<Time>) -> Vec<u8> {
        let mut text = self.charge(cost, false, false);
        text[1] = GIVE_BACK;
        match at {
            Some(at) => push_instant(&mut text, at.as_nanos()),
            // No instant is before the epoch.
            None => {
                text.extend((-1.0_f64).to_le_bytes());
                text.extend([0; 4]);
            }
        }
        text
    }

    /// Takes the answer to a [`give_back`](Self::give_back) off the front of `reply`.
    pub(crate) fn given_back(reply: &mut &[u8]) -> Option<()> {
        (take::<1>(reply)? == [DECIDED]).then_some(())
    }

    /// Reads the answer to a charge from the front of `reply`, and takes it off. None if it could not be decided: the
    /// key is not what was written to it. If it cannot be read, neither can what follows it: nothing is left then.
    pub(crate) fn decision(&self, reply: &mut &[u8], now: Time, cost: u32) -> Option<Decision> {
        if let Some((&GARBLED, rest)) = reply.split_first() {
            *reply = rest;
            return None;
        }
        let decision = self.read_decision(reply, now, cost);
        if decision.is_none() {
            *reply = &[];
        }
        decision
    }

    fn read_decision(&self, reply: &mut &[u8], now: Time, cost: u32) -> Option<Decision> {
        let flags = take::<1>(reply)?[0];
        let (allowed, is_decided) = (flags & ALLOWED != 0, flags & DECIDED != 0);
        let has_state = flags & STATE != 0;
        let number = if flags & NUMBER != 0 { Some(take_u64(reply)?) } else { None };
        let decision = match &self.limit {
            Limit::Bucket(it) => {
                let state = match number {
                    Some(micros) => u128::from(micros) * MICRO,
                    None if has_state => take_span(reply, it)?,
                    None => it.fresh(),
                };
                decide(it, state, now, cost, is_decided)
            }
            Limit::Steps(it) => {
                let state = if has_state { steps_state(reply, it)? } else { it.fresh() };
                decide(it, state, now, cost, is_decided)
            }
            Limit::FixedWindow(it) => {
                let state = match number {
                    Some(number) => window_state(number / COUNTS * SECOND, (number % COUNTS) as u32, it),
                    None if has_state => window_state(take_seconds(reply)?, take_u32(reply)?, it),
                    None => it.fresh(),
                };
                decide(it, state, now, cost, is_decided)
            }
            Limit::Counter(it) => {
                let state = if has_state { counter_state(reply, it)? } else { it.fresh() };
                decide(it, state, now, cost, is_decided)
            }
            Limit::Log(it) => log_decision(reply, number, it, now, cost, allowed)?,
        };
        // The library and the core have the same rules; if they had not, what was charged counts.
        Some(Decision { allowed, limit: self.told_limit, ..decision })
    }
}

fn decide<A: Algorithm>(
    algorithm: &A,
    mut state: A::State,
    now: Time,
    cost: u32,
    is_decided: bool,
) -> Decision {
    if is_decided { algorithm.decide(&mut state, now, cost) } else { algorithm.look(&state, now, cost) }
}

// A state from when the limit was higher may hold more than the limit: it is full.

fn steps_state(reply: &mut &[u8], it: &Steps) -> Option<StepsState> {
    Some(StepsState { period_start: take_seconds(reply)?, used: take_u32(reply)?.min(it.capacity()) })
}

fn window_state(start: u64, count: u32, it: &FixedWindow) -> FixedWindowState {
    let window = match it.align() {
        Align::Clock => start / nanos(it.window()),
        Align::FirstRequest => start,
    };
    FixedWindowState { window, count: count.min(it.limit()) }
}

fn counter_state(reply: &mut &[u8], it: &Counter) -> Option<CounterState<Box<[u32]>>> {
    let (window, bucket) = (take_u64(reply)?, take_u32(reply)?);
    let newest = window.checked_mul(u64::from(it.buckets()))?.checked_add(u64::from(bucket))?;
    let counts: Option<Box<[u32]>> = (0..=it.buckets()).map(|_| take_u32(reply)).collect();
    Some(CounterState { newest, counts: counts? })
}

/// `number`: the units in the log, of a request that was admitted and is the newest.
fn log_decision(
    reply: &mut &[u8],
    number: Option<u64>,
    it: &Log,
    now: Time,
    cost: u32,
    allowed: bool,
) -> Option<Decision> {
    let (newest_ns, units, passes_ns) = match number {
        Some(units) => (now.as_nanos(), units, 0),
        None => (take_seconds(reply)?, take_u64(reply)?, take_seconds(reply)?),
    };
    let wait = || Duration::from_nanos(passes_ns.saturating_sub(now.as_nanos()));
    Some(it.tell(units, newest_ns, now, cost, allowed, wait))
}

/// An instant or a length of time in nanoseconds.
pub(crate) fn push_instant(text: &mut Vec<u8>, nanos: u64) {
    push_f64(text, nanos / SECOND);
    // Below 10^9, so it fits.
    text.extend(((nanos % SECOND) as u32).to_le_bytes());
}

/// Takes the instant of the decisions off the front of a reply.
pub(crate) fn take_instant(reply: &mut &[u8]) -> Option<u64> {
    match f64::from_le_bytes(take(reply)?) {
        -1.0 => take_seconds(reply),
        micros => whole(micros)?.checked_mul(1_000),
    }
}

/// An instant as states hold it.
fn take_seconds(reply: &mut &[u8]) -> Option<u64> {
    let seconds = take_u64(reply)?;
    seconds.checked_mul(SECOND)?.checked_add(u64::from(take_u32(reply)?))
}

fn nanos(length: Duration) -> u64 {
    // Windows and periods are at most 366 days.
    u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)
}

/// Whether every time of the bucket is a whole number of microseconds, and one below 2^53: then its state is one number
/// that Redis can add to. A unit is, and no bucket that fills within 71 years gets beyond, until the year 2106.
fn is_whole_micros(bucket: &Bucket) -> bool {
    bucket.ticks_per_ns() == 1
        && u128::from(bucket.ticks_per_unit()) % MICRO == 0
        && ticks(bucket, bucket.capacity()) / MICRO < 1 << 51
}

fn micros(bucket: &Bucket, units: u32) -> u64 {
    // Below 2^51.
    (ticks(bucket, units) / MICRO) as u64
}

fn ticks(bucket: &Bucket, units: u32) -> u128 {
    u128::from(units) * u128::from(bucket.ticks_per_unit())
}

/// A number of a bucket's ticks as days, nanoseconds and ticks.
fn push_span(text: &mut Vec<u8>, ticks: u128, bucket: &Bucket) {
    let per_ns = u128::from(bucket.ticks_per_ns());
    let (nanos, rest) = (ticks / per_ns, ticks % per_ns);
    for part in [nanos / u128::from(DAY_NS), nanos % u128::from(DAY_NS), rest] {
        // Days of the slowest bucket are below 2^41, nanoseconds of a day below 2^47, ticks below 2^49.
        push_f64(text, part as u64);
    }
}

fn take_span(reply: &mut &[u8], bucket: &Bucket) -> Option<u128> {
    let [days, nanos, rest] = [take_u64(reply)?, take_u64(reply)?, take_u64(reply)?].map(u128::from);
    let nanos = (days * u128::from(DAY_NS)).checked_add(nanos)?;
    nanos.checked_mul(u128::from(bucket.ticks_per_ns()))?.checked_add(rest)
}

/// A whole number below 2^53, as Lua counts.
fn push_f64(text: &mut Vec<u8>, value: u64) {
    text.extend((value as f64).to_le_bytes());
}

fn take_u64(reply: &mut &[u8]) -> Option<u64> {
    whole(f64::from_le_bytes(take(reply)?))
}

/// Nothing if it is not a number, or one that no count can be: somebody else has written to the key.
fn whole(value: f64) -> Option<u64> {
    (0.0..=9e18).contains(&value).then_some(value as u64)
}

fn take_u32(reply: &mut &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(take(reply)?))
}

fn take<const N: usize>(reply: &mut &[u8]) -> Option<[u8; N]> {
    let (front, rest) = reply.split_first_chunk()?;
    *reply = rest;
    Some(*front)
}
