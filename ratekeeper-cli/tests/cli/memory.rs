//! Memory use does not grow with the length of a trace.
#![cfg(target_os = "linux")]

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Child, Stdio};

use crate::cli::ratekeeper;

/// Returns the peak resident memory of the process so far.
fn peak_kb(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn check(lines: u64, options: &[&str]) {
    const BATCH: u64 = 50_000;
    let args =
        [&["simulate", "--limit", "sliding_window_log: { limit: 20, window: 10s }", "--trace", "-"], options];
    let mut child = ratekeeper(&args.concat()).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"time,key,cost\n").unwrap();
    let mut settled_kb = 0;
    for batch in 0..lines / BATCH {
        let mut text = String::new();
        for n in batch * BATCH..(batch + 1) * BATCH {
            let millis = 1_700_000_000_000 + n;
            writeln!(text, "{}.{:03},user-{},{}", millis / 1000, millis % 1000, n * 7_919 % 3_000, n % 3)
                .unwrap();
        }
        input.write_all(text.as_bytes()).unwrap();
        // A pipe holds less than a batch, so the previous batch has been read. After a quarter every key is known.
        if batch == lines / BATCH / 4 {
            settled_kb = peak_kb(&child);
        }
    }
    let end_kb = peak_kb(&child);
    drop(input);
    assert!(child.wait().unwrap().success());
    assert!(settled_kb > 0 && end_kb < 100_000, "{end_kb} kB at the end");
    // The kernel counts pages in batches, so even the reported peak can decrease.
    assert!(end_kb.saturating_sub(settled_kb) < 4_000, "it grew from {settled_kb} kB to {end_kb} kB");
}

#[test]
fn jsonl_needs_constant_memory() {
    check(2_000_000, &["--format", "jsonl"]);
}

#[test]
fn table_needs_constant_memory() {
    check(2_000_000, &["--format", "table"]);
}

#[test]
fn comparison_needs_constant_memory() {
    check(500_000, &["--compare"]);
}
