//! Matches a normalized path with a bound on the work.
//!
//! A step is a byte of the path that is read, or a segment of the pattern that is tried. A match takes at most `3 *
//! (segments of the pattern + 1) * (bytes of the path + 1)` steps, for any path:
//!
//! - After the last `**` reached, the rest of the pattern is tried at each following segment of the path in turn.
//!   Once the next `**` is reached, earlier ones are never retried, because the leftmost match leaves the most to
//!   what follows. So no segment of the pattern meets a segment of the path twice.
//! - Within a segment, the texts between `*` are searched from left to right, each from where the previous one ended,
//!   with the Knuth-Morris-Pratt algorithm: at most two steps per byte.

/// One part of a pattern between slashes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Segment {
    /// This text; empty after a trailing slash.
    Literal(Box<str>),
    /// Text with `*` in it.
    Parts(Parts),
    /// `*` or `{name}`: any segment that is not empty.
    One(Option<Box<str>>),
    /// `**`: any number of segments.
    Many,
}

impl Segment {
    /// Whether it certainly matches every text that `other`, which is one segment, matches.
    pub(super) fn covers(&self, other: &Segment) -> bool {
        match (self, other) {
            (_, Segment::Many) => false,
            (Segment::One(_), Segment::One(_)) => true,
            (Segment::One(_), Segment::Literal(text)) => !text.is_empty(),
            (Segment::One(_), Segment::Parts(parts)) => !(parts.first.is_empty() && parts.last.is_empty()),
            (Segment::Parts(parts), Segment::Literal(text)) => parts.matches(text, &mut 0),
            _ => self == other,
        }
    }

    fn matches(&self, text: &str, steps: &mut usize) -> bool {
        match self {
            Segment::Literal(literal) => {
                if literal.len() == text.len() {
                    *steps += text.len();
                }
                **literal == *text
            }
            Segment::Parts(parts) => parts.matches(text, steps),
            Segment::One(_) => !text.is_empty(),
            Segment::Many => true,
        }
    }
}

/// The result of a match.
#[derive(Debug, Default)]
pub(super) struct Outcome<'p> {
    pub(super) matched: bool,
    /// The segment of the path that matched the segment to capture.
    pub(super) captured: Option<&'p str>,
    /// What a trailing `**` matched, with its leading slash.
    pub(super) rest: Option<&'p str>,
    /// Number of steps, for the test of the bound.
    pub(super) steps: usize,
}

/// Matches a normalized path; `capture` is the index of a segment of the pattern.
pub(super) fn run<'p>(pattern: &[Segment], path: &'p str, capture: Option<usize>) -> Outcome<'p> {
    let mut outcome = Outcome::default();
    // The text after the slash before the next segment; `None` after the last segment.
    let Some(mut left) = path.strip_prefix('/').map(Some) else { return outcome };
    let mut number = 0;
    // The index after the last `**`, and the rest of the path at its last attempt.
    let mut retry: Option<(usize, Option<&str>)> = None;
    loop {
        outcome.steps += 1;
        let segment = pattern.get(number);
        if let Some(Segment::Many) = segment {
            number += 1;
            retry = Some((number, left));
            if number == pattern.len() {
                outcome.matched = true;
                let bytes = left.map_or(0, |left| left.len() + 1);
                outcome.rest = path.get(path.len() - bytes..);
                return outcome;
            }
            continue;
        }
        let here = left.map(|left| split(left, &mut outcome.steps));
        match (segment, here) {
            (None, None) => {
                outcome.matched = true;
                return outcome;
            }
            // Every later attempt would have even fewer segments left.
            (Some(_), None) => return outcome,
            (Some(segment), Some((text, after))) if segment.matches(text, &mut outcome.steps) => {
                if capture == Some(number) {
                    outcome.captured = Some(text);
                }
                number += 1;
                left = after;
            }
            (_, Some(_)) => {
                let Some((behind, Some(tried))) = retry else { return outcome };
                left = split(tried, &mut outcome.steps).1;
                number = behind;
                retry = Some((behind, left));
            }
        }
    }
}

/// The first segment, and the text after the slash that follows it.
fn split<'p>(left: &'p str, steps: &mut usize) -> (&'p str, Option<&'p str>) {
    // Segments are short: a byte loop is faster than a search with setup cost.
    let end = left.bytes().position(|byte| byte == b'/').unwrap_or(left.len());
    *steps += end;
    (&left[..end], left.get(end + 1..))
}

/// A segment with `*` in it, which matches any characters, or none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Parts {
    pub(super) first: Box<str>,
    /// The texts between two `*`; none is empty.
    pub(super) middle: Box<[Needle]>,
    pub(super) last: Box<str>,
}

impl Parts {
    fn matches(&self, text: &str, steps: &mut usize) -> bool {
        *steps += (self.first.len() + self.last.len()).min(text.len());
        let Some(rest) = text.strip_prefix(&*self.first) else { return false };
        let Some(mut rest) = rest.strip_suffix(&*self.last).filter(|left| !is_in_escape(rest, left.len()))
        else {
            return false;
        };
        for needle in &self.middle {
            let Some(end) = needle.end_in(rest, steps) else { return false };
            rest = rest.get(end..).unwrap_or_default();
        }
        true
    }
}

/// A text to search for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Needle {
    pub(super) text: Box<str>,
    /// For each byte: the length of the longest proper prefix of the text that ends there.
    borders: Box<[usize]>,
}

impl Needle {
    pub(super) fn new(text: &str) -> Needle {
        let bytes = text.as_bytes();
        let mut borders: Vec<usize> = Vec::with_capacity(bytes.len());
        let mut border = 0;
        for (index, byte) in bytes.iter().enumerate() {
            while border > 0 && bytes[border] != *byte {
                border = borders[border - 1];
            }
            if index > 0 && bytes[border] == *byte {
                border += 1;
            }
            borders.push(border);
        }
        Needle { text: text.into(), borders: borders.into() }
    }

    /// Where the leftmost occurrence ends. An occurrence that begins inside an escape does not count.
    fn end_in(&self, text: &str, steps: &mut usize) -> Option<usize> {
        let needle = self.text.as_bytes();
        let mut matched = 0;
        for (index, byte) in text.bytes().enumerate() {
            *steps += 1;
            while matched > 0 && needle[matched] != byte {
                *steps += 1;
                matched = self.borders[matched - 1];
            }
            if needle[matched] == byte {
                matched += 1;
            }
            if matched == needle.len() {
                let end = index + 1;
                if !is_in_escape(text, end - matched) {
                    return Some(end);
                }
                matched = self.borders[matched - 1];
            }
        }
        None
    }
}

/// Whether an offset is inside an escape like `%C3`: the text that `*` matches must not end there, or `/*20` would
/// match `/a%20`. The text begins outside an escape.
fn is_in_escape(text: &str, at: usize) -> bool {
    let before = text.as_bytes().get(..at).unwrap_or_default();
    before.iter().rev().take(2).any(|byte| *byte == b'%')
}

#[cfg(test)]
mod tests {
    use super::super::Pattern;

    /// The bound stated in the module documentation.
    fn steps_max(pattern: &Pattern, path: &str) -> usize {
        3 * (pattern.segments().len() + 1) * (path.len() + 1)
    }

    const PATH_BYTES: usize = 100_000;

    /// Paths that make a naive matcher start over repeatedly.
    fn hostile_paths() -> Vec<String> {
        let repeated = |unit: &str| unit.repeat(PATH_BYTES / unit.len());
        vec![
            repeated("/a"),
            repeated("/a") + "/b",
            repeated("/a/b"),
            repeated("/a/b/c/z"),
            format!("/{}", repeated("a")),
            format!("/{}b", repeated("a")),
            format!("/{}", repeated("ab")),
            format!("/{}", repeated("aab")),
            format!("/{}", repeated("%25")),
            format!("{}{}", "/a".repeat(PATH_BYTES / 4), format_args!("/{}", "a".repeat(PATH_BYTES / 2))),
            repeated(&format!("/{}", "a".repeat(300))),
        ]
    }

    #[test]
    fn hostile_paths_stay_within_the_step_bound() {
        let patterns = [
            "/**",
            "/**/z",
            "/**/a/**/a/**/a/**/z",
            "/**/*/**/*/**/*/**/*/z",
            "/**/a/a/a/a/a/a/a/a/a/z",
            "/**/{x}/a/**/{y}/a/**/{z}/b/q",
            "/a*a*a*a*a*a*a*a*a*z",
            "/*a*aa*aaa*aaaa*aaaab*",
            "/**/*aaaaaaaaaaaaaaaaaaaaab*z/**/*ab*ab*ab*abz/**/z",
            "/**/*25*25*25z/**",
            "/*ababababac*",
        ];
        let mut most_for_a_byte = 0;
        for typed in patterns {
            let pattern = Pattern::parse(typed).unwrap();
            for path in hostile_paths() {
                let steps = super::run(pattern.segments(), &path, None).steps;
                assert!(
                    steps <= steps_max(&pattern, &path),
                    "{typed}: {steps} steps for {} bytes",
                    path.len()
                );
                most_for_a_byte = most_for_a_byte.max(steps / path.len());
            }
        }
        // The paths are hostile enough: one read per byte would not suffice.
        assert!(most_for_a_byte >= 10, "{most_for_a_byte}");
    }

    #[test]
    fn needle_search_equals_plain_search() {
        // All texts of `a` and `b` with up to eight characters, for all needles with up to four.
        let texts = |longest: u32| {
            (1..=longest).flat_map(|length| {
                (0..1_u32 << length).map(move |bits| {
                    (0..length).map(|bit| if bits >> bit & 1 == 0 { 'a' } else { 'b' }).collect::<String>()
                })
            })
        };
        for needle in texts(4) {
            let built = super::Needle::new(&needle);
            for text in texts(8) {
                let plain = text.find(&needle).map(|start| start + needle.len());
                assert_eq!(built.end_in(&text, &mut 0), plain, "{needle} in {text}");
            }
        }
    }
}
