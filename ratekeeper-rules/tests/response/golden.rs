use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::Duration;

use ratekeeper_core::{Limit, Rate, RefillStyle, RetryAfter};
use ratekeeper_rules::response::{
    DenialResponse, HeaderSet, Jitter, LimitDecision, LimitResponse, ResponseContext,
};

use super::{NOW, allowed, denied, denied_for, fixed, name, response};

/// Compares with a stored output. To update the stored outputs, run the tests with `RATEKEEPER_WRITE_GOLDEN=1`.
fn check_golden(name: &str, printed: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/response/golden").join(name);
    if std::env::var_os("RATEKEEPER_WRITE_GOLDEN").is_some() {
        fs::write(&path, printed).unwrap();
    }
    let stored = fs::read_to_string(&path).unwrap();
    assert!(printed == stored, "{name} differs; now it is\n{printed}");
}

/// Prints a response roughly as it is sent.
fn print(out: &mut String, title: &str, response: &LimitResponse) {
    write!(out, "{}# {title}\n\n", if out.is_empty() { "" } else { "\n" }).unwrap();
    if let Some(status) = response.status() {
        writeln!(out, "status: {status}").unwrap();
    }
    for header in response.headers() {
        writeln!(out, "{}: {}", header.name, header.value).unwrap();
    }
    if !response.body().is_empty() {
        writeln!(out, "\n{}", response.body()).unwrap();
    }
}

#[test]
fn every_header_set_in_every_situation() {
    let (burst, daily, odd) = (name("burst"), name("daily"), name(r#"the "odd\one""#));
    let rate = Rate::new(3, Duration::from_secs(2)).unwrap();
    let bucket = Limit::token_bucket(100, rate, RefillStyle::Smooth).unwrap();
    let day = fixed(1_000, 86_400);
    let (short, long) = (Duration::from_millis(1_500), Duration::from_secs(3_725));

    let usual = ResponseContext::at(NOW);
    let degraded = ResponseContext { is_degraded: true, ..usual };
    let jitter = ResponseContext { jitter: Some(Jitter { at_most: 9, random: u64::MAX / 2 }), ..usual };
    let plenty = LimitDecision::new(&burst, &bucket, allowed(97, short));
    let last = LimitDecision::new(&daily, &day, allowed(0, long));
    let empty = LimitDecision::new(&burst, &bucket, denied_for(short));
    let too_large = denied(40, RetryAfter::Never, long);
    let never = LimitDecision { cost: 101, ..LimitDecision::new(&burst, &bucket, too_large) };
    let waits = LimitDecision::new(&daily, &day, denied_for(long));
    let known = LimitDecision { partition: Some(b"trial121323"), ..plenty };
    let strange = LimitDecision::new(&odd, &day, denied_for(Duration::from_secs(1)));

    for set in HeaderSet::all() {
        let mut out = String::new();
        for (title, limits, context) in [
            ("allowed", &[plenty][..], &usual),
            ("allowed, of a partition", &[known], &usual),
            ("allowed by two, and that was the last", &[plenty, last], &usual),
            ("allowed without the store", &[plenty], &degraded),
            ("denied", &[empty], &usual),
            ("denied by one of two", &[plenty, waits], &usual),
            ("denied by both", &[empty, waits], &usual),
            ("denied, with jitter in the wait", &[empty, waits], &jitter),
            ("denied for ever", &[never], &usual),
            ("denied for ever by one of two that deny", &[waits, never], &usual),
            ("denied by a limit with an odd name", &[strange], &usual),
            ("denied without the store", &[empty], &degraded),
            ("no limits", &[], &usual),
        ] {
            print(&mut out, title, &response(set.name(), limits, context));
        }
        check_golden(&format!("{}.txt", set.name()), &out);
    }
}

#[test]
fn custom_denial_responses() {
    let (burst, daily) = (name("burst"), name("daily"));
    let limit = fixed(100, 60);
    let (usual, mut out) = (ResponseContext::at(NOW), String::new());
    let body = DenialResponse::default().with_body("Slow down, please.\n");
    let html = body.clone().with_content_type("text/html").unwrap();
    for (title, custom) in [
        ("a status, repeated in the default body", DenialResponse::default().with_status(403).unwrap()),
        ("a body is plain text", body.clone()),
        ("a body of a type", html.clone()),
        (
            "a type for the usual body",
            DenialResponse::default().with_content_type("application/json").unwrap(),
        ),
        ("everything", html.with_status(420).unwrap()),
        ("an empty body has no type", DenialResponse::default().with_body("")),
    ] {
        let denied = denied_for(Duration::from_secs(9));
        let limit = LimitDecision { custom: Some(&custom), ..LimitDecision::new(&burst, &limit, denied) };
        print(&mut out, title, &response("none", &[limit], &usual));
    }
    // Of several limits that deny, the one with the longest wait determines the response.
    let shorter = LimitDecision {
        custom: Some(&body),
        ..LimitDecision::new(&burst, &limit, denied_for(Duration::ZERO))
    };
    let longer = LimitDecision::new(&daily, &limit, denied_for(Duration::from_secs(9)));
    print(&mut out, "of the shorter wait: not used", &response("none", &[shorter, longer], &usual));
    // A limit that allows does not.
    let allows = LimitDecision { decision: allowed(1, Duration::ZERO), ..shorter };
    print(&mut out, "of a limit that allows: not used", &response("none", &[allows, longer], &usual));
    let degraded = ResponseContext { is_degraded: true, ..usual };
    print(&mut out, "without the store: used as well", &response("none", &[shorter], &degraded));
    check_golden("custom.txt", &out);
}
