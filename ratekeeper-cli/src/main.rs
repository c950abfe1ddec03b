//! The command `ratekeeper`.
//!
//! argv -> parsed arguments (`args`) -> command (`run`, `simulate`, `validate`, `init`, `migrate`) -> exit code (`error`).
//! Data goes to stdout, messages to stderr. Exit codes: 0 success, 1 input or output failed, 2 invalid arguments,
//! configuration or trace.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser};

mod args;
mod banner;
mod config_reader;
mod config_source;
mod demo;
mod environment;
mod envoy;
mod error;
mod handover;
mod init;
mod input;
mod log;
mod migrate;
mod open_files;
mod run;
mod simulate;
mod store;
mod terminal;
mod validate;

use args::{Args, Command};
use error::CliError;
use validate::print;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help goes to stdout with exit code 0, a usage error to stderr with 2. A failed write is ignored: there
            // is no other channel to report it on.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}

fn run(args: Args) -> Result<(), CliError> {
    match args.command {
        None => run::demo(args.log),
        Some(Command::Run(run)) => run::run(&run),
        Some(Command::Validate(validate)) => validate::run(&validate),
        Some(Command::Init(init)) => init::run(&init),
        Some(Command::Simulate(simulate)) => simulate::run(&simulate),
        Some(Command::Migrate { from }) => migrate::run(&from),
        Some(Command::Schema) => validate::schema(),
        Some(Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "ratekeeper", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
        Some(Command::Man) => print(&manual().map_err(CliError::Output)?),
    }
}

/// The manual page of the command, followed by those of its subcommands.
fn manual() -> std::io::Result<String> {
    let mut pages = Vec::new();
    // The subcommand `help` has no page.
    write_page(&Args::command().disable_help_subcommand(true), "ratekeeper", &mut pages)?;
    // The library's name for the text after the options.
    Ok(String::from_utf8_lossy(&pages).replace(".SH EXTRA", ".SH NOTES"))
}

fn write_page(command: &clap::Command, name: &str, pages: &mut Vec<u8>) -> std::io::Result<()> {
    let page = command.clone().display_name(name.replace(' ', "-")).bin_name(name);
    clap_mangen::Man::new(page).source(concat!("ratekeeper ", env!("CARGO_PKG_VERSION"))).render(pages)?;
    command.get_subcommands().try_for_each(|it| write_page(it, &format!("{name} {}", it.get_name()), pages))
}
