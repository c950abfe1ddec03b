//! Errors that end a command: the only module that maps them to a message and an exit code.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;

use ratekeeper_config::{Diagnostic, Errors};
use ratekeeper_insight::{ReplayError, TraceError};

/// It does not implement `Error`: no code handles it but [`CliError::report`], and its texts have their causes in them,
/// each with what to do.
#[derive(Debug)]
pub(crate) enum CliError {
    /// Invalid input by the user: a line of a trace, a combination of options.
    Usage(String),
    /// A limit is invalid.
    Limit(Box<Diagnostic>),
    /// The configuration is invalid.
    Config(Box<Errors>),
    /// The configuration is invalid, and its errors have been printed.
    Reported,
    /// Input cannot be read.
    Input(String),
    /// Output cannot be written.
    Output(io::Error),
}

/// Adds the line that says what to do.
pub(crate) fn with_help(message: &str, help: &str) -> String {
    format!("{message}\n   = help: {help}")
}

/// The reason of an error of the operating system, without its number.
pub(crate) fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error ").next().unwrap_or_default().to_owned()
}

impl CliError {
    /// An error of the user, with what to write instead.
    pub(crate) fn usage(message: &str, help: &str) -> CliError {
        CliError::Usage(with_help(message, help))
    }

    /// A file or folder cannot be read.
    pub(crate) fn cannot_read(name: &str, error: &io::Error) -> CliError {
        let help = match error.kind() {
            io::ErrorKind::NotFound => "check the path",
            io::ErrorKind::PermissionDenied => "check the permissions of the file",
            io::ErrorKind::IsADirectory => "write the path of a file, not of a folder",
            io::ErrorKind::NotADirectory => "write the path of a folder",
            _ => "check that the file can be read",
        };
        CliError::Input(with_help(&format!("cannot read {name}: {}", reason(error)), help))
    }

    /// An address to listen on is in use; `field` is the field that contains it.
    pub(crate) fn in_use(address: SocketAddr, field: &str) -> CliError {
        let help = format!("stop it, or write another address in `{field}`");
        CliError::Input(with_help(&format!("{address} is in use by another program"), &help))
    }

    pub(crate) fn report(self) -> ExitCode {
        // A closed pipe, as with `| head`, is not a failure.
        if matches!(&self, CliError::Output(error) if error.kind() == io::ErrorKind::BrokenPipe) {
            return ExitCode::SUCCESS;
        }
        if !matches!(self, CliError::Reported) {
            eprintln!("{self}");
        }
        match self {
            CliError::Usage(_) | CliError::Limit(_) | CliError::Config(_) | CliError::Reported => {
                ExitCode::from(2)
            }
            CliError::Input(_) | CliError::Output(_) => ExitCode::from(1),
        }
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CliError::Usage(message) | CliError::Input(message) => write!(f, "error: {message}"),
            CliError::Limit(error) => write!(f, "{error}"),
            CliError::Config(errors) => {
                for error in errors.iter() {
                    writeln!(f, "{error}\n")?;
                }
                let count = errors.iter().len();
                let more = if errors.is_cut() { " or more" } else { "" };
                write!(f, "{count}{more} {}", if count == 1 { "error" } else { "errors" })
            }
            CliError::Reported => Ok(()),
            CliError::Output(error) => write!(f, "error: cannot write to stdout: {error}"),
        }
    }
}

impl From<TraceError> for CliError {
    fn from(error: TraceError) -> CliError {
        match error {
            TraceError::Bad { name, line, column, what, instead } => {
                let column = column.map_or(String::new(), |column| format!("in column {column}, "));
                CliError::usage(&format!("{column}{what}\n  --> {name}:{line}"), &instead)
            }
            TraceError::Io { name, error } => CliError::cannot_read(&name, &error),
        }
    }
}

impl From<ReplayError> for CliError {
    fn from(error: ReplayError) -> CliError {
        match error {
            ReplayError::Trace(error) => error.into(),
            ReplayError::Output(error) => CliError::Output(error),
        }
    }
}
