//! The programs that take part, installed where that is possible.

use std::error::Error;
use std::path::PathBuf;

use testbed::Envoy;

use crate::install::debian;

/// What there is.
pub(super) struct Programs {
    pub(super) haproxy: Option<PathBuf>,
    pub(super) envoy: Option<PathBuf>,
    /// Who does not take part, and why.
    pub(super) left_out: Vec<String>,
}

impl Programs {
    /// Installs what is missing, if we may. Without nginx and wrk there is nothing to compare and nobody who asks.
    pub(super) fn provide() -> Result<Programs, Box<dyn Error>> {
        for program in ["nginx", "wrk"] {
            debian(program, program)?;
        }
        let mut left_out = Vec::new();
        let mut or_without = |name: &str, found: Result<PathBuf, Box<dyn Error>>| {
            found.map_err(|why| left_out.push(format!("{name}: {why}"))).ok()
        };
        let haproxy = or_without("HAProxy", debian("haproxy", "haproxy"));
        let envoy = or_without("Envoy", Envoy::program().map_err(Into::into));
        Ok(Programs { haproxy, envoy, left_out })
    }
}
