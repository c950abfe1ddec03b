//! Idempotent retries: a request that is sent again because its response was lost is not executed again, and gets the
//! first response.
//!
//! This holds for requests with an `Idempotency-Key`. The response is stored if the request charged or refunded
//! something; after a denial or an error, which did neither, a retry with the same key is executed. If the outcome is
//! unknown, the response states that, and is stored as well.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::header::{HeaderMap, HeaderName, HeaderValue};
use axum::http::uri::PathAndQuery;
use axum::http::{Response, StatusCode};
use http_body_util::BodyExt;
use ring::digest::{Context, SHA256};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};

use super::Source;
use super::counts::{Endpoint, Said};
use super::records::{CLAIM_NUMBER_BYTES, Claim, Claimed, Records};
use super::refusal::Refusal;
use super::request;

/// Longest idempotency key, in bytes.
pub const IDEMPOTENCY_KEY_BYTES_MAX: usize = 255;
/// How long a response is stored: longer than clients retry.
const REMEMBERED: Duration = Duration::from_secs(600);
/// How long a key stays claimed if the process that executes its request has ended.
const UNDER_WAY_MAX: Duration = Duration::from_secs(30);
/// Attempts to store a response.
const REMEMBER_TRIES: usize = 2;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// A request: its body, and its path and query.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) body: Bytes,
    target: Option<PathAndQuery>,
}

impl Asked {
    pub(super) fn query(&self) -> Option<&str> {
        self.target.as_ref().and_then(PathAndQuery::query)
    }

    /// Identifies the request: two different requests have different fingerprints.
    fn fingerprint(&self) -> [u8; DIGEST_BYTES] {
        digest(&[self.query().unwrap_or_default().as_bytes(), &self.body])
    }
}

const DIGEST_BYTES: usize = 32;

/// A digest of several texts. Each is preceded by its length, so that no two lists have the same input.
fn digest(texts: &[&[u8]]) -> [u8; DIGEST_BYTES] {
    let mut context = Context::new(&SHA256);
    for text in texts {
        context.update(&(text.len() as u64).to_le_bytes());
        context.update(text);
    }
    let mut bytes = [0; DIGEST_BYTES];
    bytes.copy_from_slice(context.finish().as_ref());
    bytes
}

/// A random number that cannot be guessed.
pub(super) fn new_number<const BYTES: usize>() -> Result<[u8; BYTES], Refusal> {
    let mut bytes = [0; BYTES];
    match SystemRandom::new().fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(_) => {
            Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the system has no random numbers just now"))
        }
    }
}

/// Bytes as hexadecimal text.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

/// Reads a request, executes it with `run`, and counts the outcome.
pub(super) async fn answer<T, F>(
    api: Arc<T>,
    endpoint: Endpoint,
    request: Request,
    run: impl FnOnce(Arc<T>, Asked) -> F + Send + 'static,
) -> Response<Body>
where
    T: Source,
    F: Future<Output = Result<Response<Body>, Refusal>> + Send + 'static,
{
    let counted = api.clone();
    let answered = begin(api, endpoint, request, run).await;
    let response = answered.unwrap_or_else(Refusal::into_response);
    counted.counts().count(endpoint, &response);
    response
}

async fn begin<T, F>(
    api: Arc<T>,
    endpoint: Endpoint,
    request: Request,
    run: impl FnOnce(Arc<T>, Asked) -> F + Send + 'static,
) -> Result<Response<Body>, Refusal>
where
    T: Source,
    F: Future<Output = Result<Response<Body>, Refusal>> + Send + 'static,
{
    let (parts, body) = request::body(request).await?;
    let asked = Asked { body, target: parts.uri.into_parts().path_and_query };
    let has_key =
        matches!(endpoint, Endpoint::Check | Endpoint::Refund | Endpoint::Reserve | Endpoint::Settle);
    let key = if has_key { idempotency_key(&parts.headers)? } else { None };
    // Without a key these are a single step and can be cancelled anywhere: it took effect, or it did not.
    let is_one_step = matches!(endpoint, Endpoint::Check | Endpoint::Peek | Endpoint::Reset);
    if is_one_step && key.is_none() {
        return run(api, asked).await;
    }
    // The others run to completion even if the client disconnects.
    let work = tokio::spawn(async move {
        match key {
            Some(key) => once(api, endpoint, &key, asked, run).await,
            None => run(api, asked).await,
        }
    });
    work.await.unwrap_or_else(|_| {
        Err(Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "something went wrong here; see the log"))
    })
}

/// The idempotency key of a request, if it has one.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Refusal> {
    let mut keys = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(key) = keys.next() else { return Ok(None) };
    let is_one = keys.next().is_none() && (1..=IDEMPOTENCY_KEY_BYTES_MAX).contains(&key.len());
    match key.to_str().ok().filter(|_| is_one) {
        Some(key) => Ok(Some(key.to_owned())),
        None => {
            let why = format!(
                "`Idempotency-Key` is one text of 1 to {IDEMPOTENCY_KEY_BYTES_MAX} printable characters"
            );
            Err(Refusal::new(StatusCode::BAD_REQUEST, why))
        }
    }
}

/// Executes a request the first time, and repeats its response afterwards.
async fn once<T, F>(
    api: Arc<T>,
    endpoint: Endpoint,
    key: &str,
    asked: Asked,
    run: impl FnOnce(Arc<T>, Asked) -> F + Send,
) -> Result<Response<Body>, Refusal>
where
    T: Source,
    F: Future<Output = Result<Response<Body>, Refusal>> + Send,
{
    // Digests, so that the stored records do not reveal keys.
    let name = hex(&digest(&[endpoint.name().as_bytes(), key.as_bytes()]));
    let number = new_number::<CLAIM_NUMBER_BYTES>()?;
    let claim = Claim { name, asked: asked.fingerprint().to_vec(), number };
    // A double refund is worse than a lost one, so the key of a refund stays claimed until its outcome is certain.
    let lasts = if endpoint == Endpoint::Refund { REMEMBERED } else { UNDER_WAY_MAX };
    match api.records().claim(&claim, lasts).await? {
        Claimed::First => {}
        Claimed::Before { asked, .. } if asked != claim.asked => {
            let why = "this `Idempotency-Key` was sent with another request; use a new one";
            return Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, why));
        }
        Claimed::Before { answer: None, .. } => {
            let why = "the first request with this `Idempotency-Key` is still being answered, or nobody knows what \
                       came of it";
            return Err(Refusal::new(StatusCode::CONFLICT, why).soon_over());
        }
        Claimed::Before { answer: Some(answer), .. } => {
            api.counts().repeated.fetch_add(1, Ordering::Relaxed);
            return Remembered::response(&answer);
        }
    }
    let response = run(api.clone(), asked).await;
    match response {
        Ok(response) if response.extensions().get() == Some(&Said::Yes) => {
            Ok(remember(&*api, endpoint, &claim, response).await)
        }
        // A retry with this key must not execute the request a second time.
        Err(refusal) if refusal.may_be_done => {
            Ok(remember(&*api, endpoint, &claim, refusal.into_response()).await)
        }
        other => {
            api.records().release(&claim).await;
            other
        }
    }
}

/// Stores a response for retries. The request is already executed: if its response cannot be stored, the client still
/// gets it, and the claim stays until it expires.
async fn remember<T: Source>(
    api: &T,
    endpoint: Endpoint,
    claim: &Claim,
    response: Response<Body>,
) -> Response<Body> {
    let (remembered, response) = Remembered::of(response).await;
    for tries in 1.. {
        match api.records().answer(claim, &remembered, REMEMBERED).await {
            Ok(()) => break,
            Err(_) if tries < REMEMBER_TRIES => {}
            Err(why) => {
                api.counts().unremembered.fetch_add(1, Ordering::Relaxed);
                let endpoint = endpoint.name();
                tracing::warn!(endpoint, %why, "response not stored under its idempotency key");
                break;
            }
        }
    }
    response
}

/// A response as stored.
#[derive(Deserialize, Serialize)]
struct Remembered {
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
}

impl Remembered {
    async fn of(response: Response<Body>) -> (Vec<u8>, Response<Body>) {
        let (parts, body) = response.into_parts();
        // These responses are always in memory, so collecting the body cannot fail.
        let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let headers = parts
            .headers
            .iter()
            .filter_map(|(name, value)| Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned())));
        let remembered = Remembered {
            status: parts.status.as_u16(),
            headers: headers.collect(),
            body: String::from_utf8_lossy(&body).into_owned(),
        };
        let bytes = serde_json::to_vec(&remembered).unwrap_or_default();
        (bytes, Response::from_parts(parts, Body::from(body)))
    }

    fn response(bytes: &[u8]) -> Result<Response<Body>, Refusal> {
        let lost =
            || Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the first answer cannot be read any more");
        let Remembered { status, headers, body } = serde_json::from_slice(bytes).map_err(|_| lost())?;
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = StatusCode::from_u16(status).map_err(|_| lost())?;
        for (name, value) in headers {
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
                response.headers_mut().insert(name, value);
            }
        }
        response.headers_mut().insert("idempotent-replayed", HeaderValue::from_static("true"));
        if response.status().is_success() {
            response.extensions_mut().insert(Said::Yes);
        }
        Ok(response)
    }
}
