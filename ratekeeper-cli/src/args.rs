//! Command-line arguments.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

/// Distributed rate limiter: gateway, middleware, APIs and simulator.
///
/// Without a command, Ratekeeper runs a demo: a gateway on 127.0.0.1:8080 in front of a small upstream.
#[derive(Debug, Parser)]
#[command(name = "ratekeeper", version, max_term_width = WIDTH_MAX, args_conflicts_with_subcommands = true)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,

    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// Longer lines are hard to read.
const WIDTH_MAX: usize = 100;

// The texts after the options have lines of at most 80 characters: terminals are often that narrow, and wrapping
// breaks their columns.

const AFTER: &str = "\
First steps:
  ratekeeper                           Run the demo
  ratekeeper init                      Write a configuration, ratekeeper.yaml
  ratekeeper validate ratekeeper.yaml  Check it; --explain shows its effect
  ratekeeper run                       Run it

Exit codes: 0 success, 1 input or output failed, 2 invalid arguments or files.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the gateway and the APIs of a configuration file
    #[command(max_term_width = WIDTH_MAX, after_help = RUN_AFTER, after_long_help = RUN_AFTER_LONG)]
    Run(Run),

    /// Check a configuration file: print its errors and warnings, or explain it
    #[command(max_term_width = WIDTH_MAX, after_help = VALIDATE_EXIT_CODES)]
    Validate(Validate),

    /// Write a commented configuration file to start from
    ///
    /// On a terminal, asks a question for each flag that is not given. Otherwise uses the defaults: 100 requests per
    /// minute per client address.
    #[command(max_term_width = WIDTH_MAX, after_help = INIT_AFTER)]
    Init(Init),

    /// Replay recorded requests through a limit and report the decisions
    ///
    /// No server runs, and nothing waits: each request is decided at the time in the trace.
    Simulate(Simulate),

    /// Convert the configuration of another rate limiter to Ratekeeper's and print it
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
    #[arg(long, value_name = "FORMAT", value_enum)]
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

    /// The configuration file, as an option
    #[arg(short, long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Add the domains of a folder with configuration files of envoyproxy/ratelimit
    ///
    /// Without a configuration file, limits are kept in memory, the Envoy API listens on 127.0.0.1:8081 and the HTTP
    /// API on 127.0.0.1:8080.
    #[arg(long, value_name = "DIR")]
    pub(crate) envoy_config: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) log: LogArgs,
}

const RUN_AFTER: &str = "\
Signals: TERM and INT shut down gracefully, HUP reloads, USR2 upgrades.
See --help for reloads, upgrades and environment variables.
Exit codes: 0 shut down, 1 cannot run, 2 invalid configuration.";

const RUN_AFTER_LONG: &str = "\
Reload: a changed configuration file, or a changed file that it refers to, is
read within a second. An invalid configuration changes nothing. Changes of
addresses and of the store need a restart.

Signals:
  TERM, INT  Graceful shutdown: accepts no new connections and waits for
             requests in flight, at most `timeouts.drain`. A second signal
             stops immediately.
  HUP        Reloads the configuration now.
  USR2       Upgrades: starts the program at the same path, which may be a newer
             version, on the same sockets, and shuts down when that is ready.
             Counters in Redis are kept, counters in memory are not.

systemd:
  Sockets of a socket unit (LISTEN_FDS) are used. USR2 needs `Type=exec` and
  `ExitType=cgroup` (systemd 250 or newer); send it with
  `systemctl kill -s USR2 UNIT`. `Type=notify` is not supported.

Environment:
  RATEKEEPER_CONFIG  Path of the configuration file.
  RATEKEEPER_LOG     Log level: `warn`, `info` or `debug`, also per module as in
                     `info,ratekeeper_server=debug`.
  NO_COLOR           If set and not empty, no colors.

Exit codes: 0 shut down, 1 cannot run, 2 invalid configuration.";

#[derive(Debug, clap::Args)]
pub(crate) struct Validate {
    /// The configuration file; by default $RATEKEEPER_CONFIG, else ./ratekeeper.yaml. Paths in it are relative to its
    /// folder, and secrets are never printed
    #[arg(value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,

    /// Print the listeners, which limits apply to which requests, and the settings in effect
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
    "Exit codes: 0 valid, also with warnings; 1 the file cannot be read; 2 invalid.";

#[derive(Debug, Default, clap::Args)]
pub(crate) struct Init {
    /// The file to write; `-` prints it
    #[arg(short, long, value_name = "FILE", default_value = "ratekeeper.yaml")]
    pub(crate) output: PathBuf,

    /// What matters most; decides the algorithm
    #[arg(long, value_enum)]
    pub(crate) need: Option<Need>,

    /// Requests per period, as in 100/min
    #[arg(long, value_name = "N/PERIOD")]
    pub(crate) rate: Option<String>,

    /// The key, each with its own budget: ip, a header as in header:X-User-Id, or global for one budget in all
    #[arg(long, value_name = "KEY")]
    pub(crate) key: Option<String>,

    /// The service that the gateway forwards requests to, as in http://127.0.0.1:3000
    #[arg(long, value_name = "URL")]
    pub(crate) upstream: Option<String>,

    /// Where limits are kept: memory, or a Redis address to share them among instances
    #[arg(long, value_name = "STORE")]
    pub(crate) store: Option<String>,

    /// Number of instances that share the limits through Redis; each enforces its share while Redis is unavailable
    #[arg(long, value_name = "N")]
    pub(crate) instances: Option<String>,

    /// Replace the file if it exists
    #[arg(long)]
    pub(crate) force: bool,
}

/// The choice guide: what matters most for a limit.
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
Example:
  ratekeeper init --need bursts --rate 100/min --key header:X-User-Id
Exit codes: 0 written, 1 cannot write, 2 invalid flag or existing file.";

const COMPLETIONS_AFTER: &str = "\
Install:
  bash  ratekeeper completions bash \\
          > ~/.local/share/bash-completion/completions/ratekeeper
  zsh   ratekeeper completions zsh > \"${fpath[1]}/_ratekeeper\"
  fish  ratekeeper completions fish > ~/.config/fish/completions/ratekeeper.fish";

/// The rate limiter to migrate from.
#[derive(Debug, Subcommand)]
pub(crate) enum Origin {
    /// Convert the files of envoyproxy/ratelimit
    #[command(max_term_width = WIDTH_MAX, after_help = MIGRATE_EXIT_CODES)]
    Envoy {
        /// A folder; each of its .yaml and .yml files is one domain
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

    /// The trace: CSV with the header `time,key,cost` (key and cost are optional); `-` is stdin
    #[arg(long, value_name = "FILE", required_unless_present = "compare")]
    pub(crate) trace: Option<PathBuf>,

    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,

    /// Compare the five algorithms at the rate of the limit (default: 10 per minute)
    #[arg(long)]
    pub(crate) compare: bool,

    /// Number of keys in the table, the most denied first
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) keys: usize,

    /// Number of keys with their own state; decisions for further keys are not exact
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = at_least_one)]
    pub(crate) max_keys: usize,

    /// Where the state is kept: `memory`, or a Redis server as in redis://127.0.0.1:6379, in keys that expire
    #[arg(long, value_name = "STORE", default_value = "memory")]
    pub(crate) store: String,

    /// Whether to show a progress bar; `auto` shows it if stderr is a terminal
    #[arg(long, value_enum, default_value_t = Progress::Auto)]
    pub(crate) progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A report as text
    Table,
    /// Each decision as a line of JSON
    Jsonl,
    /// The report as a picture
    Svg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Progress {
    Auto,
    Never,
}

const SIMULATE_AFTER: &str = "Example:
  ratekeeper simulate --limit 'token_bucket: { capacity: 5, refill: 1/s }' --trace trace.csv
See --help for all algorithms and their parameters.";

const SIMULATE_AFTER_LONG: &str = "\
Limits, with the default of each parameter:
  token_bucket:           { capacity: 10, refill: 1/s, style: smooth }
  leaky_bucket:           { capacity: 10, leak: 1/s, mode: police }
  fixed_window:           { limit: 10, window: 60s, align: clock }
  sliding_window_log:     { limit: 10, window: 60s, count: admitted }
  sliding_window_counter: { limit: 10, window: 60s, buckets: 1, edge: weigh }

Other choices: style `stepped`, mode `shape`, align `first_request`, count `all`,
edge `drop` or `keep`.

Examples:
  ratekeeper simulate --limit 'token_bucket: { capacity: 5, refill: 1/s }' --trace trace.csv
  ratekeeper simulate --limit fixed_window: --trace - --format jsonl < trace.csv
  ratekeeper simulate --compare --trace trace.csv

Times are seconds since 1970 with up to nine decimals (1700000000.5), or RFC 3339
(2023-11-14T22:13:20.5Z).

Exit codes: 0 done; 1 cannot read, write or reach the store; 2 invalid limit,
trace or flag.";

fn at_least_one(typed: &str) -> Result<usize, String> {
    match typed.parse() {
        Ok(0) => Err("at least one key is needed".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err("write a whole number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use ratekeeper_config::parse_limit;

    use super::*;

    #[test]
    fn help_states_the_defaults_of_all_algorithms() {
        let lines = SIMULATE_AFTER_LONG.lines().skip(1).map_while(|line| line.strip_prefix("  "));
        let mut algorithms = 0;
        for line in lines {
            let (name, _) = line.split_once(':').unwrap();
            let parse = |text: &str| parse_limit(text).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(parse(line), parse(&format!("{name}:")), "{line}");
            algorithms += 1;
        }
        assert_eq!(algorithms, 5);
    }
}
