//! The programs of the benchmark, installed where possible.

use std::error::Error;
use std::path::PathBuf;

use testbed::Envoy;

use crate::install::debian;

/// The programs found.
pub(super) struct Programs {
    pub(super) haproxy: Option<PathBuf>,
    pub(super) envoy: Option<PathBuf>,
    /// The contenders left out, and why.
    pub(super) left_out: Vec<String>,
}

impl Programs {
    /// Installs missing programs if permitted. nginx, the reference, and wrk, the load generator, are required.
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
