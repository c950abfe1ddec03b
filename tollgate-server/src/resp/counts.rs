//! What has happened at the door, counted.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::metrics::Exposition;

/// What became of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Became {
    /// Its limit let it pass.
    Allowed,
    /// Its limit denied it.
    Denied,
    /// Nothing could be asked, or the store was away and the policy is that nothing passes then.
    Unavailable,
    /// It was answered with another error.
    Refused,
    /// It asked no limit.
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

/// What became of the commands that came together. All connections count in the same memory, and so each of them does it
/// once for many commands.
#[derive(Debug, Default)]
pub(crate) struct Tally([u64; Became::ALL.len()]);

impl Tally {
    pub(crate) fn add(&mut self, became: Became) {
        self.0[became as usize] += 1;
    }
}

/// What has happened at a door.
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

    /// A connection, until it is dropped, and its number.
    pub(crate) fn enter(self: &std::sync::Arc<Counts>) -> (Open, u64) {
        self.open.fetch_add(1, Ordering::Relaxed);
        (Open(self.clone()), self.accepted.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub(crate) fn turn_away(&self) {
        self.turned_away.fetch_add(1, Ordering::Relaxed);
    }

    /// How many connections are open.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// How many connections were closed at once, because there were too many.
    pub fn turned_away(&self) -> u64 {
        self.turned_away.load(Ordering::Relaxed)
    }

    /// How many commands became what, by its name.
    pub(crate) fn commands(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Became::ALL.iter().zip(&self.commands).map(|(it, count)| (it.name(), count.load(Ordering::Relaxed)))
    }

    /// Writes all of it in the text format of Prometheus.
    pub fn write(&self, out: &mut Exposition) {
        let name = "tollgate_resp_commands_total";
        out.family(name, "counter", "Commands of the Redis protocol by what became of them.");
        for (result, count) in self.commands() {
            out.sample(name, &[("result", result)], count);
        }
        let help = "Open connections that speak the Redis protocol.";
        out.single("tollgate_resp_connections", "gauge", help, self.open());
        let (help, accepted) =
            ("Connections that speak the Redis protocol.", self.accepted.load(Ordering::Relaxed));
        out.single("tollgate_resp_connections_total", "counter", help, accepted);
        let help = "Connections that were closed at once, because there were too many.";
        out.single("tollgate_resp_connections_refused_total", "counter", help, self.turned_away());
    }
}

/// A connection that is open.
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
    fn what_was_counted_is_told() {
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
            r#"tollgate_resp_commands_total{result="allowed"} 0"#,
            r#"tollgate_resp_commands_total{result="denied"} 2"#,
            r#"tollgate_resp_commands_total{result="error"} 1"#,
            "tollgate_resp_connections 1",
            "tollgate_resp_connections_total 2",
            "tollgate_resp_connections_refused_total 1",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }
}
