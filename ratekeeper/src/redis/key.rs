//! Names of keys in Redis: keyed hashes, so that a name does not reveal the key.

use std::fmt;
use std::hash::{Hash, Hasher};

use siphasher::sip128::{Hasher128, SipHasher24};

use crate::store::Key;

/// Hashes keys with the deployment's secret. Processes with the same secret give a key the same name.
#[derive(Clone)]
pub(crate) struct Names {
    hasher: SipHasher24,
    namespace: u128,
    /// The text before and after the hash, for each limit.
    limits: Box<[(String, String)]>,
}

impl fmt::Debug for Names {
    /// Omits the hasher, which contains the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Names").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Names {
    /// Takes each limit's algorithm, name (if any) and scale. Limits of different scales have different names, so
    /// that a state is never misread.
    pub(crate) fn new<'a>(
        secret: &[u8],
        namespace: &str,
        limits: impl Iterator<Item = (&'static str, Option<&'a str>, Vec<u8>)>,
    ) -> Names {
        let hasher = SipHasher24::new_with_key(&hash(&SipHasher24::new(), secret).to_le_bytes());
        let limits = limits.enumerate().map(|(index, (algorithm, name, scale))| {
            let short = |bytes: &[u8]| hash(&hasher, bytes) as u32;
            let behind = match (name, index) {
                (Some(name), _) => {
                    // The length prefix separates the name from the scale.
                    let whole = [&(name.len() as u64).to_le_bytes(), name.as_bytes(), &scale].concat();
                    format!("}}:{:016x}", hash(&hasher, &whole) as u64)
                }
                (None, 0) => format!("}}:{:08x}", short(&scale)),
                (None, _) => format!("}}:{:08x}:{}", short(&scale), index + 1),
            };
            (format!("rate_limit:{algorithm}:{{"), behind)
        });
        Names { limits: limits.collect(), namespace: hash(&hasher, namespace.as_bytes()), hasher }
    }

    /// Whether the keys of a limit have the same names in `other`.
    pub(crate) fn are_same(&self, limit: usize, other: &Names, number: usize) -> bool {
        self.limits.get(limit) == other.limits.get(number)
    }

    pub(crate) fn key<K: Hash + ?Sized>(&self, key: &K) -> Key {
        let mut hasher = PortableHasher(self.hasher);
        key.hash(&mut hasher);
        Key(hasher.0.finish128().as_u128())
    }

    /// The key names of the records: due times, values, and the prefix of tombstones for removed records.
    pub(crate) fn records(&self) -> Vec<String> {
        ["due", "records", "gone"].map(|op| format!("rate_limit:{op}:{{{:032x}}}", self.namespace)).into()
    }

    fn in_namespace(&self, bytes: &[u8]) -> u128 {
        let mut hasher = self.hasher;
        hasher.write(&self.namespace.to_le_bytes());
        hasher.write(bytes);
        hasher.finish128().as_u128()
    }

    /// 256 bits that cannot be computed without the secret.
    pub(crate) fn derived(&self, purpose: &str) -> [u8; 32] {
        let mut derived = [0; 32];
        for (number, half) in (0_u8..).zip(derived.chunks_mut(16)) {
            let whole = [&[number], b"derived ".as_slice(), purpose.as_bytes()].concat();
            half.copy_from_slice(&hash(&self.hasher, &whole).to_le_bytes());
        }
        derived
    }

    /// The key name of one claimed record.
    pub(crate) fn record(&self, name: &str) -> String {
        format!("rate_limit:record:{{{:032x}}}", self.in_namespace(name.as_bytes()))
    }

    /// The key name of an inline limit. The length prefix is one that no limit name has, so names never collide.
    pub(crate) fn inline_name(&self, algorithm: &str, scale: &[u8], key: Key) -> String {
        let whole = [&u64::MAX.to_le_bytes(), scale].concat();
        let (key, whole) = (self.in_namespace(&key.0.to_le_bytes()), hash(&self.hasher, &whole) as u64);
        format!("rate_limit:{algorithm}:{{{key:032x}}}:{whole:016x}")
    }

    /// `rate_limit:<algorithm>:{<hash>}`, followed by a hash of the limit's scale, with `:2` for the second limit and
    /// so on; or, for a named limit, by a hash of its name and scale. The braces are Redis Cluster's hash tag: all
    /// limits of a key share a hash slot and can be charged atomically.
    pub(crate) fn name(&self, limit: usize, key: Key) -> String {
        let (before, behind) = &self.limits[limit];
        let mut name = String::with_capacity(before.len() + 32 + behind.len());
        name.push_str(before);
        push_hex(&mut name, self.in_namespace(&key.0.to_le_bytes()));
        name.push_str(behind);
        name
    }
}

/// Appends 32 hexadecimal digits. Formatting with `{:032x}` takes many times as many instructions.
fn push_hex(text: &mut String, number: u128) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut digits = [0; 32];
    for (pair, byte) in digits.chunks_exact_mut(2).zip(number.to_be_bytes()) {
        pair.copy_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 0xf)]]);
    }
    text.push_str(str::from_utf8(&digits).unwrap_or_default());
}

fn hash(hasher: &SipHasher24, bytes: &[u8]) -> u128 {
    let mut hasher = *hasher;
    hasher.write(bytes);
    hasher.finish128().as_u128()
}

/// Hashes integers as little-endian bytes and sizes as 64 bits, so that all platforms agree.
struct PortableHasher(SipHasher24);

macro_rules! portable {
    ($($write:ident $number:ty),*) => {
        $(fn $write(&mut self, number: $number) {
            self.0.write(&number.to_le_bytes());
        })*
    };
}

impl Hasher for PortableHasher {
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

    fn names(secret: &str, namespace: &str) -> Names {
        let limits = [None, None, Some("per-user")].map(|name| ("fixed_window", name, vec![3]));
        Names::new(secret.as_bytes(), namespace, limits.into_iter())
    }

    /// These names must not change: the counters of running deployments are stored under them.
    #[test]
    fn names_are_stable_across_versions() {
        let names = names("secret", "");
        let key = names.key("alice");
        assert_eq!(names.name(0, key), "rate_limit:fixed_window:{b3f4638a237b05602c1560722b71d66b}:0dd0b5b6");
        assert_eq!(
            names.name(1, key),
            "rate_limit:fixed_window:{b3f4638a237b05602c1560722b71d66b}:0dd0b5b6:2"
        );
    }

    #[test]
    fn names_differ_by_secret_namespace_limit_and_key() {
        let (a, b, c) = (names("a", ""), names("b", ""), names("a", "c"));
        let all = [
            a.name(0, a.key("alice")),
            a.name(1, a.key("alice")),
            a.name(2, a.key("alice")),
            a.name(0, a.key("bob")),
            b.name(0, b.key("alice")),
            c.name(0, c.key("alice")),
            a.name(0, a.key(&("al", "ice"))),
            a.name(0, a.key(&7_u32)),
            a.name(0, a.key(&7_u64)),
        ];
        for (i, name) in all.iter().enumerate() {
            assert!(!all[..i].contains(name), "{name} twice");
            assert!(name.starts_with("rate_limit:fixed_window:{") && !name.contains("alice"), "{name}");
        }
    }
}
