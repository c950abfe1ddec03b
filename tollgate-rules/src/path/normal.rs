//! The normal form of a path.

use std::borrow::Cow;

use super::pieces::{Pieces, is_plain};
use super::{Ambiguity, Ambiguous, Spelling};

/// The normal form of a path, as the [module](super) describes it. `path` is as it came, without the query.
///
/// Nothing is copied if the path is normal already, or if its normal form is its beginning. The work is linear in the
/// length of the path, and the normal form at most three times as long; five times, if case is ignored, because the
/// lower case of a few characters has more bytes.
///
/// # Errors
///
/// [`Ambiguous`] names the first place that servers read in different ways, unless [`Spelling::ambiguous`] says to
/// keep those.
pub fn normalise(path: &str, spelling: Spelling) -> Result<Cow<'_, str>, Ambiguous> {
    if path.is_empty() || path == "*" {
        return Ok(Cow::Borrowed("/"));
    }
    let Some(segments) = path.strip_prefix('/') else {
        return Err(Ambiguous { at: 0, what: Ambiguity::NoLeadingSlash });
    };
    if is_normal_at_a_glance(path, spelling) {
        return Ok(Cow::Borrowed(path));
    }
    let mut normal = Normal { path, same_bytes: 0, copy: None };
    let mut at = 1;
    let mut ends_with_slash = true;
    for segment in segments.split('/') {
        let (name, parameters) = segment.split_once(';').unwrap_or((segment, ""));
        let before = normal.text().len();
        normal.push("/");
        for piece in Pieces::new(name, at, spelling) {
            piece?.write(spelling, |text| normal.push(text));
        }
        // Dropped, but a server that does not drop them reads them too.
        for piece in Pieces::new(parameters, at + name.len() + 1, spelling) {
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
    if normal.text().is_empty() || (ends_with_slash && !spelling.ignore_trailing_slash) {
        normal.push("/");
    }
    Ok(normal.finish())
}

/// Whether nothing in a path that begins with a slash needs a closer look. Most paths end here.
fn is_normal_at_a_glance(path: &str, spelling: Spelling) -> bool {
    let mut before = 0;
    for byte in path.bytes() {
        let is_fine = if before == b'/' {
            is_plain(byte, spelling) && byte != b'.'
        } else {
            is_plain(byte, spelling) || byte == b'/'
        };
        if !is_fine {
            return false;
        }
        before = byte;
    }
    !(spelling.ignore_trailing_slash && before == b'/')
}

/// A normal form being written, which needs no copy for as long as it is a beginning of the path.
struct Normal<'a> {
    path: &'a str,
    /// How much of the path is the text so far; of no meaning once there is a copy.
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
