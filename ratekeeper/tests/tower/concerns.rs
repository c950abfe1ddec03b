//! Which requests a rule applies to, for any form of the path, and which requests are rejected before any rule is
//! checked.

use std::sync::Arc;

use http::{HeaderValue, Method, Request};
use ratekeeper::tower::client::parse_cidr;
use ratekeeper::tower::key::{Key, KeyFallback, KeyPart};
use ratekeeper::tower::path::{AmbiguousPathPolicy, PathNormalization, Pattern};
use ratekeeper::tower::rule::{Override, OverrideScope, Rule};
use ratekeeper::tower::when::{ValueCondition, When};
use ratekeeper::tower::{Claims, NonCanonicalPath, Peer, RatekeeperLayer, RuleSet};

use super::{get, hourly, ip, once, per_client, plain, send, statuses, with};

pub(super) fn methods(methods: &[&str]) -> When {
    When { methods: methods.iter().map(|it| (*it).to_owned()).collect(), ..When::default() }
}

fn paths(patterns: &[&str]) -> When {
    When { paths: patterns.iter().map(|it| Pattern::parse(it).unwrap()).collect(), ..When::default() }
}

/// A layer with a rule of one request per hour under this condition.
fn once_when(when: When) -> RatekeeperLayer {
    RatekeeperLayer::builder().rule(once(Key::global()).when(when)).build().unwrap()
}

/// Whether the rule applies to the request: then the response has rate limit headers.
async fn is_concerned(when: When, request: Request<String>) -> bool {
    let got = send(&once_when(when), request).await;
    assert_eq!(got.status, 200);
    got.header("ratelimit").is_some()
}

#[tokio::test]
async fn rule_applies_to_its_methods() {
    let when = || methods(&["POST", "PUT"]);
    let of = |method: Method| get("/").method(method).body(String::new()).unwrap();
    for (method, concerned) in
        [(Method::POST, true), (Method::PUT, true), (Method::GET, false), (Method::OPTIONS, false)]
    {
        assert_eq!(is_concerned(when(), of(method.clone())).await, concerned, "{method}");
    }
    // Without a condition, every method counts.
    let layer = once_when(When::default());
    assert_eq!(statuses(&layer, [of(Method::HEAD), of(Method::OPTIONS)]).await, [200, 429]);
}

#[tokio::test]
async fn rule_applies_to_all_forms_of_its_path() {
    for target in ["/login", "//login", "/x/../login", "/%6Cogin", "/login;a=b", "/./login?x=/../y"] {
        let layer = once_when(paths(&["/login"]));
        assert_eq!(statuses(&layer, [plain("/login"), plain(target)]).await, [200, 429], "{target}");
    }
    for target in ["/", "/log", "/login/x", "/Login"] {
        assert!(!is_concerned(paths(&["/login"]), plain(target)).await, "{target}");
    }
    assert!(is_concerned(paths(&["/a", "/users/{id}/**"]), plain("/users/7/posts")).await);
}

/// Patterns are parsed before the layer's path normalization is set. Without conversion they would match nothing.
#[tokio::test]
async fn patterns_use_the_path_normalization_of_the_layer() {
    let normalization =
        PathNormalization { ignore_case: true, decode_delimiters: true, ..PathNormalization::default() };
    let layer = |rule: Rule| RatekeeperLayer::builder().rule(rule).path_normalization(normalization).build();
    let long = format!("/{}", "é".repeat(500));
    for (pattern, target) in [
        ("/Login", "/LOGIN"),
        ("/login", "/Login"),
        ("/%40me/*", "/@ME/x"),
        (&long, &*long.replace('é', "%C3%A9")),
    ] {
        let login = layer(once(Key::global()).when(paths(&[pattern]))).unwrap();
        assert_eq!(statuses(&login, [plain(target), plain(target)]).await, [200, 429], "{pattern}");
    }
    let captured = Key::of(KeyPart::header("x-org"))
        .fallback(KeyFallback::Part(KeyPart::Path(Pattern::parse("/Orgs/{org}").unwrap())));
    let requests = ["/orgs/a", "/ORGS/A", "/orgs/b"].map(plain);
    assert_eq!(statuses(&layer(once(captured)).unwrap(), requests).await, [200, 429, 200]);
    let scope = OverrideScope::When(paths(&["/Free"]));
    let free = Rule { overrides: vec![Override { scope, limit: None }], ..once(Key::global()) };
    assert_eq!(statuses(&layer(free).unwrap(), [plain("/FREE"), plain("/free")]).await, [200, 200]);

    let keep = PathNormalization { ambiguous: AmbiguousPathPolicy::Keep, ..PathNormalization::default() };
    let never = When { paths: vec![Pattern::parse_with("/a%2Fb", keep).unwrap()], ..When::default() };
    let message = layer(once(Key::global()).when(never)).unwrap_err().to_string();
    assert!(message.starts_with("a pattern of the rule once matches no path: at byte 2: "), "{message}");
}

#[tokio::test]
async fn normalized_path_is_forwarded() {
    let layer = per_client(100).build().unwrap();
    for (came, goes_on) in [
        ("/a/b?x=1", "/a/b?x=1"),
        ("//a/./b/../c?x=%2F;y", "/a/c?x=%2F;y"),
        ("/%61;v=1/", "/a/"),
        ("http://example.com//a?b", "http://example.com/a?b"),
        ("/A/B/", "/A/B/"),
        ("/?", "/?"),
    ] {
        assert_eq!(send(&layer, plain(came)).await.body, goes_on, "{came}");
    }
    let options = get("*").method(Method::OPTIONS).body(String::new()).unwrap();
    assert_eq!(send(&layer, options).await.body, "*");

    // Letter case and trailing slashes are ignored by the rules only; the service receives them unchanged.
    let normalization =
        PathNormalization { ignore_case: true, ignore_trailing_slash: true, ..PathNormalization::default() };
    let layer = per_client(100).path_normalization(normalization).build().unwrap();
    assert_eq!(send(&layer, plain("//Users/7/")).await.body, "/Users/7/");
}

#[tokio::test]
async fn non_canonical_path_is_rejected_or_kept() {
    let layer = per_client(100).non_canonical_paths(NonCanonicalPath::Reject).build().unwrap();
    assert_eq!(statuses(&layer, [plain("/a/b"), plain("//a/b"), plain("/a/../b")]).await, [200, 400, 400]);
    let layer = per_client(100).non_canonical_paths(NonCanonicalPath::Keep).build().unwrap();
    assert_eq!(send(&layer, plain("//a/../b")).await.body, "//a/../b");
}

#[tokio::test]
async fn ambiguous_path_is_rejected_without_charge() {
    let layer = per_client(1).build().unwrap();
    for target in ["/a%2fb", "/a%5Cb", "/a%00", "/a%zz"] {
        let got = send(&layer, plain(target)).await;
        assert_eq!(got.status, 400, "{target}");
        assert_eq!(got.header("content-type"), Some("application/problem+json"));
        assert!(got.body.contains(r#""detail":"the path has "#), "{}", got.body);
    }
    // Rejected requests are not charged.
    assert_eq!(send(&layer, plain("/")).await.status, 200);

    let normalization =
        PathNormalization { ambiguous: AmbiguousPathPolicy::Keep, ..PathNormalization::default() };
    let layer = per_client(1).path_normalization(normalization).build().unwrap();
    let got = send(&layer, plain("/a%2fb")).await;
    assert_eq!((got.status, got.body.as_str()), (200, "/a%2Fb"));
}

#[tokio::test]
async fn path_too_long_after_normalization_is_rejected() {
    let normalization =
        PathNormalization { ambiguous: AmbiguousPathPolicy::Keep, ..PathNormalization::default() };
    let layer = per_client(1).path_normalization(normalization).build().unwrap();
    // Each `%` becomes three bytes (`%25`).
    let got = send(&layer, plain(&format!("/{}", "%".repeat(30_000)))).await;
    assert_eq!(got.status, 400, "{}", got.body);
}

#[tokio::test]
async fn rule_applies_to_its_hosts() {
    let when =
        || When { hosts: vec!["example.com".to_owned(), "*.example.org".to_owned()], ..When::default() };
    for (host, concerned) in [
        ("example.com", true),
        ("EXAMPLE.com:8080", true),
        ("example.com.", true),
        ("a.example.com", false),
        ("a.b.example.org", true),
        ("example.org", false),
        ("[::1]:80", false),
    ] {
        assert_eq!(is_concerned(when(), with("host", host)).await, concerned, "{host}");
    }
    for (host, concerned) in [("example.com", true), ("EXAMPLE.com.:80", true)] {
        let target = get("http://example.com/").header("host", host).body(String::new()).unwrap();
        assert_eq!(is_concerned(when(), target).await, concerned, "{host}");
    }
    assert!(is_concerned(when(), plain("http://Example.com:8080/")).await);
}

/// Services read either the target or the `Host` header: the rules and the service must not see different hosts.
#[tokio::test]
async fn different_hosts_in_target_and_header_are_rejected() {
    let layer = once_when(When { hosts: vec!["example.com".to_owned()], ..When::default() });
    for (target, host) in [
        ("http://other.com/", "example.com"),
        ("http://example.com/", "other.com"),
        ("http://example.com/", ""),
        ("http://[::1]/", "example.com:80"),
    ] {
        let got = send(&layer, get(target).header("host", host).body(String::new()).unwrap()).await;
        assert_eq!(got.status, 400, "{target} and {host}");
        assert!(got.body.contains("the target and the header host name two hosts; send one"), "{}", got.body);
    }
    let same = get("http://[::1]:80/").header("host", "[::1]").body(String::new()).unwrap();
    assert_eq!(send(&layer, same).await.status, 200);
}

#[tokio::test]
async fn rule_applies_to_its_headers_clients_and_claims() {
    let header = |wanted| When { headers: vec![("x-plan".to_owned(), wanted)], ..When::default() };
    let gold = || ValueCondition::OneOf(vec!["gold".to_owned(), "silver".to_owned()]);
    assert!(is_concerned(header(gold()), with("X-Plan", "silver")).await);
    assert!(!is_concerned(header(gold()), with("x-plan", "lead")).await);
    assert!(is_concerned(header(ValueCondition::Present), with("x-plan", "lead")).await);
    assert!(!is_concerned(header(ValueCondition::Present), plain("/")).await);
    assert!(is_concerned(header(ValueCondition::Absent), plain("/")).await);

    let claim = || When { claims: vec![("plan".to_owned(), gold())], ..When::default() };
    let claims = |plan: &str| Claims([("plan".to_owned(), plan.to_owned())].into());
    assert!(is_concerned(claim(), get("/").extension(claims("gold")).body(String::new()).unwrap()).await);
    assert!(!is_concerned(claim(), get("/").extension(claims("tin")).body(String::new()).unwrap()).await);
    assert!(!is_concerned(claim(), plain("/")).await);

    let clients = || When { clients: vec![parse_cidr("192.0.2.0/24").unwrap()], ..When::default() };
    assert!(is_concerned(clients(), plain("/")).await);
    let elsewhere = Request::get("/").extension(Peer([198, 51, 100, 1].into())).body(String::new()).unwrap();
    assert!(!is_concerned(clients(), elsewhere).await);
}

#[tokio::test]
async fn repeated_key_or_host_header_is_rejected() {
    let layer = RatekeeperLayer::builder().rule(once(Key::of(KeyPart::header("X-User")))).build().unwrap();
    let mut twice = with("x-user", "alice");
    twice.headers_mut().append("x-user", HeaderValue::from_static("bob"));
    let got = send(&layer, twice).await;
    assert_eq!(got.status, 400);
    assert!(got.body.contains("the header x-user is there twice; send it once"), "{}", got.body);
    assert_eq!(statuses(&layer, [with("x-user", "alice"), with("x-user", "bob")]).await, [200, 200]);

    let mut hosts = with("host", "a.example");
    hosts.headers_mut().append("host", HeaderValue::from_static("b.example"));
    let got = send(&layer, hosts).await;
    assert!(got.status == 400 && got.body.contains("the header host is there twice"), "{got:?}");
}

#[tokio::test]
async fn unknown_peer_fails_only_rules_that_need_it() {
    let nowhere = || Request::get("/").body(String::new()).unwrap();
    let got = send(&per_client(1).build().unwrap(), nowhere()).await;
    assert_eq!(got.status, 500);
    assert!(got.body.contains("does not know the peer address"), "{}", got.body);
    assert!(got.body.contains("LayerBuilder::peer"), "{}", got.body);

    let by_header =
        RatekeeperLayer::builder().rule(once(Key::of(KeyPart::header("x-user")))).build().unwrap();
    let named = || Request::get("/").header("x-user", "a").body(String::new()).unwrap();
    assert_eq!(statuses(&by_header, [named(), named(), nowhere()]).await, [200, 429, 500]);
    assert_eq!(statuses(&once_when(When::default()), [nowhere(), nowhere()]).await, [200, 429]);
}

#[tokio::test]
async fn peer_is_found_in_extensions() {
    let layer = per_client(1).build().unwrap();
    let request = || Request::get("/");
    let address = std::net::SocketAddr::new(super::CLIENT, 4711);
    let requests = [
        request().extension(Peer(super::CLIENT)),
        request().extension(super::CLIENT),
        request().extension(address),
        request().extension(Peer("::ffff:192.0.2.7".parse().unwrap())),
        request().extension(Peer([192, 0, 2, 8].into())),
    ];
    let requests = requests.map(|it| it.body(String::new()).unwrap());
    assert_eq!(statuses(&layer, requests).await, [200, 429, 429, 429, 200]);
}

#[tokio::test]
async fn router_selects_rules() {
    let rules = ["a", "b", "c"].map(|name| Rule::new(name, hourly(9)).key(ip()));
    let layer = rules.into_iter().fold(RatekeeperLayer::builder(), |it, rule| it.rule(rule)).build().unwrap();
    let rules_of = async |rules: &[usize]| {
        let request = get("/").extension(RuleSet(Arc::from(rules))).body(String::new()).unwrap();
        let got = send(&layer, request).await;
        let policies = got.header("ratelimit-policy").unwrap_or_default().to_owned();
        policies.split(", ").map(|it| it.split(';').next().unwrap().replace('"', "")).collect::<String>()
    };
    assert_eq!(rules_of(&[1]).await, "b");
    assert_eq!(rules_of(&[]).await, "");
    // Duplicates and unknown indices cause neither a panic nor an unlimited request.
    assert_eq!(rules_of(&[2, 0, 2, 77]).await, "ac");
}
