//! The routes of the API and their access checks.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use ratekeeper::Store;
use ratekeeper_rules::response::ResponseStatus;

use super::{HttpApi, OPENAPI, authorize, check, idempotency, reserve};
use crate::runtime::guard::{Guard, reject_cross_origin, reject_host_names, require_token};
use crate::runtime::http_listener::RequestHandler;
use crate::runtime::metrics::Endpoint;
use crate::runtime::problem::{problem, wrong_method};
use crate::runtime::records::RecordStore;

/// The routes of the API, without a socket. The caller's address is taken from the request extension
/// [`Peer`](ratekeeper::tower::Peer).
pub fn router<S: Store + Send + Sync + 'static, R: RecordStore>(context: Arc<HttpApi<S, R>>) -> Router {
    guarded_router(context.clone(), guard(context))
}

fn guard<S: Store + Send + Sync + 'static, R: RecordStore>(context: Arc<HttpApi<S, R>>) -> Guard {
    Guard::new("apis.http", move || context.snapshot().settings.token.clone())
}

/// Answers all requests. Those for `/v1/check`, nearly all, do without the router, whose layers take as much time as
/// the rest of a check.
pub(super) struct HttpApiHandler<S, R>(Arc<HandlerParts<S, R>>);

struct HandlerParts<S, R> {
    context: Arc<HttpApi<S, R>>,
    guard: Guard,
    router: Router,
}

impl<S: Store + Send + Sync + 'static, R: RecordStore> HttpApiHandler<S, R> {
    pub(super) fn new(context: Arc<HttpApi<S, R>>) -> HttpApiHandler<S, R> {
        let guard = guard(context.clone());
        let router = guarded_router(context.clone(), guard.clone());
        HttpApiHandler(Arc::new(HandlerParts { context, guard, router }))
    }
}

impl<S, R> Clone for HttpApiHandler<S, R> {
    fn clone(&self) -> HttpApiHandler<S, R> {
        HttpApiHandler(self.0.clone())
    }
}

impl<S: Store + Send + Sync + 'static, R: RecordStore> RequestHandler for HttpApiHandler<S, R> {
    async fn handle(&self, request: Request) -> Response {
        let HandlerParts { context, guard, router } = &*self.0;
        if request.method() != Method::POST || request.uri().path() != CHECK {
            return Box::pin(router.handle(request)).await;
        }
        match guard.rejection(&request) {
            Some(response) => response,
            None => idempotency::handle(context.clone(), Endpoint::Check, request, check::check).await,
        }
    }
}

/// The path of the endpoint that charges.
const CHECK: &str = "/v1/check";

fn guarded_router<S: Store + Send + Sync + 'static, R: RecordStore>(
    context: Arc<HttpApi<S, R>>,
    guard: Guard,
) -> Router {
    Router::new()
        .route(CHECK, post(check::<S, R>))
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
