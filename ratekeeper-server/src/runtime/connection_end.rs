//! How connections end without losing a response.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

/// How long a connection without requests stays open once draining begins, so that a request already in transit gets
/// a response.
pub(crate) const DRAIN_GRACE: Duration = Duration::from_millis(500);

/// Bytes read and discarded after the last response, so that the client can still read that response.
const LINGER_BYTES_MAX: usize = 1 << 20;
const LINGER: Duration = Duration::from_secs(2);

/// Shuts down the write side and reads on for a while: closing a connection with unread data resets it, and the
/// client may lose the response.
pub(crate) async fn linger<I: AsyncRead + AsyncWrite + Unpin>(mut io: I) {
    let reading = async {
        io.shutdown().await.ok()?;
        // Small, because the task of every open connection has room for it.
        let (mut bytes, mut left) = ([0; 1024], LINGER_BYTES_MAX);
        while left > 0 {
            let read = io.read(&mut bytes).await.ok().filter(|read| *read > 0)?;
            left = left.saturating_sub(read);
        }
        Some(())
    };
    let _ = timeout(LINGER, reading).await;
}

#[cfg(test)]
mod tests {
    use std::io;

    use tokio::io::{DuplexStream, duplex};
    use tokio::time::Instant;

    use super::*;

    /// How long a connection lingers while `client` runs.
    async fn lingers_with(client: impl AsyncFnOnce(DuplexStream)) -> Duration {
        let (server, other_end) = duplex(1 << 10);
        let began = Instant::now();
        let ((), ended) = tokio::join!(client(other_end), async {
            linger(server).await;
            began.elapsed()
        });
        ended
    }

    #[tokio::test(start_paused = true)]
    async fn connection_lingers_until_the_client_ends_it_or_a_bound_is_reached() {
        let reading = async |mut client: DuplexStream| {
            assert_eq!(client.read(&mut [0; 8]).await.ok(), Some(0), "the write side is shut down");
        };
        assert_eq!(lingers_with(reading).await, Duration::ZERO);
        let silent = async |client: DuplexStream| {
            tokio::time::sleep(2 * LINGER).await;
            drop(client);
        };
        assert_eq!(lingers_with(silent).await.as_secs(), LINGER.as_secs());
        let flooding = async |mut client: DuplexStream| {
            let error = loop {
                if let Err(error) = client.write_all(&[0; 1 << 10]).await {
                    break error;
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        };
        assert_eq!(lingers_with(flooding).await, Duration::ZERO);
    }
}
