//! How a request becomes keys, and what its client is told: whose it is, which limits it meets, what they said.
//!
//! Everything here is a pure function of text and decisions. What was typed becomes these types in `tollgate-config`;
//! requests meet them in `tollgate`'s middleware and in the doors of the server.
//!
//! | module | what it answers |
//! |---|---|
//! | [`client`] | from which address does a request come, if proxies stand in between? |
//! | [`path`] | is this the same path, however it is spelt, and does it match a pattern? |
//! | [`key`] | whose budget does it use? |
//! | [`when`] | which requests does a rule concern? |
//! | [`rule`] | what is a request charged, by all rules? |
//! | [`slots`] | how many requests may be under way at once, and whose? |
//! | [`answer`] | what is the client told about its limits, in headers and in the body of a denial? |
//! | [`request`] | what do rules look at? |

pub mod answer;
pub mod client;
pub mod key;
pub mod path;
pub mod request;
pub mod rule;
pub mod slots;
pub mod when;
