//! The rows of `paths.txt`: paths with their normalized form, and which patterns match them.

use std::borrow::Cow;

use ratekeeper_rules::path::{
    AmbiguousPathPolicy, PathNormalization, Pattern, hides_match, is_read_alike, normalize, segment,
};

/// A parsed row of the file.
struct Row {
    /// Line number in the file, from 1.
    line: usize,
    normalization: PathNormalization,
    columns: Vec<String>,
}

/// The rows of one section of the file: 0 normalization, 1 matches, 2 errors.
fn rows(part: usize) -> Vec<Row> {
    let mut parts_begun = 0;
    let mut normalization = PathNormalization::default();
    let mut rows = Vec::new();
    for (index, line) in include_str!("paths.txt").lines().enumerate() {
        let line_number = index + 1;
        if line.is_empty() || line.starts_with("# ") || line == "#" {
            continue;
        }
        if line.starts_with("== ") {
            parts_begun += 1;
        } else if let Some(words) = line.strip_prefix("with ") {
            normalization = parse_normalization(words);
        } else if parts_begun == part + 1 {
            let columns = line.split('|').map(|column| bytes_put_in(column.trim())).collect();
            rows.push(Row { line: line_number, normalization, columns });
        }
    }
    assert_eq!(parts_begun, 3, "a part of the file is missing");
    rows
}

fn parse_normalization(words: &str) -> PathNormalization {
    let mut normalization = PathNormalization::default();
    for word in words.split(' ') {
        match word {
            "keep" => normalization.ambiguous = AmbiguousPathPolicy::Keep,
            "ignore-case" => normalization.ignore_case = true,
            "ignore-trailing-slash" => normalization.ignore_trailing_slash = true,
            "decode-delimiters" => normalization.decode_delimiters = true,
            _ => assert_eq!(word, "defaults", "`with {word}` is not known"),
        }
    }
    normalization
}

/// Replaces `<0A>` by its character, and `<>` by the empty text.
fn bytes_put_in(column: &str) -> String {
    let mut text = String::new();
    let mut left = column;
    while let Some((before, after)) = left.split_once('<') {
        let (hex, after) = after.split_once('>').expect("a `<` without `>`");
        text.push_str(before);
        if !hex.is_empty() {
            text.push(char::from(u8::from_str_radix(hex, 16).expect("two hex digits")));
        }
        left = after;
    }
    text + left
}

#[test]
fn every_path_normalizes_as_in_its_row() {
    let rows = rows(0);
    assert!(rows.len() >= 150, "{} rows", rows.len());
    for Row { line, normalization, columns } in rows {
        let [path, expected] = columns.as_slice() else { panic!("line {line}: not two columns") };
        let got = match normalize(path, normalization) {
            Ok(normal) => normal.into_owned(),
            Err(error) => {
                let message = error.to_string();
                assert!(message.contains(&error.what.to_string()), "{message}");
                format!("rejected: {} at {}", error.what, error.at)
            }
        };
        assert_eq!(got, *expected, "line {line}: {path:?}");
        if !got.starts_with("rejected") {
            assert_eq!(normalize(&got, normalization).as_deref(), Ok(&*got), "line {line}: normal once more");
        }
    }
}

#[test]
fn normalized_path_is_not_copied() {
    let mut normal_already = 0;
    for Row { line, normalization, columns } in rows(0) {
        let path = &columns[0];
        if *path == columns[1] {
            let normal = normalize(path, normalization).unwrap();
            assert!(matches!(normal, Cow::Borrowed(_)), "line {line}: {path:?}");
            normal_already += 1;
        }
    }
    assert!(normal_already >= 30, "{normal_already} rows");
    // A path that only loses its end is not copied either.
    for (path, normal) in [("/a;b", "/a"), ("/a/b/..", "/a/"), ("/a//", "/a/")] {
        assert!(
            matches!(normalize(path, PathNormalization::default()), Ok(Cow::Borrowed(text)) if text == normal)
        );
    }
}

#[test]
fn every_pattern_matches_as_in_its_row() {
    let rows = rows(1);
    assert!(rows.len() >= 100, "{} rows", rows.len());
    for Row { line, normalization, columns } in rows {
        let [typed, path, expected] = columns.as_slice() else { panic!("line {line}: not three columns") };
        let pattern =
            Pattern::parse_with(typed, normalization).unwrap_or_else(|error| panic!("line {line}: {error}"));
        let answer = |pattern: &Pattern| match normalize(path, normalization) {
            Err(_) => "rejected".to_owned(),
            Ok(path) if !pattern.matches(&path) => {
                assert!(pattern.names().all(|name| pattern.capture(&path, name).is_none()), "line {line}");
                "no".to_owned()
            }
            Ok(path) => pattern.names().fold("yes".to_owned(), |answer, name| {
                format!("{answer} {name}={}", pattern.capture(&path, name).unwrap())
            }),
        };
        assert_eq!(answer(&pattern), *expected, "line {line}: {typed} on {path:?}");

        let printed = pattern.to_string();
        let again = Pattern::parse_with(&printed, normalization).unwrap();
        assert_eq!(again, pattern, "line {line}: {typed} is printed as {printed}");
    }
}

#[test]
fn pattern_error_states_what_is_wrong_and_where() {
    let rows = rows(2);
    assert!(rows.len() >= 30, "{} rows", rows.len());
    for Row { line, normalization, columns } in rows {
        let [typed, at, what, instead] = columns.as_slice() else { panic!("line {line}: not four columns") };
        let error = Pattern::parse_with(typed, normalization).expect_err(typed);
        assert_eq!(error.at().to_string(), *at, "line {line}: {error}");
        assert!(error.what().contains(what), "line {line}: {error}");
        assert!(error.instead().contains(instead), "line {line}: {error}");
        assert_eq!(error.to_string(), format!("at byte {at}: {}; {}", error.what(), error.instead()));
    }
}

#[test]
fn pattern_above_the_maximum_length_is_rejected() {
    let longest = format!("/{}", "a".repeat(Pattern::BYTES_MAX - 1));
    assert!(Pattern::parse(&longest).is_ok());
    let error = Pattern::parse(&format!("{longest}a")).unwrap_err();
    assert_eq!(error.what(), "the pattern is 1025 bytes long");
}

#[test]
fn equivalent_patterns_are_equal_and_print_alike() {
    for typed in ["/api/**/b/", "/%61pi/**/**/b/", "//api/x/../**;p/./b/.", "/api/**/b/{c}/.."] {
        let pattern = Pattern::parse(typed).unwrap();
        assert_eq!(pattern, Pattern::parse("/api/**/b/").unwrap(), "{typed}");
        assert_eq!(pattern.to_string(), "/api/**/b/", "{typed}");
    }
    assert_ne!(Pattern::parse("/api/*/b").unwrap(), Pattern::parse("/api/{x}/b").unwrap());
}

#[test]
fn names_are_listed_in_order_and_unknown_names_capture_nothing() {
    let pattern = Pattern::parse("/{b}/x/{a}").unwrap();
    assert_eq!(pattern.names().collect::<Vec<_>>(), ["b", "a"]);
    assert_eq!(pattern.capture("/1/x/2", "c"), None);
    // A path that is not normalized matches nothing.
    assert!(!Pattern::parse("/**").unwrap().matches("a"));
    assert!(!Pattern::parse("/**").unwrap().matches(""));
}

#[test]
fn segments_are_counted_from_zero() {
    assert_eq!(segment("/users/7/", 0), Some("users"));
    assert_eq!(segment("/users/7/", 1), Some("7"));
    assert_eq!(segment("/users/7/", 2), None);
    assert_eq!(segment("/users/7/", 3), None);
    assert_eq!(segment("/", 0), None);
    assert_eq!(segment("users", 0), None);
}

/// Each pattern is compared with all readings of a path.
#[test]
fn patterns_that_depend_on_parameters_or_empty_segments_are_found() {
    let normalization = PathNormalization { ignore_trailing_slash: true, ..PathNormalization::default() };
    let is_alike = |path: &str, pattern: &str| {
        let pattern = Pattern::parse_with(pattern, normalization).unwrap();
        is_read_alike(path, normalization, [&pattern].into_iter())
    };
    for (path, pattern) in [
        ("/a;v=1", "/**"),
        ("/a;v=1//b", "/**"),
        ("/api/a;v=1//b;c", "/api/**"),
        ("/api/a;v=1", "/api/*"),
        ("/a//b", "/other"),
        ("/a;b", "/other/*"),
        ("/a//", "/**"),
    ] {
        assert!(is_alike(path, pattern), "{path} {pattern}");
    }
    for (path, pattern) in [
        ("/login;a", "/login"),
        ("/login;a/x", "/login/**"),
        ("/a//b", "/a/b"),
        // A `*` of some servers matches an empty segment.
        ("/a//b", "/a/*/b"),
        ("/a/;x/b", "/a/*/b"),
        ("/files/a;x.pdf", "/files/*.pdf"),
        ("/files/a.pdf;x", "/files/*.pdf"),
        ("/login//", "/login"),
        ("/login/;a", "/login"),
        // Only the normalized path is safe.
        ("/login/..;/a", "/**"),
        ("/login//../a", "/**"),
        ("//x/login", "/**"),
        ("/;/x/login", "/**"),
    ] {
        assert!(!is_alike(path, pattern), "{path} {pattern}");
    }
}

#[test]
fn letters_of_a_pattern_are_changed_to_the_other_case() {
    for (typed, other) in [
        ("/login", Some("/LOGIN")),
        ("/Login/{id}/%C3%A9a/*-x*.PDF", Some("/lOGIN/{id}/%C3%A9A/*-X*.pdf")),
        ("/1/{id}/**", None),
        ("/", None),
    ] {
        let pattern = Pattern::parse(typed).unwrap().in_other_case();
        assert_eq!(pattern, other.map(|other| Pattern::parse(other).unwrap()), "{typed}");
    }
}

#[test]
fn path_hides_a_match_if_servers_ignore_the_ends_of_its_segments() {
    let normalization = PathNormalization { ignore_trailing_slash: true, ..PathNormalization::default() };
    let hides = |path: &str, pattern: &str, normalization: PathNormalization| {
        let pattern = Pattern::parse_with(pattern, normalization).unwrap();
        let path = normalize(path, normalization).unwrap();
        hides_match(&path, normalization, [&pattern].into_iter())
    };
    for (path, pattern) in [
        ("/login%20", "/login"),
        ("/login%09%0a", "/login"),
        ("/login.", "/login"),
        ("/login...%20.", "/login"),
        ("/login%3bx=y", "/login"),
        ("/login.%3b%3b/", "/login"),
        ("/login%3b.x%20", "/login"),
        ("/api./v1/x", "/api/**"),
        ("/api/%3bx/v1", "/api/v1"),
        ("/api/%20/v1", "/api/v1"),
        ("/files/a.png.", "/files/*.png"),
        ("/%20", "/"),
        ("/.../a", "/a"),
    ] {
        assert!(hides(path, pattern, normalization), "{path} {pattern}");
        let keep = PathNormalization { ambiguous: AmbiguousPathPolicy::Keep, ..normalization };
        assert!(!hides(path, pattern, keep), "{path} {pattern}: the upstream is known to read it as text");
    }
    for (path, pattern) in [
        ("/login", "/login"),
        ("/login%20x", "/login"),
        ("/login.x", "/login"),
        ("/login%2C", "/login"),
        ("/login.", "/**"),
        ("/login.", "/other"),
        ("/api/v1./x%3By", "/api/**"),
        ("/v1.", "/v1."),
        ("/a%3Bb", "/a%3Bb"),
        ("/files/a.", "/files/{name}"),
    ] {
        assert!(!hides(path, pattern, normalization), "{path} {pattern}");
    }
    let exact = PathNormalization::default();
    assert!(hides("/a./", "/a/", exact) && !hides("/a./", "/a", exact) && hides("/a/%20", "/a/", exact));
}
