//! Helpers for tests of whole files.

use std::path::Path;

use ratekeeper_config::{Config, Environment, Errors, RedisAddressError, parse};

/// The directory of the shipped examples.
pub(crate) const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");

/// An environment with a few variables and the files of the examples.
pub(crate) struct TestEnvironment;

impl Environment for TestEnvironment {
    fn variable(&self, name: &str) -> Option<String> {
        match name {
            "REDIS_PASSWORD" => Some("hunter2".to_owned()),
            "RATEKEEPER_SECRET" => Some("correct horse battery staple".to_owned()),
            "UPSTREAM_TOKEN" => Some("hunter2".to_owned()),
            "ADMIN_TOKEN" => Some("0123456789abcdef".to_owned()),
            "EMPTY" => Some(String::new()),
            "WEB_ADDRESS" => Some("http://user:hunter2@127.0.0.1".to_owned()),
            "REDIS_ADDRESS" => Some("redis://user:hunter2/host".to_owned()),
            _ => None,
        }
    }

    fn file(&self, path: &str) -> Result<String, String> {
        if path == "encrypted" {
            return Ok("-----BEGIN ENCRYPTED PRIVATE KEY-----\n".to_owned());
        }
        std::fs::read_to_string(Path::new(EXAMPLES).join(path)).map_err(|_| "there is none".to_owned())
    }

    fn check_redis_address(&self, address: &str) -> Result<(), RedisAddressError> {
        ratekeeper::redis::check_address(address).map_err(|error| RedisAddressError {
            reason: error.reason.to_owned(),
            example: error.example.to_owned(),
        })
    }
}

/// Reads a configuration file.
pub(crate) fn read(yaml: &str) -> Result<Config, Errors> {
    parse(yaml, &TestEnvironment)
}

/// The shipped examples, with their paths.
pub(crate) fn examples() -> Vec<(String, String)> {
    let files = std::fs::read_dir(EXAMPLES).unwrap().map(|file| file.unwrap().path());
    let yaml = files.filter(|path| path.extension().is_some_and(|it| it == "yaml"));
    yaml.map(|path| (path.display().to_string(), std::fs::read_to_string(&path).unwrap())).collect()
}

/// Compares messages with a file of cases: a text, a line of dashes and the expected message each. With
/// `RATEKEEPER_WRITE_GOLDEN=1`, writes the messages first.
pub(crate) fn golden(name: &str, message: impl Fn(&str) -> String) {
    let path = format!("{}/tests/{name}", env!("CARGO_MANIFEST_DIR"));
    let read = || std::fs::read_to_string(&path).unwrap();
    let cases = |text: &str| -> Vec<(String, String)> {
        let cases = text.split_terminator("\n====\n");
        cases
            .map(|case| case.split_once("\n----\n").expect("a line of dashes in each case"))
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
            .collect()
    };
    if std::env::var_os("RATEKEEPER_WRITE_GOLDEN").is_some() {
        let all =
            cases(&read()).into_iter().map(|(yaml, _)| format!("{yaml}\n----\n{}\n====\n", message(&yaml)));
        std::fs::write(&path, all.collect::<String>()).unwrap();
    }
    for (yaml, expected) in cases(&read()) {
        assert_eq!(message(&yaml), expected, "{yaml}");
    }
}
