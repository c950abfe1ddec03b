//! Why a command ends early, turned into a message and an exit code in this one place.

use std::fmt;
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
        // Whoever read our output has seen enough, as in `| head`: that is no failure.
        if matches!(&self, Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe) {
            return ExitCode::SUCCESS;
        }
        eprintln!("{self}");
        match self {
            Failure::Typed(_) | Failure::Config(_) => ExitCode::from(2),
            Failure::Input(_) | Failure::Output(_) => ExitCode::from(1),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Typed(message) | Failure::Input(message) => write!(f, "error: {message}"),
            Failure::Config(errors) => {
                for error in errors.iter() {
                    writeln!(f, "error: {error}\n")?;
                }
                let count = errors.iter().len();
                let more = if errors.is_cut() { " or more" } else { "" };
                write!(f, "{count}{more} {}", if count == 1 { "mistake" } else { "mistakes" })
            }
            Failure::Output(error) => write!(f, "error: cannot write to stdout: {error}"),
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
