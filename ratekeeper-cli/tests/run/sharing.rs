//! Several gateways share one limit through Redis.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testbed::{RedisServer, TEST_TIMEOUT, wait_for};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::run::support::{Folder, Process, Upstream};

/// The limit of each algorithm; nothing is refilled while the test runs.
const LIMIT: u64 = 10_000;
const LIMITS: [&str; 5] = [
    "token_bucket: { capacity: 10000, refill: 1/1d }",
    "leaky_bucket: { capacity: 10000, leak: 1/1d, mode: police }",
    "fixed_window: { limit: 10000, window: 1w, align: first_request }",
    "sliding_window_log: { limit: 10000, window: 1h }",
    "sliding_window_counter: { limit: 10000, window: 1w }",
];
/// Connections of each load generator.
const CONNECTIONS: u64 = 32;
/// Denials of each gateway before the limit counts as exhausted.
const DENIED_MIN: u64 = 10 * CONNECTIONS;

/// `wrk`, which sends requests to one gateway until stopped.
struct Wrk(Child);

/// Its results.
#[derive(Debug)]
struct ResponseCounts {
    allowed: u64,
    denied: u64,
    other: u64,
    failed: u64,
}

impl Wrk {
    fn start(address: SocketAddr, path: &str) -> Wrk {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/statuses.lua");
        let duration = format!("{}s", 2 * TEST_TIMEOUT.as_secs());
        let mut command = Command::new("wrk");
        command
            .args(["--threads", "1", "--connections", &CONNECTIONS.to_string()])
            .args(["--duration", &duration, "--timeout", &duration])
            .args(["--header", "X-User-Id: user123", "--script"])
            .arg(script)
            .arg(format!("http://{address}{path}"));
        Wrk(command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap())
    }

    async fn stop(self) -> ResponseCounts {
        // On SIGINT wrk prints its results so far.
        kill(Pid::from_raw(self.0.id().unwrap().cast_signed()), Signal::SIGINT).unwrap();
        let output =
            timeout(TEST_TIMEOUT, self.0.wait_with_output()).await.expect("wrk did not stop").unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let line =
            text.lines().find_map(|line| line.strip_prefix("counted: ")).unwrap_or_else(|| panic!("{text}"));
        let numbers: Vec<u64> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        let [allowed, denied, other, failed] = numbers[..] else { panic!("{line}") };
        ResponseCounts { allowed, denied, other, failed }
    }
}

/// Waits until the limit is exhausted and both gateways have denied enough requests.
async fn until_exhausted(gateways: [&Process; 2], number: usize) {
    let allowed = format!(r#"ratekeeper_requests_total{{route="r{number}",decision="allowed",code="2xx"}}"#);
    let denied = format!(r#"ratekeeper_requests_total{{route="r{number}",decision="denied",code="4xx"}}"#);
    for gateway in gateways {
        wait_for(async || (gateway.metric(&denied).await >= DENIED_MIN).then_some(())).await;
    }
    let allowed = async || gateways[0].metric(&allowed).await + gateways[1].metric(&allowed).await;
    wait_for(async || (allowed().await >= LIMIT).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_gateways_under_load_admit_exactly_the_limit_between_them() {
    let (folder, upstream, redis) =
        (Folder::new("sharing"), Upstream::start().await, RedisServer::start().unwrap());
    let mut limits = String::new();
    let mut routes = String::new();
    for (number, limit) in LIMITS.iter().enumerate() {
        limits += &format!("  l{number}: {{ key: {{ header: X-User-Id, fallback: anonymous }}, {limit} }}\n");
        let at = upstream.address();
        routes += &format!(
            "    - {{ id: r{number}, path: /{number}, upstream: http://{at}, limits: [l{number}] }}\n"
        );
    }
    // With `closed`, a decision not made by Redis would be a visible 503.
    let store = format!(
        "store: {{ redis: {{ address: \"{}\", on_store_failure: closed, deadline: 10s }} }}",
        redis.url()
    );
    let text = format!(
        "{store}\nlimits:\n{limits}admin: 127.0.0.1:0\n\
         gateway:\n  listen: 127.0.0.1:0\n  access_log: false\n  routes:\n{routes}"
    );
    let file = folder.write("ratekeeper.yaml", &text);
    let (one, other) = (Process::serving(&file).await, Process::serving(&file).await);
    for (number, limit) in LIMITS.iter().enumerate() {
        let (path, requests_before) = (format!("/{number}"), upstream.requests());
        let running = [Wrk::start(one.1, &path), Wrk::start(other.1, &path)];
        until_exhausted([&one.0, &other.0], number).await;
        let [first, second] = running;
        let (first, second) = (first.stop().await, second.stop().await);
        println!("two gateways, {limit}: {first:?}, {second:?}");
        assert_eq!(first.allowed + second.allowed, LIMIT, "{limit}: {first:?}, {second:?}");
        assert_eq!((upstream.requests() - requests_before) as u64, LIMIT, "{limit}");
        for counted in [first, second] {
            assert!(
                counted.allowed > 0 && counted.denied >= DENIED_MIN - CONNECTIONS,
                "{limit}: {counted:?}"
            );
            assert_eq!((counted.other, counted.failed), (0, 0), "{limit}: {counted:?}");
        }
    }
    assert_eq!(redis.keys_without_expiry().unwrap(), Vec::<String>::new());
}
