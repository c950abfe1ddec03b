//! Runs the test programs that cargo has built, and lists the slowest tests.
//!
//! `cargo test` does not report the duration of a test. The test programs can, with an unstable option; the
//! environment variable that enables it would make cargo rebuild everything, so the programs are started from here.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{Workspace, command};

/// Number of slowest tests shown.
const SLOWEST: usize = 10;

/// Concurrent tests per processor: most tests wait for a server or a timeout and compute little.
const TESTS_PER_PROCESSOR: usize = 2;

/// A test program.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    path: PathBuf,
    /// The working directory that `cargo test` would use.
    folder: PathBuf,
    /// Package and target, as in `xtask/integration`.
    name: String,
}

/// The duration of a test.
#[derive(Debug, PartialEq)]
struct Timing {
    millis: u64,
    test: String,
}

/// Builds the tests with this cargo command, runs them, and prints the slowest.
pub(crate) fn run(workspace: &Workspace, build: &str) -> Result<()> {
    let messages =
        workspace.cargo(&format!("{build} --no-run --message-format json-render-diagnostics")).output()?;
    let programs: Vec<Program> =
        messages.lines().filter_map(|line| program(&serde_json::from_str(line).ok()?)).collect();
    if programs.is_empty() {
        bail!("cargo has built no test program");
    }
    let mut timings = Vec::new();
    for program in &programs {
        run_program(program, workspace.long_tests, &mut timings)
            .with_context(|| format!("tests of {}", program.name))?;
    }
    print!("{}", slowest(timings));
    Ok(())
}

/// Returns the test program that a cargo message announces.
fn program(message: &Value) -> Option<Program> {
    let path = message["executable"].as_str()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let package = folder.file_name()?.to_str()?;
    let target = message["target"]["name"].as_str()?;
    Some(Program { path: path.into(), folder: folder.into(), name: format!("{package}/{target}") })
}

fn run_program(program: &Program, long: bool, timings: &mut Vec<Timing>) -> Result<()> {
    println!("      {}", program.name);
    let mut started = command(&program.path.to_string_lossy(), &program.folder);
    started.args(["-Zunstable-options", "--report-time", "--test-threads", &threads()]);
    started.env("RUSTC_BOOTSTRAP", "1").stdout(Stdio::piped());
    if long {
        started.env("RATEKEEPER_LONG_TESTS", "1");
    }
    let mut child = started.spawn().context("starting it")?;
    for line in BufReader::new(child.stdout.take().context("its output")?).lines() {
        let line = line.context("reading its output")?;
        println!("{line}");
        if let Some((test, millis)) = timing(&line) {
            timings.push(Timing { millis, test: format!("{} {test}", program.name) });
        }
    }
    let status = child.wait().context("waiting for it")?;
    if !status.success() {
        bail!("a test failed, see above ({status}); run it alone with `cargo test --all-features TEST`");
    }
    Ok(())
}

fn threads() -> String {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (TESTS_PER_PROCESSOR * processors).to_string()
}

/// Parses name and duration from a line like `test a::b ... ok <0.123s>`.
fn timing(line: &str) -> Option<(&str, u64)> {
    let (test, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let (_, seconds) = result.strip_suffix("s>")?.split_once('<')?;
    let (whole, fraction) = seconds.split_once('.')?;
    let fraction = format!("{fraction:0<3}");
    let millis = whole.parse::<u64>().ok()?.checked_mul(1000)? + fraction.get(..3)?.parse::<u64>().ok()?;
    Some((test, millis))
}

fn slowest(mut timings: Vec<Timing>) -> String {
    timings.sort_by_key(|timing| std::cmp::Reverse(timing.millis));
    let mut table = format!("{} tests; the slowest:\n", timings.len());
    for Timing { millis, test } in timings.iter().take(SLOWEST) {
        let _ = writeln!(table, "{:>7}.{} s  {test}", millis / 1000, millis % 1000 / 100);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_in_cargo_messages() {
        let message = |test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact", "executable": "/t/deps/a-1", "manifest_path": "/x/a/Cargo.toml",
                "target": { "name": "integration" }, "profile": { "test": test },
            })
        };
        let expected =
            Program { path: "/t/deps/a-1".into(), folder: "/x/a".into(), name: "a/integration".to_string() };
        assert_eq!(program(&message(true)), Some(expected));
        assert_eq!(program(&message(false)), None);
        assert_eq!(program(&serde_json::json!({ "reason": "build-finished" })), None);
    }

    #[test]
    fn duration_is_parsed_from_a_test_line() {
        assert_eq!(timing("test a::b ... ok <12.345s>"), Some(("a::b", 12_345)));
        assert_eq!(timing("test a::b - should panic ... ok <0.020s>"), Some(("a::b - should panic", 20)));
        assert_eq!(timing("test a::b ... FAILED <1.5s>"), Some(("a::b", 1_500)));
        assert_eq!(timing("test result: ok. 3 passed; finished in 0.01s"), None);
        assert_eq!(timing("running 3 tests"), None);
    }

    #[test]
    fn at_most_ten_slowest_tests_are_listed_slowest_first() {
        let timings = (0..12).map(|n| Timing { millis: n * 1_100, test: format!("t{n}") }).collect();
        let table = slowest(timings);
        assert!(table.starts_with("12 tests; the slowest:\n     12.1 s  t11\n     11.0 s  t10\n"), "{table}");
        assert_eq!(table.lines().count(), 1 + SLOWEST);
    }
}
