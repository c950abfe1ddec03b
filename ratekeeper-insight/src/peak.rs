//! The most units allowed within any true sliding window: measured exactly, not estimated.

use std::collections::VecDeque;

/// One key's allowed units of the last window, for `LANES` limits that decide the same requests.
///
/// Windows are `(t - window, t]`. A line older than the key's newest one counts at the newest time, because a stream
/// cannot be sorted.
#[derive(Debug)]
pub(crate) struct PeakTracker<const LANES: usize> {
    /// Oldest first. Units that the same lanes allowed at one instant share an entry.
    entries: VecDeque<Entry>,
    units: [u64; LANES],
    max: [u64; LANES],
    /// Bits of the lanes for which an entry did not fit: their peak is a lower bound.
    cut: u32,
    /// True if a line was older than the newest one.
    is_late: bool,
}

/// Units allowed at one instant.
#[derive(Clone, Copy, Debug)]
struct Entry {
    at_ns: u64,
    units: u32,
    /// One bit per lane.
    lanes: u32,
}

/// The number of entries that all queues together may still allocate, beyond the first few of each queue.
#[derive(Debug)]
pub(crate) struct EntryBudget(pub(crate) usize);

const ENTRIES_FREE: usize = 4;
/// A queue with more capacity than this releases its memory when it is empty.
const ENTRIES_KEPT: usize = 64;

impl<const LANES: usize> Default for PeakTracker<LANES> {
    fn default() -> Self {
        PeakTracker { entries: VecDeque::new(), units: [0; LANES], max: [0; LANES], cut: 0, is_late: false }
    }
}

impl<const LANES: usize> PeakTracker<LANES> {
    /// Counts units that some of the lanes allowed.
    #[inline]
    pub(crate) fn add(
        &mut self,
        now_ns: u64,
        window_ns: u64,
        units: u32,
        allowed: [bool; LANES],
        budget: &mut EntryBudget,
    ) {
        let lanes = (0..LANES).fold(0, |lanes, lane| lanes | u32::from(allowed[lane]) << lane);
        let newest = self.entries.back().map_or(0, |entry| entry.at_ns);
        self.is_late |= now_ns < newest;
        let now_ns = now_ns.max(newest);
        while let Some(oldest) = self.entries.front().copied() {
            if now_ns - oldest.at_ns < window_ns {
                break;
            }
            self.expire(oldest);
            self.entries.pop_front();
        }
        if self.entries.is_empty() && self.entries.capacity() > ENTRIES_KEPT {
            budget.refund(&mut self.entries);
        }
        let entry = Entry { at_ns: now_ns, units, lanes };
        for lane in 0..LANES {
            self.units[lane] += entry.units_of(lane);
            self.max[lane] = self.max[lane].max(self.units[lane]);
        }
        let has_capacity = self.entries.len() < self.entries.capacity() || budget.extend(&mut self.entries);
        match self.entries.back_mut().and_then(|newest| Some((newest.joined(entry)?, newest))) {
            Some((joined, newest)) if newest.at_ns == now_ns => *newest = joined,
            _ if has_capacity => self.entries.push_back(entry),
            // Without capacity the units expire with an older entry, or immediately (below): too early in both cases.
            Some((joined, newest)) => {
                *newest = joined;
                self.cut |= lanes;
            }
            None => {
                self.expire(entry);
                self.cut |= lanes;
            }
        }
    }

    #[inline]
    fn expire(&mut self, entry: Entry) {
        for lane in 0..LANES {
            self.units[lane] -= entry.units_of(lane);
        }
    }

    /// Reads the memory that [`add`](Self::add) needs first, so that it is cached; the value has no meaning.
    #[inline]
    pub(crate) fn touch(&self) -> u64 {
        self.max[LANES - 1] ^ self.entries.len() as u64
    }

    /// Reads the memory that [`add`](Self::add) needs next.
    #[inline]
    pub(crate) fn touch_entries(&self) -> u64 {
        match (self.entries.front(), self.entries.back()) {
            (Some(oldest), Some(newest)) => oldest.at_ns ^ newest.at_ns,
            _ => 0,
        }
    }

    pub(crate) fn peak(&self, lane: usize) -> Peak {
        Peak { units: self.max[lane], is_cut: self.cut >> lane & 1 == 1, is_late: self.is_late }
    }
}

impl Entry {
    #[inline]
    fn units_of(self, lane: usize) -> u64 {
        u64::from(self.units) * u64::from(self.lanes >> lane & 1)
    }

    /// Returns the sum at this entry's time, if the same lanes allowed both.
    #[inline]
    fn joined(self, other: Entry) -> Option<Entry> {
        let units = self.units.checked_add(other.units)?;
        (self.lanes == other.lanes).then_some(Entry { units, ..self })
    }
}

impl EntryBudget {
    fn extend(&mut self, entries: &mut VecDeque<Entry>) -> bool {
        if entries.capacity() == 0 {
            entries.reserve_exact(ENTRIES_FREE);
            return true;
        }
        let more = entries.capacity();
        let is_granted = more <= self.0;
        if is_granted {
            entries.reserve_exact(more);
            self.0 -= more;
        }
        is_granted
    }

    fn refund(&mut self, entries: &mut VecDeque<Entry>) {
        let before = entries.capacity();
        entries.shrink_to(ENTRIES_FREE);
        self.0 += before - entries.capacity();
    }
}

/// A peak, and whether it is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peak {
    pub(crate) units: u64,
    pub(crate) is_cut: bool,
    pub(crate) is_late: bool,
}

impl Peak {
    /// Returns the larger peak; it is inexact if either is.
    pub(crate) fn max(self, other: Peak) -> Peak {
        Peak {
            units: self.units.max(other.units),
            is_cut: self.is_cut || other.is_cut,
            is_late: self.is_late || other.is_late,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn peak_of(requests: &[(u64, u32)], window: u64, budget: usize) -> Peak {
        let (mut peak, mut budget) = (PeakTracker::default(), EntryBudget(budget));
        for (at, units) in requests {
            peak.add(*at, window, *units, [true], &mut budget);
        }
        peak.peak(0)
    }

    #[test]
    fn window_excludes_its_oldest_instant() {
        assert_eq!(peak_of(&[(0, 1), (10, 1)], 10, 100).units, 1);
        assert_eq!(peak_of(&[(0, 1), (9, 1)], 10, 100).units, 2);
        assert_eq!(peak_of(&[(0, 5), (0, 5), (15, 5)], 10, 100).units, 10);
    }

    #[test]
    fn peak_is_a_lower_bound_when_entries_run_out() {
        let requests: Vec<_> = (0..1000).map(|at| (at, 1)).collect();
        let exact = peak_of(&requests, 500, 1000);
        assert_eq!(exact, Peak { units: 500, is_cut: false, is_late: false });
        let cut = peak_of(&requests, 500, 16);
        assert!(cut.is_cut && cut.units <= 500, "{cut:?}");
    }

    #[test]
    fn late_line_counts_at_the_newest_time() {
        assert_eq!(peak_of(&[(20, 1), (5, 1)], 10, 100), Peak { units: 2, is_cut: false, is_late: true });
    }

    proptest! {
        #![proptest_config(testbed::property::cases(256))]

        /// Lanes that share a queue have the same peaks as with separate queues.
        #[test]
        fn lanes_sharing_a_queue_stay_independent(
            mut requests in prop::collection::vec((0_u64..300, 1_u32..4, prop::array::uniform3(any::<bool>())), 1..300),
            window in 1_u64..100,
            budget in prop_oneof![Just(usize::MAX), 0_usize..32],
        ) {
            requests.sort_unstable();
            let (mut peak, mut left) = (PeakTracker::<3>::default(), EntryBudget(budget));
            for (at, units, allowed) in &requests {
                peak.add(*at, window, *units, *allowed, &mut left);
            }
            for lane in 0..3 {
                let own: Vec<_> =
                    requests.iter().filter(|(.., allowed)| allowed[lane]).map(|(at, units, _)| (*at, *units)).collect();
                let (alone, shared) = (peak_of(&own, window, usize::MAX), peak.peak(lane));
                prop_assert!(shared == alone || (shared.is_cut && shared.units <= alone.units), "{shared:?} {alone:?}");
                prop_assert!(!shared.is_cut || budget < usize::MAX);
            }
        }

        #[test]
        fn peak_is_the_largest_of_all_windows(
            mut requests in prop::collection::vec((0_u64..300, 0_u32..4), 1..300),
            window in 1_u64..100,
        ) {
            requests.sort_unstable();
            let in_window = |end: u64| -> u64 {
                requests.iter().filter(|(at, _)| *at <= end && end - at < window).map(|(_, n)| u64::from(*n)).sum()
            };
            let largest = requests.iter().map(|(at, _)| in_window(*at)).max().unwrap_or(0);
            prop_assert_eq!(peak_of(&requests, window, usize::MAX).units, largest);
        }
    }
}
