//! Limits on how many requests are under way at once.

use tollgate_rules::answer::PolicyName;
use tollgate_rules::key::{Key, Part};
use tollgate_rules::when::When;

use crate::IN_FLIGHT_MAX;
use crate::key::key;
use crate::limit;
use crate::reader::{Fields, Reader};
use crate::when::when;

/// How many requests of a key may be under way at once.
#[derive(Clone, Debug)]
pub struct Slots {
    /// Its name.
    pub name: String,
    /// The same, as clients are told.
    pub policy: PolicyName,
    /// Whose requests are counted together.
    pub key: Key,
    /// Which requests it concerns.
    pub when: When,
    /// How many.
    pub most: u32,
    /// It counts and reports, but never denies.
    pub is_shadow: bool,
}

/// What such a limit does not have, and why.
const UNFIT: [(&str, &str, &str); 8] = [
    ("cost", "a request under way is one, whatever it costs", "remove `cost`"),
    (
        "failure",
        "requests under way have no failure policy of their own",
        "remove `failure`: the store's counts",
    ),
    ("lease", "requests under way are not taken ahead", "remove `lease`"),
    ("overrides", "requests under way have the same bound for every key", OTHER),
    ("allow", "requests under way have no lists", OTHER),
    ("deny", "requests under way have no lists", OTHER),
    ("ban", "requests under way lead to no ban", "remove `ban`, or give it to a limit with an algorithm"),
    ("answer", "requests under way have no answer of their own", "remove `answer`"),
];
const OTHER: &str =
    "write which requests it concerns, as in `when: { client: 10.0.0.0/8 }`, and make others another limit";

/// A limit that has `in_flight` in place of an algorithm.
pub(crate) fn slots(
    reader: &mut Reader,
    fields: &Fields<'_>,
    name: &str,
    policy: Option<PolicyName>,
) -> Option<Slots> {
    for algorithm in limit::algorithm_names() {
        if let Some(entry) = fields.entry(algorithm) {
            let what = "a limit counts requests by an algorithm, or those under way by `in_flight`, not both";
            reader.wrong(entry.place, what, "remove one of the two, or make them two limits");
        }
    }
    for (unfit, what, instead) in UNFIT {
        if let Some(entry) = fields.entry(unfit) {
            reader.wrong(entry.place, what, instead);
        }
    }
    let most = fields.get("in_flight").and_then(|node| reader.whole(node, "in_flight", IN_FLIGHT_MAX));
    let key = fields.get("key").map_or_else(|| Key::of(Part::Ip), |node| key(reader, node).0);
    let when = reader.or(fields.get("when"), When::default(), when);
    let is_shadow = reader.or(fields.get("shadow"), false, |reader, node| reader.yes_or_no(node, "shadow"));
    Some(Slots { name: name.to_owned(), policy: policy?, key, when, most: most?, is_shadow })
}
