//! `--format jsonl`: every decision, byte for byte.

use crate::cli::{Output, file, run, simulate};

const FIXED: &str = "fixed_window: { limit: 2, window: 10s }";

fn done(stdout: &str) -> Output {
    Output { code: 0, stdout: stdout.to_owned(), stderr: String::new() }
}

#[test]
fn each_request_prints_one_line() {
    assert_eq!(
        simulate(
            FIXED,
            &["--format", "jsonl"],
            "time,key,cost\n1700000000.5,a,1\n1700000001,a,2\n1700000002,b,3\n1700000003,a,\n"
        ),
        done(
            r#"{"time":"1700000000.5","key":"a","cost":1,"allowed":true,"limit":2,"remaining":1,"retry_after":null,"reset_after":9.5,"delay":0}
{"time":"1700000001","key":"a","cost":2,"allowed":false,"limit":2,"remaining":1,"retry_after":9.0,"reset_after":9.0,"delay":0}
{"time":"1700000002","key":"b","cost":3,"allowed":false,"limit":2,"remaining":2,"retry_after":"never","reset_after":0,"delay":0}
{"time":"1700000003","key":"a","cost":1,"allowed":true,"limit":2,"remaining":0,"retry_after":null,"reset_after":7.0,"delay":0}
"#
        )
    );
}

#[test]
fn shaping_bucket_prints_the_delay() {
    assert_eq!(
        simulate(
            "leaky_bucket: { capacity: 3, leak: 3/s, mode: shape }",
            &["--format", "jsonl"],
            "time\n1\n1\n"
        ),
        done(
            r#"{"time":"1","key":"","cost":1,"allowed":true,"limit":3,"remaining":2,"retry_after":null,"reset_after":0.333334,"delay":0}
{"time":"1","key":"","cost":1,"allowed":true,"limit":3,"remaining":1,"retry_after":null,"reset_after":0.666667,"delay":0.333334}
"#
        )
    );
}

#[test]
fn rfc_3339_times_are_printed_as_written() {
    assert_eq!(
        simulate(FIXED, &["--format", "jsonl"], "key,time\n\"a \"\"b\"\"\",2023-11-14T23:13:25.25+01:00\n"),
        done(
            r#"{"time":"2023-11-14T23:13:25.25+01:00","key":"a \"b\"","cost":1,"allowed":true,"limit":2,"remaining":1,"retry_after":null,"reset_after":4.75,"delay":0}
"#
        )
    );
}

#[test]
fn limit_and_trace_are_read_from_files() {
    let limit = file("limit.yaml", "# two in ten seconds\nfixed_window:\n  limit: 2\n  window: 10s\n");
    let trace = file("trace.csv", "\u{feff}time,key\r\n5,a\r\n");
    let args = ["simulate", "--limit-file", limit.to_str().unwrap(), "--trace", trace.to_str().unwrap()];
    assert_eq!(
        run(&[&args[..], &["--format", "jsonl"]].concat(), ""),
        done(
            r#"{"time":"5","key":"a","cost":1,"allowed":true,"limit":2,"remaining":1,"retry_after":null,"reset_after":5.0,"delay":0}
"#
        )
    );
}

#[test]
fn empty_trace_prints_nothing() {
    assert_eq!(simulate(FIXED, &["--format", "jsonl"], "time,key,cost\n"), done(""));
}

/// Decisions before an invalid line are printed, and the invalid line is reported.
#[test]
fn invalid_line_ends_the_output_with_an_error() {
    let output = simulate(FIXED, &["--format", "jsonl"], "time\n1\nlater\n3\n");
    assert_eq!(output.code, 2);
    assert_eq!(output.stdout.lines().count(), 1);
    assert_eq!(
        output.stderr,
        "error: in column time, `later` is not a time\n  --> stdin:3\n   = help: write seconds since 1970, as in 1700000000.5, \
         or a time as in 2023-11-14T22:13:20.5Z\n"
    );
}

/// A key that does not fit into memory is decided by the overflow policy, not the limit: the user must be warned.
#[test]
fn inexact_decisions_print_a_warning() {
    let trace: String = (0..10_000).map(|n| format!("5,key-{n}\n")).collect();
    let output = simulate(FIXED, &["--format", "jsonl", "--max-keys", "10"], &format!("time,key\n{trace}"));
    assert_eq!((output.code, output.stdout.lines().count()), (0, 10_000));
    let mut lines = output.stderr.lines();
    let first = lines.next().unwrap_or_default();
    assert!(first.starts_with("warning: "), "{first}");
    assert!(
        first.ends_with(" requests had a key that did not fit into memory, so their decisions are not exact"),
        "{first}"
    );
    assert_eq!(lines.next(), Some("   = help: raise --max-keys"));
    assert_eq!(lines.next(), None);
}

/// Each line of the output belongs to one line of the trace, so the trace is not sorted.
#[test]
fn decisions_of_an_unordered_trace_keep_its_order_with_a_warning() {
    let output = simulate(FIXED, &["--format", "jsonl"], "time\n5\n3\n4\n6\n");
    let times: Vec<&str> = output.stdout.lines().map(|line| &line[9..10]).collect();
    assert_eq!((output.code, times), (0, vec!["5", "3", "4", "6"]));
    assert_eq!(
        output.stderr,
        "warning: 2 requests are earlier than one before them: they are decided as by a clock that steps back\n   = help: \
         sort the trace by time\n"
    );
}
