//! Costs of requests; a request charges all of its limits or none.

use std::net::Ipv4Addr;
use std::sync::Arc;

use http::Request;
use ratekeeper::WhenFull;
use ratekeeper::tower::key::{Key, KeyPart};
use ratekeeper::tower::rule::{Cost, Rule};
use ratekeeper::tower::{Peer, RatekeeperLayer, Route};

use super::{TestResponse, get, hourly, ip, per_client, plain, send, statuses, with};

/// The remaining quota of a limit, by the name of its rule.
fn left(got: &TestResponse, name: &str) -> u32 {
    let header = got.header("ratelimit").unwrap();
    let start = header.find(&format!("\"{name}\";r=")).unwrap() + name.len() + 5;
    header[start..].split(';').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn denied_request_charges_no_rule() {
    let user = Rule::new("user", hourly(2)).key(Key::of(KeyPart::header("x-user")));
    let layer = RatekeeperLayer::builder().rule(user).rule(Rule::new("all", hourly(5))).build().unwrap();
    let of = |user: &str| with("x-user", user);
    assert_eq!(statuses(&layer, [of("a"), of("a"), of("a"), of("a")]).await, [200, 200, 429, 429]);
    // The user's denied requests have not charged the other rule.
    let got = send(&layer, of("b")).await;
    assert_eq!((got.status, left(&got, "user"), left(&got, "all")), (200, 1, 2));
    assert_eq!(statuses(&layer, [of("c"), of("d")]).await, [200, 200]);
    let got = send(&layer, of("b")).await;
    assert_eq!((got.status, left(&got, "user"), left(&got, "all")), (429, 1, 0));
}

/// A layer with one rule of ten units and this cost.
fn costing(cost: Cost) -> RatekeeperLayer {
    RatekeeperLayer::builder().rule(Rule::new("units", hourly(10)).key(ip()).cost(cost)).build().unwrap()
}

#[tokio::test]
async fn fixed_cost_is_charged() {
    let layer = costing(Cost::Fixed(4));
    assert_eq!(left(&send(&layer, plain("/")).await, "units"), 6);
    assert_eq!(statuses(&layer, [plain("/"), plain("/")]).await, [200, 429]);
    // A cost above the limit is never allowed, so there is no Retry-After.
    let got = send(&costing(Cost::Fixed(11)), plain("/")).await;
    assert_eq!((got.status, got.header("retry-after")), (429, None));
}

#[tokio::test]
async fn cost_from_header_is_charged_up_to_its_maximum() {
    let layer = costing(Cost::Header { name: "x-cost".to_owned(), default: 2, max: 5 });
    let mut rest = 10;
    for (header, cost) in [("1", 1), ("nonsense", 2), ("-3", 2)] {
        rest -= cost;
        assert_eq!(left(&send(&layer, with("x-cost", header)).await, "units"), rest, "{header}");
    }
    assert_eq!(left(&send(&layer, with("x-cost", "99999999999999999999")).await, "units"), 0);
    assert_eq!(send(&layer, plain("/")).await.status, 429);
}

#[tokio::test]
async fn cost_from_route_is_charged() {
    let layer = costing(Cost::Routes { costs: vec![("export".to_owned(), 6)], default: 1 });
    let on = |route: &str| -> Request<String> {
        get("/").extension(Route(Arc::from(route))).body(String::new()).unwrap()
    };
    assert_eq!(left(&send(&layer, on("export")).await, "units"), 4);
    assert_eq!(left(&send(&layer, on("list")).await, "units"), 3);
    assert_eq!(left(&send(&layer, plain("/")).await, "units"), 2);
    assert_eq!(send(&layer, on("export")).await.status, 429);
}

#[tokio::test]
async fn a_layer_and_its_clones_share_the_limits() {
    let layer = per_client(2).build().unwrap();
    let clone = layer.clone();
    assert_eq!(send(&layer, plain("/")).await.status, 200);
    assert_eq!(statuses(&clone, [plain("/"), plain("/")]).await, [200, 429]);
    assert_eq!(send(&layer, plain("/")).await.status, 429);
}

/// The number of allowed requests out of 5000 clients that send one each, with a table for a few keys.
async fn let_in_without_room(when_full: WhenFull) -> usize {
    let layer = per_client(10).max_keys(8).when_full(when_full).build().unwrap();
    let from =
        |n: u32| Request::get("/").extension(Peer(Ipv4Addr::from(n).into())).body(String::new()).unwrap();
    statuses(&layer, (0..5_000).map(from)).await.into_iter().filter(|status| *status == 200).count()
}

#[tokio::test]
async fn full_table_applies_its_policy_to_new_keys() {
    let allowed = let_in_without_room(WhenFull::Allow).await;
    assert_eq!(allowed, 5_000);
    let denied = let_in_without_room(WhenFull::Deny).await;
    assert!(denied < 500, "only keys that fit into the table: {denied}");
    let shared = let_in_without_room(WhenFull::Share).await;
    assert!((1..500).contains(&shared), "keys that fit into the table, and ten of all others: {shared}");
}
