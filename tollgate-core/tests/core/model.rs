//! The five algorithms, written down a second time: as literally as their rules read, in fractions that are never
//! rounded, with no thought for speed or size.
//!
//! A rule only says how much of the limit is in use at an instant and how a request is written down. The waits
//! follow from their definitions, by trying: `retry_after` is the first whole nanosecond at which the request would
//! be admitted, `reset_after` the first at which nothing is in use. Both searches may halve their way because what
//! is in use never rises while nobody comes.
//!
//! Instants must not run backwards here.

use std::collections::BTreeMap;
use std::time::Duration;

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{ToPrimitive, Zero};
use tollgate_core::{Align, Count, Decision, Edge, Limit, Mode, Rate, RetryAfter, Time};

type Fraction = BigRational;

fn whole(value: impl Into<BigInt>) -> Fraction {
    Fraction::from_integer(value.into())
}

fn wait(nanos: u128) -> Duration {
    let seconds = u64::try_from(nanos / 1_000_000_000).expect("a wait is shorter than a Duration can be");
    Duration::new(seconds, (nanos % 1_000_000_000) as u32)
}

/// One rule with what it remembers of one key. Instants are nanoseconds since the epoch.
trait Rule {
    /// What counts against the limit at `at`, if nobody came since the last request.
    fn in_use(&self, at: &Fraction) -> Fraction;

    /// Writes down a request at `at` that costs something.
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

/// So many tokens arrive together at the end of each period, counted from the first request of a full bucket.
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

/// What is poured in leaks out continuously.
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

/// A count per window, and where the window that it belongs to began.
struct FixedWindow {
    window: Fraction,
    align: Align,
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
            (_, Align::Clock) => (at / &self.window).floor() * &self.window,
            (Some((start, _)), Align::FirstRequest) if !count.is_zero() => start.clone(),
            (_, Align::FirstRequest) => at.clone(),
        };
        self.running = Some((start, count + whole(cost)));
    }
}

/// Every request in the order in which they came: when, and how many units. None is ever struck off the list.
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

/// What each bucket since the epoch took.
struct Counter {
    window: Fraction,
    buckets: u32,
    bucket_length: Fraction,
    edge: Edge,
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
            Edge::Weigh => self.share_inside(&edge, at),
            Edge::Drop => whole(0),
            Edge::Keep => whole(1),
        };
        (whole(newest) + at_edge * weight).floor()
    }

    fn take(&mut self, at: &Fraction, cost: u32) {
        *self.counts.entry(self.bucket(at)).or_default() += cost;
    }
}

/// What the rules say to one key.
pub(crate) struct Model {
    limit: u32,
    rule: Box<dyn Rule>,
    counts_denied: bool,
    /// The leak rate of a bucket that holds back what it admits.
    shape: Option<Fraction>,
}

impl Model {
    /// The model of a limit, from nothing but its parameters.
    pub(crate) fn new(limit: &Limit) -> Model {
        let counts_denied = matches!(limit, Limit::Log(log) if log.count() == Count::All);
        let shape = match limit {
            // A bucket does not tell its mode, but it equals only those of the same.
            Limit::Bucket(it) => (Limit::leaky_bucket(it.capacity(), it.rate(), Mode::Shape).as_ref()
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
            Limit::Steps(it) => Box::new(SteppedBucket {
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

    /// Decides a request, and writes it down. The `guess` can only make the search for the waits shorter.
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

    /// The decision that a request would get, with nothing written down.
    pub(crate) fn look(&self, now: Time, cost: u32, guess: &Decision) -> Decision {
        let at = whole(now.as_nanos());
        let in_use = self.rule.in_use(&at);
        self.answer(&at, cost, &in_use, &in_use, guess)
    }

    fn has_room(&self, in_use: &Fraction, cost: u32) -> bool {
        in_use + whole(cost) <= whole(self.limit)
    }

    /// The answer to a request that found `before` in use, and left `after`.
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
            // A log that counts the denied may hold more than the limit.
            remaining: left.to_u32().unwrap_or(0),
            retry_after,
            reset_after: first_wait(guess.reset_after, |nanos| in_use_after(nanos).is_zero()),
            delay: match &self.shape {
                // An admitted request stands in line behind what the bucket already held.
                Some(leak) if allowed => {
                    let drained = (before / leak).ceil().to_integer();
                    wait(drained.to_u128().expect("a level is not negative"))
                }
                _ => Duration::ZERO,
            },
        }
    }
}

/// The shortest wait at whose end `is_over` holds; it then holds for ever.
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
