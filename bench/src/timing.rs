//! Pinned workers that time themselves.
//!
//! A thread that only coordinates would take a core from the workers, so there is none: each worker reads the clock
//! around its own share, and the slowest worker's time over the decisions of all is the figure.
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

/// The requests of one worker in one visit to a contender.
pub(crate) struct Share<'a, K> {
    /// Decided first and not timed: the contender before has left the caches full of its own.
    pub(crate) warm_up: Vec<&'a [K]>,
    pub(crate) timed: Vec<&'a [K]>,
}

/// What one visit showed.
pub(crate) struct Visit {
    /// The slowest worker's time over the decisions of all workers.
    pub(crate) ns_per_decision: f64,
    /// How many requests were timed.
    pub(crate) decisions: usize,
    /// How many of them were allowed.
    pub(crate) allowed: usize,
}

/// Where workers run: one core each.
pub(crate) struct Cores(Vec<CoreId>);

impl Cores {
    pub(crate) fn for_workers(workers: usize) -> Result<Cores, String> {
        let cores = core_affinity::get_core_ids().unwrap_or_default();
        if cores.len() < workers {
            return Err(format!("{workers} workers need a core each, and {} can be used", cores.len()));
        }
        Ok(Cores(cores))
    }

    /// One worker per share, all at once.
    pub(crate) fn visit<K: Sync>(&self, contender: &dyn Contender<K>, shares: &[Share<'_, K>]) -> Visit {
        let ready = AtomicUsize::new(0);
        let work = |core: CoreId, share: &Share<'_, K>| {
            core_affinity::set_for_current(core);
            hint::black_box(decide_chunks(contender, &share.warm_up));
            // Spinning: every worker has a core, and waking a sleeper would take longer than some visits.
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

/// For a contender that is told the time.
#[inline]
pub(crate) fn now() -> SystemTime {
    SystemTime::now()
}

/// How long something took.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed())
}

/// The same where the work is not one function.
pub(crate) struct Watch(Instant);

impl Watch {
    pub(crate) fn start() -> Watch {
        Watch(Instant::now())
    }

    /// Waits until so much time has passed since the start.
    pub(crate) fn wait_until(&self, passed: Duration) {
        // Nobody unparks this thread, but it may wake up early.
        while let Some(left) = passed.checked_sub(self.0.elapsed()).filter(|left| !left.is_zero()) {
            thread::park_timeout(left);
        }
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }
}
