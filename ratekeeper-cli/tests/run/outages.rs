//! Redis and upstreams that are killed under load.

use nix::sys::signal::Signal;
use testbed::{RedisServer, wait_for};

use crate::run::support::{Folder, Load, Process, Upstream, get, one_route};

const KILLS: usize = 5;

#[tokio::test(flavor = "multi_thread")]
async fn redis_restarts_under_load_cause_no_errors() {
    let (folder, upstream) = (Folder::new("redis-kills"), Upstream::start().await);
    let mut redis = RedisServer::start().unwrap();
    let above = format!(
        "store: {{ redis: {{ address: \"{}\", on_store_failure: local, instances: 1 }} }}\n\
         limits: {{ per-user: {{ key: ip, fixed_window: {{ limit: 1000, window: 1h }} }} }}",
        redis.url()
    );
    let (process, address) =
        Process::serving(&folder.write("ratekeeper.yaml", &one_route(&upstream, &above, ""))).await;
    let load = Load::get(address, 8, "/");
    for _ in 0..KILLS {
        load.more(200).await;
        redis.kill().unwrap();
        process.until_metric("ratekeeper_redis_up", 0).await;
        load.more(200).await;
        redis.restart().unwrap();
        process.until_metric("ratekeeper_redis_up", 1).await;
    }
    load.more(200).await;
    let tally = load.stop().await;
    println!("Redis killed and restarted {KILLS} times under load, on_store_failure: local: {tally}");
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
    assert!(tally.statuses.keys().all(|status| matches!(status, 200 | 429)), "{tally}");
    assert_eq!(tally.resent, 0);
    assert_eq!(redis.keys_without_expiry().unwrap(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_restarts_under_load_are_answered_and_recovered_from() {
    let (folder, mut upstream) = (Folder::new("upstream-kills"), Upstream::start().await);
    let (process, address) =
        Process::serving(&folder.write("ratekeeper.yaml", &one_route(&upstream, "", ""))).await;
    let load = Load::get(address, 8, "/");
    let mut slowest_recovery = std::time::Duration::ZERO;
    for _ in 0..KILLS {
        load.more(200).await;
        upstream.kill();
        wait_for(async || (get(address, "/").await.status != 200).then_some(())).await;
        load.more(50).await;
        upstream.restart().await;
        let begun = tokio::time::Instant::now();
        wait_for(async || (get(address, "/").await.status == 200).then_some(())).await;
        slowest_recovery = slowest_recovery.max(begun.elapsed());
    }
    let tally = load.stop().await;
    println!("upstream killed {KILLS} times under load: {tally}; used again within {slowest_recovery:.1?}");
    // The gateway answers every request, even if the upstream does not.
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
    assert!(tally.statuses.keys().all(|status| matches!(status, 200 | 502 | 503)), "{tally}");
    assert!(tally.of(200) >= 200 * KILLS as u64);
    let after = Load::get(address, 8, "/");
    after.more(500).await;
    after.stop().await.assert_all(200);
    drop(process);
}

/// The log names the cause and what to do about it; metrics and access log tell decisions by the failure policy from
/// those by the limit.
#[tokio::test(flavor = "multi_thread")]
async fn outage_log_names_the_cause_and_what_to_do() {
    let (folder, upstream) = (Folder::new("causes"), Upstream::start().await);
    let causes: [(&str, &[&[&str]], &str, &str); 5] = [
        ("out_of_memory", &[&["CONFIG", "SET", "maxmemory", "1"]], "OOM", "raise it"),
        ("read_only", &[&["REPLICAOF", "127.0.0.1", "1"]], "READONLY", "the address of the master"),
        ("no_permission", &[&["ACL", "SETUSER", "default", "-fcall"]], "NOPERM", "needs the rights"),
        (
            "no_authentication",
            &[
                &["CONFIG", "SET", "requirepass", "secret"],
                &["-a", "secret", "CLIENT", "KILL", "TYPE", "normal"],
            ],
            "NOAUTH",
            "write user and password",
        ),
        ("wrong_type", &[&["DEL", "KEY"], &["RPUSH", "KEY", "foreign"]], "WRONGTYPE", "delete the key"),
    ];
    for (cause, commands, code, help) in causes {
        let redis = RedisServer::start().unwrap();
        let above = format!(
            "store: {{ redis: {{ address: \"{}\", on_store_failure: open, deadline: 200ms }} }}\n\
             limits: {{ per-user: {{ key: ip, fixed_window: {{ limit: 1000, window: 1h }} }} }}",
            redis.url()
        );
        let config = one_route(&upstream, &above, "").replace("access_log: false", "access_log: true");
        let (process, address) = Process::serving(&folder.write("ratekeeper.yaml", &config)).await;
        assert_eq!(get(address, "/").await.status, 200, "{cause}");
        let key = redis.command(&["KEYS", "*"]).unwrap();
        for words in commands {
            let words: Vec<&str> =
                words.iter().map(|word| if *word == "KEY" { &*key } else { word }).collect();
            redis.cli(&words).unwrap();
        }
        let name = format!("ratekeeper_redis_errors_total{{reason=\"{cause}\"}}");
        for _ in 0..400 {
            assert_eq!(get(address, "/").await.status, 200, "{cause}");
            if process.metric(&name).await > 0 {
                break;
            }
        }
        let line = process.line(code).await;
        assert!(line.contains(r#""level":"WARN""#) && line.contains(help), "{cause}: {line}");
        assert_eq!(get(address, "/").await.status, 200, "{cause}");
        let degraded =
            r#"ratekeeper_requests_total{route="all",decision="degraded_allowed",code="2xx"}"#.to_owned();
        assert!(process.metric(&degraded).await > 0, "{cause}");
        let degraded = r#"ratekeeper_limit_decisions_total{limit="per-user",decision="degraded_allowed"}"#;
        assert!(process.metric(degraded).await > 0, "{cause}");
        let allowed = r#"ratekeeper_limit_decisions_total{limit="per-user",decision="allowed"}"#;
        let by_limit = process.metric(allowed).await;
        testbed::wait_until(|| {
            process
                .stdout()
                .iter()
                .any(|line| line.contains(r#""decision":"degraded_allowed","degraded":true"#))
        })
        .await;
        assert_eq!(process.metric(allowed).await, by_limit, "{cause}");
    }
}

/// A flood of keys with a long window fills the store: the keys after it share one budget, and the log says so.
#[tokio::test(flavor = "multi_thread")]
async fn full_store_is_logged_at_a_bounded_rate_and_counted() {
    let (folder, upstream) = (Folder::new("full"), Upstream::start().await);
    let above = "store: { memory: { max_keys: 10, when_full: share } }\n\
                 limits: { per-user: { key: { header: X-User }, fixed_window: { limit: 2, window: 1d } } }";
    let (mut process, address) =
        Process::serving(&folder.write("ratekeeper.yaml", &one_route(&upstream, above, ""))).await;
    let mut client = crate::run::support::Client::new(address);
    let mut statuses = Vec::new();
    for user in 0..1_000 {
        statuses.push(client.get("/", &format!("X-User: {user}\r\n")).await.unwrap().status);
    }
    assert_eq!(statuses.last(), Some(&429), "new keys share one budget");
    let line = process.line("store full").await;
    assert!(line.contains(r#""level":"WARN""#) && line.contains("max_keys"), "{line}");
    assert!(process.metric("ratekeeper_store_overflowed_total").await > 500);
    client.get("/", "X-User: last\r\n").await.unwrap();
    // Events are logged in order, so a second warning would be above this line.
    process.signal(Signal::SIGHUP);
    process.line("configuration reloaded").await;
    assert_eq!(process.count_lines("store full"), 1, "one line in a while");
}
