//! What the algorithms promise, tested from outside: nothing here knows how a state looks inside.
//!
//! | file | what it holds |
//! |---|---|
//! | `model.rs` | the rules once more, written down literally in exact fractions |
//! | `key.rs` | one key under any limit, so that every test runs over every algorithm |
//! | `cases.rs`, `property.rs` | random limits and random requests, and how a property is tried on them |
//! | `properties.rs` | every decision equals the model's, for each of the eleven variants |
//! | `promises.rs` | what a user is told: never more than the limit, denied until exactly then, as good as new |
//! | `time_order.rs` | instants that run backwards |
//! | `carry.rs` | a limit that changes while keys are in use |
//! | `ranges.rs` | parameters at and beyond the ends of their ranges, and no drift |
//! | `vectors.rs` | the worked examples in `vectors/`, which every store must pass, too |

mod carry;
mod cases;
mod key;
mod model;
mod promises;
mod properties;
#[allow(dead_code, reason = "the tests of other crates use the rest")]
mod property;
mod ranges;
mod time_order;
mod vectors;
