//! Keys, conditions and rules: charges by example, and properties for every request.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

mod charges;
mod concurrency;
mod keys;
mod request_builder;
mod when;

#[path = "../../../fuzz/properties/input.rs"]
#[allow(dead_code, reason = "the other properties need the rest")]
mod input;
#[path = "../../../fuzz/properties/key.rs"]
mod key_property;
#[path = "../../../fuzz/properties/synthetic_request.rs"]
mod synthetic_request;
