//! Connection setup before the first request: PROXY header, TLS handshake and first bytes.

use std::future::{Future, poll_fn};
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::{Instant, sleep, timeout_at};

use super::client_timeouts::ConnectionActivity;
use super::drain::Drain;
use crate::runtime::connection_end::DRAIN_GRACE;

/// Begins the HTTP/2 preface, and no HTTP/1 request.
const HTTP2_PREFACE_START: &[u8] = b"PRI ";
/// Size of the first read. Most request heads are shorter.
const FIRST_READ_BYTES_MAX: usize = 4096;

/// A connection before its first request. All setup steps share one deadline, so a client that is slow at each step
/// gains no extra time.
#[derive(Debug)]
pub(crate) struct ConnectionSetup {
    pub(crate) activity: Arc<ConnectionActivity>,
    pub(crate) deadline: Instant,
}

impl ConnectionSetup {
    pub(crate) fn new(activity: Arc<ConnectionActivity>, timeout: Duration) -> ConnectionSetup {
        let deadline = activity.accepted_at() + timeout;
        ConnectionSetup { activity, deadline }
    }

    /// Runs a setup step until the deadline, or until the connection is closed for another one. Once draining begins, the
    /// step has at most [`DRAIN_GRACE`] left.
    pub(crate) async fn step<T>(&self, drain: &Drain, step: impl Future<Output = T>) -> Option<T> {
        let draining = drain.wait_begun();
        tokio::select! {
            biased;
            done = timeout_at(self.deadline, step) => done.ok(),
            _ = poll_fn(|context| self.activity.poll_close(context)) => None,
            () = async {
                draining.await;
                sleep(DRAIN_GRACE).await;
            } => None,
        }
    }
}

/// Reads the client's first bytes, enough to detect HTTP/2; fewer if the client closes first.
///
/// It reads rather than peeks: after a peek, a wait for the missing bytes would poll in a loop.
pub(crate) async fn first_bytes(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Bytes> {
    let mut first = Vec::new();
    loop {
        let before = first.len();
        poll_fn(|context| {
            // Exists only during a read, so that a waiting client holds no buffer.
            let mut bytes = [MaybeUninit::uninit(); FIRST_READ_BYTES_MAX];
            let mut buffer = ReadBuf::uninit(&mut bytes);
            ready!(Pin::new(&mut *stream).poll_read(context, &mut buffer))?;
            first.extend_from_slice(buffer.filled());
            Poll::Ready(io::Result::Ok(()))
        })
        .await?;
        let may_be_http2 = first.len() < HTTP2_PREFACE_START.len() && HTTP2_PREFACE_START.starts_with(&first);
        if first.len() == before || !may_be_http2 {
            return Ok(first.into());
        }
    }
}

/// Whether the client begins with the HTTP/2 preface.
pub(crate) fn is_http2(first: &[u8]) -> bool {
    first.starts_with(HTTP2_PREFACE_START)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::runtime::observed_stream::{ObservedStream, PolledIo, StreamObserver};

    #[derive(Default)]
    struct ReadCount(usize);

    impl StreamObserver for ReadCount {
        fn before_read(&mut self, _: &mut ReadBuf<'_>) -> Option<PolledIo<()>> {
            self.0 += 1;
            None
        }
    }

    #[tokio::test(start_paused = true)]
    async fn partial_http2_preface_is_awaited_without_busy_polling() {
        let (mut client, stream) = tokio::io::duplex(100);
        let mut server = ObservedStream { stream, observer: ReadCount::default() };
        let sending = async {
            client.write_all(b"PR").await.unwrap();
            sleep(Duration::from_secs(60)).await;
            client.write_all(b"I * HTTP/2.0").await.unwrap();
            client
        };
        let (first, _client) = tokio::join!(first_bytes(&mut server), sending);
        assert_eq!(first.unwrap(), "PRI * HTTP/2.0");
        assert!(server.observer.0 < 10, "{} reads", server.observer.0);
    }

    #[tokio::test]
    async fn protocol_is_detected_from_the_fewest_bytes() {
        for (sent, expected) in [("G", false), ("PRI ", true), ("PRI\t", false), ("PO", false)] {
            let (mut client, mut server) = tokio::io::duplex(100);
            client.write_all(sent.as_bytes()).await.unwrap();
            let first = first_bytes(&mut server).await.unwrap();
            assert_eq!((&*first, is_http2(&first)), (sent.as_bytes(), expected));
        }
        // The client closes before the preface is complete.
        for sent in ["", "PRI"] {
            let (mut client, mut server) = tokio::io::duplex(100);
            client.write_all(sent.as_bytes()).await.unwrap();
            drop(client);
            let first = first_bytes(&mut server).await.unwrap();
            assert_eq!((&*first, is_http2(&first)), (sent.as_bytes(), false));
        }
    }
}
