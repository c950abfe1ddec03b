//! Ten requests per hour and client address, in front of an axum router.
//!
//! `cargo run -p ratekeeper --features tower --example axum -- 127.0.0.1:3000`

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::get;
use ratekeeper::tower::RatekeeperLayer;
use ratekeeper::{Limit, WindowAlign};
use tokio::net::TcpListener;
use tower::Layer;

pub(crate) async fn serve(listener: TcpListener) -> Result<(), Box<dyn Error + Send + Sync>> {
    let limits = RatekeeperLayer::builder()
        .per_client(
            "per-client",
            Limit::fixed_window(10, Duration::from_secs(3600), WindowAlign::FirstRequest)?,
        )
        .peer(|request| Some(request.extensions.get::<ConnectInfo<SocketAddr>>()?.ip()))
        .build()?;

    let routes = Router::new().route("/", get(async || "Hello!\n"));
    // In front of the router, so that the counted path is the routed path.
    let app = Router::new().fallback_service(limits.layer(routes));
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    serve(listener).await
}
