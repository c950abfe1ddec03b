//! The keys, and the order in which requests use them.
//!
//! A server has just read a request's key when it calls the limiter, so the key is cached. The streams here lie in
//! memory in the order in which they are read, with the same effect: the benchmark measures the limiter's memory
//! accesses, not the caller's.
#![allow(clippy::float_arithmetic, reason = "a popularity curve; nothing is decided by it")]

/// A key of a contender's table.
pub(crate) trait Key: Clone + Send + Sync {
    /// Returns the key with this number; different numbers give different keys.
    fn numbered(number: u64) -> Self;
}

impl Key for u64 {
    fn numbered(number: u64) -> u64 {
        mix(number)
    }
}

/// Sixteen bytes of text.
impl Key for String {
    fn numbered(number: u64) -> String {
        format!("{:016x}", mix(number))
    }
}

/// Returns the first `keys` keys.
pub(crate) fn population<K: Key>(keys: usize) -> Vec<K> {
    (0..keys as u64).map(K::numbered).collect()
}

/// How often each key is requested.
pub(crate) enum Popularity {
    Uniform,
    /// The key of rank r is requested in proportion to 1 / r.
    Zipf,
}

/// Returns `requests` key numbers below `keys`, deterministic for a `seed`.
pub(crate) fn requests(popularity: &Popularity, keys: usize, requests: usize, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    match popularity {
        Popularity::Uniform => (0..requests).map(|_| random.below(keys)).collect(),
        Popularity::Zipf => {
            let mut shares = Vec::with_capacity(keys);
            let mut sum = 0.0;
            for rank in 1..=keys {
                sum += 1.0 / rank as f64;
                shares.push(sum);
            }
            let by_rank = shuffled(keys);
            (0..requests)
                .map(|_| {
                    let point = random.unit() * sum;
                    let rank = shares.partition_point(|&share| share <= point);
                    by_rank[rank.min(keys - 1)]
                })
                .collect()
        }
    }
}

/// Returns the keys with these numbers, stored in this order.
pub(crate) fn stream<K: Key>(numbers: &[u32]) -> Vec<K> {
    numbers.iter().map(|&number| K::numbered(u64::from(number))).collect()
}

/// Returns the numbers below `keys` in an order unrelated to that of insertion, so that popular keys are not adjacent
/// in any table. Identical for all workers.
fn shuffled(keys: usize) -> Vec<u32> {
    let mut random = Random(0);
    let mut numbers: Vec<u32> = (0..keys as u32).collect();
    for last in (1..keys).rev() {
        numbers.swap(last, random.below(last + 1) as usize);
    }
    numbers
}

/// `SplitMix64`: small, and random enough to pick keys.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `bound`, which must fit 32 bits.
    fn below(&mut self, bound: usize) -> u32 {
        ((u128::from(self.next()) * bound as u128) >> 64) as u32
    }

    /// Returns a number in [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Scatters a number over 64 bits, one to one.
fn mix(number: u64) -> u64 {
    let mut word = number;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zipf_requests_keys_in_proportion_to_their_share() {
        let keys = 1000;
        let mut counts = vec![0u32; keys];
        for number in requests(&Popularity::Zipf, keys, 100_000, 1) {
            counts[number as usize] += 1;
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        // The harmonic number of 1000 is 7.485: the first key has 13.4 % of the requests, the second half of that.
        assert!((12_900..13_900).contains(&counts[0]), "{}", counts[0]);
        assert!((6_200..7_200).contains(&counts[1]), "{}", counts[1]);
    }

    #[test]
    fn text_keys_are_sixteen_bytes_and_all_different() {
        let mut keys: Vec<String> = population(10_000);
        assert!(keys.iter().all(|key| key.len() == 16));
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 10_000);
    }
}
