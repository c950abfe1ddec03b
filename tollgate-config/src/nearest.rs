/// The known name that `typed` was most likely meant to be, if any is close: a third of its letters may be wrong.
pub fn nearest<'a>(typed: &str, known: &[&'a str]) -> Option<&'a str> {
    let typed: Vec<char> = typed.chars().take(TYPED_CHARS_MAX).flat_map(char::to_lowercase).collect();
    known
        .iter()
        .map(|name| (distance(&typed, &name.chars().collect::<Vec<_>>()), *name))
        .filter(|(distance, name)| distance * 3 <= name.chars().count().max(typed.len()))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// No known name is nearly as long; more letters would only cost time.
const TYPED_CHARS_MAX: usize = 64;

/// How many letters must be put in, left out, replaced or swapped with their neighbour to turn one into the other.
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
    fn a_slip_finds_its_name_and_a_stranger_finds_none() {
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
    fn a_very_long_word_costs_no_time() {
        assert_eq!(nearest(&"x".repeat(1_000_000), &["time"]), None);
    }
}
