//! The shipped examples are valid, and decide as their comments state.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use ratekeeper::{Charge, Limiter, ManualClock, Memory, Time};
use ratekeeper_config::{Config, Store};
use ratekeeper_core::{FailurePolicy, Limit};
use ratekeeper_rules::path::normalize;

#[path = "../../fuzz/properties/synthetic_request.rs"]
mod synthetic_request;

use self::synthetic_request::SyntheticRequest;
use crate::common::{EXAMPLES, examples, read};

fn example(name: &str) -> Config {
    let yaml = std::fs::read_to_string(format!("{EXAMPLES}/{name}.yaml")).unwrap();
    read(&yaml).unwrap_or_else(|errors| panic!("{}", errors.in_file(name)))
}

impl SyntheticRequest {
    fn post(path: &str) -> SyntheticRequest {
        SyntheticRequest {
            method: "POST".to_owned(),
            host: "example.com".to_owned(),
            path: path.to_owned(),
            query: String::new(),
            headers: Vec::new(),
            client: [192, 0, 2, 1].into(),
            route: String::new(),
            claims: Vec::new(),
            customs: Vec::new(),
        }
    }

    fn with(mut self, name: &str, value: &str) -> SyntheticRequest {
        self.headers.push((name.to_owned(), value.as_bytes().to_vec()));
        self
    }

    fn from(self, client: [u8; 4]) -> SyntheticRequest {
        SyntheticRequest { client: client.into(), ..self }
    }
}

/// The limits of a file, with a manual clock.
struct TestLimits {
    config: Config,
    clock: ManualClock,
    limiter: Limiter<Memory<ManualClock>>,
}

impl TestLimits {
    fn new(config: Config) -> TestLimits {
        // Noon on a Tuesday: far from the boundaries of a clock day and a clock week.
        let clock = ManualClock::new(Time::from_secs(1_700_000_000 - 1_700_000_000 % 86_400 + 43_200));
        let limits: Vec<Limit> = config.rules.limits().iter().map(|kept| kept.limit.clone()).collect();
        let (first, rest) = limits.split_first().unwrap();
        let builder =
            rest.iter().cloned().fold(Limiter::builder(first.clone()), |builder, limit| builder.and(limit));
        let limiter = builder.max_keys(1_000).clock(clock.clone()).build().unwrap();
        TestLimits { config, clock, limiter }
    }

    fn allows(&self, request: &SyntheticRequest) -> bool {
        let Ok(charge_list) = self.config.rules.charges_for(request, 0..self.config.named_limits) else {
            return false;
        };
        let charges = charge_list.charges.iter().map(|charge| Charge {
            limit: charge.limit,
            key: self.limiter.key(charge_list.key(charge)),
            cost: charge.cost,
        });
        let verdict = self.limiter.charge(&charges.collect::<Vec<_>>()).unwrap();
        verdict.decisions().iter().all(|decision| decision.allowed)
    }

    /// The number of allowed requests out of `count`.
    fn passing(&self, count: usize, request: &SyntheticRequest) -> usize {
        (0..count).filter(|_| self.allows(request)).count()
    }

    fn wait(&self, seconds: u64) {
        self.clock.advance(Duration::from_secs(seconds));
    }
}

const DAY: u64 = 86_400;

#[test]
fn every_example_is_valid() {
    assert!(examples().len() >= 3);
    for (name, yaml) in examples() {
        let config = read(&yaml).unwrap_or_else(|errors| panic!("{}", errors.in_file(&name)));
        assert!(config.warnings.is_empty(), "{name}: {:?}", config.warnings);
        assert!(yaml.contains("ratekeeper validate examples/"), "{name} does not say how it is checked");
    }
}

/// Pages run the gateway example and the API example at the same time.
#[test]
fn examples_bind_each_address_once() {
    let bound = |name: &str| -> Vec<SocketAddr> {
        let config = example(name);
        let listeners = config.gateway.into_iter().flat_map(|gateway| gateway.listeners);
        let mut bound: Vec<_> = listeners.map(|listener| listener.address).collect();
        bound.extend(config.admin.map(|admin| admin.listen));
        bound.extend(config.apis.all().map(|(_, _, api)| api.listen));
        bound
    };
    for files in [&["everything"][..], &["study-guide"], &["gateway", "apis"]] {
        let all: Vec<_> = files.iter().flat_map(|name| bound(name)).collect();
        let distinct: BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len(), "{files:?}: {all:?}");
    }
    assert_eq!(bound("everything").len(), 7);
}

#[test]
fn two_posts_a_second_per_user() {
    let limits = TestLimits::new(example("social"));
    let (ann, bob) = (
        SyntheticRequest::post("/posts").with("x-user-id", "ann"),
        SyntheticRequest::post("/posts").with("x-user-id", "bob"),
    );
    assert_eq!(limits.passing(3, &ann), 2);
    assert_eq!(limits.passing(3, &bob), 2);
    limits.clock.advance(Duration::from_millis(999));
    assert!(!limits.allows(&ann));
    limits.clock.advance(Duration::from_millis(1));
    assert_eq!(limits.passing(3, &ann), 2);
}

#[test]
fn ten_accounts_a_day_per_address() {
    let limits = TestLimits::new(example("social"));
    let (here, there) =
        (SyntheticRequest::post("/accounts"), SyntheticRequest::post("/accounts").from([192, 0, 2, 2]));
    assert_eq!(limits.passing(11, &here), 10);
    // A different user at the same address uses the same budget.
    assert!(!limits.allows(&here.clone().with("x-user-id", "somebody")));
    assert_eq!(limits.passing(11, &there), 10);
    limits.wait(DAY / 2 - 1);
    assert!(!limits.allows(&here));
    limits.wait(1);
    assert_eq!(limits.passing(11, &here), 10);
}

#[test]
fn five_rewards_a_week_per_device() {
    let limits = TestLimits::new(example("social"));
    let device = SyntheticRequest::post("/rewards").with("x-device-id", "phone");
    assert_eq!(limits.passing(6, &device), 5);
    assert_eq!(limits.passing(6, &SyntheticRequest::post("/rewards").with("x-device-id", "tablet")), 5);
    assert_eq!(limits.passing(6, &SyntheticRequest::post("/rewards")), 0);
    limits.wait(7 * DAY - 1);
    assert!(!limits.allows(&device));
    limits.wait(1);
    assert_eq!(limits.passing(6, &device), 5);
}

#[test]
fn one_bucket_per_endpoint_and_user() {
    let limits = TestLimits::new(example("social"));
    for (path, count) in [("/trial/posts", 1), ("/trial/friends", 150), ("/trial/likes", 5)] {
        for user in ["ann", "bob"] {
            assert_eq!(
                limits.passing(count + 1, &SyntheticRequest::post(path).with("x-user-id", user)),
                count,
                "{path}"
            );
        }
    }
    limits.wait(DAY / 5);
    for (path, count) in [("/trial/posts", 0), ("/trial/friends", 30), ("/trial/likes", 1)] {
        assert_eq!(
            limits.passing(count + 1, &SyntheticRequest::post(path).with("x-user-id", "ann")),
            count,
            "{path}"
        );
    }
}

#[test]
fn gateway_example_limits_users_and_shares_the_anonymous_budget() {
    let config = example("gateway");
    let gateway = config.gateway.clone().unwrap();
    let [listener] = gateway.listeners.as_slice() else { panic!("{gateway:?}") };
    assert_eq!(listener.address.to_string(), "127.0.0.1:8080");
    let [route] = gateway.routes.as_slice() else { panic!("{gateway:?}") };
    assert_eq!((&*route.id, &*route.limits), ("api-route", &[0][..]));
    assert_eq!(gateway.upstreams[route.upstream].name, "http://127.0.0.1:8081");
    assert!(
        route.when.fits(&SyntheticRequest::post("/api/users"))
            && route.when.fits(&SyntheticRequest::post("/api"))
    );
    assert!(!route.when.fits(&SyntheticRequest::post("/apis")));
    assert!(matches!(config.store, Store::Memory { .. }));

    let limits = TestLimits::new(config);
    assert_eq!(limits.passing(11, &SyntheticRequest::post("/api").with("x-user-id", "ann")), 10);
    assert_eq!(limits.passing(5, &SyntheticRequest::post("/api")), 5);
    assert_eq!(limits.passing(6, &SyntheticRequest::post("/api").from([192, 0, 2, 2])), 5);
    // A user with the name of the fallback has a separate budget.
    assert!(limits.allows(&SyntheticRequest::post("/api").with("x-user-id", "anonymous")));
}

#[test]
fn everything_example_is_read_with_all_settings() {
    let config = example("everything");
    let Store::Redis(redis) = &config.store else { panic!("{:?}", config.store) };
    assert_eq!(redis.address.reveal(), "redis://ratekeeper:hunter2@127.0.0.1:6379");
    assert_eq!(redis.secret.as_ref().unwrap().reveal(), "correct horse battery staple");
    assert_eq!(redis.failure, FailurePolicy::Local { instances: 3 });
    let rules: Vec<_> = config.rules.rules().take(config.named_limits).collect();
    let [user, work, login, planned, bytes] = rules.as_slice() else { panic!("{rules:?}") };
    assert_eq!((user.overrides.len(), user.lease.map(|lease| lease.max)), (3, Some(5)));
    assert!(user.overrides[2].limit.is_none() && work.lease.is_none());
    assert_eq!((login.allow.clients.len(), login.deny.clients.len()), (2, 2));
    assert_eq!(
        (login.on_store_failure, login.ban.map(|ban| ban.after)),
        (Some(FailurePolicy::Closed), Some(20))
    );
    assert!(planned.is_shadow && !bytes.is_shadow);
    assert_eq!((config.responses.jitter_secs, config.responses.headers.name()), (5, "ietf"));
    assert_eq!(config.jwt.as_ref().unwrap().algorithms, ["EdDSA"]);
    assert_eq!((config.concurrency[0].max, config.concurrency[0].policy.as_str()), (20, "at-once"));
    let [edge] = config.domains.as_slice() else { panic!("{:?}", config.domains) };
    let files = edge.find(&[("remote_address", "192.0.2.9"), ("path", "/files/a")]).unwrap().descriptor;
    assert_eq!(
        (files.name.as_deref(), &*files.replaces, files.shares),
        (Some("files"), &["per-address".into()][..], true)
    );
    assert_eq!(config.rules.rules().len(), config.named_limits + 5);
    let gateway = config.gateway.as_ref().unwrap();
    let [upload, users, partners, others] = gateway.routes.as_slice() else { panic!("{gateway:?}") };
    assert_eq!((&*others.limits, &*others.concurrency), (&[0, 1, 2, 3][..], &[][..]));
    assert_eq!(
        (&*upload.limits, &*upload.concurrency, upload.max_in_flight),
        (&[0, 1, 4][..], &[0][..], Some(500))
    );
    assert!(partners.limits.is_empty() && partners.concurrency.is_empty());
    assert_eq!((&*users.limits, users.is_critical), (&[0][..], true));
    let token = &users.request_headers.set[0];
    assert_eq!((&*token.0, token.1.reveal()), ("authorization", "Bearer hunter2"));
    let names: Vec<&str> = gateway.upstreams.iter().map(|upstream| upstream.name.as_str()).collect();
    assert_eq!(names, ["files", "users", "http://127.0.0.1:8081"]);
    assert_eq!(gateway.listeners.iter().filter(|listener| listener.tls.is_some()).count(), 1);
    // The named segments of a path form the key.
    let limits = TestLimits::new(config);
    let own = |path| SyntheticRequest::post(path).with("x-api-key", "k");
    assert!(limits.allows(&own("/files/ann/a")) && limits.allows(&own("/files/bob/a")));
    assert!(!limits.allows(&SyntheticRequest::post("/files/ann/a")));
}

#[test]
fn debug_output_contains_no_secrets() {
    let printed = format!("{:?}", example("everything"));
    for secret in ["hunter2", "correct horse", "11qYAYKxCrfVS"] {
        assert!(!printed.contains(secret), "{printed}");
    }
}

#[test]
fn route_has_all_limits_or_none() {
    let yaml = "
limits: { a: { token_bucket: }, b: { token_bucket: } }
gateway:
  routes: [{ id: all, limits: all, upstream: http://h }, { id: none, path: /b, upstream: http://h, limits: none }]";
    let routes = read(yaml).unwrap().gateway.unwrap().routes;
    assert_eq!((&*routes[0].limits, &*routes[1].limits), (&[0, 1][..], &[][..]));
}

/// Overrides and lists match the values of the key.
#[test]
fn overrides_and_lists_match_keys() {
    for (key, named, request) in [
        ("{ header: X-User-Id }", "ann", SyntheticRequest::post("/").with("x-user-id", "ann")),
        ("{ path: '/users/{id}/**' }", "7", SyntheticRequest::post("/users/7/posts")),
        ("{ path: 2 }", "7", SyntheticRequest::post("/users/7/posts")),
        ("host", "EXAMPLE.com", SyntheticRequest::post("/")),
        ("method", "POST", SyntheticRequest::post("/")),
    ] {
        let yaml =
            |list: &str| format!("limits: {{ a: {{ key: {key}, fixed_window: {{ limit: 1 }}, {list} }} }}");
        let overridden = yaml(&format!("overrides: {{ key: '{named}', unlimited: true }}"));
        assert_eq!(TestLimits::new(read(&overridden).unwrap()).passing(3, &request), 3, "{key}");
        assert_eq!(
            TestLimits::new(read(&yaml(&format!("allow: '{named}'"))).unwrap()).passing(3, &request),
            3,
            "{key}"
        );
        assert_eq!(
            TestLimits::new(read(&yaml(&format!("deny: '{named}'"))).unwrap()).passing(3, &request),
            0,
            "{key}"
        );
        assert_eq!(TestLimits::new(read(&yaml("deny: other")).unwrap()).passing(3, &request), 1, "{key}");
    }
}

/// Keys use normalized path segments, and lists may contain other forms of them. Without normalization, a `deny`
/// entry would match nothing.
#[test]
fn listed_path_segments_are_normalized() {
    for (case, named, came) in [
        ("exact", "café", "/orgs/caf%C3%A9/x"),
        ("exact", "caf%c3%a9", "/orgs/café/x"),
        ("exact", "a b", "/orgs/a%20b/x"),
        ("exact", "@me", "/orgs/%40me/x"),
        ("ignore", "Acme", "/orgs/Acme/x"),
        ("ignore", "ACME", "/orgs/acme/x"),
    ] {
        for key in ["{ path: '/orgs/{org}/**', fallback: Acme }", "{ path: 2, fallback: Acme }"] {
            let yaml = format!(
                "paths: {{ case: {case} }}\nlimits: {{ a: {{ key: {key}, fixed_window: {{ limit: 1 }}, deny: ['{named}'] }} }}"
            );
            let config = read(&yaml).unwrap_or_else(|errors| panic!("{errors}"));
            let path = normalize(came, config.paths).unwrap().into_owned();
            let is_allowed = |path: &str| {
                let request = SyntheticRequest { path: path.to_owned(), ..SyntheticRequest::post("") };
                config.rules.charges_for(&request, [0]).is_err()
            };
            assert!(is_allowed(&path), "{named} is {came}");
            assert!(!is_allowed("/orgs/other/x"), "{named}");
            // A fallback literal is compared as written.
            assert_eq!(is_allowed("/"), named == "Acme", "{named}");
        }
    }
}

/// Names that YAML could read as other types, and repetition by anchors and merge keys.
#[test]
fn names_are_text_and_anchors_work() {
    let yaml = "\u{feff}# with a byte order mark\r\nlimits:\r\n  no: &usual { key: { header: X-User-Id }, fixed_window: { limit: 3 } }\r\n  5: *usual\r\n  off:\r\n    <<: *usual\r\n    shadow: true\r\n  1e3: { fixed_window: &size { limit: 007 } }\r\n  0x10: { fixed_window: *size }\r\n";
    let config = read(yaml).unwrap_or_else(|errors| panic!("{errors}"));
    let names: Vec<&str> = config.names.iter().map(|name| name.as_str()).collect();
    assert_eq!(names, ["no", "5", "off", "1e3", "0x10"]);
    let limits: Vec<u32> = config.rules.rules().map(|rule| rule.limit.limit()).collect();
    assert_eq!(limits, [3, 3, 3, 7, 7]);
    assert!(config.rules.rule(2).is_shadow);
}

/// Every `yaml` block of README.md and docs/ that is a configuration or a list of limits is valid.
#[test]
fn documented_configurations_are_valid() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let docs = std::fs::read_dir(format!("{root}/docs")).unwrap().map(|file| file.unwrap().path());
    let pages = docs.chain([format!("{root}/README.md").into()]);
    let (mut files, mut limits) = (0, 0);
    for page in pages.filter(|path| path.extension().is_some_and(|it| it == "md")) {
        let text = std::fs::read_to_string(&page).unwrap();
        for block in text.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            if ["limits:", "domains:", "apis:"]
                .iter()
                .any(|name| block.lines().any(|it| it.starts_with(name)))
            {
                let name = page.display().to_string();
                read(block).unwrap_or_else(|errors| panic!("{}", errors.in_file(&name)));
                files += 1;
            } else if block.starts_with("token_bucket:") {
                for line in block.lines() {
                    ratekeeper_config::parse_limit(line).unwrap_or_else(|error| panic!("{error}"));
                    limits += 1;
                }
            }
        }
    }
    assert!(files >= 6 && limits >= 5, "{files} files and {limits} limits");
}
