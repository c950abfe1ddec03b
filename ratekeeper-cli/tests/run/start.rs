//! Startup: the first minute, and its errors.

use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::LazyLock;

use nix::sys::signal::Signal;
use testbed::RedisServer;

use crate::run::support::{Folder, Process, Terminal, Upstream, get, one_route, ratekeeper};

/// Returns the output of `curl`.
fn curl(args: &[&str]) -> String {
    let output = Command::new("curl").args(["-s", "--max-time", "30"]).args(args).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a configuration that cannot start; returns its exit code and its messages.
async fn failure(file: &std::path::Path) -> (i32, String) {
    Process::run(file).failure().await
}

/// Holds the ports of the example until the tests end, so that the demo must use others. Returns those of them that no
/// other program held before.
fn hold_demo_ports() -> Vec<SocketAddr> {
    static HELD: LazyLock<Vec<TcpListener>> = LazyLock::new(|| {
        [8080, 8081, 9180]
            .into_iter()
            .filter_map(|port| TcpListener::bind(("127.0.0.1", port)).ok())
            .collect()
    });
    HELD.iter().map(|it| it.local_addr().unwrap()).collect()
}

/// Returns the URL of a service in the banner.
fn url(banner: &str, service: &str) -> String {
    let line = banner.lines().find_map(|line| line.trim().strip_prefix(service)).unwrap();
    line.trim().to_owned()
}

#[tokio::test]
async fn demo_allows_ten_requests_and_denies_the_eleventh_with_retry_after() {
    let held = hold_demo_ports();
    let mut terminal = Terminal::start(&ratekeeper());
    let banner = terminal.shows("Ctrl-C shuts down").await;
    let (gateway, upstream) = (url(&banner, "gateway"), url(&banner, "demo upstream"));
    let metrics = url(&banner, "admin");
    assert!(metrics.starts_with("http://127.0.0.1:") && metrics.ends_with("/metrics"), "{banner}");
    for address in held {
        let warning = format!("address in use by another program, using a free port address={address}\n");
        assert!(banner.contains(&warning), "{banner}");
        assert!(
            ![&gateway, &upstream, &metrics].iter().any(|it| it.contains(&address.to_string())),
            "{banner}"
        );
    }
    // The command of the banner, as a reader would copy it.
    let command = banner.lines().find(|line| line.trim().starts_with("curl -i -H ")).unwrap().trim();
    let port = gateway.rsplit(':').next().unwrap();
    assert_eq!(command, format!(r#"curl -i -H "X-User-Id: user123" http://localhost:{port}/api/test"#));
    let send = || {
        let output =
            Command::new("sh").args(["-c", &format!("{command} -s --max-time 30")]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    for number in 1..=10 {
        let response = send();
        assert!(response.starts_with("HTTP/1.1 200 OK"), "{number}: {response}");
        assert!(response.contains("Hello, user123!"), "{response}");
    }
    let response = send();
    assert!(response.starts_with("HTTP/1.1 429 Too Many Requests"), "{response}");
    let head = response.to_lowercase();
    for header in [
        "retry-after: ",
        "ratelimit-policy: \"per-user\";q=10;w=60",
        "ratelimit: \"per-user\";r=0;t=",
        "content-type: application/problem+json",
        "cache-control: no-store",
    ] {
        assert!(head.contains(header), "{header} is missing in\n{response}");
    }
    assert_eq!(curl(&[&metrics.replace("/metrics", "/readyz")]), "ready\n");
    let metrics = curl(&[&metrics]);
    let denied = r#"ratekeeper_requests_total{route="api-route",decision="denied",code="4xx"} 1"#;
    assert!(metrics.contains(denied), "{metrics}");
    terminal.press_ctrl_c();
    assert_eq!(terminal.ended().await, 0);
}

/// Without a terminal, the demo logs the same addresses as JSON.
#[tokio::test]
async fn demo_without_a_terminal_logs_its_addresses() {
    hold_demo_ports();
    let mut process = Process::spawn(&mut ratekeeper());
    let (gateway, admin) = (process.address().await, process.admin().await);
    process.line(r#""service":"demo upstream","url":"http://127.0.0.1:"#).await;
    process.line(r#""message":"configuration loaded""#).await;
    assert_eq!(get(gateway, "/api/test").await.status, 200);
    assert_eq!(get(admin, "/readyz").await.status, 200);
    process.signal(Signal::SIGINT);
    assert_eq!(process.ended().await, 0);
}

/// The successor must use the free ports of its predecessor, not choose others.
#[tokio::test]
async fn demo_keeps_its_ports_in_an_upgrade() {
    hold_demo_ports();
    let mut process = Process::spawn(&mut ratekeeper());
    let (gateway, admin) = (process.address().await, process.admin().await);
    process.signal(Signal::SIGUSR2);
    process.line("took over from predecessor").await;
    assert_eq!(process.ended().await, 0);
    assert_eq!(get(gateway, "/api/test").await.status, 200);
    assert_eq!(get(admin, "/readyz").await.status, 200);
    for url in [format!("http://{gateway}\""), format!("http://{admin}/metrics")] {
        assert_eq!(process.count_lines(&url), 2, "{:#?}", process.stderr());
    }
    assert_eq!(process.count_lines("inherited socket ignored"), 0, "{:#?}", process.stderr());
}

#[tokio::test]
async fn invalid_or_missing_file_is_reported() {
    let (folder, upstream) = (Folder::new("files"), Upstream::start().await);
    let good = one_route(&upstream, "", "");

    let (code, message) = failure(std::path::Path::new("no-such.yaml")).await;
    assert_eq!(
        (code, message.as_str()),
        (1, "error: cannot read no-such.yaml: No such file or directory\n   = help: check the path")
    );

    let bad = folder.write("bad.yaml", &good.replace("routes:", "rotues:"));
    let (code, message) = failure(&bad).await;
    assert_eq!(code, 2, "{message}");
    assert!(
        message.contains("  --> ")
            && message.contains("bad.yaml:7:3\n")
            && message.contains("did you mean `routes`?"),
        "{message}"
    );

    let empty = folder.write("empty.yaml", "limits: { per-user: { key: ip, token_bucket: {} } }\n");
    let sentence = "error: the configuration has neither a gateway nor an API; write `gateway: { routes: [...] }` or `apis: { http: 127.0.0.1:9181 }`";
    let (code, message) = failure(&empty).await;
    assert_eq!((code, message.as_str()), (2, sentence));
}

#[tokio::test]
async fn port_in_use_is_reported() {
    let (folder, upstream) = (Folder::new("ports"), Upstream::start().await);
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let busy = holder.local_addr().unwrap();
    let good = one_route(&upstream, "", "");

    let file = folder.write("listen.yaml", &good.replace("listen: 127.0.0.1:0", &format!("listen: {busy}")));
    let (code, message) = failure(&file).await;
    let sentence = format!(
        "error: {busy} is in use by another program\n   = help: stop it, or write another address in `gateway.listen`"
    );
    assert_eq!((code, message), (1, sentence));

    let file = folder.write("admin.yaml", &good.replace("admin: 127.0.0.1:0", &format!("admin: {busy}")));
    let (code, message) = failure(&file).await;
    let sentence = format!(
        "error: {busy} is in use by another program\n   = help: stop it, or write another address in `admin`"
    );
    assert_eq!((code, message), (1, sentence));
}

/// Returns a configuration with limits in Redis.
fn in_redis(upstream: &Upstream, redis: &RedisServer, failure: &str) -> String {
    let store = format!(
        "store: {{ redis: {{ address: \"{}\", secret: 0123456789abcdef, on_store_failure: {failure}, deadline: 200ms }} }}",
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
    let (code, message) =
        failure(&folder.write("ratekeeper.yaml", &in_redis(&upstream, &redis, "closed"))).await;
    assert_eq!(code, 1, "{message}");
    assert!(message.starts_with("error: cannot reach Redis: "), "{message}");
    let hint =
        "; start Redis, or write `on_store_failure: local` or `on_store_failure: open` to start without it";
    assert!(message.ends_with(hint) && message.contains("refused"), "{message}");
}

#[tokio::test]
async fn failure_policies_local_and_open_start_without_redis_and_recover() {
    let (folder, upstream) = (Folder::new("degraded"), Upstream::start().await);
    for failure in ["local, instances: 1", "open"] {
        let mut redis = RedisServer::start().unwrap();
        redis.kill().unwrap();
        let file = folder.write("ratekeeper.yaml", &in_redis(&upstream, &redis, failure));
        let (process, address) = Process::serving(&file).await;
        let message = process.line("store unavailable").await;
        assert!(message.contains(r#""level":"WARN""#) && message.contains("refused"), "{message}");
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
