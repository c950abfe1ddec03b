//! Decisions on descriptors.

use std::time::Duration;

use bytes::Bytes;
use prost_types::value::Kind;
use ratekeeper_server::envoy::messages::{RateLimitRequest, RateLimitResponse};
use ratekeeper_server::envoy::{Options, Settings};
use tonic::Code;

use super::support::{edge, hits, is_ok, limit_of, limited, of, refund, reset_of, run, run_with};

const USERS: &str = "  edge:
    - { key: user, fixed_window: { limit: 3, window: 1m }, name: per-user }
    - { key: path, fixed_window: { limit: 5, window: 1h } }
";

#[tokio::test]
async fn descriptor_is_allowed_until_its_limit() {
    let service = run(USERS);
    let mut client = service.client().await;
    service.clock.advance(Duration::from_millis(10_500));
    for left in [2, 1, 0] {
        let told = client.told(&[of(&[("user", "ann")])]).await;
        assert!(is_ok(told.overall_code));
        let [status] = &told.statuses[..] else { panic!("{told:?}") };
        assert!(is_ok(status.code));
        assert_eq!(limit_of(status), Some((3, "MINUTE", "per-user")));
        assert_eq!((status.limit_remaining, reset_of(status)), (left, Some(50)));
        assert!(told.response_headers_to_add.is_empty() && told.raw_body.is_empty());
        assert!(told.dynamic_metadata.is_none());
    }
    let told = client.told(&[of(&[("user", "ann")])]).await;
    assert!(!is_ok(told.overall_code) && !is_ok(told.statuses[0].code));
    assert_eq!(limit_of(&told.statuses[0]), Some((3, "MINUTE", "per-user")));
    assert_eq!((told.statuses[0].limit_remaining, reset_of(&told.statuses[0])), (0, Some(50)));
    // Other keys have separate budgets, and the next minute is a new window.
    assert_eq!(client.passes(&[of(&[("user", "bob")])]).await, (true, vec![2]));
    service.clock.advance(Duration::from_secs(50));
    assert_eq!(client.passes(&[of(&[("user", "ann")])]).await, (true, vec![2]));
}

#[tokio::test]
async fn descriptors_are_charged_atomically_and_reported_in_order() {
    let service = run(USERS);
    let mut client = service.client().await;
    let both = [of(&[("path", "/a")]), of(&[("nobody", "knows")]), of(&[("user", "ann")])];
    for left in [2, 1, 0] {
        assert_eq!(client.passes(&both).await, (true, vec![left + 2, 0, left]));
    }
    let told = client.told(&both).await;
    let codes: Vec<_> = told.statuses.iter().map(|status| is_ok(status.code)).collect();
    assert_eq!((is_ok(told.overall_code), codes), (false, vec![true, true, false]));
    // The denied request did not charge the path.
    assert_eq!(client.passes(&[of(&[("path", "/a")])]).await, (true, vec![1]));
}

#[tokio::test]
async fn repeated_descriptor_is_charged_twice() {
    let service = run(USERS);
    let mut client = service.client().await;
    let twice = [of(&[("user", "ann")]), of(&[("user", "ann")])];
    assert_eq!(client.passes(&twice).await, (true, vec![1, 1]));
    assert_eq!(client.passes(&twice).await, (false, vec![1, 1]));
    let two = [of(&[("user", "bob")]), of(&[("user", "eve")])];
    assert_eq!(client.passes(&two).await, (true, vec![2, 2]));
}

#[tokio::test]
async fn unconfigured_descriptors_are_allowed() {
    let service = run(USERS);
    let mut client = service.client().await;
    for descriptor in [of(&[("other", "x")]), of(&[("user", "ann"), ("path", "/a")]), of(&[])] {
        let told = client.told(&[descriptor]).await;
        assert!(is_ok(told.overall_code));
        assert_eq!(told.statuses.len(), 1);
        assert!(is_ok(told.statuses[0].code) && told.statuses[0].current_limit.is_none());
        assert!(told.statuses[0].duration_until_reset.is_none());
    }
    let elsewhere = RateLimitRequest { domain: "other".into(), ..edge(&vec![of(&[("user", "ann")]); 9]) };
    let told = client.ask(elsewhere).await.unwrap();
    assert!(is_ok(told.overall_code) && told.statuses.len() == 9);
    assert!(told.statuses.iter().all(|status| is_ok(status.code) && status.current_limit.is_none()));
}

#[tokio::test]
async fn empty_domain_or_descriptors_are_rejected() {
    let service = run(USERS);
    let mut client = service.client().await;
    let nowhere = RateLimitRequest { domain: Bytes::new(), ..edge(&[of(&[("user", "ann")])]) };
    let status = client.ask(nowhere).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("`domain` is empty"), "{status}");
    let status = client.ask(edge(&[])).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("`descriptors` is empty"), "{status}");
}

#[tokio::test]
async fn unlimited_and_blocked_are_reported() {
    let domains = "  edge:
    - { key: plan, value: gold, unlimited: true }
    - { key: plan, value: none, blocked: true }
    - { key: plan, value: trial, blocked: true, shadow: true }
    - { key: user, fixed_window: { limit: 1, window: 1m } }
";
    let service = run(domains);
    let mut client = service.client().await;
    let told = client.told(&[of(&[("plan", "gold")])]).await;
    assert_eq!((is_ok(told.overall_code), told.statuses[0].limit_remaining), (true, u32::MAX));
    assert!(told.statuses[0].current_limit.is_none());
    assert_eq!(client.passes(&[of(&[("plan", "trial")])]).await, (true, vec![0]));
    let told = client.told(&[of(&[("plan", "none")]), of(&[("user", "ann")])]).await;
    let codes: Vec<_> = told.statuses.iter().map(|status| is_ok(status.code)).collect();
    assert_eq!((is_ok(told.overall_code), codes), (false, vec![false, true]));
    assert_eq!(limit_of(&told.statuses[0]), Some((0, "UNKNOWN", "")));
    // The denied request did not charge the user.
    assert_eq!(client.passes(&[of(&[("user", "ann")])]).await, (true, vec![0]));
}

#[tokio::test]
async fn window_without_a_unit_is_reported_as_unknown() {
    let domains = "  edge:
    - { key: odd, fixed_window: { limit: 7, window: 90s } }
    - { key: week, sliding_window_log: { limit: 7, window: 1w } }
    - { key: month, token_bucket: { capacity: 7, refill: 1/30d } }
";
    let service = run(domains);
    let told = service.client().await.told(&["odd", "week", "month"].map(|key| of(&[(key, "")]))).await;
    let limits: Vec<_> = told.statuses.iter().map(limit_of).collect();
    let expected = [(7, "UNKNOWN", ""), (7, "WEEK", ""), (1, "MONTH", "")];
    assert_eq!(limits, expected.map(Some));
}

#[tokio::test]
async fn hits_default_from_descriptor_to_request_to_one() {
    let service = run("  edge: [{ key: user, fixed_window: { limit: 20, window: 1m } }]\n");
    let mut client = service.client().await;
    let ann = || of(&[("user", "ann")]);
    let mut request = RateLimitRequest { hits_addend: 4, ..edge(&[ann()]) };
    assert_eq!(client.ask(request.clone()).await.unwrap().statuses[0].limit_remaining, 16);
    request.descriptors = vec![hits(7, ann())];
    assert_eq!(client.ask(request.clone()).await.unwrap().statuses[0].limit_remaining, 9);
    assert_eq!(client.passes(&[ann()]).await, (true, vec![8]));
    // Zero hits peek.
    for _ in 0..3 {
        assert_eq!(client.passes(&[hits(0, ann())]).await, (true, vec![8]));
    }
    request.hits_addend = 9;
    request.descriptors = vec![ann()];
    let told = client.ask(request).await.unwrap();
    assert_eq!((is_ok(told.overall_code), told.statuses[0].limit_remaining), (false, 8));
    assert_eq!(client.passes(&[hits(8, ann())]).await, (true, vec![0]));
    // A peek is denied when nothing remains, and the other descriptors are not charged then.
    assert_eq!(client.passes(&[hits(0, ann()), of(&[("user", "bob")])]).await, (false, vec![0, 20]));
    assert_eq!(client.passes(&[of(&[("user", "bob")])]).await, (true, vec![19]));
}

/// Envoy sends zero hits when a request arrives, and the true cost when its response has ended. A last cost that
/// exceeded the remainder once charged nothing, and the budget never ran out.
#[tokio::test]
async fn cost_sent_afterwards_charges_what_remains() {
    let domains = "  edge:
    - { key: tokens, fixed_window: { limit: 100, window: 1h } }
    - { key: trial, fixed_window: { limit: 100, window: 1h }, shadow: true }
    - { key: user, fixed_window: { limit: 5, window: 1h } }
";
    let service = run(domains);
    let mut client = service.client().await;
    let all = || of(&[("tokens", "all")]);
    for left in [70, 40, 10] {
        assert!(client.passes(&[hits(0, all())]).await.0);
        assert_eq!(client.passes(&[hits(30, all())]).await, (true, vec![left]));
    }
    assert_eq!(client.passes(&[hits(0, all())]).await, (true, vec![10]));
    // The other descriptor, whose limit suffices, is not charged.
    let both = [hits(30, all()), hits(1, of(&[("user", "ann")]))];
    assert_eq!(client.passes(&both).await, (false, vec![0, 5]));
    assert_eq!(client.passes(&[hits(0, all())]).await, (false, vec![0]));
    // The same holds for an inline limit and for a shadow limit.
    let own = hits(30, limited(40, 3, all()));
    assert_eq!(client.passes(std::slice::from_ref(&own)).await, (true, vec![10]));
    assert_eq!(client.passes(&[own]).await, (false, vec![0]));
    let trial = || of(&[("trial", "all")]);
    assert_eq!(client.passes(&[hits(101, trial())]).await, (true, vec![0]));
    service.clock.advance(Duration::from_secs(3600));
    assert_eq!(client.passes(&[hits(0, all())]).await, (true, vec![100]));
}

#[tokio::test]
async fn cost_above_every_limit_is_denied() {
    let service = run("  edge: [{ key: user, fixed_window: { limit: 20, window: 1m } }]\n");
    let mut client = service.client().await;
    for sum in [21, u64::from(u32::MAX), u64::from(u32::MAX) + 1, u64::MAX] {
        let descriptors = [hits(sum, of(&[("user", "ann")])), of(&[("user", "bob")])];
        assert_eq!(client.passes(&descriptors).await, (false, vec![0, 20]), "{sum}");
        service.clock.advance(Duration::from_secs(60));
    }
    assert_eq!(client.passes(&[hits(u64::MAX, of(&[("other", "")]))]).await, (true, vec![0]));
}

#[tokio::test]
async fn refunds_require_the_option() {
    let service = run(USERS);
    let mut client = service.client().await;
    let ann = || of(&[("user", "ann")]);
    assert_eq!(client.passes(&[hits(3, ann())]).await, (true, vec![0]));
    let status = client.ask(edge(&[of(&[("path", "/")]), refund(ann())])).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    assert!(status.message().contains("descriptors[1]"), "{status}");
    assert!(status.message().contains("`refunds: true`"), "{status}");
    assert_eq!(client.passes(&[of(&[("path", "/")])]).await, (true, vec![4]));

    let options = Options { refunds: true, ..Options::default() };
    let service = run_with(USERS, options, Settings::default());
    let mut client = service.client().await;
    assert_eq!(client.passes(&[hits(3, ann())]).await, (true, vec![0]));
    assert_eq!(client.passes(&[refund(ann())]).await, (true, vec![1]));
    // A denied request refunds nothing.
    let others = vec![of(&[("path", "/")]); 6];
    let denied = client.passes(&[vec![refund(ann())], others].concat()).await;
    assert_eq!((denied.0, &denied.1[..2]), (false, &[1, 5][..]));
    assert_eq!(client.passes(&[refund(ann()), of(&[("path", "/")])]).await, (true, vec![2, 4]));
    // At most what was charged.
    assert_eq!(client.passes(&[refund(hits(u64::MAX, ann()))]).await, (true, vec![3]));
    assert_eq!(client.passes(&[ann()]).await, (true, vec![2]));
    // A key without charges, or without a limit, gets no refund.
    assert_eq!(client.passes(&[refund(of(&[("user", "bob")]))]).await, (true, vec![3]));
    assert_eq!(client.passes(&[refund(of(&[("other", "")]))]).await, (true, vec![0]));
}

#[tokio::test]
async fn inline_limit_is_a_clock_aligned_window() {
    const MINUTE: i32 = 2;
    let service = run(USERS);
    let mut client = service.client().await;
    service.clock.advance(Duration::from_secs(45));
    let own = || limited(2, MINUTE, of(&[("user", "ann")]));
    let told = client.told(&[own()]).await;
    assert_eq!(limit_of(&told.statuses[0]), Some((2, "MINUTE", "")));
    assert_eq!((told.statuses[0].limit_remaining, reset_of(&told.statuses[0])), (1, Some(15)));
    // It is independent of the configured limit, which the same request can charge.
    assert_eq!(client.passes(&[own(), of(&[("user", "ann")])]).await, (true, vec![0, 2]));
    assert_eq!(client.passes(&[own(), of(&[("user", "ann")])]).await, (false, vec![0, 2]));
    // Entries whose texts join to the same string are different keys.
    let (one, two) = (of(&[("a", "b_c_d")]), of(&[("a", "b"), ("c", "d")]));
    assert_eq!(client.passes(&[limited(1, MINUTE, one)]).await, (true, vec![0]));
    assert_eq!(client.passes(&[limited(1, MINUTE, two)]).await, (true, vec![0]));
    service.clock.advance(Duration::from_secs(15));
    assert_eq!(client.passes(&[own()]).await, (true, vec![1]));
    // Zero per minute denies everything.
    let told = client.told(&[limited(0, MINUTE, of(&[("user", "ann")]))]).await;
    assert!(!is_ok(told.overall_code));
    assert_eq!(limit_of(&told.statuses[0]), Some((0, "MINUTE", "")));
    let elsewhere = RateLimitRequest { domain: "other".into(), ..edge(&[limited(0, MINUTE, of(&[]))]) };
    assert!(is_ok(client.ask(elsewhere).await.unwrap().overall_code), "the domain must be there");
    // Each unit has its length.
    for (unit, length) in [(1, 1), (2, 60), (3, 3_600), (4, 86_400), (5, 30 * 86_400), (6, 365 * 86_400)] {
        let told = client.told(&[limited(9, unit, of(&[("unit", "")]))]).await;
        let reset = reset_of(&told.statuses[0]).unwrap();
        assert!(reset <= length && reset > length - 61, "{unit}: {reset}");
    }
}

#[tokio::test]
async fn shadow_limit_denies_nothing() {
    let domains = "  edge:
    - { key: user, fixed_window: { limit: 1, window: 1m }, shadow: true }
    - { key: path, fixed_window: { limit: 9, window: 1m } }
";
    let service = run(domains);
    let mut client = service.client().await;
    let both = [of(&[("user", "ann")]), of(&[("path", "/")])];
    for left in [8, 7, 6] {
        let told = client.told(&both).await;
        assert!(is_ok(told.overall_code) && is_ok(told.statuses[0].code));
        assert_eq!((told.statuses[0].limit_remaining, told.statuses[1].limit_remaining), (0, left));
    }
    let text = super::api::metrics(&service);
    assert!(text.contains("ratekeeper_envoy_requests_total{result=\"ok\"} 1\n"), "{text}");
    assert!(text.contains("ratekeeper_envoy_requests_total{result=\"shadow\"} 2\n"), "{text}");
}

#[tokio::test]
async fn limit_replaces_the_limits_it_names() {
    let domains = "  edge:
    - { key: all, fixed_window: { limit: 1, window: 1m }, name: everybody }
    - { key: plan, value: gold, fixed_window: { limit: 5, window: 1m }, name: gold, replaces: [everybody] }
";
    let service = run(domains);
    let mut client = service.client().await;
    let all = of(&[("all", "")]);
    for left in [4, 3, 2] {
        let told = client.told(&[all.clone(), of(&[("plan", "gold")])]).await;
        assert!(is_ok(told.overall_code) && told.statuses[0].current_limit.is_none());
        assert_eq!(told.statuses[1].limit_remaining, left);
    }
    assert_eq!(client.passes(&[all.clone(), of(&[("plan", "silver")])]).await, (true, vec![0, 0]));
    assert_eq!(client.passes(&[all, of(&[("plan", "silver")])]).await, (false, vec![0, 0]));
}

#[tokio::test]
async fn quota_denies_only_if_all_are_over() {
    let domains = "  edge:
    - { key: model, value: small, fixed_window: { limit: 1, window: 1m }, quota: true }
    - { key: model, value: large, fixed_window: { limit: 2, window: 1m }, quota: true }
    - { key: user, fixed_window: { limit: 3, window: 1m } }
";
    let service = run(domains);
    let mut client = service.client().await;
    let (small, large) = (of(&[("model", "small")]), of(&[("model", "large")]));
    let all = [small.clone(), large.clone(), of(&[("user", "ann")])];
    assert_eq!(client.passes(&all).await, (true, vec![0, 1, 2]));
    let told = client.told(&all).await;
    let codes: Vec<_> = told.statuses.iter().map(|status| is_ok(status.code)).collect();
    assert_eq!((is_ok(told.overall_code), codes), (true, vec![false, true, true]));
    assert_eq!(client.passes(&all).await, (false, vec![0, 0, 1]));
    // A single quota descriptor denies alone, and so does any other limit.
    assert_eq!(client.passes(&[small]).await, (false, vec![0]));
    service.clock.advance(Duration::from_secs(60));
    let two = [large, hits(4, of(&[("user", "ann")]))];
    assert_eq!(client.passes(&two).await, (false, vec![2, 0]));
}

#[tokio::test]
async fn shared_values_have_one_budget() {
    let domains = "  edge:
    - { key: path, value: /a/*, share: true, fixed_window: { limit: 2, window: 1m } }
    - { key: path, value: /b/*, fixed_window: { limit: 2, window: 1m } }
";
    let service = run(domains);
    let mut client = service.client().await;
    assert_eq!(client.passes(&[of(&[("path", "/a/1")])]).await, (true, vec![1]));
    assert_eq!(client.passes(&[of(&[("path", "/a/2")])]).await, (true, vec![0]));
    assert_eq!(client.passes(&[of(&[("path", "/b/1")])]).await, (true, vec![1]));
    assert_eq!(client.passes(&[of(&[("path", "/b/2")])]).await, (true, vec![1]));
}

#[tokio::test]
async fn configured_headers_and_body_are_sent() {
    let options = Options { headers: true, denied_body: "slow down".into(), ..Options::default() };
    let service = run_with(USERS, options, Settings::default());
    let mut client = service.client().await;
    let both = [of(&[("path", "/")]), of(&[("user", "ann")])];
    let told = client.told(&both).await;
    let headers = |told: &RateLimitResponse| {
        let each = told.response_headers_to_add.iter();
        each.map(|header| format!("{}: {}", header.key, header.value)).collect::<Vec<_>>()
    };
    let expected = ["x-ratelimit-limit: 3", "x-ratelimit-remaining: 2", "x-ratelimit-reset: 60"];
    assert_eq!(headers(&told), expected);
    assert!(told.raw_body.is_empty());
    // The headers describe the limit that denies, whatever remains of the others.
    let told = client.told(&[vec![of(&[("path", "/")])], vec![of(&[("user", "ann")]); 3]].concat()).await;
    assert_eq!(&told.raw_body[..], b"slow down");
    assert_eq!(headers(&told), expected);
    let told = client.told(&[of(&[("other", "")])]).await;
    assert!(headers(&told).is_empty());
}

#[tokio::test]
async fn metadata_of_allowed_descriptors_is_sent() {
    let domains = "  edge:
    - { key: a, fixed_window: { limit: 1, window: 1m }, metadata: { team: one, deep: { x: 1 }, list: [true, null] } }
    - { key: b, fixed_window: { limit: 9, window: 1m }, metadata: { team: two, deep: { y: 2 } } }
";
    let service = run(domains);
    let mut client = service.client().await;
    let metadata = |told: &RateLimitResponse| {
        let fields = told.dynamic_metadata.clone().unwrap().fields;
        assert_eq!(fields["domain"].kind, Some(Kind::StringValue("edge".to_owned())));
        assert!(fields.contains_key("descriptors"));
        let Some(Kind::StructValue(metadata)) = fields["metadata"].kind.clone() else { panic!("{fields:?}") };
        metadata.fields
    };
    let told = client.told(&[of(&[("a", "")]), of(&[("b", "")])]).await;
    let fields = metadata(&told);
    assert_eq!(fields["team"].kind, Some(Kind::StringValue("one".to_owned())));
    let Some(Kind::StructValue(deep)) = &fields["deep"].kind else { panic!("{fields:?}") };
    assert_eq!(deep.fields.len(), 2);
    let Some(Kind::ListValue(list)) = &fields["list"].kind else { panic!("{fields:?}") };
    assert_eq!(list.values.len(), 2);
    // A descriptor that is over its limit sends no metadata.
    let fields = metadata(&client.told(&[of(&[("a", "")]), of(&[("b", "")])]).await);
    assert_eq!(fields["team"].kind, Some(Kind::StringValue("two".to_owned())));
    assert!(!fields.contains_key("list"));
}
