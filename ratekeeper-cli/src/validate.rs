//! Validates a configuration file: prints its errors, warnings and a summary, or explains it.

use std::io::{self, Write};

use ratekeeper_config::{Config, Diagnostic, Store, Table, TableCell};
use serde_json::{Map, Value, json};

use crate::args::{Validate, ValidateFormat};
use crate::config_source::{find_file, no_file};
use crate::environment::{FileEnvironment, Files};
use crate::error::CliError;
use crate::input::config_text;
use crate::terminal;

/// Spaces between two columns of a table.
const COLUMN_GAP: usize = 2;

pub(crate) fn run(args: &Validate) -> Result<(), CliError> {
    let help = "write `ratekeeper validate FILE`, or create a file with `ratekeeper init`";
    let path = find_file(args.file.as_deref()).ok_or_else(|| no_file(help))?;
    let name = path.display().to_string();
    let text = config_text(&path)?;
    let config = ratekeeper_config::parse(&text, &FileEnvironment::of(&path, Files::default()));
    let tables = |config: &Config| if args.explain { ratekeeper_config::explain(config) } else { Vec::new() };
    match (config, args.format) {
        (Ok(config), ValidateFormat::Text) => {
            warn(&config, &name);
            let tables: String =
                tables(&config).iter().map(|table| table_text(table, terminal::table_width())).collect();
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
    let value = |cell: &TableCell| match cell {
        TableCell::Text(text) => json!(text),
        TableCell::List(values, _) => json!(values),
    };
    let row = |row: &Vec<TableCell>| -> Value {
        let fields = table.columns.iter().zip(row).map(|(name, cell)| ((*name).to_owned(), value(cell)));
        Value::Object(fields.collect::<Map<_, _>>())
    };
    table.rows.iter().map(row).collect()
}

/// A table with aligned columns, or a block of lines per row if the table is wider than `width`. Cells at the start of a
/// row that repeat those of the row above are left out.
fn table_text(table: &Table, width: usize) -> String {
    let all: Vec<Vec<String>> =
        table.rows.iter().map(|row| row.iter().map(ToString::to_string).collect()).collect();
    let mut rows = Vec::new();
    for (number, row) in all.iter().enumerate() {
        let above = number.checked_sub(1).map(|above| &all[above]);
        let repeated = above.map_or(0, |above| above.iter().zip(row).take_while(|(a, b)| a == b).count());
        rows.push((row, if repeated == row.len() { 0 } else { repeated }));
    }
    let cell_width = |column: usize| {
        let cells = all.iter().map(|row| &*row[column]).chain([table.columns[column]]);
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..table.columns.len()).map(cell_width).collect();
    let mut text = format!("\n{}\n", table.name);
    if widths.iter().map(|width| width + COLUMN_GAP).sum::<usize>() > width {
        rows.iter().for_each(|(row, repeated)| add_block(&mut text, table.columns, row, *repeated));
        return text;
    }
    let head: Vec<String> = table.columns.iter().map(|name| name.to_uppercase()).collect();
    let cells = rows.iter().map(|(row, repeated)| {
        row.iter()
            .enumerate()
            .map(|(at, it)| if at < *repeated { String::new() } else { it.clone() })
            .collect()
    });
    for row in std::iter::once(head).chain(cells) {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(&format!("  {}\n", cells.join("  ").trim_end()));
    }
    text
}

/// Adds a row as a heading, its first cell, and a line for each other cell that is not empty.
fn add_block(text: &mut String, columns: &[&str], row: &[String], repeated: usize) {
    let width = columns.iter().skip(1).map(|name| name.len()).max().unwrap_or(0);
    if let (0, Some(first)) = (repeated, row.first()) {
        text.push_str(&format!("  {first}\n"));
    }
    for (name, cell) in columns.iter().zip(row).skip(repeated.max(1)).filter(|(_, cell)| !cell.is_empty()) {
        text.push_str(&format!("    {name:width$}  {cell}\n"));
    }
}

pub(crate) fn schema() -> Result<(), CliError> {
    print(&ratekeeper_config::schema())
}

/// Summarizes the configuration in one line, without its secrets.
pub(crate) fn summary(config: &Config) -> String {
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
    parts.extend(config.apis.all().map(|(name, _, api)| format!("{name} on {}", api.listen)));
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
