//! Concurrency limits: whose permit a request takes.

use ratekeeper_rules::concurrency::InFlightLimit;
use ratekeeper_rules::key::{Key, KeyFallback, KeyPart, NoKey};
use ratekeeper_rules::when::When;

use crate::rules::request_builder::test_request;

fn per_user(otherwise: KeyFallback) -> InFlightLimit {
    InFlightLimit::new("per-user", 2).key(Key::of(KeyPart::header("X-User")).fallback(otherwise))
}

#[test]
fn request_takes_a_permit_of_its_key() {
    let limit = per_user(KeyFallback::Deny);
    let key = |user: &str| {
        let mut text = b"before".to_vec();
        assert!(limit.write_key(&test_request().header("x-user", user), &mut text).unwrap());
        text
    };
    assert!(key("a").starts_with(b"before"));
    assert_eq!(key("a"), key("a"));
    assert_ne!(key("a"), key("b"));
}

#[test]
fn request_outside_the_limit_takes_no_permit() {
    let mut text = Vec::new();
    let posts =
        InFlightLimit::new("posts", 2).when(When { methods: vec!["POST".to_owned()], ..When::default() });
    assert_eq!(posts.write_key(&test_request(), &mut text), Ok(false));
    assert_eq!(posts.write_key(&test_request().with_method("post"), &mut text), Ok(true));
    assert_eq!(per_user(KeyFallback::Skip).write_key(&test_request(), &mut text), Ok(false));
    assert_eq!(text, b"", "one budget for all has nothing to say");
}

#[test]
fn request_without_a_required_key_is_rejected() {
    let twice = test_request().header("x-user", "a").header("x-user", "b");
    let mut text = b"before".to_vec();
    let limit = per_user(KeyFallback::Deny);
    assert_eq!(limit.write_key(&test_request(), &mut text), Err(NoKey::Denied));
    assert_eq!(limit.write_key(&twice, &mut text), Err(NoKey::Twice("header x-user".to_owned())));
    assert_eq!(text, b"before");
    // A shadow limit never denies.
    let shadow = limit.shadow();
    assert_eq!(shadow.write_key(&test_request(), &mut text), Ok(false));
    assert_eq!(shadow.write_key(&twice, &mut text), Ok(false));
}
