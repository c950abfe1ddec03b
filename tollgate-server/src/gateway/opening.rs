//! What comes before the first request: a PROXY header, a handshake, the first bytes.

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

use super::draining::Draining;
use super::ticks::{Ticker, Ticks};
use super::watch::Watch;

/// How long a connection without requests lives on when the gateway is about to end, so that a request that is on its way
/// gets an answer.
pub(crate) const LAST_CALL: Duration = Duration::from_millis(500);

/// What no request of HTTP/1 begins with.
const HTTP2_BEGIN: &[u8] = b"PRI ";
/// What is read at first. Most heads are shorter.
const FIRST_BYTES_MAX: usize = 4096;

/// A connection that owes us its first request. All that comes before has one time together: whoever is slow at each step
/// is not waited for at each.
#[derive(Debug)]
pub(crate) struct Opening {
    arrived: Ticks,
    pub(crate) deadline: Instant,
}

impl Opening {
    pub(crate) fn new(ticker: &Ticker, patience: Duration) -> Opening {
        Opening { arrived: ticker.now(), deadline: Instant::now() + patience }
    }

    /// What comes of a step, unless the time is over. Once the gateway is about to end, a client that has nothing to say is
    /// not worth waiting for.
    pub(crate) async fn step<T>(&self, draining: &Draining, step: impl Future<Output = T>) -> Option<T> {
        let draining = draining.wait();
        tokio::select! {
            biased;
            done = timeout_at(self.deadline, step) => done.ok(),
            () = async {
                draining.await;
                sleep(LAST_CALL).await;
            } => None,
        }
    }

    /// The watch of the connection, which runs since then.
    pub(crate) fn watch(&self, ticker: Arc<Ticker>) -> Arc<Watch> {
        Watch::since(ticker, self.arrived)
    }
}

/// What a client says first: enough to know whether it speaks HTTP/2. Nothing, if it ends before.
///
/// It is read, and not only looked at: who waits for the rest of what is there already would have to look again and again.
pub(crate) async fn first_bytes(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Bytes> {
    let mut first = Vec::new();
    loop {
        let before = first.len();
        poll_fn(|context| {
            // Only for as long as something is read, so that a client that waits costs none of it.
            let mut bytes = [MaybeUninit::uninit(); FIRST_BYTES_MAX];
            let mut buffer = ReadBuf::uninit(&mut bytes);
            ready!(Pin::new(&mut *stream).poll_read(context, &mut buffer))?;
            first.extend_from_slice(buffer.filled());
            Poll::Ready(io::Result::Ok(()))
        })
        .await?;
        let may_be_http2 = first.len() < HTTP2_BEGIN.len() && HTTP2_BEGIN.starts_with(&first);
        if first.len() == before || !may_be_http2 {
            return Ok(first.into());
        }
    }
}

/// Whether a client begins with the words of HTTP/2.
pub(crate) fn speaks_http2(first: &[u8]) -> bool {
    first.starts_with(HTTP2_BEGIN)
}

#[cfg(test)]
mod tests {
    use std::task::Context;

    use tokio::io::AsyncWriteExt;

    use super::*;

    /// Counts how often it is asked.
    struct Counting<I>(I, usize);

    impl<I: AsyncRead + Unpin> AsyncRead for Counting<I> {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.1 += 1;
            Pin::new(&mut self.0).poll_read(context, buffer)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_waits_in_the_middle_of_a_word_costs_nothing() {
        let (mut client, server) = tokio::io::duplex(100);
        let mut server = Counting(server, 0);
        let saying = async {
            client.write_all(b"PR").await.unwrap();
            sleep(Duration::from_secs(60)).await;
            client.write_all(b"I * HTTP/2.0").await.unwrap();
            client
        };
        let (first, _client) = tokio::join!(first_bytes(&mut server), saying);
        assert_eq!(first.unwrap(), "PRI * HTTP/2.0");
        assert!(server.1 < 10, "asked {} times", server.1);
    }

    #[tokio::test]
    async fn it_is_known_as_soon_as_it_can_be() {
        for (said, is_http2) in [("G", false), ("PRI ", true), ("PRI\t", false), ("PO", false)] {
            let (mut client, mut server) = tokio::io::duplex(100);
            client.write_all(said.as_bytes()).await.unwrap();
            let first = first_bytes(&mut server).await.unwrap();
            assert_eq!((&*first, speaks_http2(&first)), (said.as_bytes(), is_http2));
        }
        // Or never.
        for said in ["", "PRI"] {
            let (mut client, mut server) = tokio::io::duplex(100);
            client.write_all(said.as_bytes()).await.unwrap();
            drop(client);
            let first = first_bytes(&mut server).await.unwrap();
            assert_eq!((&*first, speaks_http2(&first)), (said.as_bytes(), false));
        }
    }
}
