//! Keys: whose budget a request uses.

use proptest::collection::vec;
use proptest::prelude::*;
use ratekeeper_rules::client::Grouping;
use ratekeeper_rules::key::{Key, KeyFallback, KeyPart, NoKey};
use ratekeeper_rules::path::Pattern;

use crate::rules::key_property;
use crate::rules::request_builder::{SyntheticRequest, test_request};

fn key_of(key: &Key, request: &SyntheticRequest) -> Result<Vec<u8>, NoKey> {
    let mut text = Vec::new();
    key.write(request, &mut text).map(|()| text)
}

fn header() -> KeyPart {
    KeyPart::header("X-User")
}

fn cookie() -> KeyPart {
    KeyPart::Cookie("session".to_owned())
}

fn query() -> KeyPart {
    KeyPart::Query("api key".to_owned())
}

fn captures(pattern: &str) -> KeyPart {
    KeyPart::Path(Pattern::parse(pattern).unwrap())
}

/// The name of a part, the part, requests that have it, each with its value as text, and requests that do not.
type Row = (&'static str, KeyPart, Vec<(&'static str, SyntheticRequest)>, Vec<SyntheticRequest>);

/// A row for each part.
fn table() -> Vec<Row> {
    let user = |value: &str| test_request().header("x-user", value);
    let cookies = |line: &str| test_request().header("cookie", line);
    let path = |path: &str| test_request().target(path);
    vec![
        (
            "ip",
            KeyPart::Ip,
            vec![
                ("203.0.113.7", test_request()),
                ("1.2.3.4", test_request().with_client("1.2.3.4")),
                ("1.2.3.4", test_request().with_client("::ffff:1.2.3.4")),
                ("1.2.3.4", test_request().with_client("64:ff9b::1.2.3.4")),
                ("2001:db8::", test_request().with_client("2001:db8::1")),
                ("2001:db8::", test_request().with_client("2001:db8::ffff:2")),
                ("2001:db8:0:1::", test_request().with_client("2001:db8:0:1::1")),
            ],
            vec![],
        ),
        (
            "header",
            header(),
            vec![
                ("ann", user("ann")),
                ("ann", user(" ann\t")),
                ("ann", user("\u{a0}ann\u{85}")),
                ("ann", test_request().header("x-user", b"ann\xa0")),
                ("Ann", user("Ann")),
                ("a, b", user("a, b")),
            ],
            vec![
                test_request(),
                user(""),
                user(" \t"),
                user("\u{a0}"),
                test_request().header("x-user-id", "ann"),
            ],
        ),
        (
            "credentials",
            KeyPart::header("Authorization"),
            vec![
                ("Bearer Ann", test_request().header("authorization", "Bearer Ann")),
                ("Bearer Ann", test_request().header("authorization", " bEARER \t Ann ")),
                ("Bearer Ann", test_request().header("authorization", "Bearer \u{a0}Ann\u{2003}")),
                ("Bearer ann", test_request().header("authorization", "Bearer ann")),
                ("Ann", test_request().header("authorization", "Ann")),
                ("Basic VkFMSUQ6cA==", test_request().header("authorization", "Basic VkFMSUQ6cA==")),
                ("Basic VkFMSUQ6cA==", test_request().header("authorization", "bASIC  VkFMSUQ6cA== ")),
                ("Basic VkFMSUQ6cGE=", test_request().header("authorization", "Basic VkFMSUQ6cGE=")),
                ("Basic VkFMSUQ6cGFw", test_request().header("authorization", "Basic VkFMSUQ6cGFw")),
                ("Bearer VkFMSUQ6cA", test_request().header("authorization", "Bearer VkFMSUQ6cA")),
                ("ann", test_request().header("authorization", "ann")),
            ],
            vec![test_request(), user("ann"), test_request().header("authorization", " ")],
        ),
        (
            "cookie",
            cookie(),
            vec![
                ("ann", cookies("session=ann")),
                ("ann", cookies("session=\"ann\"")),
                ("ann", cookies("session=%61n%6E")),
                ("ann", cookies("session=\"%61nn\"")),
                ("ann", cookies(r#"session="\141\n\156""#)),
                ("a+b", cookies("session=a+b")),
                ("a+b", cookies("session=a%2bb")),
                ("a\"b", cookies("session=a\"b")),
                ("a\"b", cookies(r#"session="a\"b""#)),
                (r"\141\", cookies(r"session=\141\")),
                (r"9\", cookies(r#"session="\9\\""#)),
                ("ann", cookies("a=b;session = ann ; c=d")),
                ("ann", test_request().header("cookie", "a=b").header("cookie", "session=ann")),
                ("a=b", cookies("session=a=b")),
                ("Ann", cookies("session=Ann; xsession=eve; session")),
                ("ann", cookies("session=ann%20")),
                ("ann", cookies("SESSION=ann;=ann;;")),
                ("ann", cookies("s%65ssion=ann")),
                ("ann", cookies("session[]=ann")),
                ("ann", cookies("[session]=ann")),
                (
                    "ann",
                    cookies(
                        r#"until=Wed, 21 Oct 2026 07:28:00 GMT; prefs={"a": 1, "session": 2}; session=ann"#,
                    ),
                ),
                ("ann", cookies("from=https://a.test/?session=x, y=z; session=ann; q=a b=c, d")),
                ("a b", cookies("session=a%20b")),
                ("a, b", cookies(r#"session="a, b""#)),
                ("a, b", cookies("session=a%2c%20b")),
            ],
            vec![
                test_request(),
                cookies("session="),
                cookies("session=\"\""),
                cookies("session"),
                cookies(""),
                cookies("essions=ann;=ann;;"),
            ],
        ),
        (
            "query",
            query(),
            vec![
                ("ann", path("/?api%20key=ann")),
                ("ann", path("/?a=b&api+key=%61n%6E&c")),
                ("a b", path("/?api+key=a+b")),
                ("a b", path("/?api%20key=a%20b")),
                ("a+b", path("/?api+key=a%2Bb")),
                ("%zz%", path("/?api+key=%zz%")),
                ("%zz%", path("/?api+key=%25zz%25")),
                ("a=b", path("/?api+key=a=b")),
                // Spellings that servers merge.
                ("ann", path("/?api+key=ann;n=1")),
                ("ann", path("/?n=1;api+key=ann")),
                ("ann", path("/?api.key=ann")),
                ("ann", path("/?api-key=ann")),
                ("ann", path("/?api_key=ann")),
                ("ann", path("/?api%5Bkey=ann")),
                ("ann", path("/?api[key=ann")),
                ("ann", path("/?+api_key=ann")),
                ("ann", path("/?api_key%00x=ann")),
                ("ann", path("/?api_key[]=ann")),
                ("ann", path("/?[api_key]=ann")),
                ("ann", path("/?[[api_key]][x]=ann")),
                ("ann", path("/?%5Bapi_key=ann")),
                ("ann", path("/?api_key]=ann")),
                ("ann", path("/?API+KEY=ann")),
                ("ann", path("/?api_key=ann%C2%A0&a.b=c")),
                ("ann", path("/?api_key=%A0ann")),
            ],
            vec![
                test_request(),
                path("/?api+key="),
                path("/?api+key=%C2%85"),
                path("/?api+key"),
                path("/?apikey=ann&api_key2=ann&xapi_key=ann"),
                path("/?&&=ann&"),
            ],
        ),
        (
            "segment",
            KeyPart::Segment(2),
            vec![("7", path("/users/7")), ("7", path("/users/7/posts")), ("7", path("//users/./%37;a=b/"))],
            vec![test_request(), path("/users"), path("/users/")],
        ),
        (
            "path",
            captures("/users/{id}/**"),
            vec![("7", path("/users/7")), ("7", path("/users/7/posts")), ("8", path("/users/8"))],
            vec![test_request(), path("/users/"), path("/groups/7")],
        ),
        (
            "path of two",
            captures("/{org}/repos/{repo}"),
            vec![("a/b", path("/a/repos/b")), ("b/a", path("/b/repos/a"))],
            vec![test_request(), path("/a/repos/"), path("/a/b")],
        ),
        (
            "path of none",
            captures("/api/**"),
            vec![("", path("/api")), ("", path("/api/x"))],
            vec![test_request()],
        ),
        (
            "method",
            KeyPart::Method,
            vec![
                ("GET", test_request()),
                ("POST", test_request().with_method("POST")),
                ("POST", test_request().with_method("post")),
            ],
            vec![],
        ),
        (
            "host",
            KeyPart::Host,
            vec![
                ("example.com", test_request()),
                ("example.com", test_request().for_host("EXAMPLE.com")),
                ("example.com", test_request().for_host("example.com.")),
                ("example.com", test_request().for_host("example.com:443")),
                ("example.com", test_request().for_host("Example.Com.:443")),
                ("[::1]", test_request().for_host("[::1]:443")),
                ("[::1]", test_request().for_host("[::1]")),
                ("::1", test_request().for_host("::1")),
                ("api.example.com", test_request().for_host("api.example.com")),
            ],
            vec![test_request().for_host(""), test_request().for_host(":80"), test_request().for_host(".")],
        ),
        ("route", KeyPart::Route, vec![("api", test_request().on_route("api"))], vec![test_request()]),
        (
            "claim",
            KeyPart::Claim("sub".to_owned()),
            vec![("ann", test_request().claim("sub", "ann"))],
            vec![test_request(), test_request().claim("sub", ""), test_request().claim("name", "ann")],
        ),
        (
            "custom",
            KeyPart::Custom("tenant".to_owned()),
            vec![("acme", test_request().custom("tenant", "acme"))],
            vec![test_request(), test_request().custom("tenant", ""), test_request().custom("other", "acme")],
        ),
    ]
}

#[test]
fn requests_share_a_budget_iff_they_have_the_same_value() {
    for (what, part, present, _) in table() {
        let key = Key::of(part).fallback(KeyFallback::Deny);
        for (one, request) in &present {
            let written = key_of(&key, request).unwrap_or_else(|why| panic!("{what}: {why}: {request:?}"));
            for (other, other_request) in &present {
                let other_written = key_of(&key, other_request).unwrap();
                assert_eq!(one == other, written == other_written, "{what}: {request:?}, {other_request:?}");
                assert_eq!(key.is(&written, other), one == other, "{what}: {other:?} of {request:?}");
            }
        }
    }
}

#[test]
fn request_without_the_part_uses_the_fallback() {
    for (what, part, present, missing) in table() {
        for request in &missing {
            let key = |otherwise| key_of(&Key::of(part.clone()).fallback(otherwise), request);
            assert_eq!(key(KeyFallback::Deny), Err(NoKey::Denied), "{what}: {request:?}");
            assert_eq!(key(KeyFallback::Skip), Err(NoKey::Skipped), "{what}: {request:?}");

            // The literal is one budget for all of them, and no request can choose it.
            let literal = |text: &str| KeyFallback::Literal(text.to_owned());
            assert_eq!(
                key(literal("ann")),
                key_of(&Key::of(header()).fallback(literal("ann")), &test_request())
            );
            for (text, other) in &present {
                let shared = Key::of(part.clone()).fallback(literal(text));
                assert_ne!(key(literal(text)).unwrap(), key_of(&shared, other).unwrap(), "{what}: {other:?}");
            }

            // The default fallback is the address.
            let by_default = Key::of(part.clone());
            assert_eq!(key_of(&by_default, request), key(KeyFallback::Part(KeyPart::Ip)), "{what}");
            let elsewhere = request.clone().with_client("198.51.100.1");
            assert_ne!(key_of(&by_default, request), key_of(&by_default, &elsewhere), "{what}");
        }
    }
}

#[test]
fn duplicate_parts_are_rejected_even_if_equal() {
    for (what, part, request) in [
        ("header x-user", header(), test_request().header("x-user", "ann").header("x-user", "ann")),
        ("header x-user", header(), test_request().header("x-user", "").header("x-user", "ann")),
        ("cookie session", cookie(), test_request().header("cookie", "session=ann; session=bob")),
        (
            "cookie session",
            cookie(),
            test_request().header("cookie", "session=ann").header("cookie", "session=ann"),
        ),
        // Servers differ in which of the two they use: a client could send a new key in one each time, and be served
        // by the other.
        ("parameter api key", query(), test_request().target("/?api+key=new&api%20key=ann")),
        ("parameter api key", query(), test_request().target("/?api+key&api+key=ann")),
        ("parameter api key", query(), test_request().target("/?api+key=new&api.key=ann")),
        ("parameter api key", query(), test_request().target("/?api_key=ann&api-key=new")),
        ("parameter api key", query(), test_request().target("/?api+key=new;api+key=ann")),
        ("parameter api key", query(), test_request().target("/?api+key=new&api_key[]=ann")),
        ("cookie session", cookie(), test_request().header("cookie", "session=new; Session=ann")),
    ] {
        let twice = Err(NoKey::Twice(what.to_owned()));
        assert_eq!(key_of(&Key::of(part.clone()), &request), twice, "{request:?}");
        let instead = Key::of(KeyPart::Route).fallback(KeyFallback::Part(part));
        assert_eq!(key_of(&instead, &request), twice, "{request:?} instead of another");
    }
    let message = NoKey::Twice("cookie session".to_owned()).to_string();
    assert_eq!(message, "the cookie session is there twice; send it once");
}

/// Servers find different values in these, and each form would be another budget.
#[test]
fn values_that_servers_read_differently_are_rejected() {
    let cookies = |line: &str| test_request().header("cookie", line);
    let credentials = |value: &str| test_request().header("authorization", value);
    let separator = "has a space or a comma, at which some servers end it; escape it";
    let hidden = "follows a space or a comma in another value, where some servers find it; separate cookies by semicolons";
    let quote = "has a quotation mark that some servers remove; remove it";
    let nul = "has a NUL, at which some servers end it; remove it";
    let base64 =
        "is not in canonical base64, which servers decode differently; send canonical base64 with padding";
    let mut cases = vec![
        ("parameter api key", query(), nul, test_request().target("/?api_key=ann%00x")),
        ("parameter api key", query(), nul, test_request().target("/?api_key=%00ann")),
        ("cookie session", cookie(), nul, cookies("session=ann%00")),
        ("cookie session", cookie(), nul, cookies(r#"session="ann\000x""#)),
    ];
    for line in
        ["session=ann n=1", "session=ann,n=1", "session=ann, n", "session=ann\tx", "a=b; session=ann ,"]
    {
        cases.push(("cookie session", cookie(), separator, cookies(line)));
    }
    for line in [
        "session=new,session=ann",
        "session=new session=ann",
        r#"session="new, session=ann""#,
        "n=1, session=ann",
        "n=1 Session = ann",
        "n=1,,session[]=ann; session=new",
        "n, s%65ssion=ann",
        "n session=ann",
    ] {
        cases.push(("cookie session", cookie(), hidden, cookies(line)));
    }
    for line in [r#"session="ann"#, r#"session="ann"x"#, r#"session="ann\""#, r#"session=""ann"""#] {
        cases.push(("cookie session", cookie(), quote, cookies(line)));
    }
    for value in [
        "VkFMSUQ6cA",
        "VkFMSUQ6cA=",
        "VkFMSUQ6cB==",
        "VkFMSUQ6cGF=",
        "VkFM*SUQ6cA==",
        "VkFM SUQ6cA==",
        "VkFMSUQ6cA===",
        "VkFM=SUQ6cA=",
        "====",
        "VkFM_-Q6cA==",
    ] {
        let part = KeyPart::header("Authorization");
        cases.push(("header authorization", part, base64, credentials(&format!("Basic {value}"))));
    }
    for (what, part, why, request) in cases {
        let found = key_of(&Key::of(part), &request).map_err(|error| error.to_string());
        assert_eq!(found, Err(format!("the {what} {why}")), "{request:?}");
    }
}

#[test]
fn fallback_value_is_a_different_key() {
    let key = Key::of(header()).fallback(KeyFallback::Part(cookie()));
    let user = key_of(&key, &test_request().header("x-user", "acme")).unwrap();
    let session = key_of(&key, &test_request().header("cookie", "session=acme")).unwrap();
    let neither = key_of(&key, &test_request()).unwrap();
    assert_ne!(user, session);
    assert_ne!(neither, session);
    assert_eq!(
        key_of(&key, &test_request().with_client("1.2.3.4")).unwrap(),
        neither,
        "those without either share a budget"
    );
    // An override for the user `acme` must not apply to a client with a cookie of that name.
    assert!(key.is(&user, "acme") && !key.is(&session, "acme") && !key.is(&neither, ""));
}

#[test]
fn matching_pattern_without_names_differs_from_no_match() {
    let key = Key::of(header()).fallback(KeyFallback::Part(captures("/api/**")));
    assert_ne!(key_of(&key, &test_request().target("/api")), key_of(&key, &test_request().target("/other")));
}

#[test]
fn adjacent_parts_are_unambiguous() {
    let key = Key::of(header()).and(cookie()).fallback(KeyFallback::Literal(String::new()));
    let of = |user: &str, line: &str| {
        key_of(&key, &test_request().header("x-user", user).header("cookie", line)).unwrap()
    };
    assert_ne!(of("a", "session=bc"), of("ab", "session=c"));
    assert_ne!(of("a", "session="), of("a", "session=a"));
    assert_eq!(of("a", "session="), of("a", "b=c"));
    assert_ne!(key_of(&Key::global(), &test_request()), key_of(&Key::of(KeyPart::Ip), &test_request()));

    // A value that looks like the end of its part and the start of the next does not change that.
    let key = Key::of(KeyPart::Claim("a".to_owned())).and(KeyPart::Claim("b".to_owned()));
    let claims = |a: &str, b: &str| key_of(&key, &test_request().claim("a", a).claim("b", b)).unwrap();
    for between in ["\0\0\0\0\0", "\0\u{1}\0\0\0", "\0\u{2}\0\0\0", "\0"] {
        let long_first = claims(&format!("x{between}y"), "z");
        let long_second = claims("x", &format!("y{between}z"));
        assert_ne!(long_first, long_second, "{between:?}");
    }
}

#[test]
fn text_never_equals_an_address_with_the_same_bytes() {
    // The bytes of 97.98.99.100 are `abcd`.
    let client = test_request().with_client("97.98.99.100");
    let (ip, user) = (Key::of(KeyPart::Ip), Key::of(header()));
    let (address, text) =
        (key_of(&ip, &client).unwrap(), key_of(&user, &client.header("x-user", "abcd")).unwrap());
    assert_ne!(address, text);
    assert!(ip.is(&address, "97.98.99.100") && !ip.is(&address, "abcd"));
    assert!(user.is(&text, "abcd") && !user.is(&text, "97.98.99.100"));
}

#[test]
fn address_matches_in_any_form_or_by_containing_network() {
    let by = |bits: u8| Key::of(KeyPart::Ip).grouped(Grouping::by_ipv6_prefix(bits).unwrap());
    for (bits, client, named, others) in [
        (
            64,
            "1.2.3.4",
            vec![
                "1.2.3.4",
                "::ffff:1.2.3.4",
                "::ffff:102:304",
                "1.2.3.4/32",
                "1.0.0.0/8",
                "::ffff:1.2.0.0/112",
            ],
            vec!["1.2.3.5", "2.0.0.0/8", "::/0", "01.2.3.4", "1.2.3", "", "1.2.3.4/33", "1.2.3.4/"],
        ),
        (
            64,
            "2001:db8::1",
            vec!["2001:db8::1", "2001:DB8:0::2", "2001:db8::/64", "2001:db8::/32", "::/0"],
            vec!["2001:db8:0:1::1", "2001:db8::/65", "2001:db8:1::/48", "0.0.0.0/0"],
        ),
        (128, "2001:db8::1", vec!["2001:db8::1", "2001:db8::/64"], vec!["2001:db8::2"]),
    ] {
        let key = by(bits);
        let written = key_of(&key, &test_request().with_client(client)).unwrap();
        for name in named {
            assert!(key.is(&written, name), "{name} is {client} by /{bits}");
        }
        for name in others {
            assert!(!key.is(&written, name), "{name} is not {client} by /{bits}");
        }
    }
    let written = [48, 64].map(|bits| key_of(&by(bits), &test_request().with_client("2001:db8::1")).unwrap());
    assert_ne!(written[0], written[1], "networks of different sizes are different clients");
}

#[test]
fn values_are_compared_as_in_requests() {
    for (part, request, named, others) in [
        (KeyPart::Method, test_request().with_method("POST"), vec!["POST", "post"], vec!["POS", "GET"]),
        (
            KeyPart::Host,
            test_request(),
            vec!["example.com", "Example.COM.", "example.com:80"],
            vec!["example.org"],
        ),
        (
            header(),
            test_request().header("x-user", "ann"),
            vec!["ann"],
            vec!["Ann", " ann", "an", "anna", ""],
        ),
    ] {
        let key = Key::of(part);
        let written = key_of(&key, &request).unwrap();
        assert!(named.iter().all(|name| key.is(&written, name)), "{named:?}");
        assert!(!others.iter().any(|name| key.is(&written, name)), "{others:?}");
    }
}

#[test]
fn literal_matches_by_value_and_multi_part_keys_do_not() {
    let key = Key::of(header()).fallback(KeyFallback::Literal("anonymous".to_owned()));
    assert!(key.is(&key_of(&key, &test_request()).unwrap(), "anonymous"));
    let both = key.and(KeyPart::Method);
    let written = key_of(&both, &test_request().header("x-user", "ann")).unwrap();
    for name in ["ann", "GET", "annGET", ""] {
        assert!(!both.is(&written, name), "{name}");
    }
    assert!(!Key::global().is(&key_of(&Key::global(), &test_request()).unwrap(), ""));
}

#[test]
fn failed_write_leaves_the_buffer_unchanged() {
    let key = Key::of(KeyPart::Ip).and(header()).fallback(KeyFallback::Deny);
    let mut text = b"before".to_vec();
    assert_eq!(key.write(&test_request(), &mut text), Err(NoKey::Denied));
    assert_eq!(text, b"before");
    assert_eq!(key.write(&test_request().header("x-user", "ann"), &mut text), Ok(()));
    assert_eq!(
        text.strip_prefix(b"before"),
        key_of(&key, &test_request().header("x-user", "ann")).ok().as_deref()
    );
}

/// Bytes that are read as two requests. Small numbers choose among few values, so that the two are often alike.
fn two_requests() -> impl Strategy<Value = Vec<u8>> {
    let byte =
        prop_oneof![3 => 0..6_u8, 1 => any::<u8>(), 1 => prop::sample::select(&b"ab=;& %+/,\"[]\\"[..])];
    vec(byte, 0..160)
}

proptest! {
    #![proptest_config(testbed::property::cases(50_000))]

    #[test]
    fn keys_are_equal_iff_the_found_values_are_equal(bytes in two_requests()) {
        key_property::check(&bytes);
    }
}
