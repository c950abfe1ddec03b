//! Metrics of the Redis API.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::metrics::Exposition;

/// The outcome of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Became {
    /// Its limit allowed it.
    Allowed,
    /// Its limit denied it.
    Denied,
    /// There were no limits, or the store was unavailable and the failure policy is `closed`.
    Unavailable,
    /// It was answered with another error.
    Refused,
    /// It checked no limit.
    Other,
}

impl Became {
    const ALL: [Became; 5] =
        [Became::Allowed, Became::Denied, Became::Unavailable, Became::Refused, Became::Other];

    fn name(self) -> &'static str {
        match self {
            Became::Allowed => "allowed",
            Became::Denied => "denied",
            Became::Unavailable => "unavailable",
            Became::Refused => "error",
            Became::Other => "other",
        }
    }
}

/// The outcomes of a batch of commands. All connections share one set of counters, so each adds its outcomes once per
/// batch.
#[derive(Debug, Default)]
pub(crate) struct Tally([u64; Became::ALL.len()]);

impl Tally {
    pub(crate) fn add(&mut self, became: Became) {
        self.0[became as usize] += 1;
    }
}

/// The counters of the API.
#[derive(Debug, Default)]
pub struct Counts {
    commands: [AtomicU64; Became::ALL.len()],
    open: AtomicUsize,
    accepted: AtomicU64,
    turned_away: AtomicU64,
}

impl Counts {
    pub(crate) fn take(&self, tally: &mut Tally) {
        for (all, some) in self.commands.iter().zip(&mut tally.0) {
            if *some > 0 {
                all.fetch_add(std::mem::take(some), Ordering::Relaxed);
            }
        }
    }

    /// Counts a connection as open until the guard is dropped, and numbers it.
    pub(crate) fn enter(self: &std::sync::Arc<Counts>) -> (Open, u64) {
        self.open.fetch_add(1, Ordering::Relaxed);
        (Open(self.clone()), self.accepted.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub(crate) fn turn_away(&self) {
        self.turned_away.fetch_add(1, Ordering::Relaxed);
    }

    /// Open connections.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Connections that were closed immediately because there were too many.
    pub fn turned_away(&self) -> u64 {
        self.turned_away.load(Ordering::Relaxed)
    }

    /// Commands by outcome.
    pub(crate) fn commands(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Became::ALL.iter().zip(&self.commands).map(|(it, count)| (it.name(), count.load(Ordering::Relaxed)))
    }

    /// Writes all metrics in the Prometheus text format.
    pub fn write(&self, out: &mut Exposition) {
        let name = "ratekeeper_redis_api_commands_total";
        out.family(name, "counter", "Redis API commands, by result.");
        for (result, count) in self.commands() {
            out.sample(name, &[("result", result)], count);
        }
        let help = "Open Redis API connections.";
        out.single("ratekeeper_redis_api_connections", "gauge", help, self.open());
        let (help, accepted) = ("Accepted Redis API connections.", self.accepted.load(Ordering::Relaxed));
        out.single("ratekeeper_redis_api_connections_total", "counter", help, accepted);
        let help = "Connections rejected at the connection limit.";
        out.single("ratekeeper_redis_api_connections_rejected_total", "counter", help, self.turned_away());
    }
}

/// Guard of an open connection.
#[derive(Debug)]
pub(crate) struct Open(std::sync::Arc<Counts>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn counters_are_reported() {
        let counts = Arc::new(Counts::default());
        let mut tally = Tally::default();
        for became in [Became::Denied, Became::Denied, Became::Refused] {
            tally.add(became);
        }
        counts.take(&mut tally);
        counts.take(&mut tally);
        let (first, number) = counts.enter();
        let (_second, next) = counts.enter();
        assert_eq!((number, next), (1, 2));
        drop(first);
        counts.turn_away();
        let mut out = Exposition::default();
        counts.write(&mut out);
        let text = out.into_text();
        for line in [
            r#"ratekeeper_redis_api_commands_total{result="allowed"} 0"#,
            r#"ratekeeper_redis_api_commands_total{result="denied"} 2"#,
            r#"ratekeeper_redis_api_commands_total{result="error"} 1"#,
            "ratekeeper_redis_api_connections 1",
            "ratekeeper_redis_api_connections_total 2",
            "ratekeeper_redis_api_connections_rejected_total 1",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }
}
