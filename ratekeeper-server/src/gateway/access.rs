//! Access records: what the gateway counts and logs about each request.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use http::header::HeaderValue;
use http::uri::PathAndQuery;
use http::{HeaderName, Method, StatusCode};
use ratekeeper::tower::{DecisionEvent, Outcome};
use ratekeeper::{Clock, SystemClock, Time};

use super::state::Route;
use super::watch::Busy;
use crate::access_log::{AccessLog, Line};
use crate::metrics::{Decision, LimitDecision, LimitMetrics, RouteMetrics};

pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest request id accepted from a trusted proxy.
const GIVEN_ID_BYTES_MAX: usize = 128;

thread_local! {
    /// Number of this thread's worker, for the limit observer, which has no other access to it.
    static WORKER: Cell<usize> = const { Cell::new(0) };
}

/// Marks this thread as worker `number`.
pub(crate) fn set_worker(number: usize) {
    WORKER.set(number);
}

/// Outcome of a request's limits, written by the limit observer and read when the request ends.
#[derive(Debug)]
pub(crate) struct Said {
    decision: AtomicU8,
    /// The number of the rule that denied or delayed the request, from 1; 0 if none.
    rule: AtomicU32,
    waited_us: AtomicU64,
}

impl Default for Said {
    /// No decision yet.
    fn default() -> Said {
        Said {
            decision: AtomicU8::new(Decision::Undecided as u8),
            rule: AtomicU32::new(0),
            waited_us: AtomicU64::new(0),
        }
    }
}

/// Counts each limit's decision and records the outcome in the request's [`Said`].
pub(crate) fn observer(
    limits: Vec<Arc<LimitMetrics>>,
) -> impl Fn(&DecisionEvent<'_>) + Send + Sync + 'static {
    move |observed| {
        let worker = WORKER.get();
        for rule in observed.rules {
            let decision = match (rule.is_shadow, rule.is_banned, rule.decision.allowed) {
                (true, _, false) => LimitDecision::WouldDeny,
                (_, _, true) => LimitDecision::Allowed,
                (false, true, false) => LimitDecision::Banned,
                (false, false, false) => LimitDecision::Denied,
            };
            if let Some(limit) = limits.get(rule.index) {
                limit.count(worker, decision);
            }
        }
        let said = observed.subject.and_then(|subject| subject.downcast_ref::<Said>());
        if let Some(said) = said {
            said.hear(observed);
        }
    }
}

impl Said {
    fn hear(&self, observed: &DecisionEvent<'_>) {
        let decision = match observed.outcome {
            Outcome::Allowed => Decision::Allowed,
            Outcome::Denied => Decision::Denied,
            Outcome::Closed => Decision::Closed,
            Outcome::Shed => Decision::Shed,
            _ => Decision::Refused,
        };
        self.set(decision);
        let mut enforced = observed.rules.iter().filter(|rule| !rule.is_shadow);
        let rule = match decision {
            Decision::Allowed => {
                enforced.max_by_key(|rule| rule.decision.delay).filter(|it| !it.decision.delay.is_zero())
            }
            _ => enforced.find(|rule| !rule.decision.allowed),
        };
        if let Some(rule) = rule {
            let waited = u64::try_from(rule.decision.delay.as_micros()).unwrap_or(u64::MAX);
            self.rule.store(u32::try_from(rule.index + 1).unwrap_or(0), Ordering::Relaxed);
            self.waited_us.store(waited, Ordering::Relaxed);
        }
    }

    pub(crate) fn set(&self, decision: Decision) {
        self.decision.store(decision as u8, Ordering::Relaxed);
    }
}

/// What all access records share: the log, the in-flight counter and the clock.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) log: Arc<AccessLog>,
    /// Metrics of requests without a route.
    pub(crate) unrouted: Arc<RouteMetrics>,
    /// Requests in flight, limited by `max_in_flight`.
    pub(crate) under_way: AtomicUsize,
    clock: SystemClock,
}

impl Ledger {
    pub(crate) fn new(log: Arc<AccessLog>, unrouted: Arc<RouteMetrics>) -> Ledger {
        Ledger { log, unrouted, under_way: AtomicUsize::new(0), clock: SystemClock::new() }
    }
}

/// One worker's handle to the ledger, shared only by the requests of that worker.
#[derive(Debug)]
pub(crate) struct Desk {
    ledger: Arc<Ledger>,
    worker: usize,
    /// Starts at a random number: ids are unique within a worker and collide across workers only by chance.
    next_id: AtomicU64,
}

impl Desk {
    pub(crate) fn new(ledger: Arc<Ledger>, worker: usize) -> Desk {
        Desk { ledger, worker, next_id: AtomicU64::new(RandomState::new().hash_one("request ids")) }
    }

    fn id(&self) -> Id {
        Id::Ours(self.next_id.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

/// A request id, logged here and sent to the upstream.
#[derive(Clone, Debug)]
pub(crate) enum Id {
    Ours(u64),
    /// From a trusted proxy.
    Given(HeaderValue),
}

impl Id {
    fn hex(number: u64) -> [u8; 16] {
        let digit = |at: usize| b"0123456789abcdef"[(number >> (60 - 4 * at)) as usize & 0xf];
        std::array::from_fn(digit)
    }

    pub(crate) fn value(&self) -> Option<HeaderValue> {
        match self {
            Id::Ours(number) => HeaderValue::from_bytes(&Id::hex(*number)).ok(),
            Id::Given(value) => Some(value.clone()),
        }
    }
}

/// The record of a request in flight. Dropping it, after the response is sent or the client has disconnected, counts
/// and logs the request.
#[derive(Debug)]
pub(crate) struct Passage {
    desk: Arc<Desk>,
    begin: Time,
    id: Id,
    client: IpAddr,
    /// Set if the request is logged and its head could be parsed.
    method: Option<Method>,
    path: Option<PathAndQuery>,
    route: Option<Arc<Route>>,
    said: Arc<Said>,
    status: StatusCode,
    bytes: u64,
    has_place: bool,
    is_logged: bool,
    _busy: Busy,
}

impl Passage {
    pub(crate) fn new(desk: &Arc<Desk>, peer: IpAddr, busy: Busy) -> Passage {
        Passage {
            id: desk.id(),
            desk: desk.clone(),
            begin: desk.ledger.clock.now(),
            client: peer,
            method: None,
            path: None,
            route: None,
            said: Arc::default(),
            // Logged if the client disconnects before it gets a response.
            status: StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
            bytes: 0,
            has_place: false,
            is_logged: false,
            _busy: busy,
        }
    }

    /// Marks the request for the access log, with this method and path.
    pub(crate) fn log(&mut self, method: &Method, path: Option<&PathAndQuery>) {
        (self.method, self.path, self.is_logged) = (Some(method.clone()), path.cloned(), true);
    }

    /// Records a request whose head could not be parsed; hyper has answered it.
    pub(crate) fn unread(mut self, status: StatusCode, is_logged: bool) {
        self.said.set(Decision::Refused);
        (self.status, self.is_logged) = (status, is_logged);
    }

    pub(crate) fn routed(&mut self, route: &Arc<Route>, client: IpAddr) {
        (self.route, self.client) = (Some(route.clone()), client);
    }

    /// Takes one of `most` in-flight permits; false if all are in use.
    pub(crate) fn take_place(&mut self, most: usize) -> bool {
        self.has_place = self.desk.ledger.under_way.fetch_add(1, Ordering::Relaxed) < most;
        if !self.has_place {
            self.desk.ledger.under_way.fetch_sub(1, Ordering::Relaxed);
        }
        self.has_place
    }

    /// Where the limit observer records the outcome.
    pub(crate) fn said(&self) -> &Arc<Said> {
        &self.said
    }

    /// Adopts the request id of a trusted proxy, unless it is empty, unreadable or too long for the log.
    pub(crate) fn name(&mut self, given: &HeaderValue) {
        if given.len() <= GIVEN_ID_BYTES_MAX && given.to_str().is_ok_and(|text| !text.is_empty()) {
            self.id = Id::Given(given.clone());
        }
    }

    pub(crate) fn id(&self) -> &Id {
        &self.id
    }

    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.status = status;
    }

    pub(crate) fn sent(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        let Desk { ledger, worker, .. } = &*self.desk;
        if self.has_place {
            ledger.under_way.fetch_sub(1, Ordering::Relaxed);
        }
        let now = ledger.clock.now();
        let took = now.saturating_since(self.begin);
        let decision = Decision::of(self.said.decision.load(Ordering::Relaxed));
        let metrics = self.route.as_ref().map_or(&ledger.unrouted, |route| &route.metrics);
        metrics.count(*worker, decision, self.status.as_u16(), took);
        if !self.is_logged {
            return;
        }
        let hex;
        let id = match &self.id {
            Id::Ours(number) => {
                hex = Id::hex(*number);
                std::str::from_utf8(&hex).unwrap_or_default()
            }
            Id::Given(value) => value.to_str().unwrap_or_default(),
        };
        let rule = self.said.rule.load(Ordering::Relaxed) as usize;
        let limit = self.route.as_ref().and_then(|route| route.limit_names.get(rule.checked_sub(1)?));
        ledger.log.write(
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
                limit: limit.map_or("", |name| name),
                waited: Duration::from_micros(self.said.waited_us.load(Ordering::Relaxed)),
                took,
                bytes: self.bytes,
            },
        );
    }
}
