use std::fmt;
use std::hash::Hash;

use ratekeeper_core::{Decision, Limit, Time};

use crate::clock::{Clock, SystemClock};
use crate::memory::{Bounds, Memory, MovedState, NoBytesLeft, TABLE_BYTES_MIN, WhenFull};
use crate::store::{Charge, ChargeError, Key, Verdict};

/// Checks requests against one limit or several.
///
/// A limiter holds its limits and the state of every key in use. Threads share it by reference: all methods take
/// `&self`, and no lock is held for longer than one decision.
///
/// ```
/// use std::time::Duration;
/// use ratekeeper::{Limit, Limiter, Rate, RefillStyle};
///
/// let limiter = Limiter::new(Limit::token_bucket(2, Rate::new(1, Duration::from_secs(1))?, RefillStyle::Smooth)?);
/// assert!(limiter.check("alice").allowed);
/// assert!(limiter.check("alice").allowed);
/// assert!(!limiter.check("alice").allowed);
/// assert!(limiter.check("bob").allowed);
/// # Ok::<(), ratekeeper::LimitError>(())
/// ```
#[derive(Debug)]
pub struct Limiter<S = Memory> {
    pub(crate) store: S,
}

/// Default of [`LimiterBuilder::max_keys`].
pub(crate) const MAX_KEYS: usize = 1_000_000;

impl Limiter {
    /// A limiter for one limit, for at most a million keys in use, on the system's clock.
    pub fn new(limit: Limit) -> Limiter {
        Limiter::builder(limit).make()
    }

    /// Settings for a limiter, with the defaults of [`new`](Limiter::new).
    pub fn builder(limit: Limit) -> LimiterBuilder {
        LimiterBuilder {
            limits: vec![limit],
            clock: Box::new(SystemClock::new),
            bounds: Bounds { max_keys: MAX_KEYS, max_bytes: 1 << 30, when_full: WhenFull::default() },
        }
    }
}

/// Settings of a [`Limiter`].
pub struct LimiterBuilder<C = SystemClock> {
    limits: Vec<Limit>,
    /// Created in `build`: calibrating a system clock against the processor's counter takes time, which a caller that
    /// sets another clock should not spend.
    clock: Box<dyn FnOnce() -> C>,
    bounds: Bounds,
}

#[cfg(feature = "tower")]
impl LimiterBuilder {
    /// The default settings, for any number of limits: with none, every request is allowed.
    pub(crate) fn new(limits: Vec<Limit>) -> LimiterBuilder {
        LimiterBuilder {
            limits,
            clock: Box::new(SystemClock::new),
            bounds: Bounds { max_keys: MAX_KEYS, max_bytes: 1 << 30, when_full: WhenFull::default() },
        }
    }
}

impl<C: Clock> LimiterBuilder<C> {
    /// Adds another limit: a request is allowed if all limits allow it; if any limit denies it, none is charged.
    #[must_use]
    pub fn and(mut self, limit: Limit) -> Self {
        self.limits.push(limit);
        self
    }

    /// Sets how many keys can be in use at a time, for each limit; one million by default. A key with its full budget
    /// needs no entry.
    #[must_use]
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.bounds.max_keys = max_keys;
        self
    }

    /// Sets the maximum memory of all states together, in bytes, also those of limiters that are [reloaded
    /// from](Self::reload_from) this one; 1 GiB by default. The limits use at most half, the rest is for limits that a
    /// reload adds or widens. If [`max_keys`](Self::max_keys) would need more, fewer keys fit.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.bounds.max_bytes = max_bytes;
        self
    }

    /// Sets what decides requests whose key finds no free entry.
    #[must_use]
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.bounds.when_full = when_full;
        self
    }

    /// Builds a limiter that keeps its states in Redis instead of in memory; memory bounds and clock are the
    /// server's.
    ///
    /// # Errors
    /// If the address is invalid, or there is no tokio runtime. A server that does not answer is not an error: until
    /// it does, each limit's failure policy decides.
    #[cfg(feature = "redis")]
    pub fn redis(
        self,
        settings: &crate::redis::Settings,
    ) -> Result<Limiter<crate::redis::Redis>, crate::redis::SettingsError> {
        self.redis_on(settings, settings)
    }

    /// The same as [`redis`](Self::redis), where `base` holds the settings without those of single limits.
    #[cfg(feature = "redis")]
    pub(crate) fn redis_on(
        self,
        settings: &crate::redis::Settings,
        base: &crate::redis::Settings,
    ) -> Result<Limiter<crate::redis::Redis>, crate::redis::SettingsError> {
        Ok(Limiter { store: crate::redis::Redis::new(&self.limits, settings, base)? })
    }

    /// The same as [`reload_from`](Self::reload_from) for a limiter on Redis, over its connections. `settings` apply
    /// to the new limits, except the address and the other connection settings, which stay as they were.
    ///
    /// Redis stores states under the limits' names, so they are kept if the algorithm, its variant, the window and
    /// the rate are the same. The windows of a [named](crate::redis::Settings::named) limit that begin with the first
    /// request may change their length. Denial cache and leases of unchanged limits are kept; leases of other limits are
    /// refunded.
    ///
    /// # Errors
    /// If the settings name a limit that does not exist, or there is no tokio runtime.
    #[cfg(feature = "redis")]
    pub fn reload_redis(
        self,
        before: &Limiter<crate::redis::Redis>,
        from: &[Option<usize>],
        settings: &crate::redis::Settings,
    ) -> Result<Limiter<crate::redis::Redis>, crate::redis::SettingsError> {
        Ok(Limiter { store: before.store.reload(&self.limits, from, settings)? })
    }

    /// Sets the clock.
    #[must_use]
    pub fn clock<D: Clock + 'static>(self, clock: D) -> LimiterBuilder<D> {
        LimiterBuilder { limits: self.limits, clock: Box::new(|| clock), bounds: self.bounds }
    }

    /// Builds the limiter, with its states in memory.
    ///
    /// # Errors
    /// If the bounds leave no room for a key, or require more memory than any machine has.
    pub fn build(self) -> Result<Limiter<Memory<C>>, BuildError> {
        self.check_bounds()?;
        Ok(self.make())
    }

    /// Builds the limiter with the state of another, `before`, which may stay in use meanwhile: limit n takes over
    /// the state of limit `from[n]` of `before`, if any. Key hashing and clock are those of `before`.
    ///
    /// Both limiters share the states of a limit, unless the
    /// algorithm, its variant or its window differs: then its keys start with their full budget. Windows that begin
    /// with the first request may change their length: they keep their start. Used units stay used through any number
    /// of changes. If the size or the rate of a bucket changes, its states are converted in place
    /// ([`Limit::migrate_state`]) once the new limiter is used, and `before` decides by the new limit, too. If the
    /// states need more words, or a higher [`max_keys`](Self::max_keys) or [`max_bytes`](Self::max_bytes) allows more
    /// keys, they get new memory, and a key's state is migrated when the new limiter first sees the key; requests that
    /// `before` decides later no longer count for it. Lower bounds apply to limits that are added.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratekeeper::{WindowAlign, Limit, Limiter};
    /// let hourly = |limit| Limit::fixed_window(limit, Duration::from_secs(3600), WindowAlign::FirstRequest);
    /// let limiter = Limiter::new(hourly(2)?);
    /// assert_eq!(limiter.check_n("alice", 2).remaining, 0);
    ///
    /// let raised = Limiter::builder(hourly(5)?).reload_from(&limiter, &[Some(0)])?;
    /// assert_eq!(raised.check("alice").remaining, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the bounds leave no room for a key, or require more memory than any machine has, or if the limits in use leave
    /// no memory for an added one.
    pub fn reload_from(
        self,
        before: &Limiter<Memory<C>>,
        from: &[Option<usize>],
    ) -> Result<Limiter<Memory<C>>, BuildError>
    where
        C: Clone,
    {
        self.reload_moving(before, from, &[])
    }

    /// The same as [`reload_from`](Self::reload_from), for keys whose states the caller will move to other limits.
    pub(crate) fn reload_moving(
        self,
        before: &Limiter<Memory<C>>,
        from: &[Option<usize>],
        moved: &[MovedState],
    ) -> Result<Limiter<Memory<C>>, BuildError>
    where
        C: Clone,
    {
        self.check_bounds()?;
        let in_use = |left: NoBytesLeft| BuildError::BytesInUse {
            max_bytes: self.bounds.max_bytes,
            in_use: left.in_use,
        };
        Ok(Limiter { store: before.store.reload(&self.limits, from, moved, self.bounds).map_err(in_use)? })
    }

    fn check_bounds(&self) -> Result<(), BuildError> {
        let Bounds { max_keys, max_bytes, .. } = self.bounds;
        if max_keys == 0 {
            return Err(BuildError::NoKeys);
        }
        if max_bytes.min(max_keys.saturating_mul(BuildError::BYTES_PER_KEY)) > BuildError::BYTES_MAX {
            return Err(BuildError::TooLarge);
        }
        let needed = self.limits.len() * BuildError::BYTES_MIN;
        if max_bytes < needed {
            return Err(BuildError::TooFewBytes { max_bytes, needed });
        }
        Ok(())
    }

    fn make(self) -> Limiter<Memory<C>> {
        Limiter { store: Memory::new(&self.limits, (self.clock)(), self.bounds) }
    }
}

impl<C> fmt::Debug for LimiterBuilder<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("limits", &self.limits)
            .field("bounds", &self.bounds)
            .finish_non_exhaustive()
    }
}

/// Bounds with which no limiter can be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// `max_keys` is zero.
    #[error("max_keys is 0: a limiter needs room for at least one key")]
    NoKeys,
    /// `max_keys` and `max_bytes` require more memory than any machine has.
    #[error("max_keys and max_bytes are too large: give one of them a bound")]
    TooLarge,
    /// `max_bytes` is less than the smallest store needs.
    #[error("max_bytes is {max_bytes}: with these limits it must be at least {needed}")]
    TooFewBytes {
        /// The value set.
        max_bytes: usize,
        /// The smallest valid value.
        needed: usize,
    },
    /// A reload adds limits, and the limits in use leave no memory for them.
    #[error(
        "max_bytes is {max_bytes}, of which the limits in use take {in_use}: raise max_bytes, or restart to divide it anew"
    )]
    BytesInUse {
        /// The value set.
        max_bytes: usize,
        /// Bytes of the limits in use, also those of earlier limiters that are still in use.
        in_use: usize,
    },
}

impl BuildError {
    /// Minimum per limit: its table may use half.
    const BYTES_MIN: usize = 2 * TABLE_BYTES_MIN;
    /// 64 TiB, more than any machine has.
    const BYTES_MAX: usize = 1 << 46;
    /// The least that a key takes.
    const BYTES_PER_KEY: usize = 32;
}

impl<S> Limiter<S> {
    /// The store, to call it through the [`Store`](crate::Store) trait.
    pub fn store(&self) -> &S {
        &self.store
    }
}

impl<C: Clock> Limiter<Memory<C>> {
    /// Checks a request of cost 1.
    #[inline]
    pub fn check<K: Hash + ?Sized>(&self, key: &K) -> Decision {
        self.store.check(key, 1, |decision| decision)
    }

    /// Checks a request of cost 1 and returns only whether it is allowed, which saves computing the waits.
    #[inline]
    pub fn allows<K: Hash + ?Sized>(&self, key: &K) -> bool {
        self.store.check(key, 1, |decision| decision.allowed)
    }

    /// Checks a request of any cost. A cost of 0 charges nothing.
    #[inline]
    pub fn check_n<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        self.store.check(key, cost, |decision| decision)
    }

    /// Checks a request at a time that [`now`](Self::now) has returned before. Reading the clock takes a large part of a
    /// check's time: an event loop that reads it once per wake-up can check many requests at that time.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratekeeper::{WindowAlign, Limit, Limiter};
    /// let limiter = Limiter::new(Limit::fixed_window(10, Duration::from_secs(3600), WindowAlign::FirstRequest)?);
    /// let now = limiter.now();
    /// let allowed = [("a", 2), ("b", 7), ("a", 9)].map(|(key, cost)| limiter.check_at(now, key, cost).allowed);
    /// assert_eq!(allowed, [true, true, false]);
    /// # Ok::<(), ratekeeper::LimitError>(())
    /// ```
    #[inline]
    pub fn check_at<K: Hash + ?Sized>(&self, now: Time, key: &K, cost: u32) -> Decision {
        self.store.check_at(now, key, cost)
    }

    /// The time by the limiter's clock.
    #[inline]
    pub fn now(&self) -> Time {
        self.store.now()
    }

    /// Checks a request of cost 1 for each key, in order, and calls `each` with the key's index and its decision.
    ///
    /// The same as one [`check`](Self::check) per key at one instant, but several times as fast if there are many
    /// keys: memory is fetched for sixteen at a time.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratekeeper::{WindowAlign, Limit, Limiter};
    /// let limiter = Limiter::new(Limit::fixed_window(1, Duration::from_secs(3600), WindowAlign::FirstRequest)?);
    /// let mut allowed = Vec::new();
    /// limiter.check_many(&["a", "b", "a"], |_, decision| allowed.push(decision.allowed));
    /// assert_eq!(allowed, [true, true, false]);
    /// # Ok::<(), ratekeeper::LimitError>(())
    /// ```
    #[inline]
    pub fn check_many<K: Hash>(&self, keys: &[K], each: impl FnMut(usize, Decision)) {
        self.store.check_many(keys, 1, each);
    }

    /// Starts fetching a key's state from memory, so that a check that soon follows need not wait for it. Changes
    /// nothing.
    ///
    /// For checks that differ in cost or in time; otherwise use [`check_many`](Self::check_many). For many keys, use
    /// [`prefetch_many`](Self::prefetch_many).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratekeeper::{WindowAlign, Limit, Limiter};
    /// let limiter = Limiter::new(Limit::fixed_window(10, Duration::from_secs(3600), WindowAlign::FirstRequest)?);
    /// let requests = [("a", 2), ("b", 7), ("a", 9)];
    /// for (key, _) in &requests {
    ///     limiter.prefetch(key);
    /// }
    /// let allowed = requests.map(|(key, cost)| limiter.check_n(key, cost).allowed);
    /// assert_eq!(allowed, [true, true, false]);
    /// # Ok::<(), ratekeeper::LimitError>(())
    /// ```
    #[inline]
    pub fn prefetch<K: Hash + ?Sized>(&self, key: &K) {
        self.store.prefetch(key);
    }

    /// Starts fetching the states of some keys from memory, as [`prefetch`](Self::prefetch) does for one. Logs and
    /// counters of 8 and more buckets are fetched at the same time only by this call.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratekeeper::{Limit, Limiter, LogPolicy};
    /// let limiter = Limiter::new(Limit::sliding_window_log(10, Duration::from_secs(60), LogPolicy::Admitted)?);
    /// let requests = [("a", 2), ("b", 7), ("a", 9)];
    /// limiter.prefetch_many(requests.iter().map(|(key, _)| key));
    /// let allowed = requests.map(|(key, cost)| limiter.check_n(key, cost).allowed);
    /// assert_eq!(allowed, [true, true, false]);
    /// # Ok::<(), ratekeeper::LimitError>(())
    /// ```
    #[inline]
    pub fn prefetch_many<'a, K: Hash + ?Sized + 'a>(&self, keys: impl IntoIterator<Item = &'a K>) {
        self.store.prefetch_many(keys);
    }

    /// Decides a request of cost 1 without charging it.
    pub fn peek<K: Hash + ?Sized>(&self, key: &K) -> Decision {
        self.store.peek(key, 1)
    }

    /// Decides a request of any cost without charging it.
    pub fn peek_n<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        self.store.peek(key, cost)
    }

    /// Restores a key to its full budget, for all limits.
    pub fn reset<K: Hash + ?Sized>(&self, key: &K) {
        self.store.reset(key);
    }

    /// The hashed key, for a [`Charge`].
    #[inline]
    pub fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        self.store.key(key)
    }

    /// Charges several limits atomically, each with its own key: if any limit denies the request, none is charged.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratekeeper::{WindowAlign, Charge, Limit, Limiter};
    /// let per_user = Limit::fixed_window(5, Duration::from_secs(60), WindowAlign::Clock)?;
    /// let per_address = Limit::fixed_window(100, Duration::from_secs(60), WindowAlign::Clock)?;
    /// let limiter = Limiter::builder(per_user).and(per_address).build()?;
    ///
    /// let verdict = limiter.charge(&[
    ///     Charge { limit: 0, key: limiter.key("alice"), cost: 6 },
    ///     Charge { limit: 1, key: limiter.key("192.0.2.7"), cost: 1 },
    /// ])?;
    /// assert!(!verdict.allowed());
    /// assert_eq!(verdict.decisions()[1].remaining, 100, "nothing was taken from the address");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a charge names a limit that does not exist, or two charges name the same key of one limit.
    pub fn charge(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        self.store.charge_all(charges)
    }

    /// Refunds charges made [at a time](Verdict::at) and not used. Afterwards the key has at most the budget that it
    /// would have without the charge. If the time is not known, the oldest units that still count are refunded, and
    /// never more than were charged.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratekeeper::{WindowAlign, Charge, Limit, Limiter};
    /// let limiter = Limiter::new(Limit::fixed_window(10, Duration::from_secs(3600), WindowAlign::FirstRequest)?);
    /// let estimate = Charge { limit: 0, key: limiter.key("alice"), cost: 7 };
    /// let verdict = limiter.charge(&[estimate])?;
    /// // It took only 2.
    /// limiter.refund(&[Charge { cost: 5, ..estimate }], Some(verdict.at()));
    /// assert_eq!(limiter.peek("alice").remaining, 8);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn refund(&self, charges: &[Charge], at: Option<Time>) {
        self.store.refund_all(charges, at);
    }

    /// The bounds that were set, in keys per limit and in bytes.
    #[doc(hidden)]
    pub fn max_keys_and_bytes(&self) -> (usize, usize) {
        self.store.max_keys_and_bytes()
    }

    /// How many requests found no free entry for their key and were decided by the [`WhenFull`] policy.
    pub fn overflowed(&self) -> u64 {
        self.store.overflowed()
    }

    /// How many keys are in use, counted once for each limit. Scans the whole table, or 64 MiB of a larger one to
    /// estimate the rest: for a metric, not for each request. It delays no check. A key of a log or of a counter with
    /// many buckets may be counted for a while after it has become idle; a key of a limit that was changed by a
    /// reload is counted once the new limit has seen it.
    pub fn keys(&self) -> usize {
        self.store.keys()
    }

    /// Bytes that the states occupy: for most algorithms the memory reserved at the start, for a log its current
    /// size.
    pub fn bytes(&self) -> usize {
        self.store.bytes()
    }
}
