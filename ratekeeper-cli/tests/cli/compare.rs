//! `--compare`: the five algorithms side by side.

use crate::cli::{DEMO, check_golden, run};

#[test]
fn limit_and_trace_are_optional() {
    let output = run(&["simulate", "--compare"], "");
    assert_eq!((output.code, &*output.stderr), (0, ""));
    check_golden("demo-compare.txt", &output.stdout);
}

/// Ten per minute is the same setting, whichever algorithm it is written for.
#[test]
fn settings_are_derived_from_any_limit() {
    let same = |limit: &str| run(&["simulate", "--compare", "--limit", limit], "");
    let expected = same("sliding_window_counter: { limit: 10, window: 60s }");
    assert_eq!(expected.code, 0);
    for limit in [
        "token_bucket: { capacity: 10, refill: 10/min }",
        "token_bucket: { capacity: 10, refill: 5/30s, style: stepped }",
        "leaky_bucket: { capacity: 10, leak: 1/6s, mode: shape }",
        "fixed_window: { align: first_request }",
        "sliding_window_log: { count: all }",
        "sliding_window_counter: { buckets: 6, edge: keep }",
    ] {
        assert_eq!(same(limit), expected, "{limit}");
    }
}

#[test]
fn same_input_prints_the_same_bytes() {
    let once =
        || run(&["simulate", "--compare", "--trace", DEMO, "--limit", "fixed_window: { limit: 7 }"], "");
    assert_eq!(once(), once());
}

#[test]
fn window_that_an_algorithm_cannot_have_is_rejected() {
    let output =
        run(&["simulate", "--compare", "--limit", "token_bucket: { capacity: 10, refill: 1/366d }"], "");
    assert_eq!((output.code, &*output.stdout), (2, ""));
    assert!(
        output
            .stderr
            .starts_with("error: not every algorithm can have this limit, so there is nothing to compare: "),
        "{}",
        output.stderr
    );
}

#[test]
fn empty_trace_is_compared_without_error() {
    let output = run(&["simulate", "--compare", "--trace", "-"], "time\n");
    assert_eq!((output.code, &*output.stderr), (0, ""));
    assert!(output.stdout.contains("0 requests of 0 keys"), "{}", output.stdout);
}
