//! Converts another rate limiter's configuration to Ratekeeper's, on stdout.

use std::path::Path;

use ratekeeper_config::Errors;

use crate::args::Origin;
use crate::environment::Files;
use crate::envoy;
use crate::error::CliError;
use crate::validate::print;

/// The text before the domains.
pub(crate) const HEAD: &str = "\
# Limits in memory are those of one process; for several, write as in `store: redis://127.0.0.1:6379`.
store: memory
# Where Envoy asks; and others, by POST /json. Off this machine both need a token.
apis: { envoy: 127.0.0.1:8081, http: 127.0.0.1:8080 }

";

pub(crate) fn run(from: &Origin) -> Result<(), CliError> {
    let Origin::Envoy { folder } = from;
    print(&format!("{HEAD}{}", domains(folder, &mut Files::default())?))
}

/// Converts the files of a folder to a `domains` section.
pub(crate) fn domains(folder: &Path, read: &mut Files) -> Result<String, CliError> {
    let files = envoy::files(folder, read)?;
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    ratekeeper_config::envoy::migrate(&files).map_err(|errors: Errors| CliError::Config(Box::new(errors)))
}
