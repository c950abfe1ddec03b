//! Templates: a new path from the captures of a pattern.

use super::pattern::{Pattern, PatternError};
use super::scanner::PathScanner;
use super::{AmbiguousPath, PathNormalization, segment_range};

/// A path with names, each of which is replaced by the capture of that name in a [`Pattern`].
///
/// ```
/// use ratekeeper_rules::path::{Pattern, Template};
///
/// let pattern = Pattern::parse("/users/{id}/**").unwrap();
/// let template = Template::parse("/v2/{id}/{rest}", &pattern).unwrap();
/// assert_eq!(template.expand(&pattern, "/users/7/posts/1").as_deref(), Some("/v2/7/posts/1"));
/// assert_eq!(template.expand(&pattern, "/users/7").as_deref(), Some("/v2/7"));
/// assert_eq!(template.expand(&pattern, "/other"), None);
/// ```
///
/// `{rest}` is the part that a trailing `**` of the pattern matches, unless a segment of the pattern has that name;
/// it must be the last segment of the template. Any other name may have text around it, as in `/{id}.json`. A
/// normalized path expands to a normalized path, by the default [`PathNormalization`]: the template's own text keeps
/// its case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<TemplatePart>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TemplatePart {
    Text(String),
    Name(String),
    /// With its leading slash.
    Rest,
}

const REST: &str = "rest";
const BRACES: &str = "write `{name}`; for a brace itself, write `%7B` or `%7D`";

impl Template {
    /// Parses a template for the captures of this pattern.
    ///
    /// # Errors
    /// If it is not a path, or has a name that the pattern does not have. The error contains what to write instead.
    pub fn parse(typed: &str, pattern: &Pattern) -> Result<Template, PatternError> {
        if typed.len() > Pattern::BYTES_MAX {
            let what = format!("the new path is {} bytes long", typed.len());
            return PatternError::new(0, what, format!("write at most {}", Pattern::BYTES_MAX));
        }
        let Some(segments) = typed.strip_prefix('/') else {
            let what = "the new path does not begin with a slash";
            return PatternError::new(0, what, format!("write `/{typed}`"));
        };
        let mut parts = Vec::new();
        let mut at = 1;
        let last = segments.split('/').count() - 1;
        for (number, segment) in segments.split('/').enumerate() {
            let is_last = number == last;
            if segment == "{rest}" && is_rest(REST, pattern) {
                if !is_last {
                    let what = "`{rest}` is any number of segments, and more follows";
                    return PatternError::new(at, what, "write `{rest}` at the end");
                }
                parts.push(TemplatePart::Rest);
                break;
            }
            parts.push(TemplatePart::Text("/".to_owned()));
            read_segment(segment, at, pattern, &mut parts)?;
            // Checked after decoding, because `%2E` is a dot, too.
            let is_dots = !segment.contains('{')
                && matches!(parts.last(), Some(TemplatePart::Text(text)) if text == "." || text == "..");
            if is_dots || segment.is_empty() && !is_last {
                let what = "the new path has a segment that servers leave out";
                return PatternError::new(at, what, "write it without `//`, `.` and `..`");
            }
            at += segment.len() + 1;
        }
        Ok(Template { parts })
    }

    /// The new path for a normalized path, by the pattern of the template. `None` if the pattern does not match.
    pub fn expand(&self, pattern: &Pattern, normalized: &str) -> Option<String> {
        self.expand_as(pattern, normalized, normalized)
    }

    /// The same, with captures as they are written in `received`: a path whose segments normalize to those of
    /// `normalized`, one by one.
    ///
    /// ```
    /// use ratekeeper_rules::path::{Pattern, Template};
    ///
    /// let pattern = Pattern::parse("/users/{id}").unwrap();
    /// let template = Template::parse("/people/{id}", &pattern).unwrap();
    /// let path = template.expand_as(&pattern, "/users/@abc", "/Users/%40AbC");
    /// assert_eq!(path.as_deref(), Some("/people/%40AbC"));
    /// ```
    pub fn expand_as(&self, pattern: &Pattern, normalized: &str, received: &str) -> Option<String> {
        // A capture is a slice of `normalized` and consists of whole segments.
        let as_received = |captured: &str| {
            let from = captured.as_ptr() as usize - normalized.as_ptr() as usize;
            let slashes = |text: &str| text.bytes().filter(|byte| *byte == b'/').count();
            match (slashes(&normalized[..from]), slashes(captured)) {
                (0, 0) => "",
                // One segment, without its slash.
                (before, 0) if !captured.is_empty() => {
                    received[segment_range(received, before - 1, 1)].trim_start_matches('/')
                }
                (before, count) => &received[segment_range(received, before, count)],
            }
        };
        let mut path = String::new();
        for part in &self.parts {
            path.push_str(match part {
                TemplatePart::Text(text) => text,
                TemplatePart::Name(name) => as_received(pattern.capture(normalized, name)?),
                TemplatePart::Rest => as_received(pattern.rest(normalized)?),
            });
        }
        if path.is_empty() {
            path.push('/');
        }
        pattern.matches(normalized).then_some(path)
    }
}

/// Whether a name refers to the trailing `**`.
fn is_rest(name: &str, pattern: &Pattern) -> bool {
    name == REST && pattern.has_rest() && !pattern.names().any(|own| own == REST)
}

/// Parses a segment into texts and names, in order.
fn read_segment(
    segment: &str,
    mut at: usize,
    pattern: &Pattern,
    parts: &mut Vec<TemplatePart>,
) -> Result<(), PatternError> {
    let mut left = segment;
    while let Some((text, behind)) = left.split_once('{') {
        push_text(text, at, parts)?;
        at += text.len() + 1;
        let Some((name, after)) = behind.split_once('}') else {
            return PatternError::new(at - 1, "`{` is not closed in its segment", BRACES);
        };
        if is_rest(name, pattern) {
            let what = "`{rest}` has something else in its segment";
            return PatternError::new(at - 1, what, "write `/{rest}` at the end");
        }
        if !pattern.names().any(|own| own == name) {
            return unknown(name, at - 1, pattern);
        }
        parts.push(TemplatePart::Name(name.to_owned()));
        at += name.len() + 1;
        left = after;
    }
    push_text(left, at, parts)
}

fn unknown(name: &str, at: usize, pattern: &Pattern) -> Result<(), PatternError> {
    let mut known: Vec<String> = pattern.names().map(|name| format!("`{{{name}}}`")).collect();
    if is_rest(REST, pattern) {
        known.push("`{rest}`".to_owned());
    }
    // Only printable characters of the name are repeated, so that no terminal escape sequence gets through.
    let shown: String = name.chars().filter(|it| it.is_ascii_graphic()).take(40).collect();
    let instead = match known.as_slice() {
        [] if name != REST => {
            "write `{name}` for a segment of the pattern, as in `/users/{name}/**`".to_owned()
        }
        _ if name == REST => "write a pattern that ends with `/**`: that is the rest".to_owned(),
        [one] => format!("write {one}"),
        known => format!("the names are {}", known.join(", ")),
    };
    PatternError::new(at, format!("the pattern has no `{{{shown}}}`"), instead)
}

fn push_text(text: &str, at: usize, parts: &mut Vec<TemplatePart>) -> Result<(), PatternError> {
    if let Some(close) = text.find('}') {
        return PatternError::new(at + close, "`}` closes a brace that was not opened", BRACES);
    }
    if let Some(star) = text.find('*') {
        let what = "`*` is any text, and a new path must be one";
        return PatternError::new(at + star, what, "write a name of the pattern, as in `{name}` or `{rest}`");
    }
    if let Some(parameters) = text.find(';') {
        let what = "`;` begins parameters, which are not part of a path";
        return PatternError::new(at + parameters, what, "leave it out, or write `%3B`");
    }
    let mut normal = String::with_capacity(text.len());
    // Case is kept as written: the upstream may be case-sensitive where this side is not.
    let normalization = PathNormalization::default();
    for piece in PathScanner::new(text, at, normalization) {
        let piece = piece.map_err(|error: AmbiguousPath| PatternError::of("the new path", error))?;
        piece.write(normalization, |text| normal.push_str(text));
    }
    if !normal.is_empty() {
        parts.push(TemplatePart::Text(normal));
    }
    Ok(())
}
