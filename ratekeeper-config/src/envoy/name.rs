//! The name of a descriptor's rule. Stores and metrics use it, so it must be unique and must not change while the
//! descriptor does not.

use std::fmt::Write as _;

use ratekeeper_rules::response::PolicyName;

/// Separators of key, value and hash.
const SEPARATORS: [char; 3] = ['.', '=', '~'];
/// Length of the hash with its separator.
const MARK_CHARS: usize = 17;

/// The path to a descriptor: the domain and each key with its value, such as `edge.remote_address.path=/login`.
///
/// A hash of the whole path is appended if the name would be too long, ambiguous, or contain characters other than
/// printable ASCII.
#[derive(Clone, Debug)]
pub(super) struct Path {
    /// The visible name, cut to the maximum length.
    shown: String,
    chars: usize,
    is_plain: bool,
    /// FNV-1a of all parts, each prefixed with its length. Not collision resistant: names come from one
    /// configuration.
    hash: u64,
}

impl Path {
    pub(super) fn of(domain: &str) -> Path {
        let nowhere = Path { shown: String::new(), chars: 0, is_plain: true, hash: 0xcbf2_9ce4_8422_2325 };
        nowhere.part(domain)
    }

    /// The path of a child descriptor. An empty value stands for any.
    pub(super) fn with(&self, key: &str, value: &str) -> Path {
        let path = self.clone().sign(SEPARATORS[0]).part(key);
        if value.is_empty() { path.part(value) } else { path.sign(SEPARATORS[1]).part(value) }
    }

    /// The name of the descriptor at this path.
    pub(super) fn name(&self) -> String {
        if self.is_plain && self.chars <= PolicyName::LENGTH_MAX {
            return self.shown.clone();
        }
        let mut marked: String = self.shown.chars().take(PolicyName::LENGTH_MAX - MARK_CHARS).collect();
        let _ = write!(marked, "{}{:016x}", SEPARATORS[2], self.hash);
        marked
    }

    fn sign(mut self, sign: char) -> Path {
        self.chars += 1;
        if self.chars <= PolicyName::LENGTH_MAX {
            self.shown.push(sign);
        }
        self
    }

    fn part(self, text: &str) -> Path {
        let bytes = (text.len() as u64).to_le_bytes();
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        let hash = bytes.iter().chain(text.as_bytes()).fold(self.hash, step);
        let is_seen = |c: char| c.is_ascii_graphic() && c != '"';
        let is_plain = text.chars().all(|c| is_seen(c) && !SEPARATORS.contains(&c));
        let path = Path { hash, is_plain: self.is_plain && is_plain, ..self };
        text.chars().map(|c| if is_seen(c) { c } else { '_' }).fold(path, Path::sign)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn of(domain: &str, path: &[(&str, &str)]) -> String {
        path.iter().fold(Path::of(domain), |path, (key, value)| path.with(key, value)).name()
    }

    /// Stores keep state under these names: if a name changes, its budgets are reset.
    #[test]
    fn names_are_readable_and_stable() {
        let long = "x".repeat(200);
        for (domain, path, name) in [
            ("edge", &[("remote_address", "")][..], "edge.remote_address"),
            ("edge", &[("plan", "gold"), ("path", "/a/*")], "edge.plan=gold.path=/a/*"),
            ("edge", &[("ip", "10.0.0.1")], "edge.ip=10.0.0.1~9b9840af06be6abf"),
            ("edge", &[("key", "a \u{e9}\n")], "edge.key=a___~5690142e7dad01e8"),
        ] {
            assert_eq!(of(domain, path), name);
        }
        let name = of("edge", &[("key", &long)]);
        assert!(name.len() == PolicyName::LENGTH_MAX && name.starts_with("edge.key=xxx"), "{name}");
    }

    #[test]
    fn different_descriptors_have_different_names() {
        let texts = ["", "a", "a.b", "b", "a=b", "=", ".", "~", "a b", "a\u{e9}b", "_"];
        let mut names = HashSet::new();
        let mut count = 0;
        for domain in texts {
            for key in texts {
                for value in texts {
                    names.insert(of(domain, &[(key, value)]));
                    names.insert(of(domain, &[(key, value), (value, key)]));
                    count += 2;
                }
            }
        }
        assert_eq!(names.len(), count);
        assert!(names.iter().all(|name| PolicyName::new(name).is_ok()));
    }
}
