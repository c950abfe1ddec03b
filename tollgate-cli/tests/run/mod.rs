//! `tollgate run` in operation: real processes, real sockets, a real Redis.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod back_pressure;
mod descriptors;
mod doors;
mod endurance;
mod floods;
mod outages;
mod python;
mod reload;
mod secrets;
mod sharing;
mod start;
mod stop;
mod study_guide;
mod support;
mod upgrade;
