//! The configuration of another rate limiter -> one of ours, on stdout.

use std::path::Path;

use tollgate_config::Errors;

use crate::args::Origin;
use crate::check::print;
use crate::envoy;
use crate::failure::Failure;

const HEAD: &str = "\
# Limits in memory are those of one process; for several, write as in `store: redis://127.0.0.1:6379`.
store: memory

";

pub(crate) fn run(from: &Origin) -> Result<(), Failure> {
    let Origin::Envoy { folder } = from;
    print(&format!("{HEAD}{}", domains(folder)?))
}

/// What the files of a folder say, as the `domains` of one of ours.
fn domains(folder: &Path) -> Result<String, Failure> {
    let files = envoy::files(folder)?;
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    tollgate_config::envoy::migrate(&files).map_err(|errors: Errors| Failure::Config(Box::new(errors)))
}
