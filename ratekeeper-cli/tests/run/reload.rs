//! Configuration reloads.

use std::fmt::Write as _;

use nix::sys::signal::Signal;
use testbed::{RedisServer, wait_until};

use crate::run::support::{Folder, Load, Process, Response, Upstream, get, one_route};

/// Returns a configuration in which everything has one number: the limit's name and size, the request header for the
/// upstream, and the response header for the client.
fn numbered(upstreams: [&Upstream; 2], number: u64) -> String {
    let (quota, upstream) = (1_000_000 + number, upstreams[(number % 2) as usize].address());
    format!(
        "limits: {{ v{number}: {{ key: ip, fixed_window: {{ limit: {quota}, window: 1h }} }} }}\n\
         admin: 127.0.0.1:0\n\
         gateway:\n  \
           listen: 127.0.0.1:0\n  \
           access_log: false\n  \
           routes:\n    \
             - id: route-{number}\n      \
               upstream: http://{upstream}\n      \
               limits: [v{number}]\n      \
               request_headers: {{ set: {{ X-Version: \"{number}\" }} }}\n      \
               response_headers: {{ set: {{ X-Version: \"{number}\" }} }}\n"
    )
}

/// Returns one of six configurations that must be rejected.
fn bad(good: &str, number: u64) -> String {
    match number % 6 {
        0 => good.replace("fixed_window", "fixed_widow"),
        1 => good[..good.len() / 2].to_owned(),
        2 => good.replace("listen: 127.0.0.1:0", "listen: 127.0.0.1:1"),
        3 => good.replace("admin: 127.0.0.1:0", "admin: off"),
        4 => format!("store: redis://127.0.0.1:1\n{good}"),
        _ => "limits: {}\n".to_owned(),
    }
}

/// Checks that every part of an response comes from the same, valid configuration.
fn check_consistent(response: &Response) -> Result<(), String> {
    let wrong = || format!("{}\n{}", response.head, String::from_utf8_lossy(&response.body));
    let number: u64 = response.header("x-version").and_then(|it| it.parse().ok()).ok_or_else(wrong)?;
    let policy = format!("\"v{number}\";q={};w=3600", 1_000_000 + number);
    let is_consistent = response.status == 200
        && !number.is_multiple_of(3)
        && response.body == number.to_string().as_bytes()
        && response.header("ratelimit-policy") == Some(&policy)
        && response.header("ratelimit").is_some_and(|it| it.starts_with(&format!("\"v{number}\";r=")));
    if is_consistent { Ok(()) } else { Err(wrong()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn reloads_under_load_fail_no_request_and_never_mix_configurations() {
    let (folder, upstreams) = (Folder::new("reload"), [Upstream::start().await, Upstream::start().await]);
    let text = |number| numbered([&upstreams[0], &upstreams[1]], number);
    let file = folder.write("ratekeeper.yaml", &text(1));
    let (mut process, address) = Process::serving(&file).await;
    let request = b"GET / HTTP/1.1\r\nHost: test\r\n\r\n";
    let load = Load::start(address, 8, |_, _| request.to_vec(), check_consistent);
    load.more(10).await;
    let reloads: u64 = testbed::ordinary_or_long(300, 1000);
    for number in 2..reloads + 2 {
        let is_bad = number.is_multiple_of(3);
        folder.write("ratekeeper.yaml", &if is_bad { bad(&text(number), number / 3) } else { text(number) });
        // Polling may have noticed the file before the signal.
        let seen = process.count_lines("reloaded");
        process.signal(Signal::SIGHUP);
        wait_until(|| process.count_lines("reloaded") > seen).await;
    }
    load.more(100).await;
    let tally = load.stop().await;
    let (succeeded, failed) = (
        process.metric(r#"ratekeeper_reloads_total{result="success"}"#).await,
        process.metric(r#"ratekeeper_reloads_total{result="failure"}"#).await,
    );
    println!("{reloads} reloads under load: {tally}; succeeded: {succeeded}, failed: {failed}");
    tally.assert_all(200);
    assert!(failed >= reloads / 3 && succeeded >= reloads * 2 / 3 - 1, "{succeeded} {failed}");
    assert_eq!(process.count_lines("configuration not reloaded, the old one stays active") as u64, failed);
}

/// Changes the file and returns the log line of the reload.
async fn after_change(folder: &Folder, process: &mut Process, text: &str) -> String {
    let before = process.count_lines("reloaded");
    folder.write("ratekeeper.yaml", text);
    process.signal(Signal::SIGHUP);
    wait_until(|| process.count_lines("reloaded") > before).await;
    process.stderr().iter().rfind(|line| line.contains("reloaded")).unwrap().clone()
}

#[tokio::test]
async fn change_that_needs_a_restart_is_rejected_entirely() {
    let (folder, upstream) = (Folder::new("lasting"), Upstream::start().await);
    let good = one_route(&upstream, "limits: { a: { key: ip, fixed_window: { limit: 7 } } }", "");
    let (mut process, address) = Process::serving(&folder.write("ratekeeper.yaml", &good)).await;
    let changes = [
        ("gateway.listen", good.replace("listen: 127.0.0.1:0", "listen: [127.0.0.1:0, 127.0.0.1:0]")),
        ("admin", good.replace("admin: 127.0.0.1:0", "admin: off")),
        ("the type of `store`", format!("store: redis://127.0.0.1:1\n{good}")),
    ];
    for (what, text) in changes {
        // Another change in the same file must not take effect either.
        let line = after_change(&folder, &mut process, &text.replace("limit: 7", "limit: 9")).await;
        let sentence = format!("{what} cannot be changed while the server runs; restart to change it");
        assert!(line.contains(&sentence) && line.contains(r#""level":"ERROR""#), "{line}");
        assert_eq!(get(address, "/").await.header("ratelimit-policy"), Some("\"a\";q=7;w=60"));
    }
    let line = after_change(&folder, &mut process, &good.replace("limit: 7", "limit: 9")).await;
    assert!(line.contains(r#""message":"configuration reloaded""#), "{line}");
    assert_eq!(get(address, "/").await.header("ratelimit-policy"), Some("\"a\";q=9;w=60"));
}

/// Limits in use get more room by a reload, and keep it if the bounds are lowered, which is logged.
#[tokio::test]
async fn bounds_of_the_memory_store_are_raised_and_never_silently_ignored() {
    let (folder, upstream) = (Folder::new("bounds"), Upstream::start().await);
    let with = |max_keys: u32| {
        let above = format!(
            "store: {{ memory: {{ max_keys: {max_keys} }} }}\n\
             limits: {{ a: {{ key: ip, fixed_window: {{ limit: 7, window: 1h, align: first_request }} }} }}"
        );
        one_route(&upstream, &above, "")
    };
    let (mut process, address) = Process::serving(&folder.write("ratekeeper.yaml", &with(1_000))).await;
    let left = async || get(address, "/").await.header("ratelimit").map(|it| it[..7].to_owned());
    assert_eq!(left().await.unwrap(), "\"a\";r=6");
    let bytes = process.metric("ratekeeper_store_bytes").await;
    after_change(&folder, &mut process, &with(50_000)).await;
    let raised = process.metric("ratekeeper_store_bytes").await;
    assert!(raised > 10 * bytes, "{bytes} -> {raised}");
    assert_eq!(left().await.unwrap(), "\"a\";r=5");
    let lowered = "max_keys or max_bytes lowered, limits in use keep their capacity until a restart";
    assert_eq!(process.count_lines(lowered), 0);
    after_change(&folder, &mut process, &with(500)).await;
    assert_eq!(process.metric("ratekeeper_store_bytes").await, raised);
    assert_eq!((process.count_lines(lowered), left().await.unwrap().as_str()), (1, "\"a\";r=4"));
}

/// Redis connections and counters survive a reload, so a changed store would have no effect and is rejected.
#[tokio::test]
async fn changed_redis_settings_are_rejected() {
    let (folder, upstream) = (Folder::new("lasting-redis"), Upstream::start().await);
    let (redis, other) = (RedisServer::start().unwrap(), RedisServer::start().unwrap());
    let above = format!(
        "store: {{ redis: {{ address: \"{}\", on_store_failure: closed, deadline: 10s }} }}\n\
         limits: {{ a: {{ key: ip, fixed_window: {{ limit: 7, window: 1h, align: first_request }} }} }}",
        redis.url()
    );
    let good = one_route(&upstream, &above, "");
    let (mut process, address) = Process::serving(&folder.write("ratekeeper.yaml", &good)).await;
    let left = async || get(address, "/").await.header("ratelimit").map(|it| it[..7].to_owned());
    assert_eq!(left().await.unwrap(), "\"a\";r=6");
    let changes = [
        good.replace(&redis.url(), &other.url()),
        good.replace("on_store_failure: closed", "on_store_failure: open"),
        good.replace("deadline: 10s", "deadline: 9s"),
    ];
    for (number, text) in changes.iter().enumerate() {
        assert_ne!(*text, good);
        // Another change in the same file must not take effect either.
        let line = after_change(&folder, &mut process, &text.replace("limit: 7", "limit: 9")).await;
        let sentence = "store.redis cannot be changed while the server runs; restart to change it";
        assert!(line.contains(sentence) && line.contains(r#""level":"ERROR""#), "{line}");
        // The counters continue.
        assert_eq!(left().await.unwrap(), format!("\"a\";r={}", 5 - number));
    }
    assert_eq!(process.metric(r#"ratekeeper_reloads_total{result="failure"}"#).await, 3);
    let line = after_change(&folder, &mut process, &good.replace("id: all", "id: renamed")).await;
    assert!(line.contains(r#""message":"configuration reloaded""#), "{line}");
    assert_eq!(left().await.unwrap(), "\"a\";r=2");
}

#[tokio::test]
async fn changed_file_is_reloaded_without_a_signal_and_errors_are_logged() {
    let (folder, upstream) = (Folder::new("noticed"), Upstream::start().await);
    let good = one_route(&upstream, "limits: { a: { key: ip, fixed_window: { limit: 7 } } }", "");
    let (process, address) = Process::serving(&folder.write("ratekeeper.yaml", &good)).await;
    folder.write("ratekeeper.yaml", &good.replace("limit: 7", "limit: 123"));
    process.line(r#""message":"configuration reloaded""#).await;
    assert_eq!(get(address, "/").await.header("ratelimit-policy"), Some("\"a\";q=123;w=60"));
    let mut bad = good.replace("fixed_window", "fixed_widow");
    let _ = write!(bad, "# of another length");
    folder.write("ratekeeper.yaml", &bad);
    let line = process.line("not reloaded").await;
    assert!(line.contains("ratekeeper.yaml:1:") && line.contains("fixed_window"), "{line}");
    assert_eq!(get(address, "/").await.header("ratelimit-policy"), Some("\"a\";q=123;w=60"));
    assert_eq!(process.metric(r#"ratekeeper_reloads_total{result="failure"}"#).await, 1);
}

/// Tools that renew certificates do not send signals.
#[tokio::test]
async fn changed_referenced_file_is_reloaded() {
    let (folder, upstream) = (Folder::new("referred"), Upstream::start().await);
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let pem = |name: &str| std::fs::read_to_string(format!("{examples}/demo-{name}.pem")).unwrap();
    for name in ["cert", "key"] {
        folder.write(&format!("{name}.pem"), &pem(name));
    }
    folder.write("token", "1");
    let good = one_route(&upstream, "", "").replace(
        "listen: 127.0.0.1:0",
        "listen: [127.0.0.1:0, { address: 127.0.0.1:0, tls: { certificate: { file: cert.pem }, key: { file: key.pem } } }]",
    );
    let good = good.replace(" }\n", ", request_headers: { set: { X-Version: { file: token } } } }\n");
    let (process, address) = Process::serving(&folder.write("ratekeeper.yaml", &good)).await;
    let reloads = |count: usize| {
        let process = &process;
        async move {
            wait_until(|| process.count_lines(r#""message":"configuration reloaded""#) == count).await;
        }
    };
    process.line(r#""service":"gateway","url":"https://127.0.0.1:"#).await;
    assert_eq!(process.count_lines(r#""service":"gateway","url":"http://"#), 1);
    assert_eq!(get(address, "/").await.body, b"1");
    folder.write("token", "2");
    reloads(1).await;
    assert_eq!(get(address, "/").await.body, b"2");
    // The same content with a new modification time is a change.
    folder.write("cert.pem", &pem("cert"));
    reloads(2).await;
    // An invalid file changes nothing, and is read again once it changes.
    folder.write("key.pem", "-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n");
    process.line("not reloaded").await;
    folder.write("key.pem", &pem("key"));
    reloads(3).await;
    // A missing file is read once it appears.
    folder.write("ratekeeper.yaml", &good.replace("file: token", "file: other"));
    wait_until(|| process.count_lines("cannot read the file") == 1).await;
    folder.write("other", "3");
    reloads(4).await;
    assert_eq!(get(address, "/").await.body, b"3");
    // A file that never appears does not block later reloads.
    folder.write("ratekeeper.yaml", &good.replace("file: token", "file: gone"));
    wait_until(|| process.count_lines("cannot read the file") == 2).await;
    folder.write("ratekeeper.yaml", &good);
    reloads(5).await;
    assert_eq!(get(address, "/").await.body, b"2");
}
