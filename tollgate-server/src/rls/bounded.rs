//! Calls under way: so many at once.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use super::counts::{Counts, Outcome};
use super::refused::Refused;

/// A service that refuses calls for which there is no room. A call has its place from its head until its answer, so that
/// what those send who are slow is bounded, too.
#[derive(Clone, Debug)]
pub(super) struct Bounded<T> {
    inner: T,
    room: Arc<Semaphore>,
    counts: Arc<Counts>,
}

impl<T> Bounded<T> {
    pub(super) fn new(inner: T, calls_max: usize, counts: Arc<Counts>) -> Bounded<T> {
        Bounded { inner, room: Arc::new(Semaphore::new(calls_max)), counts }
    }
}

impl<T: NamedService> NamedService for Bounded<T> {
    const NAME: &'static str = T::NAME;
}

impl<T> Service<Request<Body>> for Bounded<T>
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
        let Ok(place) = self.room.clone().try_acquire_owned() else {
            self.counts.count(Outcome::Error);
            let refused = Status::from(Refused::Busy).into_http();
            return Box::pin(async { Ok(refused) });
        };
        let answering = self.inner.call(request);
        Box::pin(async move {
            let answered = answering.await;
            drop(place);
            answered
        })
    }
}
