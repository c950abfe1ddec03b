//! Startup: the first minute, and its errors.

use std::net::TcpListener;
use std::process::Command;

use nix::sys::signal::Signal;
use testbed::RedisServer;

use crate::run::support::{Folder, Process, Upstream, get, one_route, ratekeeper, until};

/// Returns the output of `curl`.
fn curl(args: &[&str]) -> String {
    let output = Command::new("curl").args(["-s", "--max-time", "30"]).args(args).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a process that cannot start; returns its exit code and messages.
async fn refused(file: &std::path::Path) -> (i32, String) {
    let mut process = Process::run(file);
    let code = process.ended().await;
    process.line("error").await;
    (code, process.stderr().join("\n"))
}

#[tokio::test]
async fn example_allows_ten_requests_and_denies_the_eleventh_with_retry_after() {
    // The example's ports are fixed: skip the test if another program uses one.
    let ports = [8080, 8081, 9180];
    if let Some(busy) = ports.iter().find(|port| TcpListener::bind(("127.0.0.1", **port)).is_err()) {
        println!("skipped: port {busy} is in use");
        return;
    }
    let mut process = Process::spawn(&mut ratekeeper());
    until("a greeting or an end", || process.said("try it:") > 0 || process.has_ended()).await;
    if process.has_ended() {
        println!("skipped: {}", process.line("listen").await);
        return;
    }
    let hint = process.line("try it:").await;
    let command = r#"curl -i -H \"X-User-Id: user123\" http://localhost:8080/api/test"#;
    assert!(hint.contains(command), "{hint}");
    for told in [
        "demo upstream on http://127.0.0.1:8081",
        "gateway on http://127.0.0.1:8080",
        "http://127.0.0.1:9180",
    ] {
        process.line(told).await;
    }
    let ask = || curl(&["-i", "-H", "X-User-Id: user123", "http://localhost:8080/api/test"]);
    for number in 1..=10 {
        let answer = ask();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{number}: {answer}");
        assert!(answer.contains("Hello, user123!"), "{answer}");
    }
    let answer = ask();
    assert!(answer.starts_with("HTTP/1.1 429 Too Many Requests"), "{answer}");
    let head = answer.to_lowercase();
    for header in [
        "retry-after: ",
        "ratelimit-policy: \"per-user\";q=10;w=60",
        "ratelimit: \"per-user\";r=0;t=",
        "content-type: application/problem+json",
        "cache-control: no-store",
    ] {
        assert!(head.contains(header), "{header} is missing in\n{answer}");
    }
    assert_eq!(curl(&["http://localhost:9180/readyz"]), "ready\n");
    let metrics = curl(&["http://localhost:9180/metrics"]);
    let denied = r#"ratekeeper_requests_total{route="api-route",decision="denied",code="4xx"} 1"#;
    assert!(metrics.contains(denied), "{metrics}");
    process.signal(Signal::SIGINT);
    assert_eq!(process.ended().await, 0);
}

#[tokio::test]
async fn terminal_gets_plain_text_messages() {
    let (folder, upstream) = (Folder::new("terminal"), Upstream::start().await);
    let file = folder.write("ratekeeper.yaml", &one_route(&upstream, "", ""));
    let command = format!("{} run --config {}", env!("CARGO_BIN_EXE_ratekeeper"), file.display());
    // `script` provides a terminal.
    let mut process = Process::spawn(Command::new("script").args(["-qefc", &command, "/dev/null"]));
    until("a greeting", || {
        process.stdout().iter().any(|it| it.starts_with("ratekeeper: gateway on http://"))
    })
    .await;
    process.signal(Signal::SIGTERM);
    process.ended().await;
}

#[tokio::test]
async fn invalid_or_missing_file_is_reported() {
    let (folder, upstream) = (Folder::new("files"), Upstream::start().await);
    let good = one_route(&upstream, "", "");

    let (code, told) = refused(std::path::Path::new("no-such.yaml")).await;
    assert_eq!(
        (code, told.as_str()),
        (1, "error: cannot read no-such.yaml: No such file or directory (os error 2)")
    );

    let bad = folder.write("bad.yaml", &good.replace("routes:", "rotues:"));
    let (code, told) = refused(&bad).await;
    assert_eq!(code, 2, "{told}");
    assert!(told.contains("bad.yaml:7:3") && told.contains("write `routes`"), "{told}");

    let empty = folder.write("empty.yaml", "limits: { per-user: { key: ip, token_bucket: {} } }\n");
    let sentence = "error: the configuration has neither a gateway nor an API; write `gateway: { routes: [...] }` or `apis: { http: 127.0.0.1:9181 }`";
    let (code, told) = refused(&empty).await;
    assert_eq!((code, told.as_str()), (2, sentence));
}

#[tokio::test]
async fn port_in_use_is_reported() {
    let (folder, upstream) = (Folder::new("ports"), Upstream::start().await);
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let busy = holder.local_addr().unwrap();
    let good = one_route(&upstream, "", "");

    let file = folder.write("listen.yaml", &good.replace("listen: 127.0.0.1:0", &format!("listen: {busy}")));
    let (code, told) = refused(&file).await;
    let sentence = format!("error: {busy} is in use by another program; stop it, or change `listen`");
    assert_eq!((code, told), (1, sentence));

    let file = folder.write("admin.yaml", &good.replace("admin: 127.0.0.1:0", &format!("admin: {busy}")));
    let (code, told) = refused(&file).await;
    let sentence = format!(
        "error: {busy} is in use by another program; stop that, or write another `admin` in the file"
    );
    assert_eq!((code, told), (1, sentence));
}

/// Returns a configuration with limits in Redis.
fn in_redis(upstream: &Upstream, redis: &RedisServer, failure: &str) -> String {
    let store = format!(
        "store: {{ redis: {{ address: \"{}\", on_store_failure: {failure}, deadline: 200ms }} }}",
        redis.url()
    );
    let limits = "limits: { per-user: { key: ip, fixed_window: { limit: 1000, window: 1h } } }";
    one_route(upstream, &format!("{store}\n{limits}"), "")
}

#[tokio::test]
async fn failure_policy_closed_does_not_start_without_redis() {
    let (folder, upstream) = (Folder::new("closed"), Upstream::start().await);
    let mut redis = RedisServer::start().unwrap();
    redis.kill().unwrap();
    let (code, told) =
        refused(&folder.write("ratekeeper.yaml", &in_redis(&upstream, &redis, "closed"))).await;
    assert_eq!(code, 1, "{told}");
    assert!(told.starts_with("error: cannot reach Redis: "), "{told}");
    let hint =
        "; start Redis, or write `on_store_failure: local` or `on_store_failure: open` to start without it";
    assert!(told.ends_with(hint) && told.contains("refused"), "{told}");
}

#[tokio::test]
async fn failure_policies_local_and_open_start_without_redis_and_recover() {
    let (folder, upstream) = (Folder::new("degraded"), Upstream::start().await);
    for failure in ["local", "open"] {
        let mut redis = RedisServer::start().unwrap();
        redis.kill().unwrap();
        let file = folder.write("ratekeeper.yaml", &in_redis(&upstream, &redis, failure));
        let (process, address) = Process::serving(&file).await;
        let told = process.line("store unavailable").await;
        assert!(told.contains(r#""level":"WARN""#) && told.contains("refused"), "{told}");
        process.until_metric("ratekeeper_redis_up", 0).await;
        assert_eq!(get(address, "/").await.status, 200);
        redis.restart().unwrap();
        // Recovery needs no request.
        process.line("store available again").await;
        process.until_metric("ratekeeper_redis_up", 1).await;
        assert_eq!(get(address, "/").await.status, 200);
        let keys = redis.cli(&["DBSIZE"]).unwrap();
        assert_eq!(keys, "1", "the request was counted in Redis");
    }
}
