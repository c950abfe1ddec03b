//! Request bodies, parsed from JSON. All sizes are bounded, and unknown fields are rejected: a misspelt field must
//! not fall back to its default.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::header::{CONTENT_TYPE, HeaderMap};
use axum::http::request::Parts;
use axum::http::{Request, StatusCode};
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::error::Category;
use tokio::time::timeout;

use super::refusal::Refusal;

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
const EXPIRES_USUAL: Duration = Duration::from_secs(60);
/// How long a body may take to arrive.
pub(crate) const BODY_TIMEOUT: Duration = Duration::from_secs(10);

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
        while let Some(Part(part)) = parts.next_element()? {
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
struct Part<'a>(#[serde(borrow)] Cow<'a, str>);

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
#[serde(deny_unknown_fields)]
pub(crate) struct Ask<'a> {
    #[serde(borrow)]
    pub(crate) limit: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(crate) key: Key<'a>,
    #[serde(default = "one")]
    pub(crate) cost: u32,
}

fn one() -> u32 {
    1
}

/// The status of a denial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DenyStatus(pub(crate) StatusCode);

impl DenyStatus {
    /// The status `number`, if it is one of the `known` ones.
    pub(crate) fn of(number: u16, known: &[u16]) -> Option<DenyStatus> {
        known.contains(&number).then(|| StatusCode::from_u16(number).ok().map(DenyStatus)).flatten()
    }

    /// Reads `deny_status` from the query, if it is present.
    pub(crate) fn in_query(query: Option<&str>, known: &[u16]) -> Result<Option<DenyStatus>, Refusal> {
        let mut said = query.unwrap_or_default().split('&').filter_map(|it| it.strip_prefix("deny_status="));
        let Some(first) = said.next() else { return Ok(None) };
        let status = first.parse().ok().and_then(|number| DenyStatus::of(number, known));
        match status.filter(|_| said.next().is_none()) {
            Some(status) => Ok(Some(status)),
            None => {
                let known: Vec<String> = known.iter().map(u16::to_string).collect();
                let known = known.join(", ");
                Err(Refusal::new(StatusCode::BAD_REQUEST, format!("`deny_status` is one of {known}, once")))
            }
        }
    }
}

/// A body of `/v1/check` or `/v1/peek`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Checks<'a> {
    pub(crate) asks: Vec<Ask<'a>>,
    pub(crate) deny_status: Option<u16>,
}

/// The body is either a single check or a list under `checks`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenChecks<'a> {
    #[serde(borrow)]
    limit: Option<Cow<'a, str>>,
    #[serde(borrow)]
    key: Option<Key<'a>>,
    cost: Option<u32>,
    #[serde(borrow, alias = "descriptors")]
    checks: Option<Vec<Ask<'a>>>,
    deny_status: Option<u16>,
}

/// The values of `deny_status` that `/v1/check` accepts.
pub(crate) const CHECK_DENY_STATUSES: [u16; 3] = [200, 403, 429];

impl<'a> Checks<'a> {
    pub(crate) fn read(body: &'a [u8]) -> Result<Checks<'a>, Refusal> {
        let WrittenChecks { limit, key, cost, checks, deny_status } = read(body)?;
        let wrong = |why: String| Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, why));
        if deny_status.is_some_and(|status| !CHECK_DENY_STATUSES.contains(&status)) {
            return wrong("`deny_status` is one of 200, 403, 429".to_owned());
        }
        let asks = match (limit, checks) {
            (Some(limit), None) => vec![Ask { limit, key: key.unwrap_or_default(), cost: cost.unwrap_or(1) }],
            (None, Some(checks)) if key.is_none() && cost.is_none() => checks,
            (None, None) => return wrong("say which `limit`, or list some under `checks`".to_owned()),
            (Some(_), Some(_)) => return wrong("send either `limit` or `checks`".to_owned()),
            (None, Some(_)) => return wrong("`key` and `cost` belong into each of the `checks`".to_owned()),
        };
        match asks.len() {
            1..=CHECKS_MAX => Ok(Checks { asks, deny_status }),
            0 => wrong("`checks` is empty; list at least one".to_owned()),
            many => wrong(format!("{many} checks are too many at once; send at most {CHECKS_MAX}")),
        }
    }
}

/// A body of `/v1/reserve`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct WrittenReserve<'a> {
    #[serde(borrow)]
    limit: Cow<'a, str>,
    #[serde(borrow, default)]
    key: Key<'a>,
    #[serde(default = "one")]
    cost: u32,
    #[serde(borrow)]
    expires: Option<Cow<'a, str>>,
}

/// A check to charge now and settle later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reserve<'a> {
    pub(crate) ask: Ask<'a>,
    pub(crate) expires: Duration,
}

impl<'a> Reserve<'a> {
    pub(crate) fn read(body: &'a [u8]) -> Result<Reserve<'a>, Refusal> {
        let WrittenReserve { limit, key, cost, expires } = read(body)?;
        let wrong = |why: String| Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, format!("`expires`: {why}"));
        let expires = match expires {
            Some(typed) => ratekeeper_config::parse_duration(&typed).map_err(wrong)?,
            None => EXPIRES_USUAL,
        };
        if !EXPIRES.contains(&expires) {
            return Err(wrong("write a time from 1s to 1d".to_owned()));
        }
        Ok(Reserve { ask: Ask { limit, key, cost }, expires })
    }
}

/// A body of `/v1/settle`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settle<'a> {
    #[serde(borrow)]
    pub(crate) reservation: Cow<'a, str>,
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
    pub(crate) taken: u32,
    /// When it was charged, by the store's clock.
    pub(crate) at_ns: u64,
    pub(crate) expires_at_ns: u64,
}

/// Parses a body: malformed JSON is a 400, well-formed JSON with wrong fields a 422.
pub(crate) fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body).map_err(|error| match error.classify() {
        Category::Data => Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, format!("the body: {error}")),
        _ => Refusal::new(StatusCode::BAD_REQUEST, format!("the body is not JSON: {error}")),
    })
}

/// Reads the body of a request whose content type is JSON.
pub(crate) async fn body(request: Request<Body>) -> Result<(Parts, Bytes), Refusal> {
    let (parts, body) = request.into_parts();
    if !is_json(&parts.headers) {
        let why = "send JSON, and say so: `Content-Type: application/json`";
        return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
    }
    let too_long = || {
        let why = format!("the body has more than {BODY_BYTES_MAX} bytes");
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, why)
    };
    let said = http_body::Body::size_hint(&body).lower();
    if said > BODY_BYTES_MAX as u64 {
        return Err(too_long());
    }
    match timeout(BODY_TIMEOUT, to_bytes(body, BODY_BYTES_MAX)).await {
        Ok(Ok(bytes)) => Ok((parts, bytes)),
        Ok(Err(error)) if is_about_length(&error) => Err(too_long()),
        Ok(Err(_)) => Err(Refusal::new(StatusCode::BAD_REQUEST, "the body ended too early")),
        Err(_) => Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, "the body took too long")),
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

fn is_about_length(error: &axum::Error) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.is::<http_body_util::LengthLimitError>())
}
