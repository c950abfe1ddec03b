//! Request and limit metrics.
//!
//! Counters are sharded by thread, so that counting costs a request only an addition; a scrape sums the shards.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ratekeeper::tower::{DecisionEvent, RuleNames, RuleOutcome};

mod exposition;
pub(crate) mod families;
mod labels;

pub use exposition::Exposition;
pub(crate) use labels::{
    ApiConnectionRejection, CallOutcome, CommandOutcome, ConnectionRejection, Counters, Endpoint,
    EndpointResult, LabelType, LimitDecision, ReloadResult, RequestDecision,
};

use exposition::Seconds;
use labels::STATUS_CLASSES;

const CLASSES: usize = STATUS_CLASSES.len();

/// Upper bounds of the histogram buckets, in microseconds; one more bucket holds longer durations.
const BUCKETS_US: [u64; 14] = [
    250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    10_000_000,
];

/// The number of threads that have counted something.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed);
}

/// Counters in shards. Each thread has a shard; with more threads than shards, some threads share one.
#[derive(Debug)]
struct Sharded<T>(Box<[T]>);

impl<T: Default> Sharded<T> {
    fn new(shards: usize) -> Sharded<T> {
        Sharded((0..shards.max(1)).map(|_| T::default()).collect())
    }

    /// The shard of this thread.
    fn own(&self) -> &T {
        // A thread that is terminating has no number.
        &self.0[THREAD.try_with(|number| *number).unwrap_or_default() % self.0.len()]
    }

    fn sum(&self, of: impl Fn(&T) -> &AtomicU64) -> u64 {
        self.0.iter().map(|shard| of(shard).load(Ordering::Relaxed)).sum()
    }
}

/// One shard of the counters of a route, on separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct RouteCounters {
    requests: [[AtomicU64; CLASSES]; RequestDecision::ALL.len()],
    buckets: [AtomicU64; BUCKETS_US.len() + 1],
    micros: AtomicU64,
}

/// The counters of a route.
#[derive(Debug)]
pub(crate) struct RouteMetrics(Sharded<RouteCounters>);

impl RouteMetrics {
    /// Counts a completed request.
    pub(crate) fn count(&self, decision: RequestDecision, status: u16, duration: Duration) {
        let counts = self.0.own();
        let class = usize::from(status / 100).clamp(1, CLASSES) - 1;
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = BUCKETS_US.partition_point(|end| *end < micros);
        counts.requests[decision.index()][class].fetch_add(1, Ordering::Relaxed);
        counts.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        counts.micros.fetch_add(micros, Ordering::Relaxed);
    }
}

/// One shard of the counters of a limit, on separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct LimitCounters {
    by_decision: [AtomicU64; LimitDecision::ALL.len()],
}

impl LimitDecision {
    fn of(rule: &RuleOutcome, is_degraded: bool) -> LimitDecision {
        match (rule.is_shadow, rule.is_banned, rule.decision.allowed) {
            (true, _, false) => LimitDecision::WouldDeny,
            (_, _, true) if is_degraded => LimitDecision::DegradedAllowed,
            (_, _, true) => LimitDecision::Allowed,
            (false, true, false) => LimitDecision::Banned,
            (false, false, false) if is_degraded => LimitDecision::DegradedDenied,
            (false, false, false) => LimitDecision::Denied,
        }
    }
}

/// The counters of a limit.
#[derive(Debug)]
pub(crate) struct LimitMetrics(Sharded<LimitCounters>);

impl LimitMetrics {
    fn sum(&self, decision: LimitDecision) -> u64 {
        self.0.sum(|counts| &counts.by_decision[decision.index()])
    }

    fn count(&self, decision: LimitDecision) {
        self.0.own().by_decision[decision.index()].fetch_add(1, Ordering::Relaxed);
    }
}

/// An observer that counts the decisions of limits, whichever service checks them.
pub(crate) fn count_decisions(
    limits: Vec<Arc<LimitMetrics>>,
) -> impl Fn(&DecisionEvent, RuleNames<'_>) + Send + Sync + 'static {
    move |event, _| {
        for rule in &event.rules {
            if let Some(limit) = limits.get(rule.index) {
                limit.count(LimitDecision::of(rule, event.is_degraded));
            }
        }
    }
}

/// All counters, by name. A reload drops the counters of routes and limits that it removes.
#[derive(Debug)]
pub(crate) struct Metrics {
    shards: usize,
    named: Mutex<MetricsByName>,
    reloads: Counters<ReloadResult>,
}

#[derive(Clone, Debug, Default)]
struct MetricsByName {
    routes: HashMap<String, Arc<RouteMetrics>>,
    limits: HashMap<String, Arc<LimitMetrics>>,
    /// The names of the shadow limits.
    shadow_limits: HashSet<String>,
}

/// The counters of a configuration that is not yet applied: they are not reported before [`Metrics::publish`].
#[derive(Debug)]
pub(crate) struct MetricsDraft {
    shards: usize,
    before: MetricsByName,
    named: MetricsByName,
}

impl MetricsDraft {
    /// The counters of a route. A reload keeps them as long as a route of this name exists.
    pub(crate) fn route(&mut self, name: &str) -> Arc<RouteMetrics> {
        let before = self.before.routes.get(name).cloned();
        let route = before.unwrap_or_else(|| Arc::new(RouteMetrics(Sharded::new(self.shards))));
        self.named.routes.entry(name.to_owned()).or_insert(route).clone()
    }

    /// The counters of a limit, kept across reloads like those of a route.
    pub(crate) fn limit(&mut self, name: &str) -> Arc<LimitMetrics> {
        let before = self.before.limits.get(name).cloned();
        let limit = before.unwrap_or_else(|| Arc::new(LimitMetrics(Sharded::new(self.shards))));
        self.named.limits.entry(name.to_owned()).or_insert(limit).clone()
    }

    /// Marks a limit as a shadow limit.
    pub(crate) fn mark_shadow(&mut self, name: &str) {
        self.named.shadow_limits.insert(name.to_owned());
    }
}

impl Metrics {
    pub(crate) fn new(shards: usize) -> Metrics {
        Metrics { shards, named: Mutex::default(), reloads: Counters::default() }
    }

    /// Starts the counters of the next configuration.
    pub(crate) fn draft(&self) -> MetricsDraft {
        let before = self.named.lock().unwrap_or_else(PoisonError::into_inner).clone();
        MetricsDraft { shards: self.shards, before, named: MetricsByName::default() }
    }

    /// Reports these counters from now on, and no others.
    pub(crate) fn publish(&self, draft: MetricsDraft) {
        *self.named.lock().unwrap_or_else(PoisonError::into_inner) = draft.named;
    }

    pub(crate) fn count_reload(&self, succeeded: bool) {
        self.reloads.count(if succeeded { ReloadResult::Success } else { ReloadResult::Failure });
    }

    /// Totals of requests and limits since the start; those of routes and limits that a reload removed are missing.
    pub(crate) fn traffic(&self) -> Traffic {
        let named = self.named.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let requests = |decision: &RequestDecision| {
            let of = |route: &Arc<RouteMetrics>| -> u64 {
                (0..CLASSES).map(|class| route.0.sum(|it| &it.requests[decision.index()][class])).sum()
            };
            (decision.name(), named.routes.values().map(of).sum())
        };
        let limit = |(name, limit): (&String, &Arc<LimitMetrics>)| LimitTraffic {
            name: name.clone(),
            is_shadow: named.shadow_limits.contains(name),
            allowed: limit.sum(LimitDecision::Allowed) + limit.sum(LimitDecision::DegradedAllowed),
            denied: [
                LimitDecision::Denied,
                LimitDecision::Banned,
                LimitDecision::WouldDeny,
                LimitDecision::DegradedDenied,
            ]
            .map(|decision| limit.sum(decision))
            .iter()
            .sum(),
        };
        Traffic {
            decisions: RequestDecision::ALL.iter().map(requests).collect(),
            limits: named.limits.iter().map(limit).collect(),
        }
    }

    /// Writes all metrics in the text format of Prometheus.
    pub(crate) fn write(&self, out: &mut Exposition) {
        let named = self.named.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut reloads = out.family(&families::RELOADS);
        for (result, count) in self.reloads.counts() {
            reloads.sample([result], count);
        }
        let mut limits: Vec<_> = named.limits.iter().collect();
        limits.sort_unstable_by_key(|(name, _)| *name);
        let mut decisions = out.family(&families::LIMIT_DECISIONS);
        for (name, limit) in limits {
            for decision in LimitDecision::ALL {
                decisions.sample([name, decision.name()], limit.sum(*decision));
            }
        }
        let mut routes: Vec<_> = named.routes.iter().collect();
        routes.sort_unstable_by_key(|(name, _)| *name);
        let mut requests = out.family(&families::REQUESTS);
        for (name, route) in &routes {
            for decision in RequestDecision::ALL {
                for (class, (class_name, _)) in STATUS_CLASSES.iter().enumerate() {
                    let count = route.0.sum(|counts| &counts.requests[decision.index()][class]);
                    // Most combinations never occur.
                    if count > 0 {
                        requests.sample([name, decision.name(), class_name], count);
                    }
                }
            }
        }
        let mut durations = out.family(&families::REQUEST_DURATION);
        for (name, route) in &routes {
            let ends =
                BUCKETS_US.iter().map(|micros| Seconds(*micros).to_string()).chain(["+Inf".to_owned()]);
            let counts = (0..).map(|number: usize| route.0.sum(|counts| &counts.buckets[number]));
            let sum = Seconds(route.0.sum(|counts| &counts.micros));
            durations.histogram([name], ends.zip(counts), sum);
        }
    }
}

/// Totals of what the gateway has decided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests, by decision.
    pub decisions: Vec<(&'static str, u64)>,
    /// The limits, in no order.
    pub limits: Vec<LimitTraffic>,
}

/// Totals of one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitTraffic {
    /// The name of the limit.
    pub name: String,
    /// Whether it is a shadow limit, whose denials are not enforced.
    pub is_shadow: bool,
    /// Checks that it allowed.
    pub allowed: u64,
    /// Checks that it denied or, as a shadow limit, would have denied, or that a ban denied.
    pub denied: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrape_sums_the_counters_of_all_threads() {
        let metrics = Metrics::new(2);
        let mut draft = metrics.draft();
        let route = draft.route("api \"v1\"");
        route.count(RequestDecision::Allowed, 200, Duration::from_micros(250));
        std::thread::scope(|scope| {
            scope.spawn(|| route.count(RequestDecision::Allowed, 204, Duration::from_micros(251)));
        });
        route.count(RequestDecision::Denied, 429, Duration::from_secs(60));
        draft.limit("per-user").count(LimitDecision::Denied);
        metrics.publish(draft);
        let mut out = Exposition::default();
        metrics.write(&mut out);
        let text = out.into_text();
        for line in [
            r#"ratekeeper_requests_total{route="api \"v1\"",decision="allowed",code="2xx"} 2"#,
            r#"ratekeeper_requests_total{route="api \"v1\"",decision="denied",code="4xx"} 1"#,
            r#"ratekeeper_request_duration_seconds_bucket{route="api \"v1\"",le="0.00025"} 1"#,
            r#"ratekeeper_request_duration_seconds_bucket{route="api \"v1\"",le="0.0005"} 2"#,
            r#"ratekeeper_request_duration_seconds_bucket{route="api \"v1\"",le="10"} 2"#,
            r#"ratekeeper_request_duration_seconds_bucket{route="api \"v1\"",le="+Inf"} 3"#,
            r#"ratekeeper_request_duration_seconds_sum{route="api \"v1\""} 60.000501"#,
            r#"ratekeeper_request_duration_seconds_count{route="api \"v1\""} 3"#,
            r#"ratekeeper_limit_decisions_total{limit="per-user",decision="denied"} 1"#,
            r#"ratekeeper_limit_decisions_total{limit="per-user",decision="allowed"} 0"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }

    #[test]
    fn removed_route_is_no_longer_reported() {
        let metrics = Metrics::new(1);
        let mut draft = metrics.draft();
        draft.route("former").count(RequestDecision::Allowed, 200, Duration::ZERO);
        draft.route("new").count(RequestDecision::Allowed, 200, Duration::ZERO);
        metrics.publish(draft);
        let mut draft = metrics.draft();
        draft.route("new").count(RequestDecision::Allowed, 200, Duration::ZERO);
        metrics.publish(draft);
        let mut out = Exposition::default();
        metrics.write(&mut out);
        let text = out.into_text();
        assert!(!text.contains("former"));
        assert!(text.contains(r#"{route="new",decision="allowed",code="2xx"} 2"#));
    }
}
