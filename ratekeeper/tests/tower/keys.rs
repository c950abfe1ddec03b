//! Keys of requests: every key part, and the fallback for a missing part.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::Request;
use http::request::Parts;
use ratekeeper::tower::client::{Source, TrustedProxies, parse_cidr};
use ratekeeper::tower::key::{Key, KeyFallback, KeyPart};
use ratekeeper::tower::path::Pattern;
use ratekeeper::tower::rule::Rule;
use ratekeeper::tower::when::When;
use ratekeeper::tower::{Claims, LayerBuilder, Peer, RatekeeperLayer, Route};

use super::{get, hourly, ip, once, per_client, plain, send, statuses, with};

fn layer(key: Key) -> RatekeeperLayer {
    RatekeeperLayer::builder().rule(once(key)).build().unwrap()
}

/// Whether two requests share a budget of one request.
async fn share(layer: RatekeeperLayer, first: Request<String>, second: Request<String>) -> bool {
    match statuses(&layer, [first, second]).await[..] {
        [200, 429] => true,
        [200, 200] => false,
        ref other => panic!("{other:?}"),
    }
}

fn from(address: &str, target: &str) -> Request<String> {
    let address: IpAddr = address.parse().unwrap();
    Request::get(target).extension(Peer(address)).body(String::new()).unwrap()
}

#[tokio::test]
async fn addresses_are_keyed_by_network() {
    assert!(share(layer(ip()), from("192.0.2.1", "/"), from("192.0.2.1", "/other")).await);
    assert!(!share(layer(ip()), from("192.0.2.1", "/"), from("192.0.2.2", "/")).await);
    // All addresses of one IPv6 network are one client.
    assert!(share(layer(ip()), from("2001:db8::1", "/"), from("2001:db8::2", "/")).await);
    assert!(!share(layer(ip()), from("2001:db8::1", "/"), from("2001:db9::1", "/")).await);
}

#[tokio::test]
async fn only_trusted_proxies_set_the_client_address() {
    let behind = |peer: &str, header: &str, value: &str| {
        let peer: IpAddr = peer.parse().unwrap();
        Request::get("/").extension(Peer(peer)).header(header, value).body(String::new()).unwrap()
    };
    let xff = "x-forwarded-for";
    let trusting = || {
        let trust = TrustedProxies::proxies([parse_cidr("10.0.0.0/8").unwrap()]);
        per_client(1).trusted_proxies(trust).build().unwrap()
    };
    let first = || behind("10.0.0.1", xff, "203.0.113.1");
    assert!(!share(trusting(), first(), behind("10.0.0.1", xff, "203.0.113.2")).await);
    assert!(share(trusting(), first(), behind("10.9.9.9", xff, "6.6.6.6, 203.0.113.1, 10.0.0.7")).await);
    assert!(share(trusting(), first(), from("203.0.113.1", "/")).await);
    // From an untrusted peer the header is ignored.
    let stranger = |claim: &str| behind("198.51.100.1", xff, claim);
    assert!(share(trusting(), stranger("203.0.113.1"), stranger("203.0.113.2")).await);
    assert!(share(per_client(1).build().unwrap(), first(), behind("10.0.0.1", xff, "203.0.113.2")).await);

    let forwarded =
        TrustedProxies::proxies([parse_cidr("10.0.0.0/8").unwrap()]).with_source(Source::Forwarded);
    let trusting = per_client(1).trusted_proxies(forwarded).build().unwrap();
    let one = behind("10.0.0.1", "forwarded", "for=203.0.113.1");
    assert!(!share(trusting, one, behind("10.0.0.1", "forwarded", "for=203.0.113.2")).await);
}

#[tokio::test]
async fn headers_cookies_and_queries_are_keys() {
    let header = || layer(Key::of(KeyPart::header("X-Api-Key")));
    assert!(share(header(), with("x-api-key", "a"), with("X-API-KEY", " a ")).await);
    assert!(!share(header(), with("x-api-key", "a"), with("x-api-key", "A")).await);

    // The service may read either spelling.
    let both =
        Request::get("/").header("x-api-key", "a").header("x_api_key", "b").body(String::new()).unwrap();
    let [rejected, alone] = [send(&header(), both).await, send(&header(), with("x!api+key", "b")).await];
    assert_eq!((rejected.status, alone.status), (400, 400));
    let message = "the header x_api_key is another spelling of x-api-key; send only x-api-key";
    assert!(rejected.body.contains(message), "{rejected:?}");
    let underscored = layer(Key::of(KeyPart::header("X_Api_Key")));
    assert_eq!(send(&underscored, with("x-api-key", "a")).await.status, 400);
    assert_eq!(send(&underscored, with("x_api_key", "a")).await.status, 200);

    // Rules that read both spellings read one header.
    let either = || layer(Key::of(KeyPart::header("X-Api-Key")).and(KeyPart::header("X_Api_Key")));
    assert!(share(either(), with("x-api-key", "a"), with("x_api_key", "a")).await);
    assert!(!share(either(), with("x-api-key", "a"), with("x_api_key", "b")).await);
    let both =
        Request::get("/").header("x-api-key", "a").header("x_api_key", "b").body(String::new()).unwrap();
    let rejected = send(&either(), both).await;
    assert_eq!(rejected.status, 400, "{rejected:?}");
    assert!(rejected.body.contains("x_api_key") && rejected.body.contains("x-api-key"), "{rejected:?}");

    let cookie = || layer(Key::of(KeyPart::Cookie("sid".to_owned())));
    assert!(share(cookie(), with("cookie", "a=1; sid=7"), with("cookie", "sid=7; b=2")).await);
    assert!(!share(cookie(), with("cookie", "sid=7"), with("cookie", "sid=8; xsid=7")).await);
    assert_eq!(send(&cookie(), with("cookie", "sid=7; sid=8")).await.status, 400);

    let query = || layer(Key::of(KeyPart::Query("q".to_owned())));
    assert!(share(query(), plain("/?q=a+b"), plain("/x?p=1&q=a%20b")).await);
    assert!(!share(query(), plain("/?q=a"), plain("/?q=b")).await);
}

#[tokio::test]
async fn paths_are_keys() {
    let segment = || layer(Key::of(KeyPart::Segment(2)));
    assert!(share(segment(), plain("/users/7"), plain("/posts//7/x")).await);
    assert!(!share(segment(), plain("/users/7"), plain("/users/8")).await);

    let pattern = || layer(Key::of(KeyPart::Path(Pattern::parse("/{org}/{repo}/**").unwrap())));
    assert!(share(pattern(), plain("/a/b/c"), plain("/a/./b/d/e")).await);
    assert!(!share(pattern(), plain("/a/bc/x"), plain("/ab/c/x")).await);
}

#[tokio::test]
async fn methods_hosts_and_routes_are_keys() {
    let of = |method: &str| get("/").method(method).body(String::new()).unwrap();
    assert!(share(layer(Key::of(KeyPart::Method)), of("GET"), of("GET")).await);
    assert!(!share(layer(Key::of(KeyPart::Method)), of("GET"), of("HEAD")).await);

    let host = || layer(Key::of(KeyPart::Host));
    for same in ["example.com", "EXAMPLE.com", "example.com:8080", "example.com."] {
        assert!(share(host(), with("host", "example.com"), with("host", same)).await, "{same}");
    }
    assert!(share(host(), with("host", "example.com"), plain("http://u@example.com:1/")).await);
    assert!(!share(host(), with("host", "example.com"), with("host", "example.org")).await);
    for malformed in
        [with("host", "example.com.."), with("host", "example.com,"), plain("http://example.com../")]
    {
        assert_eq!(send(&host(), malformed).await.status, 400);
    }

    let on = |route: &str| get("/x").extension(Route(Arc::from(route))).body(String::new()).unwrap();
    assert!(share(layer(Key::of(KeyPart::Route)), on("a"), on("a")).await);
    assert!(!share(layer(Key::of(KeyPart::Route)), on("a"), on("b")).await);
}

fn claims(subject: &str) -> Claims {
    Claims([("sub".to_owned(), subject.to_owned())].into())
}

/// A token is its subject, a dot and the reversed subject as the signature.
fn verify(request: &Parts) -> Option<Claims> {
    let token = request.headers.get("authorization")?.to_str().ok()?;
    let (subject, signature) = token.strip_prefix("Bearer ")?.split_once('.')?;
    subject.chars().rev().eq(signature.chars()).then(|| claims(subject))
}

#[tokio::test]
async fn verified_claims_are_keys() {
    let rule = || once(Key::of(KeyPart::Claim("sub".to_owned())));
    let given = |subject: &str| get("/").extension(claims(subject)).body(String::new()).unwrap();
    assert!(share(layer(rule().key), given("ab"), given("ab")).await);
    assert!(!share(layer(rule().key), given("ab"), given("cd")).await);

    let verifying = || RatekeeperLayer::builder().rule(rule()).claims(verify).build().unwrap();
    let token = |text: &str| with("authorization", &format!("Bearer {text}"));
    assert!(share(verifying(), token("ab.ba"), token("ab.ba")).await);
    assert!(!share(verifying(), token("ab.ba"), token("cd.dc")).await);
    assert!(share(verifying(), token("ab.ba"), given("ab")).await);
    // Requests with invalid tokens share the budget of their address.
    assert!(share(verifying(), token("ab.xx"), token("cd.xx")).await);
}

#[tokio::test]
async fn token_is_verified_once_and_only_if_a_rule_uses_a_claim() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let by_claim = |name: &str, claim: &str| {
        let when = When { paths: vec![Pattern::parse("/private").unwrap()], ..When::default() };
        Rule::new(name, hourly(9)).key(Key::of(KeyPart::Claim(claim.to_owned()))).when(when)
    };
    let builder = per_client(9).rule(by_claim("subjects", "sub")).rule(by_claim("plans", "plan"));
    let layer = builder.claims(move |request| {
        counted.fetch_add(1, Ordering::SeqCst);
        verify(request)
    });
    let layer = layer.build().unwrap();
    assert_eq!(statuses(&layer, [plain("/"), plain("/public")]).await, [200, 200]);
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    assert_eq!(statuses(&layer, [plain("/private")]).await, [200]);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn extractor_provides_custom_key_parts() {
    let tenant = |request: &Parts| {
        let user = request.headers.get("x-user")?.to_str().ok()?;
        Some(user.split_once('@')?.1.to_owned())
    };
    let rule = once(Key::of(KeyPart::Custom("tenant".to_owned())));
    let made: LayerBuilder = RatekeeperLayer::builder().rule(rule).extractor("tenant", tenant);
    let layer = made.build().unwrap();
    let user = |user: &str| with("x-user", user);
    let requests = [user("a@one"), user("b@one"), user("a@two"), user("nobody"), user("none")];
    assert_eq!(statuses(&layer, requests).await, [200, 429, 200, 200, 429]);
}

#[test]
fn key_part_without_extractor_is_an_error() {
    let tenant = || KeyPart::Custom("tenant".to_owned());
    let keys = [
        Key::of(tenant()),
        Key::of(KeyPart::Ip).and(tenant()),
        Key::of(KeyPart::header("x-user")).fallback(KeyFallback::Part(tenant())),
    ];
    for key in keys {
        let builder = || RatekeeperLayer::builder().rule(once(key.clone()));
        let error = builder().extractor("tenants", |_: &Parts| None).build().unwrap_err();
        assert_eq!(
            error.to_string(),
            "the key of the rule once has a part \"tenant\", but no extractor has that name; add it with \
             LayerBuilder::extractor"
        );
        assert!(builder().extractor("tenant", |_: &Parts| None).build().is_ok());
    }
}

#[tokio::test]
async fn a_global_key_is_one_budget_and_a_composite_one_for_each_combination() {
    assert!(share(layer(Key::global()), from("192.0.2.1", "/a"), from("192.0.2.2", "/b")).await);

    let both = || layer(Key::of(KeyPart::header("x-a")).and(KeyPart::header("x-b")));
    let pair = |a: &str, b: &str| get("/").header("x-a", a).header("x-b", b).body(String::new()).unwrap();
    assert!(share(both(), pair("1", "2"), pair("1", "2")).await);
    assert!(!share(both(), pair("1", "23"), pair("12", "3")).await);
    assert!(!share(both(), pair("1", "2"), pair("1", "3")).await);
}

#[tokio::test]
async fn missing_key_part_uses_the_fallback() {
    let user = || KeyPart::header("x-user");
    let key = |default| Key::of(user()).fallback(default);
    let (here, there) = (|| from("192.0.2.1", "/"), || from("192.0.2.2", "/"));

    // The default fallback is the address.
    assert!(share(layer(Key::of(user())), here(), here()).await);
    assert!(!share(layer(Key::of(user())), here(), there()).await);

    let literal = || layer(key(KeyFallback::Literal("anonymous".to_owned())));
    assert!(share(literal(), here(), there()).await);
    assert!(!share(literal(), here(), with("x-user", "anonymous")).await, "a name is not the lack of one");
    assert!(share(literal(), here(), with("x-user", "")).await, "an empty name is none");

    let part = || layer(key(KeyFallback::Part(KeyPart::Host)));
    let on = |host: &str| with("host", host);
    assert!(share(part(), on("a"), on("a")).await);
    assert!(!share(part(), on("a"), on("b")).await);

    let deny = layer(key(KeyFallback::Deny));
    assert_eq!(statuses(&deny, [here(), with("x-user", "a")]).await, [403, 200]);
    let skip = layer(key(KeyFallback::Skip));
    let requests = [here(), here(), with("x-user", "a"), with("x-user", "a")];
    assert_eq!(statuses(&skip, requests).await, [200, 200, 200, 429]);
}
