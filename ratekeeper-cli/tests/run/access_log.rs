//! The access log and the event log: their fields, and how keys appear in them.

use nix::sys::signal::Signal;
use serde_json::{Map, Value};
use testbed::{RedisServer, wait_until};

use crate::run::support::{Client, Folder, Process, Upstream};

/// The key of the requests; it must not appear where keys are hidden.
const KEY: &str = "clear-text-user";
/// The fields of the access log, in order.
const REQUEST_FIELDS: [&str; 19] = [
    "time",
    "level",
    "message",
    "id",
    "client",
    "method",
    "path",
    "route",
    "status",
    "decision",
    "degraded",
    "reason",
    "limit",
    "key",
    "remaining",
    "retry_after",
    "delay_us",
    "duration_us",
    "bytes",
];

fn config(upstream: &Upstream, above: &str) -> String {
    format!(
        "{above}\n\
         limits:\n  per-user: {{ key: {{ header: X-User-Id }}, fixed_window: {{ limit: 2, window: 1w, align: first_request }} }}\n\
         admin: 127.0.0.1:0\n\
         gateway:\n  listen: 127.0.0.1:0\n  routes: [{{ id: all, upstream: \"http://{}\", limits: all }}]\n",
        upstream.address()
    )
}

/// Parses lines of JSON; each must be an object.
fn objects(lines: &[String]) -> Vec<Map<String, Value>> {
    lines
        .iter()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

fn is_hash(key: &Value) -> bool {
    key.as_str().is_some_and(|key| key.len() == 16 && key.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The stdout and stderr of a process that has served three requests of a user.
struct Logs {
    requests: Vec<String>,
    events: Vec<String>,
}

impl Logs {
    /// The value of `key` in the access log.
    fn keys(&self) -> Vec<Value> {
        objects(&self.requests).into_iter().map(|mut line| line["key"].take()).collect()
    }

    fn contain(&self, text: &str) -> bool {
        self.requests.iter().chain(&self.events).any(|line| line.contains(text))
    }
}

/// Runs a configuration, sends three requests of which the last is denied, and shuts down.
async fn logs(folder: &Folder, text: &str) -> Logs {
    let (mut process, address) = Process::serving(&folder.write("ratekeeper.yaml", text)).await;
    let mut client = Client::new(address);
    for _ in 0..3 {
        client.get("/a/b?secret=1", &format!("X-User-Id: {KEY}\r\n")).await.unwrap();
    }
    // An open connection would delay the shutdown.
    drop(client);
    process.signal(Signal::SIGTERM);
    assert_eq!(process.ended().await, 0);
    wait_until(|| process.stdout().len() == 3).await;
    process.line(r#""message":"shut down""#).await;
    Logs { requests: process.stdout(), events: process.stderr() }
}

#[tokio::test]
async fn keys_are_hashed_by_default_and_never_logged_as_text() {
    let (folder, upstream) = (Folder::new("keys-hash"), Upstream::start().await);
    let logs = logs(&folder, &config(&upstream, "")).await;
    let keys = logs.keys();
    assert!(is_hash(&keys[0]), "{keys:?}");
    assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    assert!(!logs.contain(KEY), "{:#?}", logs.requests);
    // Without a secret, another process cannot be used to guess keys.
    assert_ne!(self::logs(&folder, &config(&upstream, "")).await.keys()[0], keys[0]);
}

#[tokio::test]
async fn instances_with_the_same_redis_secret_log_the_same_hash() {
    let (folder, upstream, redis) =
        (Folder::new("keys-redis"), Upstream::start().await, RedisServer::start().unwrap());
    let store = |secret: &str| {
        format!(
            "store: {{ redis: {{ address: \"{}\", secret: {secret}, instances: 2, deadline: 10s }} }}",
            redis.url()
        )
    };
    let one = logs(&folder, &config(&upstream, &store("0123456789abcdef"))).await;
    let two = logs(&folder, &config(&upstream, &store("0123456789abcdef"))).await;
    let other = logs(&folder, &config(&upstream, &store("fedcba9876543210"))).await;
    assert_eq!(one.keys(), two.keys());
    assert_ne!(one.keys(), other.keys());
    for logs in [one, two, other] {
        assert!(!logs.contain(KEY), "{:#?}", logs.requests);
    }
}

#[tokio::test]
async fn keys_are_left_out_or_logged_as_text_if_configured() {
    let (folder, upstream) = (Folder::new("keys-text"), Upstream::start().await);
    let off = logs(&folder, &config(&upstream, "log: { keys: off }")).await;
    assert_eq!(off.keys(), [Value::Null, Value::Null, Value::Null]);
    assert!(!off.contain(KEY), "{:#?}", off.requests);
    assert!(is_hash(&logs(&folder, &config(&upstream, "log: { keys: hash }")).await.keys()[0]));
    assert_eq!(logs(&folder, &config(&upstream, "log: { keys: text }")).await.keys(), [KEY, KEY, KEY]);
}

#[tokio::test]
async fn each_request_is_one_line_with_the_documented_fields() {
    let (folder, upstream) = (Folder::new("request-fields"), Upstream::start().await);
    let logs = logs(&folder, &config(&upstream, "log: { keys: text }")).await;
    let lines = objects(&logs.requests);
    for line in &lines {
        let names: Vec<&str> = line.keys().map(String::as_str).collect();
        assert_eq!(names, REQUEST_FIELDS);
        for (name, value) in
            [("message", "request"), ("level", "INFO"), ("client", "127.0.0.1"), ("path", "/a/b")]
        {
            assert_eq!(line[name], value, "{line:?}");
        }
        assert_eq!((&line["method"], &line["route"]), (&Value::from("GET"), &Value::from("all")));
        assert!(line["duration_us"].as_u64() > Some(0) && line["delay_us"] == 0, "{line:?}");
    }
    let field = |name: &str| -> Vec<&Value> { lines.iter().map(|line| &line[name]).collect() };
    assert_eq!(field("status"), [200, 200, 429]);
    assert_eq!(field("decision"), ["allowed", "allowed", "denied"]);
    assert_eq!(field("limit"), ["per-user", "per-user", "per-user"]);
    assert_eq!(field("remaining"), [1, 0, 0]);
    assert_eq!(field("bytes")[0], 5);
    assert_eq!(field("retry_after")[..2], [&Value::Null, &Value::Null]);
    let retry_after = field("retry_after")[2].as_f64().unwrap();
    assert!((600_000.0..=604_800.0).contains(&retry_after), "{retry_after}");
    assert_ne!(field("id")[0], field("id")[1]);
}

/// One query works on both logs.
#[tokio::test]
async fn both_logs_are_json_objects_that_start_with_time_level_and_message() {
    let (folder, upstream) = (Folder::new("log-fields"), Upstream::start().await);
    let mut logs = logs(&folder, &config(&upstream, "store: redis://127.0.0.1:1")).await;
    assert!(logs.contain("store unavailable"), "{:#?}", logs.events);
    logs.requests.append(&mut logs.events);
    for line in objects(&logs.requests) {
        let names: Vec<&str> = line.keys().map(String::as_str).collect();
        assert_eq!(names[..3], ["time", "level", "message"], "{line:?}");
        assert!(line["message"] == "request" || names[3] == "target", "{line:?}");
        // RFC 3339 in UTC with milliseconds, as in 2026-11-18T11:13:55.479Z.
        let time = line["time"].as_str().unwrap();
        let time_shape: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(time_shape, "0000-00-00T00:00:00.000Z");
        for name in ["timestamp", "ts", "@timestamp", "at", "date"] {
            assert!(!line.contains_key(name), "{name}: {line:?}");
        }
        assert!(["INFO", "WARN", "ERROR"].contains(&line["level"].as_str().unwrap()), "{line:?}");
    }
}
