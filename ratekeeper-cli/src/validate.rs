//! Validates a configuration file: prints its errors, warnings and a summary, or explains it.

use std::io::{self, Write};

use ratekeeper_config::{Apis, Config, Diagnostic, SCHEMA, Store, Table};
use serde_json::{Map, Value, json};

use crate::args::{Validate, ValidateFormat};
use crate::environment::{FileEnvironment, Files};
use crate::error::CliError;
use crate::input::config_text;

pub(crate) fn run(args: &Validate) -> Result<(), CliError> {
    let name = args.file.display().to_string();
    let text = config_text(&args.file)?;
    let config = ratekeeper_config::parse(&text, &FileEnvironment::of(&args.file, Files::default()));
    let tables = |config: &Config| if args.explain { ratekeeper_config::explain(config) } else { Vec::new() };
    match (config, args.format) {
        (Ok(config), ValidateFormat::Text) => {
            warn(&config, &name);
            let tables: String = tables(&config).iter().map(table_text).collect();
            print(&format!("{name}: {}\n{tables}", summary(&config)))
        }
        (Ok(config), ValidateFormat::Json) => {
            let mut report = json!({
                "file": name,
                "valid": true,
                "errors": [],
                "warnings": config.warnings.iter().map(diagnostic).collect::<Vec<_>>(),
            });
            if let (true, Some(fields)) = (args.explain, report.as_object_mut()) {
                fields.extend(tables(&config).iter().map(|table| (table.name.to_owned(), table_json(table))));
            }
            print(&format!("{report:#}\n"))
        }
        (Err(errors), ValidateFormat::Text) => Err(CliError::Config(Box::new(errors.in_file(&name)))),
        (Err(errors), ValidateFormat::Json) => {
            let errors = errors.iter().map(diagnostic).collect::<Vec<_>>();
            print(&format!(
                "{:#}\n",
                json!({ "file": name, "valid": false, "errors": errors, "warnings": [] })
            ))?;
            Err(CliError::Reported)
        }
    }
}

/// Prints the warnings of a configuration to stderr.
pub(crate) fn warn(config: &Config, name: &str) {
    for warning in &config.warnings {
        eprintln!("{}\n", warning.clone().in_file(name));
    }
}

fn diagnostic(it: &Diagnostic) -> Value {
    json!({ "line": it.line(), "column": it.column(), "message": it.message(), "help": it.help() })
}

fn table_json(table: &Table) -> Value {
    let row = |row: &Vec<String>| -> Value {
        let fields = table.columns.iter().zip(row).map(|(name, text)| ((*name).to_owned(), json!(text)));
        Value::Object(fields.collect::<Map<_, _>>())
    };
    table.rows.iter().map(row).collect()
}

/// A table with aligned columns. A cell that repeats the one above, with the same cells before it, is left blank.
fn table_text(table: &Table) -> String {
    let head: Vec<String> = table.columns.iter().map(|name| name.to_uppercase()).collect();
    let mut rows = vec![head];
    let mut above: Option<&Vec<String>> = None;
    for row in &table.rows {
        let repeated = above.map_or(0, |above| above.iter().zip(row).take_while(|(a, b)| a == b).count());
        let repeated = if repeated == row.len() { 0 } else { repeated };
        rows.push(
            row.iter()
                .enumerate()
                .map(|(at, it)| if at < repeated { String::new() } else { it.clone() })
                .collect(),
        );
        above = Some(row);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..table.columns.len()).map(width).collect();
    let mut text = format!("\n{}\n", table.name);
    for row in &rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(&format!("  {}\n", cells.join("  ").trim_end()));
    }
    text
}

pub(crate) fn schema() -> Result<(), CliError> {
    print(SCHEMA)
}

/// Summarises the configuration in one line, without its secrets.
fn summary(config: &Config) -> String {
    let mut limits = Vec::new();
    let named = config.named_limits + config.concurrency.len();
    if named > 0 || config.domains.is_empty() {
        limits.push(counted(named, "limit"));
    }
    if !config.domains.is_empty() {
        let of_domains = counted(config.rules.rules().len() - config.named_limits, "limit");
        limits.push(format!("{} with {of_domains}", counted(config.domains.len(), "domain")));
    }
    let store = match &config.store {
        Store::Memory { .. } => "in memory",
        Store::Redis(_) => "in Redis",
    };
    let mut parts = vec![format!("{} {store}", limits.join(" and "))];
    match &config.gateway {
        Some(gateway) => {
            parts.push(counted(gateway.routes.len(), "route"));
            let addresses: Vec<String> = gateway.listeners.iter().map(|it| it.address.to_string()).collect();
            parts.push(format!("listening on {}", addresses.join(", ")));
        }
        None => parts.push("no gateway".to_owned()),
    }
    let Apis { http, envoy, resp, .. } = &config.apis;
    let apis = [
        ("HTTP API", http.as_ref().map(|it| &it.api)),
        ("Envoy API", envoy.as_ref().map(|it| &it.api)),
        ("Redis API", resp.as_ref().map(|it| &it.api)),
    ];
    parts.extend(apis.iter().filter_map(|(name, api)| Some(format!("{name} on {}", (*api)?.listen))));
    parts.join(", ")
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
