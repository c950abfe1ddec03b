//! Tests of configuration files through the public API, in one binary to link only once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod bad_files;
mod common;
mod envoy;
mod envoy_files;
mod examples;
mod gateway;
mod generated;
mod hostile;
mod limit;
mod sentences;
mod warnings;
