//! Concurrency limits: limits on requests in flight.

use ratekeeper_rules::key::{Key, KeyPart};
use ratekeeper_rules::response::PolicyName;
use ratekeeper_rules::when::When;

use crate::IN_FLIGHT_MAX;
use crate::key::key;
use crate::limit;
use crate::names;
use crate::reader::{Fields, Reader};
use crate::when::when;

/// A concurrency limit: maximum number of requests of a key in flight.
#[derive(Clone, Debug)]
pub struct Slots {
    /// The name of the limit.
    pub name: String,
    /// The name in responses.
    pub policy: PolicyName,
    /// The key whose requests are counted together.
    pub key: Key,
    /// The conditions of the limit.
    pub when: When,
    /// Maximum number of requests in flight.
    pub most: u32,
    /// Whether the limit is evaluated and reported, but never enforced.
    pub is_shadow: bool,
}

/// Fields that a concurrency limit does not have, and why.
const UNFIT: [(&str, &str, &str); 8] = [
    ("cost", "a request in flight is one, whatever it costs", "remove `cost`"),
    (
        "on_store_failure",
        "a concurrency limit has no failure policy of its own",
        "remove `on_store_failure`: the one of the store applies",
    ),
    ("lease", "permits are not leased", "remove `lease`"),
    ("overrides", "a concurrency limit is the same for every key", OTHER),
    ("allow", "a concurrency limit has no lists", OTHER),
    ("deny", "a concurrency limit has no lists", OTHER),
    ("ban", "a concurrency limit does not ban", "remove `ban`, or give it to a limit with an algorithm"),
    ("deny_response", "a concurrency limit has no response of its own", "remove `deny_response`"),
];
const EXAMPLE: &str = "write as in `concurrency: { limit: 20 }`";
const OTHER: &str =
    "write which requests it concerns, as in `when: { client: 10.0.0.0/8 }`, and make others another limit";

/// Reads a limit that has `concurrency` instead of an algorithm.
pub(crate) fn slots(
    reader: &mut Reader,
    fields: &Fields<'_>,
    name: &str,
    policy: Option<PolicyName>,
) -> Option<Slots> {
    for algorithm in limit::algorithm_names() {
        if let Some(entry) = fields.entry(algorithm) {
            let what =
                "a limit counts requests by an algorithm, or those in flight by `concurrency`, not both";
            reader.wrong(entry.place, what, "remove one of the two, or make them two limits");
        }
    }
    for (unfit, what, instead) in UNFIT {
        if let Some(entry) = fields.entry(unfit) {
            reader.wrong(entry.place, what, instead);
        }
    }
    let most = fields.get("concurrency").and_then(|node| {
        let fields = reader.fields(node, "concurrency", names::CONCURRENCY, EXAMPLE)?;
        if fields.lacks("limit") {
            reader.wrong(node.place, "`concurrency` has no limit", EXAMPLE);
        }
        fields.get("limit").and_then(|node| reader.whole(node, "limit", IN_FLIGHT_MAX))
    });
    let key = fields.get("key").map_or_else(|| Key::of(KeyPart::Ip), |node| key(reader, node).0);
    let when = reader.or(fields.get("when"), When::default(), when);
    let is_shadow = reader.or(fields.get("shadow"), false, |reader, node| reader.yes_or_no(node, "shadow"));
    Some(Slots { name: name.to_owned(), policy: policy?, key, when, most: most?, is_shadow })
}
