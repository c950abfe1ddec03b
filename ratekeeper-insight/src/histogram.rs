//! Counts over time for a trace of unknown length: when the bins run out, adjacent bins are merged into longer ones.

use std::collections::VecDeque;
use std::time::Duration;

/// Counts of `ROWS` series in bins of equal length, aligned to the epoch.
#[derive(Debug)]
pub(crate) struct Histogram<const ROWS: usize> {
    /// Index of the bin length in [`BIN_NS`].
    length: usize,
    /// Number of the first bin, counted from the epoch.
    first: u64,
    bins: VecDeque<[u64; ROWS]>,
    /// Start and index of the last request's bin, which is usually the next request's bin too.
    last_from_ns: u64,
    last: usize,
}

const BINS_MAX: usize = 8192;

const US: u64 = 1_000;
const MS: u64 = 1_000 * US;
const SEC: u64 = 1_000 * MS;
const MIN: u64 = 60 * SEC;
const HOUR: u64 = 60 * MIN;
const DAY: u64 = 24 * HOUR;

/// Bin lengths. Each is a multiple of the previous one, so merging is exact; the longest covers 1970 to 2262.
const BIN_NS: [u64; 21] = [
    US,
    10 * US,
    100 * US,
    MS,
    10 * MS,
    50 * MS,
    100 * MS,
    500 * MS,
    SEC,
    5 * SEC,
    15 * SEC,
    30 * SEC,
    MIN,
    5 * MIN,
    15 * MIN,
    30 * MIN,
    HOUR,
    6 * HOUR,
    12 * HOUR,
    DAY,
    7 * DAY,
];

/// A unit of time, and its multiples that read as round lengths.
type Lengths = [(u64, &'static [u64]); 6];

/// Column lengths, spaced closely enough that a chart uses nearly all of its width.
const COLUMN: Lengths = [
    (US, &[1, 2, 4, 5, 8, 10, 20, 40, 50, 80, 100, 200, 400, 500, 800]),
    (MS, &[1, 2, 4, 5, 8, 10, 20, 40, 50, 80, 100, 200, 400, 500, 800]),
    (SEC, &[1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 40, 60, 90]),
    (MIN, &[2, 3, 4, 5, 6, 8, 10, 15, 20, 30]),
    (HOUR, &[1, 2, 3, 4, 6, 8, 12]),
    (DAY, &[1, 2, 4, 7, 14, 28, 56, 91, 182, 364, 728, 3_640, 36_400]),
];

/// Distances between two ticks of an axis.
const MARK: Lengths = [
    (US, &[1, 2, 5, 10, 20, 50, 100, 200, 500]),
    (MS, &[1, 2, 5, 10, 20, 50, 100, 200, 500]),
    (SEC, &[1, 2, 5, 10, 15, 20, 30]),
    (MIN, &[1, 2, 5, 10, 15, 20, 30]),
    (HOUR, &[1, 2, 3, 6, 12]),
    (DAY, &[1, 2, 4, 7, 14, 28, 56, 182, 364, 728, 3_640, 36_400, 364_000]),
];

/// Returns the lengths that are multiples of `part_ns`, shortest first.
fn multiples_of(part_ns: u64, lengths: Lengths) -> impl Iterator<Item = u64> {
    lengths
        .into_iter()
        .flat_map(|(unit, multiples)| multiples.iter().map(move |multiple| unit.saturating_mul(*multiple)))
        .filter(move |length| length.is_multiple_of(part_ns))
}

/// Returns the shortest round distance between ticks that spans at least `columns_min` columns.
pub(crate) fn mark_ns(column_ns: u64, columns_min: u64) -> u64 {
    let wanted = column_ns.saturating_mul(columns_min);
    multiples_of(column_ns, MARK).find(|length| *length >= wanted).unwrap_or(wanted)
}

/// The counts per chart column.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Columns<const ROWS: usize> {
    pub(crate) start_ns: u64,
    pub(crate) length: Duration,
    pub(crate) counts: Vec<[u64; ROWS]>,
}

impl<const ROWS: usize> Columns<ROWS> {
    /// Returns two of the series.
    pub(crate) fn pair(&self, first: usize, second: usize) -> Columns<2> {
        let counts = self.counts.iter().map(|counts| [counts[first], counts[second]]).collect();
        Columns { start_ns: self.start_ns, length: self.length, counts }
    }
}

impl<const ROWS: usize> Default for Histogram<ROWS> {
    fn default() -> Self {
        Histogram { length: 0, first: 0, bins: VecDeque::new(), last_from_ns: 0, last: 0 }
    }
}

impl<const ROWS: usize> Histogram<ROWS> {
    #[inline]
    pub(crate) fn add(&mut self, at_ns: u64, counts: [u64; ROWS]) {
        let is_same_bin =
            at_ns.wrapping_sub(self.last_from_ns) < BIN_NS[self.length] && !self.bins.is_empty();
        if !is_same_bin {
            self.seek(at_ns);
        }
        let bin = &mut self.bins[self.last];
        for row in 0..ROWS {
            bin[row] += counts[row];
        }
    }

    /// Creates the bin of an instant, merging bins if needed, and makes it the current one.
    fn seek(&mut self, at_ns: u64) {
        if self.bins.is_empty() {
            self.first = at_ns / BIN_NS[self.length];
            self.bins.push_back([0; ROWS]);
        }
        loop {
            let wanted = at_ns / BIN_NS[self.length];
            let end = (self.first + self.bins.len() as u64).max(wanted + 1);
            let reach = end - self.first.min(wanted);
            if reach <= BINS_MAX as u64 || self.length + 1 == BIN_NS.len() {
                for _ in wanted..self.first {
                    self.bins.push_front([0; ROWS]);
                }
                self.first = self.first.min(wanted);
                self.bins.resize(reach as usize, [0; ROWS]);
                self.last = (wanted - self.first) as usize;
                self.last_from_ns = wanted * BIN_NS[self.length];
                return;
            }
            self.join();
        }
    }

    /// Merges the bins into bins of the next length.
    fn join(&mut self) {
        let factor = BIN_NS[self.length + 1] / BIN_NS[self.length];
        let mut joined: VecDeque<[u64; ROWS]> = VecDeque::new();
        for (number, bin) in (self.first..).zip(&self.bins) {
            let into = (number / factor - self.first / factor) as usize;
            joined.resize(into + 1, [0; ROWS]);
            for row in 0..ROWS {
                joined[into][row] += bin[row];
            }
        }
        self.bins = joined;
        self.first /= factor;
        self.length += 1;
    }

    /// Returns at most `columns_max` columns of a round length.
    pub(crate) fn columns(&self, columns_max: usize) -> Columns<ROWS> {
        let bin_ns = BIN_NS[self.length];
        let (start, end) = (self.first, self.first + self.bins.len() as u64);
        let fits = |bins: u64| end.div_ceil(bins) - start / bins <= columns_max as u64;
        let bins = multiples_of(bin_ns, COLUMN).map(|length| length / bin_ns).find(|bins| fits(*bins));
        let bins = bins.unwrap_or(end);
        let mut counts = vec![[0; ROWS]; (end.div_ceil(bins) - start / bins) as usize];
        for (number, bin) in (start..).zip(&self.bins) {
            for row in 0..ROWS {
                counts[(number / bins - start / bins) as usize][row] += bin[row];
            }
        }
        Columns {
            start_ns: (start / bins).saturating_mul(bins * bin_ns),
            length: Duration::from_nanos(bins * bin_ns),
            counts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ratekeeper::Time;

    #[test]
    fn each_bin_length_divides_the_next() {
        for pair in BIN_NS.windows(2) {
            assert!(pair[1].is_multiple_of(pair[0]), "{pair:?}");
        }
        assert!(Time::MAX.as_nanos() / BIN_NS[BIN_NS.len() - 1] < BINS_MAX as u64 * 2);
    }

    #[test]
    fn five_minutes_are_sixty_columns_of_five_seconds() {
        let mut histogram = Histogram::default();
        for second in 0..300 {
            histogram.add((1_700_000_100 + second) * SEC, [1, second % 2]);
        }
        let columns = histogram.columns(64);
        assert_eq!(columns.length, Duration::from_secs(5));
        assert_eq!(columns.start_ns, 1_700_000_100 * SEC);
        assert_eq!(columns.counts.len(), 60);
        assert!(columns.counts.iter().all(|[all, odd]| *all == 5 && (2..=3).contains(odd)));
    }

    proptest! {
        #![proptest_config(testbed::property::cases(256))]

        /// In any order of times, no count is lost and the numbers of bins and columns stay within their bounds.
        #[test]
        fn every_request_is_counted_in_its_column(
            times in prop::collection::vec(
                prop_oneof![0_u64..1_000_000, 0_u64..100_000_000_000_000, 0_u64..=Time::MAX.as_nanos()], 1..200),
            columns_max in 10_usize..200,
        ) {
            let mut histogram = Histogram::default();
            for at in &times {
                histogram.add(*at, [1]);
            }
            prop_assert!(histogram.bins.len() <= 2 * BINS_MAX);
            let columns = histogram.columns(columns_max);
            prop_assert!(columns.counts.len() <= columns_max);
            prop_assert_eq!(columns.counts.iter().map(|[count]| count).sum::<u64>(), times.len() as u64);
            let (start, length) = (columns.start_ns, columns.length.as_nanos() as u64);
            for (number, [count]) in (0..).zip(&columns.counts) {
                let from = start + number * length;
                let expected = times.iter().filter(|at| (from..from + length).contains(at)).count();
                prop_assert_eq!(*count, expected as u64);
            }
        }
    }
}
