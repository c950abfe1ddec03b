//! The routes of the API and their access checks.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use ratekeeper::Store;
use ratekeeper_rules::response::ResponseStatus;

use super::{HttpApi, OPENAPI, authorize, check, idempotency, reserve};
use crate::runtime::guard::{Guard, reject_cross_origin, reject_host_names, require_token};
use crate::runtime::metrics::Endpoint;
use crate::runtime::problem::{problem, wrong_method};
use crate::runtime::records::RecordStore;

/// The routes of the API, without a socket. The caller's address is taken from the request extension
/// [`Peer`](ratekeeper::tower::Peer).
pub fn router<S: Store + Send + Sync + 'static, R: RecordStore>(context: Arc<HttpApi<S, R>>) -> Router {
    let configured = context.clone();
    let guard = Guard::new("apis.http", move || configured.snapshot().settings.token.clone());
    Router::new()
        .route("/v1/check", post(check::<S, R>))
        .route("/v1/peek", post(peek::<S, R>))
        .route("/v1/reset", post(reset::<S, R>))
        .route("/v1/refund", post(refund::<S, R>))
        .route("/v1/reserve", post(reserve::<S, R>))
        .route("/v1/settle", post(settle::<S, R>))
        .with_state(context.clone())
        .merge(context.other_routes.clone())
        .method_not_allowed_fallback(wrong_method)
        // This layer covers the routes added above it only.
        .route_layer(from_fn_with_state(guard.clone(), require_token))
        .route("/openapi.json", get(openapi).fallback(wrong_method))
        .fallback(unknown_path)
        .layer(from_fn_with_state(guard, reject_host_names))
        .layer(from_fn(reject_cross_origin))
        // After the layers: a proxy's subrequest carries its client's `Origin`, and often its `Host`.
        .route("/v1/authorize", any(authorize::authorize::<S, R>).with_state(context))
}

async fn check<S: Store + Send + Sync + 'static, R: RecordStore>(
    State(api): State<Arc<HttpApi<S, R>>>,
    request: Request,
) -> Response {
    idempotency::handle(api, Endpoint::Check, request, check::check).await
}

async fn peek<S: Store + Send + Sync + 'static, R: RecordStore>(
    State(api): State<Arc<HttpApi<S, R>>>,
    request: Request,
) -> Response {
    idempotency::handle(api, Endpoint::Peek, request, check::peek).await
}

async fn reset<S: Store + Send + Sync + 'static, R: RecordStore>(
    State(api): State<Arc<HttpApi<S, R>>>,
    request: Request,
) -> Response {
    idempotency::handle(api, Endpoint::Reset, request, check::reset).await
}

async fn refund<S: Store + Send + Sync + 'static, R: RecordStore>(
    State(api): State<Arc<HttpApi<S, R>>>,
    request: Request,
) -> Response {
    idempotency::handle(api, Endpoint::Refund, request, check::refund).await
}

async fn reserve<S: Store + Send + Sync + 'static, R: RecordStore>(
    State(api): State<Arc<HttpApi<S, R>>>,
    request: Request,
) -> Response {
    idempotency::handle(api, Endpoint::Reserve, request, reserve::reserve).await
}

async fn settle<S: Store + Send + Sync + 'static, R: RecordStore>(
    State(api): State<Arc<HttpApi<S, R>>>,
    request: Request,
) -> Response {
    idempotency::handle(api, Endpoint::Settle, request, reserve::settle).await
}

async fn openapi() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], OPENAPI)
}

async fn unknown_path() -> Response {
    problem(ResponseStatus::NotFound, "unknown path; `/openapi.json` lists all paths")
}
