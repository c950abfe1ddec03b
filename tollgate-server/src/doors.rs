//! The doors beside the gateway, at the same limits: each is a stranger to the others, and all of them see a new
//! configuration from the next request on.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, Request};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tollgate::tower::{Chosen, RateLimitLayer};
use tollgate_config::{Config, Secret};

use crate::admin::Watched;
use crate::gateway::{Gateway, Shared, StartError};
use crate::limits::Stored;
use crate::metrics::Exposition;
use crate::problem::problem;
use crate::sockets::Sockets;
use crate::{check, resp, rls};

/// What a configuration says of the doors.
#[derive(Debug)]
pub(crate) struct DoorSettings {
    check: Arc<check::Settings>,
    domains: Arc<rls::Domains>,
    rls: Arc<rls::Options>,
    /// The same asked as JSON at the HTTP door, by what is allowed there.
    rls_json: Arc<rls::Options>,
    resp_token: Option<Secret>,
    resp_connections: usize,
}

impl DoorSettings {
    pub(crate) fn of(config: &Config) -> DoorSettings {
        let (http, grpc) = (config.doors.http.as_ref(), config.doors.grpc.as_ref());
        let resp = config.doors.resp.as_ref();
        DoorSettings {
            check: Arc::new(check::Settings {
                limits: config.named_limits,
                token: http.and_then(|http| http.door.token.clone()),
                refunds: http.is_some_and(|http| http.refunds),
                resets: http.is_some_and(|http| http.resets),
                trusted: config.client.clone(),
                deny_status: http.map_or(403, |http| http.authorize.deny_status),
                authorize_limits: http.map(|http| Chosen(http.authorize.limits.as_slice().into())),
            }),
            domains: Arc::new(rls::Domains::new(config.domains.clone())),
            rls: Arc::new(rls::Options {
                token: grpc.and_then(|grpc| grpc.door.token.clone()),
                refunds: grpc.is_some_and(|grpc| grpc.refunds),
                headers: grpc.is_some_and(|grpc| grpc.headers),
                ..rls::Options::default()
            }),
            rls_json: Arc::new(rls::Options {
                refunds: http.is_some_and(|http| http.refunds),
                ..rls::Options::default()
            }),
            resp_token: resp.and_then(|resp| resp.door.token.clone()),
            resp_connections: resp.map_or(0, |resp| resp.max_connections),
        }
    }
}

/// What is behind every door: the limits of the configuration that counts now.
struct Behind<S: Stored> {
    shared: Arc<Shared<S>>,
    records: S::Records,
    counts: Arc<Counts>,
}

/// What has happened at the doors.
#[derive(Debug, Default)]
struct Counts {
    check: check::Counts,
    rls: Arc<rls::Counts>,
    resp: Arc<resp::Counts>,
}

impl<S: Stored> Behind<S> {
    fn layer(&self) -> Option<RateLimitLayer<S>> {
        self.shared.state.load().limits.clone()
    }
}

fn rls_snapshot<S>(shared: &Shared<S>, counts: &Counts) -> rls::Snapshot<S> {
    let state = shared.state.load();
    rls::Snapshot {
        layer: state.limits.clone(),
        domains: state.doors.domains.clone(),
        options: state.doors.rls.clone(),
        counts: counts.rls.clone(),
    }
}

impl<S: Stored> check::Source for Behind<S> {
    type Store = S;
    type Records = S::Records;

    fn snapshot(&self) -> check::Snapshot<S> {
        let state = self.shared.state.load();
        check::Snapshot { layer: state.limits.clone(), settings: state.doors.check.clone() }
    }

    fn records(&self) -> &S::Records {
        &self.records
    }

    fn counts(&self) -> &check::Counts {
        &self.counts.check
    }

    fn other_routes(&self) -> Router {
        let (shared, counts) = (self.shared.clone(), self.counts.clone());
        let json = async move |request: Request| {
            let body = match in_time(request).await {
                Ok(body) => body,
                Err(response) => return response,
            };
            let mut snapshot = rls_snapshot(&shared, &counts);
            snapshot.options = shared.state.load().doors.rls_json.clone();
            let (status, text) = rls::json(&body, &snapshot).await;
            (status, [(CONTENT_TYPE, "application/json")], text).into_response()
        };
        Router::new().route("/json", post(json)).layer(DefaultBodyLimit::max(rls::MESSAGE_BYTES_MAX))
    }
}

/// The body of a request, if it does not take longer than other bodies may.
async fn in_time(request: Request) -> Result<Bytes, Response> {
    match timeout(check::BODY_TIMEOUT, Bytes::from_request(request, &())).await {
        Ok(body) => body.map_err(IntoResponse::into_response),
        Err(_) => Err(problem(StatusCode::REQUEST_TIMEOUT, "the body took too long")),
    }
}

impl<S: Stored> rls::Source for Behind<S> {
    type Store = S;

    fn snapshot(&self) -> rls::Snapshot<S> {
        rls_snapshot(&self.shared, &self.counts)
    }
}

impl<S: Stored> resp::Behind for Behind<S> {
    type Store = S;

    fn limits(&self) -> Option<RateLimitLayer<S>> {
        self.layer()
    }

    fn named_limits(&self) -> usize {
        self.shared.state.load().doors.check.limits
    }

    fn token(&self) -> Option<Secret> {
        self.shared.state.load().doors.resp_token.clone()
    }

    fn max_connections(&self) -> usize {
        self.shared.state.load().doors.resp_connections
    }
}

/// Doors that are open.
pub struct Doors {
    /// They have threads of their own, as many as there are cores.
    runtime: Option<Runtime>,
    closing: watch::Sender<bool>,
    open: JoinSet<()>,
    addresses: Vec<(&'static str, SocketAddr)>,
    counts: Arc<Counts>,
}

impl fmt::Debug for Doors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doors").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl Doors {
    /// Opens the doors of a configuration, at the limits of the gateway that runs by it.
    ///
    /// # Errors
    /// If an address cannot be listened on, or a thread cannot be started.
    pub fn open<S: Stored>(
        config: &Config,
        sockets: &mut Sockets,
        gateway: &Gateway<S>,
    ) -> Result<Doors, StartError> {
        let (closing, closes) = watch::channel(false);
        let counts = Arc::<Counts>::default();
        let mut doors = Doors { runtime: None, closing, open: JoinSet::new(), addresses: Vec::new(), counts };
        let shared = gateway.shared().clone();
        let Some(layer) = shared.state.load().limits.clone().filter(|_| !config.doors.are_none()) else {
            return Ok(doors);
        };
        let records = S::records(layer.limiter());
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("door").build();
        let runtime = runtime.map_err(StartError::Thread)?;
        let handle = runtime.handle().clone();
        // Before anything can go wrong: a runtime that is simply dropped here would wait for its threads, and panic.
        doors.runtime = Some(runtime);
        let behind = Arc::new(Behind { shared, records, counts: doors.counts.clone() });
        let _entered = handle.enter();
        let mut listen =
            |address| sockets.listen(address).map_err(|error| StartError::Listen(address, error));
        let unable = |address| move |error: io::Error| StartError::Listen(address, error);
        if let Some(http) = &config.doors.http {
            let at = http.door.listen;
            let (address, serving) =
                check::listen(listen(at)?, behind.clone(), closes.clone()).map_err(unable(at))?;
            doors.enter("http", address, async move { ended("http", serving.await) });
        }
        if let Some(grpc) = &config.doors.grpc {
            let at = grpc.door.listen;
            let (address, serving) =
                rls::listen(listen(at)?, behind.clone(), rls::Settings::default(), closes.clone())
                    .map_err(unable(at))?;
            doors.enter("grpc", address, async move { ended("grpc", serving.await) });
        }
        if let Some(resp) = &config.doors.resp {
            let at = resp.door.listen;
            let door = resp::Door {
                behind,
                counts: doors.counts.resp.clone(),
                patience: resp::Patience::default(),
                draining: closes,
            };
            let (address, serving) = resp::listen(listen(at)?, door).map_err(unable(at))?;
            doors.enter("resp", address, serving);
        }
        Ok(doors)
    }

    /// On the runtime that was entered.
    fn enter(
        &mut self,
        name: &'static str,
        address: SocketAddr,
        serving: impl Future<Output = ()> + Send + 'static,
    ) {
        self.open.spawn(serving);
        self.addresses.push((name, address));
    }

    /// Where they are, by the names that they have in the file.
    pub fn addresses(&self) -> &[(&'static str, SocketAddr)] {
        &self.addresses
    }

    /// What the admin listener asks: what it asks of the gateway, with what has happened at the doors.
    pub fn watched(&self, gateway: Arc<dyn Watched>) -> Arc<dyn Watched> {
        Arc::new(WithDoors { gateway, counts: (!self.addresses.is_empty()).then(|| self.counts.clone()) })
    }

    /// Closes them: what is under way is answered, if that does not take longer than this.
    pub async fn close(mut self, patience: Duration) {
        self.closing.send_replace(true);
        let _ = timeout(patience, async { while self.open.join_next().await.is_some() {} }).await;
    }
}

impl Drop for Doors {
    fn drop(&mut self) {
        // Nobody may wait for a thread where others wait for this one.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn ended(door: &str, how: io::Result<()>) {
    if let Err(error) = how {
        tracing::error!(door, %error, "a door has closed by itself");
    }
}

/// A gateway and the doors beside it.
struct WithDoors {
    gateway: Arc<dyn Watched>,
    /// None if there are no doors.
    counts: Option<Arc<Counts>>,
}

impl Watched for WithDoors {
    fn metrics(&self) -> String {
        let mut text = self.gateway.metrics();
        if let Some(counts) = &self.counts {
            let mut out = Exposition::default();
            counts.check.write(&mut out);
            counts.rls.write(&mut out);
            counts.resp.write(&mut out);
            text.push_str(&out.into_text());
        }
        text
    }

    fn is_ready(&self) -> bool {
        self.gateway.is_ready()
    }

    fn token(&self) -> Option<Secret> {
        self.gateway.token()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use axum::body::Body;
    use http_body::Frame;

    use super::*;

    /// A body that never comes.
    struct Never;

    impl http_body::Body for Never {
        type Data = Bytes;
        type Error = io::Error;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
            Poll::Pending
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_a_body_that_never_comes() {
        let read = timeout(Duration::from_secs(60), in_time(Request::new(Body::new(Never)))).await;
        let status = read.map(|read| read.map_err(|refused| refused.status()));
        assert_eq!(status, Ok(Err(StatusCode::REQUEST_TIMEOUT)));
        let read = in_time(Request::new(Body::from("{}"))).await;
        assert_eq!(read.unwrap_or_default(), "{}");
    }
}
