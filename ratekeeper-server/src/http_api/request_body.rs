//! Request bodies, parsed from JSON. All sizes are bounded, and unknown fields are rejected: a misspelt field must
//! not fall back to its default.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::header::{CONTENT_TYPE, HeaderMap};
use axum::http::request::Parts;
use axum::http::{Request, StatusCode};
use ratekeeper_rules::response::ResponseStatus;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::error::Category;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::error::HttpApiError;
use crate::runtime::http_listener::BODY_TIMEOUT;

/// Longest request body, in bytes.
pub const BODY_BYTES_MAX: usize = 64 << 10;
/// Most checks in one request; all of them are decided atomically.
pub const CHECKS_MAX: usize = 64;
/// Most parts of a key.
pub const KEY_PARTS_MAX: usize = 16;
/// Longest part of a key, in bytes.
pub const KEY_BYTES_MAX: usize = 1024;
/// Shortest and longest lifetime of a reservation.
pub const EXPIRES: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(86_400);
/// Lifetime of a reservation without `expires`.
const EXPIRES_DEFAULT: Duration = Duration::from_secs(60);

/// A key: one value, or one for each part of the limit's key. A limit without a key has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Key<'a>(pub(crate) Vec<Cow<'a, str>>);

struct KeyVisitor;

impl<'de> Visitor<'de> for KeyVisitor {
    type Value = Key<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a string, or a list of up to {KEY_PARTS_MAX} strings, of up to {KEY_BYTES_MAX} bytes each")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Key<'de>, E> {
        bounded(Cow::Borrowed(text)).map(|part| Key(vec![part]))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Key<'de>, E> {
        bounded(Cow::Owned(text.to_owned())).map(|part| Key(vec![part]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Key<'de>, A::Error> {
        let mut key = Vec::new();
        while let Some(KeyPart(part)) = parts.next_element()? {
            if key.len() == KEY_PARTS_MAX {
                return Err(de::Error::custom(format_args!("a key has at most {KEY_PARTS_MAX} parts")));
            }
            key.push(bounded(part)?);
        }
        Ok(Key(key))
    }
}

/// Borrowed from the body where possible.
#[derive(Deserialize)]
struct KeyPart<'a>(#[serde(borrow)] Cow<'a, str>);

fn bounded<E: de::Error>(part: Cow<'_, str>) -> Result<Cow<'_, str>, E> {
    match part.len() <= KEY_BYTES_MAX {
        true => Ok(part),
        false => Err(E::custom(format_args!("a part of a key has at most {KEY_BYTES_MAX} bytes"))),
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Key<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Key<'a>, D::Error> {
        deserializer.deserialize_any(KeyVisitor)
    }
}

/// A check of one limit.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
pub(crate) struct LimitCheck<'a> {
    #[serde(borrow)]
    pub(crate) limit: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(crate) key: Key<'a>,
    #[serde(default = "default_cost", deserialize_with = "whole")]
    pub(crate) cost: u32,
}

fn default_cost() -> u32 {
    1
}

/// A whole number as JSON Schema defines it: `9035.0` is one.
fn whole<'de, D: Deserializer<'de>, T: TryFrom<u64>>(deserializer: D) -> Result<T, D::Error> {
    // As text: a double would round `1e-400` to 0.
    let text = <&RawValue>::deserialize(deserializer)?.get();
    let number = whole_number(text).ok_or_else(|| {
        de::Error::custom(format_args!("`{text}` is not a whole number from 0 to {}", u64::MAX))
    })?;
    T::try_from(number).map_err(|_| de::Error::custom(format_args!("{number} is too large")))
}

/// The value of a JSON number without a fraction, such as `12`, `1.2e1` or `12.0`.
fn whole_number(text: &str) -> Option<u64> {
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (before, after) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let (before, is_negative) = before.strip_prefix('-').map_or((before, false), |before| (before, true));
    let (digits, count) = (before.bytes().chain(after.bytes()), before.len() + after.len());
    if count == 0 || !digits.clone().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // The digits up to the last one that is not 0 are a whole number, times a power of ten.
    let zeros = digits.clone().rev().take_while(|digit| *digit == b'0').count();
    if zeros == count {
        return Some(0);
    }
    let mut number = 0_u64;
    for digit in digits.take(count - zeros) {
        number = number.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
    }
    if is_negative {
        return None;
    }
    let shift = i64::try_from(zeros).ok()? - i64::try_from(after.len()).ok()?;
    let power = exponent.parse::<i64>().ok()?.checked_add(shift)?;
    number.checked_mul(10_u64.checked_pow(u32::try_from(power).ok()?)?)
}

/// The same for a field that may be missing or `null`.
fn some_whole<'de, D: Deserializer<'de>, T: TryFrom<u64>>(deserializer: D) -> Result<Option<T>, D::Error> {
    struct Whole<T>(T);

    impl<'de, T: TryFrom<u64>> Deserialize<'de> for Whole<T> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Whole<T>, D::Error> {
            whole(deserializer).map(Whole)
        }
    }
    Ok(Option::deserialize(deserializer)?.map(|Whole(number)| number))
}

/// The status of a denial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DenyStatus(pub(crate) StatusCode);

impl DenyStatus {
    /// The status `number`, if it is one of the `allowed` ones.
    pub(crate) fn of(number: u16, allowed: &[u16]) -> Option<DenyStatus> {
        allowed.contains(&number).then(|| StatusCode::from_u16(number).ok().map(DenyStatus)).flatten()
    }

    /// Reads `deny_status` from the query, if it is present.
    pub(crate) fn in_query(query: Option<&str>, allowed: &[u16]) -> Result<Option<DenyStatus>, HttpApiError> {
        let mut values =
            query.unwrap_or_default().split('&').filter_map(|it| it.strip_prefix("deny_status="));
        let Some(first) = values.next() else { return Ok(None) };
        let status = first.parse().ok().and_then(|number| DenyStatus::of(number, allowed));
        match status.filter(|_| values.next().is_none()) {
            Some(status) => Ok(Some(status)),
            None => {
                let allowed: Vec<String> = allowed.iter().map(u16::to_string).collect();
                let allowed = allowed.join(", ");
                Err(HttpApiError::new(
                    ResponseStatus::BadRequest,
                    format!("`deny_status` must be one of {allowed}, sent once"),
                ))
            }
        }
    }
}

/// A body of `/v1/check` or `/v1/peek`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckRequest<'a> {
    pub(crate) checks: Vec<LimitCheck<'a>>,
    pub(crate) deny_status: Option<u16>,
}

/// The body is either a single check or a list under `checks`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct CheckRequestJson<'a> {
    #[serde(borrow)]
    limit: Option<Cow<'a, str>>,
    #[serde(borrow)]
    key: Option<Key<'a>>,
    #[serde(default, deserialize_with = "some_whole")]
    cost: Option<u32>,
    #[serde(borrow, alias = "descriptors")]
    checks: Option<Vec<LimitCheck<'a>>>,
    #[serde(default, deserialize_with = "some_whole")]
    deny_status: Option<u16>,
}

/// The values of `deny_status` that `/v1/check` accepts.
pub(crate) const CHECK_DENY_STATUSES: [u16; 3] = [200, 403, 429];

impl<'a> CheckRequest<'a> {
    pub(crate) fn read(body: &'a [u8]) -> Result<CheckRequest<'a>, HttpApiError> {
        let CheckRequestJson { limit, key, cost, checks, deny_status } = read(body)?;
        let invalid = |reason: String| Err(HttpApiError::new(ResponseStatus::UnprocessableEntity, reason));
        if deny_status.is_some_and(|status| !CHECK_DENY_STATUSES.contains(&status)) {
            return invalid("`deny_status` must be one of 200, 403, 429".to_owned());
        }
        let checks = match (limit, checks) {
            (Some(limit), None) => {
                vec![LimitCheck { limit, key: key.unwrap_or_default(), cost: cost.unwrap_or(1) }]
            }
            (None, Some(checks)) if key.is_none() && cost.is_none() => checks,
            (None, None) => return invalid("send `limit`, or a list of checks in `checks`".to_owned()),
            (Some(_), Some(_)) => return invalid("send either `limit` or `checks`".to_owned()),
            (None, Some(_)) => {
                return invalid("send `key` and `cost` in each element of `checks`".to_owned());
            }
        };
        match checks.len() {
            1..=CHECKS_MAX => Ok(CheckRequest { checks, deny_status }),
            0 => invalid("`checks` is empty; send at least one".to_owned()),
            count => {
                invalid(format!("{count} checks are too many for one request; send at most {CHECKS_MAX}"))
            }
        }
    }
}

/// A body of `/v1/reserve`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct ReserveRequestJson<'a> {
    #[serde(borrow)]
    limit: Cow<'a, str>,
    #[serde(borrow, default)]
    key: Key<'a>,
    #[serde(default = "default_cost", deserialize_with = "whole")]
    cost: u32,
    #[serde(borrow)]
    expires: Option<Cow<'a, str>>,
}

/// A check to charge now and settle later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReserveRequest<'a> {
    pub(crate) check: LimitCheck<'a>,
    pub(crate) expires: Duration,
}

impl<'a> ReserveRequest<'a> {
    pub(crate) fn read(body: &'a [u8]) -> Result<ReserveRequest<'a>, HttpApiError> {
        let ReserveRequestJson { limit, key, cost, expires } = read(body)?;
        let invalid = |reason: String| {
            HttpApiError::new(ResponseStatus::UnprocessableEntity, format!("`expires`: {reason}"))
        };
        let expires = match expires {
            Some(text) => ratekeeper_config::parse_duration(&text).map_err(invalid)?,
            None => EXPIRES_DEFAULT,
        };
        if !EXPIRES.contains(&expires) {
            return Err(invalid("must be a duration from 1s to 1d".to_owned()));
        }
        Ok(ReserveRequest { check: LimitCheck { limit, key, cost }, expires })
    }
}

/// A body of `/v1/settle`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
pub(crate) struct SettleRequest<'a> {
    #[serde(borrow)]
    pub(crate) reservation: Cow<'a, str>,
    #[serde(deserialize_with = "whole")]
    pub(crate) cost: u32,
}

/// A reservation as stored: text that any process can read.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub(crate) struct Reservation {
    pub(crate) limit: String,
    pub(crate) key: Vec<String>,
    /// The cost that the caller requested.
    pub(crate) cost: u32,
    /// The units charged to the limit: `cost`, or 0 if the limit does not apply to the key, if it is a shadow limit
    /// that would have denied, or if the store was unavailable.
    pub(crate) charged: u32,
    /// When it was charged, by the store's clock.
    pub(crate) charged_at_ns: u64,
    pub(crate) expires_at_ns: u64,
}

/// Parses a body: malformed JSON is a 400, well-formed JSON with invalid fields a 422.
pub(crate) fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, HttpApiError> {
    let parsed = serde_json::from_slice(body);
    let is_object = body.trim_ascii_start().starts_with(b"{");
    match parsed {
        Ok(parsed) if is_object => Ok(parsed),
        Err(error) if error.classify() != Category::Data => {
            Err(HttpApiError::new(ResponseStatus::BadRequest, format!("the body is not JSON: {error}")))
        }
        Err(error) if is_object => {
            Err(HttpApiError::new(ResponseStatus::UnprocessableEntity, reason(&error)))
        }
        _ => Err(HttpApiError::new(ResponseStatus::UnprocessableEntity, "the body must be a JSON object")),
    }
}

/// The reason for the response, from an error of serde: the field or the types, and the position.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let (text, position) = text.rsplit_once(" at line ").unwrap_or((&text, ""));
    let reason = if let Some(field) = text.strip_prefix("missing field ") {
        format!("field {field} is missing")
    } else if let Some((found, expected)) =
        text.strip_prefix("invalid type: ").and_then(|rest| rest.split_once(", expected "))
    {
        format!("found {found}, expected {expected}")
    } else {
        text.to_owned()
    };
    match position.split_once(" column ") {
        Some((line, column)) => format!("{reason} (line {line}, column {column})"),
        None => reason,
    }
}

/// Reads the body of a request whose content type is JSON.
pub(crate) async fn body(request: Request<Body>) -> Result<(Parts, Bytes), HttpApiError> {
    let (parts, body) = request.into_parts();
    if !is_json(&parts.headers) {
        let reason = "the body must be JSON; send `Content-Type: application/json`";
        return Err(HttpApiError::new(ResponseStatus::UnsupportedMediaType, reason));
    }
    let too_long = || {
        let reason = format!("the body has more than {BODY_BYTES_MAX} bytes");
        HttpApiError::new(ResponseStatus::PayloadTooLarge, reason)
    };
    let declared = http_body::Body::size_hint(&body).lower();
    if declared > BODY_BYTES_MAX as u64 {
        return Err(too_long());
    }
    match timeout(BODY_TIMEOUT, to_bytes(body, BODY_BYTES_MAX)).await {
        Ok(Ok(bytes)) => Ok((parts, bytes)),
        Ok(Err(error)) if is_length_error(&error) => Err(too_long()),
        Ok(Err(_)) => Err(HttpApiError::new(ResponseStatus::BadRequest, "the body is incomplete")),
        Err(_) => Err(HttpApiError::new(
            ResponseStatus::RequestTimeout,
            format!("the body did not arrive within {} seconds", BODY_TIMEOUT.as_secs()),
        )),
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

fn is_length_error(error: &axum::Error) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.is::<http_body_util::LengthLimitError>())
}

#[cfg(test)]
mod tests {
    use super::whole_number;

    #[test]
    fn whole_numbers_are_exact() {
        for (text, number) in [
            ("0", Some(0)),
            ("-0", Some(0)),
            ("0.0e9", Some(0)),
            ("0e99999999999999999999", Some(0)),
            ("12.0", Some(12)),
            ("1.2e1", Some(12)),
            ("1200e-2", Some(12)),
            ("1.20E+1", Some(12)),
            ("18446744073709551615.0", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("1e-400", None),
            ("1e400", None),
            ("1.00000000000000000001", None),
            ("1.5", None),
            ("-1", None),
            ("-1e3", None),
            ("1e", None),
            ("null", None),
            ("\"1\"", None),
            ("[1]", None),
        ] {
            assert_eq!(whole_number(text), number, "{text}");
        }
    }
}
