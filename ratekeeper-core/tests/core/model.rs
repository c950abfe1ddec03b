//! A reference model of the five algorithms: a literal implementation of their rules in exact fractions, without
//! regard to speed or size.
//!
//! A rule only defines how much of the limit is in use at an instant and how a request is recorded. The waits follow
//! from their definitions by search: `retry_after` is the first whole nanosecond at which the request would be
//! allowed, `reset_after` the first at which nothing is in use. Both are binary searches, because the units in use
//! never increase without a request.
//!
//! Instants must not run backwards here.

use std::collections::BTreeMap;
use std::time::Duration;

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{ToPrimitive, Zero};
use ratekeeper_core::{
    Decision, EdgePolicy, LeakyMode, Limit, LogPolicy, Rate, RetryAfter, Time, WindowAlign,
};

type Fraction = BigRational;

fn whole(value: impl Into<BigInt>) -> Fraction {
    Fraction::from_integer(value.into())
}

fn wait(nanos: u128) -> Duration {
    let seconds = u64::try_from(nanos / 1_000_000_000).expect("a wait is shorter than a Duration can be");
    Duration::new(seconds, (nanos % 1_000_000_000) as u32)
}

/// One rule with the state of one key. Instants are nanoseconds since the epoch.
trait Rule {
    /// Units that count against the limit at `at`, without requests since the last one.
    fn in_use(&self, at: &Fraction) -> Fraction;

    /// Records a request at `at` with a cost above zero.
    fn take(&mut self, at: &Fraction, cost: u32);
}

/// Units per nanosecond.
fn speed(rate: Rate) -> Fraction {
    whole(rate.count()) / whole(rate.period().as_nanos())
}

/// Tokens grow continuously up to the capacity; a new key starts full.
struct TokenBucket {
    capacity: Fraction,
    refill: Fraction,
    tokens: Fraction,
    last: Fraction,
}

impl TokenBucket {
    fn tokens(&self, at: &Fraction) -> Fraction {
        (&self.tokens + (at - &self.last) * &self.refill).min(self.capacity.clone())
    }
}

impl Rule for TokenBucket {
    fn in_use(&self, at: &Fraction) -> Fraction {
        &self.capacity - self.tokens(at)
    }

    fn take(&mut self, at: &Fraction, cost: u32) {
        self.tokens = self.tokens(at) - whole(cost);
        self.last = at.clone();
    }
}

/// A period's tokens arrive together at its end; periods start at the first request of a full bucket.
struct SteppedBucket {
    capacity: Fraction,
    tokens_per_period: Fraction,
    period: Fraction,
    tokens: Fraction,
    first_request: Fraction,
    periods_paid: Fraction,
}

impl SteppedBucket {
    fn periods(&self, at: &Fraction) -> Fraction {
        ((at - &self.first_request) / &self.period).floor()
    }

    fn tokens(&self, at: &Fraction) -> Fraction {
        let arrived = (self.periods(at) - &self.periods_paid) * &self.tokens_per_period;
        (&self.tokens + arrived).min(self.capacity.clone())
    }
}

impl Rule for SteppedBucket {
    fn in_use(&self, at: &Fraction) -> Fraction {
        &self.capacity - self.tokens(at)
    }

    fn take(&mut self, at: &Fraction, cost: u32) {
        self.tokens = self.tokens(at);
        if self.tokens == self.capacity {
            self.first_request = at.clone();
        }
        self.periods_paid = self.periods(at);
        self.tokens -= whole(cost);
    }
}

/// The level falls continuously.
struct LeakyBucket {
    leak: Fraction,
    level: Fraction,
    last: Fraction,
}

impl Rule for LeakyBucket {
    fn in_use(&self, at: &Fraction) -> Fraction {
        (&self.level - (at - &self.last) * &self.leak).max(Fraction::zero())
    }

    fn take(&mut self, at: &Fraction, cost: u32) {
        self.level = self.in_use(at) + whole(cost);
        self.last = at.clone();
    }
}

/// A count per window, and the start of that window.
struct FixedWindow {
    window: Fraction,
    align: WindowAlign,
    running: Option<(Fraction, Fraction)>,
}

impl Rule for FixedWindow {
    fn in_use(&self, at: &Fraction) -> Fraction {
        match &self.running {
            Some((start, count)) if *at < start + &self.window => count.clone(),
            _ => Fraction::zero(),
        }
    }

    fn take(&mut self, at: &Fraction, cost: u32) {
        let count = self.in_use(at);
        let start = match (&self.running, self.align) {
            (_, WindowAlign::Clock) => (at / &self.window).floor() * &self.window,
            (Some((start, _)), WindowAlign::FirstRequest) if !count.is_zero() => start.clone(),
            (_, WindowAlign::FirstRequest) => at.clone(),
        };
        self.running = Some((start, count + whole(cost)));
    }
}

/// Every request in order of arrival: instant and units. No entry is ever removed.
struct Log {
    window: Fraction,
    entries: Vec<(Fraction, Fraction)>,
}

impl Rule for Log {
    fn in_use(&self, at: &Fraction) -> Fraction {
        let gone = at - &self.window;
        self.entries.iter().filter(|(when, _)| *when > gone).map(|(_, units)| units).sum()
    }

    fn take(&mut self, at: &Fraction, cost: u32) {
        self.entries.push((at.clone(), whole(cost)));
    }
}

/// Units charged in each bucket since the epoch.
struct Counter {
    window: Fraction,
    buckets: u32,
    bucket_length: Fraction,
    edge: EdgePolicy,
    counts: BTreeMap<BigInt, BigInt>,
}

impl Counter {
    fn bucket(&self, at: &Fraction) -> BigInt {
        (at / &self.bucket_length).floor().to_integer()
    }

    /// The share of a bucket that is still inside the window that ends at `at`.
    fn share_inside(&self, bucket: &BigInt, at: &Fraction) -> Fraction {
        let bucket_end = whole(bucket + 1) * &self.bucket_length;
        (bucket_end - (at - &self.window)) / &self.bucket_length
    }
}

impl Rule for Counter {
    fn in_use(&self, at: &Fraction) -> Fraction {
        let running = self.bucket(at);
        let edge = &running - self.buckets;
        let newest: BigInt = self.counts.range(&edge + 1..=running).map(|(_, count)| count).sum();
        let at_edge = whole(self.counts.get(&edge).cloned().unwrap_or_default());
        let weight = match self.edge {
            EdgePolicy::Weigh => self.share_inside(&edge, at),
            EdgePolicy::Drop => whole(0),
            EdgePolicy::Keep => whole(1),
        };
        (whole(newest) + at_edge * weight).floor()
    }

    fn take(&mut self, at: &Fraction, cost: u32) {
        *self.counts.entry(self.bucket(at)).or_default() += cost;
    }
}

/// The model of one key.
pub(crate) struct Model {
    limit: u32,
    rule: Box<dyn Rule>,
    counts_denied: bool,
    /// The leak rate of a bucket that delays the requests it allows.
    shape: Option<Fraction>,
}

impl Model {
    /// The model of a limit, derived from its parameters only.
    pub(crate) fn new(limit: &Limit) -> Model {
        let counts_denied = matches!(limit, Limit::Log(log) if log.count() == LogPolicy::All);
        let shape = match limit {
            // A bucket is shaping if it equals a shaping bucket with the same parameters.
            Limit::Bucket(it) => (Limit::leaky_bucket(it.capacity(), it.rate(), LeakyMode::Shape).as_ref()
                == Ok(limit))
            .then(|| speed(it.rate())),
            _ => None,
        };
        let rule: Box<dyn Rule> = match limit {
            Limit::Bucket(it) if it.is_leaky() => {
                Box::new(LeakyBucket { leak: speed(it.rate()), level: whole(0), last: whole(0) })
            }
            Limit::Bucket(it) => Box::new(TokenBucket {
                capacity: whole(it.capacity()),
                refill: speed(it.rate()),
                tokens: whole(it.capacity()),
                last: whole(0),
            }),
            Limit::SteppedBucket(it) => Box::new(SteppedBucket {
                capacity: whole(it.capacity()),
                tokens_per_period: whole(it.rate().count()),
                period: whole(it.rate().period().as_nanos()),
                tokens: whole(it.capacity()),
                first_request: whole(0),
                periods_paid: whole(0),
            }),
            Limit::FixedWindow(it) => Box::new(FixedWindow {
                window: whole(it.window().as_nanos()),
                align: it.align(),
                running: None,
            }),
            Limit::Log(it) => Box::new(Log { window: whole(it.window().as_nanos()), entries: Vec::new() }),
            Limit::Counter(it) => Box::new(Counter {
                window: whole(it.window().as_nanos()),
                buckets: it.buckets(),
                bucket_length: whole(it.window().as_nanos()) / whole(it.buckets()),
                edge: it.edge(),
                counts: BTreeMap::new(),
            }),
        };
        Model { limit: limit.limit(), rule, counts_denied, shape }
    }

    /// Decides a request and records it. The `guess` can only shorten the search for the waits.
    pub(crate) fn decide(&mut self, now: Time, cost: u32, guess: &Decision) -> Decision {
        let at = whole(now.as_nanos());
        let before = self.rule.in_use(&at);
        let allowed = self.has_room(&before, cost);
        let mut after = before.clone();
        if cost > 0 && (allowed || self.counts_denied) {
            self.rule.take(&at, cost);
            after = self.rule.in_use(&at);
        }
        self.answer(&at, cost, &before, &after, guess)
    }

    /// Decides a request without recording it.
    pub(crate) fn peek(&self, now: Time, cost: u32, guess: &Decision) -> Decision {
        let at = whole(now.as_nanos());
        let in_use = self.rule.in_use(&at);
        self.answer(&at, cost, &in_use, &in_use, guess)
    }

    fn has_room(&self, in_use: &Fraction, cost: u32) -> bool {
        in_use + whole(cost) <= whole(self.limit)
    }

    /// The decision on a request with `before` units in use before it and `after` units after it.
    fn answer(
        &self,
        at: &Fraction,
        cost: u32,
        before: &Fraction,
        after: &Fraction,
        guess: &Decision,
    ) -> Decision {
        let in_use_after = |nanos: u128| self.rule.in_use(&(at + whole(nanos)));
        let allowed = self.has_room(before, cost);
        let retry_after = if allowed {
            RetryAfter::Now
        } else if cost > self.limit {
            RetryAfter::Never
        } else {
            let guess = match guess.retry_after {
                RetryAfter::After(wait) => wait,
                RetryAfter::Now | RetryAfter::Never => Duration::ZERO,
            };
            RetryAfter::After(first_wait(guess, |nanos| self.has_room(&in_use_after(nanos), cost)))
        };
        let left = (whole(self.limit) - after).floor().to_integer();
        Decision {
            allowed,
            limit: self.limit,
            // A log that counts denied requests may hold more than the limit.
            remaining: left.to_u32().unwrap_or(0),
            retry_after,
            reset_after: first_wait(guess.reset_after, |nanos| in_use_after(nanos).is_zero()),
            delay: match &self.shape {
                // An allowed request waits for what the bucket already held.
                Some(leak) if allowed => {
                    let drained = (before / leak).ceil().to_integer();
                    wait(drained.to_u128().expect("a level is not negative"))
                }
                _ => Duration::ZERO,
            },
        }
    }
}

/// The shortest wait at whose end `is_over` holds; from then on it always holds.
fn first_wait(guess: Duration, is_over: impl Fn(u128) -> bool) -> Duration {
    let guess = guess.as_nanos();
    if is_over(guess) && (guess == 0 || !is_over(guess - 1)) {
        return wait(guess);
    }
    if is_over(0) {
        return Duration::ZERO;
    }
    let (mut not_yet, mut over) = (0, 1);
    while !is_over(over) {
        (not_yet, over) = (over, 2 * over);
    }
    while over - not_yet > 1 {
        let between = not_yet + (over - not_yet) / 2;
        if is_over(between) {
            over = between;
        } else {
            not_yet = between;
        }
    }
    wait(over)
}
