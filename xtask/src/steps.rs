//! The steps of `cargo xtask test`.
//!
//! Cheap steps come first, so that a formatting error is reported before a build.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::deny::{self, Advisories};
use crate::workspace::Workspace;
use crate::{examples, instructions, needs, test_run, tidy};

/// One named check.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    /// One line for `--help` and for the announcement.
    pub(crate) what: &'static str,
    run: fn(&Workspace) -> Result<()>,
}

pub(crate) const STEPS: &[Step] = &[
    Step { name: "fmt", what: "the formatting is rustfmt's", run: fmt },
    Step {
        name: "tidy",
        what: "words, names of types, sizes, dependencies between crates, links, Korean pages",
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
    Step {
        name: "instructions",
        what: "a request takes no more instructions than before",
        run: instructions,
    },
    Step { name: "deny", what: "licenses, sources and advisories of the dependencies", run: deny },
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
        let (result, spent) = timed(|| (step.run)(&workspace));
        result.with_context(|| {
            let name = step.name;
            format!("step `{name}` failed after {}; repeat it with `cargo xtask test {name}`", seconds(spent))
        })?;
        println!("      {} passed in {}\n", step.name, seconds(spent));
        rows.push((step.name, spent));
    }
    print!("{}", summary(&rows));
    println!("all steps passed");
    Ok(())
}

fn summary(rows: &[(&str, Duration)]) -> String {
    let mut table = format!("{:<12} {:>9}\n", "step", "time");
    for (name, spent) in rows {
        table.push_str(&format!("{name:<12} {:>9}\n", seconds(*spent)));
    }
    let total = rows.iter().map(|(_, spent)| *spent).sum();
    table.push_str(&format!("{:<12} {:>9}\n", "total", seconds(total)));
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

fn fmt(workspace: &Workspace) -> Result<()> {
    needs::component(workspace, "fmt", "rustfmt")?;
    workspace.cargo("fmt --all --check").run()
}

fn tidy(workspace: &Workspace) -> Result<()> {
    let findings = tidy::check(workspace)?;
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("the files are not tidy; findings above: {}", findings.len());
    }
    Ok(())
}

fn clippy(workspace: &Workspace) -> Result<()> {
    needs::component(workspace, "clippy", "clippy")?;
    workspace.cargo("clippy --workspace --all-targets --all-features -- -D warnings").run()
}

// Benchmarks are excluded: measurements during a build are meaningless.
fn tests(workspace: &Workspace) -> Result<()> {
    test_run::run(workspace, "test --workspace --all-features --lib --bins --tests --examples")?;
    Ok(())
}

/// Writes the generated files: see `testbed::assert_generated`.
pub(crate) fn generate() -> Result<()> {
    let workspace = Workspace::load()?;
    let packages = "-p ratekeeper-rules -p ratekeeper-config -p ratekeeper-server -p ratekeeper-cli";
    workspace
        .cargo(&format!("test {packages} --all-features --lib --bins --tests generated"))
        .env("RATEKEEPER_GENERATE", "1")
        .run()
}

fn doctests(workspace: &Workspace) -> Result<()> {
    workspace.cargo("test --workspace --all-features --doc").run()
}

fn docs(workspace: &Workspace) -> Result<()> {
    workspace.cargo("doc --workspace --all-features --no-deps").flags("RUSTDOCFLAGS", "-D warnings").run()?;
    Ok(())
}

// `--cfg loom` changes every crate, so this build has a separate target folder: in a shared one, this build and the
// ordinary one would invalidate each other.
fn loom(workspace: &Workspace) -> Result<()> {
    workspace
        .cargo("test -p ratekeeper --release --test loom")
        .flags("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", &workspace.target.join("loom").to_string_lossy())
        .env("LOOM_MAX_PREEMPTIONS", "3")
        .run()?;
    Ok(())
}

fn readme(workspace: &Workspace) -> Result<()> {
    workspace.cargo("build --release -p ratekeeper-cli").run()?;
    examples::run(workspace)?;
    Ok(())
}

fn instructions(workspace: &Workspace) -> Result<()> {
    workspace.cargo("build --release -p ratekeeper-cli").run()?;
    instructions::run(workspace)
}

fn deny(workspace: &Workspace) -> Result<()> {
    let violations = deny::check(workspace)?;
    for violation in &violations {
        println!("{violation}");
    }
    if !violations.is_empty() {
        bail!("deny.toml does not allow these dependencies; findings above: {}", violations.len());
    }
    println!("      licenses, sources and version requirements checked");
    match deny::cargo_deny(workspace)? {
        Advisories::Checked => println!("      advisories checked"),
        Advisories::Unchecked(why) => println!("      advisories NOT checked: {why}"),
    }
    Ok(())
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
        let rows = [("fmt", Duration::from_millis(449)), ("deny", Duration::from_millis(60_051))];
        let expected = "\
step              time
fmt              0.4 s
deny            60.0 s
total           60.5 s
";
        assert_eq!(summary(&rows), expected);
    }
}
