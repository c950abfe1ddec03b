//! Goal: records are shared by all processes and outlive the process that stored them, and only one caller takes a
//! record. Method: limiters that share nothing but a real server.

use std::time::Duration;

use ratekeeper::redis::{RecordClaim, Records, Redis, Settings, TakeResult};
use ratekeeper::{Limit, Limiter, WindowAlign};
use testbed::RedisServer;

use crate::redis::all_expire;

const LONG: Duration = Duration::from_secs(60);

fn limiter(server: &RedisServer, namespace: &str) -> Limiter<Redis> {
    let limit = Limit::fixed_window(1, Duration::from_secs(60), WindowAlign::Clock).unwrap();
    let settings = Settings::new(&server.url()).secret(b"secret").namespace(namespace);
    Limiter::builder(limit).redis(&settings).unwrap()
}

async fn put(records: &Records, id: &str, lasts: Duration) {
    assert!(records.put(id, format!("value of {id}").as_bytes(), lasts).await.unwrap());
}

#[tokio::test]
async fn record_is_taken_once() {
    let server = RedisServer::start().unwrap();
    let (one, other) = (limiter(&server, ""), limiter(&server, ""));
    put(&one.records(), "a", LONG).await;
    drop(one);
    assert_eq!(limiter(&server, "elsewhere").records().take("a").await.unwrap(), TakeResult::Unknown);
    let records = other.records();
    for _ in 0..2 {
        assert_eq!(records.read("a").await.unwrap(), TakeResult::Record(b"value of a".to_vec()), "it stays");
    }
    let both = tokio::join!(records.take("a"), records.take("a"));
    let both = [both.0.unwrap(), both.1.unwrap()];
    assert!(
        both.contains(&TakeResult::Gone) && both.contains(&TakeResult::Record(b"value of a".to_vec())),
        "{both:?}"
    );
    assert!(records.take_due(10).await.unwrap().is_empty());
    all_expire(&server);
}

#[tokio::test]
async fn due_returns_only_due_records() {
    let server = RedisServer::start().unwrap();
    let one = limiter(&server, "");
    put(&one.records(), "later", LONG).await;
    for number in 0..5 {
        put(&one.records(), &format!("soon {number}"), Duration::from_millis(1)).await;
    }
    all_expire(&server);
    drop(one);
    let other = limiter(&server, "");
    let records = other.records();
    let mut found = Vec::new();
    while found.len() < 5 {
        found.extend(records.take_due(2).await.unwrap());
    }
    found.sort();
    let all: Vec<Vec<u8>> = (0..5).map(|number| format!("value of soon {number}").into_bytes()).collect();
    assert_eq!(found, all);
    assert!(records.take_due(2).await.unwrap().is_empty());
    assert_eq!(records.take("soon 0").await.unwrap(), TakeResult::Gone);
    assert_eq!(records.take("later").await.unwrap(), TakeResult::Record(b"value of later".to_vec()));
}

#[tokio::test]
async fn first_claim_wins() {
    let server = RedisServer::start().unwrap();
    let (one, other) = (limiter(&server, ""), limiter(&server, ""));
    let (one, other) = (one.records(), other.records());
    assert_eq!(one.claim("a", b"this", LONG).await.unwrap(), None);
    let before = |response: Option<&[u8]>| {
        Some(RecordClaim { request: b"this".to_vec(), response: response.map(<[u8]>::to_vec) })
    };
    assert_eq!(other.claim("a", b"that", LONG).await.unwrap(), before(None));
    one.set_response("a", b"done", LONG).await.unwrap();
    assert_eq!(other.claim("a", b"that", LONG).await.unwrap(), before(Some(b"done")));
    assert_eq!(other.claim("b", b"that", LONG).await.unwrap(), None);
    one.remove("a").await.unwrap();
    one.set_response("a", b"too late", LONG).await.unwrap();
    assert_eq!(other.claim("a", b"that", LONG).await.unwrap(), None);
    all_expire(&server);
}
