//! The counts of a sliding window counter's buckets.

use std::fmt;

use crate::BUCKETS_MAX;

/// Units charged in each of the newest buckets, by the bucket's age: the newest bucket has the age 0.
pub trait Counts: Clone {
    /// The age of the oldest bucket that can be stored.
    const AGE_MAX: usize;

    /// The count of a bucket.
    fn get(&self, age: usize) -> u32;

    /// Replaces the count of a bucket.
    fn set(&mut self, age: usize, count: u32);

    /// Makes every bucket older by `steps`. Buckets older than `age_max` are dropped.
    fn shift(&mut self, steps: u64, age_max: usize);

    /// The sum of the counts of all buckets up to an age.
    fn sum(&self, age_max: usize) -> u64;

    /// The age of the newest bucket with a count.
    fn newest_used(&self) -> Option<usize>;

    /// An age beyond which no bucket has a count.
    fn oldest_used(&self) -> usize;
}

/// A few counts, which are cheap to shift and to sum.
impl<const N: usize> Counts for [u32; N] {
    const AGE_MAX: usize = N - 1;

    #[inline]
    fn get(&self, age: usize) -> u32 {
        self[age]
    }

    #[inline]
    fn set(&mut self, age: usize, count: u32) {
        self[age] = count;
    }

    #[inline]
    fn shift(&mut self, steps: u64, age_max: usize) {
        let counts = &mut self[..=age_max];
        if steps > age_max as u64 {
            counts.fill(0);
        } else {
            counts.copy_within(..counts.len() - steps as usize, steps as usize);
            counts[..steps as usize].fill(0);
        }
    }

    #[inline]
    fn sum(&self, age_max: usize) -> u64 {
        self[..=age_max].iter().map(|&count| u64::from(count)).sum()
    }

    #[inline]
    fn newest_used(&self) -> Option<usize> {
        self.iter().position(|&count| count > 0)
    }

    #[inline]
    fn oldest_used(&self) -> usize {
        N - 1
    }
}

/// Any number of counts. A decision visits only the buckets that have passed since the decision before, and those that
/// leave the window until a denied request fits.
#[derive(Clone)]
pub struct CountRing {
    counts: Box<[u32]>,
    /// The sum of all counts.
    sum: u64,
    /// Index of the newest bucket; older ones follow, and wrap around.
    first: u16,
    /// The age of the newest bucket with a count, if there is one.
    newest: u16,
    /// The age of the oldest bucket with a count, if there is one.
    oldest: u16,
}

impl CountRing {
    /// Counts of zero.
    pub(crate) fn new(buckets: usize) -> CountRing {
        CountRing { counts: vec![0; buckets].into(), sum: 0, first: 0, newest: 0, oldest: 0 }
    }

    /// All counts, newest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.counts.len()).map(|age| self.get(age))
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.counts)
    }

    /// Reads the counts of the newest bucket and of the oldest used one.
    #[inline]
    pub(crate) fn touch(&self) -> u64 {
        let ends = [0, self.oldest.into()];
        ends.iter().fold(0, |all, &age| all ^ u64::from(self.counts[self.index(age)]))
    }

    #[inline]
    fn index(&self, age: usize) -> usize {
        #[cfg(test)]
        tests::VISITED.set(tests::VISITED.get() + 1);
        let index = usize::from(self.first) + age;
        if index < self.counts.len() { index } else { index - self.counts.len() }
    }

    /// Drops the counts of all buckets from an age on.
    #[inline]
    fn drop_from(&mut self, age: usize) {
        for age in age.max(self.newest.into())..=self.oldest.into() {
            let index = self.index(age);
            self.sum -= u64::from(std::mem::take(&mut self.counts[index]));
        }
    }

    /// Moves the ages of the newest and oldest bucket with a count past buckets whose count has become zero.
    #[inline]
    fn tighten(&mut self) {
        if self.sum > 0 {
            while self.get(self.newest.into()) == 0 {
                self.newest += 1;
            }
            while self.get(self.oldest.into()) == 0 {
                self.oldest -= 1;
            }
        }
    }
}

impl Counts for CountRing {
    const AGE_MAX: usize = BUCKETS_MAX as usize;

    #[inline]
    fn get(&self, age: usize) -> u32 {
        // Other buckets have no count, and their memory may not be cached.
        let is_used = (self.newest.into()..=self.oldest.into()).contains(&age);
        if is_used { self.counts[self.index(age)] } else { 0 }
    }

    #[inline]
    fn set(&mut self, age: usize, count: u32) {
        if self.sum == 0 {
            (self.newest, self.oldest) = (age as u16, age as u16);
        }
        self.sum -= u64::from(self.get(age));
        self.sum += u64::from(count);
        let index = self.index(age);
        self.counts[index] = count;
        if count > 0 {
            self.newest = self.newest.min(age as u16);
            self.oldest = self.oldest.max(age as u16);
        } else {
            self.tighten();
        }
    }

    #[inline]
    fn shift(&mut self, steps: u64, age_max: usize) {
        if self.sum == 0 {
            // All counts are zero, so any bucket can be the newest.
            return;
        }
        if steps > age_max as u64 {
            return self.drop_from(0);
        }
        let steps = steps as usize;
        self.drop_from(age_max + 1 - steps);
        self.first = self.index(self.counts.len() - steps) as u16;
        self.newest = self.newest.saturating_add(steps as u16);
        self.oldest = self.oldest.saturating_add(steps as u16).min(age_max as u16);
        self.tighten();
    }

    #[inline]
    fn sum(&self, age_max: usize) -> u64 {
        if self.sum == 0 {
            return 0;
        }
        let older = (age_max + 1).max(self.newest.into())..=self.oldest.into();
        self.sum - older.map(|age| u64::from(self.get(age))).sum::<u64>()
    }

    #[inline]
    fn newest_used(&self) -> Option<usize> {
        (self.sum > 0).then_some(self.newest.into())
    }

    #[inline]
    fn oldest_used(&self) -> usize {
        self.oldest.into()
    }
}

/// Counts, newest first. More than the largest counter has are left out.
impl FromIterator<u32> for CountRing {
    fn from_iter<I: IntoIterator<Item = u32>>(counts: I) -> CountRing {
        let counts: Box<[u32]> = counts.into_iter().take(BUCKETS_MAX as usize + 1).collect();
        let sum = counts.iter().map(|&count| u64::from(count)).sum();
        let oldest = counts.len().saturating_sub(1) as u16;
        let mut ring = CountRing { counts, sum, first: 0, newest: 0, oldest };
        ring.tighten();
        ring
    }
}

/// Rings with the same counts are equal, wherever the newest bucket is.
impl PartialEq for CountRing {
    fn eq(&self, other: &CountRing) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for CountRing {}

impl fmt::Debug for CountRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::{Algorithm, Counter, CounterState, EdgePolicy, Limit, Time};

    thread_local! {
        /// The buckets that rings of this thread have visited.
        pub(super) static VISITED: Cell<u64> = const { Cell::new(0) };
    }

    const SECOND: u64 = 1_000_000_000;

    fn counter(limit: u32, seconds: u64, buckets: u32, edge: EdgePolicy) -> Counter {
        let window = Duration::from_secs(seconds);
        match Limit::sliding_window_counter(limit, window, buckets, edge) {
            Ok(Limit::Counter(counter)) => counter,
            other => unreachable!("{other:?}"),
        }
    }

    /// The visited buckets per decision of a counter with one bucket a second, which gets a request of `cost` every
    /// `gap` seconds.
    fn visits_per_decision(limit: u32, buckets: u32, gap: u64, cost: u32) -> u64 {
        let counter = counter(limit, u64::from(buckets), buckets, EdgePolicy::Weigh);
        let mut state = counter.fresh();
        let before = VISITED.get();
        let decisions = 10_000;
        for number in 0..decisions {
            counter.decide(
                &mut state,
                Time::from_nanos(1_700_000_000 * SECOND + number * gap * SECOND / 10),
                cost,
            );
        }
        (VISITED.get() - before) / decisions
    }

    #[test]
    fn decisions_do_not_visit_all_buckets() {
        // Allowed: with requests in every bucket, in few buckets, and after the window.
        for gap in [1, 10, 300, 3_000, 20_000] {
            let passed = (gap / 10).min(1024);
            let visits = visits_per_decision(1_000_000, 1024, gap, 1);
            assert!(visits <= 16 + 3 * passed, "{visits} for a gap of {passed} buckets");
        }
        // Denied: all of the budget is in one bucket, or in a few.
        for (limit, cost) in [(1, 1), (100, 1), (100, 20), (7, 3)] {
            let visits = visits_per_decision(limit, 1024, 1, cost);
            assert!(visits <= 32, "{visits} for a limit of {limit} and a cost of {cost}");
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Set(usize, u32),
        Shift(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let set = (0_usize..9, prop_oneof![Just(0), 1_u32..4, Just(u32::MAX)])
            .prop_map(|(age, count)| Step::Set(age, count));
        let shift = prop_oneof![0_u64..12, Just(u64::MAX)].prop_map(Step::Shift);
        vec(prop_oneof![set, shift], 0..60)
    }

    proptest! {
        #![proptest_config(testbed::property::cases(10_000))]

        #[test]
        fn ring_holds_the_counts_of_an_array(steps in steps(), age_max in 1_usize..9) {
            let (mut ring, mut array) = (CountRing::new(9), [0; 9]);
            for step in steps {
                match step {
                    Step::Set(age, count) => {
                        ring.set(age.min(age_max), count);
                        array.set(age.min(age_max), count);
                    }
                    Step::Shift(steps) => {
                        ring.shift(steps, age_max);
                        array.shift(steps, age_max);
                    }
                }
                prop_assert_eq!(ring.iter().collect::<Vec<_>>(), array);
                prop_assert_eq!(&ring, &array.into_iter().collect::<CountRing>());
                for age in 0..9 {
                    prop_assert_eq!(ring.get(age), array.get(age));
                    prop_assert_eq!(ring.sum(age), array.sum(age));
                }
                prop_assert_eq!(ring.newest_used(), array.newest_used());
                let oldest = array.iter().rposition(|&count| count > 0);
                prop_assert!(oldest.is_none_or(|oldest| oldest == ring.oldest_used()));
            }
        }

        /// Requests of both layouts, in any order of time, have equal decisions and leave equal counts.
        #[test]
        fn ring_decides_like_an_array(
            requests in vec((0_u64..40, 0_u32..6, 0_u8..5), 0..40),
            buckets in 1_u32..9,
            limit in 1_u32..12,
            edge in prop::sample::select(vec![EdgePolicy::Weigh, EdgePolicy::Drop, EdgePolicy::Keep]),
        ) {
            let counter = counter(limit, 7, buckets, edge);
            let mut ring = counter.fresh();
            let mut array = CounterState { newest: 0, counts: [0; 9] };
            for (quarter, cost, call) in requests {
                let now = Time::from_nanos(1_000 * SECOND + quarter * SECOND / 4);
                match call {
                    0 => {
                        counter.refund_on(&mut ring, now, cost, None);
                        counter.refund_on(&mut array, now, cost, None);
                    }
                    1 => {
                        counter.refund_on(&mut ring, now, cost, Some(now));
                        counter.refund_on(&mut array, now, cost, Some(now));
                    }
                    2 => prop_assert_eq!(counter.peek_on(&ring, now, cost), counter.peek_on(&array, now, cost)),
                    3 => {
                        prop_assert_eq!(counter.is_fresh_on(&ring, now), counter.is_fresh_on(&array, now));
                        let mut decided = array.clone();
                        prop_assert_eq!(counter.peek_on(&ring, now, cost).allowed, counter.decide_on(&mut decided, now, cost).allowed);
                    }
                    _ => prop_assert_eq!(
                        counter.decide_on(&mut ring, now, cost),
                        counter.decide_on(&mut array, now, cost)
                    ),
                }
                let counts = |ages: Vec<u32>| ages.into_iter().take(buckets as usize + 1).collect::<Vec<_>>();
                prop_assert_eq!(counts(ring.counts.iter().collect()), counts(array.counts.to_vec()));
            }
        }
    }
}
