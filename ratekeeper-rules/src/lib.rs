//! Rules: how a request is turned into keys and charges, and how decisions are turned into a response.
//!
//! Everything here is a pure function of text and decisions. `ratekeeper-config` builds these types from a
//! configuration; `ratekeeper`'s middleware and the server's APIs apply them to requests.
//!
//! | module | purpose |
//! |---|---|
//! | [`client`] | the client's address behind proxies |
//! | [`path`] | normalized paths and path patterns |
//! | [`key`] | whose budget a request uses |
//! | [`when`] | which requests a rule applies to |
//! | [`rule`] | what a request is charged, by all rules |
//! | [`concurrency`] | concurrency limits: requests in flight per key |
//! | [`response`] | rate limit headers, and status and body of a denial |
//! | [`request`] | the parts of a request that rules read |
//! | [`spelling`] | spellings that servers treat as one |

pub mod client;
pub mod concurrency;
pub mod key;
pub mod path;
pub mod request;
pub mod response;
pub mod rule;
pub mod spelling;
pub mod when;
