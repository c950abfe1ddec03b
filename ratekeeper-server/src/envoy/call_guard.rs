//! Calls in flight: authenticated, and bounded in number.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use ratekeeper::Store;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use super::EnvoySnapshot;
use super::connection::ConnectionAuth;
use super::error::EnvoyApiError;
use super::metrics::EnvoyMetrics;
use crate::runtime::current::Current;
use crate::runtime::guard::has_token;
use crate::runtime::metrics::CallOutcome;

/// The kind of call.
#[derive(Clone, Debug)]
pub(super) enum CallKind {
    /// Rate limit decisions. The semaphore bounds the bytes of all messages that are being received.
    RateLimit(Arc<Semaphore>),
    /// Health checks. Load balancers have no token, so none is required.
    Health,
    /// Reflection.
    Reflection,
}

/// A service that rejects calls without the token, and calls beyond its bound. A call holds its permit from its head
/// to its response, so that slow senders are bounded as well; where the response is a stream that may never end, it
/// holds the permit to the end of the stream.
#[derive(Debug)]
pub(super) struct CallGuard<T, S> {
    inner: T,
    current: Arc<Current<EnvoySnapshot<S>>>,
    kind: CallKind,
    permits: Arc<Semaphore>,
}

impl<T, S> CallGuard<T, S> {
    pub(super) fn new(
        inner: T,
        current: Arc<Current<EnvoySnapshot<S>>>,
        kind: CallKind,
        calls_max: usize,
    ) -> CallGuard<T, S> {
        CallGuard { inner, current, kind, permits: Arc::new(Semaphore::new(calls_max)) }
    }
}

impl<T: Clone, S> Clone for CallGuard<T, S> {
    fn clone(&self) -> CallGuard<T, S> {
        CallGuard {
            inner: self.inner.clone(),
            current: self.current.clone(),
            kind: self.kind.clone(),
            permits: self.permits.clone(),
        }
    }
}

impl<T: NamedService, S> NamedService for CallGuard<T, S> {
    const NAME: &'static str = T::NAME;
}

impl<T, S: Store + Send + Sync + 'static> Service<Request<Body>> for CallGuard<T, S>
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
        let snapshot = self.current.load();
        let error_on_drop =
            ErrorOnDrop(matches!(self.kind, CallKind::RateLimit(_)).then(|| snapshot.metrics.clone()));
        let reject = |error: EnvoyApiError| -> Self::Future {
            let response = Status::from(error).into_http();
            Box::pin(async { Ok(response) })
        };
        if let Some(token) = &snapshot.settings.token
            && !matches!(self.kind, CallKind::Health)
        {
            if !has_token(request.headers(), token) {
                return reject(EnvoyApiError::Unauthenticated);
            }
            if let Some(auth) = request.extensions().get::<ConnectionAuth>() {
                auth.set_authenticated();
            }
        }
        let Ok(permit) = self.permits.clone().try_acquire_owned() else {
            return reject(EnvoyApiError::Overloaded);
        };
        let request = match &self.kind {
            CallKind::RateLimit(byte_permits) => {
                let permits = byte_permits.clone();
                request.map(|body| Body::new(MeteredBody { body, permits, held: None }))
            }
            CallKind::Health | CallKind::Reflection => request,
        };
        let is_stream = !matches!(self.kind, CallKind::RateLimit(_));
        let call = self.inner.call(request);
        Box::pin(async move {
            let response = call.await?;
            if response.headers().get("grpc-status").is_none_or(|status| status == "0") {
                error_on_drop.disarm();
            }
            Ok(match is_stream {
                true => response.map(|body| Body::new(PermitBody { body, _permit: permit })),
                false => response,
            })
        })
    }
}

/// Counts a call as an error unless it is answered: a call can be rejected in many places, and it is dropped without
/// an answer if it times out or the client cancels it.
struct ErrorOnDrop(Option<Arc<EnvoyMetrics>>);

impl ErrorOnDrop {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for ErrorOnDrop {
    fn drop(&mut self) {
        if let Some(metrics) = &self.0 {
            metrics.count(CallOutcome::Error);
        }
    }
}

/// A request body that takes permits for its bytes, and fails if there are none left.
struct MeteredBody {
    body: Body,
    permits: Arc<Semaphore>,
    held: Option<OwnedSemaphorePermit>,
}

impl http_body::Body for MeteredBody {
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
            let Ok(more) = this.permits.clone().try_acquire_many_owned(length) else {
                return Poll::Ready(Some(Err(EnvoyApiError::Overloaded.into())));
            };
            match &mut this.held {
                Some(held) => held.merge(more),
                None => this.held = Some(more),
            }
        }
        Poll::Ready(frame)
    }
}

/// A response body that holds the permit of its call.
struct PermitBody {
    body: Body,
    _permit: OwnedSemaphorePermit,
}

impl http_body::Body for PermitBody {
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
