//! The gateway section: listeners, upstreams, routes and edits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::time::Duration;

use ratekeeper_config::{
    Address, Balance, Config, Gateway, HeaderEdits, OutlierEjection, PathEdit, Protocol, Route, Secret,
    Timeouts,
};

use crate::common::read;

fn config(yaml: &str) -> Config {
    read(yaml).unwrap_or_else(|errors| panic!("{errors}"))
}

fn gateway(yaml: &str) -> Gateway {
    config(yaml).gateway.unwrap()
}

/// The only route of a gateway.
fn route(fields: &str) -> Route {
    gateway(&format!("gateway: {{ routes: {{ id: a, limits: all, upstream: http://h, {fields} }} }}"))
        .routes
        .remove(0)
}

fn address(is_tls: bool, host: &str, port: u16, path: &str) -> Address {
    Address { is_tls, host: host.to_owned(), port, path: path.to_owned() }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn omitted_settings_have_defaults() {
    let config = config("gateway: { routes: [{ id: a, limits: all, upstream: http://h }] }");
    assert_eq!(config.admin.unwrap().listen.to_string(), "127.0.0.1:9180");
    let gateway = config.gateway.unwrap();
    let [listener] = gateway.listeners.as_slice() else { panic!("{gateway:?}") };
    assert_eq!((&*listener.address.to_string(), listener.proxy_protocol), ("127.0.0.1:8080", false));
    assert!(listener.tls.is_none());
    let seconds = [10, 15, 60, 3_600, 30].map(Duration::from_secs);
    let [header, body, idle, tunnel, drain] = seconds;
    assert_eq!(gateway.timeouts, Timeouts { header, body, idle, min_rate: 250, tunnel, drain });
    assert_eq!((gateway.max_connections, gateway.max_in_flight, gateway.access_log), (10_000, 2_000, true));
    assert_eq!(gateway.max_connections_per_client, 5_000);

    let [upstream] = gateway.upstreams.as_slice() else { panic!("{gateway:?}") };
    assert_eq!(upstream.name, "http://h");
    assert_eq!(upstream.addresses, [address(false, "h", 80, "")]);
    assert_eq!((upstream.balance, upstream.protocol), (Balance::RoundRobin, Protocol::Http1));
    assert_eq!((upstream.timeouts.connect, upstream.timeouts.idle), (SECOND, 60 * SECOND));
    assert_eq!((upstream.timeouts.read, upstream.ping_after), (60 * SECOND, 600 * SECOND));
    assert_eq!((upstream.max_connections, upstream.retry_percent), (1_000, 20));
    assert_eq!((&upstream.health, &upstream.ca), (&None, &None));
    assert_eq!(upstream.outlier_ejection, Some(OutlierEjection { after: 5, lasts: 10 * SECOND }));

    let [route] = gateway.routes.as_slice() else { panic!("{gateway:?}") };
    assert_eq!((route.upstream, route.max_in_flight, route.is_critical), (0, None, false));
    assert_eq!((route.timeout, &route.path), (30 * SECOND, &PathEdit::Keep));
    assert_eq!((&route.request_headers, &route.response_headers), (&<_>::default(), &HeaderEdits::default()));
}

#[test]
fn listeners_are_read_with_tls_and_proxy_protocol() {
    let listeners = |listen: &str| {
        let yaml = format!(
            "client: {{ trusted_proxies: 10.0.0.0/8 }}\ngateway: {{ listen: {listen}, routes: [{{ id: a, limits: all, upstream: http://h }}] }}"
        );
        gateway(&yaml).listeners
    };
    assert_eq!(listeners("'[::]:80'")[0].address.to_string(), "[::]:80");
    let several = listeners(
        "[127.0.0.1:0, 127.0.0.1:0, { address: 0.0.0.0:8443, proxy_protocol: true, tls: { certificate: { file: demo-cert.pem }, key: { file: demo-key.pem } } }]",
    );
    assert_eq!(several.len(), 3);
    let tls = several[2].tls.as_ref().unwrap();
    assert!(several[2].proxy_protocol && !several[0].proxy_protocol);
    assert!(tls.certificate.ends_with("demo-cert.pem") && tls.key.ends_with("demo-key.pem"));
}

#[test]
fn admin_listener_can_be_moved_or_disabled() {
    for (yaml, listening) in [
        ("admin: off", None),
        ("admin: 127.0.0.1:9999", Some("127.0.0.1:9999")),
        ("admin: { listen: '[::1]:0' }", Some("[::1]:0")),
        ("admin: { listen: 0.0.0.0:9180, token: 0123456789abcdef }", Some("0.0.0.0:9180")),
        ("limits:", Some("127.0.0.1:9180")),
    ] {
        assert_eq!(config(yaml).admin.map(|it| it.listen.to_string()).as_deref(), listening, "{yaml}");
    }
}

#[test]
fn upstream_addresses_are_parsed() {
    for (url, expected) in [
        ("http://h", address(false, "h", 80, "")),
        ("https://H.example.com/", address(true, "h.example.com", 443, "")),
        ("http://127.0.0.1:8081/api/v1/", address(false, "127.0.0.1", 8081, "/api/v1")),
        ("https://[2001:DB8::1]:8443", address(true, "2001:db8::1", 8443, "")),
        ("http://my_service-1.local", address(false, "my_service-1.local", 80, "")),
    ] {
        let yaml = format!("gateway: {{ routes: {{ id: a, limits: all, upstream: '{url}' }} }}");
        assert_eq!(gateway(&yaml).upstreams[0].addresses, [expected], "{url}");
    }
}

#[test]
fn upstreams_are_shared_by_name_and_by_url() {
    let gateway = gateway(
        "
gateway:
  upstreams:
    api: { addresses: [http://10.0.0.1:8080, http://10.0.0.2:8080], balance: least_requests, protocol: http2, outlier_ejection: off }
    web: { addresses: https://web, retry_budget: 0%, health: /healthz, tls: { ca: { file: demo-cert.pem } } }
  routes:
    - { id: a, limits: all, upstream: http://h:80/ }
    - { id: b, limits: all, upstream: web }
    - { id: c, limits: all, upstream: http://h }
    - { id: d, limits: all, upstream: api }
    - { id: e, limits: all, upstream: http://h/x }",
    );
    let names: Vec<&str> = gateway.upstreams.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["api", "web", "http://h:80/", "http://h/x"]);
    assert_eq!(gateway.routes.iter().map(|it| it.upstream).collect::<Vec<_>>(), [2, 1, 2, 0, 3]);
    let [api, web, ..] = gateway.upstreams.as_slice() else { panic!("{names:?}") };
    assert_eq!((api.addresses.len(), api.outlier_ejection), (2, None));
    assert_eq!((api.balance, api.protocol), (Balance::LeastRequests, Protocol::Http2));
    let health = web.health.as_ref().unwrap();
    assert_eq!((&*health.path, health.every, health.timeout), ("/healthz", 5 * SECOND, SECOND));
    assert_eq!((health.healthy_after, health.unhealthy_after, web.retry_percent), (2, 3, 0));
    assert!(web.ca.as_ref().unwrap().reveal().contains("-----BEGIN CERTIFICATE"));
}

#[test]
fn routes_reference_concurrency_limits() {
    let config = config(
        "
limits:
  a: { token_bucket: }
  busy: { concurrency: { limit: 20 }, key: { header: X-User-Id }, when: { method: POST } }
  b: { token_bucket: }
  total: { concurrency: { limit: 500 }, key: global, shadow: true }
gateway:
  routes:
    - { id: every, limits: all, upstream: http://h, max_in_flight: 7, critical: true }
    - { id: some, upstream: http://h, limits: [total, b] }
    - { id: none, upstream: http://h, limits: none }
    - { id: empty, upstream: http://h, limits: [] }",
    );
    let names: Vec<&str> = config.names.iter().map(|name| name.as_str()).collect();
    assert_eq!((names, config.rules.rules().len()), (vec!["a", "b"], 2));
    let [busy, all] = config.concurrency.as_slice() else { panic!("{:?}", config.concurrency) };
    assert_eq!((&*busy.name, busy.policy.as_str(), busy.max, busy.is_shadow), ("busy", "busy", 20, false));
    assert_eq!((&*busy.when.methods, all.max, all.is_shadow), (&["POST".to_owned()][..], 500, true));
    let routes = config.gateway.unwrap().routes;
    let numbers: Vec<_> = routes.iter().map(|route| (&*route.limits, &*route.concurrency)).collect();
    assert_eq!(numbers, [(&[0, 1][..], &[0, 1][..]), (&[1], &[1]), (&[], &[]), (&[], &[])]);
    assert_eq!((routes[0].max_in_flight, routes[0].is_critical), (Some(7), true));
}

#[test]
fn path_is_stripped_or_rewritten() {
    assert_eq!(route("path: /api/**, strip_prefix: /api").path, PathEdit::Strip("/api".to_owned()));
    assert_eq!(route("strip_prefix: /api/v1/").path, PathEdit::Strip("/api/v1".to_owned()));
    assert_eq!(route("path: '/{x}/**', strip_prefix: /a/b").path, PathEdit::Strip("/a/b".to_owned()));
    let route = route("path: '/users/{id}/**', rewrite: '/v2/{id}/{rest}'");
    let PathEdit::Rewrite(template) = &route.path else { panic!("{route:?}") };
    let path = template.expand(&route.when.paths[0], "/users/7/posts/1");
    assert_eq!(path.as_deref(), Some("/v2/7/posts/1"));
}

#[test]
fn headers_are_set_added_and_removed() {
    let route = route(
        "request_headers: { set: { X-Env: live, Authorization: 'Bearer ${REDIS_PASSWORD}' }, add: { Vary: [a, b] }, remove: X-Debug }, response_headers: { remove: [Server, X-Powered-By] }",
    );
    let shown = |pairs: &[(String, Secret)]| -> Vec<String> {
        pairs.iter().map(|(name, value)| format!("{name}: {}", value.reveal())).collect()
    };
    let edits = &route.request_headers;
    assert_eq!(shown(&edits.set), ["x-env: live", "authorization: Bearer hunter2"]);
    assert_eq!(
        (shown(&edits.add), &edits.remove[..]),
        (vec!["vary: a".into(), "vary: b".into()], &["x-debug".into()][..])
    );
    assert_eq!(route.response_headers.remove, ["server", "x-powered-by"]);
    assert!(!format!("{route:?}").contains("hunter2"));
}
