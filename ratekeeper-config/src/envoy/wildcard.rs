//! Patterns of descriptor values.

/// A pattern in which each `*` matches any characters, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wildcard {
    text: String,
    /// The prefix and suffix of a matching value, and the parts between them, in order.
    start: String,
    end: String,
    between: Vec<String>,
}

impl Wildcard {
    /// Parses a pattern. Returns `None` if the text has no `*`.
    pub fn new(text: &str) -> Option<Wildcard> {
        let (start, rest) = text.split_once('*')?;
        let (between, end) = rest.rsplit_once('*').unwrap_or(("", rest));
        let between = between.split('*').filter(|part| !part.is_empty()).map(str::to_owned).collect();
        Some(Wildcard { text: text.to_owned(), start: start.to_owned(), end: end.to_owned(), between })
    }

    /// The text of the pattern.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether a value matches, in time linear in the length of the value. Each part is matched at its first
    /// occurrence: a later occurrence leaves less to match, so backtracking is not needed.
    pub fn fits(&self, value: &str) -> bool {
        let rest = value.strip_prefix(&*self.start).and_then(|rest| rest.strip_suffix(&*self.end));
        let Some(rest) = rest else { return false };
        let after = |rest, part: &String| str::split_once(rest, part.as_str()).map(|(_, after)| after);
        self.between.iter().try_fold(rest, after).is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fits(pattern: &str, value: &str) -> bool {
        Wildcard::new(pattern).unwrap().fits(value)
    }

    #[test]
    fn star_matches_any_characters_or_none() {
        for (pattern, fitting, others) in [
            ("*", &["", "a", "*", "\0"][..], &[][..]),
            ("**", &["", "a"], &[]),
            ("api/*", &["api/", "api/users"], &["api", "/api/users", "API/users"]),
            ("*.pdf", &[".pdf", "a.pdf", ".pdf.pdf"], &["a.pdf ", "pdf"]),
            ("a*a", &["aa", "aba", "aaa"], &["a", "ab", "ba"]),
            ("a*b*c", &["abc", "axbxc", "abbc", "acbc"], &["ac", "acb", "bac"]),
            ("*a*a*", &["aa", "xaxax"], &["a", "xax"]),
            ("ü*é", &["üé", "üxé"], &["é", "u\u{308}xé"]),
        ] {
            fitting.iter().for_each(|value| assert!(fits(pattern, value), "{pattern} {value:?}"));
            others.iter().for_each(|value| assert!(!fits(pattern, value), "{pattern} {value:?}"));
        }
        assert_eq!(Wildcard::new("plain"), None);
    }

    /// A reference implementation: simple and slow.
    fn means(pattern: &[u8], value: &[u8]) -> bool {
        match (pattern, value) {
            ([], _) => value.is_empty(),
            ([b'*', rest @ ..], _) => (0..=value.len()).any(|from| means(rest, &value[from..])),
            ([wanted, rest @ ..], [first, others @ ..]) => wanted == first && means(rest, others),
            _ => false,
        }
    }

    proptest! {
        #![proptest_config(testbed::property::cases(256))]

        #[test]
        fn matching_equals_the_reference_implementation(pattern in "[ab*]{0,8}", value in "[ab]{0,10}") {
            if let Some(wildcard) = Wildcard::new(&pattern) {
                prop_assert_eq!(wildcard.fits(&value), means(pattern.as_bytes(), value.as_bytes()));
            }
        }
    }

    /// An implementation with backtracking would not terminate in reasonable time.
    #[test]
    fn long_value_matches_in_linear_time() {
        let (pattern, value) = ("a*".repeat(5_000) + "b*", "a".repeat(1_000_000));
        assert!(!fits(&pattern, &value));
        assert!(fits(&pattern, &(value + "b")));
    }
}
