//! The YAML as it was typed: names are checked by serde, values are still text that knows its place.

use serde::Deserialize;
use serde_saphyr::Spanned;

/// A value as it was typed. Numbers stay text too, so that `1e3`, `010` or `.nan` can be shown as they stand.
pub(crate) type Text = Spanned<String>;

/// A limit is a mapping with one key, the algorithm.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Limit {
    TokenBucket(TokenBucket),
    LeakyBucket(LeakyBucket),
    FixedWindow(FixedWindow),
    SlidingWindowLog(SlidingWindowLog),
    SlidingWindowCounter(SlidingWindowCounter),
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TokenBucket {
    pub(crate) capacity: Option<Text>,
    pub(crate) refill: Option<Text>,
    pub(crate) style: Option<Text>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LeakyBucket {
    pub(crate) capacity: Option<Text>,
    pub(crate) leak: Option<Text>,
    pub(crate) mode: Option<Text>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct FixedWindow {
    pub(crate) limit: Option<Text>,
    pub(crate) window: Option<Text>,
    pub(crate) align: Option<Text>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SlidingWindowLog {
    pub(crate) limit: Option<Text>,
    pub(crate) window: Option<Text>,
    pub(crate) count: Option<Text>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SlidingWindowCounter {
    pub(crate) limit: Option<Text>,
    pub(crate) window: Option<Text>,
    pub(crate) buckets: Option<Text>,
    pub(crate) edge: Option<Text>,
}
