//! Verification of tokens (JWT, RFC 7519), so that rules can rely on their claims.
//!
//! A request's token is verified in these steps; if one fails, the request has no claims:
//!
//! 1. The request has one token, in one line of one header, of at most [`TOKEN_BYTES_MAX`] bytes.
//! 2. The token names an algorithm that its key supports. A key has its algorithms from the key set, and a token only
//!    selects among them: a public key is never used as an `HS256` secret, and `none` is not an algorithm.
//! 3. The signature is valid for the key.
//! 4. The token is not expired, is already valid, and has the required issuer and audience. A claim of the wrong type
//!    (a string as a time) is an error, not an absent claim.
//!
//! [ring](https://docs.rs/ring) verifies the signatures; the rest is implemented here. The crate `jsonwebtoken` ignores
//! `crit`, accepts secrets that can be guessed and a token at the instant at which it expires, and reads the system clock.

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

/// Longer tokens are ignored. Most tokens are shorter than 2 kB, and few servers accept headers of more than 16 kB.
pub const TOKEN_BYTES_MAX: usize = 16 * 1024;

/// The default clock difference allowed between the issuer and this machine.
pub const LEEWAY: Duration = Duration::from_secs(60);

/// Verifies the tokens of requests with a set of keys: [`LayerBuilder::tokens`](super::LayerBuilder::tokens).
///
/// ```
/// use std::time::Duration;
/// use ratekeeper::tower::RatekeeperLayer;
/// use ratekeeper::tower::key::{Key, KeyFallback, KeyPart};
/// use ratekeeper::tower::rule::Rule;
/// use ratekeeper::tower::token::Tokens;
/// use ratekeeper::{WindowAlign, Limit};
///
/// let keys = r#"{ "keys": [{ "kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "use": "sig",
///     "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo" }] }"#;
/// let tokens = Tokens::new(keys)?
///     .issuer("https://login.example.com")
///     .audience(["api"])
///     .algorithms(["EdDSA"])?
///     .leeway(Duration::from_secs(10));
/// // One budget per user, by a claim of the token; requests without a token are rejected.
/// let user = Key::of(KeyPart::Claim("sub".to_owned())).fallback(KeyFallback::Deny);
/// let limit = Limit::fixed_window(100, Duration::from_secs(60), WindowAlign::Clock)?;
/// let layer = RatekeeperLayer::builder().rule(Rule::new("per-user", limit).key(user)).tokens(tokens).build()?;
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
    /// Accepts tokens signed by a key of this JSON Web Key Set (RFC 7517), from `Authorization: Bearer`.
    ///
    /// Keys that are not for signatures or of an unsupported type are ignored. Supported are RSA keys of 2048 to 8192
    /// bits, the curves P-256, P-384 and Ed25519, and secrets at least as long as their HMAC's output.
    ///
    /// # Errors
    /// If the JSON is not a key set, a key is malformed or too weak, or no usable key is left.
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

    /// Requires this issuer (`iss`). By default any issuer is accepted.
    #[must_use]
    pub fn issuer(mut self, issuer: &str) -> Tokens {
        self.issuer = Some(issuer.to_owned());
        self
    }

    /// Requires one of these audiences (`aud`). By default any audience is accepted.
    #[must_use]
    pub fn audience<T: Into<String>>(mut self, audience: impl IntoIterator<Item = T>) -> Tokens {
        self.audience = audience.into_iter().map(Into::into).collect();
        self
    }

    /// Requires one of these signature algorithms: `RS256`, `ES256`, `EdDSA`. By default all algorithms of the keys
    /// are accepted.
    ///
    /// # Errors
    /// If a name is unknown, or no key supports any of them.
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

    /// Reads tokens from this header, without `Bearer` unless it is `Authorization`.
    ///
    /// # Errors
    /// If the name is not a valid header name.
    pub fn header(mut self, name: &str) -> Result<Tokens, TokensError> {
        self.header = name.parse().map_err(|_| TokensError::Header(name.to_owned()))?;
        Ok(self)
    }

    /// Sets the clock difference allowed between the issuer and this machine; the default is [`LEEWAY`].
    #[must_use]
    pub fn leeway(mut self, leeway: Duration) -> Tokens {
        self.leeway = leeway;
        self
    }

    /// Uses this clock instead of the system clock.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock + Send + Sync + 'static) -> Tokens {
        self.clock = Arc::new(clock);
        self
    }

    /// The header that tokens are read from.
    pub fn header_name(&self) -> &HeaderName {
        &self.header
    }

    /// The claims of the request's token, if it has a valid one. Strings, numbers and booleans become text; null,
    /// arrays and objects are left out.
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

    /// The request's token. With two tokens there is none: the service might use the other one.
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

    /// The payload of a token, if one of the keys has signed it.
    fn verified(&self, token: &str) -> Option<Map<String, Value>> {
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, payload) = signed.split_once('.')?;
        let header = object(header)?;
        let algorithm = Algorithm::named(header.get("alg")?.as_str()?)?;
        // `crit` lists extensions that a verifier must support, and none is supported here.
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

    /// Whether the token is valid now; `None` if one of its times is not a number.
    fn is_in_time(&self, payload: &Map<String, Value>) -> Option<bool> {
        let now = self.clock.now();
        let (earliest, latest) = (now.saturating_sub(self.leeway), now.saturating_add(self.leeway));
        let second = 1_000_000_000;
        if let Some(expires) = payload.get("exp") {
            // Fractions of a second are rounded to the strict side: a token that expires at 1.5 s is expired at 1 s.
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

/// Decodes the header or the payload, which are JSON objects.
fn object(encoded: &str) -> Option<Map<String, Value>> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(encoded).ok()?).ok()
}

/// Why tokens cannot be verified with these keys or settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokensError {
    /// The JSON is not a key set.
    #[error("the keys are not a JSON Web Key Set, as in {{\"keys\": [...]}}: {0}")]
    NotAKeySet(String),
    /// A key is malformed or too weak.
    #[error("key {number} of the key set {what}")]
    Key {
        /// Its position in the key set, from 1.
        number: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// No key can verify signatures.
    #[error("no key is for verifying signatures by a known algorithm: {}", keys::known())]
    NoKeys,
    /// The algorithm is unknown.
    #[error("{0:?} is not an algorithm for signatures; those are {known}", known = keys::known())]
    Algorithm(String),
    /// The name is not a valid header name.
    #[error("{0:?} is not the name of a header")]
    Header(String),
}
