//! The rate limit service as JSON over HTTP, in the JSON mapping of protocol buffers, for callers without gRPC.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::StatusCode;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use ratekeeper::Store;
use ratekeeper::tower::status_code;
use ratekeeper_config::envoy::Unit;
use ratekeeper_rules::response::ResponseStatus;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};

use super::error::EnvoyApiError;
use super::messages::{
    DescriptorStatus, Entry, HeaderValue, RateLimit, RateLimitCode, RateLimitDescriptor, RateLimitOverride,
    RateLimitRequest, RateLimitResponse, RateLimitUnit,
};
use super::{EnvoySnapshot, MESSAGE_BYTES_MAX, decide_and_count};
use crate::runtime::metrics::CallOutcome;

/// Decides a `RateLimitRequest` in JSON: 200 if allowed and 429 if denied, with the `RateLimitResponse`; or an error
/// with the gRPC code.
pub async fn json<S: Store + Send + Sync>(body: &[u8], snapshot: &EnvoySnapshot<S>) -> (StatusCode, String) {
    let request = match read(body) {
        Ok(request) => request,
        Err(error) => {
            snapshot.metrics.count(CallOutcome::Error);
            return error_response(&error);
        }
    };
    match decide_and_count(snapshot, &request).await {
        Ok(response) => {
            let is_over = response.overall_code == i32::from(RateLimitCode::OverLimit);
            let status = if is_over { status_code(ResponseStatus::TooManyRequests) } else { StatusCode::OK };
            (status, text(&ResponseJson::from(response)))
        }
        Err(error) => error_response(&error),
    }
}

fn error_response(error: &EnvoyApiError) -> (StatusCode, String) {
    #[derive(Serialize)]
    struct ErrorJson {
        code: i32,
        message: String,
    }
    (status_code(error.status()), text(&ErrorJson { code: error.grpc_code(), message: error.to_string() }))
}

fn text(value: &impl Serialize) -> String {
    // All keys are text and all numbers are finite, so serialization cannot fail.
    serde_json::to_string(value).unwrap_or_default()
}

fn read(body: &[u8]) -> Result<RateLimitRequest, EnvoyApiError> {
    if body.len() > MESSAGE_BYTES_MAX {
        return Err(EnvoyApiError::BodyTooLong);
    }
    let json: RequestJson = serde_json::from_slice(body).map_err(EnvoyApiError::InvalidJson)?;
    Ok(RateLimitRequest {
        domain: json.domain.unwrap_or_default().into(),
        descriptors: json.descriptors.into_iter().flatten().map(descriptor).collect(),
        hits_addend: match json.hits_addend.map(|hits| u32::try_from(hits.0)) {
            Some(Err(_)) => {
                let why = "`hitsAddend` must be below 2^32";
                return Err(EnvoyApiError::InvalidJson(de::Error::custom(why)));
            }
            Some(Ok(hits)) => hits,
            None => 0,
        },
    })
}

fn descriptor(json: DescriptorJson) -> RateLimitDescriptor {
    let entry = |json: EntryJson| Entry {
        key: json.key.unwrap_or_default().into(),
        value: json.value.unwrap_or_default().into(),
    };
    let limit = |json: OverrideJson| RateLimitOverride {
        // Larger numbers count as the largest limit.
        requests_per_unit: json.requests_per_unit.map_or(0, |it| u32::try_from(it.0).unwrap_or(u32::MAX)),
        unit: json.unit.map_or(0, |unit| unit.0),
    };
    RateLimitDescriptor {
        entries: json.entries.into_iter().flatten().map(entry).collect(),
        limit: json.limit.map(limit),
        hits_addend: json.hits_addend.map(|hits| hits.0),
        is_negative_hits: json.is_negative_hits.unwrap_or(false),
    }
}

/// A request in JSON. Field names may be camelCase or snake_case, and `null` counts as absent.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RequestJson {
    domain: Option<String>,
    descriptors: Option<Vec<DescriptorJson>>,
    #[serde(alias = "hits_addend")]
    hits_addend: Option<IntegerJson>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct DescriptorJson {
    entries: Option<Vec<EntryJson>>,
    limit: Option<OverrideJson>,
    #[serde(alias = "hits_addend")]
    hits_addend: Option<IntegerJson>,
    #[serde(alias = "is_negative_hits")]
    is_negative_hits: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryJson {
    key: Option<String>,
    value: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct OverrideJson {
    #[serde(alias = "requests_per_unit")]
    requests_per_unit: Option<IntegerJson>,
    unit: Option<UnitJson>,
}

/// A whole number, as a JSON number or as text.
struct IntegerJson(u64);

/// A unit, by name or by number.
struct UnitJson(i32);

impl<'de> Deserialize<'de> for IntegerJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<IntegerJson, D::Error> {
        struct IntegerVisitor;
        impl Visitor<'_> for IntegerVisitor {
            type Value = IntegerJson;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number from 0, as a number or a string")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<IntegerJson, E> {
                Ok(IntegerJson(number))
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<IntegerJson, E> {
                // A whole number may be written as `1.0` or `1e3`. Above 2^53, not every whole number has a float.
                const EXACT_MAX: u64 = 1 << 53;
                let whole = number as u64;
                let is_whole = whole <= EXACT_MAX && whole as f64 == number;
                is_whole
                    .then_some(IntegerJson(whole))
                    .ok_or_else(|| E::invalid_value(de::Unexpected::Float(number), &self))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<IntegerJson, E> {
                let number = text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))?;
                Ok(IntegerJson(number))
            }
        }
        deserializer.deserialize_any(IntegerVisitor)
    }
}

impl<'de> Deserialize<'de> for UnitJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<UnitJson, D::Error> {
        struct UnitVisitor;
        impl Visitor<'_> for UnitVisitor {
            type Value = UnitJson;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("SECOND, MINUTE, HOUR, DAY, MONTH or YEAR, or its number")
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<UnitJson, E> {
                Ok(UnitJson(i32::try_from(number).unwrap_or(i32::MAX)))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<UnitJson, E> {
                Ok(UnitJson(i32::try_from(number).unwrap_or(i32::MAX)))
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<UnitJson, E> {
                let is_named = |unit: &Unit| unit.name() == name && *unit != Unit::Week;
                let unit = Unit::ALL.into_iter().find(is_named);
                let unit = unit.ok_or_else(|| E::invalid_value(de::Unexpected::Str(name), &self))?;
                Ok(UnitJson(RateLimitUnit::from(unit).into()))
            }
        }
        deserializer.deserialize_any(UnitVisitor)
    }
}

/// A response in JSON. Empty and zero fields are omitted, as in the protocol buffer mapping.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ResponseJson {
    overall_code: &'static str,
    statuses: Vec<StatusJson>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    response_headers_to_add: Vec<HeaderJson>,
    #[serde(skip_serializing_if = "String::is_empty")]
    raw_body: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    dynamic_metadata: Option<serde_json::Value>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StatusJson {
    code: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    current_limit: Option<LimitJson>,
    #[serde(skip_serializing_if = "is_zero")]
    limit_remaining: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_until_reset: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct LimitJson {
    #[serde(skip_serializing_if = "is_zero")]
    requests_per_unit: u32,
    #[serde(skip_serializing_if = "str::is_empty")]
    unit: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
}

#[derive(Serialize)]
struct HeaderJson {
    key: String,
    value: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's generated code passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl From<RateLimitResponse> for ResponseJson {
    fn from(response: RateLimitResponse) -> ResponseJson {
        let header = |HeaderValue { key, value, .. }| HeaderJson { key, value };
        ResponseJson {
            overall_code: code(response.overall_code),
            statuses: response.statuses.into_iter().map(StatusJson::from).collect(),
            response_headers_to_add: response.response_headers_to_add.into_iter().map(header).collect(),
            raw_body: BASE64_STANDARD.encode(response.raw_body),
            dynamic_metadata: response.dynamic_metadata.map(struct_to_json),
        }
    }
}

impl From<DescriptorStatus> for StatusJson {
    fn from(status: DescriptorStatus) -> StatusJson {
        StatusJson {
            code: code(status.code),
            current_limit: status.current_limit.map(LimitJson::from),
            limit_remaining: status.limit_remaining,
            duration_until_reset: status.duration_until_reset.map(|it| format!("{}s", it.seconds)),
        }
    }
}

impl From<RateLimit> for LimitJson {
    fn from(limit: RateLimit) -> LimitJson {
        let unit = RateLimitUnit::try_from(limit.unit).ok().and_then(RateLimitUnit::unit);
        LimitJson {
            requests_per_unit: limit.requests_per_unit,
            unit: unit.map_or("", Unit::name),
            name: limit.name,
        }
    }
}

fn code(number: i32) -> &'static str {
    RateLimitCode::try_from(number).unwrap_or_default().name()
}

fn struct_to_json(structure: Struct) -> serde_json::Value {
    let fields: BTreeMap<_, _> =
        structure.fields.into_iter().map(|(name, it)| (name, value_to_json(it))).collect();
    fields.into_iter().collect()
}

fn value_to_json(value: Value) -> serde_json::Value {
    match value.kind {
        None | Some(Kind::NullValue(_)) => serde_json::Value::Null,
        Some(Kind::BoolValue(it)) => it.into(),
        Some(Kind::NumberValue(it)) => it.into(),
        Some(Kind::StringValue(it)) => it.into(),
        Some(Kind::StructValue(it)) => struct_to_json(it),
        Some(Kind::ListValue(it)) => it.values.into_iter().map(value_to_json).collect(),
    }
}
