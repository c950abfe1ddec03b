//! Tokens (JWT, RFC 7519) that are verified here, so that their claims can be believed.
//!
//! A request's token is looked at in this order, and whatever is wrong with it, the request has no claims:
//!
//! 1. There is one, in one line of one header, of no more than [`TOKEN_BYTES_MAX`] bytes.
//! 2. It names an algorithm that its key is for. A key has its algorithms from the key set, and a token only chooses
//!    among those: a public key is never the secret of an `HS256`, and `none` is no algorithm at all.
//! 3. Its signature is the key's.
//! 4. It is not expired and already valid, and is from whom and for whom it must be. A claim that is there but is not
//!    what it must be (a text as a time) is wrong, and not as good as absent.
//!
//! The signatures are [ring](https://docs.rs/ring)'s; what surrounds them is small enough to be read here in whole.

mod keys;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::HeaderName;
use http::header::AUTHORIZATION;
use http::request::Parts;
use serde_json::{Map, Value};

use self::keys::{Algorithm, VerifyingKey};
use super::Claims;
use crate::clock::{Clock, SystemClock};

/// A longer token is not looked at. Most are shorter than 2 kB, and few servers take headers of more than 16.
pub const TOKEN_BYTES_MAX: usize = 16 * 1024;

/// By how much the clock of whoever signs may differ from ours, unless something else is said.
pub const LEEWAY: Duration = Duration::from_secs(60);

/// Verifies the tokens of requests with a set of keys: [`Builder::tokens`](super::Builder::tokens).
///
/// ```
/// use std::time::Duration;
/// use tollgate::tower::RateLimitLayer;
/// use tollgate::tower::key::{Key, Otherwise, Part};
/// use tollgate::tower::rule::Rule;
/// use tollgate::tower::token::Tokens;
/// use tollgate::{Align, Limit};
///
/// let keys = r#"{ "keys": [{ "kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "use": "sig",
///     "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo" }] }"#;
/// let tokens = Tokens::new(keys)?
///     .issuer("https://login.example.com")
///     .audience(["api"])
///     .algorithms(["EdDSA"])?
///     .leeway(Duration::from_secs(10));
/// // Each user by the name that a token claims; who has none is not let in.
/// let user = Key::of(Part::Claim("sub".to_owned())).otherwise(Otherwise::Deny);
/// let limit = Limit::fixed_window(100, Duration::from_secs(60), Align::Clock)?;
/// let layer = RateLimitLayer::builder().rule(Rule::new("per-user", limit).key(user)).tokens(tokens).build()?;
/// # let _ = layer;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Tokens {
    keys: Vec<VerifyingKey>,
    issuer: Option<String>,
    audience: Vec<String>,
    header: HeaderName,
    leeway: Duration,
    clock: Arc<dyn Clock + Send + Sync>,
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tokens { keys, issuer, audience, header, .. } = self;
        let mut shown = f.debug_struct("Tokens");
        shown.field("keys", &keys.len()).field("issuer", issuer).field("audience", audience);
        shown.field("header", header).finish_non_exhaustive()
    }
}

impl Tokens {
    /// Tokens that are signed by a key of this set: a JSON Web Key Set (RFC 7517). `Authorization: Bearer` has them.
    ///
    /// Keys that are not for signatures, or of a kind that is not known here, are left out. Known are RSA from 2048 bits
    /// on, the curves P-256, P-384 and Ed25519, and secrets that are as long as what is hashed with them.
    ///
    /// # Errors
    /// If it is no key set, one of the keys is broken or too weak, or none is left.
    pub fn new(jwks_json: &str) -> Result<Tokens, TokensError> {
        Ok(Tokens {
            keys: keys::read(jwks_json)?,
            issuer: None,
            audience: Vec::new(),
            header: AUTHORIZATION,
            leeway: LEEWAY,
            clock: Arc::new(SystemClock::new()),
        })
    }

    /// Only those that are issued by this one. Unless this is said, it does not matter.
    #[must_use]
    pub fn issuer(mut self, issuer: &str) -> Tokens {
        self.issuer = Some(issuer.to_owned());
        self
    }

    /// Only those that are for one of these. Unless this is said, it does not matter.
    #[must_use]
    pub fn audience<T: Into<String>>(mut self, audience: impl IntoIterator<Item = T>) -> Tokens {
        self.audience = audience.into_iter().map(Into::into).collect();
        self
    }

    /// Only those that are signed by one of these algorithms: `RS256`, `ES256`, `EdDSA`. Unless this is said, it is all
    /// that the keys are for.
    ///
    /// # Errors
    /// If one of the names is not known, or no key is for any of them.
    pub fn algorithms<T: AsRef<str>>(
        mut self,
        names: impl IntoIterator<Item = T>,
    ) -> Result<Tokens, TokensError> {
        let named = |name: T| {
            let name = name.as_ref();
            Algorithm::named(name).ok_or_else(|| TokensError::Algorithm(name.to_owned()))
        };
        let algorithms: Vec<Algorithm> = names.into_iter().map(named).collect::<Result<_, _>>()?;
        self.keys = self.keys.into_iter().filter_map(|key| key.only(&algorithms)).collect();
        match self.keys.is_empty() {
            true => Err(TokensError::NoKeys),
            false => Ok(self),
        }
    }

    /// They stand in this header, without `Bearer` if it is not `Authorization`.
    ///
    /// # Errors
    /// If no header can have this name.
    pub fn header(mut self, name: &str) -> Result<Tokens, TokensError> {
        self.header = name.parse().map_err(|_| TokensError::Header(name.to_owned()))?;
        Ok(self)
    }

    /// By how much the clock of whoever signs may differ from ours; [`LEEWAY`] if nothing is said.
    #[must_use]
    pub fn leeway(mut self, leeway: Duration) -> Tokens {
        self.leeway = leeway;
        self
    }

    /// Tells the time by this clock, and not by the machine's.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock + Send + Sync + 'static) -> Tokens {
        self.clock = Arc::new(clock);
        self
    }

    /// The header that they stand in.
    pub fn header_name(&self) -> &HeaderName {
        &self.header
    }

    /// What the request's token claims, if it has one and that is to be believed. Texts, numbers and truth values become
    /// text; what is inside of others is left out.
    pub fn claims(&self, request: &Parts) -> Option<Claims> {
        let payload = self.verified(self.token(request)?)?;
        if !self.is_in_time(&payload)? || !self.is_for_us(&payload) {
            return None;
        }
        let text = |value: Value| match value {
            Value::String(text) => Some(text),
            Value::Number(number) => Some(number.to_string()),
            Value::Bool(is_true) => Some(is_true.to_string()),
            Value::Null | Value::Array(_) | Value::Object(_) => None,
        };
        Some(Claims(payload.into_iter().filter_map(|(name, value)| Some((name, text(value)?))).collect()))
    }

    /// The request's token. Of two, nobody could say which one counts for whoever looks next.
    fn token<'a>(&self, request: &'a Parts) -> Option<&'a str> {
        let mut lines = request.headers.get_all(&self.header).iter();
        let (line, None) = (lines.next()?, lines.next()) else { return None };
        let line = line.to_str().ok()?;
        let token = if self.header == AUTHORIZATION {
            let (scheme, token) = line.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(token)?
        } else {
            line
        };
        Some(token.trim()).filter(|token| token.len() <= TOKEN_BYTES_MAX)
    }

    /// What a token holds, if its signature is that of one of the keys.
    fn verified(&self, token: &str) -> Option<Map<String, Value>> {
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, payload) = signed.split_once('.')?;
        let header = object(header)?;
        let algorithm = Algorithm::named(header.get("alg")?.as_str()?)?;
        // What must be understood and is not.
        if header.contains_key("crit") {
            return None;
        }
        let kid = match header.get("kid") {
            Some(kid) => Some(kid.as_str()?),
            None => None,
        };
        let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
        let is_the_only = self.keys.len() == 1;
        let mut possible = self.keys.iter().filter(|key| match (kid, key.kid()) {
            (Some(kid), Some(its)) => kid == its,
            _ => is_the_only,
        });
        possible.any(|key| key.verifies(algorithm, signed.as_bytes(), &signature)).then_some(())?;
        object(payload)
    }

    /// Whether it is valid now; none if its times are no times.
    fn is_in_time(&self, payload: &Map<String, Value>) -> Option<bool> {
        let now = self.clock.now();
        let (earliest, latest) = (now.saturating_sub(self.leeway), now.saturating_add(self.leeway));
        let second = 1_000_000_000;
        if let Some(expires) = payload.get("exp") {
            // A part of a second is on the strict side: what expires at 1.5 is expired at 1.
            let expires = expires.as_u64().or_else(|| Some(expires.as_f64()?.floor() as u64))?;
            if earliest.as_nanos() >= expires.saturating_mul(second) {
                return Some(false);
            }
        }
        if let Some(begins) = payload.get("nbf") {
            let begins = begins.as_u64().or_else(|| Some(begins.as_f64()?.ceil() as u64))?;
            if latest.as_nanos() < begins.saturating_mul(second) {
                return Some(false);
            }
        }
        Some(true)
    }

    fn is_for_us(&self, payload: &Map<String, Value>) -> bool {
        let is_text = |value: Option<&Value>, text: &String| value.and_then(Value::as_str) == Some(text);
        let is_from = |issuer| is_text(payload.get("iss"), issuer);
        let audience = payload.get("aud");
        let is_for = |ours: &String| match audience {
            Some(Value::Array(all)) => all.iter().any(|one| is_text(Some(one), ours)),
            one => is_text(one, ours),
        };
        self.issuer.as_ref().is_none_or(is_from)
            && (self.audience.is_empty() || self.audience.iter().any(is_for))
    }
}

/// One of the two parts of a token that are objects.
fn object(encoded: &str) -> Option<Map<String, Value>> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(encoded).ok()?).ok()
}

/// Keys or settings with which no token can be verified.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokensError {
    /// It is no key set.
    NotAKeySet(String),
    /// One of the keys is broken or too weak.
    Key {
        /// Which one, from 1.
        number: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// There is no key that a signature could be verified with.
    NoKeys,
    /// There is no such algorithm.
    Algorithm(String),
    /// No header can have this name.
    Header(String),
}

impl fmt::Display for TokensError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokensError::NotAKeySet(why) => {
                write!(f, "the keys are not a JSON Web Key Set, as in {{\"keys\": [...]}}: {why}")
            }
            TokensError::Key { number, what } => write!(f, "key {number} of the key set {what}"),
            TokensError::NoKeys => {
                write!(f, "no key is for verifying signatures by a known algorithm: {}", keys::known())
            }
            TokensError::Algorithm(name) => {
                write!(f, "{name:?} is not an algorithm for signatures; those are {}", keys::known())
            }
            TokensError::Header(name) => write!(f, "{name:?} is not the name of a header"),
        }
    }
}

impl std::error::Error for TokensError {}
