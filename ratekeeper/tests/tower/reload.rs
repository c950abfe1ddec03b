//! Reloads: rules change while they are in use, and the usage of keys is kept.

use std::time::Duration;

use ratekeeper::tower::check::{Check, KeyInput, LimitRef};
use ratekeeper::tower::rule::{Ban, Override, OverrideScope, Rule};
use ratekeeper::tower::{LayerBuilder, LayerError, RatekeeperLayer, Reload};
use ratekeeper::{EdgePolicy, LeakyMode, Limit, LogPolicy, Rate, RefillStyle, Store, WindowAlign};

use super::{HOUR, hourly, ip, plain, send, statuses, with};

fn by_user(limit: u32) -> Rule {
    super::once(ratekeeper::tower::key::Key::of(ratekeeper::tower::key::KeyPart::header("x-user")))
        .limited(limit)
}

/// The same rule with another limit.
trait Limited {
    fn limited(self, limit: u32) -> Self;
}

impl Limited for Rule {
    fn limited(mut self, limit: u32) -> Rule {
        self.limit = hourly(limit);
        self
    }
}

fn of(rules: impl IntoIterator<Item = Rule>) -> LayerBuilder {
    rules.into_iter().fold(RatekeeperLayer::builder(), LayerBuilder::rule)
}

#[tokio::test]
async fn usage_is_kept_when_a_limit_is_raised_and_lowered() {
    let per_client = |limit| Rule::new("per-client", hourly(limit)).key(ip());
    let first = of([per_client(2)]).build().unwrap();
    assert_eq!(statuses(&first, [plain("/"), plain("/"), plain("/")]).await, [200, 200, 429]);
    // Another rule comes first.
    let raised = of([Rule::new("all", hourly(9)), per_client(4)]).reload_from(&first).unwrap();
    assert_eq!(statuses(&raised, [plain("/"), plain("/"), plain("/")]).await, [200, 200, 429]);
    let lowered = of([per_client(3), Rule::new("all", hourly(9))]).reload_from(&raised).unwrap();
    assert_eq!(send(&lowered, plain("/")).await.status, 429);
    let again = of([per_client(9), Rule::new("all", hourly(3))]).reload_from(&lowered).unwrap();
    let got = send(&again, plain("/")).await;
    assert_eq!(got.status, 200, "{got:?}");
    assert!(got.header("ratelimit").unwrap().contains(r#""per-client";r=4"#), "{got:?}");
    assert!(got.header("ratelimit").unwrap().contains(r#""all";r=0"#), "{got:?}");
}

#[tokio::test]
async fn unchanged_rule_is_shared_by_old_and_new_layer() {
    let first = of([by_user(3)]).build().unwrap();
    let second = of([by_user(3), Rule::new("all", hourly(9))]).reload_from(&first).unwrap();
    assert_eq!(send(&first, with("x-user", "a")).await.status, 200);
    assert_eq!(send(&second, with("x-user", "a")).await.status, 200);
    assert_eq!(statuses(&first, [with("x-user", "a"), with("x-user", "a")]).await, [200, 429]);
    assert_eq!(send(&second, with("x-user", "a")).await.status, 429);
}

#[tokio::test]
async fn overrides_keep_usage_and_renamed_rules_start_anew() {
    let mut rule = by_user(1);
    let gold =
        |limit| Override { scope: OverrideScope::Keys(vec!["gold".to_owned()]), limit: Some(hourly(limit)) };
    rule.overrides.push(gold(2));
    let first = of([rule.clone()]).build().unwrap();
    let gold_two = || [with("x-user", "gold"), with("x-user", "gold")];
    assert_eq!(statuses(&first, gold_two()).await, [200, 200]);
    assert_eq!(send(&first, with("x-user", "a")).await.status, 200);
    rule.overrides[0] = gold(3);
    let second = of([rule.clone()]).reload_from(&first).unwrap();
    assert_eq!(statuses(&second, gold_two()).await, [200, 429]);
    assert_eq!(send(&second, with("x-user", "a")).await.status, 429);
    rule.name = "another".to_owned();
    let third = of([rule]).reload_from(&second).unwrap();
    assert_eq!(send(&third, with("x-user", "a")).await.status, 200);
}

/// An override for these users.
fn for_users(users: &[&str], limit: u32) -> Override {
    let users = users.iter().map(|&user| user.to_owned()).collect();
    Override { scope: OverrideScope::Keys(users), limit: Some(hourly(limit)) }
}

/// An override for requests with this method.
fn for_method(method: &str, limit: u32) -> Override {
    let scope = OverrideScope::When(super::conditions::methods(&[method]));
    Override { scope, limit: Some(hourly(limit)) }
}

/// Uses up the budgets of `a` and `b`, which have overrides, and of `c`, and changes the overrides in every way.
async fn users_keep_their_usage<S: Reload + Store + Send + Sync + 'static>(
    build: impl FnOnce(LayerBuilder) -> RatekeeperLayer<S>,
) {
    let rule = |overrides: Vec<Override>| Rule { overrides, ..by_user(2) };
    let (a, b) = (for_users(&["a"], 3), for_users(&["b"], 4));
    let mut layer = build(of([rule(vec![a.clone(), b.clone()])]));
    for (user, allowed) in [("a", 3), ("b", 4), ("c", 2)] {
        let statuses = statuses(&layer, (0..6).map(|_| with("x-user", user))).await;
        assert_eq!(statuses.iter().filter(|&&status| status == 200).count(), allowed, "{user}");
    }
    let changes = [
        ("swapped", vec![b.clone(), a.clone()]),
        ("first removed", vec![a.clone()]),
        ("all removed", vec![]),
        ("added", vec![for_users(&["c"], 1)]),
        ("inserted", vec![for_users(&["z"], 9), for_users(&["c"], 2), b.clone(), a.clone()]),
        ("behind a tier", vec![for_method("POST", 9), a.clone(), b.clone()]),
        ("merged", vec![for_users(&["c", "b", "a"], 2)]),
        ("split", vec![for_users(&["z", "a"], 3), for_users(&["b", "c"], 2)]),
        (
            "unlimited for others",
            vec![Override { limit: None, ..for_users(&["z"], 1) }, b.clone(), a.clone()],
        ),
    ];
    for (change, overrides) in changes {
        layer = of([rule(overrides)]).reload_from(&layer).unwrap();
        for user in ["a", "b", "c"] {
            assert_eq!(send(&layer, with("x-user", user)).await.status, 429, "{change}: {user}");
        }
    }
    // The usage is exact: `a` has used 3, `c` has used 2.
    let raised = rule(vec![for_users(&["c"], 4), for_users(&["a"], 5)]);
    layer = of([raised]).reload_from(&layer).unwrap();
    for user in ["a", "c"] {
        let statuses = statuses(&layer, (0..3).map(|_| with("x-user", user))).await;
        assert_eq!(statuses, [200, 200, 429], "{user}");
    }
}

/// Uses up the budget of a tier, and moves it.
async fn tiers_keep_their_usage<S: Reload + Store + Send + Sync + 'static>(
    build: impl FnOnce(LayerBuilder) -> RatekeeperLayer<S>,
) {
    let rule = |overrides: Vec<Override>| Rule { overrides, ..by_user(1) };
    let get = for_method("GET", 2);
    let mut layer = build(of([rule(vec![get.clone()])]));
    assert_eq!(statuses(&layer, (0..3).map(|_| with("x-user", "a"))).await, [200, 200, 429]);
    for overrides in [
        vec![for_method("POST", 9), get.clone()],
        vec![for_users(&["z"], 9), for_method("get", 2)],
        vec![get.clone(), get.clone()],
    ] {
        layer = of([rule(overrides)]).reload_from(&layer).unwrap();
        assert_eq!(send(&layer, with("x-user", "a")).await.status, 429);
    }
}

#[tokio::test]
async fn keys_keep_their_usage_when_overrides_change() {
    users_keep_their_usage(|builder| builder.build().unwrap()).await;
}

#[tokio::test]
async fn tiers_keep_their_usage_when_overrides_move() {
    tiers_keep_their_usage(|builder| builder.build().unwrap()).await;
}

/// The states of every algorithm move, also between limits of different sizes and rates.
#[tokio::test]
async fn used_up_key_stays_used_up_under_an_added_and_a_removed_override() {
    let day = Duration::from_secs(86_400);
    let rate = |count| Rate::new(count, day).unwrap();
    let limits: [fn(u32, Duration, Rate) -> Limit; 8] = [
        |n, _, rate| Limit::token_bucket(n, rate, RefillStyle::Smooth).unwrap(),
        |n, _, rate| Limit::token_bucket(n, rate, RefillStyle::Stepped).unwrap(),
        |n, _, rate| Limit::leaky_bucket(n, rate, LeakyMode::Police).unwrap(),
        |n, day, _| Limit::fixed_window(n, day * 366, WindowAlign::Clock).unwrap(),
        |n, day, _| Limit::sliding_window_log(n, day, LogPolicy::Admitted).unwrap(),
        |n, day, _| Limit::sliding_window_counter(n, day * 9, 1, EdgePolicy::Keep).unwrap(),
        |n, day, _| Limit::sliding_window_counter(n, day * 9, 6, EdgePolicy::Keep).unwrap(),
        |n, day, _| Limit::sliding_window_counter(n, day * 9, 60, EdgePolicy::Keep).unwrap(),
    ];
    for limit in limits {
        let (base, large) = (limit(3, day, rate(3)), limit(40, day, rate(7)));
        let large = Override { limit: Some(large), ..for_users(&["a"], 1) };
        let rule = |overrides| Rule { limit: base.clone(), overrides, ..by_user(1) };
        let mut layer = of([rule(vec![large.clone()])]).build().unwrap();
        let allowed = async |layer: &RatekeeperLayer| {
            let statuses = statuses(layer, (0..50).map(|_| with("x-user", "a"))).await;
            statuses.iter().filter(|&&status| status == 200).count()
        };
        assert_eq!(allowed(&layer).await, 40, "{base:?}");
        for _ in 0..3 {
            layer = of([rule(vec![])]).reload_from(&layer).unwrap();
            assert_eq!(allowed(&layer).await, 0, "{base:?}");
            layer = of([rule(vec![large.clone()])]).reload_from(&layer).unwrap();
            assert_eq!(allowed(&layer).await, 0, "{base:?}");
        }
    }
}

/// A rule that bans a user after this many denials.
fn banning(limit: u32, after: u32, lasts: Duration) -> Rule {
    let mut rule = by_user(limit);
    rule.ban = Some(Ban { after, within: HOUR, lasts });
    rule
}

async fn retry_after<S: Store + Send + Sync + 'static>(layer: &RatekeeperLayer<S>, user: &str) -> u64 {
    let got = send(layer, with("x-user", user)).await;
    assert_eq!(got.status, 429, "{got:?}");
    got.header("retry-after").unwrap().parse().unwrap()
}

/// Bans user `a` for two hours, and changes all parts of the ban.
async fn bans_outlast_reloads<S: Reload + Store + Send + Sync + 'static>(
    build: impl FnOnce(LayerBuilder) -> RatekeeperLayer<S>,
) {
    let mut layer = build(of([banning(1, 1, 2 * HOUR)]));
    assert_eq!(statuses(&layer, [with("x-user", "a"), with("x-user", "a")]).await, [200, 429]);
    assert!((7_100..=7_200).contains(&retry_after(&layer, "a").await));
    // The limit is raised, so that only the ban can deny.
    for (after, hours) in [(1, 2), (1, 6), (5, 6), (5, 1), (2, 24), (1, 2)] {
        layer = of([banning(100, after, hours * HOUR)]).reload_from(&layer).unwrap();
        let retry_after = retry_after(&layer, "a").await;
        let lasts = u64::from(hours) * 3_600;
        assert!((lasts - 100..=lasts).contains(&retry_after), "after {after}, {hours} h: {retry_after}");
        assert_eq!(send(&layer, with("x-user", "b")).await.status, 200);
    }
}

#[tokio::test]
async fn ban_outlasts_a_change_of_its_length_and_threshold() {
    bans_outlast_reloads(|builder| builder.build().unwrap()).await;
}

#[tokio::test]
async fn failed_reload_leaves_the_old_layer_unchanged() {
    let first = of([by_user(2)]).build().unwrap();
    assert_eq!(send(&first, with("x-user", "a")).await.status, 200);
    assert_eq!(of([]).reload_from(&first).unwrap_err(), LayerError::NoRules);
    assert!(matches!(of([by_user(1), by_user(1)]).reload_from(&first), Err(LayerError::Rules(_))));
    assert!(matches!(of([by_user(1)]).max_keys(0).reload_from(&first), Err(LayerError::Memory(_))));
    assert_eq!(statuses(&first, [with("x-user", "a"), with("x-user", "a")]).await, [200, 429]);
}

#[tokio::test]
async fn discarded_reload_leaves_the_old_layer_unchanged() {
    let rule = |overrides: Vec<Override>| Rule { overrides, ..by_user(2) };
    let overrides = || vec![for_users(&["a"], 3)];
    let of_a = || (0..4).map(|_| with("x-user", "a"));
    for (before, after, allowed) in [(vec![], overrides(), 2), (overrides(), vec![], 3)] {
        let first = of([rule(before)]).build().unwrap();
        let count = statuses(&first, of_a()).await.iter().filter(|&&status| status == 200).count();
        assert_eq!(count, allowed);
        drop(of([rule(after.clone())]).reload_from(&first).unwrap());
        assert_eq!(statuses(&first, of_a()).await, [429; 4], "the reloaded layer is not in use");
        let reloaded = of([rule(after)]).reload_from(&first).unwrap();
        assert_eq!(statuses(&first, of_a()).await, [429; 4], "requests of the old layer");
        let got = send(&reloaded, with("x-user", "a")).await;
        assert_eq!(got.status, if allowed == 2 { 200 } else { 429 }, "{got:?}");
    }
}

/// A key that has no usage in its limit has none in the limit that it moves to, whatever it used there before.
#[tokio::test]
async fn reset_key_has_its_full_budget_when_it_moves_back() {
    let of_a = || (0..3).map(|_| with("x-user", "a"));
    for limit in [hourly(2), Limit::sliding_window_log(2, HOUR, LogPolicy::Admitted).unwrap()] {
        let rule = |overrides| Rule { limit: limit.clone(), overrides, ..by_user(2) };
        let own = Override { limit: Some(limit.clone()), ..for_users(&["a"], 2) };
        let first = of([rule(vec![])]).build().unwrap();
        assert_eq!(statuses(&first, of_a()).await, [200, 200, 429]);
        let moved = of([rule(vec![own])]).reload_from(&first).unwrap();
        assert_eq!(send(&moved, with("x-user", "a")).await.status, 429);
        let key = Check { limit: LimitRef::Rule(0), key: KeyInput::Values(&["a"]), cost: 0 };
        moved.reset(&[key]).await.unwrap();
        let back = of([rule(vec![])]).reload_from(&moved).unwrap();
        assert_eq!(statuses(&back, of_a()).await, [200, 200, 429], "{limit:?}");
    }
}

#[cfg(feature = "redis")]
mod in_redis {
    use std::time::Duration;

    use ratekeeper::redis::{FailurePolicy, Lease, Settings};
    use testbed::{RedisServer, wait_for};

    use super::*;

    fn settings(server: &RedisServer) -> Settings {
        Settings::new(&server.url()).deadline(Duration::from_secs(10)).connections(2)
    }

    fn connections(server: &RedisServer) -> u64 {
        let stats = server.cli(&["INFO", "stats"]).unwrap();
        let line = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        line.unwrap().trim().parse().unwrap()
    }

    #[tokio::test]
    async fn ban_outlasts_a_change_of_its_length_and_threshold() {
        let server = RedisServer::start().unwrap();
        bans_outlast_reloads(|builder| builder.redis(&settings(&server)).unwrap()).await;
        // The last `for` is two hours, but a longer one was in force. Only its key lives for so long.
        let lives = |name: &str| server.cli(&["PTTL", name]).unwrap().trim().parse::<u64>().unwrap();
        let names = server.cli(&["--scan"]).unwrap();
        let longest = names.lines().map(lives).max().unwrap();
        assert!((23 * 3_600_000..=24 * 3_600_001).contains(&longest), "{longest}");
        assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn keys_keep_their_usage_when_overrides_change() {
        let server = RedisServer::start().unwrap();
        users_keep_their_usage(|builder| builder.redis(&settings(&server)).unwrap()).await;
        assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn tiers_keep_their_usage_when_overrides_move() {
        let server = RedisServer::start().unwrap();
        tiers_keep_their_usage(|builder| builder.redis(&settings(&server)).unwrap()).await;
    }

    #[tokio::test]
    async fn usage_and_connections_are_kept() {
        let server = RedisServer::start().unwrap();
        let first = of([by_user(2)]).redis(&settings(&server)).unwrap();
        let all_of = || [with("x-user", "a"), with("x-user", "a"), with("x-user", "a")];
        // The denial of the third request is cached.
        assert_eq!(statuses(&first, all_of()).await, [200, 200, 429]);
        let before = connections(&server);
        let raised = of([Rule::new("all", hourly(9)), by_user(4)]).reload_from(&first).unwrap();
        assert_eq!(statuses(&raised, all_of()).await, [200, 200, 429]);
        // Requests of the old layer are decided by its limit, on shared usage.
        assert_eq!(send(&first, with("x-user", "a")).await.status, 429);
        assert_eq!(send(&first, with("x-user", "b")).await.status, 200);
        drop(first);
        let lowered = of([by_user(3)]).reload_from(&raised).unwrap();
        assert_eq!(statuses(&lowered, [with("x-user", "a"), with("x-user", "b")]).await, [429, 200]);
        let again = of([by_user(6), Rule::new("all", hourly(9))]).reload_from(&lowered).unwrap();
        drop((raised, lowered));
        assert_eq!(statuses(&again, all_of()).await, [200, 200, 429]);
        // Each call of `connections` opens one connection.
        assert_eq!(connections(&server), before + 1);
        assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
    }

    /// The unspent lease of a changed limit is refunded.
    #[tokio::test]
    async fn leases_of_a_changed_limit_are_refunded() {
        let server = RedisServer::start().unwrap();
        let mut leased = by_user(1_000);
        leased.lease = Some(Lease { max: 100, hold: Duration::from_secs(1) });
        let first = of([leased]).redis(&settings(&server)).unwrap();
        let mut sent = 0;
        // Once a lease is taken, the server has counted more units than were sent.
        let counted = |server: &RedisServer| {
            let name = server.cli(&["--scan"]).unwrap();
            // The first byte of the count, which follows the timestamp.
            let count = ["BITFIELD_RO", name.trim(), "GET", "u8", "96"];
            server.cli(&count).unwrap().trim().parse::<u32>().unwrap_or(0)
        };
        while counted(&server) <= sent {
            assert_eq!(send(&first, with("x-user", "a")).await.status, 200);
            sent += 1;
            assert!(sent < 100, "nothing is ever taken ahead");
        }
        let raised = of([by_user(20_000)]).reload_from(&first).unwrap();
        drop(first);
        wait_for(async || {
            let got = send(&raised, with("x-user", "a")).await;
            sent += 1;
            let header = got.header("ratelimit").unwrap();
            let left: u32 = header.split_once("r=").unwrap().1.split(';').next().unwrap().parse().unwrap();
            (left + sent == 20_000).then_some(())
        })
        .await;
    }

    #[tokio::test]
    async fn local_usage_during_an_outage_is_kept() {
        let mut server = RedisServer::start().unwrap();
        let local = settings(&server).on_store_failure(FailurePolicy::Local { instances: 1 });
        let first = of([by_user(2)]).redis(&local).unwrap();
        assert_eq!(send(&first, with("x-user", "b")).await.status, 200);
        server.kill().unwrap();
        let all_of = || [with("x-user", "a"), with("x-user", "a"), with("x-user", "a")];
        assert_eq!(statuses(&first, all_of()).await, [200, 200, 429]);
        let raised = of([Rule::new("all", hourly(9)), by_user(4)]).reload_from(&first).unwrap();
        assert_eq!(statuses(&raised, all_of()).await, [200, 200, 429]);
    }
}
