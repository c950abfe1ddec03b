//! Limits as YAML: accepted forms, their meaning, and error messages.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::time::Duration;

use crate::common::golden;
use proptest::prelude::*;
use ratekeeper_config::{Diagnostic, TEXT_BYTES_MAX, parse_limit, to_yaml};
use ratekeeper_core::{
    EdgePolicy, LeakyMode, Limit, LogPolicy, Rate, RefillStyle, WINDOW_MAX, WINDOW_MIN, WindowAlign,
};

#[test]
fn valid_limits_have_the_expected_meaning() {
    for (yaml, canonical) in [
        // All parameters are optional, and so are the braces.
        ("token_bucket:", "token_bucket: { capacity: 10, refill: 1/s, style: smooth }"),
        ("token_bucket: {}", "token_bucket: { capacity: 10, refill: 1/s, style: smooth }"),
        ("token_bucket: { capacity: }", "token_bucket: { capacity: 10, refill: 1/s, style: smooth }"),
        ("leaky_bucket:", "leaky_bucket: { capacity: 10, leak: 1/s, mode: police }"),
        ("fixed_window:", "fixed_window: { limit: 10, window: 1m, align: clock }"),
        ("sliding_window_log:", "sliding_window_log: { limit: 10, window: 1m, count: admitted }"),
        (
            "sliding_window_counter:",
            "sliding_window_counter: { limit: 10, window: 1m, buckets: 1, edge: weigh }",
        ),
        // All parameters may be set.
        (
            "token_bucket: { capacity: 4, refill: 4/min, style: stepped }",
            "token_bucket: { capacity: 4, refill: 4/min, style: stepped }",
        ),
        (
            "leaky_bucket: { capacity: 5, leak: 1/2s, mode: shape }",
            "leaky_bucket: { capacity: 5, leak: 1/2s, mode: shape }",
        ),
        (
            "fixed_window: { align: first_request, window: 1h, limit: 100 }",
            "fixed_window: { limit: 100, window: 1h, align: first_request }",
        ),
        (
            "sliding_window_log: { limit: 1, window: 1500ms, count: all }",
            "sliding_window_log: { limit: 1, window: 1500ms, count: all }",
        ),
        (
            "sliding_window_counter: { limit: 100, window: 60s, buckets: 6, edge: drop }",
            "sliding_window_counter: { limit: 100, window: 1m, buckets: 6, edge: drop }",
        ),
        // Any YAML notation is accepted.
        (
            "# a comment\nsliding_window_counter:\n  limit: 4294967295 # the most\n  edge: keep\n",
            "sliding_window_counter: { limit: 4294967295, window: 1m, buckets: 1, edge: keep }",
        ),
        (
            r#"{"token_bucket": {"capacity": "3", "refill": "5/week"}}"#,
            "token_bucket: { capacity: 3, refill: 5/week, style: smooth }",
        ),
    ] {
        assert_eq!(parse_limit(yaml).as_ref().map(to_yaml).as_deref(), Ok(canonical), "{yaml}");
    }
}

#[test]
fn rate_notations_are_equivalent() {
    for (typed, canonical) in [
        ("1/s", "1/s"),
        ("1/sec", "1/s"),
        ("1/second", "1/s"),
        ("1/1s", "1/s"),
        ("1 / 1 s", "1/s"),
        ("4/m", "4/min"),
        ("4/min", "4/min"),
        ("4/minute", "4/min"),
        ("4/60s", "4/min"),
        ("100/h", "100/h"),
        ("100/hour", "100/h"),
        ("100/1h", "100/h"),
        ("100/15m", "100/15m"),
        ("10/d", "10/day"),
        ("10/day", "10/day"),
        ("5/w", "5/week"),
        ("5/week", "5/week"),
        ("5/7d", "5/week"),
        ("3/ms", "3/ms"),
        ("3/500ms", "3/500ms"),
        ("10000000/s", "10000000/s"),
        ("1/366d", "1/366d"),
    ] {
        let yaml = format!("token_bucket: {{ refill: {typed} }}");
        let expected = format!("token_bucket: {{ capacity: 10, refill: {canonical}, style: smooth }}");
        assert_eq!(parse_limit(&yaml).as_ref().map(to_yaml), Ok(expected), "{typed}");
    }
}

#[test]
fn window_notations_are_equivalent() {
    for (typed, millis) in [
        ("1ms", 1),
        ("500ms", 500),
        ("60s", 60_000),
        ("60 seconds", 60_000),
        ("15m", 900_000),
        ("15min", 900_000),
        ("1h", 3_600_000),
        ("1d", 86_400_000),
        ("1w", 604_800_000),
        ("366d", 366 * 86_400_000),
    ] {
        let limit = parse_limit(&format!("fixed_window: {{ window: {typed} }}"));
        assert_eq!(limit.map(|limit| limit.window()), Ok(Duration::from_millis(millis)), "{typed}");
    }
}

/// Each case is a text, a line of dashes, and the expected message. To update the messages, run the tests with
/// `RATEKEEPER_WRITE_GOLDEN=1` and review the difference.
#[test]
fn invalid_limits_have_the_expected_messages() {
    golden("bad_limits.txt", |yaml| parse_limit(yaml).unwrap_err().to_string());
}

#[test]
fn error_shows_its_file_name() {
    let error = parse_limit("\nfixed_window: { limt: 3 }").unwrap_err();
    assert_eq!((error.line(), error.column()), (2, 17));
    let named = error.in_file("limits.yaml").to_string();
    assert_eq!(named.lines().nth(1), Some("  --> limits.yaml:2:17"));
    assert_eq!(named.lines().next(), Some("error: unknown field `limt` in `fixed_window`"));
}

#[test]
fn long_line_is_cut_around_the_error() {
    let yaml = format!("token_bucket: {{ {}capacity: x }}", " ".repeat(100_000));
    let message = parse_limit(&yaml).unwrap_err().to_string();
    assert!(
        message.starts_with("error: `capacity` is `x`") && message.contains("--> line 1, column 100027\n"),
        "{message}"
    );
    assert!(message.lines().all(|line| line.chars().count() < 130), "{message}");
}

#[test]
fn message_contains_no_control_characters() {
    let message = parse_limit("token_bucket: { style: \"\u{1b}[31mred\u{9b}\" }").unwrap_err().to_string();
    assert!(!message.contains(['\u{1b}', '\u{9b}']), "{message:?}");
}

/// Inputs made to exhaust the reader: each must be rejected within milliseconds.
#[test]
fn resource_exhaustion_inputs_are_rejected() {
    let laughs: String = (1..10)
        .map(|n| format!("  a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 10].join(", ")))
        .collect();
    let merges: String = (1..200)
        .map(|n| format!("  <<: &m{n} {{ <<: [{}] }}\n", vec![format!("*m{}", n - 1); 9].join(", ")))
        .collect();
    for bomb in [
        format!("a0: &a0 [lol]\n{laughs}"),
        format!("token_bucket:\n  a0: &a0 [lol]\n{laughs}"),
        format!("token_bucket:\n  capacity: &m0 {{ refill: 1/s }}\n{merges}"),
        format!("token_bucket: {{ capacity: {} }}", "[".repeat(400_000)),
        "{".repeat(400_000),
        "- ".repeat(400_000),
        "? ".repeat(400_000),
        format!("token_bucket: {{ capacity: {} }}", "9".repeat(900_000)),
        format!("token_bucket: {{ {} }}", "capacity: 1, ".repeat(70_000)),
        format!("token_bucket: {{}} {}", "\n# \n".repeat(200_000)) + "x",
        "x".repeat(TEXT_BYTES_MAX + 1),
    ] {
        assert!(parse_limit(&bomb).is_err(), "{}", &bomb[..60]);
    }
    let message = parse_limit(&" ".repeat(TEXT_BYTES_MAX + 1)).unwrap_err();
    assert_eq!(message.message(), "the text has 1000001 bytes; the maximum is 1000000");
}

#[test]
fn error_implements_std_error() {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}
    check::<Diagnostic>();
}

prop_compose! {
    fn window()(nanos in prop_oneof![
        WINDOW_MIN.as_nanos() as u64..=WINDOW_MAX.as_nanos() as u64,
        (1_u64..=1_000_000).prop_map(|millis| millis * 1_000_000),
        (1_u64..=366).prop_map(|days| days * 86_400_000_000_000),
    ]) -> Duration {
        Duration::from_nanos(nanos)
    }
}

prop_compose! {
    fn rate()(period in window(), share in 0_u64..=1_000_000) -> Rate {
        let count_max = u128::from(Rate::MAX_PER_SECOND) * period.as_nanos() / 1_000_000_000;
        Rate::new((count_max as u64 / 1_000_000 * share).max(1), period).unwrap()
    }
}

fn limit() -> impl Strategy<Value = Limit> {
    let count = prop_oneof![1_u32..=100, 1_u32..=u32::MAX];
    let style = prop_oneof![Just(RefillStyle::Smooth), Just(RefillStyle::Stepped)];
    let mode = prop_oneof![Just(LeakyMode::Police), Just(LeakyMode::Shape)];
    let align = prop_oneof![Just(WindowAlign::Clock), Just(WindowAlign::FirstRequest)];
    let counted = prop_oneof![Just(LogPolicy::Admitted), Just(LogPolicy::All)];
    let edge = prop_oneof![Just(EdgePolicy::Weigh), Just(EdgePolicy::Drop), Just(EdgePolicy::Keep)];
    prop_oneof![
        (count.clone(), rate(), style).prop_map(|(n, r, s)| Limit::token_bucket(n, r, s).unwrap()),
        (count.clone(), rate(), mode).prop_map(|(n, r, m)| Limit::leaky_bucket(n, r, m).unwrap()),
        (count.clone(), window(), align).prop_map(|(n, w, a)| Limit::fixed_window(n, w, a).unwrap()),
        (count.clone(), window(), counted).prop_map(|(n, w, c)| Limit::sliding_window_log(n, w, c).unwrap()),
        (count, window(), 1_u32..=1024, edge)
            .prop_map(|(n, w, b, e)| Limit::sliding_window_counter(n, w, b, e).unwrap()),
    ]
}

proptest! {
    #![proptest_config(testbed::property::cases(256))]

    #[test]
    fn printed_limit_parses_to_the_same_limit(limit in limit()) {
        prop_assert_eq!(parse_limit(&to_yaml(&limit)), Ok(limit));
    }

    /// For any input, the result is a limit or an error that fits a screen.
    #[test]
    fn any_input_is_a_limit_or_a_short_error(
        noise in "\\PC{0,40}",
        word in prop_oneof![Just("token_bucket"), Just("fixed_window"), Just("sliding_window_counter")],
        name in prop_oneof![Just("capacity"), Just("refill"), Just("window"), Just("limit"), Just("edge")],
    ) {
        for yaml in [noise.clone(), format!("{word}: {noise}"), format!("{word}: {{ {name}: {noise} }}")] {
            if let Err(error) = parse_limit(&yaml) {
                prop_assert!(error.line() >= 1 && error.column() >= 1);
                prop_assert!(error.to_string().lines().count() <= 6, "{}", error);
            }
        }
    }
}
