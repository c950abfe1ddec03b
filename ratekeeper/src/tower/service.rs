//! The tower service and its response future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};
use tower_service::Service;

use super::body::ResponseBody;
use super::engine::{
    DecisionFuture, Engine, NextStep, RequestChecks, RequestRejection, RequestVerdict, WaitGuard,
};
use super::event::{DecisionEvent, Outcome};
use super::http_response::{
    GrpcCall, LocalResponse, ResponseHeaders, add_headers, denial_response, overload_response,
    rejection_response,
};
use super::{RequestContext, Route};
use crate::concurrency::Permits;
use crate::memory::Memory;
use crate::store::Store;

/// A service with limits in front, built by a [`RatekeeperLayer`](super::RatekeeperLayer).
///
/// It is ready when the inner service is, and calls the instance that was polled ready, even after a delay. If a
/// request is denied, the inner service's reservation for it is released immediately.
///
/// ```
/// use std::convert::Infallible;
/// use std::time::Duration;
/// use http::{Request, Response};
/// use ratekeeper::tower::{Peer, RatekeeperLayer};
/// use ratekeeper::{WindowAlign, Limit};
/// use tower::{Layer, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let hello = |_: Request<()>| async { Ok::<_, Infallible>(Response::new("hello".to_owned())) };
/// let limit = Limit::fixed_window(1, Duration::from_secs(3600), WindowAlign::FirstRequest)?;
/// let service = RatekeeperLayer::builder().per_client("per-client", limit).build()?.layer(service_fn(hello));
///
/// let request = || Request::get("/").extension(Peer([192, 0, 2, 7].into())).body(());
/// assert_eq!(service.clone().oneshot(request()?).await?.status(), 200);
/// assert_eq!(service.clone().oneshot(request()?).await?.status(), 429);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RateLimit<T, S = Memory> {
    pub(crate) inner: T,
    pub(crate) engine: Arc<Engine<S>>,
}

impl<T: Clone, S> Clone for RateLimit<T, S> {
    /// Returns another service with the same limits.
    fn clone(&self) -> Self {
        RateLimit { inner: self.inner.clone(), engine: self.engine.clone() }
    }
}

impl<T, S, B, R> Service<Request<B>> for RateLimit<T, S>
where
    T: Service<Request<B>, Response = Response<R>> + Clone,
    S: Store + Send + Sync + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = T::Error;
    type Future = ResponseFuture<T, Request<B>, S>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), T::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        call(&self.engine, &mut self.inner, request, RequestContext::default()).response
    }
}

/// A service that is ready for one request.
pub(crate) trait ReadyService<T> {
    /// Borrows the service for an immediate call.
    fn service_mut(&mut self) -> &mut T;
    /// Takes the service, to keep it with a waiting request or to drop it.
    fn into_service(self) -> T;
}

impl<T: Clone> ReadyService<T> for &mut T {
    fn service_mut(&mut self) -> &mut T {
        self
    }

    /// Leaves a clone for the next request, which must be polled ready first.
    fn into_service(self) -> T {
        let clone = self.clone();
        std::mem::replace(self, clone)
    }
}

/// A service for a single request.
pub(crate) struct OwnedService<T>(pub(crate) T);

impl<T> ReadyService<T> for OwnedService<T> {
    fn service_mut(&mut self) -> &mut T {
        &mut self.0
    }

    fn into_service(self) -> T {
        self.0
    }
}

/// A request whose limits have decided or are being checked, as
/// [`RatekeeperLayer::call_with`](super::RatekeeperLayer::call_with) returns it.
#[derive(Debug)]
pub struct LimitedCall<T: Service<Q>, Q, S = Memory> {
    /// The response.
    pub response: ResponseFuture<T, Q, S>,
    /// What the limits decided; `None` while the store has not answered. Then
    /// [`take_event`](ResponseFuture::take_event) returns it later.
    pub event: Option<DecisionEvent>,
}

/// Checks a request, and calls the ready service if it is allowed.
pub(crate) fn call<T, B, R, S>(
    engine: &Arc<Engine<S>>,
    ready: impl ReadyService<T>,
    request: Request<B>,
    context: RequestContext<'_>,
) -> LimitedCall<T, Request<B>, S>
where
    T: Service<Request<B>, Response = Response<R>>,
    S: Store + Send + Sync + 'static,
{
    let (mut parts, body) = request.into_parts();
    let route = context.route.or_else(|| parts.extensions.get()).cloned();
    let checks = engine.read_checks(&mut parts, &context);
    call_checked(engine, ready, Request::from_parts(parts, body), route, checks)
}

/// Runs the checks of a request, and calls the ready service if it is allowed.
pub(crate) fn call_checked<T, B, R, S>(
    engine: &Arc<Engine<S>>,
    ready: impl ReadyService<T>,
    request: Request<B>,
    route: Option<Route>,
    checks: Result<RequestChecks, RequestRejection>,
) -> LimitedCall<T, Request<B>, S>
where
    T: Service<Request<B>, Response = Response<R>>,
    S: Store + Send + Sync + 'static,
{
    let grpc = GrpcCall::of(request.headers());
    let (state, event) = match checks {
        Ok(checks) => check_and_call(engine, ready, RequestChecks { route, ..checks }, request, grpc),
        Err(why) => {
            let event = engine.rejection_event(route, &why);
            (respond_locally(ready, rejection_response(&why, grpc)), Some(event))
        }
    };
    LimitedCall { response: ResponseFuture { state, event: None }, event }
}

fn check_and_call<T: Service<Q>, Q, S: Store + Send + Sync + 'static>(
    engine: &Arc<Engine<S>>,
    mut ready: impl ReadyService<T>,
    mut checks: RequestChecks,
    request: Q,
    grpc: Option<GrpcCall>,
) -> (FutureState<T, Q, S>, Option<DecisionEvent>) {
    // A request that may be delayed must be within `max_waiting` before anything is charged.
    let wait_guard = match checks.may_wait.then(|| WaitGuard::enter(engine)) {
        Some(None) => {
            let event = engine.observed(DecisionEvent::without_checks(checks.route.take(), Outcome::Shed));
            return (respond_locally(ready, overload_response(grpc)), Some(event));
        }
        wait_guard => wait_guard.flatten(),
    };
    if let Some(RequestVerdict { next, permits, event }) = engine.decide_now(&mut checks) {
        let state = match next {
            // The ready service is called in place, without a clone.
            NextStep::Allowed { delay: Duration::ZERO, headers } => {
                drop(wait_guard);
                FutureState::Inner { inner: ready.service_mut().call(request), headers, permits }
            }
            NextStep::Denied { response, is_closed } => {
                respond_locally(ready, denial_response(response, is_closed, grpc))
            }
            next => Box::new(WaitingRequest { ready: ready.into_service(), request, wait_guard, grpc })
                .next_state(next, permits),
        };
        return (state, Some(event));
    }
    let deciding = engine.clone().decide_later(checks);
    let waiting = Box::new(WaitingRequest { ready: ready.into_service(), request, wait_guard, grpc });
    (FutureState::Deciding { deciding, waiting: Some(waiting) }, None)
}

fn respond_locally<T: Service<Q>, Q, S>(
    ready: impl ReadyService<T>,
    response: LocalResponse,
) -> FutureState<T, Q, S> {
    // The ready service may hold a reservation for this request that other callers wait for.
    drop(ready.into_service());
    FutureState::Local { response: Some(response) }
}

/// A waiting request, with the service that is ready for it.
struct WaitingRequest<T, Q, S> {
    ready: T,
    request: Q,
    wait_guard: Option<WaitGuard<S>>,
    grpc: Option<GrpcCall>,
}

impl<T: Service<Q>, Q, S> WaitingRequest<T, Q, S> {
    /// The state after a decision.
    fn next_state(self: Box<Self>, next: NextStep, permits: Permits) -> FutureState<T, Q, S> {
        match next {
            NextStep::Allowed { delay: Duration::ZERO, headers } => self.call_service(headers, permits),
            NextStep::Allowed { delay, headers } => {
                FutureState::Delayed { sleep: Box::pin(sleep(delay)), waiting: Some(self), headers, permits }
            }
            NextStep::Denied { response, is_closed } => {
                FutureState::Local { response: Some(denial_response(response, is_closed, self.grpc)) }
            }
        }
    }

    /// Calls the service with the request.
    fn call_service(self, headers: ResponseHeaders, permits: Permits) -> FutureState<T, Q, S> {
        let WaitingRequest { mut ready, request, wait_guard, .. } = self;
        // The request no longer counts as waiting.
        drop(wait_guard);
        FutureState::Inner { inner: ready.call(request), headers, permits }
    }
}

pin_project! {
    /// The response future of a [`RateLimit`], which has an example.
    ///
    /// Dropping it ends its wait and releases its [permits](super::concurrency) and the service that was ready for
    /// it. Charges are not refunded.
    pub struct ResponseFuture<T, Q, S = Memory> where T: Service<Q> {
        #[pin]
        state: FutureState<T, Q, S>,
        // What the limits have decided since the call returned. Boxed, as it is rare.
        event: Option<Box<DecisionEvent>>,
    }
}

impl<T: Service<Q>, Q, S> ResponseFuture<T, Q, S> {
    /// What the limits decided, once, if they had to wait for their store and have decided since.
    pub fn take_event(self: Pin<&mut Self>) -> Option<DecisionEvent> {
        self.project().event.take().map(|event| *event)
    }

    /// The response sent instead of the service's, if it is known already, so that the caller need not await the
    /// future.
    ///
    /// ```
    /// # use std::convert::Infallible;
    /// # use http::{Request, Response};
    /// # use ratekeeper::tower::{RequestContext, RatekeeperLayer};
    /// # let service = tower::service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    /// # let limit = ratekeeper::Limit::fixed_window(1, std::time::Duration::from_secs(3600), ratekeeper::WindowAlign::FirstRequest)?;
    /// let layer = RatekeeperLayer::builder().per_client("per-client", limit).build()?;
    /// let context = || RequestContext { client: Some([192, 0, 2, 7].into()), ..RequestContext::default() };
    ///
    /// let mut allowed = layer.call_with(service, Request::new(()), context()).response;
    /// assert!(allowed.take_local_response().is_none());
    /// let mut denied = layer.call_with(service, Request::new(()), context()).response;
    /// assert_eq!(denied.take_local_response().map(|response| response.status()), Some(http::StatusCode::TOO_MANY_REQUESTS));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn take_local_response<R>(&mut self) -> Option<Response<ResponseBody<R>>>
    where
        T: Service<Q, Response = Response<R>>,
    {
        match &mut self.state {
            FutureState::Local { response } => response.take().map(LocalResponse::into_response),
            _ => None,
        }
    }
}

impl<T: Service<Q>, Q, S> fmt::Debug for ResponseFuture<T, Q, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            FutureState::Local { .. } => "answered locally",
            FutureState::Deciding { .. } => "being decided",
            FutureState::Delayed { .. } => "delayed",
            FutureState::Inner { .. } => "with the service",
            FutureState::Done => "done",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish()
    }
}

pin_project! {
    #[project = ProjectedState]
    enum FutureState<T, Q, S> where T: Service<Q> {
        Local { response: Option<LocalResponse> },
        // Boxed, so that futures that never wait stay small.
        Deciding { deciding: DecisionFuture, waiting: Option<Box<WaitingRequest<T, Q, S>>> },
        Delayed { sleep: Pin<Box<Sleep>>, waiting: Option<Box<WaitingRequest<T, Q, S>>>, headers: ResponseHeaders, permits: Permits },
        Inner { #[pin] inner: T::Future, headers: ResponseHeaders, permits: Permits },
        Done,
    }
}

impl<T, Q, S, R> Future for ResponseFuture<T, Q, S>
where
    T: Service<Q, Response = Response<R>>,
{
    type Output = Result<Response<ResponseBody<R>>, T::Error>;

    /// After completion it stays pending: neither the service's future nor the store is polled again.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let mut state = this.state;
        loop {
            let next = match state.as_mut().project() {
                ProjectedState::Local { response } => {
                    let response = response.take();
                    state.set(FutureState::Done);
                    return response
                        .map_or(Poll::Pending, |response| Poll::Ready(Ok(response.into_response())));
                }
                ProjectedState::Inner { inner, headers, permits } => {
                    let response = ready!(inner.poll(context));
                    let (headers, permits) = (std::mem::take(headers), std::mem::take(permits));
                    state.set(FutureState::Done);
                    return Poll::Ready(response.map(|mut response| {
                        add_headers(response.headers_mut(), headers);
                        response.map(|body| ResponseBody::inner(body, permits))
                    }));
                }
                ProjectedState::Deciding { deciding, waiting } => {
                    let RequestVerdict { next, permits, event } = ready!(deciding.as_mut().poll(context));
                    *this.event = Some(Box::new(event));
                    waiting.take().map(|waiting| waiting.next_state(next, permits))
                }
                ProjectedState::Delayed { sleep, waiting, headers, permits } => {
                    ready!(sleep.as_mut().poll(context));
                    waiting
                        .take()
                        .map(|waiting| waiting.call_service(std::mem::take(headers), std::mem::take(permits)))
                }
                ProjectedState::Done => return Poll::Pending,
            };
            state.set(next.unwrap_or(FutureState::Done));
        }
    }
}
