//! Command-line arguments.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

/// Distributed rate limiter: gateway, middleware, APIs and simulator.
///
/// Without a command, Ratekeeper runs a demo: a gateway on 127.0.0.1:8080 in front of a small upstream.
#[derive(Debug, Parser)]
#[command(name = "ratekeeper", version, max_term_width = WIDTH_MAX, args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,

    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// Longer lines are hard to read.
const WIDTH_MAX: usize = 100;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the gateway and the APIs that a file configures
    #[command(max_term_width = WIDTH_MAX, after_help = RUN_AFTER, after_long_help = RUN_AFTER_LONG)]
    Run(Run),

    /// Validate a configuration file: print its errors and warnings, or explain it
    #[command(max_term_width = WIDTH_MAX, after_help = VALIDATE_EXIT_CODES)]
    Validate(Validate),

    /// Write a commented configuration file to start from
    ///
    /// Asks for what the flags do not say if stdin is a terminal; otherwise uses the defaults.
    #[command(max_term_width = WIDTH_MAX, after_help = INIT_AFTER)]
    Init(Init),

    /// Replay a trace of requests through a limit, on the trace's own time
    Simulate(Simulate),

    /// Convert the configuration of another rate limiter and print it
    Migrate {
        #[command(subcommand)]
        from: Origin,
    },

    /// Print the JSON Schema of configuration files, for editors
    Schema,

    /// Print a completion script for a shell
    #[command(max_term_width = WIDTH_MAX, after_help = COMPLETIONS_AFTER)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },

    /// Print the manual page, in roff: `ratekeeper man | man -l -`
    Man,
}

/// How requests and events are logged.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct LogArgs {
    /// Log format [default: human on a terminal, json otherwise]
    #[arg(long, value_enum)]
    pub(crate) log_format: Option<LogFormat>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// A readable line per request and event, colored on a terminal unless NO_COLOR is set
    Human,
    /// A line of JSON per request (stdout) and event (stderr)
    Json,
}

#[derive(Debug, Default, clap::Args)]
pub(crate) struct Run {
    /// The configuration file [default: $RATEKEEPER_CONFIG, else ./ratekeeper.yaml]
    #[arg(value_name = "FILE", conflicts_with = "config")]
    pub(crate) file: Option<PathBuf>,

    /// The configuration file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// A folder with configuration files of envoyproxy/ratelimit, whose domains are added
    ///
    /// Without a configuration file, limits are kept in memory and the Envoy API listens on 127.0.0.1:8081.
    #[arg(long, value_name = "DIR")]
    pub(crate) envoy_config: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) log: LogArgs,
}

const RUN_AFTER: &str = "\
Signals: HUP reloads, TERM and INT shut down gracefully, USR2 upgrades. See --help.
Exit codes: 0 shut down, 1 cannot run, 2 invalid configuration.";

const RUN_AFTER_LONG: &str = "\
Signals:
  TERM, INT  Graceful shutdown: stops accepting connections and waits for requests in flight, at most `timeouts.drain`.
             A second signal stops immediately.
  HUP        Reloads the configuration. A changed file, or a file that it refers to, is reloaded within a second without
             a signal. An invalid configuration changes nothing. Addresses and the kind of the store need a restart.
  USR2       Upgrade: starts a successor on the same sockets, which may be a newer binary, and shuts down when that is
             ready. With `store: memory` the successor starts with empty counters; with Redis it continues.

systemd: sockets of a socket unit (LISTEN_FDS) are used. USR2 needs `Type=exec` and `ExitType=cgroup` (systemd 250 or
newer); send it with `systemctl kill -s USR2 UNIT`. `Type=notify` is not supported.

Environment:
  RATEKEEPER_CONFIG  Path of the configuration file.
  RATEKEEPER_LOG     Log level (`warn`, `info`, `debug`), also per module: `info,ratekeeper_server=debug`.
  NO_COLOR           If set, no colors.

Exit codes: 0 shut down, 1 cannot run, 2 invalid configuration.";

#[derive(Debug, clap::Args)]
pub(crate) struct Validate {
    /// The configuration file; paths in it are relative to its folder, and secrets are never printed
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

const VALIDATE_EXIT_CODES: &str =
    "Exit codes: 0 valid (with or without warnings), 1 the file cannot be read, 2 invalid.";

#[derive(Debug, Default, clap::Args)]
pub(crate) struct Init {
    /// The file to write; `-` prints it
    #[arg(short, long, value_name = "FILE", default_value = "ratekeeper.yaml")]
    pub(crate) output: PathBuf,

    /// What matters most, which decides the algorithm
    #[arg(long, value_enum)]
    pub(crate) need: Option<Need>,

    /// Requests per period, as in 100/min
    #[arg(long, value_name = "N/PERIOD")]
    pub(crate) rate: Option<String>,

    /// Whose budget a request uses: ip, global, or a header as in header:X-User-Id
    #[arg(long, value_name = "KEY")]
    pub(crate) key: Option<String>,

    /// The service behind the gateway, as in http://127.0.0.1:3000
    #[arg(long, value_name = "URL")]
    pub(crate) upstream: Option<String>,

    /// Where limits are kept: memory, or a Redis address to share them among instances
    #[arg(long, value_name = "STORE")]
    pub(crate) store: Option<String>,

    /// Replace the file if it exists
    #[arg(long)]
    pub(crate) force: bool,
}

/// The choice guide: what matters most to the person who sets a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Need {
    /// Allow bursts: token_bucket
    Bursts,
    /// Send requests to the service at a steady rate: leaky_bucket
    Steady,
    /// The simplest limit to explain: fixed_window
    Simplest,
    /// The limit holds in every window: sliding_window_log
    Exact,
    /// Not sure: sliding_window_counter
    Unsure,
}

const INIT_AFTER: &str = "\
Example: ratekeeper init --need bursts --rate 100/min --key header:X-User-Id --upstream http://127.0.0.1:3000
Exit codes: 0 written, 1 cannot write, 2 invalid flag or existing file.";

const COMPLETIONS_AFTER: &str = "\
bash: ratekeeper completions bash > ~/.local/share/bash-completion/completions/ratekeeper
zsh:  ratekeeper completions zsh > \"${fpath[1]}/_ratekeeper\"
fish: ratekeeper completions fish > ~/.config/fish/completions/ratekeeper.fish";

/// The rate limiter to migrate from.
#[derive(Debug, Subcommand)]
pub(crate) enum Origin {
    /// envoyproxy/ratelimit: all files of a folder that end with .yaml or .yml, a domain each
    #[command(max_term_width = WIDTH_MAX, after_help = MIGRATE_EXIT_CODES)]
    Envoy {
        /// The folder
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

const MIGRATE_EXIT_CODES: &str = "Exit codes: 0 converted, 1 a file cannot be read, 2 a file is invalid.";

#[derive(Debug, clap::Args)]
#[command(max_term_width = WIDTH_MAX, after_help = SIMULATE_AFTER, after_long_help = SIMULATE_AFTER_LONG)]
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

    /// Compare the five algorithms, at settings comparable to the limit's (default: 10 per minute)
    #[arg(long)]
    pub(crate) compare: bool,

    /// Number of keys in the table, the most denied first
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) keys: usize,

    /// Maximum number of active keys
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = at_least_one)]
    pub(crate) max_keys: usize,

    /// The store: `memory`, or a Redis server as in redis://127.0.0.1:6379, which decides by the trace's time; its keys
    /// expire
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

const SIMULATE_AFTER: &str =
    "Example: ratekeeper simulate --limit 'token_bucket: { capacity: 5, refill: 1/s }' --trace trace.csv
See --help for all algorithms and their parameters.";

const SIMULATE_AFTER_LONG: &str = "\
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
Exit codes: 0 done, 1 cannot read, write or reach the store, 2 invalid limit, trace or flag.";

fn at_least_one(typed: &str) -> Result<usize, String> {
    match typed.parse() {
        Ok(0) => Err("at least one key is needed".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err("write a whole number".to_owned()),
    }
}
