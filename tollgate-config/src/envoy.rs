//! Domains and their descriptors: the limits that Envoy asks about, and which of them a list of entries finds.

use std::time::Duration;

use tollgate_core::Limit;

mod classic;
mod key;
mod level;
mod metadata;
mod migrate;
mod name;
mod read;
mod wildcard;

pub use level::Descriptors;
pub use metadata::{Data, Metadata};
pub use migrate::migrate;
pub(crate) use read::domains;
pub use wildcard::Wildcard;

/// The most descriptors of a file, in all of its domains.
pub const DESCRIPTORS_MAX: usize = 2_000;

/// The most descriptors inside of each other: no more entries of a request are ever looked at.
pub const DEPTH_MAX: usize = 10;

/// What one domain is limited to.
#[derive(Clone, Debug)]
pub struct Domain {
    /// Its name.
    pub name: String,
    /// The first entry of a request is looked for among these.
    pub descriptors: Descriptors,
}

/// What is said of an entry, and of the entries behind it.
#[derive(Clone, Debug)]
pub struct Descriptor {
    /// The entry's key.
    pub key: String,
    /// The entry's value.
    pub value: Value,
    /// How much, for a request that ends with this entry.
    pub limit: DescriptorLimit,
    /// What Envoy is told that the limit is called, and by what others replace it.
    pub name: Option<String>,
    /// The names of limits that do not count for a request that has this one.
    pub replaces: Vec<String>,
    /// In which unit Envoy is told of the limit; none if its time is no unit of theirs.
    pub unit: Option<Unit>,
    /// How many Envoy is told: in a unit, or else in whatever time the limit has.
    pub requests_per_unit: u32,
    /// It counts and reports, but never denies.
    pub is_shadow: bool,
    /// It denies a request only if all such limits of the request do.
    pub is_quota: bool,
    /// All values that fit the pattern have one budget together.
    pub shares: bool,
    /// What is sent along, whatever is decided.
    pub metadata: Option<Metadata>,
    /// The next entry of a request is looked for among these.
    pub descriptors: Descriptors,
}

/// Which values of an entry are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// All that no other descriptor of the key takes. Each has a budget of its own.
    Any,
    /// This one.
    Exact(String),
    /// Those that fit a pattern. Each has a budget of its own unless they share one.
    Pattern(Wildcard),
}

/// How much a descriptor lets pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorLimit {
    /// It says nothing, so everything passes and nothing is told.
    None,
    /// Everything passes, and that is told.
    Unlimited,
    /// Nothing passes.
    Blocked,
    /// As much as a rule does, by its number in [`Config::rules`](crate::Config::rules).
    Rule(usize),
}

/// The units of time that Envoy knows.
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
    /// All of them.
    pub const ALL: [Unit; 7] =
        [Unit::Second, Unit::Minute, Unit::Hour, Unit::Day, Unit::Week, Unit::Month, Unit::Year];

    /// How long it is.
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

    /// The unit that is just so long.
    pub fn of(length: Duration) -> Option<Unit> {
        Unit::ALL.into_iter().find(|unit| unit.length() == length)
    }

    /// Its name, as Envoy writes it.
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

    /// The unit of this name, in capitals or not.
    pub fn named(name: &str) -> Option<Unit> {
        Unit::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(name))
    }
}

/// In which unit Envoy is told of a limit, and how many. A bucket is told by the speed at which it fills.
fn told(limit: &Limit) -> (Option<Unit>, u32) {
    let (count, length) = match limit {
        Limit::FixedWindow(it) => (u64::from(it.limit()), it.window()),
        Limit::Log(it) => (u64::from(it.limit()), it.window()),
        Limit::Counter(it) => (u64::from(it.limit()), it.window()),
        Limit::Bucket(it) => (it.rate().count(), it.rate().period()),
        Limit::Steps(it) => (it.rate().count(), it.rate().period()),
    };
    match (Unit::of(length), u32::try_from(count)) {
        (Some(unit), Ok(count)) => (Some(unit), count),
        _ => (None, limit.limit()),
    }
}

/// What a list of entries has found.
#[derive(Clone, Debug)]
pub struct Found<'d> {
    /// The descriptor of its last entry.
    pub descriptor: &'d Descriptor,
    /// Whose budget is used: no two requests that differ in domain or entries have the same one, but for values that
    /// share.
    pub key: Vec<u8>,
}

impl Domain {
    /// The descriptor for just these entries, keys and values, or none.
    ///
    /// For each entry in turn the value itself is looked for, then the patterns as they stand in the file, then the
    /// key without a value. The first that is there is gone into, and there is no way back: another with the same key
    /// is not tried if this one says nothing of the entries behind it.
    pub fn find(&self, entries: &[(&str, &str)]) -> Option<Found<'_>> {
        if entries.len() > DEPTH_MAX {
            return None;
        }
        let mut level = &self.descriptors;
        let mut found = None;
        let mut path = [None; DEPTH_MAX];
        for ((key, value), step) in entries.iter().zip(&mut path) {
            let descriptor = level.find(key, value)?;
            *step = Some(descriptor);
            found = Some(descriptor);
            level = &descriptor.descriptors;
        }
        let descriptor = found?;
        Some(Found { descriptor, key: key::of(&self.name, entries, path.iter().copied().flatten()) })
    }
}
