//! Configurations: a valid text has one meaning, and the errors of an invalid one are helpful and safe to print.

use ratekeeper_config::envoy::{DescriptorLimit, migrate};
use ratekeeper_config::{Config, Diagnostic, EmptyEnvironment, parse, parse_limit, to_yaml};

/// Checks the text as a limit, as a configuration file, and as a file of Envoy's rate limit service.
pub(crate) fn check(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match parse_limit(text) {
        Ok(limit) => assert_eq!(parse_limit(&to_yaml(&limit)), Ok(limit), "it reads as it is printed"),
        Err(error) => check_error(&error, text),
    }
    check_migration(text);
    match parse(text, &EmptyEnvironment) {
        Ok(config) => {
            check_config(&config);
            let again = parse(text, &EmptyEnvironment).expect("it was read once");
            assert_eq!(format!("{again:?}"), format!("{config:?}"), "a text has one meaning");
        }
        Err(errors) => {
            assert!(errors.iter().len() > 0, "rejected without an error");
            assert!(errors.iter().is_sorted_by_key(|error| (error.line(), error.column())));
            errors.iter().for_each(|error| check_error(error, text));
            check_harmless(&errors.in_file("limits.yaml").to_string());
        }
    }
}

/// Checks the text as a file of Envoy's rate limit service: migrated, it has one domain.
fn check_migration(text: &str) {
    match migrate(&[("limits.yaml", text)]) {
        Ok(migrated) => {
            let config = parse(&migrated, &EmptyEnvironment).expect("what we print is right");
            assert_eq!(config.domains.len(), 1, "{migrated}");
            check_config(&config);
        }
        Err(errors) => errors.iter().for_each(|error| check_error(error, text)),
    }
}

fn check_config(config: &Config) {
    let rules = config.rules.rules().len();
    assert_eq!(
        (config.names.len(), config.deny_responses.len()),
        (rules, rules),
        "each rule has a name and an answer"
    );
    for rule in config.rules.rules() {
        assert_eq!(parse_limit(&to_yaml(&rule.limit)).as_ref(), Ok(&rule.limit), "{}", rule.name);
    }
    let mut names: Vec<&str> = config.rules.limits().iter().map(|kept| kept.name.as_str()).collect();
    names.sort_unstable();
    assert!(names.is_sorted_by(|one, next| one < next), "two limits of one name: {names:?}");
    let mut levels: Vec<_> = config.domains.iter().map(|domain| &domain.descriptors).collect();
    while let Some(level) = levels.pop() {
        for descriptor in level.iter() {
            if let DescriptorLimit::Rule(number) = descriptor.limit {
                assert!((config.named_limits..rules).contains(&number), "{} has no rule", descriptor.key);
            }
            levels.push(&descriptor.descriptors);
        }
    }
    if let Some(gateway) = &config.gateway {
        assert!(!gateway.listeners.is_empty() && !gateway.routes.is_empty(), "a gateway without an API");
        for upstream in &gateway.upstreams {
            let is_tls = upstream.addresses.first().map(|address| address.is_tls);
            assert!(is_tls.is_some(), "{} has no address", upstream.name);
            assert!(upstream.addresses.iter().all(|it| Some(it.is_tls) == is_tls && it.port > 0));
        }
        for route in &gateway.routes {
            assert!(route.upstream < gateway.upstreams.len(), "{} goes nowhere", route.id);
            assert!(
                route.concurrency.iter().all(|number| *number < config.concurrency.len()),
                "{} has no concurrency limit",
                route.id
            );
        }
    }
    for route in config.gateway.iter().flat_map(|gateway| &gateway.routes) {
        let mut limits = route.limits.clone();
        limits.sort_unstable();
        assert!(limits.is_sorted_by(|one, next| one < next), "{} has a limit twice", route.id);
        assert!(
            limits.iter().all(|number| *number < config.named_limits),
            "{} has a limit that is none",
            route.id
        );
    }
}

fn check_error(error: &Diagnostic, text: &str) {
    // Every character that some reader takes for the end of a line.
    let lines = 1 + text.matches(['\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}']).count();
    assert!((1..=lines + 1).contains(&error.line()), "line {} of {lines}", error.line());
    assert!((1..=text.chars().count() + 1).contains(&error.column()), "column {}", error.column());
    assert!(!error.message().is_empty() && !error.help().is_empty());
    let message = error.to_string();
    check_harmless(&message);
    // At most a screen, plus the names that the text may contain.
    assert!(
        message.chars().count() <= 2_000 + text.chars().count(),
        "{} characters",
        message.chars().count()
    );
}

/// Checks that a message contains no control character, for any input.
fn check_harmless(message: &str) {
    assert!(super::is_harmless(message), "{message:?}");
}
