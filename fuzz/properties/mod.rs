//! What holds whatever bytes come: the fuzzer looks for bytes for which it does not, and an ordinary test of
//! `tollgate-server` tries the ones that are kept under `corpus`.
#![allow(dead_code, reason = "each fuzz target uses one of the properties")]

pub(crate) mod client;
pub(crate) mod config;
pub(crate) mod input;
pub(crate) mod key;
pub(crate) mod made_up;
pub(crate) mod path;
pub(crate) mod resp;

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

/// Whether a message may go to a terminal as it is: an input must not get to move the cursor.
fn is_harmless(message: &str) -> bool {
    message.chars().all(|c| c == '\n' || !c.is_control())
}
