//! Allowed and denied requests, and reloads.

use testbed::http::{get, header, status};

use super::support::{Upstream, in_front_of, one_route};
use crate::support::parse;

const TEN: &str =
    "limits: { per-user: { key: { header: X-User-Id }, sliding_window_log: { limit: 10, window: 60s } } }";

#[tokio::test]
async fn request_above_the_limit_gets_429_with_retry_after() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, TEN, "").await;
    for _ in 0..10 {
        let response = get(gateway.address, "/api/test", "X-User-Id: user123\r\n").await;
        assert_eq!(status(&response), 200, "{response}");
        assert!(header(&response, "ratelimit").is_some() && response.ends_with("hello"), "{response}");
    }
    let response = get(gateway.address, "/api/test", "X-User-Id: user123\r\n").await;
    assert_eq!(status(&response), 429, "{response}");
    for name in ["retry-after", "ratelimit", "ratelimit-policy", "cache-control", "content-type"] {
        assert!(header(&response, name).is_some(), "{name}: {response}");
    }
    assert_eq!(upstream.requests().len(), 10);
    assert_eq!(status(&get(gateway.address, "/api/test", "X-User-Id: other\r\n").await), 200);
}

#[tokio::test]
async fn route_without_limits_allows_what_another_denies() {
    let upstream = Upstream::start().await;
    let at = upstream.address;
    let gateway = super::support::run(&format!(
        "limits: {{ one: {{ sliding_window_log: {{ limit: 1, window: 1h }} }} }}
gateway:
  listen: 127.0.0.1:0
  routes:
    - {{ id: free, path: /free/**, upstream: http://{at}, limits: [] }}
    - {{ id: rest, limits: all, upstream: http://{at} }}
"
    ))
    .await;
    for (path, wanted) in [("/a", 200), ("/b", 429), ("/free/a", 200), ("/free/b", 200)] {
        assert_eq!(status(&get(gateway.address, path, "").await), wanted, "{path}");
    }
}

#[tokio::test]
async fn reload_keeps_counters_and_a_failed_one_changes_nothing() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, TEN, "").await;
    let ask = || get(gateway.address, "/", "X-User-Id: a\r\n");
    for _ in 0..10 {
        assert_eq!(status(&ask().await), 200);
    }
    assert_eq!(status(&ask().await), 429);
    gateway.gateway.reload(&parse(&one_route(&upstream, TEN, ""))).unwrap();
    assert_eq!(status(&ask().await), 429, "the counters are kept");
    let wider = TEN.replace("limit: 10", "limit: 12");
    gateway.gateway.reload(&parse(&one_route(&upstream, &wider, ""))).unwrap();
    for wanted in [200, 200, 429] {
        assert_eq!(status(&ask().await), wanted, "ten are used");
    }
    gateway.gateway.reload(&parse("limits:\n")).unwrap_err();
    assert_eq!(status(&ask().await), 429);
}

/// Two requests in flight stay two, however often the limit changes meanwhile.
#[tokio::test]
async fn reload_keeps_held_permits() {
    let upstream = Upstream::start().await;
    let file = |limit: u32, other: &str| {
        let limits =
            format!("limits: {{ {other}at-once: {{ key: ip, concurrency: {{ limit: {limit} }} }} }}");
        one_route(&upstream, &limits, "")
    };
    let gateway = super::support::run(&file(2, "")).await;
    let held = [0, 1].map(|_| tokio::spawn(get(gateway.address, "/hold", "")));
    upstream.wait_for_held(2).await;
    for (limit, other) in [(1, ""), (2, "other: { concurrency: { limit: 50 } }, "), (1, ""), (2, "")] {
        gateway.gateway.reload(&parse(&file(limit, other))).unwrap();
        assert_eq!(status(&get(gateway.address, "/", "").await), 429, "limit {limit}");
    }
    gateway.gateway.reload(&parse(&file(3, ""))).unwrap();
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    upstream.release(2);
    for response in held {
        assert_eq!(status(&response.await.unwrap()), 200);
    }
}
