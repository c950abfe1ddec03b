//! Properties of all paths and patterns, tested on random ones.
//!
//! Each property runs 10 000 cases; `RATEKEEPER_CASES=1000000` runs more.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ratekeeper_rules::path::{
    AmbiguousPathPolicy, PathNormalization, Pattern, RequestPath, normalize, segment, with_parameters,
};

use testbed::property::check;

fn normalization() -> impl Strategy<Value = PathNormalization> {
    any::<(bool, bool, bool, bool)>().prop_map(
        |(keep, ignore_case, ignore_trailing_slash, decode_delimiters)| PathNormalization {
            ambiguous: if keep { AmbiguousPathPolicy::Keep } else { AmbiguousPathPolicy::Reject },
            ignore_case,
            ignore_trailing_slash,
            decode_delimiters,
        },
    )
}

/// Pieces of text that are critical for normalization.
const TROUBLE: &[&str] = &[
    "/",
    "/",
    "//",
    ".",
    "..",
    "/../",
    "/./",
    ";",
    ";p=1",
    "%",
    "%2",
    "%2e",
    "%2E",
    "%2f",
    "%5c",
    "%00",
    "%25",
    "%2561",
    "%61",
    "%41",
    "%zz",
    "%C3%A9",
    "%c3",
    "%A9",
    "%E2%84%AA",
    "%3B",
    "%2A",
    "%40",
    "\\",
    "\0",
    "\n",
    "?",
    "#",
    "*",
    "**",
    "{",
    "}",
    "{a}",
    "{b}",
    "a",
    "B",
    "é",
    "K",
    "İ",
    "ß",
    "Σ",
    "@",
    " ",
    "|",
    "20",
    "~",
];

/// Half of them random text, half of them combinations of critical pieces; half of each with a leading slash.
fn any_text() -> impl Strategy<Value = String> {
    let troubled = vec(select(TROUBLE), 0..12).prop_map(|bits| bits.concat());
    prop_oneof![
        any::<String>(),
        any::<String>().prop_map(|text| format!("/{text}")),
        troubled.clone(),
        troubled.prop_map(|text| format!("/{text}")),
    ]
}

/// The byte of each escape in the text, and its digits as written.
fn escapes(text: &str) -> Vec<(u8, &str)> {
    let digits = text.match_indices('%').map(|(at, _)| &text[at + 1..at + 3]);
    digits.map(|digits| (u8::from_str_radix(digits, 16).expect("hex digits"), digits)).collect()
}

#[test]
fn normalization_is_idempotent_and_leaves_no_ambiguous_text() {
    check(&(any_text(), normalization()), |(path, normalization)| {
        let Ok(normal) = normalize(&path, normalization) else { return Ok(()) };
        let again = normalize(&normal, normalization);
        prop_assert_eq!(again.as_deref(), Ok(&*normal), "{}", path);

        prop_assert!(normal.starts_with('/') && normal.is_ascii(), "{normal}");
        prop_assert!(!normal.contains("//"), "{normal}");
        prop_assert!(normal.split('/').all(|segment| segment != "." && segment != ".."), "{normal}");
        prop_assert!(!normal.contains([';', '\\', '?', '#', ' ', '\0', '{', '}']), "{normal}");
        for (byte, digits) in escapes(&normal) {
            prop_assert!(digits == digits.to_uppercase(), "{normal}");
            prop_assert!(!byte.is_ascii_alphanumeric() && !b"-._~".contains(&byte), "{normal}");
            if normalization.ambiguous == AmbiguousPathPolicy::Reject {
                prop_assert!(!b"/\\\0".contains(&byte), "{normal}");
            }
        }
        let times_longer = if normalization.ignore_case { 5 } else { 3 };
        prop_assert!(normal.len() <= times_longer * path.len().max(1), "{normal}");
        prop_assert!(!(normalization.ignore_trailing_slash && normal.len() > 1 && normal.ends_with('/')));
        Ok(())
    });
}

/// Reading a path once gives the same as normalizing it twice.
#[test]
fn request_path_is_normalized_for_rules_and_for_the_service() {
    check(&(any_text(), normalization()), |(path, normalization)| {
        let forwarded =
            PathNormalization { ambiguous: normalization.ambiguous, ..PathNormalization::default() };
        let expected = normalize(&path, normalization)
            .and_then(|matched| Ok(RequestPath { matched, forwarded: normalize(&path, forwarded)? }));
        prop_assert_eq!(RequestPath::read(&path, normalization), expected, "{}", path);
        Ok(())
    });
}

/// A path that keeps its parameters and empty segments is the same path, and is kept in the same form again.
#[test]
fn path_with_parameters_normalizes_to_the_same_path() {
    check(&(any_text(), normalization()), |(path, normalization)| {
        let (Ok(normal), Some(kept)) =
            (normalize(&path, normalization), with_parameters(&path, normalization))
        else {
            return Ok(());
        };
        prop_assert_eq!(normalize(&kept, normalization), Ok(normal.clone()), "{}", kept);
        prop_assert_eq!(with_parameters(&kept, normalization), Some(kept.clone()));
        prop_assert!(kept.is_ascii() && kept.starts_with('/') && !kept.starts_with("//"), "{kept}");
        prop_assert!(kept.split(['/', ';']).all(|text| text != ".." || kept.contains(";..")), "{kept}");
        if !kept.contains(';') && !kept.contains("//") && !normalization.ignore_trailing_slash {
            prop_assert_eq!(kept, normal);
        }
        Ok(())
    });
}

#[test]
fn errors_point_into_the_path_and_keep_rejects_only_non_paths() {
    check(&(any_text(), normalization()), |(path, normalization)| {
        if let Err(error) = normalize(&path, normalization) {
            prop_assert!(error.at < path.len() && path.is_char_boundary(error.at), "{error}");
            let kept = PathNormalization { ambiguous: AmbiguousPathPolicy::Keep, ..normalization };
            prop_assert_eq!(normalize(&path, kept).is_err(), !path.starts_with('/'));
        }
        Ok(())
    });
}

#[test]
fn pattern_parsing_never_panics_and_printing_round_trips() {
    check(&(any_text(), any_text(), normalization()), |(typed, path, normalization)| {
        let pattern = match Pattern::parse_with(&typed, normalization) {
            Ok(pattern) => pattern,
            Err(error) => {
                prop_assert!(error.at() <= typed.len() && typed.is_char_boundary(error.at()), "{error}");
                return Ok(());
            }
        };
        let again = Pattern::parse_with(&pattern.to_string(), normalization);
        prop_assert_eq!(again.as_ref(), Ok(&pattern));
        // Also for paths that are not normalized, which callers should not pass.
        pattern.matches(&path);
        for name in pattern.names() {
            prop_assert_eq!(pattern.capture(&path, name).is_some(), pattern.matches(&path));
        }
        segment(&path, 1);
        Ok(())
    });
}

/// A path is also a pattern that matches itself.
#[test]
fn a_path_without_wildcards_matches_itself() {
    check(&(any_text(), normalization()), |(path, normalization)| {
        let path = path.replace(['*', '{', '}'], "a");
        if let (Ok(normal), true) =
            (normalize(&path, normalization), path.starts_with('/') && path.len() < 1024)
        {
            // Patterns never contain a query, even where paths may keep one.
            if !path.contains(['?', '#']) {
                let pattern = Pattern::parse_with(&path, normalization).unwrap();
                prop_assert!(pattern.matches(&normal), "{pattern} on {normal}");
                prop_assert_eq!(pattern.to_string(), &*normal.replace('*', "%2A"));
            }
        }
        Ok(())
    });
}

/// Changes to a segment and its surroundings that keep the normalized path.
#[derive(Clone, Debug)]
struct Disguise {
    /// Characters to escape, one per bit; with lower-case digits if the top bit is set.
    escaped: u32,
    before: &'static str,
    parameters: &'static str,
}

fn disguise() -> impl Strategy<Value = Disguise> {
    let before = select(vec![
        "/",
        "/",
        "//",
        "/./",
        "/x/../",
        "/%2e/",
        "/x/%2E%2e/",
        "/x/..;p/",
        "///",
        "/;p/",
        "/x/y/../.;p/../",
    ]);
    let parameters = select(vec!["", "", ";", ";p", ";a=b;c=d", ";%C3%A9", ";.."]);
    (any::<u32>(), before, parameters).prop_map(|(escaped, before, parameters)| Disguise {
        escaped,
        before,
        parameters,
    })
}

impl Disguise {
    fn put_on(&self, segment: &str) -> String {
        let mut text = self.before.to_owned();
        // An existing escape must stay unchanged, except for the case of its digits.
        let mut in_escape = 0;
        for (index, character) in segment.chars().enumerate() {
            let chosen = self.escaped >> (index % 31) & 1 == 1;
            if character == '%' {
                in_escape = 3;
            }
            let unreserved = character.is_ascii_alphanumeric() || "-._~".contains(character);
            if in_escape > 0 {
                in_escape -= 1;
                text.push(if chosen { character.to_ascii_lowercase() } else { character });
            } else if chosen && unreserved && self.escaped >> 31 == 1 {
                text.push_str(&format!("%{:02x}", u32::from(character)));
            } else if chosen && unreserved {
                text.push_str(&format!("%{:02X}", u32::from(character)));
            } else {
                text.push(character);
            }
        }
        text + self.parameters
    }
}

const PATTERNS: &[&str] = &[
    "/**",
    "/*",
    "/{a}",
    "/api/**",
    "/**/z",
    "/a/**/z",
    "/*/*",
    "/{a}/**/{b}",
    "/**/*.png",
    "/a*",
    "/*a*z*",
    "/**/api/*/**",
    "/api/{x}/z",
    "/caf%C3%A9/**",
    "/*20*",
];

#[test]
fn every_form_of_a_path_normalizes_and_matches_alike() {
    let segments = select(vec![
        "a",
        "z",
        "api",
        "users",
        "7",
        "a.png",
        ".png",
        "...",
        "~x_y-z",
        "caf%C3%A9",
        "a%20b",
        "%40me",
        "@me",
        "a,b=c",
        "%2561",
        "%3B",
        "20",
        "aXz",
    ]);
    let disguised = vec((segments, disguise()), 1..6);
    let patterns: Vec<Pattern> = PATTERNS.iter().map(|typed| Pattern::parse(typed).unwrap()).collect();
    let answers = |path: &str| -> Vec<(bool, Vec<Option<String>>)> {
        let captures = |pattern: &Pattern| {
            pattern.names().map(|name| pattern.capture(path, name).map(str::to_owned)).collect()
        };
        patterns.iter().map(|pattern| (pattern.matches(path), captures(pattern))).collect()
    };
    let end = select(vec!["", "/", "/.", "//", "/x/..", "/;p"]);
    check(&(disguised, end), |(disguised, end)| {
        let plain: String = disguised.iter().map(|(segment, _)| format!("/{segment}")).collect();
        let plain = if end.is_empty() { plain } else { plain + "/" };
        let spelt: String = disguised.iter().map(|(segment, disguise)| disguise.put_on(segment)).collect();
        let spelt = spelt + end;
        let normal = normalize(&spelt, PathNormalization::default());
        prop_assert_eq!(normal.as_deref(), Ok(&*plain), "{}", spelt);
        prop_assert_eq!(answers(&normal.unwrap_or_default()), answers(&plain), "{}", spelt);
        Ok(())
    });
}

/// The definition of matching, implemented naively: tries every way to match.
fn matches_by_trying(pattern: &[&str], path: &[&str]) -> bool {
    match (pattern, path) {
        ([], []) => true,
        (["**", left @ ..], _) => (0..=path.len()).any(|taken| matches_by_trying(left, &path[taken..])),
        ([one, left @ ..], [text, after @ ..]) => {
            let fits = match *one {
                "*" | "{n}" => !text.is_empty(),
                _ => part_by_trying(one.as_bytes(), text.as_bytes()),
            };
            fits && matches_by_trying(left, after)
        }
        _ => false,
    }
}

fn part_by_trying(part: &[u8], text: &[u8]) -> bool {
    match (part, text) {
        ([], []) => true,
        ([b'*', left @ ..], _) => (0..=text.len()).any(|taken| part_by_trying(left, &text[taken..])),
        ([one, left @ ..], [byte, after @ ..]) => one == byte && part_by_trying(left, after),
        _ => false,
    }
}

#[test]
fn matching_equals_exhaustive_search() {
    let part = select(vec!["**", "**", "*", "a", "b", "ab", "a*", "*b", "*a*b*", "a*a", "*ab*a*", "*aa*"]);
    let text = select(vec!["a", "b", "ab", "aa", "aab", "abab", "abba", "baaba"]);
    let ends = any::<(bool, bool)>();
    check(&(vec(part, 1..7), vec(text, 1..8), ends), |(mut parts, mut texts, (slash, path_slash))| {
        parts.extend(slash.then_some(""));
        texts.extend(path_slash.then_some(""));
        let (typed, path) = (format!("/{}", parts.join("/")), format!("/{}", texts.join("/")));
        let matched = Pattern::parse(&typed).unwrap().matches(&path);
        prop_assert_eq!(matched, matches_by_trying(&parts, &texts), "{} on {}", typed, path);
        Ok(())
    });
}

/// Found by fuzzing: the offset of this error was byte 1024 even inside a character.
#[test]
fn error_offset_in_a_long_pattern_is_a_character_boundary() {
    for before in ["/", "/a", "/ab"] {
        let typed = format!("{before}{}", "€".repeat(Pattern::BYTES_MAX));
        let error = Pattern::parse(&typed).expect_err("it is too long");
        assert!(typed.is_char_boundary(error.at()), "{}", error.at());
        assert!((Pattern::BYTES_MAX - 2..=Pattern::BYTES_MAX).contains(&error.at()), "{}", error.at());
    }
}
