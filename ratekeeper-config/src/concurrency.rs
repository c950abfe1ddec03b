//! Concurrency limits: limits on requests in flight.

use ratekeeper_rules::key::{Key, KeyPart};
use ratekeeper_rules::response::PolicyName;
use ratekeeper_rules::when::When;

use crate::IN_FLIGHT_MAX;
use crate::key::key;
use crate::limit::ALGORITHM_NAMES;
use crate::reader::{Fields, Reader};
use crate::rule::SHADOW;
use crate::table::{Count, Field, SECTION, Section};
use crate::when::when;

/// A concurrency limit: maximum number of requests of a key in flight.
#[derive(Clone, Debug)]
pub struct ConcurrencyLimit {
    /// The name of the limit.
    pub name: String,
    /// The name in responses.
    pub policy: PolicyName,
    /// The key whose requests are counted together.
    pub key: Key,
    /// The conditions of the limit.
    pub when: When,
    /// Maximum number of requests in flight.
    pub max: u32,
    /// Whether the limit is evaluated and reported, but never enforced.
    pub is_shadow: bool,
}

pub(crate) static CONCURRENCY: Section = Section {
    name: "concurrency",
    meaning: "Concurrency limit: requests of a key in flight. Replaces the algorithm.",
    example: "write as in `concurrency: { limit: 20 }`",
    fields: &[&[&MAX]],
    ..SECTION
};
const MAX: Field<Count> =
    Field::new("limit", "Maximum number of requests in flight.", Count { to: IN_FLIGHT_MAX }).required();

/// Fields that a concurrency limit does not have, and why.
const UNSUPPORTED: [(&str, &str, &str); 8] = [
    ("cost", "a concurrency limit has no `cost`: each request takes one permit", "remove `cost`"),
    (
        "on_store_failure",
        "a concurrency limit has no `on_store_failure`",
        "remove it: the policy of the store applies",
    ),
    ("lease", "a concurrency limit has no `lease`", "remove `lease`"),
    ("overrides", "a concurrency limit has no `overrides`", OTHER),
    ("allow", "a concurrency limit has no `allow` and `deny`", OTHER),
    ("deny", "a concurrency limit has no `allow` and `deny`", OTHER),
    ("ban", "a concurrency limit has no `ban`", "remove `ban`, or add it to a limit with an algorithm"),
    ("deny_response", "a concurrency limit has no `deny_response`", "remove `deny_response`"),
];

/// The names of these fields.
pub(crate) static UNSUPPORTED_NAMES: [&str; UNSUPPORTED.len()] = {
    let mut names = [""; UNSUPPORTED.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = UNSUPPORTED[index].0;
        index += 1;
    }
    names
};
const OTHER: &str =
    "select requests with `when: { client: 10.0.0.0/8 }`, and write another limit for the others";

/// Reads a limit that has `concurrency` instead of an algorithm.
pub(crate) fn concurrency(
    reader: &mut Reader,
    fields: &Fields<'_>,
    name: &str,
    policy: Option<PolicyName>,
) -> Option<ConcurrencyLimit> {
    for algorithm in ALGORITHM_NAMES {
        if let Some(entry) = fields.entry(algorithm) {
            let message = "a limit has an algorithm or `concurrency`, not both";
            reader.error(entry.position, message, "remove one of the two, or write two limits");
        }
    }
    for (name_error, message, help) in UNSUPPORTED {
        if let Some(entry) = fields.entry(name_error) {
            reader.error(entry.position, message, help);
        }
    }
    let max = fields.get("concurrency").and_then(|node| {
        let fields = reader.fields(node, "`concurrency`", &CONCURRENCY)?;
        reader.require(&fields);
        MAX.optional(reader, &fields)
    });
    let key = fields.get("key").map_or_else(|| Key::of(KeyPart::Ip), |node| key(reader, node).0);
    let when = reader.or(fields.get("when"), When::default(), when);
    let is_shadow = SHADOW.read(reader, fields);
    Some(ConcurrencyLimit { name: name.to_owned(), policy: policy?, key, when, max: max?, is_shadow })
}
