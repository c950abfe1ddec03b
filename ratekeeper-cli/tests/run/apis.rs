//! The APIs and the gateway of a real process share their limits.

use std::net::SocketAddr;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testbed::{RedisServer, wait_for};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::run::support::{Client, Folder, Process, Upstream, ratekeeper};

const LIMITS: &str = "
limits:
  per-user:
    key: { header: X-User-Id }
    fixed_window: { limit: 4, window: 1w, align: first_request }
";
const APIS: &str = "apis: { http: 127.0.0.1:0, envoy: 127.0.0.1:0, resp: 127.0.0.1:0 }\nadmin: 127.0.0.1:0\n";

/// Returns the address in the URL of a line.
fn at(line: &str) -> SocketAddr {
    let address = line.split("://").last().unwrap();
    let is_part = |c: char| c.is_ascii_digit() || ".:".contains(c);
    address.split(|c| !is_part(c)).next().unwrap().parse().unwrap()
}

async fn http(process: &Process) -> SocketAddr {
    at(&process.line("HTTP API").await)
}

async fn resp(process: &Process) -> SocketAddr {
    at(&process.line("Redis API").await)
}

/// Sends a request to the HTTP API.
async fn post(address: SocketAddr, path: &str, body: &Value) -> (u16, Value) {
    let body = body.to_string();
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let response = Client::connected(address).await.send(request.as_bytes()).await.unwrap();
    let reply = serde_json::from_slice(&response.body).unwrap_or(Value::Null);
    (response.status, reply)
}

/// Checks or peeks with a cost; returns whether it is allowed and the remaining budget.
async fn check(address: SocketAddr, what: &str, cost: u32) -> (bool, u64) {
    let request = json!({ "limit": "per-user", "key": "alice", "cost": cost });
    let (status, reply) = post(address, what, &request).await;
    assert_eq!((status, &reply["degraded"]), (200, &json!(false)), "{reply}");
    (reply["allowed"].as_bool().unwrap(), reply["limits"][0]["remaining"].as_u64().unwrap())
}

/// Sends commands to the Redis API and reads as many bytes as expected.
async fn command(address: SocketAddr, commands: &str, expected: &str) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(commands.as_bytes()).await.unwrap();
    let mut reply = vec![0; expected.len()];
    stream.read_exact(&mut reply).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&reply), expected);
}

#[tokio::test]
async fn all_apis_and_the_gateway_share_one_limit() {
    let (folder, upstream) = (Folder::new("apis"), Upstream::start().await);
    let gateway = format!(
        "gateway:\n  listen: 127.0.0.1:0\n  routes: [{{ id: all, limits: all, upstream: \"http://{}\" }}]\n",
        upstream.address()
    );
    let file = folder.write("ratekeeper.yaml", &format!("{LIMITS}{APIS}{gateway}"));
    let (mut process, address) = Process::serving(&file).await;
    let (http, resp) = (http(&process).await, resp(&process).await);
    process.line("Envoy API").await;

    let response = Client::connected(address).await.get("/", "X-User-Id: alice\r\n").await.unwrap();
    assert_eq!(response.header("ratelimit"), Some("\"per-user\";r=3;t=604800"));
    assert_eq!(check(http, "/v1/check", 1).await, (true, 2));
    command(resp, "RK.CHECK per-user alice\r\n", "*6\r\n:1\r\n:4\r\n:1\r\n:-1\r\n").await;
    assert_eq!(check(http, "/v1/peek", 2).await, (false, 1));
    let response = Client::connected(address).await.get("/", "X-User-Id: alice\r\n").await.unwrap();
    assert_eq!((response.status, response.header("ratelimit")), (200, Some("\"per-user\";r=0;t=604800")));
    assert_eq!(check(http, "/v1/check", 1).await, (false, 0));
    command(resp, "CL.THROTTLE alice 4 1 3600\r\n", "*5\r\n:0\r\n:5\r\n:4\r\n:-1\r\n:3600\r\n").await;

    let counted = r#"ratekeeper_limit_decisions_total{limit="per-user",decision="allowed"}"#;
    assert_eq!(process.metric(counted).await, 4);

    // A new file takes effect with the next request, in every API.
    folder.write("ratekeeper.yaml", &format!("{LIMITS}{APIS}{gateway}").replace("limit: 4", "limit: 10"));
    process.signal(Signal::SIGHUP);
    process.line("reloaded").await;
    assert_eq!(check(http, "/v1/check", 1).await, (true, 5));
    command(resp, "RK.CHECK per-user alice\r\n", "*6\r\n:1\r\n:10\r\n:4\r\n:-1\r\n").await;
    process.signal(Signal::SIGTERM);
    assert_eq!(process.ended().await, 0);
}

/// A configuration without a gateway and without limits.
#[tokio::test]
async fn apis_run_without_a_gateway() {
    let folder = Folder::new("apis-alone");
    let file = folder.write("ratekeeper.yaml", "apis: { resp: 127.0.0.1:0 }\nadmin: 127.0.0.1:0\n");
    let mut process = Process::run(&file);
    let resp = resp(&process).await;
    command(resp, "CL.THROTTLE alice 0 1 3600\r\n", "*5\r\n:0\r\n:1\r\n:0\r\n:-1\r\n:3600\r\n").await;
    command(resp, "CL.THROTTLE alice 0 1 3600\r\n", "*5\r\n:1\r\n:1\r\n:0\r\n").await;
    process.signal(Signal::SIGTERM);
    assert_eq!(process.ended().await, 0);
}

/// A process reserves units and is killed; another process refunds them when the reservation expires.
#[tokio::test]
async fn reservation_of_a_killed_process_is_refunded() {
    let (folder, server) = (Folder::new("apis-crash"), RedisServer::start().unwrap());
    let store = format!(
        "store: {{ redis: {{ address: \"{}\", secret: a-secret-of-a-test, deadline: 1s }} }}\n",
        server.url()
    );
    let file = folder.write("ratekeeper.yaml", &format!("{store}{LIMITS}{APIS}"));
    let mut first = Process::run(&file);
    let api = http(&first).await;
    let request = json!({ "limit": "per-user", "key": "alice", "cost": 3, "expires": "1s" });
    let (status, reserved) = post(api, "/v1/reserve", &request).await;
    assert_eq!(status, 200, "{reserved}");
    assert_eq!(check(api, "/v1/peek", 0).await, (true, 1));
    let kept = json!({ "limit": "per-user", "key": "alice", "cost": 1, "expires": "1h" });
    let (_, kept) = post(api, "/v1/reserve", &kept).await;
    let names = server.cli(&["KEYS", "rate_limit:records:*"]).unwrap();
    let kept_as = server.cli(&["HVALS", names.trim()]).unwrap();
    assert!(kept_as.len() > 50, "two of them: {kept_as}");
    assert!(!kept_as.contains("alice"), "no key is in the store as it is: {kept_as}");
    first.signal(Signal::SIGKILL);
    first.ended().await;

    let second = Process::run(&file);
    let api = http(&second).await;
    // Any process can settle a reservation that has not expired.
    let settled = json!({ "reservation": kept["reservation"], "cost": 0 });
    let (status, reply) = post(api, "/v1/settle", &settled).await;
    assert_eq!(status, 200, "{reply}");
    wait_for(async || (check(api, "/v1/peek", 0).await == (true, 4)).then_some(())).await;
    let late = json!({ "reservation": reserved["reservation"], "cost": 3 });
    assert_eq!(post(api, "/v1/settle", &late).await.0, 409, "units are refunded only once");
}

/// Redis stops while a reservation is settled: the settlement can be retried and is made once.
#[tokio::test]
async fn settlement_without_an_answer_can_be_retried() {
    let (folder, server) = (Folder::new("apis-settle"), RedisServer::start().unwrap());
    let store = format!(
        "store: {{ redis: {{ address: \"{}\", secret: a-secret-of-a-test, deadline: 100ms, on_store_failure: closed }} }}\n",
        server.url()
    );
    let file = folder.write("ratekeeper.yaml", &format!("{store}{LIMITS}{APIS}"));
    let process = Process::run(&file);
    let api = http(&process).await;
    let request = json!({ "limit": "per-user", "key": "alice", "cost": 3, "expires": "1h" });
    let (_, reserved) = post(api, "/v1/reserve", &request).await;
    let request = json!({ "reservation": reserved["reservation"], "cost": 1 });
    server.pause().unwrap();
    let (status, reply) = post(api, "/v1/settle", &request).await;
    assert_eq!(status, 503, "{reply}");
    assert!(reply["detail"].as_str().unwrap().contains("retry"), "{reply}");
    server.resume().unwrap();
    let settled = wait_for(async || {
        let (status, reply) = post(api, "/v1/settle", &request).await;
        (status != 503).then_some((status, reply))
    });
    let (status, reply) = settled.await;
    assert_eq!((status, reply["refunded"].as_u64()), (200, Some(2)), "{reply}");
    assert_eq!(check(api, "/v1/peek", 0).await, (true, 3));
    assert_eq!(post(api, "/v1/settle", &request).await.0, 409, "units are refunded only once");
}

/// Another process uses the address of the second API: the error names it, and the first API is closed.
#[tokio::test]
async fn address_in_use_is_named() {
    let folder = Folder::new("apis-taken");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let file = folder.write(
        "ratekeeper.yaml",
        &format!("{LIMITS}apis: {{ http: 127.0.0.1:0, resp: \"{address}\" }}\nadmin: 127.0.0.1:0\n"),
    );
    let mut process = Process::run(&file);
    assert_eq!(process.ended().await, 1, "{:?}", process.stderr());
    process.line(&format!("{address} is in use by another program")).await;
    assert_eq!(process.count_lines("panicked"), 0, "{:?}", process.stderr());
}

/// Refunds and resets are separate permissions, because a reset also lifts the bans of a key.
#[tokio::test]
async fn refunds_and_resets_are_separate_permissions() {
    let folder = Folder::new("apis-resets");
    for (allowed, refund, reset) in [("refunds: true", 200, 403), ("resets: true", 403, 200)] {
        let api = format!("apis: {{ http: {{ listen: 127.0.0.1:0, {allowed} }} }}\nadmin: 127.0.0.1:0\n");
        let file = folder.write("ratekeeper.yaml", &format!("{LIMITS}{api}"));
        let mut process = Process::run(&file);
        let api = http(&process).await;
        let request = json!({ "limit": "per-user", "key": "alice" });
        assert_eq!(post(api, "/v1/refund", &request).await.0, refund, "{allowed}");
        assert_eq!(post(api, "/v1/reset", &request).await.0, reset, "{allowed}");
        process.signal(Signal::SIGTERM);
        assert_eq!(process.ended().await, 0);
    }
}

/// Runs on unchanged files of Envoy's rate limit service.
#[tokio::test]
async fn envoy_files_are_read_and_reloaded() {
    let folder = Folder::new("apis-envoy");
    let domain = |per_hour: u32| {
        format!(
            "domain: edge\ndescriptors:\n  - key: user\n    rate_limit: {{ unit: hour, requests_per_unit: {per_hour} }}\n"
        )
    };
    let edge = folder.write("domains/edge.yaml", &domain(2));
    let file = folder.write("ratekeeper.yaml", APIS);
    let mut command = ratekeeper();
    command.args(["run", "--config"]).arg(file).arg("--envoy-config").arg(edge.parent().unwrap());
    let mut process = Process::spawn(&mut command);
    let api = http(&process).await;
    let request =
        json!({ "domain": "edge", "descriptors": [{ "entries": [{ "key": "user", "value": "ann" }] }] });
    for expected in [200, 200, 429] {
        assert_eq!(post(api, "/json", &request).await.0, expected);
    }
    folder.write("domains/edge.yaml", &domain(3));
    process.line("reloaded").await;
    for expected in [200, 429] {
        assert_eq!(post(api, "/json", &request).await.0, expected);
    }
    folder.write("domains/edge.yaml", "domain: edge\ndescriptors: [{ kee: user }]\n");
    process.line("not reloaded").await;
    assert!(process.count_lines("edge.yaml:2:") > 0, "{:?}", process.stderr());
    process.signal(Signal::SIGTERM);
    assert_eq!(process.ended().await, 0);
}

/// A permission of one API does not apply to another.
#[tokio::test]
async fn refunds_are_permitted_per_api() {
    let folder = Folder::new("apis-refunds");
    let domains =
        "domains: { edge: [{ key: user, fixed_window: { limit: 9, window: 1w, align: first_request } }] }\n";
    let refund = json!({ "domain": "edge", "descriptors": [
        { "entries": [{ "key": "user", "value": "ann" }], "hitsAddend": "5", "isNegativeHits": true },
    ]});
    for (number, (grpc, http, expected)) in
        [(true, false, 400..500), (false, true, 200..201)].into_iter().enumerate()
    {
        let apis = format!(
            "apis:\n  envoy: {{ listen: 127.0.0.1:0, refunds: {grpc} }}\n  http: {{ listen: 127.0.0.1:0, refunds: {http} }}\nadmin: off\n"
        );
        let file = folder.write(&format!("{number}.yaml"), &format!("{domains}{apis}"));
        let process = Process::run(&file);
        let api = self::http(&process).await;
        let (status, reply) = post(api, "/json", &refund).await;
        assert!(expected.contains(&status), "grpc {grpc}, http {http}: {status} {reply}");
    }
}
