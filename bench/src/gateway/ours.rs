//! The gateway, with and without each of its features.

use std::error::Error;
use std::path::Path;

use testbed::process::{Folder, Running, free_port};

use super::Proxy;

/// Every production feature on, except the access log, which the other proxies do not write either.
pub(super) const RATEKEEPER: &str = "ratekeeper";
pub(super) const REDIS: &str = "ratekeeper, Redis store";
pub(super) const NO_HEADERS: &str = "ratekeeper, no headers";
pub(super) const NO_ADMIN: &str = "ratekeeper, no admin";
pub(super) const ACCESS_LOG: &str = "ratekeeper, access log";
pub(super) const NO_LIMITS: &str = "ratekeeper, no limits";

/// One configuration of the gateway.
struct Variant<'a> {
    name: &'static str,
    file: &'static str,
    store: &'a str,
    headers: &'static str,
    access_log: bool,
    has_admin: bool,
    is_limited: bool,
}

/// Starts all variants.
pub(super) fn start(
    binary: &Path,
    folder: &Folder,
    upstream: u16,
    redis: &str,
) -> Result<Vec<Proxy>, Box<dyn Error>> {
    let usual = Variant {
        name: RATEKEEPER,
        file: "ratekeeper",
        store: "memory",
        headers: "ietf",
        access_log: false,
        has_admin: true,
        is_limited: true,
    };
    let variants = [
        Variant { name: REDIS, file: "redis", store: redis, ..usual },
        Variant { name: NO_HEADERS, file: "headers", headers: "none", ..usual },
        Variant { name: NO_ADMIN, file: "admin", has_admin: false, ..usual },
        Variant { name: ACCESS_LOG, file: "log", access_log: true, ..usual },
        Variant { name: NO_LIMITS, file: "limits", is_limited: false, ..usual },
        usual,
    ];
    variants.iter().rev().map(|variant| variant.start(binary, folder, upstream)).collect()
}

impl Variant<'_> {
    fn start(&self, binary: &Path, folder: &Folder, upstream: u16) -> Result<Proxy, Box<dyn Error>> {
        let &Variant { name, file, store, headers, access_log, has_admin, is_limited } = self;
        let port = free_port()?;
        let admin = if has_admin { format!("127.0.0.1:{}", free_port()?) } else { "off".to_owned() };
        let plenty = if is_limited { "[plenty]" } else { "[]" };
        let config = format!(
            "store: {store}
admin: {admin}
responses: {{ header_set: {headers} }}
limits:
  plenty:
    key: {{ header: X-User-Id, fallback: anonymous }}
    token_bucket: {{ capacity: 1000000, refill: 1000000/s }}
  little:
    key: {{ header: X-User-Id, fallback: anonymous }}
    token_bucket: {{ capacity: 1, refill: 1/h }}
gateway:
  listen: 127.0.0.1:{port}
  access_log: {access_log}
  routes:
    - {{ id: allowed, path: /allowed/**, upstream: 'http://127.0.0.1:{upstream}', limits: {plenty} }}
    - {{ id: denied, path: /denied/**, upstream: 'http://127.0.0.1:{upstream}', limits: [little] }}
"
        );
        let config = folder.write(&format!("{file}.yaml"), &config)?.display().to_string();
        let process = Running::start(folder, file, binary, &["run", "--config", &config], port)?;
        Ok(Proxy { name, process, port, is_limited })
    }
}
