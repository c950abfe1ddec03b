//! Templates: new paths from the captures of a pattern.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use proptest::prelude::*;
use ratekeeper_rules::path::{PathNormalization, Pattern, Template, normalize};

fn expanded(pattern: &str, template: &str, path: &str) -> Option<String> {
    let pattern = Pattern::parse(pattern).unwrap();
    Template::parse(template, &pattern).unwrap().expand(&pattern, path)
}

#[test]
fn names_are_replaced_by_captures() {
    for (pattern, template, path, expected) in [
        ("/users/{id}", "/v2/{id}", "/users/7", "/v2/7"),
        ("/users/{id}", "/{id}.json", "/users/7", "/7.json"),
        ("/{a}/{b}", "/{b}-{a}/x", "/1/2", "/2-1/x"),
        ("/{a}", "/{a}/{a}", "/1", "/1/1"),
        ("/{a}", "/.{a}/", "/%C3%A9", "/.%C3%A9/"),
        ("/a", "/b", "/a", "/b"),
        ("/a", "/", "/a", "/"),
        ("/a", "/%7Eb/é", "/a", "/~b/%C3%A9"),
        // A segment of the pattern with the name `rest` takes precedence over the trailing `**`.
        ("/{rest}/**", "/v2/{rest}/x", "/a/b", "/v2/a/x"),
    ] {
        assert_eq!(expanded(pattern, template, path).as_deref(), Some(expected), "{template}");
    }
}

#[test]
fn rest_is_the_match_of_the_trailing_wildcard_with_its_slash() {
    for (pattern, template, path, expected) in [
        ("/api/**", "/v2/{rest}", "/api/x/y", "/v2/x/y"),
        ("/api/**", "/v2/{rest}", "/api/x/", "/v2/x/"),
        ("/api/**", "/v2/{rest}", "/api/", "/v2/"),
        ("/api/**", "/v2/{rest}", "/api", "/v2"),
        ("/api/**", "/{rest}", "/api/x", "/x"),
        ("/api/**", "/{rest}", "/api/", "/"),
        ("/api/**", "/{rest}", "/api", "/"),
        ("/**", "/v2/{rest}", "/", "/v2/"),
        ("/**/b/**", "/{rest}", "/a/b/c/b/d", "/c/b/d"),
        ("/{a}/**", "/{a}/x/{rest}", "/1/2", "/1/x/2"),
    ] {
        assert_eq!(expanded(pattern, template, path).as_deref(), Some(expected), "{template} of {path}");
    }
    let pattern = Pattern::parse("/api/**").unwrap();
    assert_eq!(pattern.rest("/api/x"), Some("/x"));
    assert_eq!(pattern.rest("/other"), None);
    assert_eq!(Pattern::parse("/api/**/x").unwrap().rest("/api/x"), None);
}

#[test]
fn path_that_does_not_match_is_not_expanded() {
    for template in ["/x", "/{a}", "/{rest}"] {
        assert_eq!(expanded("/users/{a}/**", template, "/other/7"), None, "{template}");
    }
}

#[test]
fn template_error_states_what_is_wrong_and_where() {
    let error_of = |pattern: &str, template: &str| {
        let error = Template::parse(template, &Pattern::parse(pattern).unwrap()).unwrap_err();
        (error.at(), error.what().to_owned(), error.instead().to_owned())
    };
    for (pattern, template, at, what) in [
        ("/**", "", 0, "the new path does not begin with a slash"),
        ("/**", "a", 0, "the new path does not begin with a slash"),
        ("/**", "/a//b", 3, "the new path has a segment that servers leave out"),
        ("/**", "/a/%2E%2E", 3, "the new path has a segment that servers leave out"),
        ("/**", "/a/{b}", 3, "the pattern has no `{b}`"),
        ("/{b}", "/a/{rest}", 3, "the pattern has no `{rest}`"),
        ("/**", "/a/{}", 3, "the pattern has no `{}`"),
        ("/**", "/{rest}/a", 1, "`{rest}` is any number of segments, and more follows"),
        ("/**", "/a{rest}", 2, "`{rest}` has something else in its segment"),
        ("/**", "/a/*", 3, "`*` is any text, and a new path must be one"),
        ("/**", "/a;b", 2, "`;` begins parameters, which are not part of a path"),
        ("/{b}", "/%2{b}", 1, "the new path has a percent sign without two hex digits"),
        ("/**", "/a%2fb", 2, "the new path has an encoded slash"),
        ("/**", "/a?b", 2, "the new path has a query or a fragment"),
        ("/**", "/a{b", 2, "`{` is not closed in its segment"),
        ("/**", "/a}b", 2, "`}` closes a brace that was not opened"),
    ] {
        let (position, message, instead) = error_of(pattern, template);
        assert_eq!((position, &*message), (at, what), "{template}");
        assert!(!instead.is_empty());
    }
    assert_eq!(error_of("/a", "/{rest}").2, "write a pattern that ends with `/**`: that is the rest");
    assert_eq!(error_of("/{a}", "/{b}").2, "write `{a}`");
    assert_eq!(error_of("/{a}/**", "/{b}").2, "the names are `{a}`, `{rest}`");
    assert_eq!(error_of("/a", &"/a".repeat(600)).1, "the new path is 1200 bytes long");
}

proptest! {
    #![proptest_config(testbed::property::cases(256))]

    /// So the upstream receives exactly this path, and no server on the way changes it.
    #[test]
    fn expanded_path_is_normalized(
        template in "/([a.%2-]|\\{x\\}|\\{rest\\}|\\{y\\}|/){0,8}",
        path in "(/[a.%25E-]{0,4}){2,5}",
    ) {
        let pattern = Pattern::parse("/{x}/{y}/**").unwrap();
        let normalization = PathNormalization::default();
        if let (Ok(template), Ok(path)) = (Template::parse(&template, &pattern), normalize(&path, normalization))
            && let Some(made) = template.expand(&pattern, &path)
        {
            let normal = normalize(&made, normalization);
            prop_assert_eq!(normal.as_deref(), Ok(made.as_str()));
        }
    }

    #[test]
    fn no_template_panics(typed in "\\PC{0,30}") {
        let pattern = Pattern::parse("/{x}/**").unwrap();
        if let Err(error) = Template::parse(&typed, &pattern) {
            prop_assert!(error.at() <= typed.len() && typed.is_char_boundary(error.at()), "{error}");
        }
    }
}
