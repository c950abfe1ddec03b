//! What configuration files mean, tested from outside. One program, so that everything is linked once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod bad_files;
mod common;
mod envoy;
mod envoy_files;
mod examples;
mod gateway;
mod hostile;
mod limit;
mod sentences;
