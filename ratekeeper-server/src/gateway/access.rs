//! Access records: what the gateway counts and logs about each request.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use http::header::HeaderValue;
use http::uri::PathAndQuery;
use http::{HeaderName, Method, StatusCode};
use ratekeeper::tower::{DecisionEvent, Outcome, status_code};
use ratekeeper::{Clock, Decision, SystemClock, Time};
use ratekeeper_rules::response::ResponseStatus;

use super::client_timeouts::ActiveRequest;
use super::state::Route;
use crate::runtime::access_log::{AccessLog, KeyLog, Line, LineLimit, LoggedKey};
use crate::runtime::log_text::{hex, hex_text};
use crate::runtime::metrics::{LabelType, RequestDecision, RouteMetrics};

pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest request id accepted from a trusted proxy.
const RECEIVED_ID_BYTES_MAX: usize = 128;

/// What is known about the outcome of a request's limits.
#[derive(Debug, Default)]
struct LimitsOutcome {
    decision: RequestDecision,
    /// The store was unavailable, so the failure policy decided.
    is_degraded: bool,
    /// Why the request was rejected, if its limits rejected it.
    reason: Option<&'static str>,
    /// The limit that denied or delayed the request, or else the one with the fewest units left.
    limit: Option<DecidingLimit>,
}

#[derive(Debug)]
struct DecidingLimit {
    index: usize,
    key: LoggedKey,
    decision: Decision,
}

impl LimitsOutcome {
    fn new(event: &DecisionEvent, keys: &KeyLog) -> LimitsOutcome {
        let decision = match event.outcome {
            Outcome::Allowed if event.is_degraded => RequestDecision::DegradedAllowed,
            Outcome::Allowed => RequestDecision::Allowed,
            Outcome::Denied => RequestDecision::Denied,
            Outcome::Closed => RequestDecision::Closed,
            Outcome::Shed => RequestDecision::Shed,
            _ => RequestDecision::Rejected,
        };
        LimitsOutcome {
            decision,
            is_degraded: event.is_degraded,
            reason: event.reason(),
            limit: event.deciding_rule().map(|rule| DecidingLimit {
                index: rule.index,
                key: keys.logged(event.key(rule)),
                decision: rule.decision,
            }),
        }
    }
}

/// What all access records share: the log, the in-flight counter and the clock.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(crate) log: Arc<AccessLog>,
    /// Metrics of requests without a route.
    pub(crate) unrouted: Arc<RouteMetrics>,
    /// Requests in flight, limited by `max_in_flight`.
    pub(crate) in_flight: AtomicUsize,
    clock: SystemClock,
}

impl Recorder {
    pub(crate) fn new(log: Arc<AccessLog>, unrouted: Arc<RouteMetrics>) -> Recorder {
        Recorder { log, unrouted, in_flight: AtomicUsize::new(0), clock: SystemClock::new() }
    }
}

/// One worker's handle to the shared [`Recorder`], so that its requests contend with no other worker's.
#[derive(Debug)]
pub(crate) struct WorkerRecorder {
    shared: Arc<Recorder>,
    worker: usize,
    /// Starts at a random number: ids are unique within a worker and collide across workers only by chance.
    next_id: AtomicU64,
}

impl WorkerRecorder {
    pub(crate) fn new(shared: Arc<Recorder>, worker: usize) -> WorkerRecorder {
        WorkerRecorder { shared, worker, next_id: AtomicU64::new(RandomState::new().hash_one("request ids")) }
    }

    fn id(&self) -> RequestId {
        RequestId::Generated(self.next_id.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

/// A request id, logged here and sent to the upstream.
#[derive(Clone, Debug)]
pub(crate) enum RequestId {
    Generated(u64),
    /// From a trusted proxy.
    Received(HeaderValue),
}

impl RequestId {
    pub(crate) fn value(&self) -> Option<HeaderValue> {
        match self {
            RequestId::Generated(number) => HeaderValue::from_bytes(&hex(*number)).ok(),
            RequestId::Received(value) => Some(value.clone()),
        }
    }
}

/// The record of a request in flight. Dropping it, after the response is sent or the client has disconnected, counts
/// and logs the request.
#[derive(Debug)]
pub(crate) struct AccessRecord {
    recorder: Arc<WorkerRecorder>,
    started: Time,
    id: RequestId,
    client: IpAddr,
    /// Set if the request is logged and its head could be parsed.
    method: Option<Method>,
    path: Option<PathAndQuery>,
    route: Option<Arc<Route>>,
    outcome: LimitsOutcome,
    status: StatusCode,
    bytes: u64,
    has_permit: bool,
    is_logged: bool,
    active: ActiveRequest,
}

impl AccessRecord {
    pub(crate) fn new(recorder: &Arc<WorkerRecorder>, peer: IpAddr, active: ActiveRequest) -> AccessRecord {
        AccessRecord {
            id: recorder.id(),
            recorder: recorder.clone(),
            started: recorder.shared.clock.now(),
            client: peer,
            method: None,
            path: None,
            route: None,
            outcome: LimitsOutcome::default(),
            // Logged if the client disconnects before it gets a response.
            status: status_code(ResponseStatus::ClientClosedRequest),
            bytes: 0,
            has_permit: false,
            is_logged: false,
            active,
        }
    }

    /// Marks the request for the access log, with this method and path.
    pub(crate) fn log(&mut self, method: &Method, path: Option<&PathAndQuery>) {
        (self.method, self.path, self.is_logged) = (Some(method.clone()), path.cloned(), true);
    }

    /// Records a request whose head could not be parsed; hyper has answered it.
    pub(crate) fn reject_malformed(mut self, status: ResponseStatus, is_logged: bool) {
        self.set_decision(RequestDecision::Rejected);
        (self.status, self.is_logged) = (status_code(status), is_logged);
    }

    pub(crate) fn set_route(&mut self, route: &Arc<Route>, client: IpAddr) {
        (self.route, self.client) = (Some(route.clone()), client);
    }

    /// Acquires one of `max` in-flight permits; false if all are in use.
    pub(crate) fn acquire_permit(&mut self, max: usize) -> bool {
        self.has_permit = self.recorder.shared.in_flight.fetch_add(1, Ordering::Relaxed) < max;
        if !self.has_permit {
            self.recorder.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
        self.has_permit
    }

    /// Records what the limits decided.
    pub(crate) fn set_event(&mut self, event: &DecisionEvent, keys: &KeyLog) {
        self.outcome = LimitsOutcome::new(event, keys);
    }

    /// Records that the request is rejected before any limit, and returns the response.
    pub(crate) fn reject<T>(&mut self, response: T) -> T {
        self.set_decision(RequestDecision::Rejected);
        response
    }

    /// Records a decision that no limit made.
    pub(crate) fn set_decision(&mut self, decision: RequestDecision) {
        self.outcome.decision = decision;
    }

    /// Adopts the request id of a trusted proxy, which may have it from a client, if it is an id: any other text keeps
    /// the generated one.
    pub(crate) fn adopt_id(&mut self, received: &HeaderValue) {
        let is_id_byte = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@~".contains(byte);
        if (1..=RECEIVED_ID_BYTES_MAX).contains(&received.len()) && received.as_bytes().iter().all(is_id_byte)
        {
            self.id = RequestId::Received(received.clone());
        }
    }

    pub(crate) fn id(&self) -> &RequestId {
        &self.id
    }

    pub(crate) fn set_status(&mut self, status: StatusCode) {
        self.status = status;
    }

    /// Whether data of this connection waits for the client to read.
    pub(crate) fn is_client_blocked(&self) -> bool {
        self.active.is_client_blocked()
    }

    pub(crate) fn add_bytes(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        let WorkerRecorder { shared, worker, .. } = &*self.recorder;
        if self.has_permit {
            shared.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
        let now = shared.clock.now();
        let took = now.saturating_since(self.started);
        let LimitsOutcome { decision, is_degraded, reason, limit } = std::mem::take(&mut self.outcome);
        let metrics = self.route.as_ref().map_or(&shared.unrouted, |route| &route.metrics);
        metrics.count(decision, self.status.as_u16(), took);
        if !self.is_logged {
            return;
        }
        let digits;
        let id = match &self.id {
            RequestId::Generated(number) => {
                digits = hex(*number);
                hex_text(&digits)
            }
            RequestId::Received(value) => value.to_str().unwrap_or_default(),
        };
        let limit = limit.as_ref().and_then(|limit| {
            let name = self.route.as_ref()?.limit_names.get(limit.index)?;
            Some(LineLimit { name, key: &limit.key, decision: limit.decision })
        });
        shared.log.write(
            *worker,
            now,
            &Line {
                id,
                client: self.client,
                method: self.method.as_ref().map_or("", Method::as_str),
                // The query often contains secrets, so it is not logged.
                path: self.path.as_ref().map_or("", PathAndQuery::path),
                route: self.route.as_ref().map_or("", |route| &route.id.0),
                status: self.status.as_u16(),
                decision: decision.name(),
                is_degraded,
                reason,
                limit,
                took,
                bytes: self.bytes,
            },
        );
    }
}
