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

use super::support::TestContext;

const SIZE: u32 = 10;
const WINDOW_MS: u64 = 10_000;

/// An algorithm, and its guarantee.
#[derive(Clone, Copy, Debug)]
struct Algorithm {
    yaml: &'static str,
    guarantee: Guarantee,
    /// The first instant whose charges still count, in milliseconds.
    oldest: fn(now_ms: u64) -> u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Guarantee {
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
        guarantee: Guarantee::Bucket,
        oldest: |now_ms| now_ms,
    },
    Algorithm {
        yaml: "leaky_bucket: { capacity: 10, leak: 1/s }",
        guarantee: Guarantee::Bucket,
        oldest: |now_ms| now_ms,
    },
    Algorithm {
        yaml: "fixed_window: { limit: 10, window: 10s, align: clock }",
        guarantee: Guarantee::Windows,
        oldest: |now_ms| now_ms - now_ms % WINDOW_MS,
    },
    Algorithm {
        yaml: "sliding_window_log: { limit: 10, window: 10s }",
        guarantee: Guarantee::AnyWindow,
        oldest: |now_ms| now_ms - WINDOW_MS + 1,
    },
    Algorithm {
        yaml: "sliding_window_counter: { limit: 10, window: 10s }",
        guarantee: Guarantee::Windows,
        oldest: |now_ms| now_ms - now_ms % WINDOW_MS,
    },
    Algorithm {
        yaml: "sliding_window_counter: { limit: 10, window: 10s, buckets: 5, edge: keep }",
        guarantee: Guarantee::AnyWindow,
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
struct Usage {
    at_ms: u64,
    net: u32,
}

/// A refund without a known charge.
#[derive(Clone, Copy, Debug)]
struct RefundEntry {
    at_ms: u64,
    cost: u32,
}

/// An open reservation.
#[derive(Clone, Debug)]
struct OpenReservation {
    id: Value,
    entry: usize,
    cost: u32,
    expires_at_ms: u64,
}

struct Ledger {
    guarantee: Guarantee,
    oldest: fn(u64) -> u64,
    used: Vec<Usage>,
    refunds: Vec<RefundEntry>,
}

impl Ledger {
    fn charge(&mut self, at_ms: u64, net: u32) -> usize {
        self.used.push(Usage { at_ms, net });
        self.used.len() - 1
    }

    /// Deducts a refund of a known charge. For a bucket the units return now, so it counts as a refund now. Units
    /// that an earlier refund deducted from the charge are refunded twice, as the caller requested.
    fn deduct(&mut self, entry: usize, now_ms: u64, cost: u32) {
        if self.guarantee == Guarantee::Bucket {
            self.refunds.push(RefundEntry { at_ms: now_ms, cost });
            return;
        }
        let deducted = self.used[entry].net.min(cost);
        self.used[entry].net -= deducted;
        self.refund(now_ms, cost - deducted);
    }

    fn refund(&mut self, now_ms: u64, mut cost: u32) {
        if self.guarantee == Guarantee::Bucket {
            self.refunds.push(RefundEntry { at_ms: now_ms, cost });
            return;
        }
        let oldest = (self.oldest)(now_ms);
        for used in self.used.iter_mut().filter(|used| used.at_ms >= oldest) {
            let deducted = used.net.min(cost);
            used.net -= deducted;
            cost -= deducted;
        }
    }

    /// Checks that all use was allowed.
    fn check(&self) -> Result<(), TestCaseError> {
        let size = u64::from(SIZE);
        for (first, from) in self.used.iter().enumerate() {
            let later = &self.used[first..];
            match self.guarantee {
                Guarantee::Bucket => {
                    let mut sum = 0;
                    for to in later {
                        sum += u64::from(to.net);
                        let refunded =
                            self.refunds.iter().filter(|it| (from.at_ms..=to.at_ms).contains(&it.at_ms));
                        let refunded: u64 = refunded.map(|it| u64::from(it.cost)).sum();
                        let max_in_thousandths = (size + refunded) * 1000 + (to.at_ms - from.at_ms);
                        prop_assert!(sum * 1000 <= max_in_thousandths, "{sum} from {from:?} to {to:?}");
                    }
                }
                Guarantee::Windows | Guarantee::AnyWindow => {
                    let end = match self.guarantee {
                        Guarantee::Windows => from.at_ms - from.at_ms % WINDOW_MS + WINDOW_MS,
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
    context: Arc<TestContext>,
    router: axum::Router,
    runtime: Runtime,
}

impl Api {
    fn new(algorithm: Algorithm) -> Api {
        let yaml = format!("limits: {{ one: {{ key: global, {} }} }}", algorithm.yaml);
        let context = TestContext::new(&yaml, |_| {});
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        Api { router: http_api::router(context.api.clone()), context, runtime }
    }

    fn call(&mut self, path: &str, body: &Value) -> (u16, Value) {
        let request = Request::post(path)
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))
            .unwrap();
        let exchange = async {
            let response = self.router.call(request).await.unwrap();
            let status = response.status().as_u16();
            (status, response.into_body().collect().await.unwrap().to_bytes())
        };
        let (status, bytes) = self.runtime.block_on(exchange);
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    fn now_ms(&self) -> u64 {
        self.context.clock.now().as_nanos() / 1_000_000
    }
}

fn run(algorithm: Algorithm, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut api = Api::new(algorithm);
    let mut ledger = Ledger {
        guarantee: algorithm.guarantee,
        oldest: algorithm.oldest,
        used: Vec::new(),
        refunds: Vec::new(),
    };
    let mut reservations: Vec<OpenReservation> = Vec::new();
    for step in steps {
        let now_ms = api.now_ms();
        match step {
            Step::Advance(by) => api.context.clock.advance(*by),
            Step::Check(cost) => {
                let (_, result) = api.call("/v1/check", &json!({ "limit": "one", "cost": cost }));
                if result["allowed"] == true {
                    ledger.charge(now_ms, *cost);
                }
            }
            Step::Reserve { cost, expires_secs } => {
                let check = json!({ "limit": "one", "cost": cost, "expires": format!("{expires_secs}s") });
                let (_, result) = api.call("/v1/reserve", &check);
                if result["allowed"] == true {
                    let entry = ledger.charge(now_ms, *cost);
                    let expires_at_ms = now_ms + u64::from(*expires_secs) * 1000;
                    reservations.push(OpenReservation {
                        id: result["reservation"].clone(),
                        entry,
                        cost: *cost,
                        expires_at_ms,
                    });
                }
            }
            Step::Settle(which, cost) if *which < reservations.len() => {
                let OpenReservation { id, entry, expires_at_ms, .. } =
                    reservations[reservations.len() - 1 - which].clone();
                let (status, result) = api.call("/v1/settle", &json!({ "reservation": id, "cost": cost }));
                if expires_at_ms <= now_ms {
                    prop_assert_eq!(status, 409, "the reservation has expired");
                    continue;
                }
                reservations.remove(reservations.len() - 1 - which);
                prop_assert_eq!(status, 200, "{}", result);
                let number = |name: &str| result[name].as_u64().map(|it| it as u32).unwrap_or(u32::MAX);
                prop_assert_eq!(number("refunded"), number("reserved").saturating_sub(*cost));
                ledger.deduct(entry, now_ms, number("refunded"));
                let more = cost.saturating_sub(number("reserved")) - number("uncovered");
                ledger.charge(now_ms, more);
            }
            Step::Settle(..) => {}
            Step::Refund(cost) => {
                api.call("/v1/refund", &json!({ "limit": "one", "cost": cost }));
                ledger.refund(now_ms, *cost);
            }
            Step::Sweep => {
                let (due, open): (Vec<_>, Vec<_>) =
                    reservations.into_iter().partition(|it| it.expires_at_ms <= now_ms);
                reservations = open;
                let swept = api.runtime.block_on(refund_expired(&*api.context));
                prop_assert_eq!(swept, due.len());
                for OpenReservation { entry, cost, .. } in due {
                    ledger.deduct(entry, now_ms, cost);
                }
            }
        }
        let (_, peek) = api.call("/v1/peek", &json!({ "limit": "one", "cost": 0 }));
        let limit = &peek["limits"][0];
        prop_assert!(limit["remaining"].as_u64() <= Some(u64::from(SIZE)), "budget above the limit: {limit}");
        let (_, more) = api.call("/v1/peek", &json!({ "limit": "one", "cost": SIZE + 1 }));
        prop_assert_eq!(&more["allowed"], false, "cost above the limit");
        ledger.check()?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(testbed::property::cases(testbed::ordinary_or_long(64, 192)))]

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
        let check = json!({ "limit": "one", "cost": 8, "expires": "2s" });
        assert_eq!(api.call("/v1/reserve", &check).1["allowed"], true);
        let remaining = |api: &mut Api| {
            api.call("/v1/peek", &json!({ "limit": "one", "cost": 0 })).1["limits"][0]["remaining"].clone()
        };
        assert_eq!(remaining(&mut api), 2, "{algorithm:?}");
        api.context.clock.advance(Duration::from_secs(2));
        assert_eq!(api.runtime.block_on(refund_expired(&*api.context)), 1, "{algorithm:?}");
        assert_eq!(remaining(&mut api), 10, "{algorithm:?}");
        assert_eq!(api.runtime.block_on(refund_expired(&*api.context)), 0, "{algorithm:?}");
    }
}
