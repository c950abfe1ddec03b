//! Where a simulation keeps its states: in memory, or in Redis with the trace's time.

use std::io;
use std::time::Duration;

use tokio::runtime::Runtime;
use tollgate::redis::{Redis, Settings};
use tollgate::{Clock, Decision, Limit, Limiter, SystemClock};
use tollgate_sim::{Batch, Simulator};

use crate::failure::Failure;

/// Decides a trace's requests.
pub(crate) enum Store {
    Memory(Simulator),
    Redis(Box<OnServer>),
}

pub(crate) struct OnServer {
    runtime: Runtime,
    limiter: Limiter<Redis>,
    /// Why it has stopped answering.
    failure: Option<String>,
}

/// A simulation is in no hurry, but does not wait for ever.
const PATIENCE: Duration = Duration::from_secs(5);

impl Store {
    pub(crate) fn new(store: &str, limit: Limit, max_keys: usize) -> Result<Store, Failure> {
        let wrong = |error: &dyn ToString| Failure::Typed(error.to_string());
        if store == "memory" {
            return Simulator::new(limit, max_keys).map(Store::Memory).map_err(|error| wrong(&error));
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Failure::Input(format!("cannot start: {error}")))?;
        // Each run has keys of its own. They go by themselves.
        let run = format!("simulate/{}/{}", std::process::id(), SystemClock::new().now().as_nanos());
        let settings = Settings::new(store).namespace(&run).deadline(PATIENCE).connections(1);
        let limiter = {
            let _on_runtime = runtime.enter();
            Limiter::builder(limit).redis(&settings).map_err(|error| {
                Failure::Typed(format!("--store: {error}\n  = or write `memory`, which is the default"))
            })?
        };
        Ok(Store::Redis(Box::new(OnServer { runtime, limiter, failure: None })))
    }

    /// Decides the requests of a batch, each at its own time and in order. `decisions` becomes theirs.
    pub(crate) fn decide_batch(&mut self, batch: &Batch, decisions: &mut Vec<Decision>) -> io::Result<()> {
        match self {
            Store::Memory(simulator) => simulator.decide_batch(batch, decisions),
            Store::Redis(server) => {
                decisions.clear();
                for request in batch.requests() {
                    let asked = server.limiter.check_at(request.time, request.key, request.cost);
                    match server.runtime.block_on(asked) {
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

    /// How a replay ended, if not by the trace or the output.
    pub(crate) fn end(&self) -> Result<(), Failure> {
        match self {
            Store::Redis(server) => match &server.failure {
                Some(failure) => Err(Failure::Input(format!(
                    "{failure}\n  = is the server of --store running, and is it Redis 7 or newer?"
                ))),
                None => Ok(()),
            },
            Store::Memory(_) => Ok(()),
        }
    }

    /// How many requests found no room for their key.
    pub(crate) fn overflowed(&self) -> u64 {
        match self {
            Store::Memory(simulator) => simulator.overflowed(),
            Store::Redis(_) => 0,
        }
    }
}
