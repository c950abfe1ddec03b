//! `ratekeeper run` end to end: real processes, real sockets, a real Redis.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod access_log;
mod apis;
mod back_pressure;
mod blocking;
mod config_file;
mod endurance;
mod floods;
mod open_files;
mod outages;
mod python;
mod reload;
mod secrets;
mod sharing;
mod start;
mod stop;
mod study_guide;
pub(crate) mod support;
mod terminal;
mod upgrade;
