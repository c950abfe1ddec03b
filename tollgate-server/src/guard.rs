//! Who is let in where programs ask and not people: the admin listener, the check API.
//!
//! Layers of a router, each of which keeps somebody out. Which of them stand in front of what, each door says itself.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderValue, ORIGIN, WWW_AUTHENTICATE};
use axum::http::uri::Authority;
use axum::http::{StatusCode, Uri};
use axum::middleware::Next;
use axum::response::Response;
use subtle::ConstantTimeEq;
use tollgate_config::Secret;

use crate::problem::problem;

/// What a door's layers know.
#[derive(Clone)]
pub(crate) struct Guard {
    /// Where the configuration has the door's token.
    place: &'static str,
    token: Arc<dyn Fn() -> Option<Secret> + Send + Sync>,
}

impl Guard {
    /// Asks for the token anew with each request: it can be exchanged while the door is open.
    pub(crate) fn new(
        place: &'static str,
        token: impl Fn() -> Option<Secret> + Send + Sync + 'static,
    ) -> Guard {
        Guard { place, token: Arc::new(token) }
    }
}

/// Pages of other sites are not to read what is here, whoever looks at them.
pub(crate) async fn no_pages(request: Request, next: Next) -> Response {
    match request.headers().contains_key(ORIGIN) {
        true => problem(StatusCode::FORBIDDEN, "pages of browsers are told nothing here; leave `Origin` out"),
        false => next.run(request).await,
    }
}

/// A site can have its own name lead to this address once its page is loaded, and its page is then none of another site.
/// But it asks by that name, and it does not know the token.
pub(crate) async fn no_names(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    if (guard.token)().is_some() || is_for_us(request.uri(), request.headers()) {
        return next.run(request).await;
    }
    let place = guard.place;
    let why = format!(
        "there is nothing here by this name: ask for localhost or an IP address, or give `{place}` a token"
    );
    problem(StatusCode::MISDIRECTED_REQUEST, &why)
}

/// Whether every host that a request is for is one that nobody else can have. One for no host is by no browser.
fn is_for_us(uri: &Uri, headers: &HeaderMap) -> bool {
    let is_ours = |host: &str| {
        let is_ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
        is_ip || host.eq_ignore_ascii_case("localhost")
    };
    let in_headers = |value: &HeaderValue| {
        Authority::try_from(value.as_bytes()).is_ok_and(|authority| is_ours(authority.host()))
    };
    uri.host().is_none_or(is_ours) && headers.get_all(HOST).iter().all(in_headers)
}

/// Where there is a token, only those who know it.
pub(crate) async fn only_with_token(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    if (guard.token)().is_none_or(|token| knows(request.headers(), &token)) {
        return next.run(request).await;
    }
    let place = guard.place;
    let why = format!(
        "send the token that the configuration has under `{place}`, as in `Authorization: Bearer ...`"
    );
    let mut response = problem(StatusCode::UNAUTHORIZED, &why);
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// Whether somebody sends the token.
pub(crate) fn knows(headers: &HeaderMap, token: &Secret) -> bool {
    let sent = headers.get(AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
    let Some((scheme, sent)) = sent.split_at_checked(b"Bearer ".len()) else { return false };
    // How long it takes must not tell how much of it was right.
    scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(sent.ct_eq(token.reveal().as_bytes()))
}
