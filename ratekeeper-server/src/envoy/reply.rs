//! Builds the response to Envoy.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use prost_types::value::Kind;
use prost_types::{Duration as PbDuration, ListValue, NullValue, Struct, Value};
use ratekeeper_config::EnvoyHeaderNames;
use ratekeeper_config::envoy::{Data, Metadata};

use super::EnvoyApiSettings;
use super::check::{DescriptorDecision, EnvoyVerdict};
use super::descriptors::{ResolvedDescriptor, ResolvedLimit};
use super::messages::{
    DescriptorStatus, HeaderValue, RateLimitCode, RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
};
use crate::runtime::metrics::CallOutcome;

/// The response to a request, and its outcome.
pub(super) fn reply(
    request: &RateLimitRequest,
    descriptors: &[ResolvedDescriptor<'_>],
    verdict: &EnvoyVerdict,
    settings: &EnvoyApiSettings,
) -> (RateLimitResponse, CallOutcome) {
    let pairs = || descriptors.iter().zip(&verdict.decisions);
    let statuses: Vec<_> = pairs().map(|(descriptor, decision)| status(descriptor, decision)).collect();
    let headers = if settings.headers { headers(&statuses, settings.header_names) } else { Vec::new() };
    let raw_body = if verdict.allowed { Bytes::new() } else { settings.denied_body.clone() };
    let is_shadowed = pairs().any(|(descriptor, decision)| descriptor.is_shadow && decision.is_over);
    let (code, outcome) = match (verdict.allowed, is_shadowed) {
        (true, false) => (RateLimitCode::Ok, CallOutcome::Allowed),
        (true, true) => (RateLimitCode::Ok, CallOutcome::WouldDeny),
        (false, _) => (RateLimitCode::OverLimit, CallOutcome::Denied),
    };
    let response = RateLimitResponse {
        overall_code: code.into(),
        statuses,
        response_headers_to_add: headers,
        raw_body,
        dynamic_metadata: dynamic_metadata(request, pairs()),
    };
    (response, outcome)
}

fn status(descriptor: &ResolvedDescriptor<'_>, decision: &DescriptorDecision) -> DescriptorStatus {
    let is_denied = decision.is_over && !descriptor.is_shadow;
    // Without its limit, Envoy tells clients nothing about it.
    let is_unknown = decision.decision.is_some_and(|it| it.known_remaining().is_none());
    if is_unknown && !is_denied {
        return DescriptorStatus { code: RateLimitCode::Ok.into(), ..DescriptorStatus::default() };
    }
    let remaining = match descriptor.limit {
        ResolvedLimit::Unlimited => u32::MAX,
        _ => decision.decision.map_or(0, |it| it.remaining),
    };
    DescriptorStatus {
        code: if is_denied { RateLimitCode::OverLimit } else { RateLimitCode::Ok }.into(),
        current_limit: descriptor.reported_limit.clone(),
        limit_remaining: remaining,
        duration_until_reset: decision.decision.map(|it| PbDuration {
            seconds: i64::try_from(whole_secs(it.reset_after)).unwrap_or(i64::MAX),
            nanos: 0,
        }),
    }
}

/// Rounds up: Envoy truncates to whole seconds, and clients would retry too early.
fn whole_secs(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

/// Headers for the limit that denies, or else for the one with the least remaining.
fn headers(statuses: &[DescriptorStatus], names: EnvoyHeaderNames) -> Vec<HeaderValue> {
    let is_over = |status: &DescriptorStatus| status.code == i32::from(RateLimitCode::OverLimit);
    let limited = statuses.iter().filter(|status| status.current_limit.is_some());
    let Some(nearest) = limited.min_by_key(|status| (!is_over(status), status.limit_remaining)) else {
        return Vec::new();
    };
    let limit = nearest.current_limit.as_ref().map_or(0, |limit| limit.requests_per_unit);
    let reset = nearest.duration_until_reset.as_ref().map_or(0, |reset| reset.seconds);
    let header = |key: &str, value: String| HeaderValue { key: key.to_owned(), value };
    let [limit_name, remaining_name, reset_name] = match names {
        EnvoyHeaderNames::XRateLimit => ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"],
        EnvoyHeaderNames::RateLimit => ["RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"],
    };
    vec![
        header(limit_name, limit.to_string()),
        header(remaining_name, nearest.limit_remaining.to_string()),
        header(reset_name, reset.to_string()),
    ]
}

/// The metadata of the descriptors that are not over their limit, together with the request. None if no descriptor
/// has metadata.
fn dynamic_metadata<'w>(
    request: &RateLimitRequest,
    pairs: impl Iterator<Item = (&'w ResolvedDescriptor<'w>, &'w DescriptorDecision)>,
) -> Option<Struct> {
    let mut metadata = Struct::default();
    for (descriptor, _) in pairs.filter(|(_, decision)| !decision.is_over) {
        merge(&mut metadata, descriptor.metadata.into_iter().flatten());
    }
    if metadata.fields.is_empty() {
        return None;
    }
    let descriptors = request.descriptors.iter().map(descriptor_value).collect();
    let mut fields = BTreeMap::from([
        ("domain".to_owned(), to_value(Kind::StringValue(text(&request.domain)))),
        ("descriptors".to_owned(), list(descriptors)),
        ("metadata".to_owned(), to_value(Kind::StructValue(metadata))),
    ]);
    if request.hits_addend > 0 {
        let hits = Kind::NumberValue(f64::from(request.hits_addend));
        fields.insert("hitsAddend".to_owned(), to_value(hits));
    }
    Some(Struct { fields })
}

fn descriptor_value(descriptor: &RateLimitDescriptor) -> Value {
    let entry = |key, value| to_value(Kind::StringValue(format!("{}={}", text(key), text(value))));
    let entries = descriptor.entries.iter().map(|it| entry(&it.key, &it.value)).collect();
    let fields = BTreeMap::from([("entries".to_owned(), list(entries))]);
    to_value(Kind::StructValue(Struct { fields }))
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
            (Some(Some(Kind::StructValue(existing))), Data::Map(more)) => merge(existing, more.iter()),
            (Some(_), _) => {}
        }
    }
}

fn value(data: &Data) -> Value {
    to_value(match data {
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
    to_value(Kind::ListValue(ListValue { values }))
}

fn to_value(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}
