//! The property `check`, for libFuzzer.
#![no_main]

#[path = "../properties/check.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::check(bytes));
