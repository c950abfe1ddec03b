//! Closed pipes and full disks.

use std::io::{BufRead, BufReader, Read, Write as _};
use std::process::Stdio;

use crate::cli::{DEMO, file, ratekeeper};

/// `ratekeeper ... | head -3`: a closed pipe is not a failure and prints no message.
#[test]
fn closed_pipe_exits_with_0_and_no_message() {
    let trace: String = (0..300_000).map(|n| format!("{n},a\n")).collect();
    let trace = file("long.csv", format!("time,key\n{trace}"));
    let mut child = ratekeeper(&[
        "simulate",
        "--limit",
        "token_bucket:",
        "--format",
        "jsonl",
        "--trace",
        trace.to_str().unwrap(),
    ])
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        assert!(lines.next().unwrap().unwrap().starts_with("{\"time\""));
    }
    drop(lines);
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!((child.wait().unwrap().code(), &*stderr), (Some(0), ""));
}

/// Decisions are printed as soon as the lines of the trace arrive.
#[test]
fn slow_pipe_is_answered_line_by_line() {
    let mut child =
        ratekeeper(&["simulate", "--limit", "token_bucket:", "--format", "jsonl", "--trace", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    input.write_all(b"time,key\n").unwrap();
    for n in 1..=3 {
        input.write_all(format!("{n},a\n").as_bytes()).unwrap();
        let line = lines.next().unwrap().unwrap();
        assert!(line.starts_with(&format!("{{\"time\":\"{n}\",")), "{line}");
    }
    drop(input);
    assert!(lines.next().is_none() && child.wait().unwrap().success());
}

#[test]
#[cfg(target_os = "linux")]
fn full_disk_is_reported() {
    for options in [&["--format", "jsonl"][..], &["--format", "table"], &["--compare"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let args = [&["simulate", "--limit", "token_bucket:", "--trace", DEMO], options].concat();
        let output = ratekeeper(&args).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(
            String::from_utf8(output.stderr).unwrap(),
            "error: cannot write to stdout: No space left on device (os error 28)\n"
        );
    }
}
