//! The header sets, as a table: a set is data, and another revision of the draft is another row.

use std::fmt;

use ratekeeper_core::{Limit, Rate, Time};

use super::text::{INTEGER_MAX, push_bytes, push_integer};
use super::wait::seconds;
use super::{LimitDecision, ResponseContext};

/// Which headers describe the limits of a request, by the name used in a configuration.
///
/// | name | headers | value of |
/// |---|---|---|
/// | `ietf` | `ratelimit`, `ratelimit-policy`: revisions 08 to 11 of the IETF draft; the default | every limit |
/// | `draft6` | `ratelimit-limit`, `-remaining`, `-reset` (seconds): revisions 04 to 06 | the binding limit |
/// | | `ratelimit-policy` | every limit |
/// | `legacy` | `x-ratelimit-limit`, `-remaining`, `-reset` (seconds) | the binding limit |
/// | `legacy_epoch` | as `legacy`, with `-reset` in seconds since the epoch | the binding limit |
/// | `github` | `x-ratelimit-limit`, `-remaining`, `-used`, `-reset` (since the epoch) | the binding limit |
/// | | `x-ratelimit-resource` (the policy's name) | the binding limit |
/// | `spring` | `x-ratelimit-remaining`, `-replenish-rate`, `-burst-capacity` | the binding limit |
/// | | `x-ratelimit-requested-tokens` | the binding limit |
/// | `none` | | |
///
/// The binding limit is the one that denies, with the longest wait if several do; else the one with the least
/// remaining; the first if several are equal.
///
/// ```
/// use ratekeeper_rules::response::HeaderSet;
///
/// assert_eq!(HeaderSet::default().name(), "ietf");
/// assert!(HeaderSet::named("github").is_some());
/// assert_eq!(HeaderSet::named("gitlab"), None);
/// ```
#[derive(Clone, Copy)]
pub struct HeaderSet(&'static HeaderTable);

impl HeaderSet {
    /// `ietf`, the default.
    pub const IETF: HeaderSet = HeaderSet(&IETF);

    /// The set of this name.
    pub fn named(name: &str) -> Option<HeaderSet> {
        HeaderSet::all().find(|set| set.name() == name)
    }

    /// Every set, the default first.
    pub fn all() -> impl Iterator<Item = HeaderSet> {
        [&IETF].into_iter().chain(OTHERS).map(HeaderSet)
    }

    /// Its name in a configuration.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    pub(super) fn lines(self) -> &'static [HeaderSpec] {
        self.0.lines
    }
}

impl Default for HeaderSet {
    /// `ietf`.
    fn default() -> HeaderSet {
        HeaderSet::IETF
    }
}

impl PartialEq for HeaderSet {
    fn eq(&self, other: &HeaderSet) -> bool {
        self.name() == other.name()
    }
}

impl Eq for HeaderSet {}

impl fmt::Debug for HeaderSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeaderSet({})", self.name())
    }
}

struct HeaderTable {
    name: &'static str,
    lines: &'static [HeaderSpec],
}

/// One header of a set.
#[derive(Debug)]
pub(super) struct HeaderSpec {
    pub(super) name: &'static str,
    value: ValueSpec,
}

#[derive(Debug)]
enum ValueSpec {
    /// A structured field List with one member per limit: an item, and its parameters if present, each with the text
    /// before its value.
    List(Attribute, &'static [(&'static str, Attribute)]),
    /// One value of the binding limit.
    Single(Attribute),
}

/// A value that describes a limit and its decision.
#[derive(Clone, Copy, Debug)]
enum Attribute {
    /// The policy's name, as a String.
    QuotedName,
    /// The policy's name without quotes.
    PlainName,
    Quota,
    Remaining,
    /// The same, -1 if it is unknown.
    RemainingOrMinusOne,
    /// The quota minus the remaining units.
    Used,
    /// The window in seconds.
    Window,
    /// The effective window: for a denied request, until the limit allows it.
    Until,
    /// The same for headers that require a value: if waiting does not help, until the key has its full budget.
    ResetDelta,
    /// The same as an instant.
    ResetEpoch,
    /// Units restored per second, rounded down.
    PerSecond,
    Cost,
    /// The opaque partition key, as a Byte Sequence.
    Partition,
}

use Attribute::{
    Cost, Partition, PerSecond, PlainName, Quota, QuotedName, Remaining, RemainingOrMinusOne, ResetDelta,
    ResetEpoch, Until, Used, Window,
};

const fn list(
    name: &'static str,
    item: Attribute,
    parameters: &'static [(&'static str, Attribute)],
) -> HeaderSpec {
    HeaderSpec { name, value: ValueSpec::List(item, parameters) }
}

const fn single(name: &'static str, attribute: Attribute) -> HeaderSpec {
    HeaderSpec { name, value: ValueSpec::Single(attribute) }
}

/// draft-ietf-httpapi-ratelimit-headers-08 to -11. The unit `qu` is omitted because requests are the default.
static IETF: HeaderTable = HeaderTable {
    name: "ietf",
    lines: &[
        list("ratelimit", QuotedName, &[(";r=", Remaining), (";t=", Until), (";pk=", Partition)]),
        list("ratelimit-policy", QuotedName, &[(";q=", Quota), (";w=", Window), (";pk=", Partition)]),
    ],
};

static OTHERS: &[HeaderTable] = &[
    HeaderTable {
        name: "draft6",
        lines: &[
            single("ratelimit-limit", Quota),
            single("ratelimit-remaining", Remaining),
            single("ratelimit-reset", ResetDelta),
            list("ratelimit-policy", Quota, &[(";w=", Window)]),
        ],
    },
    HeaderTable {
        name: "legacy",
        lines: &[
            single("x-ratelimit-limit", Quota),
            single("x-ratelimit-remaining", Remaining),
            single("x-ratelimit-reset", ResetDelta),
        ],
    },
    HeaderTable {
        name: "legacy_epoch",
        lines: &[
            single("x-ratelimit-limit", Quota),
            single("x-ratelimit-remaining", Remaining),
            single("x-ratelimit-reset", ResetEpoch),
        ],
    },
    HeaderTable {
        name: "github",
        lines: &[
            single("x-ratelimit-limit", Quota),
            single("x-ratelimit-remaining", Remaining),
            single("x-ratelimit-used", Used),
            single("x-ratelimit-reset", ResetEpoch),
            single("x-ratelimit-resource", PlainName),
        ],
    },
    HeaderTable {
        name: "spring",
        lines: &[
            single("x-ratelimit-remaining", RemainingOrMinusOne),
            single("x-ratelimit-replenish-rate", PerSecond),
            single("x-ratelimit-burst-capacity", Quota),
            single("x-ratelimit-requested-tokens", Cost),
        ],
    },
    HeaderTable { name: "none", lines: &[] },
];

impl HeaderSpec {
    pub(super) fn is_list(&self) -> bool {
        matches!(self.value, ValueSpec::List(..))
    }

    /// Appends the value, and returns whether there is one. `binding` is one of `limits`, of which there is at least
    /// one. What depends on the remaining units is left out if they are unknown.
    pub(super) fn push(
        &self,
        text: &mut String,
        line: usize,
        limits: &[LimitDecision],
        binding: &LimitDecision,
        context: &ResponseContext,
    ) -> bool {
        let start = text.len();
        match self.value {
            ValueSpec::Single(attribute) => {
                if let Some(value) = attribute.of(binding, context) {
                    value.push(text);
                }
            }
            ValueSpec::List(item, parameters) => {
                let is_state = parameters.iter().any(|(_, attribute)| matches!(attribute, Remaining));
                let is_sent = |it: &&LimitDecision| !is_state || it.decision.known_remaining().is_some();
                for limit_decision in limits.iter().filter(is_sent) {
                    text.push_str(if text.len() == start { "" } else { ", " });
                    let fixed = limit_decision.text.and_then(|text| text.member(self, line));
                    let rest = match fixed {
                        Some(fixed) => {
                            text.push_str(&fixed.text);
                            &parameters[fixed.parameters..]
                        }
                        None => {
                            item.push(text, "", limit_decision, context);
                            parameters
                        }
                    };
                    for (before, attribute) in rest {
                        attribute.push(text, before, limit_decision, context);
                    }
                }
            }
        }
        text.len() > start
    }
}

/// The beginning of a limit's list member, the same for every decision.
#[derive(Clone, Debug)]
pub(super) struct FixedMember {
    pub(super) header: &'static HeaderSpec,
    text: Box<str>,
    /// The number of parameters in it.
    parameters: usize,
}

impl HeaderSpec {
    /// The fixed beginning of a limit's list member; empty if the header is not a list.
    pub(super) fn fixed_member(&'static self, limit: &LimitDecision) -> FixedMember {
        let (mut text, mut count) = (String::new(), 0);
        if let ValueSpec::List(item, parameters) = self.value {
            // Fixed values do not depend on the context.
            let context = ResponseContext::at(Time::default());
            item.push(&mut text, "", limit, &context);
            count = parameters.iter().take_while(|(_, attribute)| attribute.is_fixed()).count();
            for (before, attribute) in &parameters[..count] {
                attribute.push(&mut text, before, limit, &context);
            }
        }
        FixedMember { header: self, text: text.into(), parameters: count }
    }
}

impl Attribute {
    /// Whether the value is the same for every decision of a limit.
    fn is_fixed(self) -> bool {
        matches!(self, QuotedName | PlainName | Quota | Window | PerSecond)
    }

    /// Appends the value, if there is one, and `before` in front of it.
    fn push(
        self,
        text: &mut String,
        before: &str,
        limit_decision: &LimitDecision,
        context: &ResponseContext,
    ) {
        if let Some(value) = self.of(limit_decision, context) {
            text.push_str(before);
            value.push(text);
        }
    }

    /// The value for a limit; None if there is none.
    fn of<'a>(
        self,
        limit_decision: &LimitDecision<'a>,
        context: &ResponseContext,
    ) -> Option<AttributeValue<'a>> {
        let (limit, remaining) = (limit_decision.limit.limit(), limit_decision.decision.known_remaining());
        Some(AttributeValue::Number(match self {
            QuotedName => return Some(AttributeValue::Text(limit_decision.name.quoted())),
            PlainName => return Some(AttributeValue::Text(limit_decision.name.as_str())),
            Partition => return limit_decision.partition.map(AttributeValue::Bytes),
            Quota => u64::from(limit),
            Remaining => u64::from(remaining?),
            RemainingOrMinusOne => match remaining {
                Some(remaining) => u64::from(remaining),
                None => return Some(AttributeValue::Text("-1")),
            },
            Used => u64::from(limit.saturating_sub(remaining?)),
            Window => window(limit_decision.limit)?,
            Until => remaining.and_then(|_| limit_decision.until(context))?,
            ResetDelta => remaining.map(|_| limit_decision.reset_delta(context))?,
            ResetEpoch => remaining.map(|_| limit_decision.reset_epoch(context))?,
            PerSecond => per_second(limit_decision.limit),
            Cost => u64::from(limit_decision.cost),
        }))
    }
}

/// A value before it is written.
enum AttributeValue<'a> {
    Text(&'a str),
    Number(u64),
    Bytes(&'a [u8]),
}

impl AttributeValue<'_> {
    fn push(&self, text: &mut String) {
        match *self {
            AttributeValue::Text(value) => text.push_str(value),
            AttributeValue::Number(number) => push_integer(text, number),
            AttributeValue::Bytes(bytes) => push_bytes(text, bytes),
        }
    }
}

/// The window in whole seconds; for a bucket, the time from empty to full.
///
/// None if it exceeds the largest number of a header (thirty million years): a smaller number would promise more.
fn window(limit: &Limit) -> Option<u64> {
    Some(seconds(limit.window())).filter(|window| *window <= INTEGER_MAX)
}

/// Units restored per second, rounded down: zero if less than one.
fn per_second(limit: &Limit) -> u64 {
    let per = |count: u64, nanos: u128| {
        let exact = u128::from(count) * 1_000_000_000 / nanos.max(1);
        u64::try_from(exact).unwrap_or(u64::MAX)
    };
    let of_rate = |rate: Rate| per(rate.count(), rate.period().as_nanos());
    match limit {
        Limit::Bucket(it) => of_rate(it.rate()),
        Limit::SteppedBucket(it) => of_rate(it.rate()),
        Limit::FixedWindow(_) | Limit::Log(_) | Limit::Counter(_) => {
            per(u64::from(limit.limit()), limit.window().as_nanos())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratekeeper_core::{RefillStyle, WindowAlign};

    use super::*;

    fn bucket(capacity: u32, count: u64, period: Duration, style: RefillStyle) -> Limit {
        Limit::token_bucket(capacity, Rate::new(count, period).unwrap(), style).unwrap()
    }

    #[test]
    fn a_window_is_whole_seconds_rounded_up() {
        let fixed = |window| Limit::fixed_window(5, window, WindowAlign::Clock).unwrap();
        assert_eq!(window(&fixed(Duration::from_millis(1))), Some(1));
        assert_eq!(window(&fixed(Duration::from_millis(1_500))), Some(2));
        assert_eq!(window(&fixed(Duration::from_secs(86_400))), Some(86_400));
        // For a bucket, the time from empty to full.
        let minute = Duration::from_secs(60);
        assert_eq!(window(&bucket(10, 4, minute, RefillStyle::Smooth)), Some(150));
        assert_eq!(window(&bucket(10, 4, minute, RefillStyle::Stepped)), Some(180));
        assert_eq!(
            window(&bucket(u32::MAX, 1, Duration::from_secs(366 * 86_400), RefillStyle::Smooth)),
            None
        );
    }

    #[test]
    fn a_rate_per_second_is_rounded_down() {
        let second = Duration::from_secs(1);
        assert_eq!(per_second(&bucket(1, 10_000_000, second, RefillStyle::Smooth)), 10_000_000);
        assert_eq!(per_second(&bucket(1, 3, 2 * second, RefillStyle::Stepped)), 1);
        assert_eq!(per_second(&bucket(1, 4, 60 * second, RefillStyle::Smooth)), 0);
        assert_eq!(per_second(&Limit::fixed_window(100, 10 * second, WindowAlign::Clock).unwrap()), 10);
        let most = Limit::fixed_window(u32::MAX, Duration::from_millis(1), WindowAlign::Clock).unwrap();
        assert_eq!(per_second(&most), 4_294_967_295_000);
    }

    #[test]
    fn names_are_lower_case_and_unique() {
        let names: Vec<&str> = HeaderSet::all().map(HeaderSet::name).collect();
        for set in HeaderSet::all() {
            assert_eq!(names.iter().filter(|name| **name == set.name()).count(), 1, "{set:?}");
            assert_eq!(HeaderSet::named(set.name()), Some(set));
            for line in set.lines() {
                assert!(line.name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{}", line.name);
            }
        }
    }
}
