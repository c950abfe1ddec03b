//! Paths: normalization is idempotent, and patterns match what a slow reference matcher matches.

use ratekeeper_rules::path::{AmbiguousPathPolicy, PathNormalization, Pattern, normalize, segment};

use super::input::Input;

/// Checks normalization options, a path and a pattern. Texts end at 0xff, which UTF-8 never contains.
pub(crate) fn check(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let flags = input.byte();
    let normalization = PathNormalization {
        ambiguous: if flags & 1 == 0 { AmbiguousPathPolicy::Reject } else { AmbiguousPathPolicy::Keep },
        ignore_case: flags & 2 != 0,
        ignore_trailing_slash: flags & 4 != 0,
        decode_delimiters: flags & 8 != 0,
    };
    let path = String::from_utf8_lossy(input.until(0xff));
    let typed = String::from_utf8_lossy(input.until(0xff));
    let normal = check_normal(&path, normalization);
    check_pattern(&typed, normal.as_deref(), normalization);
}

fn check_normal(path: &str, normalization: PathNormalization) -> Option<String> {
    let normal = match normalize(path, normalization) {
        Ok(normal) => normal.into_owned(),
        Err(error) => {
            assert!(error.at < path.len() && path.is_char_boundary(error.at), "{error}");
            let keeping = PathNormalization { ambiguous: AmbiguousPathPolicy::Keep, ..normalization };
            assert_eq!(normalize(path, keeping).is_err(), !path.starts_with('/'), "{path:?}");
            return None;
        }
    };
    assert_eq!(normalize(&normal, normalization).as_deref(), Ok(&*normal), "the normal form of {path:?}");
    assert!(normal.starts_with('/') && normal.bytes().all(|byte| byte.is_ascii_graphic()), "{normal:?}");
    assert!(!normal.contains([';', '\\', '?', '#', '{', '}', '"', '<', '>']), "{normal:?}");
    let segments: Vec<&str> = normal[1..].split('/').collect();
    let (last, others) = segments.split_last().expect("at least one");
    assert!(others.iter().all(|segment| !segment.is_empty()), "{normal:?}");
    assert!(!segments.iter().any(|segment| matches!(*segment, "." | "..")), "{normal:?}");
    assert!(!(normalization.ignore_trailing_slash && last.is_empty() && !others.is_empty()), "{normal:?}");
    if normalization.ambiguous == AmbiguousPathPolicy::Reject {
        // No segment is a dot segment once its parameters and the white space at its end are removed.
        let cut = |segment: &str| {
            let name = segment.split("%3B").next().expect("at least one").to_owned();
            ["%20", "%09", "%0A", "%0B", "%0C", "%0D"]
                .iter()
                .fold(name, |name, white| name.replace(white, ""))
        };
        assert!(!segments.iter().any(|segment| matches!(&*cut(segment), "." | "..")), "{normal:?}");
    }
    for (number, text) in segments.iter().enumerate() {
        assert_eq!(segment(&normal, number), Some(*text).filter(|text| !text.is_empty()));
    }
    assert_eq!(segment(&normal, segments.len()), None);
    let most = if normalization.ignore_case { 5 } else { 3 };
    assert!(normal.len() <= most * path.len().max(1), "{} bytes became {}", path.len(), normal.len());

    // A normalized path without wildcards is a pattern that matches itself.
    if normal.len() <= Pattern::BYTES_MAX && !normal.contains('*') {
        let same = Pattern::parse_with(&normal, normalization).expect("a normal path is a pattern");
        assert!(same.matches(&normal), "{normal:?} does not match itself");
    }
    Some(normal)
}

fn check_pattern(typed: &str, path: Option<&str>, normalization: PathNormalization) {
    let pattern = match Pattern::parse_with(typed, normalization) {
        Ok(pattern) => pattern,
        Err(error) => {
            assert!(error.at() <= typed.len() && typed.is_char_boundary(error.at()), "{error}");
            assert!(!error.what().is_empty() && !error.instead().is_empty());
            return;
        }
    };
    let printed = pattern.to_string();
    if printed.len() <= Pattern::BYTES_MAX {
        assert_eq!(
            Pattern::parse_with(&printed, normalization).as_ref(),
            Ok(&pattern),
            "{printed:?} of {typed:?}"
        );
    }
    let Some(path) = path else { return };
    let is_matched = pattern.matches(path);
    assert_eq!(is_matched, matches(&printed, path, normalization), "{printed:?} and {path:?}");
    for name in pattern.names() {
        let captured = pattern.capture(path, name);
        assert_eq!(captured.is_some(), is_matched, "{name} of {printed:?} in {path:?}");
        let mut segments = path.split('/').filter(|segment| !segment.is_empty());
        assert!(captured.is_none_or(|captured| segments.any(|segment| segment == captured)));
    }
    assert_eq!(pattern.capture(path, "no such name"), None);
}

/// Reference matcher for a printed pattern: the result for each pair of suffixes follows from shorter suffixes.
fn matches(printed: &str, path: &str, normalization: PathNormalization) -> bool {
    let wanted: Vec<&str> = printed[1..].split('/').collect();
    let segments: Vec<&str> = path[1..].split('/').collect();
    ends_match(
        &wanted,
        &segments,
        |wanted| *wanted == "**",
        |wanted, segment| match *wanted {
            "*" => !segment.is_empty(),
            name if name.starts_with('{') => !segment.is_empty(),
            text => {
                let (text, segment) = (units(text), units(segment));
                ends_match(
                    &text,
                    &segment,
                    |unit| *unit == "*",
                    |text, unit| is_unit(text, unit, normalization),
                )
            }
        },
    )
}

/// Splits text into characters; an escape is one character.
fn units(text: &str) -> Vec<&str> {
    let mut units = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let length = if rest.starts_with('%') { 3 } else { 1 };
        let (unit, after) = rest.split_at(length.min(rest.len()));
        units.push(unit);
        rest = after;
    }
    units
}

/// A literal star is printed as an escape, whichever form the path has.
fn is_unit(wanted: &str, unit: &str, normalization: PathNormalization) -> bool {
    wanted == unit || (wanted == "%2A" && unit == "*" && normalization.decode_delimiters)
}

fn ends_match<W, T>(
    wanted: &[W],
    texts: &[T],
    is_many: impl Fn(&W) -> bool,
    is_one: impl Fn(&W, &T) -> bool,
) -> bool {
    // For the current suffix of `wanted`: whether it matches each suffix of `texts`, the empty one last.
    let mut fits = vec![false; texts.len() + 1];
    fits[texts.len()] = true;
    for wanted in wanted.iter().rev() {
        let shorter = fits.clone();
        for start in (0..=texts.len()).rev() {
            fits[start] = if is_many(wanted) {
                shorter[start] || fits.get(start + 1).copied().unwrap_or(false)
            } else {
                texts.get(start).is_some_and(|text| is_one(wanted, text)) && shorter[start + 1]
            };
        }
    }
    fits[0]
}
