//! Why a command ends early, turned into a message and an exit code in this one place.

use std::io;
use std::process::ExitCode;

use tollgate_config::Errors;
use tollgate_sim::{ReplayError, TraceError};

#[derive(Debug)]
pub(crate) enum Failure {
    /// Something typed is wrong: a limit, a line of a trace, a combination of options.
    Typed(String),
    /// A configuration is wrong.
    Config(Box<Errors>),
    /// Something cannot be read.
    Input(String),
    /// Something cannot be written.
    Output(io::Error),
}

impl Failure {
    pub(crate) fn tell(self) -> ExitCode {
        match self {
            Failure::Typed(message) => {
                eprintln!("error: {message}");
                ExitCode::from(2)
            }
            Failure::Config(errors) => {
                for error in errors.iter() {
                    eprintln!("error: {error}\n");
                }
                let count = errors.iter().len();
                let more = if errors.is_cut() { " or more" } else { "" };
                eprintln!("{count}{more} {}", if count == 1 { "mistake" } else { "mistakes" });
                ExitCode::from(2)
            }
            Failure::Input(message) => {
                eprintln!("error: {message}");
                ExitCode::from(1)
            }
            // Whoever read our output has seen enough, as in `| head`: that is no failure.
            Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            Failure::Output(error) => {
                eprintln!("error: cannot write to stdout: {error}");
                ExitCode::from(1)
            }
        }
    }
}

impl From<TraceError> for Failure {
    fn from(error: TraceError) -> Failure {
        match error {
            TraceError::Bad { .. } => Failure::Typed(error.to_string()),
            TraceError::Io { .. } => Failure::Input(format!("cannot read {error}")),
        }
    }
}

impl From<ReplayError> for Failure {
    fn from(error: ReplayError) -> Failure {
        match error {
            ReplayError::Trace(error) => error.into(),
            ReplayError::Output(error) => Failure::Output(error),
        }
    }
}
