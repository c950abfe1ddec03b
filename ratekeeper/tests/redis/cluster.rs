//! Goal: on a cluster of six real processes limits are as exact as on one server while hash slots migrate and masters
//! fail over or die; no request hangs, and every error is counted and bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use ratekeeper::redis::{FailurePolicy, Redis, Settings};
use ratekeeper::{Charge, Clock as _, Limit, Limiter, LogPolicy, SystemClock, Time, Verdict, WindowAlign};
use testbed::{RedisCluster, wait_for, wait_until};

use crate::child::Worker;
use crate::limits::every_limit;
use crate::redis::equivalence::{Dice, agree};
use crate::redis::processes::{self, PROCESSES, connect, every_algorithm};
use crate::redis::{PATIENT, limiter, sum};

/// Accepted delay of a decision after its deadline on a busy test machine.
const LATE_MAX: Duration = Duration::from_millis(250);

fn all_expire(cluster: &RedisCluster) {
    assert_eq!(cluster.keys_without_expiry().unwrap(), Vec::<String>::new());
}

fn a_day(limit: u32) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(86_400), WindowAlign::FirstRequest).unwrap()
}

fn patient(cluster: &RedisCluster) -> Settings {
    Settings::new(&cluster.url()).deadline(PATIENT)
}

/// The hash slot of the only existing key.
fn slot_of_the_key(cluster: &RedisCluster) -> u16 {
    let scan = |node: &testbed::RedisServer| node.cli(&["--scan"]).unwrap();
    let key = cluster.nodes().iter().map(scan).find(|keys| !keys.is_empty()).unwrap();
    cluster.slot_of(key.lines().next().unwrap()).unwrap()
}

/// Checked with one limit and with several limits of one key.
#[tokio::test]
async fn memory_and_a_cluster_agree_on_every_field() {
    let cluster = RedisCluster::start().unwrap();
    let variants = every_limit(5, 10);
    for (number, limit) in variants.iter().enumerate() {
        let limits = [limit.clone(), variants[(number + 5) % variants.len()].clone()];
        for limits in [&limits[..1], &limits[..]] {
            let name = format!("{number}/{}", limits.len());
            agree(limits, &cluster.url(), &name, 300, 99_991 + number as u64, 1).await;
        }
    }
    all_expire(&cluster);
}

/// Requests of all four processes together; most of them are denied.
const REQUESTS: usize = 4_000;

/// Every algorithm on one key: the number of allowed requests equals the limit.
#[test]
fn four_processes_on_a_cluster_admit_exactly_the_limit() {
    let cluster = RedisCluster::start().unwrap();
    let mut workers: Vec<Worker> =
        (0..PROCESSES).map(|_| Worker::start("redis::cluster::one_of_four", &cluster.url())).collect();
    for limit in every_algorithm(500) {
        let admitted = processes::round(&mut workers);
        assert_eq!(admitted.iter().sum::<u32>(), 500, "{limit:?}: {admitted:?}");
    }
    all_expire(&cluster);
}

/// The worker process. Does nothing when run as an ordinary test.
#[test]
fn one_of_four() {
    let rounds = every_algorithm(500).map(|limit| vec![limit]);
    processes::work(&rounds, 4, REQUESTS / PROCESSES);
}

/// Concurrent checks of many keys in many hash slots: each key has its own limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_keys_on_all_nodes_keep_their_limits() {
    let cluster = RedisCluster::start().unwrap();
    let limiter = Arc::new(limiter(&[a_day(3), a_day(5)], &patient(&cluster)));
    let tasks = (0..500_u64).flat_map(|key| {
        let limiter = limiter.clone();
        (0..5).map(move |_| {
            let limiter = limiter.clone();
            tokio::spawn(async move { (key, limiter.check(&key).await.allowed()) })
        })
    });
    let mut admitted = vec![0; 500];
    for task in tasks.collect::<Vec<_>>() {
        let (key, allowed) = task.await.unwrap();
        admitted[key as usize] += usize::from(allowed);
    }
    assert_eq!(admitted, vec![3; 500]);
    limiter.reset(&7_u64).await.unwrap();
    assert!(limiter.check(&7_u64).await.allowed(), "reset on whichever node it is");
    all_expire(&cluster);
}

/// A limit per user and one for all users, in different hash slots. Requests denied by a user's limit charge nothing
/// to the other, except for a bounded number of charges that could not be refunded completely.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_in_different_hash_slots_are_charged_together() {
    const USERS: u64 = 20;
    const EACH: u32 = 10;

    let cluster = RedisCluster::start().unwrap();
    for (round, for_all) in every_algorithm(5_000).into_iter().enumerate() {
        let limits = [a_day(EACH), for_all.clone()];
        let limiter = Arc::new(connect(&cluster.url(), round, &limits, 2));
        let tasks = (0..32).map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let mut admitted = 0;
                for user in (0..USERS).cycle().take(200) {
                    let charges = [
                        Charge { limit: 0, key: limiter.key(&("user", user)), cost: 1 },
                        Charge { limit: 1, key: limiter.key("all"), cost: 1 },
                    ];
                    let verdict = limiter.charge(&charges).await.unwrap();
                    assert!(!verdict.is_degraded());
                    admitted += u32::from(verdict.allowed());
                }
                admitted
            })
        });
        let admitted = sum(tasks).await;
        // Refunds are in flight for a moment.
        let within = admitted..=admitted + 32;
        let taken = wait_for(async || {
            let taken = 5_000 - limiter.peek("all").await.decisions()[1].remaining;
            within.contains(&taken).then_some(taken)
        });
        let taken = taken.await;
        let wanted = USERS as u32 * EACH;
        println!("{}: {admitted} of {wanted} admitted, {taken} taken of the limit for all", for_all.name());
        assert!(admitted <= wanted, "never more than the limit");
        // Two requests that compete for a user's last unit are both denied only if each holds a unit that the other
        // needs. The peek makes this rare, and at most all 32 requests in flight are affected.
        assert!(admitted + 32 >= wanted, "{admitted} admitted");
    }
    all_expire(&cluster);
}

/// Callers cancelled between a charge and its refund leave no charge beyond what the users' limits allow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_cross_slot_requests_are_refunded() {
    let cluster = RedisCluster::start().unwrap();
    let limiter = Arc::new(limiter(&[a_day(5), a_day(100_000)], &patient(&cluster)));
    for user in 0..40_u32 {
        let asking = (0..20).map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let charges = [
                    Charge { limit: 0, key: limiter.key(&("user", user)), cost: 1 },
                    Charge { limit: 1, key: limiter.key("all"), cost: 1 },
                ];
                let _ = tokio::time::timeout(Duration::from_millis(2), limiter.charge(&charges)).await;
            })
        });
        for task in asking.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    }
    let taken = async || 100_000 - limiter.peek("all").await.decisions()[1].remaining;
    wait_for(async || (taken().await <= 40 * 5).then_some(())).await;
    all_expire(&cluster);
}

/// A cluster that was unavailable when the limiter was created is used once it answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_unavailable_at_start_is_used_later() {
    let cluster = RedisCluster::start().unwrap();
    cluster.nodes().iter().for_each(|node| node.pause().unwrap());
    let limiter = limiter(&[a_day(1_000)], &Settings::new(&cluster.url()));
    let noticing = async {
        while !limiter.is_degraded() {
            limiter.check("key").await;
        }
    };
    tokio::time::timeout(PATIENT, noticing).await.unwrap();
    cluster.nodes().iter().for_each(|node| node.resume().unwrap());
    wait_for(async || {
        for key in 0..20_u32 {
            limiter.check(&key).await;
        }
        (!limiter.is_degraded()).then_some(())
    })
    .await;
    healthy(&limiter).await;
    all_expire(&cluster);
}

/// A log of all requests also counts requests that a limit in another hash slot denies.
#[tokio::test]
async fn log_of_all_counts_requests_denied_in_another_hash_slot() {
    let cluster = RedisCluster::start().unwrap();
    let log = Limit::sliding_window_log(100, Duration::from_secs(86_400), LogPolicy::All).unwrap();
    let limiter = limiter(&[a_day(2), log], &patient(&cluster));
    let charges = [
        Charge { limit: 0, key: limiter.key("user"), cost: 1 },
        Charge { limit: 1, key: limiter.key("all"), cost: 1 },
    ];
    for number in 1..=6 {
        let verdict = limiter.charge(&charges).await.unwrap();
        assert_eq!(verdict.allowed(), number <= 2);
        assert_eq!(verdict.decisions()[1].remaining, 100 - number);
    }
    all_expire(&cluster);
}

/// Decisions counted by the tasks of one limiter.
#[derive(Debug, Default)]
struct Totals {
    checked: AtomicU32,
    admitted: AtomicU32,
    degraded: AtomicU32,
    degraded_admitted: AtomicU32,
    slowest_ns: AtomicU64,
}

impl Totals {
    fn read(count: &AtomicU32) -> u32 {
        count.load(Ordering::Relaxed)
    }

    fn note(&self, verdict: &Verdict, took: Duration) {
        self.slowest_ns.fetch_max(took.as_nanos() as u64, Ordering::Relaxed);
        let counts = match verdict.is_degraded() {
            true => {
                self.degraded.fetch_add(1, Ordering::Relaxed);
                &self.degraded_admitted
            }
            false => &self.admitted,
        };
        counts.fetch_add(u32::from(verdict.allowed()), Ordering::Relaxed);
        self.checked.fetch_add(1, Ordering::Relaxed);
    }

    fn slowest(&self) -> Duration {
        Duration::from_nanos(self.slowest_ns.load(Ordering::Relaxed))
    }
}

/// Tasks that check one key until they are stopped.
struct Load {
    totals: Arc<Totals>,
    is_over: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(limiter: &Arc<Limiter<Redis>>, tasks: usize) -> Load {
        let (totals, is_over) = (Arc::new(Totals::default()), Arc::new(AtomicBool::new(false)));
        let tasks = (0..tasks).map(|_| {
            let (limiter, totals, is_over) = (limiter.clone(), totals.clone(), is_over.clone());
            tokio::spawn(async move {
                let clock = SystemClock::new();
                while !is_over.load(Ordering::Relaxed) {
                    let start = clock.now();
                    let verdict = limiter.check("key").await;
                    totals.note(&verdict, clock.now().saturating_since(start));
                    // A steady load: the limit must not be used up before the test ends.
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            })
        });
        let tasks = tasks.collect();
        Load { totals, is_over, tasks }
    }

    /// Waits for this many more decisions.
    async fn more(&self, count: u32) {
        let goal = Totals::read(&self.totals.checked) + count;
        wait_until(|| Totals::read(&self.totals.checked) >= goal).await;
    }

    async fn stop(self) -> Arc<Totals> {
        self.is_over.store(true, Ordering::Relaxed);
        for task in self.tasks {
            tokio::time::timeout(PATIENT, task).await.unwrap().unwrap();
        }
        self.totals
    }
}

/// How often the cluster has rejected a request because its keys are on two nodes.
fn split_requests(cluster: &RedisCluster) -> u64 {
    let rejected = cluster.nodes().iter().map(|node| {
        let stats = node.command(&["INFO", "errorstats"]).unwrap();
        let count = stats.lines().find_map(|line| line.strip_prefix("errorstat_TRYAGAIN:count="));
        count.map_or(0, |count| count.trim().parse::<u64>().unwrap())
    });
    rejected.sum()
}

/// Runs blocking work on the cluster beside the load.
async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

/// A hash slot and its keys migrate between masters under load: the count stays exact, and the cluster decides every
/// request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hash_slot_migration_keeps_counts_exact() {
    const LIMIT: u32 = 100_000;

    let cluster = Arc::new(RedisCluster::start().unwrap());
    // Two limits: two keys in one hash slot, of which one may have migrated and the other not.
    let limiter = Arc::new(limiter(&[a_day(LIMIT), a_day(LIMIT)], &patient(&cluster)));
    assert!(limiter.check("key").await.allowed());
    let slot = slot_of_the_key(&cluster);
    let load = Load::start(&limiter, 16);
    for _ in 0..3 {
        let shared = cluster.clone();
        let slot_move = beside(move || {
            let from = shared.master_of(slot).unwrap();
            let to = (0..3).find(|node| *node != from).unwrap();
            let slot_move = shared.begin_move(slot, from, to).unwrap();
            assert_eq!(shared.move_keys(slot_move, 1).unwrap(), 1);
            slot_move
        });
        let slot_move = slot_move.await;
        // The keys are on different nodes: requests wait until both are on the same node.
        let before = split_requests(&cluster);
        wait_until(|| split_requests(&cluster) > before).await;
        let shared = cluster.clone();
        beside(move || shared.move_keys(slot_move, 10).unwrap()).await;
        // Both keys have migrated but the hash slot has not: requests are redirected with ASK.
        load.more(100).await;
        let shared = cluster.clone();
        beside(move || shared.end_move(slot_move).unwrap()).await;
    }
    let totals = load.stop().await;
    let (admitted, degraded) = (1 + Totals::read(&totals.admitted), Totals::read(&totals.degraded));
    println!("three moves: {admitted} admitted, the slowest decision took {:.1?}", totals.slowest());
    assert_eq!(degraded, 0);
    let left: Vec<_> = limiter.peek("key").await.decisions().iter().map(|it| it.remaining).collect();
    assert_eq!(left, [LIMIT - admitted; 2]);
    all_expire(&cluster);
}

/// How a master stops serving its hash slots.
#[derive(Clone, Copy, Debug)]
enum MasterFailure {
    /// Its replica takes over in a coordinated failover.
    Failover,
    /// Killed with SIGKILL.
    Killed,
    /// Paused, and resumed after another node has replaced it.
    Paused,
}

/// While the master of a key changes, no request hangs. Afterwards the limit holds, except for writes that were not
/// replicated: at most one extra limit. Under the local policy a process allows at most its share meanwhile.
async fn limit_holds_after(failure: MasterFailure) {
    const LIMIT: u32 = 5_000;
    const NODES: u32 = 2;

    let cluster = RedisCluster::start().unwrap();
    let (node_timeout, clock) = (cluster.node_timeout(), SystemClock::new());
    // Both limiters share the key.
    let limiters = [FailurePolicy::Closed, FailurePolicy::Local { instances: NODES }].map(|policy| {
        Arc::new(limiter(&[a_day(LIMIT)], &Settings::new(&cluster.url()).on_store_failure(policy)))
    });
    for limiter in &limiters {
        healthy(limiter).await;
    }
    let loads = limiters.each_ref().map(|limiter| Load::start(limiter, 4));
    for load in &loads {
        load.more(50).await;
    }
    let slot = slot_of_the_key(&cluster);
    let before = limiters[0].peek("key").await.decision().remaining;
    assert!(before > 0, "it is used up before its master fails");

    let (cluster, master, gone_at) = beside(move || {
        let mut cluster = cluster;
        let master = cluster.master_of(slot).unwrap();
        let gone_at = SystemClock::new().now();
        match failure {
            MasterFailure::Failover => cluster.failover(cluster.replica_of(master).unwrap()).unwrap(),
            MasterFailure::Killed => cluster.kill(master).unwrap(),
            MasterFailure::Paused => cluster.nodes()[master].pause().unwrap(),
        }
        (cluster, master, gone_at)
    })
    .await;
    // Waits until the cluster serves the hash slot again, while the limiter recovers independently.
    let waiting = tokio::spawn(beside(move || {
        cluster.wait_until_ok(PATIENT).unwrap();
        (cluster, SystemClock::new().now())
    }));
    healthy(&limiters[0]).await;
    let ours = clock.now().saturating_since(gone_at);
    let (cluster, whole_at) = waiting.await.unwrap();
    let theirs = whole_at.saturating_since(gone_at);
    if let MasterFailure::Paused = failure {
        cluster.nodes()[master].resume().unwrap();
    }
    // The tasks continue until the limit is used up.
    wait_for(async || (limiters[0].peek("key").await.decision().remaining == 0).then_some(())).await;
    // Requests beyond the limit would be counted now.
    for load in &loads {
        load.more(200).await;
    }

    let goal = node_timeout + Duration::from_secs(2);
    let is_met = if ours <= goal { "met" } else { "not met" };
    println!(
        "{failure:?}: decisions again after {ours:.1?} (goal {goal:?}: {is_met}), the cluster after {theirs:.1?}"
    );
    // The limiter recovers soon after the cluster, however long the election takes.
    assert!(ours <= goal.max(theirs + Duration::from_secs(1)), "{ours:?}, the cluster {theirs:?}");
    let mut admitted = 0;
    for (load, policy) in loads.into_iter().zip(["closed", "local"]) {
        let totals = load.stop().await;
        println!("  {policy}: {totals:?}");
        admitted += Totals::read(&totals.admitted);
        let by_policy = Totals::read(&totals.degraded_admitted);
        assert!(by_policy <= if policy == "local" { LIMIT / NODES } else { 0 }, "{policy}: {totals:?}");
        let slowest = totals.slowest();
        assert!(slowest <= Duration::from_millis(20) + LATE_MAX, "{policy}: a decision after {slowest:?}");
    }
    let over = admitted.saturating_sub(LIMIT);
    println!("  {admitted} admitted by the cluster: {over} over the limit of {LIMIT}");
    let may_be_over = if let MasterFailure::Failover = failure { 0 } else { LIMIT };
    assert!(over <= may_be_over, "{over} over the limit");
    all_expire(&cluster);
}

/// Peeks until the cluster decides. A peek never uses the denial cache.
async fn healthy(limiter: &Limiter<Redis>) {
    wait_for(async || (!limiter.peek("key").await.is_degraded()).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_holds_after_coordinated_failover() {
    limit_holds_after(MasterFailure::Failover).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_holds_after_master_is_killed() {
    limit_holds_after(MasterFailure::Killed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_holds_after_master_is_paused() {
    limit_holds_after(MasterFailure::Paused).await;
}

/// The documented permissions for a cluster are sufficient.
#[tokio::test]
async fn a_user_with_the_documented_rights() {
    let cluster = RedisCluster::start().unwrap();
    let rights = "on >secret ~rate_limit:* +fcall +function|load +time +get +set +incrby +getrange +setrange +pexpire \
                  +pttl +unlink +zadd +zcard +zscore +zrange +zrem +hset +hget +hdel +cluster|slots +asking";
    for node in cluster.nodes() {
        let mut command = vec!["ACL", "SETUSER", "ratekeeper"];
        command.extend(rights.split_whitespace());
        assert_eq!(node.cli(&command).unwrap(), "OK");
    }
    let url = cluster.url().replace("://", "://ratekeeper:secret@");
    let limiter = limiter(&[a_day(10)], &Settings::new(&url).deadline(PATIENT));
    assert!(!limiter.check("key").await.is_degraded());
    // In the middle of a migration: the request is redirected with ASK.
    let slot = slot_of_the_key(&cluster);
    let from = cluster.master_of(slot).unwrap();
    let slot_move = cluster.begin_move(slot, from, (from + 1) % 3).unwrap();
    cluster.move_keys(slot_move, 10).unwrap();
    let verdict = limiter.check("key").await;
    assert_eq!((verdict.is_degraded(), verdict.decision().remaining), (false, 8));
    cluster.end_move(slot_move).unwrap();
    assert_eq!(limiter.check("key").await.decision().remaining, 7);
    all_expire(&cluster);
}

/// If a cluster node is configured as a single server, the error names the correct form of the address.
#[tokio::test]
async fn cluster_node_as_single_server_is_an_error() {
    let cluster = RedisCluster::start().unwrap();
    let mut dice = Dice(88_172_645_463_325_252);
    let one = limiter(&[a_day(5)], &Settings::new(&cluster.nodes()[0].url()).deadline(PATIENT));
    let mut errors = Vec::new();
    for _ in 0..4 {
        let at = Time::from_secs(1_700_000_000);
        errors.extend(one.check_at(at, &dice.below(1_000_000), 1).await.err());
    }
    let message = errors.first().expect("a third of the keys are on this node").to_string();
    assert!(message.contains("redis+cluster://"), "{message}");
}
