//! Opens limits and traces.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::fcntl::OFlag;

use indicatif::{ProgressBar, ProgressStyle};
use ratekeeper::Limit;
use ratekeeper_config::{TEXT_BYTES_MAX, parse_limit};

use crate::args::{Format, Progress, Simulate};
use crate::error::CliError;

/// The default trace.
const DEMO: &str = include_str!("../../traces/demo.csv");
const DEMO_NAME: &str = "demo.csv, shipped with ratekeeper";
/// The default limit: 10 per minute.
pub(crate) const LIMIT_DEFAULT: &str = "sliding_window_counter:";

/// An open trace and its progress bar.
pub(crate) struct Source {
    pub(crate) name: String,
    pub(crate) input: Box<dyn Read>,
    pub(crate) bar: ProgressBar,
}

pub(crate) fn limit(args: &Simulate) -> Result<Limit, CliError> {
    let (name, yaml) = match (&args.limit, &args.limit_file) {
        (Some(yaml), _) => ("--limit".to_owned(), yaml.clone()),
        (None, Some(path)) => (path.display().to_string(), config_text(path)?),
        (None, None) => ("--limit".to_owned(), LIMIT_DEFAULT.to_owned()),
    };
    parse_limit(&yaml).map_err(|error| CliError::Limit(Box::new(error.in_file(&name))))
}

/// Opens a file. A pipe or a device, which could block, is an error.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    // Without this flag, opening a pipe waits for its writer. It has no effect on regular files.
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() || kind.is_dir() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

/// Reads the text of a limit or a configuration, once.
pub(crate) fn config_text(path: &Path) -> Result<String, CliError> {
    text(path, File::open(path))
}

/// Reads the text of a configuration that may be read again: it must be a regular file.
pub(crate) fn regular_file_text(path: &Path) -> Result<String, CliError> {
    text(path, open_regular(path))
}

fn text(path: &Path, file: io::Result<File>) -> Result<String, CliError> {
    let name = path.display().to_string();
    let cannot = |error: io::Error| CliError::cannot_read(&name, &error);
    let mut bytes = Vec::new();
    // Read one byte more than the maximum, so that a larger file is rejected instead of truncated.
    file.and_then(|file| file.take(TEXT_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)).map_err(cannot)?;
    if bytes.len() > TEXT_BYTES_MAX {
        let message = format!("{name} has more than {TEXT_BYTES_MAX} bytes, the maximum of a configuration");
        return Err(CliError::usage(&message, "check that this is the right file"));
    }
    String::from_utf8(bytes)
        .map_err(|_| CliError::usage(&format!("{name} is not UTF-8"), "save the file as UTF-8"))
}

pub(crate) fn demo() -> Source {
    Source { name: DEMO_NAME.to_owned(), input: Box::new(DEMO.as_bytes()), bar: ProgressBar::hidden() }
}

pub(crate) fn trace(args: &Simulate) -> Result<Source, CliError> {
    let Some(path) = &args.trace else { return Ok(demo()) };
    if path == Path::new("-") {
        let input = Box::new(io::stdin().lock());
        return Ok(Source { name: "stdin".to_owned(), input, bar: ProgressBar::hidden() });
    }
    let name = path.display().to_string();
    let cannot = |error: io::Error| CliError::cannot_read(&name, &error);
    let file = File::open(path).map_err(cannot)?;
    let metadata = file.metadata().map_err(cannot)?;
    // JSON lines on the same terminal would break up a progress bar.
    let is_wanted = args.progress == Progress::Auto
        && metadata.is_file()
        && io::stderr().is_terminal()
        && !(args.format == Format::Jsonl && io::stdout().is_terminal());
    let bar = if is_wanted { bar(metadata.len()) } else { ProgressBar::hidden() };
    Ok(Source { name, input: Box::new(bar.wrap_read(file)), bar })
}

fn bar(bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("  {bar:40.cyan} {bytes} of {total_bytes}, {eta} left");
    let bar = ProgressBar::new(bytes);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
