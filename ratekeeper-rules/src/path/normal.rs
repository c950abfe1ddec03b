//! Path normalization.

use std::borrow::Cow;

use super::reading::without_ignored_end;
use super::scanner::{PathScanner, is_plain};
use super::{Ambiguity, AmbiguousPath, AmbiguousPathPolicy, PathNormalization};

/// The normalized path, as the [module](super) describes it. `path` is the received path, without the query.
///
/// Nothing is copied if the path is already normalized, or if its normalized form is a prefix of it. The work is
/// linear in the length of the path. The result is at most three times as long; five times if case is ignored,
/// because the lower case of a few characters has more bytes.
///
/// # Errors
///
/// [`AmbiguousPath`] names the first position that servers interpret in different ways, unless
/// [`PathNormalization::ambiguous`] keeps these.
pub fn normalize(path: &str, normalization: PathNormalization) -> Result<Cow<'_, str>, AmbiguousPath> {
    #[cfg(debug_assertions)]
    NORMALIZED.set(NORMALIZED.get() + 1);
    if path.is_empty() || path == "*" {
        return Ok(Cow::Borrowed("/"));
    }
    let Some(segments) = path.strip_prefix('/') else {
        return Err(AmbiguousPath { at: 0, what: Ambiguity::NoLeadingSlash });
    };
    if is_already_normalized(path, normalization) {
        return Ok(Cow::Borrowed(path));
    }
    let mut normal = Normal { path, same_bytes: 0, copy: None };
    let mut at = 1;
    let mut ends_with_slash = true;
    for segment in segments.split('/') {
        let (name, parameters) = segment.split_once(';').unwrap_or((segment, ""));
        let before = normal.text().len();
        normal.push("/");
        for piece in PathScanner::new(name, at, normalization) {
            piece?.write(normalization, |text| normal.push(text));
        }
        let written = normal.text().get(before + 1..).unwrap_or_default();
        if normalization.ambiguous == AmbiguousPathPolicy::Reject && is_encoded_dot_segment(written) {
            return Err(AmbiguousPath { at, what: Ambiguity::EncodedDotSegment });
        }
        // Parameters are dropped, but checked: a server that does not drop them reads them.
        for piece in PathScanner::new(parameters, at + name.len() + 1, normalization) {
            piece?;
        }
        let written = normal.text().get(before + 1..).unwrap_or_default();
        ends_with_slash = matches!(written, "" | "." | "..");
        match written {
            "" | "." => normal.truncate(before),
            ".." => normal.truncate(normal.text()[..before].rfind('/').unwrap_or(0)),
            _ => {}
        }
        at += segment.len() + 1;
    }
    if normal.text().is_empty() || (ends_with_slash && !normalization.ignore_trailing_slash) {
        normal.push("/");
    }
    Ok(normal.finish())
}

/// Whether a segment is `.` or `..` with only ignored text behind it.
fn is_encoded_dot_segment(segment: &str) -> bool {
    segment.starts_with('.') && segment.contains('%') && {
        let dots = segment.bytes().take_while(|byte| *byte == b'.').count();
        // Of the text behind the dots, nothing is left.
        dots <= 2 && without_ignored_end(&segment[dots..]).is_empty()
    }
}

#[cfg(debug_assertions)]
thread_local! {
    static NORMALIZED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// How many paths this thread has normalized, for tests of the cost of a request. Exists only with debug assertions.
#[cfg(debug_assertions)]
#[doc(hidden)]
pub fn normalized_count() -> u64 {
    NORMALIZED.get()
}

/// A received path, read once: the form that rules match, and the form that the service receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestPath<'a> {
    /// The path, [normalized](normalize).
    pub matched: Cow<'a, str>,
    /// The normalized path with its letter case, its trailing slash and its escaped delimiters: these settings are
    /// statements about the service.
    pub forwarded: Cow<'a, str>,
}

impl<'a> RequestPath<'a> {
    /// Reads a path. Most paths are normalized once; twice if they have escapes or, where case is ignored, capital
    /// letters.
    ///
    /// ```
    /// use ratekeeper_rules::path::{PathNormalization, RequestPath};
    ///
    /// let normalization = PathNormalization { ignore_trailing_slash: true, ..PathNormalization::default() };
    /// let path = RequestPath::read("//users/%37/", normalization).unwrap();
    /// assert_eq!((&*path.matched, &*path.forwarded), ("/users/7", "/users/7/"));
    /// ```
    ///
    /// # Errors
    /// As [`normalize`].
    pub fn read(path: &'a str, normalization: PathNormalization) -> Result<RequestPath<'a>, AmbiguousPath> {
        let PathNormalization { ambiguous, ignore_case, ignore_trailing_slash, decode_delimiters } =
            normalization;
        let forwarded = normalize(path, PathNormalization { ambiguous, ..PathNormalization::default() })?;
        // The forwarded path is ASCII, so without escapes and capital letters these settings change nothing.
        let has_escape = (ignore_case || decode_delimiters) && forwarded.contains('%');
        let has_capital = ignore_case && forwarded.bytes().any(|byte| byte.is_ascii_uppercase());
        let matched = match (has_escape || has_capital, ignore_trailing_slash) {
            (true, _) => normalize(path, normalization)?,
            (false, true) => without_trailing_slash(forwarded.clone()),
            (false, false) => forwarded.clone(),
        };
        Ok(RequestPath { matched, forwarded })
    }
}

fn without_trailing_slash(path: Cow<'_, str>) -> Cow<'_, str> {
    match path {
        Cow::Borrowed(text) => {
            Cow::Borrowed(text.strip_suffix('/').filter(|text| !text.is_empty()).unwrap_or(text))
        }
        Cow::Owned(mut text) => {
            if text.len() > 1 && text.ends_with('/') {
                text.pop();
            }
            Cow::Owned(text)
        }
    }
}

/// Fast path: whether a path that begins with a slash is already normalized. True for most paths.
fn is_already_normalized(path: &str, normalization: PathNormalization) -> bool {
    let mut before = 0;
    for byte in path.bytes() {
        let is_fine = if before == b'/' {
            is_plain(byte, normalization) && byte != b'.'
        } else {
            is_plain(byte, normalization) || byte == b'/'
        };
        if !is_fine {
            return false;
        }
        before = byte;
    }
    !(normalization.ignore_trailing_slash && before == b'/')
}

/// A normalized path under construction, which needs no copy while it is a prefix of the path.
struct Normal<'a> {
    path: &'a str,
    /// Length of the prefix that equals the text so far; unused once there is a copy.
    same_bytes: usize,
    copy: Option<String>,
}

impl<'a> Normal<'a> {
    fn text(&self) -> &str {
        self.copy.as_deref().unwrap_or(&self.path[..self.same_bytes])
    }

    fn push(&mut self, text: &str) {
        match &mut self.copy {
            Some(copy) => copy.push_str(text),
            None if self.path[self.same_bytes..].starts_with(text) => self.same_bytes += text.len(),
            None => {
                let mut copy = String::with_capacity(self.path.len());
                copy.push_str(&self.path[..self.same_bytes]);
                copy.push_str(text);
                self.copy = Some(copy);
            }
        }
    }

    fn truncate(&mut self, bytes: usize) {
        match &mut self.copy {
            Some(copy) => copy.truncate(bytes),
            None => self.same_bytes = bytes,
        }
    }

    fn finish(self) -> Cow<'a, str> {
        match self.copy {
            Some(copy) => Cow::Owned(copy),
            None => Cow::Borrowed(&self.path[..self.same_bytes]),
        }
    }
}
