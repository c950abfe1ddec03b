//! Compares the output of a command with its page.

/// A line of the page that matches any number of lines, including none.
const ANY_LINES: &str = "...";

/// A difference shows the last few lines that a `...` matches: the missing line is often among them.
const HIDDEN_SHOWN_MAX: usize = 5;

/// Returns `None` if the output matches the page; otherwise the shortest difference: `- ` the page, `+ ` the command,
/// `| ` lines that a `...` matches.
///
/// `costs[e][p]` is the number of lines to change to make the page from line `e` on equal to the output from line `p`
/// on. It is filled from the end and then read as a path from the beginning.
pub(super) fn diff(expected: &[&str], printed: &[&str]) -> Option<String> {
    let costs = costs(expected, printed);
    if costs[0][0] == 0 {
        return None;
    }
    let (mut e, mut p) = (0, 0);
    let mut shown = String::new();
    while e < expected.len() || p < printed.len() {
        let cost = costs[e][p];
        match expected.get(e).copied() {
            Some(ANY_LINES) => {
                let start = p;
                while costs[e][p] != costs[e + 1][p] {
                    p += 1;
                }
                shown.push_str("  ...\n");
                for line in &printed[start.max(p.saturating_sub(HIDDEN_SHOWN_MAX))..p] {
                    shown.push_str(&format!("| {line}\n"));
                }
                e += 1;
            }
            Some(line) if printed.get(p) == Some(&line) && cost == costs[e + 1][p + 1] => {
                shown.push_str(&format!("  {line}\n"));
                e += 1;
                p += 1;
            }
            Some(line) if cost == 1 + costs[e + 1][p] => {
                shown.push_str(&format!("- {line}\n"));
                e += 1;
            }
            _ => {
                shown.push_str(&format!("+ {}\n", printed[p]));
                p += 1;
            }
        }
    }
    Some(shown)
}

fn costs(expected: &[&str], printed: &[&str]) -> Vec<Vec<usize>> {
    let mut costs = vec![vec![0; printed.len() + 1]; expected.len() + 1];
    for e in (0..=expected.len()).rev() {
        for p in (0..=printed.len()).rev() {
            let without_expected = |costs: &[Vec<usize>]| costs.get(e + 1).map(|row| row[p]);
            let without_printed = |costs: &[Vec<usize>]| costs[e].get(p + 1).copied();
            let ways = match (expected.get(e), printed.get(p)) {
                (None, None) => continue,
                (Some(&ANY_LINES), _) => [without_expected(&costs), without_printed(&costs), None],
                (line, output) => [
                    without_expected(&costs).map(|cost| cost + 1),
                    without_printed(&costs).map(|cost| cost + 1),
                    if line == output { Some(costs[e + 1][p + 1]) } else { None },
                ],
            };
            costs[e][p] = ways.into_iter().flatten().min().unwrap_or_default();
        }
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares lines separated by spaces.
    fn check(expected: &str, printed: &str) -> Option<String> {
        let [expected, printed] = [expected, printed].map(|text| text.split(' ').collect::<Vec<_>>());
        diff(&expected, &printed)
    }

    #[test]
    fn equal_lines_match() {
        assert_eq!(diff(&[], &[]), None);
        assert_eq!(check("a b", "a b"), None);
    }

    #[test]
    fn dots_match_any_number_of_lines() {
        for printed in ["a z", "a b z", "a b c d z", "a z z"] {
            assert_eq!(check("a ... z", printed), None, "{printed}");
        }
        assert_eq!(diff(&["..."], &[]), None);
        assert_eq!(check("... b ... d ...", "a b c d e"), None);
        assert_eq!(check("... b", "b a b"), None);
    }

    #[test]
    fn dots_do_not_match_a_missing_line() {
        assert!(check("a ... z", "a b").is_some());
        assert!(check("... b ...", "a c").is_some());
        assert!(check("a ...", "b a").is_some());
    }

    #[test]
    fn dots_within_a_line_are_literal() {
        assert!(diff(&["a ..."], &["a b"]).is_some());
        assert!(diff(&[" ..."], &["a"]).is_some());
    }

    #[test]
    fn white_space_is_significant() {
        assert!(diff(&["a"], &["a "]).is_some());
    }

    #[test]
    fn difference_shows_equal_lines_too() {
        assert_eq!(check("a b c", "a x c").as_deref(), Some("  a\n- b\n+ x\n  c\n"));
        assert_eq!(check("a b", "a b c").as_deref(), Some("  a\n  b\n+ c\n"));
        assert_eq!(check("a ... y z", "a b c y").as_deref(), Some("  a\n  ...\n| b\n| c\n  y\n- z\n"));
    }

    #[test]
    fn difference_shows_the_last_few_lines_under_dots() {
        assert_eq!(check("... z", "1 2 3 4 5 6 7").as_deref(), Some("  ...\n| 3\n| 4\n| 5\n| 6\n| 7\n- z\n"));
    }
}
