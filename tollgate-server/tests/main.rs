//! The gateway and the APIs, end to end. One program, so that everything is linked once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod check;
mod corpora;
mod gateway;
mod resp;
mod rls;
