//! Checks a configuration file and prints a one-line summary.

use std::io::{self, Write};

use ratekeeper_config::{Config, SCHEMA, Store};

use crate::args::Check;
use crate::failure::CliError;
use crate::input::config_text;
use crate::outside::{Files, Surroundings};

pub(crate) fn run(args: &Check) -> Result<(), CliError> {
    let name = args.file.display().to_string();
    let text = config_text(&args.file)?;
    let config = ratekeeper_config::parse(&text, &Surroundings::of(&args.file, Files::default()))
        .map_err(|errors| CliError::Config(Box::new(errors.in_file(&name))))?;
    print(&format!("{name}: {}\n", summary(&config)))
}

pub(crate) fn schema() -> Result<(), CliError> {
    print(SCHEMA)
}

/// Summarises the configuration without its secrets.
fn summary(config: &Config) -> String {
    let store = match &config.store {
        Store::Memory { .. } => "in memory",
        Store::Redis(_) => "in Redis",
    };
    let mut limits = format!("{} {store}", counted(config.named_limits + config.concurrency.len(), "limit"));
    if !config.domains.is_empty() {
        let domains = counted(config.domains.len(), "domain");
        let asked = counted(config.rules.rules().len() - config.named_limits, "limit");
        limits = format!("{limits}, {domains} with {asked}");
    }
    match &config.gateway {
        Some(gateway) => {
            let routes = counted(gateway.routes.len(), "route");
            let addresses: Vec<String> =
                gateway.listeners.iter().map(|listener| listener.address.to_string()).collect();
            format!("{limits}, {routes}, listening on {}", addresses.join(", "))
        }
        None => format!("{limits}, no gateway"),
    }
}

fn counted(count: usize, what: &str) -> String {
    match count {
        0 => format!("no {what}s"),
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    }
}

pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::Output)
}
