//! Whose slot a request takes.

use tollgate_rules::key::{Key, NoKey, Otherwise, Part};
use tollgate_rules::slots::Slots;
use tollgate_rules::when::When;

use crate::rules::sent::sent;

fn per_user(otherwise: Otherwise) -> Slots {
    Slots::new("per-user", 2).key(Key::of(Part::header("X-User")).otherwise(otherwise))
}

#[test]
fn a_request_takes_a_slot_of_its_key() {
    let slots = per_user(Otherwise::Deny);
    let key = |user: &str| {
        let mut text = b"before".to_vec();
        assert!(slots.ask(&sent().header("x-user", user), &mut text).unwrap());
        text
    };
    assert!(key("a").starts_with(b"before"));
    assert_eq!(key("a"), key("a"));
    assert_ne!(key("a"), key("b"));
}

#[test]
fn who_is_not_concerned_takes_none() {
    let mut text = Vec::new();
    let posts = Slots::new("posts", 2).when(When { methods: vec!["POST".to_owned()], ..When::default() });
    assert_eq!(posts.ask(&sent(), &mut text), Ok(false));
    assert_eq!(posts.ask(&sent().with_method("post"), &mut text), Ok(true));
    assert_eq!(per_user(Otherwise::Skip).ask(&sent(), &mut text), Ok(false));
    assert_eq!(text, b"", "one budget for all has nothing to say");
}

#[test]
fn who_must_say_whose_it_is_and_does_not_is_refused() {
    let twice = sent().header("x-user", "a").header("x-user", "b");
    let mut text = b"before".to_vec();
    let slots = per_user(Otherwise::Deny);
    assert_eq!(slots.ask(&sent(), &mut text), Err(NoKey::Denied));
    assert_eq!(slots.ask(&twice, &mut text), Err(NoKey::Twice("header x-user".to_owned())));
    assert_eq!(text, b"before");
    // What only counts refuses nobody.
    let shadow = slots.shadow();
    assert_eq!(shadow.ask(&sent(), &mut text), Ok(false));
    assert_eq!(shadow.ask(&twice, &mut text), Ok(false));
}
