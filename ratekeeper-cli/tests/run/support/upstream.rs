//! An upstream of the gateway.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use ratekeeper_server::Sockets;
use testbed::wait_until;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

/// A server that answers `hello`, or the header `X-Version` if the request has one. `/hold` waits until released,
/// `/large` returns a long body, and `/echo` returns the request's body.
pub(crate) struct Upstream {
    address: SocketAddr,
    /// A separate runtime, so that killing it also ends its tasks.
    runtime: Option<Runtime>,
    state: Arc<State>,
}

struct State {
    held: Semaphore,
    waiting: AtomicUsize,
    requests: AtomicUsize,
}

const LARGE_BYTES: usize = 256 << 10;

impl Upstream {
    pub(crate) async fn start() -> Upstream {
        let state = Arc::new(State {
            held: Semaphore::new(0),
            waiting: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
        });
        let mut upstream = Upstream { address: ([127, 0, 0, 1], 0).into(), runtime: None, state };
        upstream.restart().await;
        upstream
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes all connections; the port is closed shortly after.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Restarts on the same port.
    pub(crate) async fn restart(&mut self) {
        self.kill();
        let mut socket = None;
        wait_until(|| {
            // With an accept queue long enough for concurrent connections.
            socket = Sockets::default().listen(self.address).ok();
            socket.is_some()
        })
        .await;
        let socket = socket.unwrap();
        self.address = socket.local_addr().unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let state = self.state.clone();
        runtime.spawn(async move {
            let listener = TcpListener::from_std(socket).unwrap();
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                let state = state.clone();
                let service = service_fn(move |request| respond(request, state.clone()));
                // The result is ignored: some tests kill the gateway.
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        self.runtime = Some(runtime);
    }

    /// Returns the number of requests received.
    pub(crate) fn requests(&self) -> usize {
        self.state.requests.load(Ordering::Relaxed)
    }

    /// Returns the number of requests on hold.
    pub(crate) fn waiting(&self) -> usize {
        self.state.waiting.load(Ordering::Relaxed)
    }

    /// Releases requests on hold.
    pub(crate) fn release(&self, count: usize) {
        self.state.held.add_permits(count);
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.kill();
    }
}

type Body = Either<Full<Bytes>, Incoming>;

async fn respond(request: Request<Incoming>, state: Arc<State>) -> Result<Response<Body>, Infallible> {
    state.requests.fetch_add(1, Ordering::Relaxed);
    if request.uri().path() == "/echo" {
        return Ok(Response::new(Either::Right(request.into_body())));
    }
    let version =
        request.headers().get("x-version").map_or(Bytes::new(), |it| Bytes::copy_from_slice(it.as_bytes()));
    let (is_held, is_large) = (request.uri().path() == "/hold", request.uri().path() == "/large");
    // The gateway answers an aborted body.
    let _ = request.into_body().collect().await;
    if is_held {
        state.waiting.fetch_add(1, Ordering::Relaxed);
        if let Ok(permit) = state.held.acquire().await {
            permit.forget();
        }
        state.waiting.fetch_sub(1, Ordering::Relaxed);
    }
    let body = match (version.is_empty(), is_large) {
        (false, _) => version,
        (true, true) => Bytes::from(vec![b'x'; LARGE_BYTES]),
        (true, false) => Bytes::from_static(b"hello"),
    };
    Ok(Response::new(Either::Left(Full::new(body))))
}
