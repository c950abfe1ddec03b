//! Metrics of the Redis API.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::runtime::metrics::{Exposition, families};

/// The outcome of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandOutcome {
    /// Its limit allowed it.
    Allowed,
    /// Its limit denied it.
    Denied,
    /// There were no limits, or the store was unavailable and the failure policy is `closed`.
    Unavailable,
    /// It was answered with another error.
    Error,
    /// It checked no limit.
    Other,
}

impl CommandOutcome {
    const ALL: [CommandOutcome; 5] = [
        CommandOutcome::Allowed,
        CommandOutcome::Denied,
        CommandOutcome::Unavailable,
        CommandOutcome::Error,
        CommandOutcome::Other,
    ];

    fn name(self) -> &'static str {
        match self {
            CommandOutcome::Allowed => "allowed",
            CommandOutcome::Denied => "denied",
            CommandOutcome::Unavailable => "unavailable",
            CommandOutcome::Error => "error",
            CommandOutcome::Other => "other",
        }
    }
}

/// The outcomes of a batch of commands. All connections share one set of counters, so each adds its outcomes once per
/// batch.
#[derive(Debug, Default)]
pub(crate) struct OutcomeTally([u64; CommandOutcome::ALL.len()]);

impl OutcomeTally {
    pub(crate) fn add(&mut self, outcome: CommandOutcome) {
        self.0[outcome as usize] += 1;
    }
}

/// The counters of the API.
#[derive(Debug, Default)]
pub struct RedisApiMetrics {
    commands: [AtomicU64; CommandOutcome::ALL.len()],
    open: AtomicUsize,
    accepted: AtomicU64,
    rejected: AtomicU64,
}

impl RedisApiMetrics {
    pub(crate) fn add(&self, tally: &mut OutcomeTally) {
        for (total, count) in self.commands.iter().zip(&mut tally.0) {
            if *count > 0 {
                total.fetch_add(std::mem::take(count), Ordering::Relaxed);
            }
        }
    }

    /// Counts a connection as open until the guard is dropped, and numbers it.
    pub(crate) fn open_connection(self: &std::sync::Arc<RedisApiMetrics>) -> (OpenConnection, u64) {
        self.open.fetch_add(1, Ordering::Relaxed);
        (OpenConnection(self.clone()), self.accepted.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub(crate) fn reject_connection(&self) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
    }

    /// Open connections.
    pub fn open_connections(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Connections closed immediately because of the maximum number of connections.
    pub fn rejected_connections(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    /// Commands by outcome.
    pub(crate) fn commands(&self) -> impl Iterator<Item = (&'static str, u64)> {
        CommandOutcome::ALL
            .iter()
            .zip(&self.commands)
            .map(|(it, count)| (it.name(), count.load(Ordering::Relaxed)))
    }

    /// Writes all metrics in the Prometheus text format.
    pub fn write(&self, out: &mut Exposition) {
        out.family(&families::REDIS_API_COMMANDS);
        for (result, count) in self.commands() {
            out.sample(&families::REDIS_API_COMMANDS, &[result], count);
        }
        out.single(&families::REDIS_API_CONNECTIONS, self.open_connections());
        out.single(&families::REDIS_API_CONNECTIONS_ACCEPTED, self.accepted.load(Ordering::Relaxed));
        out.family(&families::REDIS_API_CONNECTIONS_REJECTED);
        let rejected = self.rejected_connections();
        out.sample(&families::REDIS_API_CONNECTIONS_REJECTED, &["max_connections"], rejected);
    }
}

/// Guard of an open connection.
#[derive(Debug)]
pub(crate) struct OpenConnection(std::sync::Arc<RedisApiMetrics>);

impl Drop for OpenConnection {
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
        let metrics = Arc::new(RedisApiMetrics::default());
        let mut tally = OutcomeTally::default();
        for outcome in [CommandOutcome::Denied, CommandOutcome::Denied, CommandOutcome::Error] {
            tally.add(outcome);
        }
        metrics.add(&mut tally);
        metrics.add(&mut tally);
        let (first, number) = metrics.open_connection();
        let (_second, next) = metrics.open_connection();
        assert_eq!((number, next), (1, 2));
        drop(first);
        metrics.reject_connection();
        let mut out = Exposition::default();
        metrics.write(&mut out);
        let text = out.into_text();
        for line in [
            r#"ratekeeper_redis_api_commands_total{result="allowed"} 0"#,
            r#"ratekeeper_redis_api_commands_total{result="denied"} 2"#,
            r#"ratekeeper_redis_api_commands_total{result="error"} 1"#,
            "ratekeeper_redis_api_connections 1",
            "ratekeeper_redis_api_connections_total 2",
            r#"ratekeeper_redis_api_connections_rejected_total{reason="max_connections"} 1"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }
}
