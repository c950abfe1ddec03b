//! What is known of a request when it is over.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use http::header::HeaderValue;
use http::uri::PathAndQuery;
use http::{HeaderName, Method, StatusCode};
use tollgate::tower::{Observed, Outcome};
use tollgate::{Clock, SystemClock, Time};

use super::state::Route;
use super::watch::Busy;
use crate::access_log::{AccessLog, Line};
use crate::metrics::{Decision, LimitDecision, LimitMetrics, RouteMetrics};

pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Names of requests are longer nowhere.
const GIVEN_ID_BYTES_MAX: usize = 128;

thread_local! {
    /// Which worker this thread is, for what is counted by those who do not know.
    static WORKER: Cell<usize> = const { Cell::new(0) };
}

/// From now on, this thread is that worker.
pub(crate) fn set_worker(number: usize) {
    WORKER.set(number);
}

/// What the limits said to a request, told to whoever gave it to them.
#[derive(Debug)]
pub(crate) struct Said {
    decision: AtomicU8,
    /// The number of the rule that denied or delayed it, from 1.
    rule: AtomicU32,
    waited_us: AtomicU64,
}

impl Default for Said {
    /// Nothing yet.
    fn default() -> Said {
        Said {
            decision: AtomicU8::new(Decision::Undecided as u8),
            rule: AtomicU32::new(0),
            waited_us: AtomicU64::new(0),
        }
    }
}

/// Counts what limits say, and leaves word of it with the request.
pub(crate) fn observer(limits: Vec<Arc<LimitMetrics>>) -> impl Fn(&Observed<'_>) + Send + Sync + 'static {
    move |observed| {
        let worker = WORKER.get();
        for rule in observed.rules {
            let decision = match (rule.is_shadow, rule.is_banned, rule.decision.allowed) {
                (true, _, false) => LimitDecision::WouldDeny,
                (_, _, true) => LimitDecision::Allowed,
                (false, true, false) => LimitDecision::Banned,
                (false, false, false) => LimitDecision::Denied,
            };
            if let Some(limit) = limits.get(rule.number) {
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
    fn hear(&self, observed: &Observed<'_>) {
        let decision = match observed.outcome {
            Outcome::Allowed => Decision::Allowed,
            Outcome::Denied => Decision::Denied,
            Outcome::Closed => Decision::Closed,
            Outcome::Busy => Decision::Shed,
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
            self.rule.store(u32::try_from(rule.number + 1).unwrap_or(0), Ordering::Relaxed);
            self.waited_us.store(waited, Ordering::Relaxed);
        }
    }

    pub(crate) fn set(&self, decision: Decision) {
        self.decision.store(decision as u8, Ordering::Relaxed);
    }
}

/// What the lines of a log are made of, apart from what each request brings.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) log: Arc<AccessLog>,
    /// Of requests without a route.
    pub(crate) unrouted: Arc<RouteMetrics>,
    /// Requests that are under way, for which there are only so many places.
    pub(crate) under_way: AtomicUsize,
    clock: SystemClock,
}

impl Ledger {
    pub(crate) fn new(log: Arc<AccessLog>, unrouted: Arc<RouteMetrics>) -> Ledger {
        Ledger { log, unrouted, under_way: AtomicUsize::new(0), clock: SystemClock::new() }
    }
}

/// One worker's place at the ledger: what its requests share with each other, and with nobody else.
#[derive(Debug)]
pub(crate) struct Desk {
    ledger: Arc<Ledger>,
    worker: usize,
    /// No two requests have the same name, nor do those of two workers, as far as chance goes.
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

/// A request's name, in logs here and at the upstream.
#[derive(Clone, Debug)]
pub(crate) enum Id {
    Ours(u64),
    /// From a proxy that we trust.
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

/// A request that is under way, until it is dropped: its response has gone, or its client has.
#[derive(Debug)]
pub(crate) struct Passage {
    desk: Arc<Desk>,
    begin: Time,
    id: Id,
    client: IpAddr,
    /// If its head could be read.
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
            // What a client that goes away never sees.
            status: StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
            bytes: 0,
            has_place: false,
            is_logged: false,
            _busy: busy,
        }
    }

    /// It is to be in the log, by this method and path.
    pub(crate) fn log(&mut self, method: &Method, path: Option<&PathAndQuery>) {
        (self.method, self.path, self.is_logged) = (Some(method.clone()), path.cloned(), true);
    }

    /// Its head could not be read, and it was answered without us.
    pub(crate) fn unread(mut self, status: StatusCode, is_logged: bool) {
        self.said.set(Decision::Refused);
        (self.status, self.is_logged) = (status, is_logged);
    }

    pub(crate) fn routed(&mut self, route: &Arc<Route>, client: IpAddr) {
        (self.route, self.client) = (Some(route.clone()), client);
    }

    /// Takes a place among the requests under way, if there are fewer than so many.
    pub(crate) fn take_place(&mut self, most: usize) -> bool {
        self.has_place = self.desk.ledger.under_way.fetch_add(1, Ordering::Relaxed) < most;
        if !self.has_place {
            self.desk.ledger.under_way.fetch_sub(1, Ordering::Relaxed);
        }
        self.has_place
    }

    /// Where what the limits say is left.
    pub(crate) fn said(&self) -> &Arc<Said> {
        &self.said
    }

    /// Its name, given by a proxy that we trust. One that cannot be read, or would fill the log, is not taken.
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
                // What stands behind the `?` is often not for others to see.
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
