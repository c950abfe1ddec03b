//! Ten requests per hour and client address, in front of a function served by hyper.
//!
//! `cargo run -p ratekeeper --features tower --example hyper -- 127.0.0.1:3000`

use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use ratekeeper::tower::{Peer, RatekeeperLayer};
use ratekeeper::{Limit, WindowAlign};
use tokio::net::TcpListener;
use tower::ServiceBuilder;

pub(crate) async fn serve(listener: TcpListener) -> Result<(), Box<dyn Error + Send + Sync>> {
    let limits = RatekeeperLayer::builder()
        .per_client(
            "per-client",
            Limit::fixed_window(10, Duration::from_secs(3600), WindowAlign::FirstRequest)?,
        )
        .build()?;

    loop {
        let (stream, address) = listener.accept().await?;
        // Each connection has its service; all services share the limits.
        let service = ServiceBuilder::new()
            .map_request(move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(Peer(address.ip()));
                request
            })
            .layer(limits.clone())
            .service_fn(async |_| Ok::<_, Infallible>(Response::new("Hello!\n".to_owned())));
        let service = TowerToHyperService::new(service);
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    serve(listener).await
}
