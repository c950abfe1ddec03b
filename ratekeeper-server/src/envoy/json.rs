//! The rate limit service as JSON over HTTP, in the JSON mapping of protocol buffers, for callers without gRPC.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::StatusCode;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use ratekeeper::Store;
use ratekeeper_config::envoy::Unit;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};

use super::counts::Outcome;
use super::messages::{
    Code, DescriptorStatus, Entry, HeaderValue, RateLimit, RateLimitDescriptor, RateLimitOverride,
    RateLimitRequest, RateLimitResponse, RateLimitUnit,
};
use super::refused::Refused;
use super::{MESSAGE_BYTES_MAX, Snapshot, answer};

/// Decides a `RateLimitRequest` in JSON: 200 if allowed and 429 if denied, with the `RateLimitResponse`; or an error
/// with the gRPC code.
pub async fn json<S: Store + Send + Sync>(body: &[u8], snapshot: &Snapshot<S>) -> (StatusCode, String) {
    let request = match read(body) {
        Ok(request) => request,
        Err(refused) => {
            snapshot.counts.count(Outcome::Error);
            return refusal(&refused);
        }
    };
    match answer(snapshot, &request).await {
        Ok(response) => {
            let is_over = response.overall_code == i32::from(Code::OverLimit);
            let status = if is_over { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
            (status, text(&Told::from(response)))
        }
        Err(refused) => refusal(&refused),
    }
}

fn refusal(refused: &Refused) -> (StatusCode, String) {
    #[derive(Serialize)]
    struct Error {
        code: i32,
        message: String,
    }
    (refused.status(), text(&Error { code: refused.number(), message: refused.to_string() }))
}

fn text(value: &impl Serialize) -> String {
    // All keys are text and all numbers are finite, so serialisation cannot fail.
    serde_json::to_string(value).unwrap_or_default()
}

fn read(body: &[u8]) -> Result<RateLimitRequest, Refused> {
    if body.len() > MESSAGE_BYTES_MAX {
        return Err(Refused::LongBody);
    }
    let typed: Typed = serde_json::from_slice(body).map_err(|why| Refused::NotJson(why.to_string()))?;
    Ok(RateLimitRequest {
        domain: typed.domain.unwrap_or_default().into(),
        descriptors: typed.descriptors.into_iter().flatten().map(descriptor).collect(),
        hits_addend: match typed.hits_addend.map(|hits| u32::try_from(hits.0)) {
            Some(Err(_)) => return Err(Refused::NotJson("`hitsAddend` must be below 2^32".to_owned())),
            Some(Ok(hits)) => hits,
            None => 0,
        },
    })
}

fn descriptor(typed: TypedDescriptor) -> RateLimitDescriptor {
    let entry = |typed: TypedEntry| Entry {
        key: typed.key.unwrap_or_default().into(),
        value: typed.value.unwrap_or_default().into(),
    };
    let limit = |typed: TypedLimit| RateLimitOverride {
        // Larger numbers count as the largest limit.
        requests_per_unit: typed.requests_per_unit.map_or(0, |it| u32::try_from(it.0).unwrap_or(u32::MAX)),
        unit: typed.unit.map_or(0, |unit| unit.0),
    };
    RateLimitDescriptor {
        entries: typed.entries.into_iter().flatten().map(entry).collect(),
        limit: typed.limit.map(limit),
        hits_addend: typed.hits_addend.map(|hits| hits.0),
        is_negative_hits: typed.is_negative_hits.unwrap_or(false),
    }
}

/// A request in JSON. Field names may be camelCase or snake_case, and `null` counts as absent.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Typed {
    domain: Option<String>,
    descriptors: Option<Vec<TypedDescriptor>>,
    #[serde(alias = "hits_addend")]
    hits_addend: Option<Number>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct TypedDescriptor {
    entries: Option<Vec<TypedEntry>>,
    limit: Option<TypedLimit>,
    #[serde(alias = "hits_addend")]
    hits_addend: Option<Number>,
    #[serde(alias = "is_negative_hits")]
    is_negative_hits: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TypedEntry {
    key: Option<String>,
    value: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct TypedLimit {
    #[serde(alias = "requests_per_unit")]
    requests_per_unit: Option<Number>,
    unit: Option<TypedUnit>,
}

/// A whole number, as a JSON number or as text.
struct Number(u64);

/// A unit, by name or by number.
struct TypedUnit(i32);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        struct Whole;
        impl Visitor<'_> for Whole {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number from 0, as a number or a text")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Number, E> {
                Ok(Number(number))
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Number, E> {
                // A whole number may be written as `1.0` or `1e3`. Above 2^53, not every whole number has a float.
                const EXACT_MAX: u64 = 1 << 53;
                let whole = number as u64;
                let is_whole = whole <= EXACT_MAX && whole as f64 == number;
                is_whole
                    .then_some(Number(whole))
                    .ok_or_else(|| E::invalid_value(de::Unexpected::Float(number), &self))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Number, E> {
                let number = text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))?;
                Ok(Number(number))
            }
        }
        deserializer.deserialize_any(Whole)
    }
}

impl<'de> Deserialize<'de> for TypedUnit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TypedUnit, D::Error> {
        struct UnitVisitor;
        impl Visitor<'_> for UnitVisitor {
            type Value = TypedUnit;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("SECOND, MINUTE, HOUR, DAY, MONTH or YEAR, or its number")
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<TypedUnit, E> {
                Ok(TypedUnit(i32::try_from(number).unwrap_or(i32::MAX)))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<TypedUnit, E> {
                Ok(TypedUnit(i32::try_from(number).unwrap_or(i32::MAX)))
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<TypedUnit, E> {
                let is_named = |unit: &Unit| unit.name() == name && *unit != Unit::Week;
                let unit = Unit::ALL.into_iter().find(is_named);
                let unit = unit.ok_or_else(|| E::invalid_value(de::Unexpected::Str(name), &self))?;
                Ok(TypedUnit(RateLimitUnit::from(unit).into()))
            }
        }
        deserializer.deserialize_any(UnitVisitor)
    }
}

/// A response in JSON. Empty and zero fields are omitted, as in the protocol buffer mapping.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Told {
    overall_code: &'static str,
    statuses: Vec<ToldStatus>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    response_headers_to_add: Vec<ToldHeader>,
    #[serde(skip_serializing_if = "String::is_empty")]
    raw_body: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    dynamic_metadata: Option<serde_json::Value>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ToldStatus {
    code: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    current_limit: Option<ToldLimit>,
    #[serde(skip_serializing_if = "is_nothing")]
    limit_remaining: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_until_reset: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ToldLimit {
    #[serde(skip_serializing_if = "is_nothing")]
    requests_per_unit: u32,
    #[serde(skip_serializing_if = "str::is_empty")]
    unit: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
}

#[derive(Serialize)]
struct ToldHeader {
    key: String,
    value: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "it is called by what serde writes")]
fn is_nothing(number: &u32) -> bool {
    *number == 0
}

impl From<RateLimitResponse> for Told {
    fn from(response: RateLimitResponse) -> Told {
        let header = |HeaderValue { key, value, .. }| ToldHeader { key, value };
        Told {
            overall_code: code(response.overall_code),
            statuses: response.statuses.into_iter().map(ToldStatus::from).collect(),
            response_headers_to_add: response.response_headers_to_add.into_iter().map(header).collect(),
            raw_body: BASE64_STANDARD.encode(response.raw_body),
            dynamic_metadata: response.dynamic_metadata.map(of_struct),
        }
    }
}

impl From<DescriptorStatus> for ToldStatus {
    fn from(status: DescriptorStatus) -> ToldStatus {
        ToldStatus {
            code: code(status.code),
            current_limit: status.current_limit.map(ToldLimit::from),
            limit_remaining: status.limit_remaining,
            duration_until_reset: status.duration_until_reset.map(|it| format!("{}s", it.seconds)),
        }
    }
}

impl From<RateLimit> for ToldLimit {
    fn from(limit: RateLimit) -> ToldLimit {
        let unit = RateLimitUnit::try_from(limit.unit).ok().and_then(RateLimitUnit::unit);
        ToldLimit {
            requests_per_unit: limit.requests_per_unit,
            unit: unit.map_or("", Unit::name),
            name: limit.name,
        }
    }
}

fn code(number: i32) -> &'static str {
    Code::try_from(number).unwrap_or_default().name()
}

fn of_struct(structure: Struct) -> serde_json::Value {
    let fields: BTreeMap<_, _> =
        structure.fields.into_iter().map(|(name, it)| (name, of_value(it))).collect();
    fields.into_iter().collect()
}

fn of_value(value: Value) -> serde_json::Value {
    match value.kind {
        None | Some(Kind::NullValue(_)) => serde_json::Value::Null,
        Some(Kind::BoolValue(it)) => it.into(),
        Some(Kind::NumberValue(it)) => it.into(),
        Some(Kind::StringValue(it)) => it.into(),
        Some(Kind::StructValue(it)) => of_struct(it),
        Some(Kind::ListValue(it)) => it.values.into_iter().map(of_value).collect(),
    }
}
