//! What comes before the first request: a PROXY header, a handshake, the first bytes.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::draining::Draining;
use super::ticks::{Ticker, Ticks};
use super::watch::Watch;

/// How long a connection without requests lives on when the gateway is about to end, so that a request that is on its way
/// gets an answer.
pub(crate) const LAST_CALL: Duration = Duration::from_millis(500);

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
