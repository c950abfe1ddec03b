use std::borrow::Cow;

use sfv::Parser;
use sfv::visitor::Ignored;

/// How our value of a list header is sent with a response that already has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MergedHeader<'a> {
    /// One field line that replaces all of theirs and begins with their members unchanged.
    Joined(Cow<'a, str>),
    /// A separate field line; theirs are not changed.
    Separate(&'a str),
}

/// Appends our members of a list header ([`Header::is_list`](super::Header::is_list)) to those of an upstream's
/// response.
///
/// Their members are never changed or lost: an intermediary must not make a limit look more generous than it is. They
/// may come on several lines. If each line is a valid List, all become one line, because some clients read the first
/// line only. If one is not (for example, an older draft), nothing can be appended to it: their lines stay, and ours
/// is a separate line. A strict client then ignores both, as it would have ignored theirs.
///
/// ```
/// use ratekeeper_rules::response::{MergedHeader, merge_header};
///
/// let ours = r#""gateway";r=5;t=9"#;
/// let both = r#""theirs";r=1, "gateway";r=5;t=9"#;
/// assert_eq!(merge_header([r#""theirs";r=1"#], ours), MergedHeader::Joined(both.into()));
/// assert_eq!(merge_header(["limit=100, remaining=50"], ours), MergedHeader::Separate(ours));
/// ```
pub fn merge_header<'a, T: AsRef<[u8]>>(
    theirs: impl IntoIterator<Item = T>,
    ours: &'a str,
) -> MergedHeader<'a> {
    let mut joined = String::new();
    for line in theirs {
        let Some(line) = valid_list(line.as_ref()) else { return MergedHeader::Separate(ours) };
        // An empty line is an empty List.
        if !line.is_empty() {
            joined.push_str(line);
            joined.push_str(", ");
        }
    }
    if joined.is_empty() {
        return MergedHeader::Joined(Cow::Borrowed(ours));
    }
    joined.push_str(ours);
    MergedHeader::Joined(Cow::Owned(joined))
}

/// The line without surrounding white space, if it is a structured field List.
fn valid_list(line: &[u8]) -> Option<&str> {
    let line = std::str::from_utf8(line).ok()?.trim_matches([' ', '\t']);
    Parser::new(line).parse_list_with_visitor(Ignored).ok().map(|()| line)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = r#""ours";r=1"#;

    fn joined(theirs: &[&str]) -> Option<String> {
        match merge_header(theirs, OURS) {
            MergedHeader::Joined(value) => Some(value.into_owned()),
            MergedHeader::Separate(ours) => {
                assert_eq!(ours, OURS);
                None
            }
        }
    }

    #[test]
    fn upstream_members_stay_unchanged_and_come_first() {
        for (theirs, expected) in [
            (&[][..], r#""ours";r=1"#),
            (&[""], r#""ours";r=1"#),
            (&["", "  "], r#""ours";r=1"#),
            (&[r#""a";r=1"#, r#""b";r=2;t=9"#], r#""a";r=1, "b";r=2;t=9, "ours";r=1"#),
            (&[" \"a\";r=1\t"], r#""a";r=1, "ours";r=1"#),
            // Unusual formatting, unknown parameters and unused bits: none is corrected.
            (
                &[r#""a";  r=01;acme-burst=5,"b";r=2;r=3"#],
                r#""a";  r=01;acme-burst=5,"b";r=2;r=3, "ours";r=1"#,
            ),
            (&[r#""peruser";r=1;pk=:sdfjLJUOUH==:"#], r#""peruser";r=1;pk=:sdfjLJUOUH==:, "ours";r=1"#),
            // The same name as ours: both members are valid.
            (&[r#""ours";r=7"#], r#""ours";r=7, "ours";r=1"#),
        ] {
            assert_eq!(joined(theirs).as_deref(), Some(expected), "{theirs:?}");
        }
    }

    #[test]
    fn invalid_lists_are_not_changed() {
        for theirs in [
            &["limit=100, remaining=50, reset=30"][..],
            &[r#""a";r=1,"#],
            &[r#""a";r=1234567890123456"#],
            &["\"tägl\";r=1"],
            &[r#""a"#],
            // One bad line makes the whole field invalid.
            &[r#""a";r=1"#, "="],
            &[r#""cut "#, r#"in two";r=1"#],
        ] {
            assert_eq!(joined(theirs), None, "{theirs:?}");
        }
        assert_eq!(merge_header([b"\xff".as_slice()], OURS), MergedHeader::Separate(OURS));
    }
}
