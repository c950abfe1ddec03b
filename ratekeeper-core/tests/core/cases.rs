//! Random limits over the whole documented ranges, and random requests at critical points: at the same instant, one
//! nanosecond around the end of a wait, around a window's edge, with exactly the remaining units or one more.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ratekeeper_core::{
    Decision, EdgePolicy, LeakyMode, Limit, LogPolicy, Rate, RefillStyle, RetryAfter, Time, WindowAlign,
};

use crate::key::Key;
pub(crate) use testbed::property::check;

/// The five algorithms with their variants, each of which has its own arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    TokenBucket(RefillStyle),
    LeakyBucket(LeakyMode),
    FixedWindow(WindowAlign),
    SlidingWindowLog(LogPolicy),
    SlidingWindowCounter(EdgePolicy),
}

pub(crate) const VARIANTS: [Variant; 11] = [
    Variant::TokenBucket(RefillStyle::Smooth),
    Variant::TokenBucket(RefillStyle::Stepped),
    Variant::LeakyBucket(LeakyMode::Police),
    Variant::LeakyBucket(LeakyMode::Shape),
    Variant::FixedWindow(WindowAlign::Clock),
    Variant::FixedWindow(WindowAlign::FirstRequest),
    Variant::SlidingWindowLog(LogPolicy::Admitted),
    Variant::SlidingWindowLog(LogPolicy::All),
    Variant::SlidingWindowCounter(EdgePolicy::Weigh),
    Variant::SlidingWindowCounter(EdgePolicy::Drop),
    Variant::SlidingWindowCounter(EdgePolicy::Keep),
];

impl Variant {
    /// A limit of this variant with its size, its rate or window, and its number of buckets.
    pub(crate) fn limit(self, size: u32, rate: Rate, window: Duration, buckets: u32) -> Limit {
        match self {
            Variant::TokenBucket(style) => Limit::token_bucket(size, rate, style),
            Variant::LeakyBucket(mode) => Limit::leaky_bucket(size, rate, mode),
            Variant::FixedWindow(align) => Limit::fixed_window(size, window, align),
            Variant::SlidingWindowLog(count) => Limit::sliding_window_log(size, window, count),
            Variant::SlidingWindowCounter(edge) => Limit::sliding_window_counter(size, window, buckets, edge),
        }
        .expect("the parameters are within their ranges")
    }

    fn limits(self) -> impl Strategy<Value = Limit> {
        (sizes(), rates(), windows(), buckets())
            .prop_map(move |(size, rate, window, buckets)| self.limit(size, rate, window, buckets))
    }
}

const SECOND: u64 = 1_000_000_000;
const DAY: u64 = 86_400 * SECOND;
const LONGEST: u64 = 366 * DAY;
const SHORTEST: u64 = 1_000_000;

/// Every order of magnitude between `min` and `max` is equally likely.
fn log_uniform(min: u64, max: u64) -> impl Strategy<Value = u64> {
    (min.max(1).ilog2()..=max.ilog2(), any::<u64>())
        .prop_map(move |(bit, low)| ((1 << bit) | (low & ((1 << bit) - 1))).clamp(min, max))
}

fn sizes() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => 1..=12u32,
        4 => log_uniform(1, u32::MAX.into()).prop_map(|size| size as u32),
        1 => Just(u32::MAX),
    ]
}

fn windows() -> impl Strategy<Value = Duration> {
    let everyday = vec![SHORTEST, SECOND, 10 * SECOND, 60 * SECOND, 3_600 * SECOND, DAY, 7 * DAY, LONGEST];
    prop_oneof![1 => select(everyday), 1 => log_uniform(SHORTEST, LONGEST)].prop_map(Duration::from_nanos)
}

fn rates() -> impl Strategy<Value = Rate> {
    let everyday = vec![
        (1, SECOND),
        (3, SECOND),
        (1, 2 * SECOND),
        (4, 60 * SECOND),
        (7, 60 * SECOND),
        (999_983, DAY),
        (5, 7 * DAY),
        (1, LONGEST),
        (10_000_000, SECOND),
    ];
    let any =
        (log_uniform(SHORTEST, LONGEST), any::<u64>(), 0..64u32).prop_map(|(period, count, magnitude)| {
            let fastest = (u128::from(Rate::MAX_PER_SECOND) * u128::from(period) / u128::from(SECOND)) as u64;
            ((count >> magnitude).clamp(1, fastest), period)
        });
    prop_oneof![1 => select(everyday), 1 => any].prop_map(|(count, period)| {
        Rate::new(count, Duration::from_nanos(period)).expect("the rate is within its range")
    })
}

fn buckets() -> impl Strategy<Value = u32> {
    prop_oneof![16 => 1..=12u32, 1 => 1..=1024u32, 1 => Just(1024)]
}

/// How the instant of a request follows from the one before it and its decision.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Gap {
    Nanos(u64),
    /// Thousandths of a window.
    Windows(u64),
    /// Offset in nanoseconds from the end of the last wait: `retry_after`, or `reset_after` if there was none.
    Retry(i64),
    /// Offset in nanoseconds from the end of the last `reset_after`.
    Reset(i64),
    /// Offset in nanoseconds from the next edge of a window or bucket.
    Edge(i64),
    BackNanos(u64),
    /// Thousandths of a window.
    BackWindows(u64),
}

fn gaps() -> impl Strategy<Value = Gap> {
    prop_oneof![
        2 => Just(Gap::Nanos(0)),
        2 => log_uniform(1, 2 * LONGEST).prop_map(Gap::Nanos),
        5 => (0..2_500u64).prop_map(Gap::Windows),
        3 => (-1..=1i64).prop_map(Gap::Retry),
        2 => (-1..=1i64).prop_map(Gap::Reset),
        2 => (-1..=1i64).prop_map(Gap::Edge),
    ]
}

/// Mostly shorter than a window, so that a key stays at its limit.
fn short_gaps() -> impl Strategy<Value = Gap> {
    prop_oneof![
        3 => Just(Gap::Nanos(0)),
        1 => log_uniform(1, SECOND).prop_map(Gap::Nanos),
        4 => (0..300u64).prop_map(Gap::Windows),
        3 => Just(Gap::Retry(0)),
        2 => (-1..=1i64).prop_map(Gap::Edge),
    ]
}

fn gaps_either_way() -> impl Strategy<Value = Gap> {
    prop_oneof![
        3 => gaps(),
        1 => log_uniform(1, 1 << 62).prop_map(Gap::BackNanos),
        2 => (0..5_000u64).prop_map(Gap::BackWindows),
    ]
}

/// What a request costs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cost {
    Units(u32),
    /// Thousandths of the limit.
    Share(u64),
    /// This many units more than the limit.
    Limit(i64),
    /// This many units more than remain.
    Remaining(i64),
}

fn costs() -> impl Strategy<Value = Cost> {
    prop_oneof![
        4 => Just(Cost::Units(1)),
        1 => Just(Cost::Units(0)),
        2 => (2..=5u32).prop_map(Cost::Units),
        3 => (0..1_000u64).prop_map(Cost::Share),
        2 => (-1..=1i64).prop_map(Cost::Limit),
        4 => (-1..=1i64).prop_map(Cost::Remaining),
        1 => log_uniform(1, u32::MAX.into()).prop_map(|cost| Cost::Units(cost as u32)),
    ]
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) gap: Gap,
    pub(crate) cost: Cost,
}

fn instants() -> impl Strategy<Value = Time> {
    let last = Time::MAX.as_nanos();
    prop_oneof![
        6 => 1_700_000_000 * SECOND..1_800_000_000 * SECOND,
        2 => log_uniform(1, last),
        1 => Just(0),
        1 => log_uniform(1, last).prop_map(move |before| last - before),
    ]
    .prop_map(Time::from_nanos)
}

/// A limit, a first instant, and the requests to one key from there.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) limit: Limit,
    pub(crate) start: Time,
    pub(crate) requests: Vec<Request>,
}

/// Requests whose instants never run backwards.
pub(crate) fn cases(variant: Variant, requests_max: usize) -> impl Strategy<Value = Case> {
    cases_of(variant, gaps().boxed(), requests_max)
}

/// The same, as fast as the limit allows.
pub(crate) fn busy_cases(variant: Variant, requests_max: usize) -> impl Strategy<Value = Case> {
    cases_of(variant, short_gaps().boxed(), requests_max)
}

/// Requests whose instants may step back.
pub(crate) fn cases_either_way(variant: Variant, requests_max: usize) -> impl Strategy<Value = Case> {
    cases_of(variant, gaps_either_way().boxed(), requests_max)
}

fn cases_of(variant: Variant, gaps: BoxedStrategy<Gap>, requests_max: usize) -> impl Strategy<Value = Case> {
    let request = (gaps, costs()).prop_map(|(gap, cost)| Request { gap, cost });
    (variant.limits(), instants(), vec(request, 1..=requests_max)).prop_map(|(limit, start, requests)| Case {
        limit,
        start,
        requests,
    })
}

/// Turns requests into instants and costs, in order.
pub(crate) struct Walk {
    now: u64,
    last: Option<Decision>,
    limit: u32,
    window_ns: u64,
    /// Windows or buckets begin at whole multiples of this: window length in nanoseconds and number of buckets.
    edge: (u64, u32),
}

impl Walk {
    pub(crate) fn new(limit: &Limit, start: Time) -> Walk {
        let window_ns = u64::try_from(limit.window().as_nanos()).unwrap_or(u64::MAX);
        let buckets = if let Limit::Counter(counter) = limit { counter.buckets() } else { 1 };
        Walk {
            now: start.as_nanos(),
            last: None,
            limit: limit.limit(),
            window_ns,
            edge: (window_ns, buckets),
        }
    }

    /// The next request to `key`.
    pub(crate) fn next(&mut self, request: Request, key: &dyn Key) -> (Time, u32) {
        let now = Time::from_nanos(self.instant(request.gap));
        self.now = now.as_nanos();
        (now, self.cost(request.cost, now, key))
    }

    /// Records the decision on the last request.
    pub(crate) fn saw(&mut self, decision: Decision) {
        self.last = Some(decision);
    }

    fn instant(&self, gap: Gap) -> u64 {
        let thousandths = |share: u64| (u128::from(self.window_ns) * u128::from(share) / 1_000) as u64;
        // A wait can end after `Time::MAX`.
        let after = |wait: Duration, off: i64| {
            let instant = u128::from(self.now) + wait.as_nanos();
            let instant = u64::try_from(instant).unwrap_or(u64::MAX);
            instant.saturating_add_signed(off).max(self.now)
        };
        match gap {
            Gap::Nanos(nanos) => self.now.saturating_add(nanos),
            Gap::Windows(share) => self.now.saturating_add(thousandths(share)),
            Gap::Retry(off) => after(self.last.map_or(Duration::ZERO, longest_wait), off),
            Gap::Reset(off) => after(self.last.map_or(Duration::ZERO, |last| last.reset_after), off),
            Gap::Edge(off) => {
                let (window_ns, buckets) = (u128::from(self.edge.0), u128::from(self.edge.1));
                let next = u128::from(self.now) * buckets / window_ns + 1;
                let until = (next * window_ns).div_ceil(buckets) - u128::from(self.now);
                after(Duration::from_nanos(until as u64), off)
            }
            Gap::BackNanos(nanos) => self.now.saturating_sub(nanos),
            Gap::BackWindows(share) => self.now.saturating_sub(thousandths(share)),
        }
    }

    fn cost(&self, cost: Cost, now: Time, key: &dyn Key) -> u32 {
        let more_than = |units: u32, more: i64| (i64::from(units) + more).clamp(0, u32::MAX.into()) as u32;
        match cost {
            Cost::Units(units) => units,
            Cost::Share(share) => (u64::from(self.limit) * share / 1_000) as u32,
            Cost::Limit(more) => more_than(self.limit, more),
            Cost::Remaining(more) => more_than(key.peek(now, 0).remaining, more),
        }
    }
}

fn longest_wait(decision: Decision) -> Duration {
    match decision.retry_after {
        RetryAfter::After(wait) => wait,
        RetryAfter::Now | RetryAfter::Never => decision.reset_after,
    }
}

/// The instant `wait` after `now`, if it is at most `Time::MAX`.
pub(crate) fn instant_after(now: Time, wait: Duration) -> Option<Time> {
    let instant = u128::from(now.as_nanos()) + wait.as_nanos();
    (instant <= u128::from(Time::MAX.as_nanos())).then(|| Time::from_nanos(instant as u64))
}
