//! Black-box tests of rules. One test binary, so that everything is linked once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod clients;
mod networks;
mod path_properties;
mod paths;
mod response;
mod rules;
mod templates;
