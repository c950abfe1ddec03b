use std::time::Duration;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use ratekeeper_core::{
    Algorithm, Decision, EdgePolicy, LeakyMode, Limit, LogPolicy, Rate, RefillStyle, Time, WindowAlign,
};
use ratekeeper_rules::response::{
    HeaderSet, Jitter, LimitDecision, LimitResponse, PolicyName, ResponseContext,
};

use super::check;

/// Every order of magnitude between `min` and `max` is equally likely.
fn log_uniform(min: u64, max: u64) -> impl Strategy<Value = u64> {
    (min.max(1).ilog2()..=max.ilog2(), any::<u64>())
        .prop_map(move |(bit, low)| ((1 << bit) | (low & ((1 << bit) - 1))).clamp(min, max))
}

/// The eleven variants of the five algorithms.
pub(crate) fn limits() -> impl Strategy<Value = Limit> {
    let sizes = prop_oneof![4 => 1..=12u32, 1 => any::<u32>().prop_map(|size| size.max(1))];
    let windows = log_uniform(1_000_000, 366 * 86_400 * 1_000_000_000).prop_map(Duration::from_nanos);
    (0..11u8, sizes, windows, 1..=1_000u64, 1..=12u32).prop_map(|(variant, size, window, count, buckets)| {
        // A thousand per millisecond is slower than the fastest rate.
        let rate = Rate::new(count, window).unwrap();
        match variant {
            0 => Limit::token_bucket(size, rate, RefillStyle::Smooth),
            1 => Limit::token_bucket(size, rate, RefillStyle::Stepped),
            2 => Limit::leaky_bucket(size, rate, LeakyMode::Police),
            3 => Limit::leaky_bucket(size, rate, LeakyMode::Shape),
            4 => Limit::fixed_window(size, window, WindowAlign::Clock),
            5 => Limit::fixed_window(size, window, WindowAlign::FirstRequest),
            6 => Limit::sliding_window_log(size, window, LogPolicy::Admitted),
            7 => Limit::sliding_window_log(size, window, LogPolicy::All),
            8 => Limit::sliding_window_counter(size, window, buckets, EdgePolicy::Weigh),
            9 => Limit::sliding_window_counter(size, window, buckets, EdgePolicy::Drop),
            _ => Limit::sliding_window_counter(size, window, buckets, EdgePolicy::Keep),
        }
        .unwrap()
    })
}

/// One key under one limit: decides at an instant, or peeks if the last argument is true.
type Key = Box<dyn FnMut(Time, u32, bool) -> Decision>;

fn fresh(limit: &Limit) -> Key {
    fn key<A: Algorithm + Clone + 'static>(algorithm: &A) -> Key {
        let algorithm = algorithm.clone();
        let mut state = algorithm.fresh();
        Box::new(move |now, cost, is_peek| {
            if is_peek { algorithm.peek(&state, now, cost) } else { algorithm.decide(&mut state, now, cost) }
        })
    }
    match limit {
        Limit::Bucket(it) => key(it),
        Limit::SteppedBucket(it) => key(it),
        Limit::FixedWindow(it) => key(it),
        Limit::Log(it) => key(it),
        Limit::Counter(it) => key(it),
    }
}

/// Charges all limits or none.
fn decide(keys: &mut [Key], now: Time, cost: u32) -> Vec<Decision> {
    if let [alone] = keys {
        return vec![alone(now, cost, false)];
    }
    let peeks: Vec<Decision> = keys.iter_mut().map(|key| key(now, cost, true)).collect();
    if peeks.iter().all(|peek| peek.allowed) {
        keys.iter_mut().map(|key| key(now, cost, false)).collect()
    } else {
        peeks
    }
}

/// The instant at which a client retries that reads one of the two headers, if there is one and it can be
/// represented.
fn retry_time(response: &LimitResponse, now: Time, by_epoch: bool) -> Option<Time> {
    let wait: u64 = response.header("retry-after")?.parse().unwrap();
    let instant = if by_epoch {
        let epoch: u64 = response.header("x-ratelimit-reset").unwrap().parse().unwrap();
        u128::from(epoch) * 1_000_000_000
    } else {
        u128::from(now.as_nanos()) + u128::from(wait) * 1_000_000_000
    };
    // A wait can end after `Time::MAX`.
    (instant <= u128::from(Time::MAX.as_nanos())).then(|| Time::from_nanos(instant as u64))
}

#[test]
fn waiting_as_stated_admits_the_request() {
    // Gaps in thousandths of the shortest window, and costs.
    let requests = vec((0..600u64, prop_oneof![3 => Just(1u32), 3 => 0..=12u32, 1 => any::<u32>()]), 1..24);
    let starts = prop_oneof![3 => 1_700_000_000_000_000_000..1_800_000_000_000_000_000u64, 1 => log_uniform(1, 1 << 62)];
    let jitters = option::of((0..20u64, any::<u64>()))
        .prop_map(|jitter| jitter.map(|(at_most, random)| Jitter { at_most, random }));
    let case = (vec(limits(), 1..4), starts, requests, jitters, any::<bool>());
    let name = PolicyName::new("any").unwrap();
    let waited = std::cell::Cell::new(0);
    check(&case, |(mut limits, start, requests, jitter, by_epoch)| {
        if limits.len() > 1 {
            // A log that counts all requests also charges those that another limit denies, and then no wait is long
            // enough for all.
            limits.retain(|limit| !matches!(limit, Limit::Log(log) if log.count() == LogPolicy::All));
        }
        let shortest = limits.iter().map(Limit::window).min().unwrap_or(Duration::ZERO).as_nanos();
        let mut keys: Vec<Key> = limits.iter().map(fresh).collect();
        let (mut now, mut response) = (Time::from_nanos(start), LimitResponse::default());
        let set = HeaderSet::named(if by_epoch { "github" } else { "ietf" }).unwrap();
        for (gap, cost) in requests {
            let gap = u64::try_from(shortest * u128::from(gap) / 1_000).unwrap_or(0);
            now = now.saturating_add(Duration::from_nanos(gap));
            let decisions = decide(&mut keys, now, cost);
            let limit: Vec<LimitDecision> = limits
                .iter()
                .zip(&decisions)
                .map(|(limit, decision)| LimitDecision {
                    cost,
                    ..LimitDecision::new(&name, limit, *decision)
                })
                .collect();
            response.write(set, &limit, &ResponseContext { jitter, ..ResponseContext::at(now) });
            let can_pass = limits.iter().all(|limit| cost <= limit.limit());
            let has_retry_after = response.header("retry-after").is_some();
            prop_assert_eq!(has_retry_after, response.status().is_some() && can_pass);
            let Some(later) = retry_time(&response, now, by_epoch) else { continue };
            let again = decide(&mut keys, later, cost);
            prop_assert!(again.iter().all(|decision| decision.allowed), "{again:?} at {later:?}");
            waited.set(waited.get() + 1);
            now = later;
        }
        Ok(())
    });
    assert!(waited.get() > 10_000, "only {} waits were tried", waited.get());
}
