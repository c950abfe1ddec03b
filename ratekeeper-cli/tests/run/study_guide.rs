//! The study guide's steps as printed, with `examples/study-guide.yaml` instead of Spring's configuration.

use ratekeeper::{Clock, SystemClock};
use std::process::Command;
use std::time::Duration;
use tokio::time::Instant;

use testbed::RedisServer;

use crate::run::support::{Client, Folder, Process, Upstream, ratekeeper};

const EXAMPLE: &str = include_str!("../../../examples/study-guide.yaml");
const HOUR_SECS: u64 = 3600;

/// Returns the example with other ports, a longer store deadline and an admin listener.
fn example(upstream: &Upstream, redis: &RedisServer) -> String {
    let text = EXAMPLE
        .replace("127.0.0.1:8080", "127.0.0.1:0")
        .replace("127.0.0.1:8081", &upstream.address().to_string())
        .replace("redis://127.0.0.1:6379", &format!("{:?}", redis.url()))
        .replace("instances: 1", "instances: 1\n    deadline: 10s");
    format!("{text}\nadmin: 127.0.0.1:0\n")
}

/// Sends `count` requests one after the other; returns how many are allowed. The others must be 429.
async fn passing(client: &mut Client, path: &str, user: &str, count: usize) -> usize {
    let mut passed = 0;
    for _ in 0..count {
        match client.get(path, user).await.unwrap().status {
            200 => passed += 1,
            status => assert_eq!(status, 429),
        }
    }
    passed
}

fn hour() -> u64 {
    SystemClock::new().now().as_nanos() / 1_000_000_000 / HOUR_SECS
}

#[tokio::test]
async fn five_filters_allow_a_hundred_requests_and_deny_the_rest() {
    let (folder, upstream, redis) =
        (Folder::new("guide"), Upstream::start().await, RedisServer::start().unwrap());
    let file = folder.write("ratekeeper.yaml", &example(&upstream, &redis));
    let (_process, address) = Process::serving(&file).await;
    let mut client = Client::new(address);

    // "100 per hour" by three algorithms. If a new hour starts meanwhile, the count restarts, so the test tries
    // again.
    for filter in ["fixed", "log", "counter"] {
        let path = format!("/api/{filter}/test");
        for attempt in 0.. {
            let (user, begun) = (format!("X-User-Id: user{attempt}\r\n"), hour());
            let passed = passing(&mut client, &path, &user, 110).await;
            if hour() == begun {
                assert_eq!(passed, 100, "{filter}");
                break;
            }
        }
        // Each user has a budget; requests without a user share one.
        assert_eq!(passing(&mut client, &path, "X-User-Id: another\r\n", 10).await, 10, "{filter}");
        assert_eq!(passing(&mut client, &path, "", 10).await, 10, "{filter}");
        let shared = client.get(&path, "X-User-Id: anonymous\r\n").await.unwrap();
        let left = shared
            .header("ratelimit")
            .and_then(|it| it.split(";r=").nth(1)?.split(';').next()?.parse::<u64>().ok());
        assert!(left.is_some_and(|left| left >= 89), "{}", shared.head);
    }

    // A burst of 100, then ten per second.
    for path in ["/api/test", "/api/leaky/test"] {
        let begun = Instant::now();
        let passed = passing(&mut client, path, "X-User-Id: user123\r\n", 150).await;
        let most = 100 + usize::try_from(begun.elapsed().as_millis()).unwrap() / 100 + 1;
        assert!((100..=most).contains(&passed), "{path}: {passed}, at most {most}");
        // Once the bucket is empty, the next request is allowed after a tenth of a second.
        let begun = Instant::now();
        while client.get(path, "X-User-Id: user123\r\n").await.unwrap().status != 200 {
            assert!(begun.elapsed() < Duration::from_secs(10), "{path}: nothing was refilled");
        }
    }
    assert_eq!(redis.keys_without_expiry().unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn curl_command_of_the_guide_ends_with_429() {
    let (folder, upstream, redis) =
        (Folder::new("curl"), Upstream::start().await, RedisServer::start().unwrap());
    // A slow refill, so that curl can exhaust the bucket.
    let text = example(&upstream, &redis).replace("capacity: 100, refill: 10/s", "capacity: 5, refill: 1/1h");
    let (_process, address) = Process::serving(&folder.write("ratekeeper.yaml", &text)).await;
    let url = format!("http://localhost:{}/api/test", address.port());
    let curl = || {
        let args = ["-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", "X-User-Id: user123", &url];
        String::from_utf8(Command::new("curl").args(args).output().unwrap().stdout).unwrap()
    };
    let codes: Vec<String> = (0..6).map(|_| curl()).collect();
    assert_eq!(codes, ["200", "200", "200", "200", "200", "429"]);
}

/// Replays requests at the guide's times through a limit of the example; returns how many of each group are allowed.
fn simulated(name: &str, requests: &[(u64, usize)]) -> Vec<usize> {
    let (_, below) = EXAMPLE.split_once(&format!("\n  {name}:\n")).unwrap();
    let limit = below.lines().nth(1).unwrap().trim();
    let mut trace = String::from("time\n");
    for (time, count) in requests {
        trace.push_str(&format!("{time}\n").repeat(*count));
    }
    let folder = Folder::new(&format!("trace-{name}"));
    let path = folder.write("trace.csv", &trace);
    let args = ["simulate", "--format", "jsonl", "--limit", limit, "--trace"];
    let output = ratekeeper().args(args).arg(path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    let mut lines = lines.lines();
    let mut passed =
        |count| lines.by_ref().take(count).filter(|line| line.contains(r#""allowed":true"#)).count();
    requests.iter().map(|(_, count)| passed(*count)).collect()
}

#[test]
fn timelines_of_the_guide_match() {
    // A full hour of the clock.
    let ten: u64 = 1_699_999_200 / HOUR_SECS * HOUR_SECS;
    let nine = ten - HOUR_SECS;
    // (A) 09:59:50 to 10:00:10: 200 requests are allowed in 20 seconds; (B) fixes that.
    let around = [(ten - 10, 100), (ten, 100)];
    assert_eq!(simulated("fixed", &around), [100, 100]);
    assert_eq!(simulated("log", &around), [100, 0]);
    assert_eq!(simulated("counter", &around), [100, 0]);
    // (B) 80 in the previous hour, 40 in this one, at half past: 80 * 30/60 + 40 = 80 of 100, so 20 more are allowed.
    assert_eq!(simulated("counter", &[(nine, 80), (ten + 1800, 40), (ten + 1800, 30)]), [80, 40, 20]);
    // (C) 50 tokens at 10:00:00; five seconds later 50 + 5 * 10 = 100.
    assert_eq!(simulated("token", &[(ten, 50), (ten + 5, 110)]), [50, 100]);
    // (D) A water level of 50 at 10:00:00; five seconds later the bucket is empty.
    assert_eq!(simulated("leaky", &[(ten, 50), (ten + 5, 110)]), [50, 100]);
}
