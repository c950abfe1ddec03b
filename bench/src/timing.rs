//! Pinned workers that time themselves.
//!
//! A coordinating thread would take a core from the workers, so there is none: each worker times its own share, and
//! the figure is the slowest worker's time divided by the decisions of all.
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark measures real time, and a contender wants it as an argument"
)]
#![allow(clippy::float_arithmetic, reason = "figures for people; nothing is decided by them")]

use std::hint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use core_affinity::CoreId;

use crate::contenders::Contender;

/// The requests of one worker for one contender in one round.
pub(crate) struct Share<'a, K> {
    /// Decided first and not timed, because the caches still hold the previous contender's data.
    pub(crate) warm_up: Vec<&'a [K]>,
    pub(crate) timed: Vec<&'a [K]>,
}

/// The measurement of one contender in one round.
pub(crate) struct Visit {
    /// The slowest worker's time divided by the decisions of all workers.
    pub(crate) ns_per_decision: f64,
    /// Number of timed requests.
    pub(crate) decisions: usize,
    /// Number of them that were allowed.
    pub(crate) allowed: usize,
}

/// The cores of the workers, one each.
pub(crate) struct Cores(Vec<CoreId>);

impl Cores {
    pub(crate) fn for_workers(workers: usize) -> Result<Cores, String> {
        let cores = core_affinity::get_core_ids().unwrap_or_default();
        if cores.len() < workers {
            return Err(format!("{workers} workers need a core each, and {} can be used", cores.len()));
        }
        Ok(Cores(cores))
    }

    /// Runs one worker per share, concurrently.
    pub(crate) fn visit<K: Sync>(&self, contender: &dyn Contender<K>, shares: &[Share<'_, K>]) -> Visit {
        let ready = AtomicUsize::new(0);
        let work = |core: CoreId, share: &Share<'_, K>| {
            core_affinity::set_for_current(core);
            hint::black_box(decide_chunks(contender, &share.warm_up));
            // Spin: every worker has a core, and waking a sleeping thread would take longer than some rounds.
            ready.fetch_add(1, Ordering::AcqRel);
            while ready.load(Ordering::Acquire) < shares.len() {
                hint::spin_loop();
            }
            let start = Instant::now();
            let allowed = decide_chunks(contender, &share.timed);
            (start.elapsed(), allowed)
        };
        let done: Vec<(Duration, usize)> = thread::scope(|scope| {
            let workers: Vec<_> = self
                .0
                .iter()
                .zip(shares)
                .map(|(&core, share)| scope.spawn(move || work(core, share)))
                .collect();
            workers.into_iter().map(|worker| worker.join().expect("a worker does not panic")).collect()
        });
        let decisions = shares.iter().flat_map(|share| &share.timed).map(|chunk| chunk.len()).sum();
        let slowest = done.iter().map(|(elapsed, _)| *elapsed).max().unwrap_or_default();
        Visit {
            ns_per_decision: slowest.as_nanos() as f64 / decisions as f64,
            decisions,
            allowed: done.iter().map(|(_, allowed)| allowed).sum(),
        }
    }
}

fn decide_chunks<K>(contender: &dyn Contender<K>, chunks: &[&[K]]) -> usize {
    chunks.iter().map(|chunk| contender.decide_all(chunk)).sum()
}

/// Returns the time, for a contender that takes it as an argument.
#[inline]
pub(crate) fn now() -> SystemTime {
    SystemTime::now()
}

/// Times a function.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed())
}

/// A stopwatch for work that is not a single function.
pub(crate) struct Watch(Instant);

impl Watch {
    pub(crate) fn start() -> Watch {
        Watch(Instant::now())
    }

    /// Waits until `passed` has elapsed since the start.
    pub(crate) fn wait_until(&self, passed: Duration) {
        // No thread unparks this one, but it may wake spuriously.
        while let Some(left) = passed.checked_sub(self.0.elapsed()).filter(|left| !left.is_zero()) {
            thread::park_timeout(left);
        }
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }
}
