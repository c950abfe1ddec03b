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
use ratekeeper::Store;
use ratekeeper_rules::response::ResponseStatus;
use ring::digest::{Context, SHA256};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};

use super::HttpApi;
use super::error::HttpApiError;
use super::request_body;
use super::response::EndpointResponse;
use crate::runtime::metrics::{Endpoint, EndpointResult, LabelType};
use crate::runtime::records::{CLAIM_NONCE_BYTES, Claim, ClaimResult, RecordStore};

/// Longest idempotency key, in bytes.
pub const IDEMPOTENCY_KEY_BYTES_MAX: usize = 255;
/// How long a response is stored: longer than clients retry.
const RESPONSE_LIFETIME: Duration = Duration::from_secs(600);
/// How long a key stays claimed if the process that executes its request has ended.
const CLAIM_LIFETIME: Duration = Duration::from_secs(30);
/// Attempts to store a response.
const STORE_ATTEMPTS_MAX: usize = 2;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The body, path and query of a request.
#[derive(Clone, Debug)]
pub(super) struct ApiRequest {
    pub(super) body: Bytes,
    target: Option<PathAndQuery>,
}

impl ApiRequest {
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

/// Random bytes that cannot be guessed.
pub(super) fn random_bytes<const BYTES: usize>() -> Result<[u8; BYTES], HttpApiError> {
    let mut bytes = [0; BYTES];
    match SystemRandom::new().fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(_) => Err(HttpApiError::new(
            ResponseStatus::ServiceUnavailable,
            "the operating system returned no random numbers; retry later",
        )),
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
pub(super) async fn handle<S, R, F>(
    api: Arc<HttpApi<S, R>>,
    endpoint: Endpoint,
    request: Request,
    run: impl FnOnce(Arc<HttpApi<S, R>>, ApiRequest) -> F + Send + 'static,
) -> Response<Body>
where
    S: Store + Send + Sync + 'static,
    R: RecordStore,
    F: Future<Output = Result<EndpointResponse, HttpApiError>> + Send + 'static,
{
    let context = api.clone();
    let result = execute(api, endpoint, request, run).await;
    let EndpointResponse { response, outcome } = result.unwrap_or_else(HttpApiError::into_response);
    context.metrics.count(endpoint, outcome);
    response
}

async fn execute<S, R, F>(
    api: Arc<HttpApi<S, R>>,
    endpoint: Endpoint,
    request: Request,
    run: impl FnOnce(Arc<HttpApi<S, R>>, ApiRequest) -> F + Send + 'static,
) -> Result<EndpointResponse, HttpApiError>
where
    S: Store + Send + Sync + 'static,
    R: RecordStore,
    F: Future<Output = Result<EndpointResponse, HttpApiError>> + Send + 'static,
{
    let (parts, body) = request_body::body(request).await?;
    let request = ApiRequest { body, target: parts.uri.into_parts().path_and_query };
    let accepts_key =
        matches!(endpoint, Endpoint::Check | Endpoint::Refund | Endpoint::Reserve | Endpoint::Settle);
    let key = if accepts_key { idempotency_key(&parts.headers)? } else { None };
    // Without a key these are a single step and can be cancelled anywhere: it took effect, or it did not.
    let is_one_step = matches!(endpoint, Endpoint::Check | Endpoint::Peek | Endpoint::Reset);
    if is_one_step && key.is_none() {
        return run(api, request).await;
    }
    // The others run to completion even if the client disconnects.
    let work = tokio::spawn(async move {
        match key {
            Some(key) => execute_once(api, endpoint, &key, request, run).await,
            None => run(api, request).await,
        }
    });
    work.await.unwrap_or_else(|_| {
        Err(HttpApiError::new(ResponseStatus::InternalServerError, "internal error; see the server log"))
    })
}

/// The idempotency key of a request, if it has one.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, HttpApiError> {
    let mut keys = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(key) = keys.next() else { return Ok(None) };
    let is_valid = keys.next().is_none() && (1..=IDEMPOTENCY_KEY_BYTES_MAX).contains(&key.len());
    match key.to_str().ok().filter(|_| is_valid) {
        Some(key) => Ok(Some(key.to_owned())),
        None => {
            let reason = format!(
                "`Idempotency-Key` must be sent once and have 1 to {IDEMPOTENCY_KEY_BYTES_MAX} printable characters"
            );
            Err(HttpApiError::new(ResponseStatus::BadRequest, reason))
        }
    }
}

/// Executes a request the first time, and returns the stored response afterwards.
async fn execute_once<S, R, F>(
    api: Arc<HttpApi<S, R>>,
    endpoint: Endpoint,
    key: &str,
    request: ApiRequest,
    run: impl FnOnce(Arc<HttpApi<S, R>>, ApiRequest) -> F + Send,
) -> Result<EndpointResponse, HttpApiError>
where
    S: Store + Send + Sync + 'static,
    R: RecordStore,
    F: Future<Output = Result<EndpointResponse, HttpApiError>> + Send,
{
    // Digests, so that the stored records do not reveal keys.
    let name = hex(&digest(&[endpoint.name().as_bytes(), key.as_bytes()]));
    let nonce = random_bytes::<CLAIM_NONCE_BYTES>()?;
    let claim = Claim { name, fingerprint: request.fingerprint().to_vec(), nonce };
    // A double refund is worse than a lost one, so the key of a refund stays claimed until its outcome is certain.
    let lifetime = if endpoint == Endpoint::Refund { RESPONSE_LIFETIME } else { CLAIM_LIFETIME };
    match api.records.claim(&claim, lifetime).await? {
        ClaimResult::First => {}
        ClaimResult::Existing { fingerprint, .. } if fingerprint != claim.fingerprint => {
            let reason = "this `Idempotency-Key` was used for a different request; use a new one";
            return Err(HttpApiError::new(ResponseStatus::UnprocessableEntity, reason));
        }
        ClaimResult::Existing { response: None, .. } => {
            let reason =
                "the first request with this `Idempotency-Key` is in flight, or its outcome is unknown";
            return Err(HttpApiError::new(ResponseStatus::Conflict, reason).retryable());
        }
        ClaimResult::Existing { response: Some(response), .. } => {
            api.metrics.replays.fetch_add(1, Ordering::Relaxed);
            return StoredResponse::response(&response);
        }
    }
    let response = run(api.clone(), request).await;
    match response {
        Ok(response) if response.outcome == EndpointResult::Allowed => {
            Ok(store_response(&*api, endpoint, &claim, response).await)
        }
        // A retry with this key must not execute the request a second time.
        Err(error) if error.may_be_executed => {
            Ok(store_response(&*api, endpoint, &claim, error.into_response()).await)
        }
        other => {
            api.records.release(&claim).await;
            other
        }
    }
}

/// Stores a response for retries. The request is already executed: if its response cannot be stored, the client still
/// gets it, and the claim stays until it expires.
async fn store_response<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: &HttpApi<S, R>,
    endpoint: Endpoint,
    claim: &Claim,
    response: EndpointResponse,
) -> EndpointResponse {
    let EndpointResponse { response, outcome } = response;
    let (stored, response) = StoredResponse::of(response).await;
    for attempt in 1.. {
        match api.records.set_response(claim, &stored, RESPONSE_LIFETIME).await {
            Ok(()) => break,
            Err(_) if attempt < STORE_ATTEMPTS_MAX => {}
            Err(error) => {
                api.metrics.dropped_responses.fetch_add(1, Ordering::Relaxed);
                let endpoint = endpoint.name();
                tracing::warn!(endpoint, %error, "response not stored under its idempotency key");
                break;
            }
        }
    }
    EndpointResponse { response, outcome }
}

/// A response as stored.
#[derive(Deserialize, Serialize)]
struct StoredResponse {
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
}

impl StoredResponse {
    async fn of(response: Response<Body>) -> (Vec<u8>, Response<Body>) {
        let (parts, body) = response.into_parts();
        // These responses are always in memory, so collecting the body cannot fail.
        let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let headers = parts
            .headers
            .iter()
            .filter_map(|(name, value)| Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned())));
        let stored = StoredResponse {
            status: parts.status.as_u16(),
            headers: headers.collect(),
            body: String::from_utf8_lossy(&body).into_owned(),
        };
        let bytes = serde_json::to_vec(&stored).unwrap_or_default();
        (bytes, Response::from_parts(parts, Body::from(body)))
    }

    fn response(bytes: &[u8]) -> Result<EndpointResponse, HttpApiError> {
        let unreadable =
            || HttpApiError::new(ResponseStatus::ServiceUnavailable, "the stored response is unreadable");
        let StoredResponse { status, headers, body } =
            serde_json::from_slice(bytes).map_err(|_| unreadable())?;
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = StatusCode::from_u16(status).map_err(|_| unreadable())?;
        for (name, value) in headers {
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
                response.headers_mut().insert(name, value);
            }
        }
        response.headers_mut().insert("idempotent-replayed", HeaderValue::from_static("true"));
        let outcome = match response.status().is_success() {
            true => EndpointResult::Allowed,
            false => EndpointResult::of_error(response.status().as_u16()),
        };
        Ok(EndpointResponse { response, outcome })
    }
}
