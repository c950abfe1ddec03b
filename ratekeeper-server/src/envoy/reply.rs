//! Builds the response to Envoy.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use prost_types::value::Kind;
use prost_types::{Duration as PbDuration, ListValue, NullValue, Struct, Value};
use ratekeeper_config::envoy::{Data, Metadata};

use super::Options;
use super::counts::Outcome;
use super::decide::{Decided, Each};
use super::descriptors::{Wanted, Wants};
use super::messages::{
    Code, DescriptorStatus, HeaderValue, RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
};

/// The response to a request, and its outcome.
pub(super) fn reply(
    request: &RateLimitRequest,
    wanted: &[Wanted<'_>],
    decided: &Decided,
    options: &Options,
) -> (RateLimitResponse, Outcome) {
    let both = || wanted.iter().zip(&decided.each);
    let statuses: Vec<_> = both().map(|(wanted, each)| status(wanted, each)).collect();
    let headers = if options.headers { headers(&statuses) } else { Vec::new() };
    let raw_body = if decided.allowed { Bytes::new() } else { options.denied_body.clone() };
    let is_shadowed = both().any(|(wanted, each)| wanted.is_shadow && each.is_over);
    let (code, outcome) = match (decided.allowed, is_shadowed) {
        (true, false) => (Code::Ok, Outcome::Ok),
        (true, true) => (Code::Ok, Outcome::Shadow),
        (false, _) => (Code::OverLimit, Outcome::OverLimit),
    };
    let response = RateLimitResponse {
        overall_code: code.into(),
        statuses,
        response_headers_to_add: headers,
        raw_body,
        dynamic_metadata: dynamic_metadata(request, both()),
    };
    (response, outcome)
}

fn status(wanted: &Wanted<'_>, each: &Each) -> DescriptorStatus {
    let is_denied = each.is_over && !wanted.is_shadow;
    let remaining = match wanted.limit {
        Wants::Unlimited => u32::MAX,
        _ => each.decision.map_or(0, |decision| decision.remaining),
    };
    DescriptorStatus {
        code: if is_denied { Code::OverLimit } else { Code::Ok }.into(),
        current_limit: wanted.told.clone(),
        limit_remaining: remaining,
        duration_until_reset: each.decision.map(|decision| PbDuration {
            seconds: i64::try_from(whole_secs(decision.reset_after)).unwrap_or(i64::MAX),
            nanos: 0,
        }),
    }
}

/// Rounds up: Envoy truncates to whole seconds, and clients would retry too early.
fn whole_secs(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

/// Headers for the limit that denies, or else for the one with the least remaining.
fn headers(statuses: &[DescriptorStatus]) -> Vec<HeaderValue> {
    let is_over = |status: &DescriptorStatus| status.code == i32::from(Code::OverLimit);
    let limited = statuses.iter().filter(|status| status.current_limit.is_some());
    let Some(nearest) = limited.min_by_key(|status| (!is_over(status), status.limit_remaining)) else {
        return Vec::new();
    };
    let limit = nearest.current_limit.as_ref().map_or(0, |limit| limit.requests_per_unit);
    let reset = nearest.duration_until_reset.as_ref().map_or(0, |reset| reset.seconds);
    let header = |key: &str, value: String| HeaderValue { key: key.to_owned(), value };
    vec![
        header("x-ratelimit-limit", limit.to_string()),
        header("x-ratelimit-remaining", nearest.limit_remaining.to_string()),
        header("x-ratelimit-reset", reset.to_string()),
    ]
}

/// The metadata of the descriptors that are not over their limit, together with the request. None if no descriptor
/// has metadata.
fn dynamic_metadata<'w>(
    request: &RateLimitRequest,
    both: impl Iterator<Item = (&'w Wanted<'w>, &'w Each)>,
) -> Option<Struct> {
    let mut metadata = Struct::default();
    for (wanted, _) in both.filter(|(_, each)| !each.is_over) {
        merge(&mut metadata, wanted.metadata.into_iter().flatten());
    }
    if metadata.fields.is_empty() {
        return None;
    }
    let descriptors = request.descriptors.iter().map(described).collect();
    let mut fields = BTreeMap::from([
        ("domain".to_owned(), of_kind(Kind::StringValue(text(&request.domain)))),
        ("descriptors".to_owned(), list(descriptors)),
        ("metadata".to_owned(), of_kind(Kind::StructValue(metadata))),
    ]);
    if request.hits_addend > 0 {
        let hits = Kind::NumberValue(f64::from(request.hits_addend));
        fields.insert("hitsAddend".to_owned(), of_kind(hits));
    }
    Some(Struct { fields })
}

fn described(descriptor: &RateLimitDescriptor) -> Value {
    let entry = |key, value| of_kind(Kind::StringValue(format!("{}={}", text(key), text(value))));
    let entries = descriptor.entries.iter().map(|it| entry(&it.key, &it.value)).collect();
    let fields = BTreeMap::from([("entries".to_owned(), list(entries))]);
    of_kind(Kind::StructValue(Struct { fields }))
}

/// Metadata is text, but client input may not be UTF-8.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Existing values win; if both values are maps, they are merged by the same rule.
fn merge<'m>(into: &mut Struct, metadata: impl Iterator<Item = &'m (String, Data)>) {
    for (name, data) in metadata {
        match (into.fields.get_mut(name).map(|value| &mut value.kind), data) {
            (None, data) => {
                into.fields.insert(name.clone(), value(data));
            }
            (Some(Some(Kind::StructValue(there))), Data::Map(more)) => merge(there, more.iter()),
            (Some(_), _) => {}
        }
    }
}

fn value(data: &Data) -> Value {
    of_kind(match data {
        Data::Null => Kind::NullValue(NullValue::NullValue.into()),
        Data::Bool(it) => Kind::BoolValue(*it),
        Data::Number(it) => Kind::NumberValue(*it),
        Data::Text(it) => Kind::StringValue(it.clone()),
        Data::List(all) => return list(all.iter().map(value).collect()),
        Data::Map(map) => Kind::StructValue(structure(map)),
    })
}

fn structure(metadata: &Metadata) -> Struct {
    Struct { fields: metadata.iter().map(|(name, data)| (name.clone(), value(data))).collect() }
}

fn list(values: Vec<Value>) -> Value {
    of_kind(Kind::ListValue(ListValue { values }))
}

fn of_kind(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}
