//! The configuration of another rate limiter -> one of ours, on stdout.

use std::path::Path;

use tollgate_config::Errors;

use crate::args::Origin;
use crate::check::print;
use crate::envoy;
use crate::failure::Failure;
use crate::outside::Files;

/// What stands before the domains.
pub(crate) const HEAD: &str = "\
# Limits in memory are those of one process; for several, write as in `store: redis://127.0.0.1:6379`.
store: memory
# Where Envoy asks; and others, by POST /json. Off this machine both need a token.
doors: { grpc: 127.0.0.1:8081, http: 127.0.0.1:8080 }

";

pub(crate) fn run(from: &Origin) -> Result<(), Failure> {
    let Origin::Envoy { folder } = from;
    print(&format!("{HEAD}{}", domains(folder, &mut Files::default())?))
}

/// What the files of a folder say, as the `domains` of one of ours.
pub(crate) fn domains(folder: &Path, read: &mut Files) -> Result<String, Failure> {
    let files = envoy::files(folder, read)?;
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    tollgate_config::envoy::migrate(&files).map_err(|errors: Errors| Failure::Config(Box::new(errors)))
}
