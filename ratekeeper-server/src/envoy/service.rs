//! The calls of the listener: the method that Envoy calls, health checks and reflection.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use ratekeeper::Store;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tonic::body::Body;
use tonic::server::NamedService;

use super::call_guard::CallGuard;
use super::connection::ConnectionAuth;
use super::error::EnvoyApiError;
use super::messages::RateLimitRequest;
use super::metrics::EnvoyMetrics;
use super::not_grpc::{is_grpc, reject};
use super::unary::{CallBody, failure, is_compressed, read_message, success};
use super::{EnvoySnapshot, decide};
use crate::runtime::current::Current;
use crate::runtime::metrics::CallOutcome;

/// The start of the paths of the rate limit service.
const RATE_LIMIT_SERVICE: &str = "/envoy.service.ratelimit.v3.RateLimitService/";
const SHOULD_RATE_LIMIT: &str = "ShouldRateLimit";

/// The methods of other services whose responses may never end.
const STREAMS: [&str; 2] = ["Watch", "ServerReflectionInfo"];

const GRPC_TIMEOUT: &str = "grpc-timeout";

/// Responds to the calls of all connections.
pub(super) struct Calls<S> {
    pub(super) current: Arc<Current<EnvoySnapshot<S>>>,
    /// The bound on rate limit decisions in flight.
    pub(super) guard: CallGuard,
    /// The bound on the bytes of all messages that are being received.
    pub(super) byte_permits: Semaphore,
    pub(super) other_services: Vec<OtherService>,
    /// How long a call may take until its response begins.
    pub(super) timeout: Duration,
}

impl<S: Store + Send + Sync + 'static> Calls<S> {
    /// Responds to a request. The head is read outside the future, which hyper moves several times, and parts that few
    /// calls need are boxed.
    pub(super) fn respond(
        self: Arc<Self>,
        request: Request<Incoming>,
        auth: &ConnectionAuth,
    ) -> impl Future<Output = Response<CallBody>> + Send + use<S> {
        let timeout_max = self.timeout;
        let client_timeout = client_timeout(request.headers());
        let call = self.route(request, auth);
        async move {
            let mut response = pin!(call.respond(&self));
            // Nearly all calls get their response at once, and need no timer.
            if let Poll::Ready(response) =
                poll_fn(|context| Poll::Ready(response.as_mut().poll(context))).await
            {
                return response;
            }
            let ended = timeout(client_timeout.unwrap_or(timeout_max).min(timeout_max), response).await;
            ended.unwrap_or_else(|_| failure(EnvoyApiError::TimedOut))
        }
    }

    fn route(self: &Arc<Self>, request: Request<Incoming>, auth: &ConnectionAuth) -> RoutedCall {
        if !is_grpc(&request) {
            let rejected =
                async { reject(request.into_body()).await.map(|body| CallBody::Other(Body::new(body))) };
            return RoutedCall::Other(Box::pin(rejected));
        }
        let Some(method) = request.uri().path().strip_prefix(RATE_LIMIT_SERVICE) else {
            let (calls, auth) = (self.clone(), auth.clone());
            let called = async move { calls.call_other(request, &auth).await.unwrap_or_else(failure) };
            return RoutedCall::Other(Box::pin(called));
        };
        let snapshot = self.current.load();
        let call = CountedCall { metrics: snapshot.metrics.clone(), outcome: CallOutcome::Error };
        let admitted = self.guard.admit(&snapshot.settings, request.headers(), auth);
        match admitted {
            Err(error) => RoutedCall::Rejected(error),
            Ok(_) if method != SHOULD_RATE_LIMIT => RoutedCall::Rejected(EnvoyApiError::UnknownMethod),
            Ok(_) if is_compressed(request.headers()) => RoutedCall::Rejected(EnvoyApiError::Compressed),
            Ok(permit) => RoutedCall::ShouldRateLimit(call, permit, request.into_body()),
        }
    }

    async fn should_rate_limit(
        &self,
        mut call: CountedCall,
        body: Incoming,
    ) -> Result<Response<CallBody>, EnvoyApiError> {
        let message: RateLimitRequest = read_message(body, &self.byte_permits).await?;
        // The message may arrive long after its head: it is decided by the limits of now.
        let snapshot = self.current.load();
        let decided = match S::IS_IMMEDIATE {
            true => ready_output(decide(&snapshot, &message)).ok_or(EnvoyApiError::StoreUnavailable)?,
            false => Box::pin(async move { decide(&snapshot, &message).await }).await,
        };
        let (response, outcome) = decided?;
        call.outcome = outcome;
        Ok(success(&response))
    }

    async fn call_other(
        &self,
        request: Request<Incoming>,
        auth: &ConnectionAuth,
    ) -> Result<Response<CallBody>, EnvoyApiError> {
        let mut parts = request.uri().path().split('/').skip(1);
        let (name, method) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let service = self.other_services.iter().find(|service| service.name == name);
        let service = service.ok_or(EnvoyApiError::UnknownMethod)?;
        let is_stream = STREAMS.contains(&method);
        let guard = if is_stream { &service.streams } else { &service.calls };
        let permit = guard.admit(&self.current.load().settings, request.headers(), auth)?;
        let response = (service.call)(request).await;
        Ok(response.map(|body| match is_stream {
            true => CallBody::Stream { body, _permit: permit },
            false => CallBody::Other(body),
        }))
    }
}

/// A request whose head has been read, by what responds to it.
enum RoutedCall {
    /// A rate limit decision, whose message follows.
    ShouldRateLimit(CountedCall, OwnedSemaphorePermit, Incoming),
    Rejected(EnvoyApiError),
    Other(Pin<Box<dyn Future<Output = Response<CallBody>> + Send>>),
}

impl RoutedCall {
    async fn respond<S: Store + Send + Sync + 'static>(self, calls: &Calls<S>) -> Response<CallBody> {
        match self {
            RoutedCall::ShouldRateLimit(call, _permit, body) => {
                calls.should_rate_limit(call, body).await.unwrap_or_else(failure)
            }
            RoutedCall::Rejected(error) => failure(error),
            RoutedCall::Other(response) => response.await,
        }
    }
}

/// The output of a future that is ready at the first poll.
fn ready_output<F: Future>(future: F) -> Option<F::Output> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// The timeout that the client sends with a call: at most eight digits and a unit.
fn client_timeout(headers: &HeaderMap) -> Option<Duration> {
    let (unit, digits) = headers.get(GRPC_TIMEOUT)?.as_bytes().split_last()?;
    let number: u64 = str::from_utf8(digits).ok().filter(|digits| digits.len() <= 8)?.parse().ok()?;
    match unit {
        b'H' => Some(Duration::from_secs(number * 3600)),
        b'M' => Some(Duration::from_secs(number * 60)),
        b'S' => Some(Duration::from_secs(number)),
        b'm' => Some(Duration::from_millis(number)),
        b'u' => Some(Duration::from_micros(number)),
        b'n' => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

/// A rate limit decision. It is counted when it ends: also one that times out, or that the client cancels.
struct CountedCall {
    metrics: Arc<EnvoyMetrics>,
    outcome: CallOutcome,
}

impl Drop for CountedCall {
    fn drop(&mut self) {
        self.metrics.count(self.outcome);
    }
}

type CallFuture = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// A service other than rate limiting: health or reflection.
pub(super) struct OtherService {
    name: &'static str,
    calls: CallGuard,
    /// The bound on the streams that may never end.
    streams: CallGuard,
    call: Box<dyn Fn(Request<Incoming>) -> CallFuture + Send + Sync>,
}

impl OtherService {
    pub(super) fn new<T>(service: T, guard: impl Fn() -> CallGuard) -> OtherService
    where
        T: NamedService + Clone + Send + Sync + 'static,
        T: tower_service::Service<Request<Incoming>, Response = Response<Body>, Error = Infallible>,
        T::Future: Send + 'static,
    {
        let call = move |request| -> CallFuture {
            let called = service.clone().call(request);
            Box::pin(async {
                match called.await {
                    Ok(response) => response,
                }
            })
        };
        OtherService { name: T::NAME, calls: guard(), streams: guard(), call: Box::new(call) }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn timeout_of_the_client_is_read() {
        let read = |text: &str| {
            client_timeout(&HeaderMap::from_iter([(
                http::HeaderName::from_static(GRPC_TIMEOUT),
                HeaderValue::from_str(text).unwrap(),
            )]))
        };
        for (text, expected) in [
            ("2H", Some(Duration::from_secs(7200))),
            ("3M", Some(Duration::from_secs(180))),
            ("4S", Some(Duration::from_secs(4))),
            ("20m", Some(Duration::from_millis(20))),
            ("5u", Some(Duration::from_micros(5))),
            ("99999999n", Some(Duration::from_nanos(99_999_999))),
            ("100000000n", None),
            ("20", None),
            ("20s", None),
            ("m", None),
            ("", None),
            ("-1m", None),
        ] {
            assert_eq!(read(text), expected, "{text}");
        }
        assert_eq!(client_timeout(&HeaderMap::new()), None);
    }
}
