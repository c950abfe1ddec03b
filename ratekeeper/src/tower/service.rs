//! The tower service and its response future.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};
use tower_service::Service;

use super::RequestContext;
use super::body::ResponseBody;
use super::engine::{Gate, Next, Outcome, Question, Waiting};
use super::response::{GrpcCall, Notes, Told, busy, denied, not_asked, tell};
use crate::memory::Memory;
use crate::slots::Held as Slots;
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
    pub(crate) gate: Arc<Gate<S>>,
}

impl<T: Clone, S> Clone for RateLimit<T, S> {
    /// Returns another service with the same limits.
    fn clone(&self) -> Self {
        RateLimit { inner: self.inner.clone(), gate: self.gate.clone() }
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
        call(&self.gate, &mut self.inner, request, RequestContext::default())
    }
}

/// A service that is ready for one request.
pub(crate) trait Ready<T> {
    /// Borrows the service for an immediate call.
    fn stay(&mut self) -> &mut T;
    /// Takes the service, to keep it with a waiting request or to drop it.
    fn take(self) -> T;
}

impl<T: Clone> Ready<T> for &mut T {
    fn stay(&mut self) -> &mut T {
        self
    }

    /// Leaves a clone for the next request, which must be polled ready first.
    fn take(self) -> T {
        let clone = self.clone();
        std::mem::replace(self, clone)
    }
}

/// A service for a single request.
pub(crate) struct Once<T>(pub(crate) T);

impl<T> Ready<T> for Once<T> {
    fn stay(&mut self) -> &mut T {
        &mut self.0
    }

    fn take(self) -> T {
        self.0
    }
}

/// Checks a request, and calls the ready service if it is allowed.
pub(crate) fn call<T, B, R, S>(
    gate: &Arc<Gate<S>>,
    ready: impl Ready<T>,
    request: Request<B>,
    about: RequestContext<'_>,
) -> ResponseFuture<T, Request<B>, S>
where
    T: Service<Request<B>, Response = Response<R>>,
    S: Store + Send + Sync + 'static,
{
    let (mut parts, body) = request.into_parts();
    let grpc = GrpcCall::of(&parts.headers);
    let state = match gate.question(&mut parts, about) {
        Ok(question) => ask(gate, ready, question, Request::from_parts(parts, body), grpc),
        Err(why) => refuse(ready, not_asked(&why, grpc)),
    };
    ResponseFuture { state }
}

fn ask<T: Service<Q>, Q, S: Store + Send + Sync + 'static>(
    gate: &Arc<Gate<S>>,
    mut ready: impl Ready<T>,
    mut question: Question,
    request: Q,
    grpc: Option<GrpcCall>,
) -> State<T, Q, S> {
    // A request that may be delayed must be within `max_waiting` before anything is charged.
    let place = match question.may_wait.then(|| Waiting::enter(gate)) {
        Some(None) => {
            gate.observe_unasked(Outcome::Busy, question.subject.as_ref());
            return refuse(ready, busy(grpc));
        }
        place => place.flatten(),
    };
    if let Some((next, slots)) = decide_now(gate, &mut question) {
        question.leave();
        return match next {
            // The ready service is called in place, without a clone.
            Next::Allowed { delay: Duration::ZERO, notes } => {
                drop(place);
                State::Inner { inner: ready.stay().call(request), notes, slots }
            }
            Next::Denied { answer, is_closed } => refuse(ready, denied(answer, is_closed, grpc)),
            next => Box::new(Held { ready: ready.take(), request, place, grpc }).after(next, slots),
        };
    }
    let gate = gate.clone();
    let deciding = Box::pin(async move { gate.admit(&mut question).await });
    let held = Box::new(Held { ready: ready.take(), request, place, grpc });
    State::Deciding { deciding, held: Some(held) }
}

/// The decision, if the store answers immediately or is not needed.
fn decide_now<S: Store>(gate: &Gate<S>, question: &mut Question) -> Option<(Next, Slots)> {
    if !S::IS_IMMEDIATE && !question.is_empty() {
        return None;
    }
    match pin!(gate.admit(question)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(next) => Some(next),
        Poll::Pending => None,
    }
}

fn refuse<T: Service<Q>, Q, S>(ready: impl Ready<T>, told: Told) -> State<T, Q, S> {
    // The ready service may hold a reservation for this request that other callers wait for.
    drop(ready.take());
    State::Told { told: Some(told) }
}

/// A waiting request, with the service that is ready for it.
struct Held<T, Q, S> {
    ready: T,
    request: Q,
    place: Option<Waiting<S>>,
    grpc: Option<GrpcCall>,
}

impl<T: Service<Q>, Q, S> Held<T, Q, S> {
    /// The state after a decision.
    fn after(self: Box<Self>, next: Next, slots: Slots) -> State<T, Q, S> {
        match next {
            Next::Allowed { delay: Duration::ZERO, notes } => self.go_on(notes, slots),
            Next::Allowed { delay, notes } => {
                State::Delayed { sleep: Box::pin(sleep(delay)), held: Some(self), notes, slots }
            }
            Next::Denied { answer, is_closed } => {
                State::Told { told: Some(denied(answer, is_closed, self.grpc)) }
            }
        }
    }

    /// Calls the service with the request.
    fn go_on(self, notes: Notes, slots: Slots) -> State<T, Q, S> {
        let Held { mut ready, request, place, .. } = self;
        // The request no longer counts as waiting.
        drop(place);
        State::Inner { inner: ready.call(request), notes, slots }
    }
}

pin_project! {
    /// The response future of a [`RateLimit`], which has an example.
    ///
    /// Dropping it ends its wait and releases its [permits](super::slots) and the service that was ready for it.
    /// Charges are not refunded.
    pub struct ResponseFuture<T, Q, S = Memory> where T: Service<Q> {
        #[pin]
        state: State<T, Q, S>,
    }
}

impl<T: Service<Q>, Q, S> ResponseFuture<T, Q, S> {
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
    /// let about = || RequestContext { client: Some([192, 0, 2, 7].into()), ..RequestContext::default() };
    ///
    /// let mut allowed = layer.call_with(service, Request::new(()), about());
    /// assert!(allowed.told().is_none());
    /// let mut denied = layer.call_with(service, Request::new(()), about());
    /// assert_eq!(denied.told().map(|response| response.status()), Some(http::StatusCode::TOO_MANY_REQUESTS));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn told<R>(&mut self) -> Option<Response<ResponseBody<R>>>
    where
        T: Service<Q, Response = Response<R>>,
    {
        match &mut self.state {
            State::Told { told } => told.take().map(Told::into_response),
            _ => None,
        }
    }
}

impl<T: Service<Q>, Q, S> fmt::Debug for ResponseFuture<T, Q, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Told { .. } => "refused",
            State::Deciding { .. } => "being decided",
            State::Delayed { .. } => "delayed",
            State::Inner { .. } => "with the service",
            State::Done => "done",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish()
    }
}

type Deciding = Pin<Box<dyn Future<Output = (Next, Slots)> + Send>>;

pin_project! {
    #[project = Projected]
    enum State<T, Q, S> where T: Service<Q> {
        Told { told: Option<Told> },
        // Boxed, so that futures that never wait stay small.
        Deciding { deciding: Deciding, held: Option<Box<Held<T, Q, S>>> },
        Delayed { sleep: Pin<Box<Sleep>>, held: Option<Box<Held<T, Q, S>>>, notes: Notes, slots: Slots },
        Inner { #[pin] inner: T::Future, notes: Notes, slots: Slots },
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
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                Projected::Told { told } => {
                    let told = told.take();
                    state.set(State::Done);
                    return told.map_or(Poll::Pending, |told| Poll::Ready(Ok(told.into_response())));
                }
                Projected::Inner { inner, notes, slots } => {
                    let response = ready!(inner.poll(context));
                    let (notes, slots) = (std::mem::take(notes), std::mem::take(slots));
                    state.set(State::Done);
                    return Poll::Ready(response.map(|mut response| {
                        tell(response.headers_mut(), notes);
                        response.map(|body| ResponseBody::inner(body, slots))
                    }));
                }
                Projected::Deciding { deciding, held } => {
                    let (next, slots) = ready!(deciding.as_mut().poll(context));
                    held.take().map(|held| held.after(next, slots))
                }
                Projected::Delayed { sleep, held, notes, slots } => {
                    ready!(sleep.as_mut().poll(context));
                    held.take().map(|held| held.go_on(std::mem::take(notes), std::mem::take(slots)))
                }
                Projected::Done => return Poll::Pending,
            };
            state.set(next.unwrap_or(State::Done));
        }
    }
}
