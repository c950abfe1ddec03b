//! A small demo upstream.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use crate::runtime::accept::accepted;
use crate::runtime::sockets::into_tokio;

/// Answers every request with a description of it, on a socket of [`Sockets`](crate::Sockets).
///
/// # Errors
/// Returns the error of the socket, if it cannot be used.
pub fn listen(listener: std::net::TcpListener) -> io::Result<(SocketAddr, impl Future<Output = ()> + Send)> {
    let (listener, address) = into_tokio(listener)?;
    Ok((address, async move {
        loop {
            let Some((stream, _)) = accepted(listener.accept().await).await else { continue };
            let serving = http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(respond));
            tokio::spawn(async move {
                // A client that disconnects is not an error.
                let _ = serving.await;
            });
        }
    }))
}

async fn respond(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let escaped = |text: &str| text.replace(['"', '\\'], "");
    let user = request.headers().get("x-user-id").and_then(|user| user.to_str().ok()).unwrap_or("anonymous");
    let (method, path) = (request.method().as_str(), request.uri().path());
    let body = format!(
        "{{\"message\":\"Hello, {}!\",\"method\":\"{method}\",\"path\":\"{}\"}}\n",
        escaped(user),
        escaped(path)
    );
    let mut response = Response::new(Full::from(body));
    let json = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(http::header::CONTENT_TYPE, json);
    Ok(response)
}
