//! Black-box tests of the algorithms: nothing here depends on the representation of a state.
//!
//! | file | content |
//! |---|---|
//! | `model.rs` | a reference model of the algorithms in exact fractions |
//! | `key.rs` | one key under any limit, so that every test runs over every algorithm |
//! | `cases.rs` | random limits and requests |
//! | `limits.rs` | limits of every kind, which the tests of the stores use, too |
//! | `properties.rs` | every decision equals the model's, for each of the eleven variants |
//! | `promises.rs` | guarantees to users: never more than the limit, exact `retry_after` and `reset_after` |
//! | `time_order.rs` | instants that run backwards |
//! | `migration.rs` | a limit that changes while keys are in use |
//! | `ranges.rs` | parameters at and beyond the ends of their ranges, and no drift |
//! | `vectors.rs` | the worked examples in `vectors/`, which every store must pass, too |

mod cases;
mod key;
#[allow(dead_code, reason = "the tests of the stores use the rest")]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]
mod limits;
mod migration;
mod model;
mod promises;
mod properties;
mod ranges;
mod time_order;
mod vectors;
