//! The service, and the future of its responses.

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

use super::body::ResponseBody;
use super::gate::{Gate, Next, Outcome, Question, Waiting};
use super::told::{GrpcCall, Notes, Told, busy, denied, not_asked, tell};
use crate::memory::Memory;
use crate::slots::Held as Slots;
use crate::store::Store;

/// A service behind limits. Made by a [`RateLimitLayer`](super::RateLimitLayer).
///
/// It is ready when the service behind it is, and the service that was ready is the one that is called, also if that is
/// after a wait. Where a request is denied, what the service had set aside for it is let go at once.
///
/// ```
/// use std::convert::Infallible;
/// use std::time::Duration;
/// use http::{Request, Response};
/// use tollgate::tower::{Peer, RateLimitLayer};
/// use tollgate::{Align, Limit};
/// use tower::{Layer, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let hello = |_: Request<()>| async { Ok::<_, Infallible>(Response::new("hello".to_owned())) };
/// let limit = Limit::fixed_window(1, Duration::from_secs(3600), Align::FirstRequest)?;
/// let service = RateLimitLayer::builder().per_client("per-client", limit).build()?.layer(service_fn(hello));
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
    /// Another service behind the same limits.
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
        let (mut parts, body) = request.into_parts();
        let grpc = GrpcCall::of(&parts.headers);
        let state = match self.gate.question(&mut parts) {
            Ok(question) => self.ask(question, Request::from_parts(parts, body), grpc),
            Err(why) => self.refuse(not_asked(&why, grpc)),
        };
        ResponseFuture { state }
    }
}

impl<T: Clone, S: Store + Send + Sync + 'static> RateLimit<T, S> {
    fn ask<Q>(&mut self, mut question: Question, request: Q, grpc: Option<GrpcCall>) -> State<T, Q, S>
    where
        T: Service<Q>,
    {
        // Whoever may have to wait needs a place for that before anything is taken.
        let place = match question.may_wait.then(|| Waiting::enter(&self.gate)) {
            Some(None) => {
                self.gate.observe_unasked(Outcome::Busy, question.subject.as_ref());
                return self.refuse(busy(grpc));
            }
            place => place.flatten(),
        };
        if let Some((next, slots)) = self.decide_now(&mut question) {
            question.leave();
            return match next {
                // The service that is ready stays where it is: it need not be cloned.
                Next::Allowed { delay: Duration::ZERO, notes } => {
                    drop(place);
                    State::Inner { inner: self.inner.call(request), notes, slots }
                }
                next => Held { ready: self.take_ready(), request, place, grpc }.after(next, slots),
            };
        }
        let gate = self.gate.clone();
        let deciding = Box::pin(async move { gate.admit(&mut question).await });
        let held = Held { ready: self.take_ready(), request, place, grpc };
        State::Deciding { deciding, held: Some(held) }
    }

    /// The decision, if the store does not keep anybody waiting, or is not even asked.
    fn decide_now(&self, question: &mut Question) -> Option<(Next, Slots)> {
        if !S::IS_IMMEDIATE && !question.is_empty() {
            return None;
        }
        match pin!(self.gate.admit(question)).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(next) => Some(next),
            Poll::Pending => None,
        }
    }

    /// The service that is ready. Its clone becomes ready for the next request.
    fn take_ready(&mut self) -> T {
        let clone = self.inner.clone();
        std::mem::replace(&mut self.inner, clone)
    }

    fn refuse<Q>(&mut self, told: Told) -> State<T, Q, S>
    where
        T: Service<Q>,
    {
        // It may have set aside something for this request, which others may wait for.
        drop(self.take_ready());
        State::Told { told: Some(told) }
    }
}

/// A request that waits, and the service that is ready for it.
struct Held<T, Q, S> {
    ready: T,
    request: Q,
    place: Option<Waiting<S>>,
    grpc: Option<GrpcCall>,
}

impl<T: Service<Q>, Q, S> Held<T, Q, S> {
    /// What follows from a decision.
    fn after(self, next: Next, slots: Slots) -> State<T, Q, S> {
        match next {
            Next::Allowed { delay: Duration::ZERO, notes } => self.go_on(notes, slots),
            Next::Allowed { delay, notes } => {
                State::Delayed { sleep: sleep(delay), held: Some(self), notes, slots }
            }
            Next::Denied { answer, is_closed } => {
                State::Told { told: Some(denied(&answer, is_closed, self.grpc)) }
            }
        }
    }

    /// Lets the request in.
    fn go_on(self, notes: Notes, slots: Slots) -> State<T, Q, S> {
        let Held { mut ready, request, place, .. } = self;
        // It waits no more.
        drop(place);
        State::Inner { inner: ready.call(request), notes, slots }
    }
}

pin_project! {
    /// The response of a [`RateLimit`], on whose page one is awaited.
    ///
    /// Whoever drops it gives back its place among those that wait, its [slots](super::slots), and the service that was
    /// ready for it. What was taken from the limits stays taken.
    pub struct ResponseFuture<T, Q, S = Memory> where T: Service<Q> {
        #[pin]
        state: State<T, Q, S>,
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
        Deciding { deciding: Deciding, held: Option<Held<T, Q, S>> },
        Delayed { #[pin] sleep: Sleep, held: Option<Held<T, Q, S>>, notes: Notes, slots: Slots },
        Inner { #[pin] inner: T::Future, notes: Notes, slots: Slots },
        Done,
    }
}

impl<T, Q, S, R> Future for ResponseFuture<T, Q, S>
where
    T: Service<Q, Response = Response<R>>,
{
    type Output = Result<Response<ResponseBody<R>>, T::Error>;

    /// Once it is done it stays pending: neither the service's future nor the store is asked again.
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
                    ready!(sleep.poll(context));
                    held.take().map(|held| held.go_on(std::mem::take(notes), std::mem::take(slots)))
                }
                Projected::Done => return Poll::Pending,
            };
            state.set(next.unwrap_or(State::Done));
        }
    }
}
