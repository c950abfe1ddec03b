//! `migrate`: converts another rate limiter's configuration.

use std::fs;
use std::path::PathBuf;

use crate::cli::{Output, file, run};

/// Creates an empty folder for this test run.
fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    // A previous run may have left one.
    let _ = fs::remove_dir_all(&path);
    fs::create_dir(&path).unwrap();
    path
}

#[test]
fn folder_is_migrated_to_a_valid_configuration() {
    let folder = folder("envoy-good");
    let files = [
        (
            "b.yml",
            "domain: second\ndescriptors: [{ key: b, rate_limit: { unit: year, requests_per_unit: 2 } }]\n",
        ),
        (
            "a.yaml",
            "domain: first\ndescriptors: [{ key: a, value: 'x*', rate_limit: { unlimited: true } }]\n",
        ),
        ("notes.txt", "domain: third\n"),
        (".#a.yaml", "domain: fourth\n"),
    ];
    for (name, text) in files {
        fs::write(folder.join(name), text).unwrap();
    }
    fs::create_dir(folder.join("folder.yaml")).unwrap();
    let printed = "\
# Limits are kept in this process. To share them among instances, write as in
# store: { redis: { address: redis://127.0.0.1:6379, secret: \"${RATEKEEPER_SECRET}\", instances: 2 } }
store: memory

# The Envoy API (rate limit service), and the HTTP API with POST /json. Addresses that other machines reach need a token.
apis: { envoy: 127.0.0.1:8081, http: 127.0.0.1:8080 }

domains:
  first:
    - key: a
      value: \"x*\"
      unlimited: true
  second:
    - key: b
      fixed_window: { limit: 2, window: 365d, align: clock }
";
    let migrated = run(&["migrate", "envoy", "envoy-good"], "");
    assert_eq!(migrated, Output { code: 0, stdout: printed.to_owned(), stderr: String::new() });

    file("migrated.yaml", printed);
    let summary = "migrated.yaml: 2 domains with 1 limit in memory, no gateway, HTTP API on 127.0.0.1:8080, Envoy API on 127.0.0.1:8081\n";
    let checked = run(&["validate", "migrated.yaml"], "");
    assert_eq!(checked, Output { code: 0, stdout: summary.to_owned(), stderr: String::new() });
}

/// A partial migration would leave requests unlimited.
#[test]
fn errors_are_reported_and_nothing_is_converted() {
    let folder = folder("envoy-bad");
    fs::write(folder.join("a.yaml"), "domain: edge\n").unwrap();
    fs::write(folder.join("b.yaml"), "domain: edge\ndescriptors: [{ key: a, rate_limit: { unit: dya } }]\n")
        .unwrap();
    let errors = "\
error: duplicate domain `edge`, already defined in envoy-bad/a.yaml
  --> envoy-bad/b.yaml:1:9
   |
 1 | domain: edge
   |         ^^^^
   = help: merge the two files, or rename one of the domains

error: unknown unit `dya`
  --> envoy-bad/b.yaml:2:45
   |
 2 | descriptors: [{ key: a, rate_limit: { unit: dya } }]
   |                                             ^^^
   = help: did you mean `day`? Units: second, minute, hour, day, week, month, year

2 errors
";
    let migrated = run(&["migrate", "envoy", "envoy-bad"], "");
    assert_eq!(migrated, Output { code: 2, stdout: String::new(), stderr: errors.to_owned() });
}

#[test]
fn empty_or_missing_folder_is_an_error() {
    let folder = folder("envoy-none");
    let none = "error: envoy-none has no .yaml or .yml file\n";
    let migrated = run(&["migrate", "envoy", "envoy-none"], "");
    assert_eq!(migrated, Output { code: 2, stdout: String::new(), stderr: none.to_owned() });
    fs::remove_dir(folder).unwrap();
    let migrated = run(&["migrate", "envoy", "envoy-none"], "");
    assert_eq!((migrated.code, &*migrated.stdout), (1, ""));
    assert!(migrated.stderr.starts_with("error: cannot read envoy-none: "), "{migrated:?}");
}

#[test]
fn too_many_files_or_bytes_are_an_error() {
    let folder = folder("envoy-many");
    for number in 0..1_001 {
        fs::write(folder.join(format!("{number}.yaml")), "").unwrap();
    }
    let errors = "error: envoy-many has more than 1000 .yaml and .yml files\n";
    let migrated = run(&["migrate", "envoy", "envoy-many"], "");
    assert_eq!(migrated, Output { code: 2, stdout: String::new(), stderr: errors.to_owned() });
    let folder = self::folder("envoy-large");
    for number in 0..11 {
        fs::write(folder.join(format!("{number}.yaml")), "#".repeat(1_000_000)).unwrap();
    }
    let errors = "error: the files in envoy-large have more than 10000000 bytes\n";
    let migrated = run(&["migrate", "envoy", "envoy-large"], "");
    assert_eq!(migrated, Output { code: 2, stdout: String::new(), stderr: errors.to_owned() });
}
