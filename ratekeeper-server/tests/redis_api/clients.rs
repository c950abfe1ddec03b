//! Real clients: redis-cli, redis-benchmark and redis-py.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use testbed::TEST_TIMEOUT;
use tokio::process::Command;
use tokio::time::timeout;

use super::support::{TestApi, TestSettings};

/// Runs a program to its successful end, and returns its output.
async fn run(program: impl AsRef<std::ffi::OsStr>, arguments: &[&str]) -> String {
    let program = program.as_ref();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(4 * TEST_TIMEOUT, command.output()).await.unwrap();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {stdout}\n{stderr}", program.display());
    stdout.into_owned()
}

#[tokio::test]
async fn redis_cli_can_check_limits() {
    let api = TestApi::start_with(TestSettings {
        token: Some("open-sesame-open-sesame"),
        ..TestSettings::default()
    })
    .await;
    let port = api.address.port().to_string();
    let cli = async |arguments: &[&str]| {
        let options = ["-p", &port, "-a", "open-sesame-open-sesame", "--no-auth-warning"];
        run("redis-cli", &[&options, arguments].concat()).await
    };
    assert_eq!(cli(&["CL.THROTTLE", "user:alice", "14", "30", "60"]).await, "0\n15\n14\n-1\n2\n");
    assert_eq!(cli(&["-3", "CL.THROTTLE", "user:alice", "14", "30", "60", "15"]).await, "1\n15\n14\n2\n2\n");
    assert_eq!(cli(&["THROTTLE", "user:bob", "10", "100", "60"]).await, "1\n10\n9\n1\n0\n");
    assert_eq!(cli(&["RK.CHECK", "per-user", "alice"]).await, "1\n3\n2\n-1\n60000\n0\n");
    assert!(cli(&["FOO"]).await.starts_with("ERR unknown command 'FOO'"));
    assert!(cli(&["INFO"]).await.contains("connected_clients:1"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_benchmark_gets_exactly_the_limit() {
    let api = TestApi::start().await;
    let port = api.address.port().to_string();
    let line = ["-p", &port, "-n", "20000", "-c", "20", "-P", "16", "--csv"];
    // The bucket holds half of what is requested.
    let command = ["CL.THROTTLE", "user", "9999", "1", "3600"];
    let output = run("redis-benchmark", &[&line[..], &command].concat()).await;
    assert!(output.contains("CL.THROTTLE"), "{output}");
    let info = api.info().await;
    assert_eq!((&*info["commands_allowed"], &*info["commands_denied"]), ("10000", "10000"));
}

/// A Python with redis-py, in a virtual environment below the build directory.
async fn python() -> PathBuf {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (venv, ready) = (built.join("redis-py"), built.join("redis-py/ready"));
    if !ready.is_file() {
        run("python3", &["-m", "venv", "--clear", venv.to_str().unwrap()]).await;
        run(venv.join("bin/pip"), &["install", "--quiet", "redis"]).await;
        std::fs::write(ready, "").unwrap();
    }
    venv.join("bin/python")
}

const SCRIPT: &str = r#"
import sys
import redis

port = int(sys.argv[1])
for protocol in 2, 3:
    client = redis.Redis(port=port, password="open-sesame-open-sesame", protocol=protocol, client_name="test")
    key = f"user:{protocol}"
    assert client.ping() is True
    assert client.echo("hello") == b"hello"
    assert client.client_getname() in ("test", b"test"), client.client_getname()
    assert client.execute_command("CL.THROTTLE", key, 1, 1, 60) == [0, 2, 1, -1, 60]
    pipeline = client.pipeline(transaction=False)
    for _ in range(3):
        pipeline.execute_command("CL.THROTTLE", key, 1, 1, 60)
    pipeline.execute_command("RK.CHECK", "per-user", key)
    assert pipeline.execute() == [
        [0, 2, 0, -1, 120], [1, 2, 0, 60, 120], [1, 2, 0, 60, 120], [1, 3, 2, -1, 60000, 0]
    ]
    try:
        client.execute_command("CL.THROTTLE", key, "x", 1, 60)
        raise SystemExit("an error was expected")
    except redis.ResponseError as error:
        assert "Couldn't parse as integer: x" in str(error), error
    assert client.info()["loading"] == 0
    assert "cl.throttle" in client.command()
try:
    redis.Redis(port=port, password="wrong").ping()
    raise SystemExit("an error was expected")
except redis.AuthenticationError:
    pass
print("done")
"#;

#[tokio::test]
async fn redis_py_works_with_resp2_and_resp3() {
    let api = TestApi::start_with(TestSettings {
        token: Some("open-sesame-open-sesame"),
        ..TestSettings::default()
    })
    .await;
    let port = api.address.port().to_string();
    assert_eq!(run(python().await, &["-c", SCRIPT, &port]).await, "done\n");
}
