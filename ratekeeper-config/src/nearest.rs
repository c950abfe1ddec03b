use strsim::osa_distance;

/// Longer than any known name, so further characters would only cost time.
pub(crate) const TYPED_CHARS_MAX: usize = 64;

/// The known name that `typed` most likely means, if one is close enough: at most a third of its characters may
/// differ.
pub fn nearest<'a>(typed: &str, known: &[&'a str]) -> Option<&'a str> {
    let typed: String = typed.chars().take(TYPED_CHARS_MAX).flat_map(char::to_lowercase).collect();
    let typed_length = typed.chars().count();
    let distance = |name: &'a str| {
        let length = name.chars().count();
        let is_close = |distance: usize| distance * 3 <= length.max(typed_length);
        // The difference of the lengths is a lower bound.
        let distance = is_close(length.abs_diff(typed_length)).then(|| osa_distance(&typed, name))?;
        is_close(distance).then_some((distance, name))
    };
    known.iter().filter_map(|name| distance(name)).min_by_key(|(distance, _)| *distance).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_names_are_found_and_unrelated_names_are_not() {
        let known = ["token_bucket", "leaky_bucket", "fixed_window", "s", "time", "key", "cost"];
        for (typed, expected) in [
            ("tokn_bucket", Some("token_bucket")),
            ("TokenBucket", Some("token_bucket")),
            ("fixedwindow", Some("fixed_window")),
            ("leaky-bucket", Some("leaky_bucket")),
            ("tiem", Some("time")),
            ("coast", Some("cost")),
            ("user", None),
            ("", None),
            ("x", None),
        ] {
            assert_eq!(nearest(typed, &known), expected, "{typed}");
        }
    }

    #[test]
    fn very_long_word_is_compared_in_bounded_time() {
        assert_eq!(nearest(&"x".repeat(1_000_000), &["time"]), None);
        let known = "y".repeat(1_000_000);
        assert_eq!(nearest("x", &[&known]), None);
    }

    #[test]
    fn nearest_of_many_names_is_found() {
        let many: Vec<String> = (0..1_000).map(|n| format!("limit-number-{n}")).collect();
        let known: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(nearest("limit-nmber-517", &known), Some("limit-number-517"));
    }
}
