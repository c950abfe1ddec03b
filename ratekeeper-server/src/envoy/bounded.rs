//! Calls in flight: authenticated, and bounded in number.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use super::Source;
use super::connection::Known;
use super::counts::{Counts, Outcome};
use super::refused::Refused;
use crate::guard::has_token;

/// The kind of call.
#[derive(Clone, Debug)]
pub(super) enum Calls {
    /// Rate limit decisions. The semaphore bounds the bytes of all messages that are being received.
    Limits(Arc<Semaphore>),
    /// Health checks. Load balancers have no token, so none is required.
    Health,
    /// Reflection.
    Reflection,
}

/// A service that rejects calls without the token, and calls beyond its bound. A call holds its permit from its head
/// to its response, so that slow senders are bounded as well; where the response is a stream that may never end, it
/// holds the permit to the end of the stream.
#[derive(Debug)]
pub(super) struct Bounded<T, P> {
    inner: T,
    source: Arc<P>,
    calls: Calls,
    room: Arc<Semaphore>,
}

impl<T, P> Bounded<T, P> {
    pub(super) fn new(inner: T, source: Arc<P>, calls: Calls, calls_max: usize) -> Bounded<T, P> {
        Bounded { inner, source, calls, room: Arc::new(Semaphore::new(calls_max)) }
    }
}

impl<T: Clone, P> Clone for Bounded<T, P> {
    fn clone(&self) -> Bounded<T, P> {
        Bounded {
            inner: self.inner.clone(),
            source: self.source.clone(),
            calls: self.calls.clone(),
            room: self.room.clone(),
        }
    }
}

impl<T: NamedService, P> NamedService for Bounded<T, P> {
    const NAME: &'static str = T::NAME;
}

impl<T, P: Source> Service<Request<Body>> for Bounded<T, P>
where
    T: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    T::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let snapshot = self.source.snapshot();
        let unanswered = Unanswered(matches!(self.calls, Calls::Limits(_)).then_some(snapshot.counts));
        let refuse = |refused: Refused| -> Self::Future {
            let refused = Status::from(refused).into_http();
            Box::pin(async { Ok(refused) })
        };
        if let Some(token) = &snapshot.options.token
            && !matches!(self.calls, Calls::Health)
        {
            if !has_token(request.headers(), token) {
                return refuse(Refused::NoToken);
            }
            if let Some(known) = request.extensions().get::<Known>() {
                known.learn();
            }
        }
        let Ok(place) = self.room.clone().try_acquire_owned() else { return refuse(Refused::Busy) };
        let request = match &self.calls {
            Calls::Limits(room) => {
                let room = room.clone();
                request.map(|body| Body::new(Metered { body, room, taken: None }))
            }
            Calls::Health | Calls::Reflection => request,
        };
        let lasts = !matches!(self.calls, Calls::Limits(_));
        let answering = self.inner.call(request);
        Box::pin(async move {
            let answered = answering.await?;
            if answered.headers().get("grpc-status").is_none_or(|status| status == "0") {
                unanswered.tell_answered();
            }
            Ok(match lasts {
                true => answered.map(|body| Body::new(Placed { body, _place: place })),
                false => answered,
            })
        })
    }
}

/// Counts a call as an error unless it is answered: a call can be rejected in many places, and it is dropped without
/// an answer if it times out or the client cancels it.
struct Unanswered(Option<Arc<Counts>>);

impl Unanswered {
    fn tell_answered(mut self) {
        self.0 = None;
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(counts) = &self.0 {
            counts.count(Outcome::Error);
        }
    }
}

/// A request body that takes permits for its bytes, and fails if there are none left.
struct Metered {
    body: Body,
    room: Arc<Semaphore>,
    taken: Option<OwnedSemaphorePermit>,
}

impl http_body::Body for Metered {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        if let Some(Ok(frame)) = &frame
            && let Some(bytes) = frame.data_ref()
        {
            let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            let Ok(more) = this.room.clone().try_acquire_many_owned(length) else {
                return Poll::Ready(Some(Err(Refused::Busy.into())));
            };
            match &mut this.taken {
                Some(taken) => taken.merge(more),
                None => this.taken = Some(more),
            }
        }
        Poll::Ready(frame)
    }
}

/// A response body that holds the permit of its call.
struct Placed {
    body: Body,
    _place: OwnedSemaphorePermit,
}

impl http_body::Body for Placed {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}
