//! Several gateways and one Redis: one limit.

use testbed::RedisServer;
use tokio::task::JoinSet;

use crate::support::{Client, Folder, Process, Tally, Upstream};

/// Of which none comes back while the test runs.
const LIMITS: [&str; 5] = [
    "token_bucket: { capacity: 500, refill: 1/1d }",
    "leaky_bucket: { capacity: 500, leak: 1/1d, mode: police }",
    "fixed_window: { limit: 500, window: 1w, align: first_request }",
    "sliding_window_log: { limit: 500, window: 1h }",
    "sliding_window_counter: { limit: 500, window: 1w }",
];
const CLIENTS_EACH: usize = 8;
const REQUESTS_EACH: usize = 100;

#[tokio::test(flavor = "multi_thread")]
async fn two_gateways_admit_exactly_the_limit_between_them() {
    let (folder, upstream, redis) =
        (Folder::new("sharing"), Upstream::start().await, RedisServer::start().unwrap());
    let mut limits = String::new();
    let mut routes = String::new();
    for (number, limit) in LIMITS.iter().enumerate() {
        limits +=
            &format!("  l{number}: {{ key: {{ header: X-User-Id, otherwise: anonymous }}, {limit} }}\n");
        let at = upstream.address();
        routes += &format!(
            "    - {{ id: r{number}, path: /{number}, upstream: http://{at}, limits: [l{number}] }}\n"
        );
    }
    // Whatever Redis has not decided would be a 503, and seen.
    let store =
        format!("store: {{ redis: {{ address: \"{}\", failure: closed, deadline: 10s }} }}", redis.url());
    let text = format!(
        "{store}\nlimits:\n{limits}admin: 127.0.0.1:0\n\
         gateway:\n  listen: 127.0.0.1:0\n  access_log: false\n  routes:\n{routes}"
    );
    let file = folder.write("tollgate.yaml", &text);
    let (one, other) = (Process::serving(&file).await, Process::serving(&file).await);
    for (number, limit) in LIMITS.iter().enumerate() {
        let mut clients = JoinSet::new();
        for client in 0..2 * CLIENTS_EACH {
            let address = if client % 2 == 0 { one.1 } else { other.1 };
            clients.spawn(async move {
                let (mut client, mut tally) = (Client::new(address), Tally::default());
                for _ in 0..REQUESTS_EACH {
                    let begun = tokio::time::Instant::now();
                    let answer = client.get(&format!("/{number}"), "X-User-Id: user123\r\n").await;
                    tally.add(begun.elapsed(), &answer);
                }
                tally
            });
        }
        let mut all = Tally::default();
        while let Some(tally) = clients.join_next().await {
            all.merge(tally.unwrap());
        }
        println!("two gateways, {limit}: {all}");
        assert!(all.failed.is_empty(), "{:?}", all.failed);
        let denied = (2 * CLIENTS_EACH * REQUESTS_EACH) as u64 - 500;
        assert_eq!((all.of(200), all.of(429)), (500, denied), "{limit}: {all}");
    }
    assert_eq!(redis.keys_without_expiry().unwrap(), Vec::<String>::new());
}
