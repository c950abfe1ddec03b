use std::time::Duration;

use ratekeeper_core::{LeakyMode, Limit, Rate, RetryAfter, Time, WindowAlign};
use ratekeeper_rules::response::{
    INTEGER_MAX, Jitter, LimitDecision, MergedHeader, PolicyName, ResponseContext, merge_header,
};
use serde_json::{Value, json};
use sfv::{List, Parser};

use super::{NOW, allowed, denied, denied_for, fixed, name, response};

fn list(value: &str) -> List {
    Parser::new(value).parse().unwrap()
}

/// The examples of draft-ietf-httpapi-ratelimit-headers-10 that this server can produce.
#[test]
fn draft_examples_are_reproduced() {
    let (burst, daily, default, per_user) = (name("burst"), name("daily"), name("default"), name("peruser"));
    let (minute, day, ten) = (fixed(100, 60), fixed(1_000, 86_400), fixed(65_535, 10));
    let usual = ResponseContext::at(NOW);
    let fifty = allowed(50, Duration::from_secs(30));

    let two = [LimitDecision::new(&burst, &minute, fifty), LimitDecision::new(&daily, &day, fifty)];
    let policies = response("ietf", &two, &usual);
    let policies = policies.header("ratelimit-policy").unwrap();
    assert_eq!(list(policies), list(r#""burst";q=100;w=60,"daily";q=1000;w=86400"#));

    let one = response("ietf", &[LimitDecision::new(&default, &minute, fifty)], &usual);
    assert_eq!(one.header("ratelimit"), Some(r#""default";r=50;t=30"#));

    // Waiting does not help, so there is no `t`.
    let never = denied(999, RetryAfter::Never, Duration::from_secs(30));
    let partition: Option<&[u8]> = Some(b"trial121323");
    let never =
        response("ietf", &[LimitDecision { partition, ..LimitDecision::new(&default, &day, never) }], &usual);
    assert_eq!(never.header("ratelimit"), Some(r#""default";r=999;pk=:dHJpYWwxMjEzMjM=:"#));
    assert_eq!(never.header("retry-after"), None);

    // The draft's partition key has unused bits set; a lenient parser decodes both to the same bytes.
    let lenient = list(r#""peruser";q=65535;w=10;pk=:sdfjLJUOUH==:"#);
    let partition: Option<&[u8]> = Some(&[0xb1, 0xd7, 0xe3, 0x2c, 0x95, 0x0e, 0x50]);
    let keyed = response(
        "ietf",
        &[LimitDecision { partition, ..LimitDecision::new(&per_user, &ten, fifty) }],
        &usual,
    );
    let keyed = keyed.header("ratelimit-policy").unwrap();
    assert_eq!(keyed, r#""peruser";q=65535;w=10;pk=:sdfjLJUOUA==:"#);
    assert_eq!(list(keyed), lenient);

    // Two field lines are one list.
    let both = r#""a";r=1, "b";r=2;t=9, "default";r=50;t=30"#;
    let theirs = [r#""a";r=1"#, r#""b";r=2;t=9"#];
    assert_eq!(merge_header(theirs, one.header("ratelimit").unwrap()), MergedHeader::Joined(both.into()));
}

#[test]
fn policy_names_round_trip() {
    let limit = fixed(100, 60);
    for plain in [r#"the "best""#, r"back\slash", r#"\"#, r#"""#, "a, b;r=9", " "] {
        let name = name(plain);
        let limit = LimitDecision::new(&name, &limit, denied_for(Duration::from_secs(3)));
        let response = response("ietf", &[limit], &ResponseContext::at(NOW));
        for header in ["ratelimit", "ratelimit-policy"] {
            let list = list(response.header(header).unwrap());
            assert_eq!(list.len(), 1);
            let sfv::ListEntry::Item(item) = &list[0] else { panic!("{list:?}") };
            assert_eq!(item.bare_item.as_string().unwrap().as_str(), plain);
        }
        let body: Value = serde_json::from_str(response.body()).unwrap();
        assert_eq!(body["violated-policies"], json!([plain]));
        assert!(body["detail"].as_str().unwrap().contains(&format!("\"{plain}\"")), "{body}");
    }
    assert!(PolicyName::new("señal").is_err());
}

#[test]
fn body_is_the_problem_type_of_the_draft() {
    let (daily, limit) = (name("daily"), fixed(100, 60));
    let limit = LimitDecision::new(&daily, &limit, denied_for(Duration::from_secs(90)));
    let denial = response("none", &[limit], &ResponseContext::at(NOW));
    assert_eq!(
        denial.body(),
        concat!(
            r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","#,
            r#""title":"Quota Exceeded","status":429,"#,
            r#""detail":"Limit \"daily\" allows 100 requests per minute. Retry in 1 minute 30 seconds.","#,
            r#""violated-policies":["daily"]}"#
        )
    );
    assert_eq!(denial.header("content-type"), Some("application/problem+json"));
    assert_eq!(denial.header("cache-control"), Some("no-store"));

    let degraded = ResponseContext { is_degraded: true, ..ResponseContext::at(NOW) };
    let denial = response("none", &[limit], &degraded);
    let body: Value = serde_json::from_str(denial.body()).unwrap();
    assert_eq!(denial.status(), Some(503));
    assert_eq!(body["status"], json!(503));
    assert_eq!(
        body["type"],
        json!("https://iana.org/assignments/http-problem-types#temporary-reduced-capacity")
    );
    assert_eq!(denial.header("cache-control"), Some("no-store"));
}

/// A client of another limiter received `Retry-After: 0`, and then `-1484742195`.
#[test]
fn retry_after_is_at_least_one_second() {
    let (daily, limit) = (name("daily"), fixed(100, 60));
    for wait in [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(1)] {
        let limit = LimitDecision::new(&daily, &limit, denied_for(wait));
        let response = response("ietf", &[limit], &ResponseContext::at(NOW));
        assert_eq!(response.header("retry-after"), Some("1"));
        assert_eq!(response.header("ratelimit"), Some(r#""daily";r=0;t=1"#));
    }
}

#[test]
fn no_number_has_more_than_fifteen_digits() {
    let (daily, limit) = (name("daily"), fixed(u32::MAX, 1));
    let jitter = Some(Jitter { at_most: u64::MAX, random: u64::MAX });
    for context in
        [ResponseContext::at(Time::MAX), ResponseContext { jitter, ..ResponseContext::at(Time::MAX) }]
    {
        let limit = LimitDecision::new(&daily, &limit, denied_for(Duration::MAX));
        let ietf = response("ietf", &[limit], &context);
        let most = INTEGER_MAX.to_string();
        assert_eq!(ietf.header("ratelimit"), Some(format!(r#""daily";r=0;t={most}"#).as_str()));
        assert_eq!(ietf.header("retry-after"), Some(most.as_str()));
        for set in ["legacy", "legacy_epoch", "github"] {
            let legacy = response(set, &[limit], &context);
            assert_eq!(legacy.header("x-ratelimit-reset"), Some(most.as_str()));
        }
    }
}

/// `w` must not be 0, and is omitted for a bucket whose fill time exceeds fifteen digits.
#[test]
fn window_is_at_least_one_and_omitted_above_fifteen_digits() {
    let daily = name("daily");
    let decision = allowed(5, Duration::ZERO);
    let slowest = Rate::new(1, Duration::from_secs(366 * 86_400)).unwrap();
    let policy = |limit: &Limit| {
        let response =
            response("ietf", &[LimitDecision::new(&daily, limit, decision)], &ResponseContext::at(NOW));
        response.header("ratelimit-policy").unwrap().to_owned()
    };
    let blink = Limit::fixed_window(5, Duration::from_millis(1), WindowAlign::Clock).unwrap();
    assert_eq!(policy(&blink), r#""daily";q=5;w=1"#);
    let ages = Limit::leaky_bucket(u32::MAX, slowest, LeakyMode::Police).unwrap();
    assert_eq!(policy(&ages), r#""daily";q=4294967295"#);
}

/// Rounding now down and the wait up could yield an instant before the end of the wait.
#[test]
fn reset_instant_is_rounded_once() {
    let (daily, limit) = (name("daily"), fixed(100, 60));
    for (now, wait, epoch) in [
        (100_900_000_000, 500_000_000, "102"),
        (100_900_000_000, 100_000_000, "101"),
        (100_900_000_000, 100_000_001, "102"),
        (100_000_000_000, 20_000_000_000, "120"),
    ] {
        let limit = LimitDecision::new(&daily, &limit, denied_for(Duration::from_nanos(wait)));
        let context = ResponseContext::at(Time::from_nanos(now));
        for set in ["github", "legacy_epoch"] {
            let response = response(set, &[limit], &context);
            assert_eq!(response.header("x-ratelimit-reset"), Some(epoch), "{now} + {wait} ns");
        }
    }
}

/// A client with remaining budget does not wait, so its window must not vary.
#[test]
fn jitter_applies_only_to_clients_that_wait() {
    let (daily, limit) = (name("daily"), fixed(100, 60));
    let jitter = Some(Jitter { at_most: 10, random: u64::MAX });
    let context = ResponseContext { jitter, ..ResponseContext::at(NOW) };
    let ten = Duration::from_secs(10);
    for (decision, expected) in [
        (allowed(1, ten), r#""daily";r=1;t=10"#),
        (allowed(0, ten), r#""daily";r=0;t=20"#),
        (denied_for(ten), r#""daily";r=0;t=20"#),
        (denied(3, RetryAfter::After(ten), ten), r#""daily";r=3;t=20"#),
    ] {
        let response = response("ietf", &[LimitDecision::new(&daily, &limit, decision)], &context);
        assert_eq!(response.header("ratelimit"), Some(expected));
    }
}
