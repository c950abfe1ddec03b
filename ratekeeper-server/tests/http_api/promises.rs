//! Checks, reservations, settlements, refunds and expiries, in any order and at any time: no more is used than the
//! limit allows, and no budget accumulates above the limit.
//!
//! A ledger runs beside the API. A refund of a known charge is deducted at the time of that charge; a refund without
//! one is deducted from the oldest charges that still count.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use ratekeeper::Clock;
use ratekeeper_server::http_api::{self, refund_expired};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tower_service::Service;

use super::support::Made;

const SIZE: u32 = 10;
const WINDOW_MS: u64 = 10_000;

/// An algorithm, and its guarantee.
#[derive(Clone, Copy, Debug)]
struct Algorithm {
    yaml: &'static str,
    promise: Promise,
    /// The first instant whose charges still count, in milliseconds.
    oldest: fn(now_ms: u64) -> u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Promise {
    /// In any interval, at most the capacity plus the refill of one per second.
    Bucket,
    /// At most the limit in each window that begins at a multiple of its length.
    Windows,
    /// At most the limit in any window.
    AnyWindow,
}

const ALGORITHMS: [Algorithm; 6] = [
    Algorithm {
        yaml: "token_bucket: { capacity: 10, refill: 1/s }",
        promise: Promise::Bucket,
        oldest: |now_ms| now_ms,
    },
    Algorithm {
        yaml: "leaky_bucket: { capacity: 10, leak: 1/s }",
        promise: Promise::Bucket,
        oldest: |now_ms| now_ms,
    },
    Algorithm {
        yaml: "fixed_window: { limit: 10, window: 10s, align: clock }",
        promise: Promise::Windows,
        oldest: |now_ms| now_ms - now_ms % WINDOW_MS,
    },
    Algorithm {
        yaml: "sliding_window_log: { limit: 10, window: 10s }",
        promise: Promise::AnyWindow,
        oldest: |now_ms| now_ms - WINDOW_MS + 1,
    },
    Algorithm {
        yaml: "sliding_window_counter: { limit: 10, window: 10s }",
        promise: Promise::Windows,
        oldest: |now_ms| now_ms - now_ms % WINDOW_MS,
    },
    Algorithm {
        yaml: "sliding_window_counter: { limit: 10, window: 10s, buckets: 5, edge: keep }",
        promise: Promise::AnyWindow,
        // Five buckets of two seconds, and the previous one.
        oldest: |now_ms| (now_ms / 2_000 - 5) * 2_000,
    },
];

#[derive(Clone, Debug)]
enum Step {
    Check(u32),
    Reserve {
        cost: u32,
        expires_secs: u32,
    },
    /// Settles the reservation with this index, counted from the last, at this cost.
    Settle(usize, u32),
    Refund(u32),
    /// Refunds expired reservations.
    Sweep,
    Advance(Duration),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..13_u32).prop_map(Step::Check),
        3 => (0..11_u32, 1..15_u32).prop_map(|(cost, expires_secs)| Step::Reserve { cost, expires_secs }),
        3 => (0..4_usize, 0..14_u32).prop_map(|(which, cost)| Step::Settle(which, cost)),
        2 => (0..14_u32).prop_map(Step::Refund),
        2 => Just(Step::Sweep),
        4 => (0..12_000_u64).prop_map(|millis| Step::Advance(Duration::from_millis(millis))),
    ]
}

/// Units used, and when.
#[derive(Clone, Copy, Debug)]
struct Used {
    at_ms: u64,
    net: u32,
}

/// A refund without a known charge.
#[derive(Clone, Copy, Debug)]
struct Back {
    at_ms: u64,
    cost: u32,
}

/// An open reservation.
#[derive(Clone, Debug)]
struct Held {
    id: Value,
    entry: usize,
    cost: u32,
    expires_at_ms: u64,
}

struct Ledger {
    promise: Promise,
    oldest: fn(u64) -> u64,
    used: Vec<Used>,
    backs: Vec<Back>,
}

impl Ledger {
    fn charge(&mut self, at_ms: u64, net: u32) -> usize {
        self.used.push(Used { at_ms, net });
        self.used.len() - 1
    }

    /// Deducts a refund of a known charge. For a bucket the units return now, so it counts as a refund now. Units
    /// that an earlier refund deducted from the charge are refunded twice, as the caller requested.
    fn strike_out(&mut self, entry: usize, now_ms: u64, cost: u32) {
        if self.promise == Promise::Bucket {
            self.backs.push(Back { at_ms: now_ms, cost });
            return;
        }
        let struck = self.used[entry].net.min(cost);
        self.used[entry].net -= struck;
        self.refund(now_ms, cost - struck);
    }

    fn refund(&mut self, now_ms: u64, mut cost: u32) {
        if self.promise == Promise::Bucket {
            self.backs.push(Back { at_ms: now_ms, cost });
            return;
        }
        let oldest = (self.oldest)(now_ms);
        for used in self.used.iter_mut().filter(|used| used.at_ms >= oldest) {
            let struck = used.net.min(cost);
            used.net -= struck;
            cost -= struck;
        }
    }

    /// Checks that all use was allowed.
    fn check(&self) -> Result<(), TestCaseError> {
        let size = u64::from(SIZE);
        for (first, from) in self.used.iter().enumerate() {
            let later = &self.used[first..];
            match self.promise {
                Promise::Bucket => {
                    let mut sum = 0;
                    for to in later {
                        sum += u64::from(to.net);
                        let back = self.backs.iter().filter(|it| (from.at_ms..=to.at_ms).contains(&it.at_ms));
                        let back: u64 = back.map(|it| u64::from(it.cost)).sum();
                        let most_in_thousandths = (size + back) * 1000 + (to.at_ms - from.at_ms);
                        prop_assert!(sum * 1000 <= most_in_thousandths, "{sum} from {from:?} to {to:?}");
                    }
                }
                Promise::Windows | Promise::AnyWindow => {
                    let end = match self.promise {
                        Promise::Windows => from.at_ms - from.at_ms % WINDOW_MS + WINDOW_MS,
                        _ => from.at_ms + WINDOW_MS,
                    };
                    let inside = later.iter().filter(|used| used.at_ms < end);
                    let sum: u64 = inside.map(|used| u64::from(used.net)).sum();
                    prop_assert!(sum <= size, "{sum} from {from:?}");
                }
            }
        }
        Ok(())
    }
}

struct Api {
    made: Arc<Made>,
    router: axum::Router,
    runtime: Runtime,
}

impl Api {
    fn new(algorithm: Algorithm) -> Api {
        let yaml = format!("limits: {{ one: {{ key: global, {} }} }}", algorithm.yaml);
        let made = Made::new(&yaml, |_| {});
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        Api { router: http_api::router(made.clone()), made, runtime }
    }

    fn ask(&mut self, path: &str, body: &Value) -> (u16, Value) {
        let request = Request::post(path)
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))
            .unwrap();
        let answered = async {
            let response = self.router.call(request).await.unwrap();
            let status = response.status().as_u16();
            (status, response.into_body().collect().await.unwrap().to_bytes())
        };
        let (status, bytes) = self.runtime.block_on(answered);
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    fn now_ms(&self) -> u64 {
        self.made.clock.now().as_nanos() / 1_000_000
    }
}

fn run(algorithm: Algorithm, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut api = Api::new(algorithm);
    let mut ledger =
        Ledger { promise: algorithm.promise, oldest: algorithm.oldest, used: Vec::new(), backs: Vec::new() };
    let mut held: Vec<Held> = Vec::new();
    for step in steps {
        let now_ms = api.now_ms();
        match step {
            Step::Advance(by) => api.made.clock.advance(*by),
            Step::Check(cost) => {
                let (_, said) = api.ask("/v1/check", &json!({ "limit": "one", "cost": cost }));
                if said["allowed"] == true {
                    ledger.charge(now_ms, *cost);
                }
            }
            Step::Reserve { cost, expires_secs } => {
                let ask = json!({ "limit": "one", "cost": cost, "expires": format!("{expires_secs}s") });
                let (_, said) = api.ask("/v1/reserve", &ask);
                if said["allowed"] == true {
                    let entry = ledger.charge(now_ms, *cost);
                    let expires_at_ms = now_ms + u64::from(*expires_secs) * 1000;
                    held.push(Held { id: said["reservation"].clone(), entry, cost: *cost, expires_at_ms });
                }
            }
            Step::Settle(which, cost) if *which < held.len() => {
                let Held { id, entry, expires_at_ms, .. } = held[held.len() - 1 - which].clone();
                let (status, said) = api.ask("/v1/settle", &json!({ "reservation": id, "cost": cost }));
                if expires_at_ms <= now_ms {
                    prop_assert_eq!(status, 409, "it has expired");
                    continue;
                }
                held.remove(held.len() - 1 - which);
                prop_assert_eq!(status, 200, "{}", said);
                let number = |name: &str| said[name].as_u64().map(|it| it as u32).unwrap_or(u32::MAX);
                prop_assert_eq!(number("refunded"), number("reserved").saturating_sub(*cost));
                ledger.strike_out(entry, now_ms, number("refunded"));
                let more = cost.saturating_sub(number("reserved")) - number("uncovered");
                ledger.charge(now_ms, more);
            }
            Step::Settle(..) => {}
            Step::Refund(cost) => {
                api.ask("/v1/refund", &json!({ "limit": "one", "cost": cost }));
                ledger.refund(now_ms, *cost);
            }
            Step::Sweep => {
                let (due, open): (Vec<_>, Vec<_>) =
                    held.into_iter().partition(|it| it.expires_at_ms <= now_ms);
                held = open;
                let swept = api.runtime.block_on(refund_expired(&*api.made));
                prop_assert_eq!(swept, due.len());
                for Held { entry, cost, .. } in due {
                    ledger.strike_out(entry, now_ms, cost);
                }
            }
        }
        let (_, look) = api.ask("/v1/peek", &json!({ "limit": "one", "cost": 0 }));
        let limit = &look["limits"][0];
        prop_assert!(limit["remaining"].as_u64() <= Some(u64::from(SIZE)), "banked: {limit}");
        let (_, more) = api.ask("/v1/peek", &json!({ "limit": "one", "cost": SIZE + 1 }));
        prop_assert_eq!(&more["allowed"], false, "more than it ever holds");
        ledger.check()?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(testbed::ordinary_or_long(64, 192)) })]

    #[test]
    fn use_never_exceeds_the_limit_and_no_budget_accumulates(steps in prop::collection::vec(step(), 1..60)) {
        // Without refunds of unknown charges, the ledger is exact.
        let exact: Vec<Step> = steps.iter().filter(|step| !matches!(step, Step::Refund(_))).cloned().collect();
        for algorithm in ALGORITHMS {
            run(algorithm, &exact).and_then(|()| run(algorithm, &steps)).map_err(|why| TestCaseError::fail(format!("{}: {why}", algorithm.yaml)))?;
        }
    }
}

/// For each algorithm: a client reserves and disappears, and its units are refunded once.
#[test]
fn reservation_of_a_lost_client_is_refunded_once() {
    for algorithm in ALGORITHMS {
        let mut api = Api::new(algorithm);
        let ask = json!({ "limit": "one", "cost": 8, "expires": "2s" });
        assert_eq!(api.ask("/v1/reserve", &ask).1["allowed"], true);
        let left = |api: &mut Api| {
            api.ask("/v1/peek", &json!({ "limit": "one", "cost": 0 })).1["limits"][0]["remaining"].clone()
        };
        assert_eq!(left(&mut api), 2, "{algorithm:?}");
        api.made.clock.advance(Duration::from_secs(2));
        assert_eq!(api.runtime.block_on(refund_expired(&*api.made)), 1, "{algorithm:?}");
        assert_eq!(left(&mut api), 10, "{algorithm:?}");
        assert_eq!(api.runtime.block_on(refund_expired(&*api.made)), 0, "{algorithm:?}");
    }
}
