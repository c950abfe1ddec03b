//! Tokens: which are believed, and what they claim.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::IpAddr;
use std::task::{Context, Poll};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{Request, Response};
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{self, EcdsaKeyPair, Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use tollgate::tower::key::{Key, Otherwise, Part};
use tollgate::tower::rule::Rule;
use tollgate::tower::token::{TOKEN_BYTES_MAX, Tokens, TokensError};
use tollgate::tower::when::{Wanted, When};
use tollgate::tower::{Claims, Peer, RateLimitLayer};
use tollgate::{Align, Limit, ManualClock, Time};
use tower_layer::Layer;
use tower_service::Service;

mod vectors {
    //! Keys and tokens of others: RFC 7515, appendix A.1 and A.3; those of RSA were made by OpenSSL.
    pub(crate) const HS256_KEY: &str = r#"{"kty":"oct","k":"AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow"}"#;
    pub(crate) const HS256: &str = concat!(
        "eyJ0eXAiOiJKV1QiLA0KICJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLm",
        "NvbS9pc19yb290Ijp0cnVlfQ.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
    );
    pub(crate) const ES256_KEY: &str = r#"{"kty":"EC","crv":"P-256","x":"f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU","y":"x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}"#;
    pub(crate) const ES256: &str = concat!(
        "eyJhbGciOiJFUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cn",
        "VlfQ.DtEhU3ljbEg8L38VWAfUAqOyKAM6-Xx-F4GawxaepmXFCgfTjDxw5djxLa8ISlSApmWQxfKTUJqPP3-Kg6NU1Q"
    );
    pub(crate) const RSA_KEY: &str = concat!(
        r#"{"kty":"RSA","e":"AQAB","n":"2hDLcDYw_i5R9Nm2D7QRMvjSn9HTAX51bmmNHg1fuoSzMa10Xk57CJIsHY_NPymPzIP"#,
        "-DT5IjzdXBziBB6wgJaymcVlxSIYo0WjiExuAEHKIiViixhSNLDEigmq4qCtkNhx6vpNxf36VMrUI4XCdO-g96gibt9UPaz-",
        "J9X-GVbJhGIQnP2hiDeSOybSUDmGXXlsrwQz9ACfNBP-xdD6wRczKOyrajixo2Jd7ghhFaOdcEVk8btNGnSsmkgFrfEKX1pD",
        r#"iiK8Xanx43j8_TfovUdeF2upN0zjObh6NHL26TtPyNAOmshDod9oYA5qcZPUbLo4_2gUxSOR8z8H7m-Rhmw"}"#
    );
    pub(crate) const RS256: &str = concat!(
        "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9",
        "pc19yb290Ijp0cnVlfQ.qnHBF8wUVSwUFHvXahmQoffpnEGl2vOrmbNpIUwVpYXnwrq77ync2S341qdgCouEKBg58crQ_hPm",
        "SXYiLTs-axsWswtGmsA6-jRnLN9tM0p772XBcldoVEr2GWXLug6ryb-xwJnxZYZAjF-CqG1FDefftYIyMt56xn7IeWnJLvZ6",
        "geeZx5GFv51CaU9rl83Sxz_9Ow1SITlr19P-pVtKj1PanZAYwIltxi9T_nfyV8DMYxeq73B8UKYOFNFEM2i2uZqGErd_UWCN",
        "jyd2Cw60oFr4MYmI8QVtKUpGCNv6UWTb4qXAzMnDL8X14pwz5WsZNkJHRIMQ42u0apToNu4mGQ"
    );
    pub(crate) const PS256: &str = concat!(
        "eyJhbGciOiJQUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9",
        "pc19yb290Ijp0cnVlfQ.L6tiAbqp2Yi88KntdSo-W-ZMiFeFS5QHQ8DB_3_WFnVsIVNFETpAYgYELQ7K37hvbYiyV2tDHebr",
        "t8KOB3MTJx1ZukeaD9BDcuMC-6j4l44jnhAGLHh4q2nS3D6PiGyukmGF5Qp_oRULxtrdgx11t2RDS7RjkFGITxr9Y3zyONiw",
        "Ct8jDnsrJMV1qJX8r03hxo2ADS7imGcOoiVyGl5En1opslG6acGv-LsGy5rFYBmIgJQiFXL-UXtLJUVwisXfVJZn62adSJiU",
        "WY8IWcb0ZQ7ePkNQGtnWqrpqPqa2qubiVLzWN_GXoqynmEl3n0mB3IFpajwUrkC-mNI6Gia4lw"
    );
    /// What all of them say.
    pub(crate) const EXPIRES: u64 = 1_300_819_380;
}

type Sign = Box<dyn Fn(&[u8]) -> Vec<u8>>;

/// A key that can sign, and what it is in a key set.
struct Signer {
    public: Value,
    algorithm: &'static str,
    sign: Sign,
}

fn encoded(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn hs256() -> Signer {
    let secret = [7; 32];
    let key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
    Signer {
        public: json!({ "kty": "oct", "k": encoded(secret) }),
        algorithm: "HS256",
        sign: Box::new(move |signed| hmac::sign(&key, signed).as_ref().to_vec()),
    }
}

fn ecdsa(curve: &str, algorithm: &'static str) -> Signer {
    let parameters = match curve {
        "P-256" => &signature::ECDSA_P256_SHA256_FIXED_SIGNING,
        _ => &signature::ECDSA_P384_SHA384_FIXED_SIGNING,
    };
    let random = SystemRandom::new();
    let made = EcdsaKeyPair::generate_pkcs8(parameters, &random).unwrap();
    let key = EcdsaKeyPair::from_pkcs8(parameters, made.as_ref(), &random).unwrap();
    let (x, y) = key.public_key().as_ref()[1..].split_at(key.public_key().as_ref().len() / 2);
    Signer {
        public: json!({ "kty": "EC", "crv": curve, "x": encoded(x), "y": encoded(y) }),
        algorithm,
        sign: Box::new(move |signed| key.sign(&random, signed).unwrap().as_ref().to_vec()),
    }
}

fn es256() -> Signer {
    ecdsa("P-256", "ES256")
}

fn eddsa() -> Signer {
    let made = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
    let key = Ed25519KeyPair::from_pkcs8(made.as_ref()).unwrap();
    Signer {
        public: json!({ "kty": "OKP", "crv": "Ed25519", "x": encoded(key.public_key()) }),
        algorithm: "EdDSA",
        sign: Box::new(move |signed| key.sign(signed).as_ref().to_vec()),
    }
}

impl Signer {
    fn token(&self, payload: &Value) -> String {
        self.token_with(&json!({ "alg": self.algorithm }), payload)
    }

    fn token_with(&self, header: &Value, payload: &Value) -> String {
        let signed = format!("{}.{}", encoded(header.to_string()), encoded(payload.to_string()));
        let signature = (self.sign)(signed.as_bytes());
        format!("{signed}.{}", encoded(signature))
    }

    /// The key with more said of it.
    fn key(&self, more: &Value) -> Value {
        let mut key = self.public.clone();
        key.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        key
    }
}

const NOW: u64 = 1_700_000_000;

fn tokens(keys: &[Value]) -> Tokens {
    at(NOW, &json!({ "keys": keys }).to_string())
}

fn at(seconds: u64, jwks_json: &str) -> Tokens {
    Tokens::new(jwks_json).unwrap().clock(ManualClock::new(Time::from_secs(seconds))).leeway(Duration::ZERO)
}

fn sent(headers: &[(&str, &str)]) -> http::request::Parts {
    let request =
        headers.iter().fold(Request::builder(), |request, (name, value)| request.header(*name, *value));
    request.body(()).unwrap().into_parts().0
}

fn claims(tokens: &Tokens, token: &str) -> Option<Claims> {
    tokens.claims(&sent(&[("authorization", &format!("Bearer {token}"))]))
}

fn text(claims: &Option<Claims>, name: &str) -> Option<String> {
    claims.as_ref().and_then(|claims| claims.0.get(name).cloned())
}

#[test]
fn tokens_of_others_are_believed_until_they_expire() {
    for (key, token) in [
        (vectors::HS256_KEY, vectors::HS256),
        (vectors::RSA_KEY, vectors::RS256),
        (vectors::ES256_KEY, vectors::ES256),
        (vectors::RSA_KEY, vectors::PS256),
    ] {
        let set = format!("{{\"keys\":[{key}]}}");
        let believed = claims(&at(vectors::EXPIRES - 1, &set), token);
        assert_eq!(text(&believed, "iss").as_deref(), Some("joe"), "{key}");
        assert_eq!(text(&believed, "http://example.com/is_root").as_deref(), Some("true"), "{key}");
        assert_eq!(text(&believed, "exp").as_deref(), Some("1300819380"), "{key}");
        assert_eq!(claims(&at(vectors::EXPIRES, &set), token), None, "{key}");
    }
}

#[test]
fn every_kind_of_key_verifies_its_own_tokens_and_nobody_elses() {
    let signers = [hs256(), es256(), ecdsa("P-384", "ES384"), eddsa()];
    let payload = json!({ "sub": "ann" });
    for (index, signer) in signers.iter().enumerate() {
        let own = tokens(std::slice::from_ref(&signer.public));
        let token = signer.token(&payload);
        assert_eq!(text(&claims(&own, &token), "sub").as_deref(), Some("ann"), "{}", signer.algorithm);
        for (other_index, other) in signers.iter().enumerate() {
            let others = tokens(std::slice::from_ref(&other.public));
            assert_eq!(claims(&others, &token).is_some(), index == other_index, "{}", signer.algorithm);
        }
        // A byte of any part is another.
        let (signed, signature) = token.rsplit_once('.').unwrap();
        let mut wrong = URL_SAFE_NO_PAD.decode(signature).unwrap();
        wrong[0] ^= 1;
        assert_eq!(claims(&own, &format!("{signed}.{}", encoded(&wrong))), None, "{}", signer.algorithm);
        wrong.truncate(8);
        assert_eq!(claims(&own, &format!("{signed}.{}", encoded(&wrong))), None, "{}", signer.algorithm);
        let header = signed.split_once('.').unwrap().0;
        let forged = encoded(json!({ "sub": "eve" }).to_string());
        assert_eq!(claims(&own, &format!("{header}.{forged}.{signature}")), None, "{}", signer.algorithm);
    }
    let (one, same_kind) = (es256(), es256());
    assert_eq!(claims(&tokens(&[one.public]), &same_kind.token(&payload)), None);
}

#[test]
fn texts_numbers_and_truth_values_are_claims_and_nothing_else_is() {
    let signer = es256();
    let payload = json!({
        "sub": "ann", "empty": "", "age": 7, "below": -1, "part": 1.5, "yes": true, "no": false,
        "nothing": null, "list": ["a"], "inside": { "a": "b" },
    });
    let Claims(believed) =
        claims(&tokens(std::slice::from_ref(&signer.public)), &signer.token(&payload)).unwrap();
    let mut found: Vec<_> = believed.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    found.sort_unstable();
    let expected = [
        ("age", "7"),
        ("below", "-1"),
        ("empty", ""),
        ("no", "false"),
        ("part", "1.5"),
        ("sub", "ann"),
        ("yes", "true"),
    ];
    assert_eq!(found, expected);
}

#[test]
fn times_count_and_what_is_no_time_is_not_left_out() {
    let signer = hs256();
    let tokens = tokens(std::slice::from_ref(&signer.public));
    let generous = tokens.clone().leeway(Duration::from_secs(60));
    let none = Value::Null;
    for (claim, value, is_believed, is_within_a_minute) in [
        ("exp", json!(NOW + 1), true, true),
        ("exp", json!(NOW), false, true),
        ("exp", json!(NOW - 59), false, true),
        ("exp", json!(NOW - 60), false, false),
        ("exp", json!(u64::MAX), true, true),
        ("exp", json!(1e300), true, true),
        ("exp", json!(0), false, false),
        ("exp", json!(-5), false, false),
        ("exp", json!(1_700_000_000.9), false, true),
        ("exp", json!(1_700_000_001.1), true, true),
        ("nbf", json!(NOW), true, true),
        ("nbf", json!(NOW + 1), false, true),
        ("nbf", json!(NOW + 60), false, true),
        ("nbf", json!(NOW + 61), false, false),
        ("nbf", json!(u64::MAX), false, false),
        ("nbf", json!(-5), true, true),
        ("nbf", json!(1_700_000_000.1), false, true),
        // In another library, these were as good as none (CVE-2026-25537).
        ("exp", json!("never"), false, false),
        ("exp", json!((NOW + 1).to_string()), false, false),
        ("exp", none.clone(), false, false),
        ("exp", json!([NOW + 1]), false, false),
        ("nbf", json!("1"), false, false),
        ("nbf", json!({}), false, false),
        ("nbf", none, false, false),
    ] {
        let token = signer.token(&json!({ claim: value }));
        assert_eq!(claims(&tokens, &token).is_some(), is_believed, "{claim}: {value}");
        assert_eq!(
            claims(&generous, &token).is_some(),
            is_within_a_minute,
            "{claim}: {value}, a minute more"
        );
    }
    assert!(claims(&tokens, &signer.token(&json!({}))).is_some(), "it need not end");
}

#[test]
fn a_token_must_be_from_whom_and_for_whom_is_said() {
    let signer = eddsa();
    let tokens =
        tokens(std::slice::from_ref(&signer.public)).issuer("https://id.test").audience(["api", "web"]);
    for (payload, is_believed) in [
        (json!({ "iss": "https://id.test", "aud": "api" }), true),
        (json!({ "iss": "https://id.test", "aud": "web" }), true),
        (json!({ "iss": "https://id.test", "aud": ["other", "api"] }), true),
        (json!({ "iss": "https://id.test", "aud": "API" }), false),
        (json!({ "iss": "https://id.test", "aud": ["other"] }), false),
        (json!({ "iss": "https://id.test", "aud": [] }), false),
        (json!({ "iss": "https://id.test", "aud": [["api"]] }), false),
        (json!({ "iss": "https://id.test", "aud": { "api": "api" } }), false),
        (json!({ "iss": "https://id.test" }), false),
        (json!({ "iss": "https://id.test/", "aud": "api" }), false),
        (json!({ "iss": ["https://id.test"], "aud": "api" }), false),
        (json!({ "aud": "api" }), false),
    ] {
        assert_eq!(claims(&tokens, &signer.token(&payload)).is_some(), is_believed, "{payload}");
    }
}

#[test]
fn a_token_without_signature_is_none() {
    let signer = es256();
    let all = tokens(std::slice::from_ref(&signer.public));
    let payload = encoded(json!({ "sub": "eve" }).to_string());
    for algorithm in ["none", "None", "NONE", "nOnE", ""] {
        let header = encoded(json!({ "alg": algorithm }).to_string());
        for signature in ["", "AA", &encoded([0; 64])] {
            assert_eq!(claims(&all, &format!("{header}.{payload}.{signature}")), None, "{algorithm:?}");
        }
    }
    // Zeros as a signature were valid for any key in some libraries (CVE-2022-21449).
    let header = encoded(json!({ "alg": "ES256" }).to_string());
    assert_eq!(claims(&all, &format!("{header}.{payload}.{}", encoded([0; 64]))), None);
    assert_eq!(claims(&all, &format!("{header}.{payload}.")), None);
}

/// The public key is known to everybody. If a token could choose `HS256`, it would be a secret that everybody has.
#[test]
fn a_public_key_is_never_a_secret() {
    let numbers: Value = serde_json::from_str(vectors::RSA_KEY).unwrap();
    let set = format!("{{\"keys\":[{}]}}", vectors::RSA_KEY);
    let n = URL_SAFE_NO_PAD.decode(numbers["n"].as_str().unwrap()).unwrap();
    let point = es256();
    let guesses = [
        n,
        numbers["n"].as_str().unwrap().as_bytes().to_vec(),
        vectors::RSA_KEY.as_bytes().to_vec(),
        set.as_bytes().to_vec(),
        Vec::new(),
        point.public["x"].as_str().unwrap().as_bytes().to_vec(),
        point.public.to_string().into_bytes(),
    ];
    let verifying = [at(NOW, &set), tokens(std::slice::from_ref(&point.public))];
    for secret in guesses {
        for (algorithm, name) in
            [(hmac::HMAC_SHA256, "HS256"), (hmac::HMAC_SHA384, "HS384"), (hmac::HMAC_SHA512, "HS512")]
        {
            let key = hmac::Key::new(algorithm, &secret);
            let sign = Box::new(move |signed: &[u8]| hmac::sign(&key, signed).as_ref().to_vec());
            let forger = Signer { public: Value::Null, algorithm: name, sign };
            let token = forger.token(&json!({ "sub": "eve" }));
            assert!(verifying.iter().all(|tokens| claims(tokens, &token).is_none()), "{name}");
        }
    }
}

#[test]
fn a_key_is_for_its_own_algorithms_only() {
    let rs256_only = vectors::RSA_KEY.replace("\"kty\"", "\"alg\":\"RS256\",\"kty\"");
    let ps256_only = vectors::RSA_KEY.replace("\"kty\"", "\"alg\":\"PS256\",\"kty\"");
    let before = vectors::EXPIRES - 1;
    assert!(claims(&at(before, &format!("{{\"keys\":[{rs256_only}]}}")), vectors::RS256).is_some());
    assert!(claims(&at(before, &format!("{{\"keys\":[{ps256_only}]}}")), vectors::RS256).is_none());

    let set = format!("{{\"keys\":[{}]}}", vectors::RSA_KEY);
    let only = |names: &[&str]| at(before, &set).algorithms(names);
    assert!(claims(&only(&["ES256", "RS256"]).unwrap(), vectors::RS256).is_some());
    assert!(claims(&only(&["PS256"]).unwrap(), vectors::RS256).is_none());
    assert_eq!(only(&["ES256"]).err(), Some(TokensError::NoKeys));
    for wrong in ["none", "rs256", "RS1", ""] {
        assert_eq!(only(&["RS256", wrong]).err(), Some(TokensError::Algorithm(wrong.to_owned())));
    }
}

#[test]
fn of_several_keys_the_named_one_counts() {
    let (old, new) = (es256(), es256());
    let named = |kid: &str| json!({ "kid": kid });
    let tokens = tokens(&[old.key(&named("old")), new.key(&named("new"))]);
    let payload = json!({ "sub": "ann" });
    let by =
        |signer: &Signer, header: &Value| claims(&tokens, &signer.token_with(header, &payload)).is_some();
    assert!(by(&old, &json!({ "alg": "ES256", "kid": "old" })));
    assert!(by(&new, &json!({ "alg": "ES256", "kid": "new" })));
    assert!(!by(&new, &json!({ "alg": "ES256", "kid": "old" })), "signed by another");
    assert!(!by(&new, &json!({ "alg": "ES256", "kid": "newest" })), "unknown");
    assert!(!by(&new, &json!({ "alg": "ES256", "kid": "" })), "unknown");
    assert!(!by(&new, &json!({ "alg": "ES256" })), "which one?");
    assert!(!by(&new, &json!({ "alg": "ES256", "kid": 5 })), "no name");
    assert!(!by(&new, &json!({ "alg": "ES256", "kid": null })), "no name");
}

#[test]
fn the_only_key_need_not_be_named() {
    let signer = es256();
    let payload = json!({ "sub": "ann" });
    let (plain, kid) = (json!({ "alg": "ES256" }), json!({ "alg": "ES256", "kid": "a" }));
    let unnamed = tokens(std::slice::from_ref(&signer.public));
    let named = tokens(&[signer.key(&json!({ "kid": "a" }))]);
    let other = tokens(&[signer.key(&json!({ "kid": "b" }))]);
    for (tokens, header, is_believed) in [
        (&unnamed, &plain, true),
        (&unnamed, &kid, true),
        (&named, &plain, true),
        (&named, &kid, true),
        (&other, &kid, false),
    ] {
        assert_eq!(claims(tokens, &signer.token_with(header, &payload)).is_some(), is_believed, "{header}");
    }
}

#[test]
fn garbage_is_no_token() {
    let signer = hs256();
    let tokens = tokens(std::slice::from_ref(&signer.public));
    let good = signer.token(&json!({ "sub": "ann" }));
    assert!(claims(&tokens, &good).is_some());
    let [header, payload, signature] = good.split('.').collect::<Vec<_>>()[..] else { panic!("three parts") };
    for token in [
        "",
        ".",
        "..",
        "...",
        "a.b.c",
        header,
        &format!("{header}.{payload}"),
        &format!("{good}."),
        &format!(".{good}"),
        &format!("{good}.{signature}"),
        &format!("{good}="),
        &format!("{good} x"),
        &format!("{header}=.{payload}.{signature}"),
        &format!("{header}.{payload}.{signature}A"),
        &good.to_uppercase(),
    ] {
        assert_eq!(claims(&tokens, token), None, "{token}");
    }
    // Signed, and still not what it must be.
    for (header, payload) in [
        (json!({ "alg": "HS256" }), json!([])),
        (json!({ "alg": "HS256" }), json!("text")),
        (json!({ "alg": "HS256" }), json!(null)),
        (json!([]), json!({})),
        (json!({}), json!({})),
        (json!({ "alg": 5 }), json!({})),
        (json!({ "alg": ["HS256"] }), json!({})),
        (json!({ "alg": "HS256", "crit": ["exp"] }), json!({})),
        (json!({ "alg": "HS256", "crit": [] }), json!({})),
    ] {
        assert_eq!(claims(&tokens, &signer.token_with(&header, &payload)), None, "{header} {payload}");
    }
}

#[test]
fn a_long_token_is_not_looked_at() {
    let signer = hs256();
    let tokens = tokens(std::slice::from_ref(&signer.public));
    let of_length = |fill: usize| signer.token(&json!({ "sub": "ann", "fill": "x".repeat(fill) }));
    let fill = (1..TOKEN_BYTES_MAX).rev().find(|fill| of_length(*fill).len() <= TOKEN_BYTES_MAX).unwrap();
    assert!(claims(&tokens, &of_length(fill)).is_some());
    assert!(claims(&tokens, &of_length(fill + 3)).is_none());
    assert!(claims(&tokens, &of_length(750_000)).is_none(), "a megabyte");
    assert!(claims(&tokens, &"A.".repeat(500_000)).is_none(), "a megabyte of dots");
}

#[test]
fn a_token_stands_in_one_line_of_one_header() {
    let signer = hs256();
    let tokens = tokens(std::slice::from_ref(&signer.public));
    let token = signer.token(&json!({ "sub": "ann" }));
    let (bearer, basic) = (format!("Bearer {token}"), format!("Basic {token}"));
    let is_believed = |tokens: &Tokens, headers: &[(&str, &str)]| tokens.claims(&sent(headers)).is_some();
    for value in [bearer.clone(), format!("bearer {token}"), format!("BEARER   {token}")] {
        assert!(is_believed(&tokens, &[("authorization", &value)]), "{value}");
    }
    for value in [
        token.clone(),
        basic,
        format!("Bearer{token}"),
        format!("Bearer Bearer {token}"),
        "Bearer".to_owned(),
    ] {
        assert!(!is_believed(&tokens, &[("authorization", &value)]), "{value}");
    }
    assert!(!is_believed(&tokens, &[]));
    assert!(!is_believed(&tokens, &[("authorization", &bearer), ("authorization", &bearer)]), "twice");
    assert!(!is_believed(&tokens, &[("x-token", &token)]), "another header");

    let elsewhere = tokens.header("X-Token").unwrap();
    assert!(is_believed(&elsewhere, &[("x-token", &token), ("authorization", "Basic YTpi")]));
    assert!(!is_believed(&elsewhere, &[("authorization", &bearer)]));
    assert!(!is_believed(&elsewhere, &[("x-token", &bearer)]));
    assert!(!is_believed(&elsewhere, &[("x-token", &token), ("x-token", "x")]), "twice");
    assert_eq!(elsewhere.header("no header").err(), Some(TokensError::Header("no header".to_owned())));
}

#[test]
fn keys_that_are_not_for_signatures_are_left_out() {
    let signer = es256();
    let good = signer.key(&json!({ "use": "sig", "key_ops": ["verify"], "alg": "ES256", "kid": "a" }));
    let others = [
        signer.key(&json!({ "use": "enc" })),
        signer.key(&json!({ "key_ops": ["sign", "deriveKey"] })),
        signer.key(&json!({ "alg": "ES384" })),
        signer.key(&json!({ "alg": "ECDH-ES" })),
        json!({ "kty": "EC", "crv": "P-521", "x": "AA", "y": "AA" }),
        json!({ "kty": "OKP", "crv": "X25519", "x": "AA" }),
        json!({ "kty": "new" }),
    ];
    let token = signer.token_with(&json!({ "alg": "ES256", "kid": "a" }), &json!({ "sub": "ann" }));
    let mut all = others.to_vec();
    all.push(good);
    assert!(claims(&tokens(&all), &token).is_some());
    for key in others {
        assert_eq!(
            Tokens::new(&json!({ "keys": [key] }).to_string()).err(),
            Some(TokensError::NoKeys),
            "{key}"
        );
    }
}

#[test]
fn broken_keys_are_told_of_and_weak_ones_are_refused() {
    for (set, part) in [
        ("", "line 1, column 0 is not JSON"),
        ("{", "is not JSON"),
        ("[]", "no list `keys`"),
        ("{}", "no list `keys`"),
        (r#"{"keys":{}}"#, "no list `keys`"),
        (r#"{"keys":[]}"#, "no key is for verifying"),
        (r#"{"keys":[5]}"#, "key 1 of the key set is not an object"),
        (r#"{"keys":[{"kty":"new"},{}]}"#, "key 2 of the key set does not say of what kind"),
        (r#"{"keys":[{"kty":5}]}"#, "something else than text"),
        (r#"{"keys":[{"kty":"oct","kid":5}]}"#, "lacks one of its numbers"),
        (r#"{"keys":[{"kty":"oct"}]}"#, "lacks one of its numbers"),
        (r#"{"keys":[{"kty":"oct","k":"!"}]}"#, "not in base64url"),
        (r#"{"keys":[{"kty":"oct","k":""}]}"#, "less than 32 bytes"),
        (r#"{"keys":[{"kty":"oct","k":"c2VjcmV0"}]}"#, "less than 32 bytes"),
        (r#"{"keys":[{"kty":"RSA","n":"AAAA","e":"AQAB"}]}"#, "less than 2048 bits"),
        (r#"{"keys":[{"kty":"EC","crv":"P-256","x":"AA","y":"AA"}]}"#, "not of its curve's length"),
        (r#"{"keys":[{"kty":"OKP","crv":"Ed25519","x":"AA"}]}"#, "has not 32 bytes"),
    ] {
        let told = Tokens::new(set).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(told.contains(part), "{set}: {told}");
    }
    let secret = Tokens::new(r#"{"keys":[{"kty":"oct","k":"hunter2" oops}]}"#).unwrap_err();
    assert!(!secret.to_string().contains("hunter2"), "a message is not the place for a secret");
    let secret = Tokens::new(&json!({ "keys": [hs256().public] }).to_string()).unwrap();
    assert!(!format!("{secret:?}").contains("BwcH"), "nor is what is printed for debugging");
}

/// Says yes to everything.
#[derive(Clone)]
struct Yes;

impl Service<Request<()>> for Yes {
    type Response = Response<()>;
    type Error = Infallible;
    type Future = Ready<Result<Response<()>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(())))
    }
}

#[tokio::test]
async fn a_layer_counts_by_what_verified_tokens_claim() {
    let (signer, forger) = (es256(), es256());
    let twice = Limit::fixed_window(2, Duration::from_secs(3_600), Align::FirstRequest).unwrap();
    let user = Key::of(Part::Claim("sub".to_owned())).otherwise(Otherwise::Deny);
    let layer = RateLimitLayer::builder()
        .rule(Rule::new("users", twice).key(user))
        .tokens(tokens(std::slice::from_ref(&signer.public)))
        .build()
        .unwrap();
    let mut service = layer.layer(Yes);
    for (signer, user, status) in [
        (&signer, "ann", 200),
        (&signer, "ann", 200),
        (&signer, "ann", 429),
        (&signer, "bob", 200),
        (&forger, "bob", 403),
        (&signer, "bob", 200),
    ] {
        let token = signer.token(&json!({ "sub": user }));
        let request = Request::builder()
            .header("authorization", format!("Bearer {token}"))
            .extension(Peer(IpAddr::from([203, 0, 113, 7])));
        let response = service.call(request.body(()).unwrap()).await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{user}");
    }
}

/// A service may believe the first of two tokens: if they were as good as none, who has used up a budget would get that
/// of its address by sending a token twice, and a limit on those with a plan would not concern it any more.
#[tokio::test]
async fn two_tokens_are_refused_where_a_claim_is_wanted() {
    let signer = es256();
    let bearer = format!("Bearer {}", signer.token(&json!({ "sub": "ann", "plan": "free" })));
    let rule =
        Rule::new("once", Limit::fixed_window(1, Duration::from_secs(9), Align::FirstRequest).unwrap());
    let plan = When { claims: vec![("plan".to_owned(), Wanted::Present)], ..When::default() };
    let by_user = rule.clone().key(Key::of(Part::Claim("sub".to_owned())));
    for (rule, status) in [(by_user, 400), (rule.clone().when(plan), 400), (rule, 429)] {
        let tokens = tokens(std::slice::from_ref(&signer.public));
        let mut service = RateLimitLayer::builder().rule(rule).tokens(tokens).build().unwrap().layer(Yes);
        for (count, status) in [(1, 200), (1, 429), (2, status)] {
            let builder = Request::builder().extension(Peer(IpAddr::from([203, 0, 113, 7])));
            let request = (0..count).fold(builder, |it, _| it.header("authorization", &bearer));
            assert_eq!(service.call(request.body(()).unwrap()).await.unwrap().status(), status);
        }
    }
}
