use std::time::Duration;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use ratekeeper_core::{Decision, Limit, RetryAfter, Time};
use ratekeeper_rules::response::{
    DenialResponse, HeaderSet, INTEGER_MAX, Jitter, LimitDecision, LimitResponse, LimitText, PolicyName,
    ResponseContext,
};
use sfv::{BareItem, List, ListEntry, Parameters, Parser};

use super::{check, waiting};

#[derive(Clone, Debug)]
struct Case {
    limits: Vec<(PolicyName, Limit, Decision, Option<Vec<u8>>)>,
    context: ResponseContext,
}

fn durations() -> impl Strategy<Value = Duration> {
    prop_oneof![
        4 => (0..200_000u64, 0..1_000_000_000u32).prop_map(|(secs, nanos)| Duration::new(secs, nanos)),
        2 => (0..100_000u64).prop_map(Duration::from_secs),
        1 => (any::<u64>(), 0..1_000_000_000u32).prop_map(|(secs, nanos)| Duration::new(secs, nanos)),
        1 => Just(Duration::ZERO),
        1 => Just(Duration::MAX),
    ]
}

/// Any decision, even one that no limit would make.
fn decisions() -> impl Strategy<Value = Decision> {
    let waits = prop_oneof![4 => durations().prop_map(RetryAfter::After), 1 => Just(RetryAfter::Never)];
    (any::<bool>(), any::<u32>(), prop_oneof![0..5u32, any::<u32>()], waits, durations()).prop_map(
        |(allowed, limit, remaining, wait, reset_after)| Decision {
            allowed,
            limit,
            remaining,
            retry_after: if allowed { RetryAfter::Now } else { wait },
            reset_after,
            delay: Duration::ZERO,
        },
    )
}

fn cases() -> impl Strategy<Value = Case> {
    let names = "[ -~]{1,128}".prop_map(|name| PolicyName::new(&name).unwrap());
    let partitions = option::of(vec(any::<u8>(), 0..40));
    let limits = vec((names, waiting::limits(), decisions(), partitions), 1..5);
    let jitter = option::of((prop_oneof![0..100u64, any::<u64>()], any::<u64>()))
        .prop_map(|jitter| jitter.map(|(at_most, random)| Jitter { at_most, random }));
    (limits, any::<u64>(), any::<bool>(), jitter).prop_map(|(limits, now, is_degraded, jitter)| Case {
        limits,
        context: ResponseContext { now: Time::from_nanos(now), is_degraded, jitter },
    })
}

/// An integer parameter, which must not be negative; the parser rejects integers that are too long.
fn integer(parameters: &Parameters, key: &str) -> Option<u64> {
    let number = i64::from(parameters.get(key)?.as_integer().expect("a whole number"));
    Some(u64::try_from(number).expect("not negative"))
}

/// The list members: name and parameters.
fn members(value: &str) -> Vec<(String, Parameters)> {
    let list: List = Parser::new(value).parse().expect("a list");
    let member = |entry: ListEntry| match entry {
        ListEntry::Item(item) => {
            (item.bare_item.as_string().expect("a String").as_str().to_owned(), item.params)
        }
        ListEntry::InnerList(_) => panic!("an inner list in {value}"),
    };
    list.into_iter().map(member).collect()
}

fn keys(parameters: &Parameters) -> Vec<&str> {
    parameters.keys().map(|key| key.as_str()).collect()
}

fn seconds(wait: Duration) -> u64 {
    u64::try_from(wait.as_nanos().div_ceil(1_000_000_000)).map_or(INTEGER_MAX, |secs| secs.min(INTEGER_MAX))
}

#[test]
fn headers_parse_and_promise_no_more_than_the_decision() {
    check(&cases(), |Case { limits, context }| {
        let limit: Vec<LimitDecision> = limits
            .iter()
            .map(|(name, limit, decision, partition)| LimitDecision {
                partition: partition.as_deref(),
                ..LimitDecision::new(name, limit, *decision)
            })
            .collect();
        let mut response = LimitResponse::default();
        response.write(HeaderSet::default(), &limit, &context);
        let is_allowed = limit.iter().all(|limit| limit.decision.allowed);
        let retry_after: Option<u64> =
            response.header("retry-after").map(|wait| wait.parse().expect("a whole number"));

        let reported = members(response.header("ratelimit").unwrap());
        let policies = members(response.header("ratelimit-policy").unwrap());
        prop_assert_eq!((reported.len(), policies.len()), (limit.len(), limit.len()));
        for ((limit, reported), policy) in limit.iter().zip(&reported).zip(&policies) {
            let decision = limit.decision;
            prop_assert_eq!(
                (reported.0.as_str(), policy.0.as_str()),
                (limit.name.as_str(), limit.name.as_str())
            );
            prop_assert_eq!(integer(&reported.1, "r"), Some(u64::from(decision.remaining)));
            prop_assert_eq!(integer(&policy.1, "q"), Some(u64::from(limit.limit.limit())));
            if let Some(window) = integer(&policy.1, "w") {
                prop_assert!(window > 0 && Duration::from_secs(window) >= limit.limit.window());
            }
            for (_, parameters) in [reported, policy] {
                let partition = parameters.get("pk").map(BareItem::as_byte_sequence);
                prop_assert_eq!(partition.map(Option::unwrap), limit.partition);
                let known = keys(parameters);
                prop_assert!(known.iter().all(|key| ["r", "t", "q", "w", "pk"].contains(key)), "{known:?}");
            }
            let t = integer(&reported.1, "t");
            match decision.retry_after {
                RetryAfter::Never => prop_assert_eq!((t, retry_after), (None, None)),
                RetryAfter::Now => prop_assert!(t.unwrap() >= seconds(decision.reset_after)),
                RetryAfter::After(wait) => {
                    prop_assert!(t.unwrap() >= seconds(wait).max(1));
                    prop_assert!(retry_after.is_none_or(|retry_after| retry_after >= t.unwrap()));
                }
            }
        }

        let longest = limit.iter().zip(&reported).filter(|(limit, _)| !limit.decision.allowed);
        let longest = longest.map(|(_, reported)| integer(&reported.1, "t"));
        // None if one of the limits has no `t`; else the longest.
        let expected = longest.collect::<Option<Vec<u64>>>().and_then(|waits| waits.into_iter().max());
        prop_assert_eq!(retry_after, expected);
        prop_assert!(retry_after.is_none_or(|wait| (1..=INTEGER_MAX).contains(&wait)));

        let status = if context.is_degraded { 503 } else { 429 };
        prop_assert_eq!(response.status(), (!is_allowed).then_some(status));
        prop_assert_eq!(response.header("cache-control"), (!is_allowed).then_some("no-store"));
        if is_allowed {
            prop_assert_eq!(response.body(), "");
        } else {
            let body: serde_json::Value = serde_json::from_str(response.body()).unwrap();
            let denied = limit.iter().filter(|limit| !limit.decision.allowed);
            let violated: Vec<&str> = denied.map(|limit| limit.name.as_str()).collect();
            prop_assert_eq!(&body["violated-policies"], &serde_json::json!(violated));
            prop_assert_eq!(&body["status"], &serde_json::json!(status));
        }
        Ok(())
    });
}

/// The other sets have one value for all limits: that of the combined decision ([`Decision::and`]).
#[test]
fn single_values_are_those_of_the_binding_limit() {
    check(&cases(), |Case { limits, context }| {
        let limit: Vec<LimitDecision> = limits
            .iter()
            .map(|(name, limit, decision, _)| LimitDecision::new(name, limit, *decision))
            .collect();
        let together = limit.iter().map(|limit| limit.decision).reduce(Decision::and).unwrap();
        let mut response = LimitResponse::default();
        for set in HeaderSet::all().filter(|set| !["ietf", "none"].contains(&set.name())) {
            response.write(set, &limit, &context);
            let remaining = response.headers().find(|header| header.name.ends_with("-remaining")).unwrap();
            prop_assert_eq!(remaining.value, together.remaining.to_string());
            for header in response.headers() {
                let is_field = header.value.bytes().all(|byte| matches!(byte, b' '..=b'~'));
                prop_assert!(is_field && !header.value.is_empty(), "{header:?}");
                if header.is_list {
                    let list: List = Parser::new(header.value).parse().unwrap();
                    prop_assert_eq!(list.len(), limit.len());
                }
            }
        }
        Ok(())
    });
}

/// Text prepared for a limit saves work and changes nothing.
#[test]
fn responses_are_the_same_with_prepared_text() {
    let customs = option::of((option::of(200..600u16), option::of("[ -~]{0,20}")));
    check(&(cases(), vec(customs, 5), vec(1..4u32, 5)), |(Case { limits, context }, customs, costs)| {
        let customs: Vec<Option<DenialResponse>> = customs
            .into_iter()
            .map(|custom| {
                let (status, body) = custom?;
                let mut response = DenialResponse::default();
                response = body.iter().fold(response, |response, body| response.with_body(body));
                Some(status.iter().fold(response, |response, status| response.with_status(*status).unwrap()))
            })
            .collect();
        let other = LimitText::new(
            HeaderSet::named("none").unwrap(),
            &limits[0].0,
            &limits[0].1,
            customs[0].as_ref(),
        );
        for set in HeaderSet::all() {
            let texts: Vec<LimitText> = limits
                .iter()
                .zip(&customs)
                .map(|((name, limit, ..), custom)| LimitText::new(set, name, limit, custom.as_ref()))
                .collect();
            let decisions = |texts: &[Option<&LimitText>], count: usize| {
                let mut response = LimitResponse::default();
                let decisions = limits.iter().zip(&customs).zip(&costs).take(count).enumerate();
                let decisions: Vec<_> = decisions
                    .map(|(at, (((name, limit, decision, partition), custom), cost))| LimitDecision {
                        partition: partition.as_deref(),
                        custom: custom.as_ref(),
                        cost: *cost,
                        text: texts.get(at).copied().flatten(),
                        ..LimitDecision::new(name, limit, *decision)
                    })
                    .collect();
                response.write(set, &decisions, &context);
                let headers: Vec<_> =
                    response.headers().map(|it| (it.name, it.value.to_owned(), it.is_list)).collect();
                (response.status(), headers, response.body().to_owned())
            };
            let prepared: Vec<_> = texts.iter().map(Some).collect();
            for count in [1, limits.len()] {
                prop_assert_eq!(decisions(&prepared, count), decisions(&[], count));
            }
            // Headers prepared for another set are not used.
            prop_assert_eq!(decisions(&[Some(&other)], 1), decisions(&[], 1));
        }
        Ok(())
    });
}
