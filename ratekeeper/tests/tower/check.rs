//! Goal: a check by name gets the same decision as a request. Method: the same layer used both ways, in memory and in
//! Redis.

use std::sync::{Arc, Mutex};

use ratekeeper::tower::check::{Check, CheckMode, CheckOutcome, KeyError, KeyInput, LimitRef};
use ratekeeper::tower::rule::{Ban, Override, OverrideScope};

use super::*;

/// Long enough that a busy test machine does not make the store appear unavailable.
#[cfg(feature = "redis")]
const PATIENT: Duration = Duration::from_secs(10);

fn user() -> Key {
    Key::of(KeyPart::header("X-User-Id"))
}

fn of<'a>(rule: usize, values: &'a [&'a str], cost: u32) -> Check<'a> {
    Check { limit: LimitRef::Rule(rule), key: KeyInput::Values(values), cost }
}

async fn charge<S: Store>(layer: &RatekeeperLayer<S>, checks: &[Check<'_>]) -> CheckOutcome {
    layer.check(checks, CheckMode::Charge).await.unwrap()
}

fn remaining(outcome: &CheckOutcome) -> Vec<Option<u32>> {
    outcome.limits.iter().map(|outcome| outcome.decision.map(|decision| decision.remaining)).collect()
}

/// A request and a check of the same key use the same budget, whatever form the value has.
#[tokio::test]
async fn check_and_request_of_one_key_share_its_budget() {
    let keys = [
        (user(), "alice", with("X-User-Id", "alice")),
        (ip(), "192.0.2.7", plain("/")),
        (ip(), "::ffff:192.0.2.7", plain("/")),
        (
            Key::of(KeyPart::Header("authorization".to_owned())),
            "BEARER  x",
            with("Authorization", "bearer x"),
        ),
        (Key::of(KeyPart::Method), "get", plain("/")),
        (Key::of(KeyPart::Segment(2)), "b", plain("/a/b")),
        (Key::of(KeyPart::Query("q".to_owned())), "a b", plain("/?q=a%20b")),
        (Key::of(KeyPart::Cookie("c".to_owned())), "v", with("Cookie", "c=v")),
    ];
    for (key, value, request) in keys {
        let layer = RatekeeperLayer::builder().rule(once(key)).build().unwrap();
        let service = layer.layer(service_fn(|_: Request<String>| async {
            Ok::<_, Infallible>(Response::new(String::new()))
        }));
        assert!(charge(&layer, &[of(0, &[value], 1)]).await.allowed, "{value}");
        assert_eq!(service.oneshot(request).await.unwrap().status(), 429, "{value}");
    }
}

#[tokio::test]
async fn lists_overrides_and_bans_apply_to_checks() {
    let mut rule = Rule::new("per-user", hourly(2)).key(user());
    rule.allow.keys.push("free".to_owned());
    rule.deny.keys.push("banished".to_owned());
    rule.overrides
        .push(Override { scope: OverrideScope::Keys(vec!["gold".to_owned()]), limit: Some(hourly(100)) });
    rule.ban = Some(Ban { after: 1, within: HOUR, lasts: HOUR });
    let shadow = Rule::new("shadow", hourly(1)).key(user()).shadow();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let recorder = seen.clone();
    let layer = RatekeeperLayer::builder().rule(rule).rule(shadow).observe(move |observed, _| {
        let each =
            observed.rules.iter().map(|it| (it.index, it.decision.allowed, it.is_shadow, it.is_banned));
        recorder.lock().unwrap().push(each.collect::<Vec<_>>());
    });
    let layer = layer.build().unwrap();
    assert_eq!(remaining(&charge(&layer, &[of(0, &["free"], 9)]).await), [None]);
    assert_eq!(remaining(&charge(&layer, &[of(0, &["gold"], 1)]).await), [Some(99)]);
    let denied =
        layer.check(&[of(0, &["alice"], 1), of(0, &["banished"], 1)], CheckMode::Charge).await.unwrap_err();
    assert_eq!((denied.check, denied.why), (1, KeyError::Denied));
    assert!(layer.check(&[of(0, &["a", "b"], 1)], CheckMode::Charge).await.is_err());
    assert_eq!(layer.check(&[of(7, &["a"], 1)], CheckMode::Peek).await.unwrap_err().why, KeyError::NoRule);

    assert_eq!(
        remaining(&charge(&layer, &[of(0, &["alice"], 2), of(1, &["alice"], 2)]).await),
        [Some(0), Some(1)]
    );
    let banned = charge(&layer, &[of(0, &["alice"], 1)]).await;
    assert!(!banned.allowed && !banned.limits[0].is_banned, "the denial that brings the ban");
    let banned = charge(&layer, &[of(0, &["alice"], 1)]).await;
    assert!(!banned.allowed && banned.limits[0].is_banned);
    assert_eq!(layer.response(&banned).header("retry-after"), Some("3600"));
    layer.reset(&[of(0, &["alice"], 0)]).await.unwrap();
    assert_eq!(remaining(&charge(&layer, &[of(0, &["alice"], 1)]).await), [Some(1)]);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 6, "peeks are not reported as requests: {seen:?}");
    assert_eq!(seen[2], [(0, true, false, false), (1, false, true, false)]);
    assert_eq!(seen[4], [(0, false, false, true)]);
}

/// Several keys of one limit and inline limits: all are charged, or none.
async fn all_or_none<S: Store>(layer: &RatekeeperLayer<S>) {
    let (own, more) = (hourly(3), hourly(9));
    let other = Limit::fixed_window(4, HOUR / 2, WindowAlign::FirstRequest).unwrap();
    let inline = |limit, cost| Check { limit: LimitRef::Inline(limit), key: KeyInput::Bytes(b"alice"), cost };

    let two = [of(0, &["alice"], 1), of(0, &["bob"], 2), of(1, &["alice"], 1), inline(&own, 1)];
    let outcome = charge(layer, &two).await;
    assert!(outcome.allowed);
    assert_eq!(remaining(&outcome), [Some(4), Some(3), Some(4), Some(2)]);
    // Two checks of the same key charge the sum.
    let sum = [of(0, &["carol"], 2), of(0, &["carol"], 2)];
    assert_eq!(remaining(&charge(layer, &sum).await), [Some(1), Some(1)]);
    assert_eq!(
        remaining(&charge(layer, &[inline(&other, 1)]).await),
        [Some(3)],
        "another limit, another key"
    );

    let higher = charge(layer, &[inline(&more, 0)]).await;
    assert_eq!(remaining(&higher), [Some(8)], "what was used stays used if the limit is another time higher");

    let denied = [
        [of(0, &["alice"], 1), of(0, &["bob"], 4), inline(&own, 1)],
        [of(0, &["bob"], 4), of(0, &["alice"], 1), inline(&own, 1)],
        [of(1, &["alice"], 1), of(0, &["alice"], 1), inline(&own, 3)],
        [inline(&own, 1), inline(&other, 4), of(0, &["alice"], 1)],
        [inline(&own, 1), of(1, &["alice"], 5), of(0, &["alice"], 1)],
    ];
    let all =
        [of(0, &["alice"], 0), of(0, &["bob"], 0), of(1, &["alice"], 0), inline(&own, 0), inline(&other, 0)];
    let before = remaining(&layer.check(&all, CheckMode::Peek).await.unwrap());
    assert_eq!(before, [Some(4), Some(3), Some(4), Some(2), Some(3)]);
    for checks in denied {
        let outcome = charge(layer, &checks).await;
        assert!(!outcome.allowed && !outcome.is_degraded, "{checks:?}");
        assert_eq!(remaining(&layer.check(&all, CheckMode::Peek).await.unwrap()), before, "{checks:?}");
    }

    layer.refund(&two, Some(outcome.at)).await.unwrap();
    let after = remaining(&layer.check(&all, CheckMode::Peek).await.unwrap());
    assert_eq!(after, [Some(5), Some(5), Some(5), Some(3), Some(3)]);
    layer.refund(&two, None).await.unwrap();
    assert_eq!(remaining(&layer.check(&all, CheckMode::Peek).await.unwrap()), after, "never above full");
}

fn two_rules() -> LayerBuilder {
    let per_user = Rule::new("per-user", hourly(5)).key(user());
    let per_team = Rule::new("per-team", hourly(5)).key(user());
    RatekeeperLayer::builder().rule(per_user).rule(per_team)
}

#[tokio::test]
async fn all_checks_are_charged_or_none_in_memory() {
    all_or_none(&two_rules().build().unwrap()).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn all_checks_are_charged_or_none_in_redis() {
    use ratekeeper::redis::Settings;

    let server = testbed::RedisServer::start().unwrap();
    let settings = Settings::new(&server.url()).secret(b"secret").deadline(PATIENT);
    all_or_none(&two_rules().redis(&settings).unwrap()).await;
}

/// A check of a small inline bucket keeps the usage of a large one.
async fn buckets_of_two_sizes<S: Store>(layer: &RatekeeperLayer<S>) {
    let bucket = |size| {
        Limit::token_bucket(size, ratekeeper::Rate::new(1, HOUR).unwrap(), ratekeeper::RefillStyle::Smooth)
            .unwrap()
    };
    let (large, small) = (bucket(100), bucket(2));
    let is_allowed = async |limit: &Limit, cost: u32| {
        let check = [Check { limit: LimitRef::Inline(limit), key: KeyInput::Bytes(b"a"), cost }];
        charge(layer, &check).await.allowed
    };
    assert!(is_allowed(&large, 100).await);
    for _ in 0..3 {
        is_allowed(&small, 1).await;
        is_allowed(&small, 0).await;
    }
    assert!(!is_allowed(&large, 1).await);
}

#[tokio::test]
async fn small_inline_bucket_keeps_usage_of_large_one_in_memory() {
    buckets_of_two_sizes(&two_rules().build().unwrap()).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn small_inline_bucket_keeps_usage_of_large_one_in_redis() {
    let server = testbed::RedisServer::start().unwrap();
    let settings = ratekeeper::redis::Settings::new(&server.url()).secret(b"secret").deadline(PATIENT);
    buckets_of_two_sizes(&two_rules().redis(&settings).unwrap()).await;
}

/// Charges of shadow rules are refunded even if no enforced rule was charged.
#[tokio::test]
async fn shadow_rule_charge_is_refunded() {
    let shadow = Rule::new("shadow", hourly(9)).key(user()).shadow();
    let layer = RatekeeperLayer::builder().rule(shadow).build().unwrap();
    let check = [of(0, &["alice"], 7)];
    let outcome = charge(&layer, &check).await;
    assert_eq!(remaining(&outcome), [Some(2)]);
    layer.refund(&check, Some(outcome.at)).await.unwrap();
    assert_eq!(remaining(&layer.check(&check, CheckMode::Peek).await.unwrap()), [Some(9)]);
}

/// Units spent from a lease are refunded, and a refund removes the cached denial.
#[cfg(feature = "redis")]
#[tokio::test]
async fn refund_covers_leases_and_cached_denials() {
    use ratekeeper::Lease;

    let server = testbed::RedisServer::start().unwrap();
    let settings = ratekeeper::redis::Settings::new(&server.url()).secret(b"secret").deadline(PATIENT);
    let mut leased = Rule::new("leased", hourly(100)).key(user());
    leased.lease = Some(Lease::new(20));
    let plain = Rule::new("plain", hourly(5)).key(user());
    let layer = RatekeeperLayer::builder().rule(leased).rule(plain).redis(&settings).unwrap();
    for _ in 0..30 {
        let check = [of(0, &["alice"], 1)];
        let outcome = charge(&layer, &check).await;
        assert!(outcome.allowed && outcome.at > ratekeeper::Time::EPOCH);
        layer.refund(&check, Some(outcome.at)).await.unwrap();
    }
    layer.limiter().release().await;
    assert_eq!(remaining(&layer.check(&[of(0, &["alice"], 0)], CheckMode::Peek).await.unwrap()), [Some(100)]);

    let check = [of(1, &["bob"], 5)];
    let outcome = charge(&layer, &check).await;
    assert!(!charge(&layer, &check).await.allowed);
    layer.refund(&check, Some(outcome.at)).await.unwrap();
    assert!(charge(&layer, &check).await.allowed);
}

/// While Redis is unavailable, the failure policy also decides about inline limits.
#[cfg(feature = "redis")]
#[tokio::test]
async fn inline_limit_uses_the_failure_policy() {
    use ratekeeper::FailurePolicy;
    use ratekeeper::redis::Settings;

    let limit = hourly(2);
    for (failure, allowed) in [
        (FailurePolicy::Open, [true; 3]),
        (FailurePolicy::Closed, [false; 3]),
        (FailurePolicy::Local { instances: 1 }, [true, true, false]),
    ] {
        let settings = Settings::new("redis://127.0.0.1:1").secret(b"secret").on_store_failure(failure);
        let layer = two_rules().redis(&settings).unwrap();
        for expected in allowed {
            let check = [Check { limit: LimitRef::Inline(&limit), key: KeyInput::Bytes(b"a"), cost: 1 }];
            let outcome = charge(&layer, &check).await;
            assert!(outcome.is_degraded);
            assert_eq!(outcome.allowed, expected, "{failure:?}");
            assert_eq!(outcome.is_closed, failure == FailurePolicy::Closed, "{failure:?}");
        }
    }
}

/// The keys of inline limits are bounded, and idle keys are evicted for new ones.
#[tokio::test]
async fn keys_of_inline_limits_are_bounded() {
    let clock = ratekeeper::ManualClock::new(ratekeeper::Time::from_secs(1_700_000_000));
    let layer = two_rules().max_keys(100).build_on(clock.clone()).unwrap();
    let limit = hourly(2);
    let is_allowed = async |number: u32| {
        let key = number.to_le_bytes();
        let check = [Check { limit: LimitRef::Inline(&limit), key: KeyInput::Bytes(&key), cost: 1 }];
        charge(&layer, &check).await.allowed
    };
    let mut allowed = 0;
    for number in 0..1000 {
        allowed += u32::from(is_allowed(number).await);
    }
    assert_eq!(allowed, 100, "those beyond are denied");
    assert_eq!(layer.limiter().overflowed(), 900);
    assert!(is_allowed(0).await, "a key in the table stays in it");
    clock.advance(3 * HOUR);
    assert!(is_allowed(5_000).await);
}
