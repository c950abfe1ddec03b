//! What has happened, counted.
//!
//! Every worker counts in memory of its own, so that counting costs a request nothing but an addition; whoever asks gets
//! the sums. All labels come from the configuration: what clients send never becomes one.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Its limits let it pass, or it has none.
    Allowed,
    /// A limit denied it.
    Denied,
    /// The store was away, and the policy is that nothing passes then.
    Closed,
    /// It is on a list, or is not a request that anybody should see.
    Refused,
    /// There was too much to do.
    Shed,
    /// Its client left before anything was decided.
    Undecided,
}

impl Decision {
    const ALL: [Decision; 6] = [
        Decision::Allowed,
        Decision::Denied,
        Decision::Closed,
        Decision::Refused,
        Decision::Shed,
        Decision::Undecided,
    ];

    /// The one of this number.
    pub(crate) fn of(number: u8) -> Decision {
        Decision::ALL.get(usize::from(number)).copied().unwrap_or(Decision::Undecided)
    }

    /// Its name in metrics and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Decision::Allowed => "allowed",
            Decision::Denied => "denied",
            Decision::Closed => "closed",
            Decision::Refused => "refused",
            Decision::Shed => "shed",
            Decision::Undecided => "undecided",
        }
    }
}

/// 1xx to 5xx.
const CLASSES: usize = 5;

/// Upper ends of the histogram's buckets, in microseconds; what takes longer is in one more.
const BUCKETS_US: [u64; 14] = [
    250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    10_000_000,
];

/// What one worker has counted on one route. On cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counts {
    requests: [[AtomicU64; CLASSES]; Decision::ALL.len()],
    buckets: [AtomicU64; BUCKETS_US.len() + 1],
    micros: AtomicU64,
}

/// What has happened on a route.
#[derive(Debug)]
pub(crate) struct RouteMetrics {
    workers: Box<[Counts]>,
}

impl RouteMetrics {
    fn new(workers: usize) -> RouteMetrics {
        RouteMetrics { workers: (0..workers).map(|_| Counts::default()).collect() }
    }

    /// A request is over.
    pub(crate) fn count(&self, worker: usize, decision: Decision, status: u16, took: Duration) {
        let Some(counts) = self.workers.get(worker) else { return };
        let class = usize::from(status / 100).clamp(1, CLASSES) - 1;
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BUCKETS_US.partition_point(|end| *end < micros);
        counts.requests[decision as usize][class].fetch_add(1, Ordering::Relaxed);
        counts.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        counts.micros.fetch_add(micros, Ordering::Relaxed);
    }

    fn sum(&self, of: impl Fn(&Counts) -> &AtomicU64) -> u64 {
        self.workers.iter().map(|counts| of(counts).load(Ordering::Relaxed)).sum()
    }
}

/// What one worker has seen of one limit.
#[derive(Debug, Default)]
#[repr(align(128))]
struct LimitCounts {
    by_kind: [AtomicU64; LimitDecision::ALL.len()],
}

/// What a limit said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitDecision {
    Allowed,
    Denied,
    Banned,
    /// It only counts.
    WouldDeny,
}

impl LimitDecision {
    const ALL: [LimitDecision; 4] =
        [LimitDecision::Allowed, LimitDecision::Denied, LimitDecision::Banned, LimitDecision::WouldDeny];

    fn name(self) -> &'static str {
        match self {
            LimitDecision::Allowed => "allowed",
            LimitDecision::Denied => "denied",
            LimitDecision::Banned => "banned",
            LimitDecision::WouldDeny => "would_deny",
        }
    }
}

/// What a limit has said.
#[derive(Debug)]
pub(crate) struct LimitMetrics {
    workers: Box<[LimitCounts]>,
}

impl LimitMetrics {
    fn new(workers: usize) -> LimitMetrics {
        LimitMetrics { workers: (0..workers).map(|_| LimitCounts::default()).collect() }
    }

    pub(crate) fn count(&self, worker: usize, decision: LimitDecision) {
        if let Some(counts) = self.workers.get(worker) {
            counts.by_kind[decision as usize].fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Everything that is counted by name. What a configuration no longer has is forgotten.
#[derive(Debug)]
pub(crate) struct Metrics {
    workers: usize,
    named: Mutex<Named>,
    reloads: [AtomicU64; 2],
}

#[derive(Clone, Debug, Default)]
struct Named {
    routes: HashMap<String, Arc<RouteMetrics>>,
    limits: HashMap<String, Arc<LimitMetrics>>,
}

/// The counters of a configuration that may still turn out not to work: nothing is told of them until they are taken.
#[derive(Debug)]
pub(crate) struct Draft {
    workers: usize,
    before: Named,
    named: Named,
}

impl Draft {
    /// The counters of a route, the same ones for as long as there is a route of this name.
    pub(crate) fn route(&mut self, name: &str) -> Arc<RouteMetrics> {
        let before = self.before.routes.get(name).cloned();
        let route = before.unwrap_or_else(|| Arc::new(RouteMetrics::new(self.workers)));
        self.named.routes.entry(name.to_owned()).or_insert(route).clone()
    }

    /// The counters of a limit.
    pub(crate) fn limit(&mut self, name: &str) -> Arc<LimitMetrics> {
        let before = self.before.limits.get(name).cloned();
        let limit = before.unwrap_or_else(|| Arc::new(LimitMetrics::new(self.workers)));
        self.named.limits.entry(name.to_owned()).or_insert(limit).clone()
    }
}

impl Metrics {
    pub(crate) fn new(workers: usize) -> Metrics {
        Metrics { workers, named: Mutex::default(), reloads: Default::default() }
    }

    /// For the next configuration.
    pub(crate) fn draft(&self) -> Draft {
        let before = self.named.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Draft { workers: self.workers, before, named: Named::default() }
    }

    /// From now on these are told, and no others.
    pub(crate) fn take(&self, draft: Draft) {
        *self.named.lock().unwrap_or_else(PoisonError::into_inner) = draft.named;
    }

    pub(crate) fn reloaded(&self, is_done: bool) {
        self.reloads[usize::from(is_done)].fetch_add(1, Ordering::Relaxed);
    }

    /// Writes all of it in the text format of Prometheus.
    pub(crate) fn write(&self, out: &mut Exposition) {
        let named = self.named.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut routes: Vec<_> = named.routes.iter().collect();
        routes.sort_unstable_by_key(|(name, _)| *name);
        out.family("tollgate_requests_total", "counter", "Requests by route, decision and class of status.");
        for (name, route) in &routes {
            for decision in Decision::ALL {
                for class in 0..CLASSES {
                    let count = route.sum(|counts| &counts.requests[decision as usize][class]);
                    // Most never happen.
                    if count > 0 {
                        let (decision, code) = (decision.name(), format!("{}xx", class + 1));
                        let labels = [("route", name.as_str()), ("decision", decision), ("code", &code)];
                        out.sample("tollgate_requests_total", &labels, count);
                    }
                }
            }
        }
        let name = "tollgate_request_duration_seconds";
        out.family(name, "histogram", "From a request's head to the end of its response.");
        for (route_name, route) in &routes {
            let mut sum = 0;
            for (number, end) in BUCKETS_US.iter().map(Some).chain([None]).enumerate() {
                sum += route.sum(|counts| &counts.buckets[number]);
                let end = end.map_or("+Inf".to_owned(), |micros| Seconds(*micros).to_string());
                out.sample(&format!("{name}_bucket"), &[("route", route_name), ("le", &end)], sum);
            }
            let micros = route.sum(|counts| &counts.micros);
            out.sample(&format!("{name}_sum"), &[("route", route_name)], Seconds(micros));
            out.sample(&format!("{name}_count"), &[("route", route_name)], sum);
        }
        out.family("tollgate_limit_decisions_total", "counter", "What each limit said.");
        let mut limits: Vec<_> = named.limits.iter().collect();
        limits.sort_unstable_by_key(|(name, _)| *name);
        for (name, limit) in limits {
            for decision in LimitDecision::ALL {
                let of = |counts: &LimitCounts| counts.by_kind[decision as usize].load(Ordering::Relaxed);
                let count: u64 = limit.workers.iter().map(of).sum();
                let labels = [("limit", name.as_str()), ("decision", decision.name())];
                out.sample("tollgate_limit_decisions_total", &labels, count);
            }
        }
        out.family("tollgate_reloads_total", "counter", "Configurations that were read again.");
        for (is_done, result) in ["kept_old", "done"].iter().enumerate() {
            let count = self.reloads[is_done].load(Ordering::Relaxed);
            out.sample("tollgate_reloads_total", &[("result", result)], count);
        }
    }
}

/// Microseconds, written as seconds.
struct Seconds(u64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// Metrics in the text format of Prometheus.
#[derive(Debug, Default)]
pub struct Exposition(String);

impl Exposition {
    /// What samples of a name are, before the first of them.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing into a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// A number with its labels.
    pub fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl fmt::Display) {
        self.0.push_str(name);
        for (number, (label, text)) in labels.iter().enumerate() {
            self.0.push_str(if number == 0 { "{" } else { "," });
            let text = text.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
            let _ = write!(self.0, "{label}=\"{text}\"");
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    /// One number without labels.
    pub fn single(&mut self, name: &str, kind: &str, help: &str, value: impl fmt::Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }

    /// What was written.
    pub fn into_text(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_is_told_in_sums() {
        let metrics = Metrics::new(2);
        let mut draft = metrics.draft();
        let route = draft.route("api \"v1\"");
        route.count(0, Decision::Allowed, 200, Duration::from_micros(250));
        route.count(1, Decision::Allowed, 204, Duration::from_micros(251));
        route.count(1, Decision::Denied, 429, Duration::from_secs(60));
        draft.limit("per-user").count(1, LimitDecision::Denied);
        metrics.take(draft);
        let mut out = Exposition::default();
        metrics.write(&mut out);
        let text = out.into_text();
        for line in [
            r#"tollgate_requests_total{route="api \"v1\"",decision="allowed",code="2xx"} 2"#,
            r#"tollgate_requests_total{route="api \"v1\"",decision="denied",code="4xx"} 1"#,
            r#"tollgate_request_duration_seconds_bucket{route="api \"v1\"",le="0.00025"} 1"#,
            r#"tollgate_request_duration_seconds_bucket{route="api \"v1\"",le="0.0005"} 2"#,
            r#"tollgate_request_duration_seconds_bucket{route="api \"v1\"",le="10"} 2"#,
            r#"tollgate_request_duration_seconds_bucket{route="api \"v1\"",le="+Inf"} 3"#,
            r#"tollgate_request_duration_seconds_sum{route="api \"v1\""} 60.000501"#,
            r#"tollgate_request_duration_seconds_count{route="api \"v1\""} 3"#,
            r#"tollgate_limit_decisions_total{limit="per-user",decision="denied"} 1"#,
            r#"tollgate_limit_decisions_total{limit="per-user",decision="allowed"} 0"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }

    #[test]
    fn what_there_is_no_more_is_forgotten() {
        let metrics = Metrics::new(1);
        let mut draft = metrics.draft();
        draft.route("former").count(0, Decision::Allowed, 200, Duration::ZERO);
        draft.route("new").count(0, Decision::Allowed, 200, Duration::ZERO);
        metrics.take(draft);
        let mut draft = metrics.draft();
        draft.route("new").count(0, Decision::Allowed, 200, Duration::ZERO);
        metrics.take(draft);
        let mut out = Exposition::default();
        metrics.write(&mut out);
        let text = out.into_text();
        assert!(!text.contains("former"));
        assert!(text.contains(r#"{route="new",decision="allowed",code="2xx"} 2"#));
    }
}
