/// The known name that `typed` most likely means, if one is close enough: at most a third of its characters may
/// differ.
pub fn nearest<'a>(typed: &str, known: &[&'a str]) -> Option<&'a str> {
    let typed: Vec<char> = typed.chars().take(TYPED_CHARS_MAX).flat_map(char::to_lowercase).collect();
    let is_close = |distance: usize, length: usize| distance * 3 <= length.max(typed.len());
    let mut likely: Vec<(usize, Vec<char>, &str)> = Vec::new();
    for name in known {
        let length = name.chars().count();
        if is_close(length.abs_diff(typed.len()), length) {
            let letters: Vec<char> = name.chars().collect();
            let least = distance_at_least(&typed, &letters);
            if is_close(least, length) {
                likely.push((least, letters, name));
            }
        }
    }
    // Bounds the number of exact comparisons among many similar names.
    likely.sort_by_key(|(least, ..)| *least);
    likely.truncate(COMPARED_MAX);
    let compared = likely.iter().map(|(_, letters, name)| (distance(&typed, letters), letters.len(), *name));
    compared.filter(|(distance, length, _)| is_close(*distance, *length)).min_by_key(|it| it.0).map(|it| it.2)
}

/// Longer than any known name, so further characters would only cost time.
pub(crate) const TYPED_CHARS_MAX: usize = 64;
/// Maximum number of names compared exactly: those with the most characters in common.
const COMPARED_MAX: usize = 16;

/// A cheap lower bound of the distance: characters that only one of the two has.
fn distance_at_least(a: &[char], b: &[char]) -> usize {
    let mut counts = [0_i32; 128];
    let mut count = |letters: &[char], by: i32| {
        for letter in letters {
            // Characters that share a counter can only lower the bound.
            counts[*letter as usize % 128] += by;
        }
    };
    count(a, 1);
    count(b, -1);
    let of =
        |sign: i32| counts.iter().map(|count| (count * sign).max(0).unsigned_abs() as usize).sum::<usize>();
    of(1).max(of(-1))
}

/// The edit distance: insertions, deletions, replacements and swaps of neighbours.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut before_last = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replaced = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replaced.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before_last[j - 2] + 1);
            }
        }
        (before_last, last) = (last, row);
    }
    last[b.len()]
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
    fn lower_bound_never_exceeds_the_distance() {
        let words = ["", "a", "ab", "ba", "abc", "token_bucket", "tokn_bukcet", "leaky_bucket", "한국어"];
        for (a, b) in words.iter().flat_map(|a| words.map(|b| (*a, b))) {
            let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
            assert!(distance_at_least(&a, &b) <= distance(&a, &b), "{a:?} {b:?}");
        }
    }

    #[test]
    fn nearest_of_many_names_is_found() {
        let many: Vec<String> = (0..1_000).map(|n| format!("limit-number-{n}")).collect();
        let known: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(nearest("limit-nmber-517", &known), Some("limit-number-517"));
    }
}
