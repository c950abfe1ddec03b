//! The quick run prints the same rows and goals as the full one, in seconds.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::Path;
use std::process::Command;

/// Returns the report of a quick run that starts `ratekeeper`.
fn with_ratekeeper(name: &str) -> String {
    let bench = Path::new(env!("CARGO_BIN_EXE_bench"));
    // A test of the whole workspace has already built the program; a debug build is fast enough here.
    let ratekeeper = bench.with_file_name("ratekeeper");
    if !ratekeeper.is_file() {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built =
            Command::new(cargo).args(["build", "--quiet", "--package", "ratekeeper-cli"]).status().unwrap();
        assert!(built.success());
    }
    let run = Command::new(bench).args([name, "--quick", "--binary"]).arg(ratekeeper).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).unwrap()
}

#[test]
fn memory_report_has_every_row_and_goal() {
    let run = Command::new(env!("CARGO_BIN_EXE_bench")).args(["memory", "--quick"]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let report = String::from_utf8(run.stdout).unwrap();

    assert!(report.contains("not to be quoted"), "{report}");
    for keys in ["one hot key", "1 thousand", "1 million uniform", "1 million Zipf"] {
        for key_type in ["u64", "String"] {
            for threads in ["1 thread ", "2 threads"] {
                for outcome in ["allowed", "denied"] {
                    let row = format!("{keys:<17}  {key_type:<6}  {threads}  {outcome:<7} ");
                    assert!(report.contains(&row), "no row {row:?} in\n{report}");
                }
            }
        }
    }
    for goal in [
        ">= 2x governor, check, one hot key, 1 thread, allowed: u64 ",
        ">= 2x governor, check, one hot key, 2 threads, allowed: u64 ",
        ">= 2x governor, check, one hot key, 2 threads, denied: u64 ",
        ">= 4x governor, check, 1 million uniform, 2 threads, allowed: String ",
        ">= 2x governor, check, 1 million Zipf, 2 threads, allowed: String ",
        ">= 12x governor, check_many(16), 1 million uniform, 2 threads, allowed: String ",
        "<= 34 B a key: ",
        "<= 2x the token bucket, leaky_bucket: ",
        "<= 2x the token bucket, fixed_window: ",
        "<= 3.5x the token bucket, sliding_window_log: ",
        "<= 1.8x the token bucket, sliding_window_counter: ",
    ] {
        let line = report.lines().find(|line| line.contains(goal));
        let line = line.unwrap_or_else(|| panic!("no line {goal:?} in\n{report}"));
        assert!(line.starts_with("met ") || line.starts_with("NOT met "), "{line}");
    }
}

#[test]
fn redis_report_has_every_row_and_goal() {
    let run = Command::new(env!("CARGO_BIN_EXE_bench")).args(["redis", "--quick"]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let report = String::from_utf8(run.stdout).unwrap();

    assert!(report.contains("not to be quoted"), "{report}");
    for algorithm in [
        "token bucket",
        "token bucket, rested keys",
        "leaky bucket",
        "fixed window",
        "counter",
        "counter, new windows",
        "log, growing",
        "hot log, allowed",
        "hot log, allowed, by the clock",
        "hot log, denied",
    ] {
        for row in [format!("\n{algorithm}, baseline "), format!("\n{algorithm}, ours ")] {
            assert!(report.contains(&row), "no row {row:?} in\n{report}");
        }
    }
    for goal in [
        "<= 1/2.5 of the baseline's server time, token bucket: ",
        "<= 1/2.5 of the baseline's server time, leaky bucket: ",
        "<= 1/2 of the baseline's server time, fixed window: ",
        "<= 2/3 of the baseline's server time, counter: ",
        "<= 1/3 of the baseline's server time, hot log, allowed: ",
        "<= 1/3 of the baseline's server time, hot log, denied: ",
        "<= 1/4 of the baseline's server time, token bucket, 16 a call: ",
        "<= 9 bytes per entry, a full log of 100: 8.98",
        "denied keys before their retry_after cost Redis nothing: ",
        ">= 20x the exact mode's decisions per second, leased: ",
    ] {
        let line = report.lines().find(|line| line.contains(goal));
        let line = line.unwrap_or_else(|| panic!("no line {goal:?} in\n{report}"));
        assert!(line.starts_with("met ") || line.starts_with("NOT met "), "{line}");
    }
}

#[test]
fn gateway_report_has_every_row_and_goal() {
    let report = with_ratekeeper("gateway");

    assert!(report.contains("not to be quoted"), "{report}");
    let (allowed, denied) = report.split_once("denied: 429").unwrap();
    let left_out = |name: &str| report.contains(&format!("left out: {name}"));
    for name in [
        "nginx",
        "nginx, no forwarded headers",
        "HAProxy",
        "Envoy",
        "ratekeeper",
        "ratekeeper, Redis store",
        "ratekeeper, no headers",
        "ratekeeper, no admin",
        "ratekeeper, access log",
    ] {
        let row = format!("\n{name:<30}  ");
        let is_there = allowed.contains(&row) && denied.contains(&row);
        assert!(is_there || left_out(name), "no row {name:?} in\n{report}");
    }
    for cost in ["headers", "admin listener", "access log", "limits, headers included", "limits in Redis"] {
        assert!(report.contains(&format!("\n{cost:<30}  allowed ")), "no cost of {cost:?} in\n{report}");
    }
    for goal in [
        "<= 1.05x nginx's processor time per proxied request, headers and metrics on: ",
        "<= 1.15x nginx's processor time per denied request, headers and metrics on: ",
        "<= 1.30x nginx's processor time per proxied request, limits in Redis, headers and metrics on: ",
    ] {
        let line = report.lines().find(|line| line.contains(goal));
        let line = line.unwrap_or_else(|| panic!("no line {goal:?} in\n{report}"));
        assert!(line.starts_with("met ") || line.starts_with("NOT met "), "{line}");
        assert!(!line.contains("NaN"), "{line}");
    }
}

#[test]
fn apis_report_has_every_row_and_goal() {
    let report = with_ratekeeper("apis");

    assert!(report.contains("not to be quoted"), "{report}");
    // throttlecrab takes minutes to build, so only a full run installs it.
    let is_left_out = report.contains("left out: throttlecrab: not installed");
    let theirs = (!is_left_out).then_some("throttlecrab");
    let resp = ["ratekeeper, CL.THROTTLE", "ratekeeper, RK.CHECK"];
    for (transport, ours) in [
        ("RESP, 16 in a pipeline", &resp[..]),
        ("RESP, one at a time", &resp),
        ("HTTP", &["ratekeeper, /v1/check"]),
        ("gRPC", &["ratekeeper, ShouldRateLimit"]),
    ] {
        for job in ["allowed", "denied"] {
            let title = format!("\n{transport}, {job} ");
            let (_, table) = report.split_once(&title).unwrap_or_else(|| panic!("no {title:?} in\n{report}"));
            let (table, _) = table.split_once("\n\n").unwrap();
            let is_counted = transport.starts_with("RESP") && job == "allowed";
            let redis = is_counted.then_some("Redis, INCR");
            for name in ours.iter().copied().chain(theirs).chain(redis) {
                assert!(table.contains(&format!("\n{name:<32}  ")), "no {name:?} in {title:?} of\n{report}");
            }
            assert!(!table.contains("NaN"), "{table}");
        }
    }
    for goal in [
        "ratekeeper, CL.THROTTLE, RESP, 16 in a pipeline: ",
        "ratekeeper, CL.THROTTLE, RESP, one at a time: ",
        "ratekeeper, RK.CHECK, RESP, 16 in a pipeline: ",
        "ratekeeper, RK.CHECK, RESP, one at a time: ",
        "ratekeeper, /v1/check, HTTP: ",
        "ratekeeper, ShouldRateLimit, gRPC: ",
    ] {
        let goal = format!("<= throttlecrab's processor time per decision, {goal}");
        let line = report.lines().find(|line| line.contains(&goal));
        assert_eq!(line.is_none(), is_left_out, "{goal:?} in\n{report}");
        let is_goal_line = |line: &str| line.starts_with("met ") || line.starts_with("NOT met ");
        assert!(line.is_none_or(is_goal_line), "{line:?}");
    }
}
