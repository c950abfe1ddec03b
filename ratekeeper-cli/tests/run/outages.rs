//! Redis and upstreams that are killed under load.

use testbed::RedisServer;

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
        let begun = tokio::time::Instant::now();
        while get(address, "/").await.status == 200 {
            assert!(begun.elapsed() < crate::run::support::TIMEOUT, "the failure was never noticed");
        }
        load.more(50).await;
        upstream.restart().await;
        let begun = tokio::time::Instant::now();
        while get(address, "/").await.status != 200 {
            assert!(begun.elapsed() < crate::run::support::TIMEOUT, "the upstream was never used again");
        }
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
