//! The command `tollgate`.
//!
//! argv -> what was typed (`args`) -> the command (`run`, `simulate`, `check`, `migrate`) -> exit code (`failure`). Data goes to stdout, talk to
//! stderr. Exit codes: 0 done, 2 something typed is wrong, 1 something could not be read or written.

use std::process::ExitCode;

use clap::Parser;

mod args;
mod check;
mod descriptors;
mod envoy;
mod failure;
mod handover;
mod input;
mod log;
mod migrate;
mod outside;
mod run;
mod screen;
mod simulate;
mod store;

use args::{Args, Command, Run};
use failure::Failure;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(told) => {
            // Help goes to stdout and ends with 0, a mistake to stderr and ends with 2. If nobody is there to read
            // it, there is nobody to tell.
            let _ = told.print();
            return ExitCode::from(u8::try_from(told.exit_code()).unwrap_or(2));
        }
    };
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.tell(),
    }
}

fn run(args: Args) -> Result<(), Failure> {
    match args.command {
        Some(Command::Simulate(simulate)) => simulate::run(&simulate),
        Some(Command::Check(check)) => check::run(&check),
        Some(Command::Migrate { from }) => migrate::run(&from),
        Some(Command::Schema) => check::schema(),
        Some(Command::Run(run)) => run::run(&run),
        None => run::run(&Run { config: None, envoy_config: None }),
    }
}
