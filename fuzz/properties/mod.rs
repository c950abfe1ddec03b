//! Properties that hold for any bytes. The fuzzer searches for counterexamples, and a test in `ratekeeper-server`
//! checks the inputs kept under `corpus`.
#![allow(dead_code, reason = "each fuzz target uses one of the properties")]

pub(crate) mod client;
pub(crate) mod config;
pub(crate) mod input;
pub(crate) mod key;
pub(crate) mod path;
pub(crate) mod resp;
pub(crate) mod synthetic_request;

/// A target: its name and its property.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// All targets.
pub(crate) const TARGETS: [Target; 5] = [
    ("client", client::check),
    ("config", config::check),
    ("key", key::check),
    ("path", path::check),
    ("resp", resp::check),
];

/// Returns true if a message is safe to print: it contains no control character that could move the cursor.
fn is_harmless(message: &str) -> bool {
    message.chars().all(|c| c == '\n' || !c.is_control())
}
