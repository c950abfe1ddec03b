//! Metrics of the Redis API.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::runtime::metrics::{
    ApiConnectionRejection, CommandOutcome, Counters, Exposition, LabelType, families,
};

/// The outcomes of a batch of commands. All connections share one set of counters, so each adds its outcomes once per
/// batch.
#[derive(Debug, Default)]
pub(crate) struct OutcomeTally([u64; CommandOutcome::ALL.len()]);

impl OutcomeTally {
    pub(crate) fn add(&mut self, outcome: CommandOutcome) {
        self.0[outcome.index()] += 1;
    }
}

/// The counters of the API.
#[derive(Debug, Default)]
pub struct RedisApiMetrics {
    commands: Counters<CommandOutcome>,
    open: AtomicUsize,
    accepted: AtomicU64,
    rejected: AtomicU64,
}

impl RedisApiMetrics {
    pub(crate) fn add(&self, tally: &mut OutcomeTally) {
        for (outcome, count) in CommandOutcome::ALL.iter().zip(&mut tally.0) {
            if *count > 0 {
                self.commands.add(*outcome, std::mem::take(count));
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
        self.commands.counts()
    }

    /// Writes all metrics in the text format of Prometheus.
    pub fn write(&self, out: &mut Exposition) {
        let mut commands = out.family(&families::REDIS_API_COMMANDS);
        for (result, count) in self.commands() {
            commands.sample([result], count);
        }
        out.single(&families::REDIS_API_CONNECTIONS, self.open_connections());
        out.single(&families::REDIS_API_CONNECTIONS_ACCEPTED, self.accepted.load(Ordering::Relaxed));
        let reason = ApiConnectionRejection::MaxConnections.name();
        out.family(&families::REDIS_API_CONNECTIONS_REJECTED).sample([reason], self.rejected_connections());
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
            "ratekeeper_redis_api_connections_accepted_total 2",
            r#"ratekeeper_redis_api_connections_rejected_total{reason="max_connections"} 1"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }
}
