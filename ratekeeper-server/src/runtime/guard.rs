//! Access checks in front of the admin listener and the HTTP API.
//!
//! Each check is a layer of a router and rejects one class of requests. Each API decides which of its routes a layer
//! covers.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::Uri;
use axum::http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderValue, ORIGIN, WWW_AUTHENTICATE};
use axum::http::uri::Authority;
use axum::middleware::Next;
use axum::response::Response;
use ratekeeper_config::Secret;
use ratekeeper_rules::response::ResponseStatus;
use subtle::ConstantTimeEq;

use crate::runtime::problem::problem;

/// The state that the layers of one API share.
#[derive(Clone)]
pub(crate) struct Guard {
    /// The configuration section that holds the API's token.
    section: &'static str,
    token: Arc<dyn Fn() -> Option<Secret> + Send + Sync>,
}

impl Guard {
    /// `token` is called on every request, because a reload can change the token.
    pub(crate) fn new(
        section: &'static str,
        token: impl Fn() -> Option<Secret> + Send + Sync + 'static,
    ) -> Guard {
        Guard { section, token: Arc::new(token) }
    }
}

/// Rejects cross-origin browser requests: pages of other sites must not read these responses.
pub(crate) async fn reject_cross_origin(request: Request, next: Next) -> Response {
    match cross_origin_rejection(request.headers()) {
        Some(response) => response,
        None => next.run(request).await,
    }
}

fn cross_origin_rejection(headers: &HeaderMap) -> Option<Response> {
    let detail = "cross-origin browser requests are rejected; remove the `Origin` header";
    headers.contains_key(ORIGIN).then(|| problem(ResponseStatus::Forbidden, detail))
}

/// Rejects requests for host names if there is no token. DNS rebinding makes a page same-origin with this address,
/// but its requests still carry the site's host name, and the page does not know the token.
pub(crate) async fn reject_host_names(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    match guard.host_name_rejection(&request, (guard.token)().as_ref()) {
        Some(response) => response,
        None => next.run(request).await,
    }
}

/// Requires the bearer token, if one is configured.
pub(crate) async fn require_token(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    match guard.token_rejection(request.headers(), (guard.token)().as_ref()) {
        Some(response) => response,
        None => next.run(request).await,
    }
}

impl Guard {
    /// The response to a request that fails any of the checks, in the order of the layers.
    pub(crate) fn rejection(&self, request: &Request) -> Option<Response> {
        let token = (self.token)();
        cross_origin_rejection(request.headers())
            .or_else(|| self.host_name_rejection(request, token.as_ref()))
            .or_else(|| self.token_rejection(request.headers(), token.as_ref()))
    }

    fn host_name_rejection(&self, request: &Request, token: Option<&Secret>) -> Option<Response> {
        if token.is_some() || names_only_local_hosts(request.uri(), request.headers()) {
            return None;
        }
        let section = self.section;
        let detail =
            format!("unknown host name; use localhost or an IP address, or set a token under `{section}`");
        Some(problem(ResponseStatus::MisdirectedRequest, &detail))
    }

    fn token_rejection(&self, headers: &HeaderMap, token: Option<&Secret>) -> Option<Response> {
        if token.is_none_or(|token| has_token(headers, token)) {
            return None;
        }
        let section = self.section;
        let detail = format!(
            "missing or wrong token; send the token configured under `{section}` as `Authorization: Bearer ...`"
        );
        let mut response = problem(ResponseStatus::Unauthorized, &detail);
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        Some(response)
    }
}

/// Whether every host that the request names is an IP address or `localhost`, which no other site can own. Browsers
/// always send a host, so a request without one is accepted.
fn names_only_local_hosts(uri: &Uri, headers: &HeaderMap) -> bool {
    let is_local = |host: &str| {
        let is_ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
        is_ip || host.eq_ignore_ascii_case("localhost")
    };
    let is_local_header = |value: &HeaderValue| {
        Authority::try_from(value.as_bytes()).is_ok_and(|authority| is_local(authority.host()))
    };
    uri.host().is_none_or(is_local) && headers.get_all(HOST).iter().all(is_local_header)
}

/// Whether the request carries the token.
pub(crate) fn has_token(headers: &HeaderMap, token: &Secret) -> bool {
    let sent = headers.get(AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
    let Some((scheme, sent)) = sent.split_at_checked(b"Bearer ".len()) else { return false };
    // Constant-time comparison: the duration must not reveal how much of the token was right.
    scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(sent.ct_eq(token.reveal().as_bytes()))
}
