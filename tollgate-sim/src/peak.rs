//! The most that passed within any true sliding window: what a limit promises, measured and not estimated.

use std::collections::VecDeque;

/// One key's admitted units of the last window.
///
/// Windows are `(t - window, t]`. A line whose time lies before the key's newest one counts at the newest: a stream
/// cannot be sorted.
#[derive(Debug, Default)]
pub(crate) struct Peak {
    /// Instant and units, oldest first; what passed at one instant is one entry.
    entries: VecDeque<(u64, u64)>,
    units: u64,
    most: u64,
    /// There was no room for an entry: the peak is at least what is shown.
    is_cut: bool,
    /// A line came whose time lies before the newest.
    is_late: bool,
}

/// How many entries all queues together may still reserve, beyond a few that each has for free.
#[derive(Debug)]
pub(crate) struct Room(pub(crate) usize);

const ENTRIES_FREE: usize = 4;
/// A queue this long gives its memory back when it has run empty.
const ENTRIES_KEPT: usize = 64;

impl Peak {
    #[inline]
    pub(crate) fn admit(&mut self, now_ns: u64, window_ns: u64, units: u32, room: &mut Room) {
        let newest = self.entries.back().map_or(0, |(at, _)| *at);
        self.is_late |= now_ns < newest;
        let now_ns = now_ns.max(newest);
        while let Some((at, gone)) = self.entries.front().copied() {
            if now_ns - at < window_ns {
                break;
            }
            self.units -= gone;
            self.entries.pop_front();
        }
        if self.entries.is_empty() && self.entries.capacity() > ENTRIES_KEPT {
            room.give_back(&mut self.entries);
        }
        self.units += u64::from(units);
        self.most = self.most.max(self.units);
        let has_room = self.entries.len() < self.entries.capacity() || room.extend(&mut self.entries);
        match self.entries.back_mut() {
            Some((at, there)) if *at == now_ns => *there += u64::from(units),
            Some((_, there)) if !has_room => {
                // They leave the window together with older ones, which is too early.
                *there += u64::from(units);
                self.is_cut = true;
            }
            _ => self.entries.push_back((now_ns, u64::from(units))),
        }
    }

    pub(crate) fn most(&self) -> Most {
        Most { units: self.most, is_cut: self.is_cut, is_late: self.is_late }
    }
}

impl Room {
    fn extend(&mut self, entries: &mut VecDeque<(u64, u64)>) -> bool {
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

    fn give_back(&mut self, entries: &mut VecDeque<(u64, u64)>) {
        let before = entries.capacity();
        entries.shrink_to(ENTRIES_FREE);
        self.0 += before - entries.capacity();
    }
}

/// A peak, and how sure it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Most {
    pub(crate) units: u64,
    pub(crate) is_cut: bool,
    pub(crate) is_late: bool,
}

impl Most {
    /// The larger of two, no surer than either.
    pub(crate) fn max(self, other: Most) -> Most {
        Most {
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

    fn peak_of(requests: &[(u64, u32)], window: u64, room: usize) -> Most {
        let (mut peak, mut room) = (Peak::default(), Room(room));
        for (at, units) in requests {
            peak.admit(*at, window, *units, &mut room);
        }
        peak.most()
    }

    #[test]
    fn the_window_is_open_at_its_old_end() {
        assert_eq!(peak_of(&[(0, 1), (10, 1)], 10, 100).units, 1);
        assert_eq!(peak_of(&[(0, 1), (9, 1)], 10, 100).units, 2);
        assert_eq!(peak_of(&[(0, 5), (0, 5), (15, 5)], 10, 100).units, 10);
    }

    #[test]
    fn without_room_the_peak_is_at_least_what_is_shown() {
        let requests: Vec<_> = (0..1000).map(|at| (at, 1)).collect();
        let exact = peak_of(&requests, 500, 1000);
        assert_eq!(exact, Most { units: 500, is_cut: false, is_late: false });
        let cut = peak_of(&requests, 500, 16);
        assert!(cut.is_cut && cut.units <= 500, "{cut:?}");
    }

    #[test]
    fn a_late_line_counts_at_the_newest_time() {
        assert_eq!(peak_of(&[(20, 1), (5, 1)], 10, 100), Most { units: 2, is_cut: false, is_late: true });
    }

    proptest! {
        #[test]
        fn it_is_the_largest_of_all_windows(
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
