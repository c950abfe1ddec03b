//! Keys as Redis knows them: a name that says nothing about its owner.

use std::fmt::Write as _;
use std::hash::{Hash, Hasher};

use siphasher::sip128::{Hasher128, SipHasher24};

use crate::store::Key;

/// Hashes keys with the deployment's secret. Every process with the same secret gives a key the same name.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    hasher: SipHasher24,
    /// `rate_limit:<algorithm>:{` and the name of the limit, for each limit.
    limits: Box<[(String, u128)]>,
}

impl Names {
    /// The names of these limits' keys: each with its algorithm and its own name.
    pub(crate) fn new<'a>(secret: &[u8], limits: impl Iterator<Item = (&'static str, &'a str)>) -> Names {
        let hasher = SipHasher24::new_with_key(&hash(&SipHasher24::new(), secret).to_le_bytes());
        let limits = limits
            .map(|(algorithm, name)| (format!("rate_limit:{algorithm}:{{"), hash(&hasher, name.as_bytes())));
        Names { limits: limits.collect(), hasher }
    }

    pub(crate) fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        let mut hasher = Portable(self.hasher);
        key.hash(&mut hasher);
        Key(hasher.0.finish128().as_u128())
    }

    /// `rate_limit:<algorithm>:{<hash>}`. The braces are Redis Cluster's: what is in them names the slot.
    pub(crate) fn name(&self, limit: usize, key: Key) -> String {
        let (prefix, limit) = &self.limits[limit];
        let mut hasher = self.hasher;
        hasher.write(&limit.to_le_bytes());
        hasher.write(&key.0.to_le_bytes());
        let mut name = String::with_capacity(prefix.len() + 33);
        name.push_str(prefix);
        // Writing to a string cannot fail.
        let _ = write!(name, "{:032x}}}", hasher.finish128().as_u128());
        name
    }
}

fn hash(hasher: &SipHasher24, bytes: &[u8]) -> u128 {
    let mut hasher = *hasher;
    hasher.write(bytes);
    hasher.finish128().as_u128()
}

/// Numbers hash as little-endian bytes and sizes as 64 bits, so that machines of any kind agree.
struct Portable(SipHasher24);

macro_rules! portable {
    ($($write:ident $number:ty),*) => {
        $(fn $write(&mut self, number: $number) {
            self.0.write(&number.to_le_bytes());
        })*
    };
}

impl Hasher for Portable {
    fn finish(&self) -> u64 {
        self.0.finish()
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    portable!(write_u8 u8, write_u16 u16, write_u32 u32, write_u64 u64, write_u128 u128);
    portable!(write_i8 i8, write_i16 i16, write_i32 i32, write_i64 i64, write_i128 i128);

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_i64(number as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(secret: &str) -> Names {
        Names::new(secret.as_bytes(), [("fixed_window", "per-user"), ("fixed_window", "other")].into_iter())
    }

    /// These names must not change: a running deployment's counters are behind them.
    #[test]
    fn a_name_is_the_same_in_every_process() {
        let names = names("secret");
        let name = names.name(0, names.key("alice"));
        assert_eq!(name, "rate_limit:fixed_window:{6f59e0215111bf89da84465d79c59617}");
    }

    #[test]
    fn names_differ_by_secret_limit_and_key() {
        let (a, b) = (names("a"), names("b"));
        let all = [
            a.name(0, a.key("alice")),
            a.name(1, a.key("alice")),
            a.name(0, a.key("bob")),
            b.name(0, b.key("alice")),
            a.name(0, a.key(&("al", "ice"))),
            a.name(0, a.key(&7_u32)),
            a.name(0, a.key(&7_u64)),
        ];
        for (i, name) in all.iter().enumerate() {
            assert!(!all[..i].contains(name), "{name} twice");
            assert!(name.ends_with('}') && !name.contains("alice"), "{name}");
        }
    }
}
