//! Ten calls per hour and client address, in front of the gRPC health service.
//!
//! `cargo run -p ratekeeper --features tower --example tonic -- 127.0.0.1:50051`

use std::error::Error;
use std::time::Duration;

use ratekeeper::tower::RatekeeperLayer;
use ratekeeper::{Limit, WindowAlign};
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};

pub(crate) async fn serve(listener: TcpListener) -> Result<(), Box<dyn Error + Send + Sync>> {
    let limits = RatekeeperLayer::builder()
        .per_client(
            "per-client",
            Limit::fixed_window(10, Duration::from_secs(3600), WindowAlign::FirstRequest)?,
        )
        .peer(|request| Some(request.extensions.get::<TcpConnectInfo>()?.remote_addr()?.ip()))
        .build()?;

    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(limits).add_service(health);
    server.serve_with_incoming(TcpIncoming::from(listener)).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    serve(listener).await
}
