//! Decisions on descriptors.

use std::time::Duration;

use bytes::Bytes;
use prost_types::value::Kind;
use ratekeeper_config::EnvoyHeaderNames;
use ratekeeper_server::envoy::messages::{RateLimitRequest, RateLimitResponse};
use ratekeeper_server::envoy::{EnvoyApiSettings, EnvoyListenerSettings};
use tonic::Code;

use super::support::{
    as_refund, descriptor, edge_request, is_ok, limit_of, reset_of, run, run_with, with_hits,
    with_inline_limit,
};

const USERS: &str = "  edge:
    - { key: user, fixed_window: { limit: 3, window: 1m }, name: per-user }
    - { key: path, fixed_window: { limit: 5, window: 1h } }
";

#[tokio::test]
async fn descriptor_is_allowed_until_its_limit() {
    let service = run(USERS);
    let mut client = service.client().await;
    service.clock.advance(Duration::from_millis(10_500));
    for remaining in [2, 1, 0] {
        let response = client.check(&[descriptor(&[("user", "ann")])]).await;
        assert!(is_ok(response.overall_code));
        let [status] = &response.statuses[..] else { panic!("{response:?}") };
        assert!(is_ok(status.code));
        assert_eq!(limit_of(status), Some((3, "MINUTE", "per-user")));
        assert_eq!((status.limit_remaining, reset_of(status)), (remaining, Some(50)));
        assert!(response.response_headers_to_add.is_empty() && response.raw_body.is_empty());
        assert!(response.dynamic_metadata.is_none());
    }
    let response = client.check(&[descriptor(&[("user", "ann")])]).await;
    assert!(!is_ok(response.overall_code) && !is_ok(response.statuses[0].code));
    assert_eq!(limit_of(&response.statuses[0]), Some((3, "MINUTE", "per-user")));
    assert_eq!((response.statuses[0].limit_remaining, reset_of(&response.statuses[0])), (0, Some(50)));
    // Other keys have separate budgets, and the next minute is a new window.
    assert_eq!(client.remaining(&[descriptor(&[("user", "bob")])]).await, (true, vec![2]));
    service.clock.advance(Duration::from_secs(50));
    assert_eq!(client.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![2]));
}

#[tokio::test]
async fn descriptors_are_charged_atomically_and_reported_in_order() {
    let service = run(USERS);
    let mut client = service.client().await;
    let descriptors =
        [descriptor(&[("path", "/a")]), descriptor(&[("unknown", "x")]), descriptor(&[("user", "ann")])];
    for remaining in [2, 1, 0] {
        assert_eq!(client.remaining(&descriptors).await, (true, vec![remaining + 2, 0, remaining]));
    }
    let response = client.check(&descriptors).await;
    let codes: Vec<_> = response.statuses.iter().map(|status| is_ok(status.code)).collect();
    assert_eq!((is_ok(response.overall_code), codes), (false, vec![true, true, false]));
    // The denied request did not charge the path.
    assert_eq!(client.remaining(&[descriptor(&[("path", "/a")])]).await, (true, vec![1]));
}

#[tokio::test]
async fn repeated_descriptor_is_charged_twice() {
    let service = run(USERS);
    let mut client = service.client().await;
    let twice = [descriptor(&[("user", "ann")]), descriptor(&[("user", "ann")])];
    assert_eq!(client.remaining(&twice).await, (true, vec![1, 1]));
    assert_eq!(client.remaining(&twice).await, (false, vec![1, 1]));
    let two = [descriptor(&[("user", "bob")]), descriptor(&[("user", "eve")])];
    assert_eq!(client.remaining(&two).await, (true, vec![2, 2]));
}

#[tokio::test]
async fn unconfigured_descriptors_are_allowed() {
    let service = run(USERS);
    let mut client = service.client().await;
    for descriptor in
        [descriptor(&[("other", "x")]), descriptor(&[("user", "ann"), ("path", "/a")]), descriptor(&[])]
    {
        let response = client.check(&[descriptor]).await;
        assert!(is_ok(response.overall_code));
        assert_eq!(response.statuses.len(), 1);
        assert!(is_ok(response.statuses[0].code) && response.statuses[0].current_limit.is_none());
        assert!(response.statuses[0].duration_until_reset.is_none());
    }
    let elsewhere =
        RateLimitRequest { domain: "other".into(), ..edge_request(&vec![descriptor(&[("user", "ann")]); 9]) };
    let response = client.call(elsewhere).await.unwrap();
    assert!(is_ok(response.overall_code) && response.statuses.len() == 9);
    assert!(response.statuses.iter().all(|status| is_ok(status.code) && status.current_limit.is_none()));
}

#[tokio::test]
async fn empty_domain_or_descriptors_are_rejected() {
    let service = run(USERS);
    let mut client = service.client().await;
    let nowhere =
        RateLimitRequest { domain: Bytes::new(), ..edge_request(&[descriptor(&[("user", "ann")])]) };
    let status = client.call(nowhere).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("`domain` is empty"), "{status}");
    let status = client.call(edge_request(&[])).await.unwrap_err();
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
    let response = client.check(&[descriptor(&[("plan", "gold")])]).await;
    assert_eq!((is_ok(response.overall_code), response.statuses[0].limit_remaining), (true, u32::MAX));
    assert!(response.statuses[0].current_limit.is_none());
    assert_eq!(client.remaining(&[descriptor(&[("plan", "trial")])]).await, (true, vec![0]));
    let response = client.check(&[descriptor(&[("plan", "none")]), descriptor(&[("user", "ann")])]).await;
    let codes: Vec<_> = response.statuses.iter().map(|status| is_ok(status.code)).collect();
    assert_eq!((is_ok(response.overall_code), codes), (false, vec![false, true]));
    assert_eq!(limit_of(&response.statuses[0]), Some((0, "UNKNOWN", "")));
    // The denied request did not charge the user.
    assert_eq!(client.remaining(&[descriptor(&[("user", "ann")])]).await, (true, vec![0]));
}

/// A reset of 0 would tell clients to retry at once.
#[tokio::test]
async fn limit_of_zero_keeps_its_unit_and_reset() {
    let domains =
        format!("{USERS}    - {{ key: plan, value: none, blocked: true, unit: hour, name: nobody }}\n");
    let service = run_with(
        &domains,
        EnvoyApiSettings { headers: true, ..EnvoyApiSettings::default() },
        EnvoyListenerSettings::default(),
    );
    let mut client = service.client().await;
    service.clock.advance(Duration::from_millis(10_500));
    let inline = |unit| with_inline_limit(0, unit, descriptor(&[("user", "ann")]));
    for (denied, limit, reset) in [
        (descriptor(&[("plan", "none")]), (0, "HOUR", "nobody"), 3590),
        (inline(2), (0, "MINUTE", ""), 50),
        (inline(1), (0, "SECOND", ""), 1),
    ] {
        let response = client.check(&[denied]).await;
        let status = &response.statuses[0];
        assert_eq!((is_ok(response.overall_code), status.limit_remaining), (false, 0));
        assert_eq!((limit_of(status), reset_of(status)), (Some(limit), Some(reset)));
        let header = response.response_headers_to_add.last().unwrap();
        assert_eq!((header.key.as_str(), header.value.parse()), ("x-ratelimit-reset", Ok(reset)));
    }
}

#[tokio::test]
async fn window_without_a_unit_is_reported_as_unknown() {
    let domains = "  edge:
    - { key: odd, fixed_window: { limit: 7, window: 90s } }
    - { key: week, sliding_window_log: { limit: 7, window: 1w } }
    - { key: month, token_bucket: { capacity: 7, refill: 1/30d } }
";
    let service = run(domains);
    let response =
        service.client().await.check(&["odd", "week", "month"].map(|key| descriptor(&[(key, "")]))).await;
    let limits: Vec<_> = response.statuses.iter().map(limit_of).collect();
    let expected = [(7, "UNKNOWN", ""), (7, "WEEK", ""), (1, "MONTH", "")];
    assert_eq!(limits, expected.map(Some));
}

#[tokio::test]
async fn hits_default_from_descriptor_to_request_to_one() {
    let service = run("  edge: [{ key: user, fixed_window: { limit: 20, window: 1m } }]\n");
    let mut client = service.client().await;
    let ann = || descriptor(&[("user", "ann")]);
    let mut request = RateLimitRequest { hits_addend: 4, ..edge_request(&[ann()]) };
    assert_eq!(client.call(request.clone()).await.unwrap().statuses[0].limit_remaining, 16);
    request.descriptors = vec![with_hits(7, ann())];
    assert_eq!(client.call(request.clone()).await.unwrap().statuses[0].limit_remaining, 9);
    assert_eq!(client.remaining(&[ann()]).await, (true, vec![8]));
    // Zero hits peek.
    for _ in 0..3 {
        assert_eq!(client.remaining(&[with_hits(0, ann())]).await, (true, vec![8]));
    }
    request.hits_addend = 9;
    request.descriptors = vec![ann()];
    let response = client.call(request).await.unwrap();
    assert_eq!((is_ok(response.overall_code), response.statuses[0].limit_remaining), (false, 8));
    assert_eq!(client.remaining(&[with_hits(8, ann())]).await, (true, vec![0]));
    // A peek is denied when nothing remains, and the other descriptors are not charged then.
    assert_eq!(
        client.remaining(&[with_hits(0, ann()), descriptor(&[("user", "bob")])]).await,
        (false, vec![0, 20])
    );
    assert_eq!(client.remaining(&[descriptor(&[("user", "bob")])]).await, (true, vec![19]));
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
    let all = || descriptor(&[("tokens", "all")]);
    for remaining in [70, 40, 10] {
        assert!(client.remaining(&[with_hits(0, all())]).await.0);
        assert_eq!(client.remaining(&[with_hits(30, all())]).await, (true, vec![remaining]));
    }
    assert_eq!(client.remaining(&[with_hits(0, all())]).await, (true, vec![10]));
    // The other descriptor, whose limit suffices, is not charged.
    let descriptors = [with_hits(30, all()), with_hits(1, descriptor(&[("user", "ann")]))];
    assert_eq!(client.remaining(&descriptors).await, (false, vec![0, 5]));
    assert_eq!(client.remaining(&[with_hits(0, all())]).await, (false, vec![0]));
    // The same holds for an inline limit and for a shadow limit.
    let inline = with_hits(30, with_inline_limit(40, 3, all()));
    assert_eq!(client.remaining(std::slice::from_ref(&inline)).await, (true, vec![10]));
    assert_eq!(client.remaining(&[inline]).await, (false, vec![0]));
    let trial = || descriptor(&[("trial", "all")]);
    assert_eq!(client.remaining(&[with_hits(101, trial())]).await, (true, vec![0]));
    service.clock.advance(Duration::from_secs(3600));
    assert_eq!(client.remaining(&[with_hits(0, all())]).await, (true, vec![100]));
}

#[tokio::test]
async fn cost_above_every_limit_is_denied() {
    let service = run("  edge: [{ key: user, fixed_window: { limit: 20, window: 1m } }]\n");
    let mut client = service.client().await;
    for sum in [21, u64::from(u32::MAX), u64::from(u32::MAX) + 1, u64::MAX] {
        let descriptors = [with_hits(sum, descriptor(&[("user", "ann")])), descriptor(&[("user", "bob")])];
        assert_eq!(client.remaining(&descriptors).await, (false, vec![0, 20]), "{sum}");
        service.clock.advance(Duration::from_secs(60));
    }
    assert_eq!(client.remaining(&[with_hits(u64::MAX, descriptor(&[("other", "")]))]).await, (true, vec![0]));
}

#[tokio::test]
async fn refunds_require_the_option() {
    let service = run(USERS);
    let mut client = service.client().await;
    let ann = || descriptor(&[("user", "ann")]);
    assert_eq!(client.remaining(&[with_hits(3, ann())]).await, (true, vec![0]));
    let status =
        client.call(edge_request(&[descriptor(&[("path", "/")]), as_refund(ann())])).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    assert!(status.message().contains("descriptors[1]"), "{status}");
    assert!(status.message().contains("`refunds: true`"), "{status}");
    assert_eq!(client.remaining(&[descriptor(&[("path", "/")])]).await, (true, vec![4]));

    let options = EnvoyApiSettings { refunds: true, ..EnvoyApiSettings::default() };
    let service = run_with(USERS, options, EnvoyListenerSettings::default());
    let mut client = service.client().await;
    assert_eq!(client.remaining(&[with_hits(3, ann())]).await, (true, vec![0]));
    assert_eq!(client.remaining(&[as_refund(ann())]).await, (true, vec![1]));
    // A denied request refunds nothing.
    let others = vec![descriptor(&[("path", "/")]); 6];
    let denied = client.remaining(&[vec![as_refund(ann())], others].concat()).await;
    assert_eq!((denied.0, &denied.1[..2]), (false, &[1, 5][..]));
    assert_eq!(client.remaining(&[as_refund(ann()), descriptor(&[("path", "/")])]).await, (true, vec![2, 4]));
    // At most what was charged.
    assert_eq!(client.remaining(&[as_refund(with_hits(u64::MAX, ann()))]).await, (true, vec![3]));
    assert_eq!(client.remaining(&[ann()]).await, (true, vec![2]));
    // A key without charges, or without a limit, gets no refund.
    assert_eq!(client.remaining(&[as_refund(descriptor(&[("user", "bob")]))]).await, (true, vec![3]));
    assert_eq!(client.remaining(&[as_refund(descriptor(&[("other", "")]))]).await, (true, vec![0]));
}

#[tokio::test]
async fn inline_limit_is_a_clock_aligned_window() {
    const MINUTE: i32 = 2;
    let service = run(USERS);
    let mut client = service.client().await;
    service.clock.advance(Duration::from_secs(45));
    let inline = || with_inline_limit(2, MINUTE, descriptor(&[("user", "ann")]));
    let response = client.check(&[inline()]).await;
    assert_eq!(limit_of(&response.statuses[0]), Some((2, "MINUTE", "")));
    assert_eq!((response.statuses[0].limit_remaining, reset_of(&response.statuses[0])), (1, Some(15)));
    // It is independent of the configured limit, which the same request can charge.
    assert_eq!(client.remaining(&[inline(), descriptor(&[("user", "ann")])]).await, (true, vec![0, 2]));
    assert_eq!(client.remaining(&[inline(), descriptor(&[("user", "ann")])]).await, (false, vec![0, 2]));
    // Entries whose texts join to the same string are different keys.
    let (one, two) = (descriptor(&[("a", "b_c_d")]), descriptor(&[("a", "b"), ("c", "d")]));
    assert_eq!(client.remaining(&[with_inline_limit(1, MINUTE, one)]).await, (true, vec![0]));
    assert_eq!(client.remaining(&[with_inline_limit(1, MINUTE, two)]).await, (true, vec![0]));
    service.clock.advance(Duration::from_secs(15));
    assert_eq!(client.remaining(&[inline()]).await, (true, vec![1]));
    // Zero per minute denies everything.
    let response = client.check(&[with_inline_limit(0, MINUTE, descriptor(&[("user", "ann")]))]).await;
    assert!(!is_ok(response.overall_code));
    assert_eq!(limit_of(&response.statuses[0]), Some((0, "MINUTE", "")));
    let elsewhere = RateLimitRequest {
        domain: "other".into(),
        ..edge_request(&[with_inline_limit(0, MINUTE, descriptor(&[]))])
    };
    assert!(is_ok(client.call(elsewhere).await.unwrap().overall_code), "an unknown domain has no limits");
    // Each unit has its length.
    for (unit, length) in [(1, 1), (2, 60), (3, 3_600), (4, 86_400), (5, 30 * 86_400), (6, 365 * 86_400)] {
        let response = client.check(&[with_inline_limit(9, unit, descriptor(&[("unit", "")]))]).await;
        let reset = reset_of(&response.statuses[0]).unwrap();
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
    let descriptors = [descriptor(&[("user", "ann")]), descriptor(&[("path", "/")])];
    for remaining in [8, 7, 6] {
        let response = client.check(&descriptors).await;
        assert!(is_ok(response.overall_code) && is_ok(response.statuses[0].code));
        assert_eq!(
            (response.statuses[0].limit_remaining, response.statuses[1].limit_remaining),
            (0, remaining)
        );
    }
    let text = super::listener::metrics(&service);
    assert!(text.contains("ratekeeper_envoy_api_requests_total{result=\"allowed\"} 1\n"), "{text}");
    assert!(text.contains("ratekeeper_envoy_api_requests_total{result=\"would_deny\"} 2\n"), "{text}");
}

#[tokio::test]
async fn limit_replaces_the_limits_it_names() {
    let domains = "  edge:
    - { key: all, fixed_window: { limit: 1, window: 1m }, name: everybody }
    - { key: plan, value: gold, fixed_window: { limit: 5, window: 1m }, name: gold, replaces: [everybody] }
";
    let service = run(domains);
    let mut client = service.client().await;
    let all = descriptor(&[("all", "")]);
    for remaining in [4, 3, 2] {
        let response = client.check(&[all.clone(), descriptor(&[("plan", "gold")])]).await;
        assert!(is_ok(response.overall_code) && response.statuses[0].current_limit.is_none());
        assert_eq!(response.statuses[1].limit_remaining, remaining);
    }
    assert_eq!(client.remaining(&[all.clone(), descriptor(&[("plan", "silver")])]).await, (true, vec![0, 0]));
    assert_eq!(client.remaining(&[all, descriptor(&[("plan", "silver")])]).await, (false, vec![0, 0]));
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
    let (small, large) = (descriptor(&[("model", "small")]), descriptor(&[("model", "large")]));
    let all = [small.clone(), large.clone(), descriptor(&[("user", "ann")])];
    assert_eq!(client.remaining(&all).await, (true, vec![0, 1, 2]));
    let response = client.check(&all).await;
    let codes: Vec<_> = response.statuses.iter().map(|status| is_ok(status.code)).collect();
    assert_eq!((is_ok(response.overall_code), codes), (true, vec![false, true, true]));
    assert_eq!(client.remaining(&all).await, (false, vec![0, 0, 1]));
    // A single quota descriptor denies alone, and so does any other limit.
    assert_eq!(client.remaining(&[small]).await, (false, vec![0]));
    service.clock.advance(Duration::from_secs(60));
    let two = [large, with_hits(4, descriptor(&[("user", "ann")]))];
    assert_eq!(client.remaining(&two).await, (false, vec![2, 0]));
}

#[tokio::test]
async fn shared_values_have_one_budget() {
    let domains = "  edge:
    - { key: path, value: /a/*, share: true, fixed_window: { limit: 2, window: 1m } }
    - { key: path, value: /b/*, fixed_window: { limit: 2, window: 1m } }
";
    let service = run(domains);
    let mut client = service.client().await;
    assert_eq!(client.remaining(&[descriptor(&[("path", "/a/1")])]).await, (true, vec![1]));
    assert_eq!(client.remaining(&[descriptor(&[("path", "/a/2")])]).await, (true, vec![0]));
    assert_eq!(client.remaining(&[descriptor(&[("path", "/b/1")])]).await, (true, vec![1]));
    assert_eq!(client.remaining(&[descriptor(&[("path", "/b/2")])]).await, (true, vec![1]));
}

#[tokio::test]
async fn configured_headers_and_body_are_sent() {
    let options =
        EnvoyApiSettings { headers: true, denied_body: "slow down".into(), ..EnvoyApiSettings::default() };
    let service = run_with(USERS, options, EnvoyListenerSettings::default());
    let mut client = service.client().await;
    let descriptors = [descriptor(&[("path", "/")]), descriptor(&[("user", "ann")])];
    let response = client.check(&descriptors).await;
    let headers = |response: &RateLimitResponse| {
        let each = response.response_headers_to_add.iter();
        each.map(|header| format!("{}: {}", header.key, header.value)).collect::<Vec<_>>()
    };
    let expected = ["x-ratelimit-limit: 3", "x-ratelimit-remaining: 2", "x-ratelimit-reset: 60"];
    assert_eq!(headers(&response), expected);
    assert!(response.raw_body.is_empty());
    // The headers describe the limit that denies, whatever remains of the others.
    let response = client
        .check(&[vec![descriptor(&[("path", "/")])], vec![descriptor(&[("user", "ann")]); 3]].concat())
        .await;
    assert_eq!(&response.raw_body[..], b"slow down");
    assert_eq!(headers(&response), expected);
    let response = client.check(&[descriptor(&[("other", "")])]).await;
    assert!(headers(&response).is_empty());

    let header_names = EnvoyHeaderNames::RateLimit;
    let options = EnvoyApiSettings { headers: true, header_names, ..EnvoyApiSettings::default() };
    let mut client = run_with(USERS, options, EnvoyListenerSettings::default()).client().await;
    let response = client.check(&[descriptor(&[("user", "ann")])]).await;
    assert_eq!(headers(&response), ["RateLimit-Limit: 3", "RateLimit-Remaining: 2", "RateLimit-Reset: 60"]);
}

#[tokio::test]
async fn metadata_of_allowed_descriptors_is_sent() {
    let domains = "  edge:
    - { key: a, fixed_window: { limit: 1, window: 1m }, metadata: { team: one, deep: { x: 1 }, list: [true, null] } }
    - { key: b, fixed_window: { limit: 9, window: 1m }, metadata: { team: two, deep: { y: 2 } } }
";
    let service = run(domains);
    let mut client = service.client().await;
    let metadata = |response: &RateLimitResponse| {
        let fields = response.dynamic_metadata.clone().unwrap().fields;
        assert_eq!(fields["domain"].kind, Some(Kind::StringValue("edge".to_owned())));
        assert!(fields.contains_key("descriptors"));
        let Some(Kind::StructValue(metadata)) = fields["metadata"].kind.clone() else { panic!("{fields:?}") };
        metadata.fields
    };
    let response = client.check(&[descriptor(&[("a", "")]), descriptor(&[("b", "")])]).await;
    let fields = metadata(&response);
    assert_eq!(fields["team"].kind, Some(Kind::StringValue("one".to_owned())));
    let Some(Kind::StructValue(deep)) = &fields["deep"].kind else { panic!("{fields:?}") };
    assert_eq!(deep.fields.len(), 2);
    let Some(Kind::ListValue(list)) = &fields["list"].kind else { panic!("{fields:?}") };
    assert_eq!(list.values.len(), 2);
    // A descriptor that is over its limit sends no metadata.
    let fields = metadata(&client.check(&[descriptor(&[("a", "")]), descriptor(&[("b", "")])]).await);
    assert_eq!(fields["team"].kind, Some(Kind::StringValue("two".to_owned())));
    assert!(!fields.contains_key("list"));
}
