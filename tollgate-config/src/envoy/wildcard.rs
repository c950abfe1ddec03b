//! Patterns of values.

/// A text with stars, each of which stands for any characters, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wildcard {
    text: String,
    /// What a value must begin with, what it must end with, and what must stand between, in this order.
    start: String,
    end: String,
    between: Vec<String>,
}

impl Wildcard {
    /// A pattern, if there is a star in the text.
    pub fn new(text: &str) -> Option<Wildcard> {
        let (start, rest) = text.split_once('*')?;
        let (between, end) = rest.rsplit_once('*').unwrap_or(("", rest));
        let between = between.split('*').filter(|part| !part.is_empty()).map(str::to_owned).collect();
        Some(Wildcard { text: text.to_owned(), start: start.to_owned(), end: end.to_owned(), between })
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether a value fits, in a time that grows as the value does. Each part is taken where it stands first: whatever
    /// fits behind a later place also fits behind that one, so nothing is tried twice.
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
    fn a_star_stands_for_any_characters_or_none() {
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

    /// What a pattern means, said in the plainest way: slow, and right.
    fn means(pattern: &[u8], value: &[u8]) -> bool {
        match (pattern, value) {
            ([], _) => value.is_empty(),
            ([b'*', rest @ ..], _) => (0..=value.len()).any(|from| means(rest, &value[from..])),
            ([wanted, rest @ ..], [first, others @ ..]) => wanted == first && means(rest, others),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn it_fits_what_it_means(pattern in "[ab*]{0,8}", value in "[ab]{0,10}") {
            if let Some(wildcard) = Wildcard::new(&pattern) {
                prop_assert_eq!(wildcard.fits(&value), means(pattern.as_bytes(), value.as_bytes()));
            }
        }
    }

    /// Where parts were tried anew at each place, this would not end.
    #[test]
    fn a_long_value_takes_no_time() {
        let (pattern, value) = ("a*".repeat(5_000) + "b*", "a".repeat(1_000_000));
        assert!(!fits(&pattern, &value));
        assert!(fits(&pattern, &(value + "b")));
    }
}
