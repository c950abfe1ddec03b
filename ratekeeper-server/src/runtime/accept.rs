//! Accepted connections of all listeners.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::sleep;

/// Delay after a failed accept: while file descriptors are exhausted, an immediate retry would also fail.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// The connection that a listener has accepted, and its peer. After an error, returns `None` when the listener can
/// accept again.
pub(crate) async fn accepted(result: io::Result<(TcpStream, SocketAddr)>) -> Option<(TcpStream, SocketAddr)> {
    match result {
        Ok((stream, peer)) => {
            // Responses are small, and clients wait for them. A connection without TCP_NODELAY is slower, but works.
            let _ = stream.set_nodelay(true);
            Some((stream, peer))
        }
        // The client disconnected before it was accepted; the next accept needs no delay.
        Err(error) if is_disconnect(&error) => None,
        Err(error) => {
            tracing::warn!(%error, "accept failed");
            sleep(RETRY_DELAY).await;
            None
        }
    }
}

fn is_disconnect(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// How long no connection is accepted after an error.
    async fn delay_after(error: io::ErrorKind) -> Duration {
        let failed = Instant::now();
        assert!(accepted(Err(error.into())).await.is_none());
        failed.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn accept_is_delayed_after_an_error_of_the_process_and_not_of_a_client() {
        assert_eq!(delay_after(io::ErrorKind::ConnectionAborted).await, Duration::ZERO);
        assert_eq!(delay_after(io::ErrorKind::ConnectionReset).await, Duration::ZERO);
        assert!(delay_after(io::ErrorKind::Other).await >= RETRY_DELAY);
    }
}
