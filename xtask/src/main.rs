//! Development tasks. `cargo xtask test` runs every check.
//!
//! | module | purpose |
//! |---|---|
//! | [`steps`] | the steps of `cargo xtask test`, in order, and their runner |
//! | [`test_run`] | runs the test programs and lists the slowest tests |
//! | [`tidy`] | rules for the files: words, names of types, sizes, dependencies between crates, links, Korean pages |
//! | [`deny`] | licenses, sources and advisories of the dependencies |
//! | [`fuzz`] | searches for inputs that break a property, for a bounded time |
//! | [`pictures`] | draws the pictures of docs/ |
//! | [`instructions`] | counts the processor instructions of a request |
//! | [`examples`] | runs the commands of README.md and docs/ and compares their output |
//! | [`background`] | servers that steps start and stop |
//! | [`needs`] | programs that the steps call, installed where possible |
//! | [`workspace`] | paths, packages and cargo calls |
//! | [`markdown`] | fenced blocks and headings of a page |

mod background;
mod deny;
mod examples;
mod fuzz;
mod instructions;
mod markdown;
mod needs;
mod pictures;
mod steps;
mod test_run;
mod tidy;
mod workspace;

use std::process::ExitCode;

/// Exit code of a usage error; 1 is a failed step.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        arguments if arguments.iter().any(|argument| matches!(*argument, "--help" | "-h" | "help")) => {
            print!("{}", help());
            ExitCode::SUCCESS
        }
        ["test", arguments @ ..] => {
            let long = arguments.contains(&"--long");
            let names: Vec<&str> = arguments.iter().copied().filter(|it| *it != "--long").collect();
            match steps::select(&names) {
                Ok(chosen) => finish(steps::run(&chosen, long)),
                Err(message) => usage(&message),
            }
        }
        ["fuzz", arguments @ ..] => match fuzz::FuzzPlan::read(arguments) {
            Ok(plan) => finish(fuzz::run(&plan)),
            Err(message) => usage(&message),
        },
        ["pictures"] => finish(pictures::write()),
        ["generate"] => finish(steps::generate()),
        [] => usage("a task is missing"),
        [other, ..] => usage(&format!("there is no task `{other}`")),
    }
}

fn finish(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn usage(message: &str) -> ExitCode {
    eprintln!("error: {message}; try `cargo xtask --help`");
    ExitCode::from(EXIT_USAGE)
}

fn help() -> String {
    let mut text = String::from(
        "Usage: cargo xtask test [--long] [STEP...]\n\n\
         Runs every step, or only the named ones, in this order; stops at the first failure. With --long, some\n\
         tests do several times as much: floods, soaks, comparisons of stores.\n\n",
    );
    for step in steps::STEPS {
        text.push_str(&format!("  {:<12} {}\n", step.name, step.what));
    }
    text.push_str(&format!(
        "\nUsage: cargo xtask fuzz [TARGET] [--seconds N]\n\n\
         Searches for inputs that break a property, {} s for each target unless --seconds is given. Needs a nightly\n\
         toolchain. The targets are {}.\n",
        fuzz::SECONDS,
        fuzz::TARGETS.join(", ")
    ));
    text.push_str("\nUsage: cargo xtask pictures\n\nWrites the pictures of docs/pictures again.\n");
    text.push_str(
        "\nUsage: cargo xtask generate\n\nWrites the generated files again, such as docs/reference. A test fails if one is out of date.\n",
    );
    text.push_str("\nRATEKEEPER_CASES=N raises the number of cases that each property test tries.\n");
    text
}
