//! `--store`: the same trace on a real Redis server gives the same bytes.

use testbed::RedisServer;

use crate::cli::{DEMO, UPLOADS, run};

const LIMITS: [&str; 8] = [
    "token_bucket: { capacity: 5, refill: 7/min }",
    "token_bucket: { capacity: 4, refill: 4/min, style: stepped }",
    "leaky_bucket: { capacity: 20, leak: 1/s, mode: shape }",
    "fixed_window: { limit: 5 }",
    "fixed_window: { limit: 5, align: first_request }",
    "sliding_window_log: { limit: 10 }",
    "sliding_window_log: { limit: 10, count: all }",
    "sliding_window_counter: { limit: 10, buckets: 6 }",
];

#[test]
fn redis_prints_the_same_bytes_as_memory() {
    let server = RedisServer::start().unwrap();
    for limit in LIMITS {
        for trace in [DEMO, UPLOADS] {
            for format in ["jsonl", "table"] {
                let simulate = |store: &str| {
                    run(
                        &[
                            "simulate", "--limit", limit, "--trace", trace, "--format", format, "--store",
                            store,
                        ],
                        "",
                    )
                };
                let (memory, redis) = (simulate("memory"), simulate(&server.url()));
                assert_eq!((redis.code, &*redis.stderr), (0, ""), "{limit}");
                assert_eq!(redis.stdout, memory.stdout, "{limit}");
            }
        }
    }
    assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
}

#[test]
fn unavailable_server_is_reported() {
    let output =
        run(&["simulate", "--limit", "fixed_window:", "--trace", DEMO, "--store", "redis://127.0.0.1:1"], "");
    assert_eq!((output.code, &*output.stdout), (1, ""));
    assert!(output.stderr.starts_with("error: cannot reach Redis: "), "{}", output.stderr);
    assert!(
        output.stderr.contains("check that the server of --store is running and is Redis 7 or newer"),
        "{}",
        output.stderr
    );
}

#[test]
fn invalid_store_is_rejected() {
    let output = run(&["simulate", "--limit", "fixed_window:", "--trace", DEMO, "--store", "disk"], "");
    assert_eq!((output.code, &*output.stdout), (2, ""));
    assert!(output.stderr.contains("redis://127.0.0.1:6379"), "{}", output.stderr);
    let output = run(&["simulate", "--compare", "--store", "redis://127.0.0.1:1"], "");
    assert_eq!(output.code, 2);
    assert!(output.stderr.contains("--compare"), "{}", output.stderr);
}
