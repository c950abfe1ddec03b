//! Goal: what one process remembers, others know, also when it is gone; and of several who ask for the same, one gets it.
//! Method: limiters that have nothing in common but a real server.

use std::time::Duration;

use testbed::RedisServer;
use tollgate::redis::{Records, Redis, Settings};
use tollgate::{Align, Limit, Limiter};

use crate::all_expire;

const LONG: Duration = Duration::from_secs(60);

fn limiter(server: &RedisServer, namespace: &str) -> Limiter<Redis> {
    let limit = Limit::fixed_window(1, Duration::from_secs(60), Align::Clock).unwrap();
    let settings = Settings::new(&server.url()).secret(b"secret").namespace(namespace);
    Limiter::builder(limit).redis(&settings).unwrap()
}

async fn put(records: &Records, id: &str, lasts: Duration) {
    assert!(records.put(id, format!("value of {id}").as_bytes(), lasts).await.unwrap());
}

#[tokio::test]
async fn a_record_is_taken_once_by_whoever_asks() {
    let server = RedisServer::start().unwrap();
    let (one, other) = (limiter(&server, ""), limiter(&server, ""));
    put(&one.records(), "a", LONG).await;
    drop(one);
    assert_eq!(limiter(&server, "elsewhere").records().take("a").await.unwrap(), None);
    let records = other.records();
    let both = tokio::join!(records.take("a"), records.take("a"));
    let both = [both.0.unwrap(), both.1.unwrap()];
    assert!(both.contains(&None) && both.contains(&Some(b"value of a".to_vec())), "{both:?}");
    assert_eq!(records.due(10).await.unwrap(), []);
    all_expire(&server);
}

#[tokio::test]
async fn those_whose_time_has_come_are_taken_and_no_others() {
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
        found.extend(records.due(2).await.unwrap());
    }
    found.sort();
    assert_eq!(found[0], ("soon 0".to_owned(), b"value of soon 0".to_vec()));
    assert_eq!(found[4], ("soon 4".to_owned(), b"value of soon 4".to_vec()));
    assert_eq!(records.due(2).await.unwrap(), []);
    assert_eq!(records.take("later").await.unwrap(), Some(b"value of later".to_vec()));
}

#[tokio::test]
async fn of_several_who_claim_the_same_one_gets_it() {
    let server = RedisServer::start().unwrap();
    let (one, other) = (limiter(&server, ""), limiter(&server, ""));
    assert_eq!(one.records().claim("a", b"begun", LONG).await.unwrap(), None);
    assert_eq!(other.records().claim("a", b"mine", LONG).await.unwrap(), Some(b"begun".to_vec()));
    one.records().replace("a", b"done", LONG).await.unwrap();
    assert_eq!(other.records().claim("a", b"mine", LONG).await.unwrap(), Some(b"done".to_vec()));
    assert_eq!(other.records().claim("b", b"mine", LONG).await.unwrap(), None);
    one.records().forget("a").await.unwrap();
    assert_eq!(other.records().claim("a", b"mine", LONG).await.unwrap(), None);
    all_expire(&server);
}
