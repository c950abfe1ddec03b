//! Black-box tests of the command. One test program, so that everything is linked once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod cli;
mod run;
