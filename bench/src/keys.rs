//! What is asked for: the keys, and the order in which requests name them.
//!
//! A server has just read a request's key when it asks the limiter, so the key lies in the cache. The streams
//! here lie in memory in the order in which they are read, which has the same effect: what is measured is the
//! limiter's memory, not the caller's.
#![allow(clippy::float_arithmetic, reason = "a popularity curve; nothing is decided by it")]

/// A key of a contender's table.
pub(crate) trait Key: Clone + Send + Sync {
    /// The key with this number; different numbers give different keys.
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

/// All keys from number 0 on.
pub(crate) fn population<K: Key>(keys: usize) -> Vec<K> {
    (0..keys as u64).map(K::numbered).collect()
}

/// How often each key is asked for.
pub(crate) enum Popularity {
    Uniform,
    /// The key of rank r is asked for in proportion to 1 / r.
    Zipf,
}

/// `requests` numbers of keys below `keys`, the same for the same `seed`.
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

/// The keys that `numbers` name, laid out in that order.
pub(crate) fn stream<K: Key>(numbers: &[u32]) -> Vec<K> {
    numbers.iter().map(|&number| K::numbered(u64::from(number))).collect()
}

/// The numbers below `keys` in an order that has nothing to do with the order of insertion, so that popular keys
/// do not lie side by side in anyone's table. The same for all workers.
fn shuffled(keys: usize) -> Vec<u32> {
    let mut random = Random(0);
    let mut numbers: Vec<u32> = (0..keys as u32).collect();
    for last in (1..keys).rev() {
        numbers.swap(last, random.below(last + 1) as usize);
    }
    numbers
}

/// `SplitMix64`: small, and good enough to pick keys.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`, which fits 32 bits.
    fn below(&mut self, bound: usize) -> u32 {
        ((u128::from(self.next()) * bound as u128) >> 64) as u32
    }

    /// A number from 0 to below 1.
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
    fn zipf_asks_for_the_most_popular_key_as_often_as_its_share() {
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
