//! The command `ratekeeper`.
//!
//! argv -> parsed arguments (`args`) -> command (`run`, `simulate`, `validate`, `migrate`) -> exit code (`failure`).
//! Data goes to stdout, messages to stderr. Exit codes: 0 success, 2 invalid arguments, configuration or trace, 1
//! input or output failed.

use std::process::ExitCode;

use clap::Parser;

mod args;
mod descriptors;
mod envoy;

mod handover;
mod input;
mod log;
mod migrate;

mod run;
mod screen;
mod simulate;
mod store;
mod validate;

use args::{Args, Command, Run};
use failure::CliError;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(told) => {
            // Help goes to stdout with exit code 0, a usage error to stderr with 2. A failed write is ignored: there
            // is no other channel to report it on.
            let _ = told.print();
            return ExitCode::from(u8::try_from(told.exit_code()).unwrap_or(2));
        }
    };
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.tell(),
    }
}

fn run(args: Args) -> Result<(), CliError> {
    match args.command {
        Some(Command::Simulate(simulate)) => simulate::run(&simulate),
        Some(Command::Validate(validate)) => validate::run(&validate),
        Some(Command::Migrate { from }) => migrate::run(&from),
        Some(Command::Schema) => validate::schema(),
        Some(Command::Run(run)) => run::run(&run),
        None => run::run(&Run { config: None, envoy_config: None }),
    }
}
