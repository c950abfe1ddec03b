//! Goal: who asks by name gets what a request gets. Method: the same layer asked both ways, in memory and in Redis.

use std::sync::{Arc, Mutex};

use tollgate::tower::direct::{Answered, Demand, How, Named, NotNamed, Which};
use tollgate::tower::rule::{Ban, Override, Whose};

use super::*;

/// A machine that is busy with other tests is no server that is away.
#[cfg(feature = "redis")]
const PATIENT: Duration = Duration::from_secs(10);

fn user() -> Key {
    Key::of(Part::header("X-User-Id"))
}

fn of<'a>(rule: usize, values: &'a [&'a str], cost: u32) -> Demand<'a> {
    Demand { limit: Which::Rule(rule), key: Named::Values(values), cost }
}

async fn charge<S: Store>(layer: &RateLimitLayer<S>, demands: &[Demand<'_>]) -> Answered {
    layer.ask(demands, How::Charge).await.unwrap()
}

fn left(answered: &Answered) -> Vec<Option<u32>> {
    answered.said.iter().map(|said| said.decision.map(|decision| decision.remaining)).collect()
}

/// A request and a demand of the same key use the same budget, however the value is spelt.
#[tokio::test]
async fn a_key_is_the_same_by_name_and_by_request() {
    let keys = [
        (user(), "alice", with("X-User-Id", "alice")),
        (ip(), "192.0.2.7", plain("/")),
        (ip(), "::ffff:192.0.2.7", plain("/")),
        (Key::of(Part::Header("authorization".to_owned())), "BEARER  x", with("Authorization", "bearer x")),
        (Key::of(Part::Method), "get", plain("/")),
        (Key::of(Part::Segment(2)), "b", plain("/a/b")),
        (Key::of(Part::Query("q".to_owned())), "a b", plain("/?q=a%20b")),
        (Key::of(Part::Cookie("c".to_owned())), "v", with("Cookie", "c=v")),
    ];
    for (key, value, request) in keys {
        let layer = RateLimitLayer::builder().rule(once(key)).build().unwrap();
        let service = layer.layer(service_fn(|_: Request<String>| async {
            Ok::<_, Infallible>(Response::new(String::new()))
        }));
        assert!(charge(&layer, &[of(0, &[value], 1)]).await.allowed, "{value}");
        assert_eq!(service.oneshot(request).await.unwrap().status(), 429, "{value}");
    }
}

#[tokio::test]
async fn what_is_said_of_a_key_holds_by_name() {
    let mut rule = Rule::new("per-user", hourly(2)).key(user());
    rule.allow.keys.push("free".to_owned());
    rule.deny.keys.push("banished".to_owned());
    rule.overrides.push(Override { whose: Whose::Keys(vec!["gold".to_owned()]), limit: Some(hourly(100)) });
    rule.ban = Some(Ban { after: 1, within: HOUR, lasts: HOUR });
    let shadow = Rule::new("shadow", hourly(1)).key(user()).shadow();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = seen.clone();
    let layer = RateLimitLayer::builder().rule(rule).rule(shadow).observe(move |observed| {
        let each =
            observed.rules.iter().map(|it| (it.number, it.decision.allowed, it.is_shadow, it.is_banned));
        told.lock().unwrap().push(each.collect::<Vec<_>>());
    });
    let layer = layer.build().unwrap();
    assert_eq!(left(&charge(&layer, &[of(0, &["free"], 9)]).await), [None]);
    assert_eq!(left(&charge(&layer, &[of(0, &["gold"], 1)]).await), [Some(99)]);
    let denied = layer.ask(&[of(0, &["alice"], 1), of(0, &["banished"], 1)], How::Charge).await.unwrap_err();
    assert_eq!((denied.demand, denied.why), (1, NotNamed::Denied));
    assert!(layer.ask(&[of(0, &["a", "b"], 1)], How::Charge).await.is_err());
    assert_eq!(layer.ask(&[of(7, &["a"], 1)], How::Look).await.unwrap_err().why, NotNamed::NoRule);

    assert_eq!(
        left(&charge(&layer, &[of(0, &["alice"], 2), of(1, &["alice"], 2)]).await),
        [Some(0), Some(1)]
    );
    let banned = charge(&layer, &[of(0, &["alice"], 1)]).await;
    assert!(!banned.allowed && !banned.said[0].is_banned, "the denial that brings the ban");
    let banned = charge(&layer, &[of(0, &["alice"], 1)]).await;
    assert!(!banned.allowed && banned.said[0].is_banned);
    assert_eq!(layer.told(&banned).header("retry-after"), Some("3600"));
    layer.forget(&[of(0, &["alice"], 0)]).await.unwrap();
    assert_eq!(left(&charge(&layer, &[of(0, &["alice"], 1)]).await), [Some(1)]);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 6, "looks are no requests: {seen:?}");
    assert_eq!(seen[2], [(0, true, false, false), (1, false, true, false)]);
    assert_eq!(seen[4], [(0, false, false, true)]);
}

/// Several keys of one limit, and limits that come with the demand: all are charged, or none.
async fn all_or_none<S: Store>(layer: &RateLimitLayer<S>) {
    let looked = |answered: Answered| left(&answered);
    let (own, more) = (hourly(3), hourly(9));
    let other = Limit::fixed_window(4, HOUR / 2, Align::FirstRequest).unwrap();
    let brought = |limit, cost| Demand { limit: Which::Own(limit), key: Named::Bytes(b"alice"), cost };

    let two = [of(0, &["alice"], 1), of(0, &["bob"], 2), of(1, &["alice"], 1), brought(&own, 1)];
    let answered = charge(layer, &two).await;
    assert!(answered.allowed);
    assert_eq!(left(&answered), [Some(4), Some(3), Some(4), Some(2)]);
    // Of the same key twice it is the sum.
    let sum = [of(0, &["carol"], 2), of(0, &["carol"], 2)];
    assert_eq!(left(&charge(layer, &sum).await), [Some(1), Some(1)]);
    assert_eq!(left(&charge(layer, &[brought(&other, 1)]).await), [Some(3)], "another limit, another key");

    let higher = charge(layer, &[brought(&more, 0)]).await;
    assert_eq!(left(&higher), [Some(8)], "what was used stays used if the limit is another time higher");

    let denied = [
        [of(0, &["alice"], 1), of(0, &["bob"], 4), brought(&own, 1)],
        [of(0, &["bob"], 4), of(0, &["alice"], 1), brought(&own, 1)],
        [of(1, &["alice"], 1), of(0, &["alice"], 1), brought(&own, 3)],
        [brought(&own, 1), brought(&other, 4), of(0, &["alice"], 1)],
        [brought(&own, 1), of(1, &["alice"], 5), of(0, &["alice"], 1)],
    ];
    let all = [
        of(0, &["alice"], 0),
        of(0, &["bob"], 0),
        of(1, &["alice"], 0),
        brought(&own, 0),
        brought(&other, 0),
    ];
    let before = looked(layer.ask(&all, How::Look).await.unwrap());
    assert_eq!(before, [Some(4), Some(3), Some(4), Some(2), Some(3)]);
    for demands in denied {
        let answered = charge(layer, &demands).await;
        assert!(!answered.allowed && !answered.is_degraded, "{demands:?}");
        assert_eq!(looked(layer.ask(&all, How::Look).await.unwrap()), before, "{demands:?}");
    }

    layer.give_back(&two, Some(answered.at)).await.unwrap();
    let after = looked(layer.ask(&all, How::Look).await.unwrap());
    assert_eq!(after, [Some(5), Some(5), Some(5), Some(3), Some(3)]);
    layer.give_back(&two, None).await.unwrap();
    assert_eq!(looked(layer.ask(&all, How::Look).await.unwrap()), after, "never above full");
}

fn two_rules() -> Builder {
    let per_user = Rule::new("per-user", hourly(5)).key(user());
    let per_team = Rule::new("per-team", hourly(5)).key(user());
    RateLimitLayer::builder().rule(per_user).rule(per_team)
}

#[tokio::test]
async fn all_or_none_in_memory() {
    all_or_none(&two_rules().build().unwrap()).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn all_or_none_in_redis() {
    use tollgate::redis::Settings;

    let server = testbed::RedisServer::start().unwrap();
    let settings = Settings::new(&server.url()).secret(b"secret").deadline(PATIENT);
    all_or_none(&two_rules().redis(&settings).unwrap()).await;
}

/// A small bucket that comes along does not make a large one forget what was taken from it.
async fn buckets_of_two_sizes<S: Store>(layer: &RateLimitLayer<S>) {
    let bucket = |size| {
        Limit::token_bucket(size, tollgate::Rate::new(1, HOUR).unwrap(), tollgate::Style::Smooth).unwrap()
    };
    let (large, small) = (bucket(100), bucket(2));
    let ask = async |limit: &Limit, cost: u32| {
        let demand = [Demand { limit: Which::Own(limit), key: Named::Bytes(b"a"), cost }];
        charge(layer, &demand).await.allowed
    };
    assert!(ask(&large, 100).await);
    for _ in 0..3 {
        ask(&small, 1).await;
        ask(&small, 0).await;
    }
    assert!(!ask(&large, 1).await);
}

#[tokio::test]
async fn buckets_of_two_sizes_in_memory() {
    buckets_of_two_sizes(&two_rules().build().unwrap()).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn buckets_of_two_sizes_in_redis() {
    let server = testbed::RedisServer::start().unwrap();
    let settings = tollgate::redis::Settings::new(&server.url()).secret(b"secret").deadline(PATIENT);
    buckets_of_two_sizes(&two_rules().redis(&settings).unwrap()).await;
}

/// Where only rules that count were charged, that is given back, too.
#[tokio::test]
async fn what_a_shadow_has_counted_is_given_back() {
    let shadow = Rule::new("shadow", hourly(9)).key(user()).shadow();
    let layer = RateLimitLayer::builder().rule(shadow).build().unwrap();
    let demand = [of(0, &["alice"], 7)];
    let answered = charge(&layer, &demand).await;
    assert_eq!(left(&answered), [Some(2)]);
    layer.give_back(&demand, Some(answered.at)).await.unwrap();
    assert_eq!(left(&layer.ask(&demand, How::Look).await.unwrap()), [Some(9)]);
}

/// What was taken ahead and spent is given back, and a denial that was known is known no more.
#[cfg(feature = "redis")]
#[tokio::test]
async fn what_was_spent_of_a_lease_is_given_back() {
    use tollgate::Lease;

    let server = testbed::RedisServer::start().unwrap();
    let settings = tollgate::redis::Settings::new(&server.url()).secret(b"secret").deadline(PATIENT);
    let mut leased = Rule::new("leased", hourly(100)).key(user());
    leased.lease = Some(Lease::of(20));
    let plain = Rule::new("plain", hourly(5)).key(user());
    let layer = RateLimitLayer::builder().rule(leased).rule(plain).redis(&settings).unwrap();
    for _ in 0..30 {
        let demand = [of(0, &["alice"], 1)];
        let answered = charge(&layer, &demand).await;
        assert!(answered.allowed && answered.at > tollgate::Time::EPOCH);
        layer.give_back(&demand, Some(answered.at)).await.unwrap();
    }
    layer.limiter().release().await;
    assert_eq!(left(&layer.ask(&[of(0, &["alice"], 0)], How::Look).await.unwrap()), [Some(100)]);

    let demand = [of(1, &["bob"], 5)];
    let answered = charge(&layer, &demand).await;
    assert!(!charge(&layer, &demand).await.allowed);
    layer.give_back(&demand, Some(answered.at)).await.unwrap();
    assert!(charge(&layer, &demand).await.allowed);
}

/// While Redis is away, the policy decides about limits that come with the demand, too.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_limit_that_comes_along_has_the_stores_policy() {
    use tollgate::Failure;
    use tollgate::redis::Settings;

    let limit = hourly(2);
    for (failure, allowed) in [
        (Failure::Open, [true; 3]),
        (Failure::Closed, [false; 3]),
        (Failure::Local { nodes: 1 }, [true, true, false]),
    ] {
        let settings = Settings::new("redis://127.0.0.1:1").secret(b"secret").failure(failure);
        let layer = two_rules().redis(&settings).unwrap();
        for expected in allowed {
            let demand = [Demand { limit: Which::Own(&limit), key: Named::Bytes(b"a"), cost: 1 }];
            let answered = charge(&layer, &demand).await;
            assert!(answered.is_degraded);
            assert_eq!(answered.allowed, expected, "{failure:?}");
            assert_eq!(answered.is_closed, failure == Failure::Closed, "{failure:?}");
        }
    }
}

/// There is room for so many keys of limits that come along, and idle ones make room.
#[tokio::test]
async fn limits_that_come_along_have_a_bound() {
    let clock = tollgate::ManualClock::new(tollgate::Time::from_secs(1_700_000_000));
    let layer = two_rules().max_keys(100).build_on(clock.clone()).unwrap();
    let limit = hourly(2);
    let ask = async |number: u32| {
        let key = number.to_le_bytes();
        let demand = [Demand { limit: Which::Own(&limit), key: Named::Bytes(&key), cost: 1 }];
        charge(&layer, &demand).await.allowed
    };
    let mut allowed = 0;
    for number in 0..1000 {
        allowed += u32::from(ask(number).await);
    }
    assert_eq!(allowed, 100, "those beyond are denied");
    assert_eq!(layer.limiter().overflowed(), 900);
    assert!(ask(0).await, "who is in, stays in");
    clock.advance(3 * HOUR);
    assert!(ask(5_000).await);
}
