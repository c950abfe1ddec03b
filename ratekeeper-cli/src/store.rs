//! Where a simulation keeps its state: in memory, or in Redis with the trace's time.

use std::io;
use std::time::Duration;

use ratekeeper::redis::{Redis, Settings};
use ratekeeper::{Clock, Decision, Limit, Limiter, SystemClock};
use ratekeeper_insight::{Batch, Simulator};
use tokio::runtime::Runtime;

use crate::error::{CliError, with_help};

/// Decides the requests of a trace.
pub(crate) enum Store {
    Memory(Box<Simulator>),
    Redis(Box<RedisStore>),
}

pub(crate) struct RedisStore {
    runtime: Runtime,
    limiter: Limiter<Redis>,
    /// The error that ended the replay.
    failure: Option<String>,
}

/// Deadline of one check. A simulation is not latency-sensitive, but must not hang.
const DEADLINE: Duration = Duration::from_secs(5);

impl Store {
    pub(crate) fn new(store: &str, limit: Limit, max_keys: usize) -> Result<Store, CliError> {
        if store == "memory" {
            let simulator =
                Simulator::new(limit, max_keys).map_err(|error| CliError::Usage(error.to_string()))?;
            return Ok(Store::Memory(Box::new(simulator)));
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| CliError::Input(format!("cannot start the runtime: {error}")))?;
        // Each run uses its own key namespace; its keys expire.
        let run = format!("simulate/{}/{}", std::process::id(), SystemClock::new().now().as_nanos());
        let settings = Settings::new(store).namespace(&run).deadline(DEADLINE).connections(1);
        let limiter = {
            let _on_runtime = runtime.enter();
            Limiter::builder(limit).redis(&settings).map_err(|error| {
                CliError::usage(
                    &format!("--store: {error}"),
                    "write an address as in redis://127.0.0.1:6379, or `memory`, which is the default",
                )
            })?
        };
        Ok(Store::Redis(Box::new(RedisStore { runtime, limiter, failure: None })))
    }

    /// Replaces `decisions` with those of the batch's requests, each decided at its own time and in order.
    pub(crate) fn decide_batch(&mut self, batch: &Batch, decisions: &mut Vec<Decision>) -> io::Result<()> {
        match self {
            Store::Memory(simulator) => simulator.decide_batch(batch, decisions),
            Store::Redis(server) => {
                decisions.clear();
                for request in batch.requests() {
                    let check = server.limiter.check_at(request.time, request.key, request.cost);
                    match server.runtime.block_on(check) {
                        Ok(verdict) => decisions.push(verdict.decision()),
                        Err(error) => {
                            server.failure = Some(error.to_string());
                            return Err(io::Error::other(error));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the store's error, if it ended the replay.
    pub(crate) fn end(&self) -> Result<(), CliError> {
        match self {
            Store::Redis(server) => match &server.failure {
                Some(failure) => Err(CliError::Input(with_help(
                    failure,
                    "check that the server of --store is running and is Redis 7 or newer",
                ))),
                None => Ok(()),
            },
            Store::Memory(_) => Ok(()),
        }
    }

    /// Returns the number of requests whose key did not fit into memory.
    pub(crate) fn overflowed(&self) -> u64 {
        match self {
            Store::Memory(simulator) => simulator.overflowed(),
            Store::Redis(_) => 0,
        }
    }
}
