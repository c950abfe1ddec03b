//! Black-box tests of replays. One test program, so that everything is linked once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod shipped_traces;
mod trace;
mod vectors;
