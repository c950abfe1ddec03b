//! Tollgate beside its peers, on one machine, in one run.
//!
//! An absolute time says little on a shared machine; a ratio within one run holds. So all contenders take turns in
//! every scenario, and the goals are ratios.
//!
//! | file | what it does |
//! |---|---|
//! | `memory` | the scenarios of the in-memory limiters, and the run |
//! | `redis` | decisions inside Redis |
//! | `gateway` | our gateway beside other proxies |
//! | `doors` | our doors for other protocols beside other servers |
//! | `install` | programs that take part, built or installed where that is possible |
//! | `wrk` | who asks over HTTP |
//! | `contenders` | who takes part, each by its natural fastest call |
//! | `keys` | what is asked for: the keys, and the order in which requests name them |
//! | `timing` | pinned workers that time themselves |
//! | `resident` | bytes per key, each contender in a process of its own |
//! | `report` | the figures, as a table and as JSON |
//! | `goals` | what was promised, and whether the figures keep it |

mod contenders;
mod doors;
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

use crate::contenders::Who;

#[derive(Parser)]
#[command(about = "Tollgate beside its peers, on one machine, in one run")]
struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Limiters in memory: nanoseconds per decision, bytes per key
    Memory {
        /// A smoke test in seconds; its figures are not to be quoted
        #[arg(long)]
        quick: bool,
        /// Also write every round's figure to this file
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// Decisions inside Redis: server time per decision beside the usual scripts, bytes of a log, whole programs
    Redis {
        /// A smoke test in seconds; its figures are not to be quoted
        #[arg(long)]
        quick: bool,
        /// Also write every round's figure to this file
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// The gateway beside nginx, HAProxy and Envoy: processor time per request, and what each feature costs
    Gateway {
        /// A smoke test of one round; its figures are not to be quoted
        #[arg(long)]
        quick: bool,
        /// Also write every round's figure to this file
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// A `tollgate` that is built already
        #[arg(long, value_name = "FILE")]
        binary: Option<PathBuf>,
    },
    /// The doors for RESP, HTTP and gRPC beside throttlecrab's server and Redis itself: processor time per decision
    Doors {
        /// A smoke test of one round; its figures are not to be quoted
        #[arg(long)]
        quick: bool,
        /// Also write every round's figure to this file
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// A `tollgate` that is built already
        #[arg(long, value_name = "FILE")]
        binary: Option<PathBuf>,
    },
    /// Who asks over gRPC; the bench of the doors runs itself with this
    #[command(hide = true)]
    GrpcLoad(doors::Load),
    /// One contender's bytes per key; the memory bench runs itself with this for each of them
    #[command(hide = true)]
    Resident {
        #[arg(value_enum)]
        who: Who,
        keys: usize,
    },
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
        Bench::Memory { quick, json } => {
            let size = if quick { memory::Size::QUICK } else { memory::Size::FULL };
            tell(&memory::run(&size)?, json)?;
        }
        Bench::Redis { quick, json } => {
            let size = if quick { redis::Size::QUICK } else { redis::Size::FULL };
            tell(&redis::run(&size)?, json)?;
        }
        Bench::Gateway { quick, json, binary } => {
            let size = if quick { gateway::Size::QUICK } else { gateway::Size::FULL };
            tell(&gateway::run(&size, binary)?, json)?;
        }
        Bench::Doors { quick, json, binary } => {
            let size = if quick { doors::Size::QUICK } else { doors::Size::FULL };
            tell(&doors::run(&size, binary)?, json)?;
        }
        Bench::GrpcLoad(load) => println!("{}", doors::ask_many(&load)?),
        Bench::Resident { who, keys } => println!("{}", resident::bytes_held(who, keys)?),
    }
    Ok(())
}

/// Prints a report, and keeps it as JSON if that is wanted.
fn tell(report: &(impl Display + Serialize), json: Option<PathBuf>) -> Result<(), Box<dyn Error>> {
    print!("{report}");
    if let Some(file) = json {
        fs::write(&file, serde_json::to_string_pretty(report)?)
            .map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}
