//! Benchmarks Ratekeeper against its peers, on one machine, in one run.
//!
//! On a shared machine absolute times vary, but ratios within one run are stable. All contenders therefore take turns
//! in every scenario, and the goals are ratios.
//!
//! | module | purpose |
//! |---|---|
//! | `memory` | scenarios of the in-memory limiters, and their run |
//! | `redis` | decisions inside Redis |
//! | `gateway` | the gateway beside other proxies |
//! | `apis` | the APIs beside other servers |
//! | `install` | builds or installs the contenders where possible |
//! | `wrk` | load generator for HTTP |
//! | `contenders` | the contenders, each called in its fastest usual way |
//! | `keys` | the keys, and the order in which requests use them |
//! | `timing` | pinned workers that time themselves |
//! | `resident` | bytes per key, one process per contender |
//! | `figures` | medians of rounds |
//! | `report` | the figures, as a table and as JSON |
//! | `goals` | the goals, and whether the figures meet them |

mod apis;
mod contenders;
mod figures;
mod gateway;
mod goals;
mod install;
mod keys;
mod memory;
mod redis;
mod report;
mod resident;
mod timing;
mod wrk;

use std::error::Error;
use std::fmt::Display;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde::Serialize;

use crate::contenders::ContenderKind;

#[derive(Parser)]
#[command(about = "Ratekeeper beside its peers, on one machine, in one run")]
struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Limiters in memory: nanoseconds per decision, bytes per key
    Memory(ReportArgs),
    /// Decisions inside Redis: server time per decision beside the usual scripts, bytes of a log, whole programs
    Redis(ReportArgs),
    /// The gateway beside nginx, HAProxy and Envoy: processor time per request, and what each feature costs
    Gateway {
        #[command(flatten)]
        report: ReportArgs,
        /// A `ratekeeper` that is built already
        #[arg(long, value_name = "FILE")]
        binary: Option<PathBuf>,
    },
    /// The APIs for RESP, HTTP and gRPC beside throttlecrab's server and Redis itself: processor time per decision
    Apis {
        #[command(flatten)]
        report: ReportArgs,
        /// A `ratekeeper` that is built already
        #[arg(long, value_name = "FILE")]
        binary: Option<PathBuf>,
    },
    /// Load generator for gRPC; the API benchmark starts it as a process
    #[command(hide = true)]
    GrpcLoad(apis::Load),
    /// Bytes per key of one contender; the memory benchmark starts it as a process for each
    #[command(hide = true)]
    Resident {
        #[arg(value_enum)]
        kind: ContenderKind,
        keys: usize,
    },
}

#[derive(clap::Args)]
struct ReportArgs {
    /// A smoke test of one round; its figures are not to be quoted
    #[arg(long)]
    quick: bool,
    /// Also write every round's figure to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(Args::parse().bench) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(bench: Bench) -> Result<(), Box<dyn Error>> {
    match bench {
        Bench::Memory(ReportArgs { quick, json }) => {
            let size = if quick { memory::MemorySize::QUICK } else { memory::MemorySize::FULL };
            print_report(&memory::run(&size)?, json)?;
        }
        Bench::Redis(ReportArgs { quick, json }) => {
            let size = if quick { redis::RedisSize::QUICK } else { redis::RedisSize::FULL };
            print_report(&redis::run(&size)?, json)?;
        }
        Bench::Gateway { report: ReportArgs { quick, json }, binary } => {
            let size = if quick { gateway::GatewaySize::QUICK } else { gateway::GatewaySize::FULL };
            print_report(&gateway::run(&size, binary)?, json)?;
        }
        Bench::Apis { report: ReportArgs { quick, json }, binary } => {
            let size = if quick { apis::ApisSize::QUICK } else { apis::ApisSize::FULL };
            print_report(&apis::run(&size, binary)?, json)?;
        }
        Bench::GrpcLoad(load) => println!("{}", apis::generate_load(&load)?),
        Bench::Resident { kind, keys } => println!("{}", resident::bytes_used(kind, keys)?),
    }
    Ok(())
}

/// Prints a report, and writes it as JSON if a file is given.
fn print_report(report: &(impl Display + Serialize), json: Option<PathBuf>) -> Result<(), Box<dyn Error>> {
    print!("{report}");
    if let Some(file) = json {
        fs::write(&file, serde_json::to_string_pretty(report)?)
            .map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}
