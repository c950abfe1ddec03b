//! Converts another rate limiter's configuration to Ratekeeper's, on stdout.

use std::path::Path;

use ratekeeper_config::Errors;

use crate::args::Origin;
use crate::environment::Files;
use crate::envoy;
use crate::error::CliError;
use crate::validate::print;

/// The generated file up to its domains.
pub(crate) const HEAD: &str = "\
# Limits are kept in this process. To share them among instances, write as in
# store: { redis: { address: redis://127.0.0.1:6379, secret: \"${RATEKEEPER_SECRET}\", instances: 2 } }
store: memory

# The Envoy API (rate limit service), and the HTTP API with POST /json. Addresses that other machines reach need a token.
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
