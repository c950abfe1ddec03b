//! Logs are lines of JSON without secrets.

use std::process::Command;

use nix::sys::signal::Signal;
use testbed::{RedisServer, wait_until};

use crate::run::support::{Client, Folder, Process, Upstream, get, ratekeeper};

const PASSWORD: &str = "canary-password";
const SECRET: &str = "canary-secret-of-the-keys";
const TOKEN: &str = "canary-upstream-token";
const CANARY: &str = "canary";

fn is_json(lines: &[String]) -> bool {
    let script = "import json,sys\nfor line in sys.stdin: assert isinstance(json.loads(line), dict)";
    let mut child =
        Command::new("python3").args(["-c", script]).stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, (lines.join("\n") + "\n").as_bytes()).unwrap();
    drop(input);
    child.wait().unwrap().success()
}

#[tokio::test]
async fn logs_and_metrics_contain_no_secrets_and_logs_are_json() {
    let (folder, upstream) = (Folder::new("secrets"), Upstream::start().await);
    let mut redis = RedisServer::start_with(&["--requirepass", PASSWORD]).unwrap();
    folder.write("token", TOKEN);
    let text = |limit: &str| {
        format!(
            "store: {{ redis: {{ address: \"redis://:${{REDIS_PASSWORD}}@127.0.0.1:{}\", secret: \"${{KEY_SECRET}}\", \
             on_store_failure: local, instances: 1 }} }}\n\
             limits: {{ a: {{ key: {{ header: X-User-Id, fallback: ip }}, {limit} }} }}\n\
             admin: 127.0.0.1:0\n\
             gateway:\n  listen: 127.0.0.1:0\n  routes:\n    - id: all\n      limits: all\n      upstream: http://{}\n      \
             request_headers: {{ set: {{ Authorization: {{ file: token }} }} }}\n",
            redis.port(),
            upstream.address()
        )
    };
    let good = text("fixed_window: { limit: 3 }");
    let file = folder.write("ratekeeper.yaml", &good);
    let mut command = ratekeeper();
    command.env("REDIS_PASSWORD", PASSWORD).env("KEY_SECRET", SECRET).env("RATEKEEPER_LOG", "trace");
    let mut process = Process::spawn(command.args(["run", "--config"]).arg(&file));
    let address = process.address().await;
    let mut client = Client::new(address);
    for _ in 0..5 {
        let secret =
            "X-User-Id: canary-user\r\nAuthorization: Bearer canary-client\r\nCookie: id=canary-cookie\r\n";
        client.get("/path?token=canary-query", secret).await.unwrap();
    }
    // Redis accepts the password.
    process.until_metric("ratekeeper_redis_up", 1).await;
    // Provoke every kind of message: an invalid file, a change that needs a restart, a store that fails and recovers.
    folder.write("ratekeeper.yaml", &text("fixed_widow: {}"));
    process.signal(Signal::SIGHUP);
    process.line("fixed_window").await;
    folder.write("ratekeeper.yaml", &good.replace("admin: 127.0.0.1:0", "admin: off"));
    process.signal(Signal::SIGHUP);
    process.line("restart to change it").await;
    folder.write("ratekeeper.yaml", &good.replace("redis://:$", "rediz://:$"));
    process.signal(Signal::SIGHUP);
    wait_until(|| process.count_lines("not reloaded") == 3).await;
    redis.kill().unwrap();
    for _ in 0..20 {
        client.get("/", "X-User-Id: canary-user\r\n").await.unwrap();
    }
    process.line("store unavailable").await;
    redis.restart().unwrap();
    process.line("store available again").await;
    let metrics = String::from_utf8(get(process.admin().await, "/metrics").await.body).unwrap();
    process.signal(Signal::SIGTERM);
    assert_eq!(process.ended().await, 0);
    wait_until(|| process.stdout().len() == 25).await;

    let (stderr, stdout) = (process.stderr(), process.stdout());
    assert!(is_json(&stderr), "{stderr:#?}");
    assert!(is_json(&stdout), "{stdout:#?}");
    for line in stderr.iter().chain(&stdout).map(String::as_str).chain(metrics.lines()) {
        assert!(!line.contains(CANARY), "{line}");
    }
    for part in
        [r#""id":""#, r#""decision":"denied""#, r#""limit":"a""#, r#""delay_us":"#, r#""route":"all""#]
    {
        assert!(stdout.iter().any(|line| line.contains(part)), "{part} is missing in {stdout:#?}");
    }
}

#[tokio::test]
async fn rejected_redis_password_is_not_printed() {
    let (folder, upstream) = (Folder::new("password"), Upstream::start().await);
    let redis = RedisServer::start_with(&["--requirepass", "another"]).unwrap();
    let text = format!(
        "store: {{ redis: {{ address: \"redis://:${{REDIS_PASSWORD}}@127.0.0.1:{}\", on_store_failure: closed }} }}\n\
         limits: {{ a: {{ key: ip, fixed_window: {{}} }} }}\nadmin: off\n\
         gateway: {{ listen: 127.0.0.1:0, routes: [{{ id: all, limits: all, upstream: http://{} }}] }}\n",
        redis.port(),
        upstream.address()
    );
    let file = folder.write("ratekeeper.yaml", &text);
    let mut process =
        Process::spawn(ratekeeper().env("REDIS_PASSWORD", PASSWORD).args(["run", "--config"]).arg(&file));
    assert_eq!(process.ended().await, 1);
    let line = process.line("error: cannot reach Redis").await;
    assert!(!line.contains(PASSWORD), "{line}");
}
