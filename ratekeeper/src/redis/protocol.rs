//! Packs arguments for `library.lua` and parses its replies.
//!
//! The library returns the state before the charge, and the core's algorithms compute the decision from it, so every
//! store reports decisions with the same arithmetic.

use ratekeeper_core::{
    Algorithm, Bucket, CountRing, Counter, CounterState, Decision, EdgePolicy, FixedWindow, FixedWindowState,
    Gcra, GcraState, LeakyMode, Limit, Log, LogPolicy, SteppedBucket, SteppedBucketState, Time, WindowAlign,
};

use std::time::Duration;

const SECOND: u64 = 1_000_000_000;
const DAY_NS: u64 = 86_400 * SECOND;
/// Ticks in a microsecond, where a tick is a nanosecond.
const MICRO: u128 = 1_000;

const MORE: u8 = 1;
const PEEK: u8 = 2;
const REFUND: u8 = 4;

const ALLOWED: u8 = 1;
const DECIDED: u8 = 2;
const STATE: u8 = 4;
const GARBLED: u8 = 64;
const NUMBER: u8 = 8;

/// A fixed window as one number: the second at which it began times this, and its count.
const COUNTS: u64 = 1 << 21;

/// A charge as the library takes it, without the cost: the same for all requests of a limit.
#[derive(Clone, Debug)]
pub(crate) struct PackedLimit {
    limit: Limit,
    /// The limit that decisions report; a leased limit is enforced by a smaller one.
    reported_limit: u32,
    kind: u8,
    /// The parameters of the kind. For a bucket, `charge` appends the cost as a time.
    own: Vec<u8>,
    /// The parameters as those of a key with one state, whatever they are.
    gcra: Option<Gcra>,
}

impl PackedLimit {
    pub(crate) fn new(limit: &Limit, reported_limit: u32) -> PackedLimit {
        let mut own = Vec::new();
        let kind = match limit {
            Limit::Bucket(it) if is_whole_micros(it) => {
                push_f64(&mut own, micros(it, it.capacity()));
                6
            }
            Limit::Bucket(it) => {
                push_span(&mut own, ticks(it, it.capacity()), it.ticks_per_ns());
                1
            }
            Limit::SteppedBucket(it) => {
                push_f64(&mut own, it.rate().count());
                push_instant(&mut own, nanos(it.rate().period()));
                2
            }
            Limit::FixedWindow(it) => {
                push_instant(&mut own, nanos(it.window()));
                own.push(u8::from(it.align() == WindowAlign::FirstRequest));
                3
            }
            Limit::Counter(it) => {
                push_instant(&mut own, nanos(it.window()));
                own.extend(it.buckets().to_le_bytes());
                own.push(match it.edge() {
                    EdgePolicy::Weigh => 0,
                    EdgePolicy::Drop => 1,
                    EdgePolicy::Keep => 2,
                });
                4
            }
            Limit::Log(it) => {
                push_instant(&mut own, nanos(it.window()));
                own.push(u8::from(it.count() == LogPolicy::All));
                5
            }
        };
        PackedLimit { limit: limit.clone(), reported_limit, kind, own, gcra: None }
    }

    /// Parameters that may differ from request to request.
    pub(crate) fn gcra(gcra: &Gcra) -> PackedLimit {
        let (bucket, limit) = (gcra.bucket(), gcra.to_limit());
        let mut own = Vec::new();
        push_span(&mut own, ticks(bucket, bucket.capacity()), bucket.ticks_per_ns());
        PackedLimit { reported_limit: bucket.capacity(), kind: 7, own, limit, gcra: Some(gcra.clone()) }
    }

    /// The packed charge of a request. `more`: the next charge belongs to the same request.
    pub(crate) fn charge(&self, cost: u32, is_peek: bool, more: bool) -> Vec<u8> {
        let mut text = Vec::with_capacity(10 + self.own.len() + 32);
        self.push_charge(&mut text, cost, is_peek, more);
        text
    }

    /// Appends what [`charge`](Self::charge) returns.
    pub(crate) fn push_charge(&self, text: &mut Vec<u8>, cost: u32, is_peek: bool, more: bool) {
        text.push(self.kind);
        text.push(u8::from(more) * MORE + u8::from(is_peek) * PEEK);
        text.extend(cost.to_le_bytes());
        text.extend(self.limit.limit().to_le_bytes());
        text.extend(&self.own);
        if let Limit::Bucket(it) = &self.limit {
            let cost = cost.min(it.capacity());
            if is_whole_micros(it) && self.gcra.is_none() {
                push_f64(text, micros(it, cost));
            } else {
                push_span(text, ticks(it, cost), it.ticks_per_ns());
                push_f64(text, it.ticks_per_ns());
            }
        }
    }

    /// What a state depends on: the algorithm with its variant, and the window or rate. Limits that differ only in
    /// size can read each other's states and rely on each other's expiries.
    pub(crate) fn scale(&self) -> Vec<u8> {
        match &self.limit {
            Limit::Bucket(it) => {
                let mode = match it.mode() {
                    None => 0,
                    Some(LeakyMode::Police) => 1,
                    Some(LeakyMode::Shape) => 2,
                };
                let (per_ns, per_unit) = (it.ticks_per_ns().to_le_bytes(), it.ticks_per_unit().to_le_bytes());
                [&[1, mode], per_ns.as_slice(), &per_unit].concat()
            }
            _ => [&[self.kind], self.own.as_slice()].concat(),
        }
    }

    /// What the states of a limit of this name depend on: as [`scale`](Self::scale), but without the length of windows
    /// that begin with the first request, because the length of a ban may change while it lasts. Limits without a
    /// name are distinguished by their scales, so theirs have the length.
    pub(crate) fn scale_of(&self, name: Option<&str>) -> Vec<u8> {
        match &self.limit {
            Limit::FixedWindow(it) if name.is_some() && it.align() == WindowAlign::FirstRequest => {
                vec![self.kind, 1]
            }
            _ => self.scale(),
        }
    }

    /// The work of a charge in Redis, as a multiple of the cheapest kind's.
    pub(crate) fn weight(&self) -> usize {
        match &self.limit {
            Limit::Bucket(_) | Limit::SteppedBucket(_) | Limit::FixedWindow(_) => 1,
            // All counts are read and sent.
            Limit::Counter(it) => 1 + it.buckets() as usize / 64,
            // The oldest entry that counts may have to be searched.
            Limit::Log(_) => 4,
        }
    }

    /// Whether denied requests count too.
    pub(crate) fn counts_all(&self) -> bool {
        matches!(&self.limit, Limit::Log(log) if log.count() == LogPolicy::All)
    }

    /// Packs the refund of a charge made at `at`, the time of its reply, or at an unknown time. Each refund is a
    /// separate request.
    pub(crate) fn refund(&self, cost: u32, at: Option<Time>) -> Vec<u8> {
        let mut text = self.charge(cost, false, false);
        text[1] = REFUND;
        match at {
            Some(at) => push_instant(&mut text, at.as_nanos()),
            // An instant before the epoch means that the time is unknown.
            None => {
                text.extend((-1.0_f64).to_le_bytes());
                text.extend([0; 4]);
            }
        }
        text
    }

    /// Reads the result of a [`refund`](Self::refund) from the front of `reply`.
    pub(crate) fn refunded(reply: &mut &[u8]) -> Option<()> {
        (take::<1>(reply)? == [DECIDED]).then_some(())
    }

    /// Reads the decision on a charge from the front of `reply`. Returns None if the key holds a foreign value and
    /// could not be decided, or if the reply cannot be parsed; then the rest cannot be parsed either, and `reply` is
    /// left empty.
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
            Limit::Bucket(_) if self.gcra.is_some() => {
                self.gcra_decision(reply, has_state, now, cost, is_decided)?
            }
            Limit::Bucket(it) => {
                let state = match number {
                    Some(micros) => u128::from(micros) * MICRO,
                    None if has_state => take_span(reply)?.ticks(it.ticks_per_ns())?,
                    None => it.fresh(),
                };
                decide(it, state, now, cost, is_decided)
            }
            Limit::SteppedBucket(it) => {
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
        // The library and the core apply the same rules; if they ever differ, the library's charge is authoritative.
        Some(Decision { allowed, limit: self.reported_limit, ..decision })
    }
}

impl PackedLimit {
    /// The decision of parameters that may differ from request to request.
    fn gcra_decision(
        &self,
        reply: &mut &[u8],
        has_state: bool,
        now: Time,
        cost: u32,
        is_decided: bool,
    ) -> Option<Decision> {
        let gcra = self.gcra.as_ref()?;
        let state = if has_state { gcra_state(reply)? } else { gcra.fresh() };
        Some(decide(gcra, state, now, cost, is_decided))
    }
}

fn decide<A: Algorithm>(
    algorithm: &A,
    mut state: A::State,
    now: Time,
    cost: u32,
    is_decided: bool,
) -> Decision {
    if is_decided { algorithm.decide(&mut state, now, cost) } else { algorithm.peek(&state, now, cost) }
}

fn gcra_state(reply: &mut &[u8]) -> Option<GcraState> {
    let span = take_span(reply)?;
    let (ticks_per_ns, fill_secs) = (take_u64(reply)?, take_u64(reply)?);
    let fill_secs = u32::try_from(fill_secs).ok()?;
    Some(GcraState { full_at: span.ticks(ticks_per_ns)?, ticks_per_ns, fill_secs })
}

// A state written under a higher limit may exceed this limit; it then counts as full.

fn steps_state(reply: &mut &[u8], it: &SteppedBucket) -> Option<SteppedBucketState> {
    Some(SteppedBucketState { period_start: take_seconds(reply)?, used: take_u32(reply)?.min(it.capacity()) })
}

fn window_state(start: u64, count: u32, it: &FixedWindow) -> FixedWindowState {
    let window = match it.align() {
        WindowAlign::Clock => start / nanos(it.window()),
        WindowAlign::FirstRequest => start,
    };
    FixedWindowState { window, count: count.min(it.limit()) }
}

fn counter_state(reply: &mut &[u8], it: &Counter) -> Option<CounterState<CountRing>> {
    let (window, bucket) = (take_u64(reply)?, take_u32(reply)?);
    let newest = window.checked_mul(u64::from(it.buckets()))?.checked_add(u64::from(bucket))?;
    let counts: Option<CountRing> = (0..=it.buckets()).map(|_| take_u32(reply)).collect();
    Some(CounterState { newest, counts: counts? })
}

/// `number`: the units in the log, if the request was allowed and is the newest entry.
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
    Some(it.decision(units, newest_ns, now, cost, allowed, wait))
}

/// Appends an instant or a duration, given in nanoseconds.
pub(crate) fn push_instant(text: &mut Vec<u8>, nanos: u64) {
    push_f64(text, nanos / SECOND);
    // Below 10^9, so it fits.
    text.extend(((nanos % SECOND) as u32).to_le_bytes());
}

/// Reads the instant of the decisions from the front of a reply.
pub(crate) fn take_instant(reply: &mut &[u8]) -> Option<u64> {
    match f64::from_le_bytes(take(reply)?) {
        -1.0 => take_seconds(reply),
        micros => whole(micros)?.checked_mul(1_000),
    }
}

/// Reads an instant in the format of states.
fn take_seconds(reply: &mut &[u8]) -> Option<u64> {
    let seconds = take_u64(reply)?;
    seconds.checked_mul(SECOND)?.checked_add(u64::from(take_u32(reply)?))
}

fn nanos(length: Duration) -> u64 {
    // Windows and periods are at most 366 days.
    u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)
}

/// Whether all times of the bucket are whole microseconds below 2^53, so that its state is one number to which Redis
/// can add. Until the year 2106 this holds if a unit takes whole microseconds and the bucket fills within 71 years.
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

/// Appends a number of a bucket's ticks as days, nanoseconds and ticks.
fn push_span(text: &mut Vec<u8>, ticks: u128, ticks_per_ns: u64) {
    let per_ns = u128::from(ticks_per_ns);
    let (nanos, rest) = (ticks / per_ns, ticks % per_ns);
    for part in [nanos / u128::from(DAY_NS), nanos % u128::from(DAY_NS), rest] {
        // Days of the slowest bucket are below 2^41, nanoseconds of a day below 2^47, ticks below 2^49.
        push_f64(text, part as u64);
    }
}

/// A number of ticks as days, nanoseconds and ticks.
struct Span([u64; 3]);

impl Span {
    fn ticks(&self, per_ns: u64) -> Option<u128> {
        let [days, nanos, rest] = self.0.map(u128::from);
        let nanos = (days * u128::from(DAY_NS)).checked_add(nanos)?;
        nanos.checked_mul(u128::from(per_ns))?.checked_add(rest)
    }
}

fn take_span(reply: &mut &[u8]) -> Option<Span> {
    Some(Span([take_u64(reply)?, take_u64(reply)?, take_u64(reply)?]))
}

/// Appends a whole number below 2^53 as a double, Lua's number type.
fn push_f64(text: &mut Vec<u8>, value: u64) {
    text.extend((value as f64).to_le_bytes());
}

fn take_u64(reply: &mut &[u8]) -> Option<u64> {
    whole(f64::from_le_bytes(take(reply)?))
}

/// None if the value cannot be a count: another program has written to the key.
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
