//! Command-line arguments.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

/// Rate limits, tried out before they are in the way.
#[derive(Debug, Parser)]
#[command(
    name = "ratekeeper",
    version,
    max_term_width = 100,
    after_help = "Without a command, a gateway runs by an example that ships with ratekeeper, in front of a small upstream."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run everything that a file configures: the gateway
    #[command(max_term_width = 100, after_help = RUN_SIGNALS)]
    Run(Run),

    /// Replay a trace of requests through a limit, on the trace's own time
    Simulate(Simulate),

    /// Validate a configuration file: print its errors and warnings, or explain it
    #[command(max_term_width = 100, after_help = VALIDATE_EXIT_CODES)]
    Validate(Validate),

    /// Turn the configuration of another rate limiter into one of ratekeeper, and print it
    Migrate {
        #[command(subcommand)]
        from: Origin,
    },

    /// Print what a configuration file may hold, as a JSON Schema for editors
    Schema,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Run {
    /// The file; without one, an example that ships with ratekeeper and a small upstream behind it
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// A folder with the files of Envoy's rate limit service, as they are: its domains, beside what FILE says. Without
    /// FILE, limits are in memory, and Envoy asks on 127.0.0.1:8081
    #[arg(long, value_name = "DIR")]
    pub(crate) envoy_config: Option<PathBuf>,
}

const RUN_SIGNALS: &str = "\
Signals: TERM and INT end it once requests that are under way have their answers, and a second one at once; HUP reads
the file again, as does changing it or a file that it refers to. A file that is wrong changes nothing; addresses and the kind of the store need a
restart. USR2 starts a successor on the same sockets, which may be a newer ratekeeper, and ends when that is ready. With
`store: memory` the successor counts from zero; Redis keeps what each key has used.
Systemd: sockets of a socket unit (LISTEN_FDS) are used. For USR2 the service needs `Type=exec` and `ExitType=cgroup` (systemd
250 or later), or else systemd takes the end of the first process for the end of the service, and ends the successor; send
it by `systemctl kill -s USR2 UNIT`. Nothing is told to systemd, so `Type=notify` does not work.
Exit codes: 0 ended, 1 it cannot run, 2 something in the file is wrong.";

#[derive(Debug, clap::Args)]
pub(crate) struct Validate {
    /// The configuration file. Files that it refers to are relative to its folder; secrets are never printed
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// Print which limits apply to which requests, the listeners, and the settings in effect
    #[arg(long)]
    pub(crate) explain: bool,

    /// Output format
    #[arg(long, value_enum, default_value_t = ValidateFormat::Text)]
    pub(crate) format: ValidateFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ValidateFormat {
    Text,
    Json,
}

/// Whose configuration it is.
#[derive(Debug, Subcommand)]
pub(crate) enum Origin {
    /// Envoy's reference rate limit service: all files of a folder that end with .yaml or .yml, a domain each
    #[command(max_term_width = 100, after_help = MIGRATE_EXIT_CODES)]
    Envoy {
        /// The folder
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

const MIGRATE_EXIT_CODES: &str =
    "Exit codes: 0 done, 1 something cannot be read, 2 something in a file is wrong.";

const VALIDATE_EXIT_CODES: &str =
    "Exit codes: 0 valid (with or without warnings), 1 the file cannot be read, 2 invalid.";

#[derive(Debug, clap::Args)]
#[command(max_term_width = 100, after_help = EXAMPLES)]
pub(crate) struct Simulate {
    /// The limit, in YAML: an algorithm and its parameters, each of which may be left out
    #[arg(long, value_name = "YAML", conflicts_with = "limit_file")]
    #[arg(required_unless_present_any = ["limit_file", "compare"])]
    pub(crate) limit: Option<String>,

    /// The limit, from a file
    #[arg(long, value_name = "FILE")]
    pub(crate) limit_file: Option<PathBuf>,

    /// The trace: CSV with a header `time,key,cost` (key and cost may be left out); `-` is stdin
    #[arg(long, value_name = "FILE", required_unless_present = "compare")]
    pub(crate) trace: Option<PathBuf>,

    /// Output format: a report as text, every decision as a line of JSON, or the report as an SVG picture
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,

    /// Put the five algorithms side by side, at settings comparable to the limit's (10 a minute if none is given)
    #[arg(long)]
    pub(crate) compare: bool,

    /// How many keys the table lists, the most denied first
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) keys: usize,

    /// Room for so many keys in use at once
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = at_least_one)]
    pub(crate) max_keys: usize,

    /// Where states are kept: `memory`, or a Redis server as in redis://127.0.0.1:6379, which then decides by the
    /// trace's time; its keys go by themselves
    #[arg(long, value_name = "STORE", default_value = "memory")]
    pub(crate) store: String,

    /// A progress bar, if stderr is a terminal
    #[arg(long, value_enum, default_value_t = Progress::Auto)]
    pub(crate) progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Table,
    Jsonl,
    Svg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Progress {
    Auto,
    Never,
}

const EXAMPLES: &str = "\
Limits (these are the defaults; a comment names the other choices):
  token_bucket:           { capacity: 10, refill: 1/s, style: smooth }         # stepped
  leaky_bucket:           { capacity: 10, leak: 1/s, mode: police }            # shape
  fixed_window:           { limit: 10, window: 60s, align: clock }             # first_request
  sliding_window_log:     { limit: 10, window: 60s, count: admitted }          # all
  sliding_window_counter: { limit: 10, window: 60s, buckets: 1, edge: weigh }  # drop, keep

Examples:
  ratekeeper simulate --limit 'token_bucket: { capacity: 5, refill: 1/s }' --trace trace.csv
  ratekeeper simulate --limit 'fixed_window: { limit: 100, window: 1h }' --trace - --format jsonl < trace.csv
  ratekeeper simulate --compare --trace trace.csv

Times are seconds since 1970 with up to nine decimals (1700000000.5), or RFC 3339 (2023-11-14T22:13:20.5Z).
Exit codes: 0 done, 1 something cannot be read, written or reached, 2 something typed is wrong.";

fn at_least_one(typed: &str) -> Result<usize, String> {
    match typed.parse() {
        Ok(0) => Err("there must be room for at least one key".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err("write a whole number".to_owned()),
    }
}
