//! The steps of `cargo xtask test`.
//!
//! Cheap steps come first, so that a formatting error is reported before a build.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;
use crate::{examples, needs, test_run, tidy};

/// One named check.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    /// One line for `--help` and for the announcement.
    pub(crate) what: &'static str,
    run: fn(&Workspace) -> Result<Outcome>,
}

/// How a step ended if it did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Passed,
    /// The reason, which completes "skipped: ...".
    Skipped(&'static str),
}

pub(crate) const STEPS: &[Step] = &[
    Step { name: "fmt", what: "the formatting is rustfmt's", run: fmt },
    Step {
        name: "tidy",
        what: "words, names of types, sizes, dependencies between crates, the two READMEs",
        run: tidy,
    },
    Step { name: "clippy", what: "no warning in any target", run: clippy },
    Step {
        name: "tests",
        what: "unit, integration and property tests, and the examples compile",
        run: tests,
    },
    Step { name: "doctests", what: "the examples in the documentation run", run: doctests },
    Step { name: "docs", what: "the documentation builds without a warning", run: docs },
    Step {
        name: "loom",
        what: "the store under every interleaving with three preemptions or fewer",
        run: loom,
    },
    Step {
        name: "readme",
        what: "the commands of README.md and docs/ print the output on the page",
        run: readme,
    },
    Step { name: "deny", what: "licenses, advisories and sources of the dependencies", run: deny },
];

/// Returns the steps with these names, in the order of [`STEPS`]; all of them without names.
pub(crate) fn select(names: &[&str]) -> Result<Vec<&'static Step>, String> {
    if let Some(unknown) = names.iter().find(|name| STEPS.iter().all(|step| step.name != **name)) {
        let known: Vec<_> = STEPS.iter().map(|step| step.name).collect();
        return Err(format!("there is no step `{unknown}`; the steps are {}", known.join(", ")));
    }
    Ok(STEPS.iter().filter(|step| names.is_empty() || names.contains(&step.name)).collect())
}

/// Runs the steps in order, up to the first failure.
pub(crate) fn run(chosen: &[&Step], long: bool) -> Result<()> {
    needs::provide()?;
    let workspace = Workspace { long_tests: long, ..Workspace::load()? };
    let mut rows = Vec::new();
    for (index, step) in chosen.iter().enumerate() {
        println!("[{}/{}] {}: {}", index + 1, chosen.len(), step.name, step.what);
        let (outcome, spent) = timed(|| (step.run)(&workspace));
        let outcome = outcome.with_context(|| {
            let name = step.name;
            format!("step `{name}` failed after {}; repeat it with `cargo xtask test {name}`", seconds(spent))
        })?;
        match outcome {
            Outcome::Passed => println!("      {} passed in {}\n", step.name, seconds(spent)),
            Outcome::Skipped(why) => println!("      {} skipped: {why}\n", step.name),
        }
        rows.push((step.name, outcome, spent));
    }
    print!("{}", summary(&rows));
    println!("all steps passed");
    Ok(())
}

fn summary(rows: &[(&str, Outcome, Duration)]) -> String {
    let mut table = format!("{:<9} {:<8} {:>9}\n", "step", "result", "time");
    for (name, outcome, spent) in rows {
        let result = match outcome {
            Outcome::Passed => "passed",
            Outcome::Skipped(_) => "skipped",
        };
        table.push_str(&format!("{name:<9} {result:<8} {:>9}\n", seconds(*spent)));
    }
    let total = rows.iter().map(|(_, _, spent)| *spent).sum();
    table.push_str(&format!("{:<9} {:<8} {:>9}\n", "total", "", seconds(total)));
    table
}

#[expect(clippy::disallowed_methods, reason = "a task reports how long it took; no limit is decided here")]
fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed())
}

fn seconds(spent: Duration) -> String {
    let tenths = spent.as_millis() / 100;
    format!("{}.{} s", tenths / 10, tenths % 10)
}

fn fmt(workspace: &Workspace) -> Result<Outcome> {
    needs::component(workspace, "fmt", "rustfmt")?;
    workspace.cargo("fmt --all --check").run().map(|()| Outcome::Passed)
}

fn tidy(workspace: &Workspace) -> Result<Outcome> {
    let findings = tidy::check(workspace)?;
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("the files are not tidy; findings above: {}", findings.len());
    }
    Ok(Outcome::Passed)
}

fn clippy(workspace: &Workspace) -> Result<Outcome> {
    needs::component(workspace, "clippy", "clippy")?;
    workspace
        .cargo("clippy --workspace --all-targets --all-features -- -D warnings")
        .run()
        .map(|()| Outcome::Passed)
}

// Benchmarks are excluded: measurements during a build are meaningless.
fn tests(workspace: &Workspace) -> Result<Outcome> {
    test_run::run(workspace, "test --workspace --all-features --lib --bins --tests --examples")?;
    Ok(Outcome::Passed)
}

fn doctests(workspace: &Workspace) -> Result<Outcome> {
    workspace.cargo("test --workspace --all-features --doc").run().map(|()| Outcome::Passed)
}

fn docs(workspace: &Workspace) -> Result<Outcome> {
    workspace.cargo("doc --workspace --all-features --no-deps").flags("RUSTDOCFLAGS", "-D warnings").run()?;
    Ok(Outcome::Passed)
}

// `--cfg loom` changes every crate, so this build has a separate target folder: in a shared one, this build and the
// ordinary one would invalidate each other.
fn loom(workspace: &Workspace) -> Result<Outcome> {
    workspace
        .cargo("test -p ratekeeper --release --test loom")
        .flags("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", &workspace.target.join("loom").to_string_lossy())
        .env("LOOM_MAX_PREEMPTIONS", "3")
        .run()?;
    Ok(Outcome::Passed)
}

fn readme(workspace: &Workspace) -> Result<Outcome> {
    workspace.cargo("build --release -p ratekeeper-cli").run()?;
    examples::run(workspace)?;
    Ok(Outcome::Passed)
}

fn deny(workspace: &Workspace) -> Result<Outcome> {
    if !workspace.cargo("deny --version").succeeds() {
        return Ok(Outcome::Skipped("cargo-deny is not installed (`cargo install cargo-deny`); CI runs it"));
    }
    workspace.cargo("deny check").run().map(|()| Outcome::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(chosen: &[&Step]) -> Vec<&'static str> {
        chosen.iter().map(|step| step.name).collect()
    }

    #[test]
    fn without_names_all_steps_are_selected() {
        assert_eq!(select(&[]).unwrap().len(), STEPS.len());
    }

    #[test]
    fn named_steps_keep_the_order_of_the_list() {
        assert_eq!(names(&select(&["docs", "fmt"]).unwrap()), ["fmt", "docs"]);
    }

    #[test]
    fn unknown_step_is_rejected_with_the_known_names() {
        let message = select(&["fmt", "lint"]).err().unwrap();
        assert!(message.contains("`lint`") && message.contains("clippy"), "{message}");
    }

    #[test]
    fn summary_has_a_row_per_step_and_a_total() {
        let rows = [
            ("fmt", Outcome::Passed, Duration::from_millis(449)),
            ("deny", Outcome::Skipped("absent"), Duration::from_millis(60_051)),
        ];
        let expected = "\
step      result        time
fmt       passed       0.4 s
deny      skipped     60.0 s
total                 60.5 s
";
        assert_eq!(summary(&rows), expected);
    }
}
