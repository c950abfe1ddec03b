use std::fmt;
use std::hash::Hash;

use tollgate_core::{Decision, Limit, Time};

use crate::clock::{Clock, SystemClock};
use crate::memory::{Bounds, Memory, WhenFull};
use crate::store::{Charge, ChargeError, Key, Verdict};

/// Decides whether a request may pass now.
///
/// A limiter holds one limit or several, and the state of every key that it has seen. It is shared by reference: all
/// methods take `&self`, and nothing is locked for longer than one decision.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Limit, Limiter, Rate, Style};
///
/// let limiter = Limiter::new(Limit::token_bucket(2, Rate::new(1, Duration::from_secs(1))?, Style::Smooth)?);
/// assert!(limiter.check("alice").allowed);
/// assert!(limiter.check("alice").allowed);
/// assert!(!limiter.check("alice").allowed);
/// assert!(limiter.check("bob").allowed);
/// # Ok::<(), tollgate::LimitError>(())
/// ```
#[derive(Debug)]
pub struct Limiter<S = Memory> {
    pub(crate) store: S,
}

/// Keys that there is room for if nothing is said.
pub(crate) const MAX_KEYS: usize = 1_000_000;

impl Limiter {
    /// A limiter for one limit, with room for a million keys in use, on the system's clock.
    pub fn new(limit: Limit) -> Limiter {
        Limiter::builder(limit).make()
    }

    /// A limiter with settings of its own.
    pub fn builder(limit: Limit) -> Builder {
        Builder {
            limits: vec![limit],
            clock: Box::new(SystemClock::new),
            bounds: Bounds { max_keys: MAX_KEYS, max_bytes: 1 << 30, when_full: WhenFull::default() },
        }
    }
}

/// Settings of a [`Limiter`].
pub struct Builder<C = SystemClock> {
    limits: Vec<Limit>,
    /// Made last: a system clock is measured against the processor's counter, which nobody should wait for who
    /// brings another.
    clock: Box<dyn FnOnce() -> C>,
    bounds: Bounds,
}

#[cfg(feature = "tower")]
impl Builder {
    /// The usual settings, for any number of limits: with none, every request passes.
    pub(crate) fn of(limits: Vec<Limit>) -> Builder {
        Builder {
            limits,
            clock: Box::new(SystemClock::new),
            bounds: Bounds { max_keys: MAX_KEYS, max_bytes: 1 << 30, when_full: WhenFull::default() },
        }
    }
}

impl<C: Clock> Builder<C> {
    /// Adds another limit: a request passes if all allow it, and takes nothing from any if one denies it.
    #[must_use]
    pub fn and(mut self, limit: Limit) -> Self {
        self.limits.push(limit);
        self
    }

    /// Room for so many keys in use, for each limit; one million if nothing is said. A key that is as good as new
    /// needs no room.
    #[must_use]
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.bounds.max_keys = max_keys;
        self
    }

    /// The most memory that all states together may hold; 1 GiB if nothing is said. If [`max_keys`](Self::max_keys)
    /// would need more, there is room for fewer keys.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.bounds.max_bytes = max_bytes;
        self
    }

    /// What to answer when there is room for no more keys.
    #[must_use]
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.bounds.when_full = when_full;
        self
    }

    /// The limiter, with its states in Redis instead of in memory: room and clock are the server's.
    ///
    /// # Errors
    /// If the address cannot be understood, or there is no tokio runtime. A server that does not answer is no error:
    /// until it does, each limit's policy decides.
    #[cfg(feature = "redis")]
    pub fn redis(
        self,
        settings: &crate::redis::Settings,
    ) -> Result<Limiter<crate::redis::Redis>, crate::redis::SettingsError> {
        self.redis_on(settings, settings)
    }

    /// The same, with what the settings were before anything was said of single limits.
    #[cfg(feature = "redis")]
    pub(crate) fn redis_on(
        self,
        settings: &crate::redis::Settings,
        base: &crate::redis::Settings,
    ) -> Result<Limiter<crate::redis::Redis>, crate::redis::SettingsError> {
        Ok(Limiter { store: crate::redis::Redis::new(&self.limits, settings, base)? })
    }

    /// The same as [`renew`](Self::renew) for a limiter on Redis, on its connections. Settings are those of the new limits;
    /// of them, the address and what else belongs to connections stays as it was.
    ///
    /// States are in Redis under the limits' names, as far as the algorithm, its variant, the window and the rate are the
    /// same. What this process knows, or has taken ahead, of limits that have not changed goes on; of others it is given
    /// back.
    ///
    /// # Errors
    /// If something is said of a limit that there is not, or there is no tokio runtime.
    #[cfg(feature = "redis")]
    pub fn renew_redis(
        self,
        before: &Limiter<crate::redis::Redis>,
        from: &[Option<usize>],
        settings: &crate::redis::Settings,
    ) -> Result<Limiter<crate::redis::Redis>, crate::redis::SettingsError> {
        Ok(Limiter { store: before.store.renewed(&self.limits, from, settings)? })
    }

    /// Where time comes from.
    #[must_use]
    pub fn clock<D: Clock + 'static>(self, clock: D) -> Builder<D> {
        Builder { limits: self.limits, clock: Box::new(|| clock), bounds: self.bounds }
    }

    /// The limiter.
    ///
    /// # Errors
    /// If there is no room for any key.
    pub fn build(self) -> Result<Limiter<Memory<C>>, BuildError> {
        self.check_bounds()?;
        Ok(self.make())
    }

    /// The limiter, going on where another stands, which may meanwhile go on, too: limit number n with what limit
    /// `from[n]` of `before` has counted, if any. Keys and clock are those of `before`.
    ///
    /// A limit that has not changed is shared by both, with the room that it has. Of one that has, each key's use is kept
    /// ([`Limit::carried`]), unless the algorithm, its variant or its window is another: then it begins anew. Requests
    /// that `before` still decides count for a changed limit until it first sees their keys, and not after. What `before`
    /// holds stays in memory for as long as it counts.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Align, Limit, Limiter};
    /// let hourly = |limit| Limit::fixed_window(limit, Duration::from_secs(3600), Align::FirstRequest);
    /// let limiter = Limiter::new(hourly(2)?);
    /// assert_eq!(limiter.check_n("alice", 2).remaining, 0);
    ///
    /// let raised = Limiter::builder(hourly(5)?).renew(&limiter, &[Some(0)])?;
    /// assert_eq!(raised.check("alice").remaining, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no room for any key.
    pub fn renew(
        self,
        before: &Limiter<Memory<C>>,
        from: &[Option<usize>],
    ) -> Result<Limiter<Memory<C>>, BuildError>
    where
        C: Clone,
    {
        self.check_bounds()?;
        Ok(Limiter { store: before.store.renewed(&self.limits, from, self.bounds) })
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

impl<C> fmt::Debug for Builder<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("limits", &self.limits)
            .field("bounds", &self.bounds)
            .finish_non_exhaustive()
    }
}

/// Settings that leave no room for any key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BuildError {
    /// `max_keys` is zero.
    NoKeys,
    /// `max_keys` and `max_bytes` ask for more memory than any machine has.
    TooLarge,
    /// `max_bytes` is less than the smallest store needs.
    TooFewBytes {
        /// What was given.
        max_bytes: usize,
        /// What is needed at least.
        needed: usize,
    },
}

impl BuildError {
    /// Below this a store would be all bookkeeping.
    const BYTES_MIN: usize = 16 << 10;
    /// Above this there is no machine: 64 TiB.
    const BYTES_MAX: usize = 1 << 46;
    /// What a key takes at least.
    const BYTES_PER_KEY: usize = 32;
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BuildError::NoKeys => write!(f, "max_keys is 0: a limiter needs room for at least one key"),
            BuildError::TooLarge => {
                write!(f, "max_keys and max_bytes are too large: give one of them a bound")
            }
            BuildError::TooFewBytes { max_bytes, needed } => {
                write!(f, "max_bytes is {max_bytes}: with these limits it must be at least {needed}")
            }
        }
    }
}

impl std::error::Error for BuildError {}

impl<S> Limiter<S> {
    /// The store, for those who know it by its [`Store`](crate::Store) seam.
    pub fn store(&self) -> &S {
        &self.store
    }
}

impl<C: Clock> Limiter<Memory<C>> {
    /// Decides a request of cost 1.
    #[inline]
    pub fn check<K: Hash + ?Sized>(&self, key: &K) -> Decision {
        self.store.check(key, 1, |decision| decision)
    }

    /// Decides a request of cost 1, and says only yes or no: the waits are not worked out.
    #[inline]
    pub fn allows<K: Hash + ?Sized>(&self, key: &K) -> bool {
        self.store.check(key, 1, |decision| decision.allowed)
    }

    /// Decides a request of any cost. A cost of 0 takes nothing.
    #[inline]
    pub fn check_n<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        self.store.check(key, cost, |decision| decision)
    }

    /// Decides a request of cost 1 for each key, in order, and tells `each` the key's index and its decision.
    ///
    /// The same as so many [`check`](Self::check)s at one instant, but several times as fast where keys are many:
    /// memory is fetched for sixteen at a time.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Align, Limit, Limiter};
    /// let limiter = Limiter::new(Limit::fixed_window(1, Duration::from_secs(3600), Align::FirstRequest)?);
    /// let mut allowed = Vec::new();
    /// limiter.check_many(&["a", "b", "a"], |_, decision| allowed.push(decision.allowed));
    /// assert_eq!(allowed, [true, true, false]);
    /// # Ok::<(), tollgate::LimitError>(())
    /// ```
    #[inline]
    pub fn check_many<K: Hash>(&self, keys: &[K], each: impl FnMut(usize, Decision)) {
        self.store.check_many(keys, 1, each);
    }

    /// Starts fetching what is known of a key, so that a check that soon follows need not wait for memory. Changes
    /// nothing.
    ///
    /// For checks that differ in cost or in time; for others there is [`check_many`](Self::check_many).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Align, Limit, Limiter};
    /// let limiter = Limiter::new(Limit::fixed_window(10, Duration::from_secs(3600), Align::FirstRequest)?);
    /// let requests = [("a", 2), ("b", 7), ("a", 9)];
    /// for (key, _) in &requests {
    ///     limiter.prefetch(key);
    /// }
    /// let allowed = requests.map(|(key, cost)| limiter.check_n(key, cost).allowed);
    /// assert_eq!(allowed, [true, true, false]);
    /// # Ok::<(), tollgate::LimitError>(())
    /// ```
    #[inline]
    pub fn prefetch<K: Hash + ?Sized>(&self, key: &K) {
        self.store.prefetch(key);
    }

    /// Says what a request of cost 1 would be told, and takes nothing.
    pub fn peek<K: Hash + ?Sized>(&self, key: &K) -> Decision {
        self.store.peek(key, 1)
    }

    /// Says what a request of any cost would be told, and takes nothing.
    pub fn peek_n<K: Hash + ?Sized>(&self, key: &K, cost: u32) -> Decision {
        self.store.peek(key, cost)
    }

    /// Forgets a key: it is as good as new.
    pub fn reset<K: Hash + ?Sized>(&self, key: &K) {
        self.store.reset(key);
    }

    /// A key as [`charge`](Self::charge) takes it.
    #[inline]
    pub fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        self.store.key(key)
    }

    /// Charges limits for keys of their own: all of them, or none if any denies the request.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Align, Charge, Limit, Limiter};
    /// let per_user = Limit::fixed_window(5, Duration::from_secs(60), Align::Clock)?;
    /// let per_address = Limit::fixed_window(100, Duration::from_secs(60), Align::Clock)?;
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
    /// If a charge names a limit that there is not, or two name the same key of one.
    pub fn charge(&self, charges: &[Charge]) -> Result<Verdict, ChargeError> {
        self.store.charge_all(charges)
    }

    /// Gives back what was charged [at a time](Verdict::at), because it was not used: never more than if it had not been
    /// charged. If the time is not known, the oldest that still counts is given back; in no case more than was taken.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Align, Charge, Limit, Limiter};
    /// let limiter = Limiter::new(Limit::fixed_window(10, Duration::from_secs(3600), Align::FirstRequest)?);
    /// let estimate = Charge { limit: 0, key: limiter.key("alice"), cost: 7 };
    /// let verdict = limiter.charge(&[estimate])?;
    /// // It took only 2.
    /// limiter.give_back(&[Charge { cost: 5, ..estimate }], Some(verdict.at()));
    /// assert_eq!(limiter.peek("alice").remaining, 8);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn give_back(&self, charges: &[Charge], at: Option<Time>) {
        self.store.give_back_all(charges, at);
    }

    /// How many requests have found no room for their key, and were answered by the [`WhenFull`] policy.
    pub fn overflowed(&self) -> u64 {
        self.store.overflowed()
    }

    /// How many keys are in use, each as often as it has limits. Looks at the whole table, or at 64 MiB of a larger one to
    /// estimate the rest: for a metric, not for each request. Nobody is held up by it. A key of a log or of a counter with
    /// many buckets may count for a while after it has become idle; one of a limit that was renewed counts once it is seen.
    pub fn keys(&self) -> usize {
        self.store.keys()
    }

    /// Bytes that the states hold: for most algorithms what was reserved at the start, for a log what it holds now.
    pub fn bytes(&self) -> usize {
        self.store.bytes()
    }
}
