//! `--format table`: the results of a limit, key by key.

use crate::cli::{DEMO, UPLOADS, check_golden, ratekeeper, run, simulate};

#[test]
fn demo_trace_is_listed_by_key() {
    let output = run(
        &["simulate", "--limit", "fixed_window:", "--trace", "-"],
        &std::fs::read_to_string(DEMO).unwrap(),
    );
    assert_eq!((output.code, &*output.stderr), (0, ""));
    check_golden("demo-fixed-window.txt", &output.stdout);
}

/// Access logs are ordered by the end of requests, not by their start.
#[test]
fn unordered_trace_gives_the_report_of_the_ordered_one() {
    let trace = std::fs::read_to_string(DEMO).unwrap();
    let (header, lines) = trace.split_once('\n').unwrap();
    let reversed: Vec<&str> = lines.lines().rev().collect();
    let unordered = format!("{header}\n{}\n", reversed.join("\n"));
    for args in [&["--limit", "fixed_window:"][..], &["--compare"]] {
        let args = [&["simulate", "--trace", "-"], args].concat();
        let output = run(&args, &unordered);
        assert_eq!((output.code, &*output.stderr), (0, ""));
        assert_eq!(output.stdout, run(&args, &trace).stdout, "{args:?}");
    }
}

/// The report must not be wrong without a warning.
#[test]
fn requests_that_are_too_late_to_sort_print_a_warning() {
    let trace: String = (1_000..201_000).chain([1, 2]).map(|time| format!("{time}\n")).collect();
    let output = simulate("token_bucket:", &[], &format!("time\n{trace}"));
    assert_eq!(output.code, 0);
    assert!(output.stdout.contains("lines are out of order"), "{}", output.stdout);
    assert_eq!(
        output.stderr,
        "warning: 2 requests are more than 65536 requests late and were not sorted, so the report is not exact\n   = \
         help: sort the trace by time\n"
    );
}

#[test]
fn costs_have_their_own_column() {
    let trace = std::fs::read_to_string(UPLOADS).unwrap();
    let output = simulate("token_bucket: { capacity: 100, refill: 6/min }", &[], &trace);
    assert_eq!((output.code, &*output.stderr), (0, ""));
    check_golden("uploads-token-bucket.txt", &output.stdout);
}

/// At the boundary of a minute a fixed window allows twice its limit, and the table reports it.
#[test]
fn boundary_burst_of_the_fixed_window_is_flagged() {
    let trace: String = (50..70).map(|second| format!("{second}\n")).collect();
    for (limit, peak) in [
        ("fixed_window: { limit: 5, window: 60s }", "10 / 5 !"),
        ("sliding_window_log: { limit: 5, window: 60s }", "5 / 5"),
    ] {
        let report = simulate(limit, &[], &format!("time\n{trace}")).stdout;
        let all = report.lines().find(|line| line.starts_with("  all ")).unwrap_or_default().to_owned();
        assert!(all.ends_with(peak), "{report}");
    }
}

#[test]
fn most_denied_keys_come_first_and_the_rest_is_summed() {
    let trace: String = (0..5).flat_map(|key| (0..=key).map(move |_| format!("1,key-{key}\n"))).collect();
    let report =
        simulate("fixed_window: { limit: 1, window: 60s }", &["--keys", "2"], &format!("time,key\n{trace}"));
    let rows: Vec<Vec<&str>> =
        report.stdout.lines().skip(4).take(5).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][..4], ["key", "requests", "allowed", "denied"]);
    assert_eq!(rows[1][..4], ["key-4", "5", "1", "4"]);
    assert_eq!(rows[2][..4], ["key-3", "4", "1", "3"]);
    assert_eq!(rows[3][..6], ["3", "keys", "more", "6", "3", "3"]);
    assert_eq!(rows[4][..4], ["all", "15", "5", "10"]);
}

/// Only the first 100,000 keys have individual statistics; the others are summed, and the table states it.
#[test]
fn statistics_of_unlimited_keys_are_bounded() {
    let trace: String = (0..100_005).map(|n| format!("1,key-{n}\n")).collect();
    let report =
        simulate("fixed_window: { limit: 1 }", &["--keys", "0"], &format!("time,key\n{trace}")).stdout;
    let row = |name: &str| {
        let line = report.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line[name.len().min(line.len())..].split_whitespace().next().unwrap_or_default().to_owned()
    };
    assert_eq!(row("  100,000 keys more"), "100,000");
    assert_eq!(row("  other keys"), "5");
    assert_eq!(row("  all"), "100,005");
    assert!(report.contains("other keys: only the first 100,000 keys have their own statistics"), "{report}");
}

#[test]
fn empty_trace_prints_an_empty_table() {
    let output = simulate("token_bucket:", &[], "time,key\n");
    assert_eq!((output.code, &*output.stderr), (0, ""));
    assert!(output.stdout.contains("0 requests of 0 keys"), "{}", output.stdout);
}

/// Key names are the user's data, but they reach a terminal.
#[test]
fn control_characters_in_keys_are_not_printed() {
    let report = simulate("token_bucket:", &[], "time,key\n1,\x1b[31mred\n").stdout;
    assert!(!report.contains('\x1b') && report.contains("[31mred"), "{report:?}");
}

#[test]
fn output_without_a_terminal_has_no_colors_and_no_progress_bar() {
    let output = ratekeeper(&["simulate", "--limit", "token_bucket:", "--trace", DEMO]).output().unwrap();
    assert!(!output.stdout.contains(&0x1b));
    assert_eq!(output.stderr, b"");
}
