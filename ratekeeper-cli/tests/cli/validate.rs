//! `validate` and `schema`: summaries and errors of a configuration file.

use std::path::PathBuf;

use crate::cli::{Ended, file, ratekeeper, run};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
const PASSWORD: &str = "hunter2";

fn validate(path: &str) -> Ended {
    run(&["validate", path], "")
}

/// Runs `validate` with environment variables.
fn validate_with(path: &str, variables: &[(&str, &str)]) -> Ended {
    let output = ratekeeper(&["validate", path]).envs(variables.iter().copied()).output().unwrap();
    Ended {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

#[test]
fn valid_file_is_summarised_in_one_line() {
    let secrets = [
        ("REDIS_PASSWORD", PASSWORD),
        ("RATEKEEPER_SECRET", "0123456789abcdef"),
        ("UPSTREAM_TOKEN", PASSWORD),
        ("ADMIN_TOKEN", "0123456789abcdef"),
    ];
    for (name, said) in [
        ("social", "6 limits in memory, no gateway"),
        ("gateway", "1 limit in memory, 1 route, listening on 127.0.0.1:8080"),
        (
            "everything",
            "6 limits and 1 domain with 5 limits in Redis, 4 routes, listening on 127.0.0.1:8080, 127.0.0.1:8443, \
             127.0.0.1:8090, HTTP API on 127.0.0.1:9181, Envoy API on 127.0.0.1:9182, Redis API on 127.0.0.1:6380",
        ),
    ] {
        let path = format!("{EXAMPLES}/{name}.yaml");
        let ended = validate_with(&path, &secrets);
        assert_eq!(ended, Ended { code: 0, stdout: format!("{path}: {said}\n"), stderr: String::new() });
    }
}

#[test]
fn all_mistakes_are_reported_in_one_run() {
    file(
        "three.yaml",
        "limits:\n  per-user:\n    key: usr\n    token_bucket: { capacity: 0 }\nstor: memory\n",
    );
    assert_eq!(
        validate("three.yaml"),
        Ended {
            code: 2,
            stdout: String::new(),
            stderr: "\
error: unknown key `usr`
  --> three.yaml:3:10
   |
 3 |     key: usr
   |          ^^^
   = help: write `ip`, `global`, or as in `{ header: X-User-Id, fallback: anonymous }`

error: capacity is 0, which would deny every request
  --> three.yaml:4:31
   |
 4 |     token_bucket: { capacity: 0 }
   |                               ^
   = help: write a whole number from 1 to 4294967295

error: unknown field `stor` in the file
  --> three.yaml:5:1
   |
 5 | stor: memory
   | ^^^^
   = help: did you mean `store`? Fields: store, client, paths, responses, jwt, limits, domains, gateway, apis, admin, log

3 errors
"
            .to_owned()
        }
    );
    file("one.yaml", "stor: memory\n");
    assert!(validate("one.yaml").stderr.ends_with("\n\n1 error\n"));
    file("endless.yaml", "a: 1\n".repeat(5) + &(0..500).map(|n| format!("b{n}: 1\n")).collect::<String>());
    assert!(validate("endless.yaml").stderr.ends_with("\n\n100 or more errors\n"));
}

#[test]
fn unreadable_file_exits_with_1_and_invalid_file_with_2() {
    let ended = validate("nowhere.yaml");
    assert_eq!((ended.code, &*ended.stdout), (1, ""));
    assert_eq!(ended.stderr, "error: cannot read nowhere.yaml: No such file or directory (os error 2)\n");
    file("latin-config.yaml", b"store: memory # \xe9\n");
    let ended = validate("latin-config.yaml");
    assert_eq!(
        (ended.code, &*ended.stderr),
        (2, "error: latin-config.yaml is not UTF-8\n   = help: save the file as UTF-8\n")
    );
    assert_eq!(run(&["validate"], "").code, 2);
}

#[test]
fn files_are_resolved_from_the_folder_of_the_configuration() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("beside");
    std::fs::create_dir_all(&folder).unwrap();
    file("beside/secret.txt", format!("{PASSWORD}\n"));
    file("beside/empty.txt", "\n");
    file("beside/latin.txt", b"\xe9");
    file("beside/large.txt", "x".repeat(1_000_001));
    let config = |name: &str| {
        format!(
            "store: {{ redis: {{ address: redis://127.0.0.1, secret: {{ file: {name} }} }} }}\nlimits: {{ a: {{ token_bucket: }} }}\n"
        )
    };
    file("beside/good.yaml", config("secret.txt"));
    let ended = validate("beside/good.yaml");
    assert_eq!((ended.code, &*ended.stdout), (0, "beside/good.yaml: 1 limit in Redis, no gateway\n"));
    for (name, what, column) in [
        ("empty.txt", "the secret is empty", 55),
        ("nowhere.txt", "cannot read the file: No such file or directory (os error 2)", 63),
        ("latin.txt", "cannot read the file: it is not UTF-8", 63),
        ("large.txt", "cannot read the file: it has more than 1000000 bytes", 63),
    ] {
        file("beside/bad.yaml", config(name));
        let ended = validate("beside/bad.yaml");
        let expected = format!("error: {what}\n  --> beside/bad.yaml:1:{column}\n");
        assert!(ended.code == 2 && ended.stderr.starts_with(&expected), "{ended:?}");
    }
}

#[test]
fn secrets_are_never_printed() {
    let everything = format!("{EXAMPLES}/everything.yaml");
    let ended = validate_with(&everything, &[("REDIS_PASSWORD", PASSWORD)]);
    assert_eq!(ended.code, 2);
    assert!(
        ended.stderr.contains("error: environment variable `RATEKEEPER_SECRET` is not set\n"),
        "{}",
        ended.stderr
    );
    for yaml in [
        format!("store: redis://user:{PASSWORD}@127.0.0.1\nlimits: {{ a: {{ token_bucket: }} }}"),
        format!("store: redis//user:{PASSWORD}@127.0.0.1"),
        format!("store: {{ redis: {{ adress: redis://user:{PASSWORD}@127.0.0.1 }} }}"),
        format!("store: {{ redis: {{ address: redis://h, secret: {PASSWORD}, instances: x }} }}"),
        format!("store: {{ redis: {{ address: redis://h, secrt: {PASSWORD} }} }}"),
        format!("store:\n  redis:\n    address: redis://h\n    secret:\n      - {PASSWORD}"),
        format!("store:\n  redis:\n    address: redis://h\n    secret: |\n      {PASSWORD}\n   oops"),
        format!(
            "store:\n  redis:\n    address: redis://h\n    tls: {{ certificate: {{ file: x }}, key: {PASSWORD} }}"
        ),
        format!("jwt: {{ keys: {PASSWORD} }}"),
        format!("admin: {{ listen: 0.0.0.0:9180, token: {PASSWORD} }}"),
    ] {
        file("secret.yaml", &yaml);
        let ended = validate("secret.yaml");
        assert!(!ended.stdout.contains(PASSWORD) && !ended.stderr.contains(PASSWORD), "{ended:?}");
    }
}

#[test]
fn schema_is_printed_unchanged() {
    let schema =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../ratekeeper-config/schema.json"));
    assert_eq!(run(&["schema"], ""), Ended { code: 0, stdout: schema.unwrap(), stderr: String::new() });
}

#[test]
#[cfg(target_os = "linux")]
fn write_error_on_stdout_is_reported() {
    for args in [&["schema"][..], &["validate", &format!("{EXAMPLES}/gateway.yaml")]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = ratekeeper(args).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stderr.starts_with(b"error: cannot write to stdout: "));
    }
}
