//! What a replay promises, tested from outside. One program, so that everything is linked once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod shipped_traces;
mod trace;
mod vectors;
