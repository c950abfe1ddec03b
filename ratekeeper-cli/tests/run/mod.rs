//! `ratekeeper run` end to end: real processes, real sockets, a real Redis.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod apis;
mod back_pressure;
mod blocking;
mod descriptors;
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
