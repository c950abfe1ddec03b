//! Domains and descriptors of the Envoy API, and the lookup of a descriptor by the entries of a request.

use std::time::Duration;

use ratekeeper_core::Limit;

mod envoy_file;
mod key;
mod matching;
mod metadata;
mod migrate;
mod name;
mod read;
mod wildcard;

pub use matching::Descriptors;
pub use metadata::{Data, Metadata};
pub use migrate::migrate;
pub(crate) use read::{descriptors, domains};
pub use wildcard::Wildcard;

/// Maximum number of descriptors in a file, over all domains.
pub const DESCRIPTORS_MAX: usize = 2_000;

/// Maximum depth of descriptors. Further entries of a request match nothing.
pub const DEPTH_MAX: usize = 10;

/// A domain and its descriptors.
#[derive(Clone, Debug)]
pub struct Domain {
    /// The name of the domain.
    pub name: String,
    /// The descriptors for the first entry of a request.
    pub descriptors: Descriptors,
}

/// A descriptor: the limit of an entry, and the descriptors for the next entry.
#[derive(Clone, Debug)]
pub struct Descriptor {
    /// The key of the entry.
    pub key: String,
    /// The value of the entry.
    pub value: Value,
    /// The limit for a request whose last entry matches.
    pub limit: DescriptorLimit,
    /// The name in responses to Envoy, which `replaces` of other descriptors refers to.
    pub name: Option<String>,
    /// Names of limits that do not apply to a request that matches this descriptor.
    pub replaces: Vec<String>,
    /// The unit of the limit in responses to Envoy, if its period is one of Envoy's units.
    pub unit: Option<Unit>,
    /// The number in responses to Envoy: per `unit`, or per period of the limit if there is no unit.
    pub requests_per_unit: u32,
    /// Whether the limit is evaluated and reported, but never enforced.
    pub is_shadow: bool,
    /// Whether a request is denied only if all quota limits of the request deny it.
    pub is_quota: bool,
    /// Whether all values that match the pattern share one budget.
    pub shares: bool,
    /// Metadata included in every response.
    pub metadata: Option<Metadata>,
    /// The descriptors for the next entry of a request.
    pub descriptors: Descriptors,
}

/// The values of an entry that a descriptor matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Any value that no other descriptor of the key matches. Each value has a separate budget.
    Any,
    /// This value.
    Exact(String),
    /// Values that match a pattern. Each has a separate budget unless the descriptor shares one.
    Pattern(Wildcard),
}

/// The limit of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorLimit {
    /// No limit: allowed, and not reported.
    None,
    /// Unlimited: allowed, and reported.
    Unlimited,
    /// Blocked: always denied.
    Blocked,
    /// A rule, by its index in [`Config::rules`](crate::Config::rules).
    Rule(usize),
}

/// The units of time of Envoy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// One second.
    Second,
    /// One minute.
    Minute,
    /// One hour.
    Hour,
    /// 24 hours.
    Day,
    /// 7 days.
    Week,
    /// 30 days.
    Month,
    /// 365 days.
    Year,
}

const DAY_SECS: u64 = 86_400;

impl Unit {
    /// All units.
    pub const ALL: [Unit; 7] =
        [Unit::Second, Unit::Minute, Unit::Hour, Unit::Day, Unit::Week, Unit::Month, Unit::Year];

    /// The length of the unit.
    pub fn length(self) -> Duration {
        Duration::from_secs(match self {
            Unit::Second => 1,
            Unit::Minute => 60,
            Unit::Hour => 3_600,
            Unit::Day => DAY_SECS,
            Unit::Week => 7 * DAY_SECS,
            Unit::Month => 30 * DAY_SECS,
            Unit::Year => 365 * DAY_SECS,
        })
    }

    /// The unit of exactly this length.
    pub fn of(length: Duration) -> Option<Unit> {
        Unit::ALL.into_iter().find(|unit| unit.length() == length)
    }

    /// The name of the unit in Envoy.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Second => "SECOND",
            Unit::Minute => "MINUTE",
            Unit::Hour => "HOUR",
            Unit::Day => "DAY",
            Unit::Week => "WEEK",
            Unit::Month => "MONTH",
            Unit::Year => "YEAR",
        }
    }

    /// The unit with this name, in any case.
    pub fn named(name: &str) -> Option<Unit> {
        Unit::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(name))
    }
}

/// The unit and number of a limit in responses to Envoy. A bucket is reported by its refill or leak rate.
fn shown_names(limit: &Limit) -> (Option<Unit>, u32) {
    let (count, length) = match limit {
        Limit::FixedWindow(it) => (u64::from(it.limit()), it.window()),
        Limit::Log(it) => (u64::from(it.limit()), it.window()),
        Limit::Counter(it) => (u64::from(it.limit()), it.window()),
        Limit::Bucket(it) => (it.rate().count(), it.rate().period()),
        Limit::SteppedBucket(it) => (it.rate().count(), it.rate().period()),
    };
    match (Unit::of(length), u32::try_from(count)) {
        (Some(unit), Ok(count)) => (Some(unit), count),
        _ => (None, limit.limit()),
    }
}

/// The result of a lookup.
#[derive(Clone, Debug)]
pub struct Found<'d> {
    /// The descriptor of the last entry.
    pub descriptor: &'d Descriptor,
    /// The key of the budget. Requests that differ in domain or entries have different keys, except values that share
    /// a budget.
    pub key: Vec<u8>,
}

impl Domain {
    /// The descriptor that matches all entries, keys and values, or `None`.
    ///
    /// For each entry, an exact value matches first, then patterns in file order, then a key without a value. The
    /// first match is final: other descriptors with the same key are not tried if it has none for the next entry.
    pub fn find(&self, entries: &[(&str, &str)]) -> Option<Found<'_>> {
        if entries.len() > DEPTH_MAX {
            return None;
        }
        let mut matching = &self.descriptors;
        let mut found = None;
        let mut path = [None; DEPTH_MAX];
        for ((key, value), step) in entries.iter().zip(&mut path) {
            let descriptor = matching.find(key, value)?;
            *step = Some(descriptor);
            found = Some(descriptor);
            matching = &descriptor.descriptors;
        }
        let descriptor = found?;
        Some(Found { descriptor, key: key::of(&self.name, entries, path.iter().copied().flatten()) })
    }
}
