//! `validate` and `schema`: summaries and errors of a configuration file.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::cli::{Output, check_golden, file, ratekeeper, run};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
const PASSWORD: &str = "hunter2";

fn validate(path: &str) -> Output {
    run(&["validate", path], "")
}

/// Runs `validate` with environment variables.
fn validate_with(path: &str, variables: &[(&str, &str)]) -> Output {
    ratekeeper(&["validate", path]).envs(variables.iter().copied()).output().unwrap().into()
}

#[test]
fn valid_file_is_summarized_in_one_line() {
    let secrets = [
        ("REDIS_PASSWORD", PASSWORD),
        ("RATEKEEPER_SECRET", "0123456789abcdef"),
        ("UPSTREAM_TOKEN", PASSWORD),
        ("ADMIN_TOKEN", "0123456789abcdef"),
    ];
    for (name, summary) in [
        ("social", "6 limits in memory, no gateway"),
        ("gateway", "1 limit in memory, 1 route, listening on 127.0.0.1:8080"),
        (
            "everything",
            "6 limits and 1 domain with 5 limits in Redis, 4 routes, listening on 127.0.0.1:8080, 127.0.0.1:8443, \
             127.0.0.1:8090, HTTP API on 127.0.0.1:9181, Envoy API on 127.0.0.1:9182, Redis API on 127.0.0.1:6380",
        ),
    ] {
        let path = format!("{EXAMPLES}/{name}.yaml");
        let output = validate_with(&path, &secrets);
        assert_eq!(output, Output { code: 0, stdout: format!("{path}: {summary}\n"), stderr: String::new() });
    }
}

#[test]
fn all_errors_are_reported_in_one_run() {
    file(
        "three.yaml",
        "limits:\n  per-user:\n    key: usr\n    token_bucket: { capacity: 0 }\nstor: memory\n",
    );
    assert_eq!(
        validate("three.yaml"),
        Output {
            code: 2,
            stdout: String::new(),
            stderr: "\
error: unknown key `usr`
  --> three.yaml:3:10
   |
 3 |     key: usr
   |          ^^^
   = help: write `ip`, `global`, or as in `{ header: X-User-Id, fallback: anonymous }`

error: `capacity` is 0, which would deny every request
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
    let output = validate("nowhere.yaml");
    assert_eq!((output.code, &*output.stdout), (1, ""));
    assert_eq!(
        output.stderr,
        "error: cannot read nowhere.yaml: No such file or directory\n   = help: check the path\n"
    );
    file("latin-config.yaml", b"store: memory # \xe9\n");
    let output = validate("latin-config.yaml");
    assert_eq!(
        (output.code, &*output.stderr),
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
    let output = validate("beside/good.yaml");
    assert_eq!((output.code, &*output.stdout), (0, "beside/good.yaml: 1 limit in Redis, no gateway\n"));
    for (name, what, column) in [
        ("empty.txt", "`secret` is empty", 55),
        ("nowhere.txt", "cannot read the file: No such file or directory", 63),
        ("latin.txt", "cannot read the file: it is not UTF-8", 63),
        ("large.txt", "cannot read the file: it has more than 1000000 bytes", 63),
    ] {
        file("beside/bad.yaml", config(name));
        let output = validate("beside/bad.yaml");
        let expected = format!("error: {what}\n  --> beside/bad.yaml:1:{column}\n");
        assert!(output.code == 2 && output.stderr.starts_with(&expected), "{output:?}");
    }
}

#[test]
fn secrets_are_never_printed() {
    let everything = format!("{EXAMPLES}/everything.yaml");
    let output = validate_with(&everything, &[("REDIS_PASSWORD", PASSWORD)]);
    assert_eq!(output.code, 2);
    assert!(
        output.stderr.contains("error: environment variable `RATEKEEPER_SECRET` is not set\n"),
        "{}",
        output.stderr
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
        let output = validate("secret.yaml");
        assert!(!output.stdout.contains(PASSWORD) && !output.stderr.contains(PASSWORD), "{output:?}");
    }
}

/// `validate` and `run` read the address of Redis with one parser.
#[test]
fn redis_addresses_that_cannot_be_used_are_invalid() {
    for (address, reason) in [
        ("redis://h:1/abc", "the database is not a number"),
        ("redis://h:1/-1", "the database is not a number"),
        ("redis://h:1/1/2", "the database is not a number"),
        ("unix:///run/redis.sock?db=x", "the database is not a number"),
        ("redis://h:0", "the host or port is invalid"),
        ("redis://ho st:1", "the host or port is invalid"),
        ("redis+cluster://h:1,ho st:2", "the host or port is invalid"),
        ("redis://a:1,b:2", "only Sentinel and Cluster have several hosts"),
        ("redis+sentinel://h:1", "the name of the master is missing"),
        ("redis+cluster://h:1/3", "a cluster has no numbered databases"),
        ("redis://u:p/x@h:1", "the password contains `/`, `?` or `#`"),
        ("redis://u:p#x@h:1", "the password contains `/`, `?` or `#`"),
        ("redis://u:p?x@h:1", "the password contains `/`, `?` or `#`"),
        ("redis://h:1?password=x", "the address contains `?` or `#`"),
        ("redis+sentinel://h:1/m?x", "the address contains `?` or `#`"),
    ] {
        file(
            "address.yaml",
            format!("store: \"{address}\"\nlimits: {{ a: {{ key: ip, token_bucket: }} }}\n"),
        );
        let output = validate("address.yaml");
        assert_eq!(output.code, 2, "{address}: {output:?}");
        assert!(output.stderr.starts_with(&format!("error: {reason}")), "{address}: {output:?}");
    }
    for address in [
        "redis://:p%2Fx@h/15",
        "rediss://[::1]:6379",
        "unix:///run/redis.sock?db=3",
        "redis+sentinel://u:p@a,b:1/master",
        "rediss+cluster://a:1,[::1]:2",
    ] {
        file(
            "address.yaml",
            format!("store: \"{address}\"\nlimits: {{ a: {{ key: ip, token_bucket: }} }}\n"),
        );
        assert_eq!(validate("address.yaml").code, 0, "{address}");
    }
}

/// The configuration of the explanation has every kind of row.
const EXPLAINED: &str = include_str!("explain.yaml");

#[test]
fn explanation_shows_listeners_routes_limits_keys_tiers_and_settings() {
    file("explain.yaml", EXPLAINED);
    let output = run(&["validate", "explain.yaml", "--explain"], "");
    assert_eq!((output.code, &*output.stderr), (0, ""));
    check_golden("explain.txt", &output.stdout);
}

#[test]
fn explanation_as_json_has_the_rows_of_the_tables() {
    file("explain-json.yaml", EXPLAINED);
    let output = run(&["validate", "explain-json.yaml", "--explain", "--format", "json"], "");
    assert_eq!((output.code, &*output.stderr), (0, ""));
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(
        report["limits"][0],
        json!({
            "limit": "per-user",
            "key": "{ header: x-user-id, fallback: ip }",
            "tier": "client 192.0.2.0/24",
            "amount": "token_bucket: { capacity: 200, refill: 100/s, style: smooth }",
            "options": ["when client 10.0.0.0/8"],
        })
    );
    assert_eq!(
        report["routes"][0],
        json!({
            "route": "upload",
            "matches": "POST|PUT /files/**",
            "upstream": "http://127.0.0.1:8081",
            "limits": ["per-user", "in-flight"],
        })
    );
    for (table, rows) in [("listeners", 5), ("upstreams", 1)] {
        assert_eq!(report[table].as_array().map(Vec::len), Some(rows), "{report:#}");
    }
    let default = json!({ "setting": "store.redis.deadline", "value": "20ms" });
    assert!(report["settings"].as_array().unwrap().contains(&default), "{report:#}");
}

/// Runs `validate --format json`; returns its exit code, its report and its messages.
fn validate_json(path: &str) -> (i32, Value, String) {
    let output = run(&["validate", path, "--format", "json"], "");
    (output.code, serde_json::from_str(&output.stdout).unwrap_or_default(), output.stderr)
}

#[test]
fn json_report_has_errors_and_warnings_with_line_and_column() {
    file("json-good.yaml", "limits: { a: { key: ip, token_bucket: } }\n");
    let report = json!({ "file": "json-good.yaml", "valid": true, "errors": [], "warnings": [] });
    assert_eq!(validate_json("json-good.yaml"), (0, report, String::new()));

    file(
        "json-warning.yaml",
        "limits:\n  a: { key: ip, token_bucket: }\ngateway: { routes: [{ id: r, upstream: http://h, limits: none }] }\n",
    );
    let (code, report, stderr) = validate_json("json-warning.yaml");
    assert_eq!((code, &*stderr, &report["valid"], &report["errors"]), (0, "", &json!(true), &json!([])));
    assert_eq!(
        report["warnings"],
        json!([{
            "line": 2,
            "column": 3,
            "message": "no route uses the limit `a`",
            "help": "add it to a route, as in `limits: [a]`, or remove it",
        }])
    );

    file("json-bad.yaml", "limits:\n  a: { key: ip, token_bucket: { capacity: 0 } }\nstor: memory\n");
    let (code, report, stderr) = validate_json("json-bad.yaml");
    assert_eq!((code, &*stderr, &report["valid"], &report["warnings"]), (2, "", &json!(false), &json!([])));
    let errors = report["errors"].as_array().unwrap();
    let places: Vec<_> = errors.iter().map(|it| (it["line"].as_u64(), it["column"].as_u64())).collect();
    assert_eq!(places, [(Some(2), Some(43)), (Some(3), Some(1))], "{report:#}");
    assert_eq!(errors[0]["message"], "`capacity` is 0, which would deny every request");
    assert_eq!(errors[0]["help"], "write a whole number from 1 to 4294967295");

    let (code, report, stderr) = validate_json("nowhere.yaml");
    assert_eq!((code, report), (1, Value::Null));
    assert_eq!(
        stderr,
        "error: cannot read nowhere.yaml: No such file or directory\n   = help: check the path\n"
    );
}

/// Warnings do not fail a deployment, and do not mix with the data on stdout.
#[test]
fn warnings_go_to_stderr_and_exit_with_0() {
    file("warning.yaml", "store: redis://127.0.0.1\nlimits: { a: { key: ip, token_bucket: } }\n");
    let output = validate("warning.yaml");
    assert_eq!((output.code, &*output.stdout), (0, "warning.yaml: 1 limit in Redis, no gateway\n"));
    let expected = "warning: keys are stored without a secret: ";
    assert!(
        output.stderr.starts_with(expected) && output.stderr.contains("\n  --> warning.yaml:1:8\n"),
        "{output:?}"
    );
}

#[test]
fn schema_is_printed_unchanged() {
    let stdout = ratekeeper_config::schema();
    assert_eq!(run(&["schema"], ""), Output { code: 0, stdout, stderr: String::new() });
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
