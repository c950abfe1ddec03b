//! The store on a network and a clock of its own: faults at exact instants, without a server.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::collections::HashSet;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use futures_util::future::{Either, select};
use ratekeeper_core::{FailurePolicy, Limit, Time, WindowAlign};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::address::Endpoint;
use super::network::{ByteStream, Network, OpenFuture};
use super::resp;
use super::settings::Environment;
use super::{Redis, Settings};
use crate::Limiter;
use crate::clock::{ManualClock, SharedClock};

/// What the server does with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Allow,
    Silence,
    Close,
    UnknownFunction,
}

/// A network with one server, which answers calls in order.
#[derive(Debug, Default)]
struct FakeNetwork {
    /// The answers to the first calls; later calls are allowed.
    answers: Mutex<Vec<Answer>>,
    calls: AtomicUsize,
    loads: AtomicUsize,
    opened: AtomicUsize,
    pings: AtomicUsize,
    /// Closes all connections.
    close: Notify,
    threads: Mutex<HashSet<ThreadId>>,
}

#[derive(Clone, Debug)]
struct Shared(Arc<FakeNetwork>);

impl Network for Shared {
    fn open<'a>(&'a self, _endpoint: &'a Endpoint) -> OpenFuture<'a> {
        Box::pin(async move {
            self.0.opened.fetch_add(1, Ordering::Relaxed);
            self.0.threads.lock().unwrap().insert(thread::current().id());
            let (client, server) = tokio::io::duplex(64 << 10);
            tokio::spawn(serve(self.0.clone(), server));
            let client: Box<dyn ByteStream> = Box::new(client);
            Ok(client)
        })
    }
}

/// The arguments of the command at the front, and its length; none if it is incomplete.
fn command(input: &[u8]) -> Option<(Vec<Vec<u8>>, usize)> {
    let (value, length) = resp::parse(input).unwrap()?;
    let words = value.elements().unwrap().iter().map(|word| match word {
        resp::RespValue::Bulk(word) => word.to_vec(),
        other => panic!("no command: {other:?}"),
    });
    Some((words.collect(), length))
}

async fn serve(network: Arc<FakeNetwork>, mut stream: DuplexStream) {
    let mut input = Vec::new();
    let mut closing = pin!(network.close.notified());
    loop {
        let received = match select(pin!(stream.read_buf(&mut input)), closing.as_mut()).await {
            Either::Left((received, _)) => received.unwrap_or(0),
            Either::Right(_) => 0,
        };
        if received == 0 {
            return;
        }
        while let Some((words, length)) = command(&input) {
            input.drain(..length);
            let reply = match words[0].as_slice() {
                b"PING" => {
                    network.pings.fetch_add(1, Ordering::Relaxed);
                    b"+PONG\r\n".to_vec()
                }
                b"FUNCTION" => {
                    network.loads.fetch_add(1, Ordering::Relaxed);
                    b"+OK\r\n".to_vec()
                }
                b"FCALL" => {
                    network.calls.fetch_add(1, Ordering::Relaxed);
                    let mut answers = network.answers.lock().unwrap();
                    let answer = if answers.is_empty() { Answer::Allow } else { answers.remove(0) };
                    match answer {
                        // The time, then for each key: allowed, decided, without a state.
                        Answer::Allow => {
                            let keys: usize = std::str::from_utf8(&words[2]).unwrap().parse().unwrap();
                            let mut reply = 1e15_f64.to_le_bytes().to_vec();
                            reply.extend(vec![3; keys]);
                            let head = format!("${}\r\n", reply.len());
                            [head.as_bytes(), &reply, b"\r\n"].concat()
                        }
                        Answer::Silence => continue,
                        Answer::Close => return,
                        Answer::UnknownFunction => b"-ERR Function not found\r\n".to_vec(),
                    }
                }
                other => panic!("unexpected command {}", String::from_utf8_lossy(other)),
            };
            stream.write_all(&reply).await.unwrap();
        }
    }
}

fn limiter(network: &Arc<FakeNetwork>) -> Limiter<Redis> {
    let limit = Limit::fixed_window(5, Duration::from_secs(60), WindowAlign::FirstRequest).unwrap();
    let mut settings = Settings::new("redis://server").on_store_failure(FailurePolicy::Closed).connections(1);
    settings.environment = Environment {
        network: Some(Arc::new(Shared(network.clone()))),
        clock: Some(SharedClock::new(ManualClock::new(Time::from_secs(1_700_000_000)))),
    };
    Limiter::builder(limit).redis(&settings).unwrap()
}

fn network(answers: &[Answer]) -> Arc<FakeNetwork> {
    Arc::new(FakeNetwork { answers: Mutex::new(answers.to_vec()), ..FakeNetwork::default() })
}

#[tokio::test(start_paused = true)]
async fn unanswered_call_ends_at_the_deadline_and_closes_the_connection_after_100_ms() {
    let network = network(&[Answer::Silence]);
    let limiter = limiter(&network);
    let start = Instant::now();
    assert!(limiter.check("key").await.is_degraded());
    assert_eq!(start.elapsed(), Duration::from_millis(20));
    // Requests that wait behind it end at their deadlines, too.
    assert!(limiter.check("key").await.is_degraded());
    assert_eq!(start.elapsed(), Duration::from_millis(40));
    assert_eq!(network.calls.load(Ordering::Relaxed), 1);
    tokio::time::sleep(Duration::from_millis(59)).await;
    assert_eq!(network.opened.load(Ordering::Relaxed), 1);
    tokio::time::sleep(Duration::from_millis(2)).await;
    let verdict = limiter.check("key").await;
    assert!(verdict.allowed() && !verdict.is_degraded(), "{verdict:?}");
    assert_eq!(network.opened.load(Ordering::Relaxed), 2);
    // Requests whose callers had given up were not sent.
    assert_eq!(network.calls.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn call_on_a_connection_that_breaks_is_not_repeated() {
    let network = network(&[Answer::Close]);
    let limiter = limiter(&network);
    let start = Instant::now();
    assert!(limiter.check("key").await.is_degraded());
    assert_eq!(start.elapsed(), Duration::ZERO, "the close is noticed at once");
    assert_eq!(network.calls.load(Ordering::Relaxed), 1);
    assert!(limiter.check("key").await.allowed());
    assert_eq!(network.opened.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn functions_are_loaded_once_and_the_call_is_repeated_once() {
    let network = network(&[Answer::UnknownFunction]);
    let limiter = limiter(&network);
    assert!(limiter.check("key").await.allowed());
    assert_eq!((network.calls.load(Ordering::Relaxed), network.loads.load(Ordering::Relaxed)), (2, 1));
    network.answers.lock().unwrap().extend([Answer::UnknownFunction; 2]);
    assert!(limiter.check("key").await.is_degraded(), "the functions cannot be loaded");
    assert_eq!((network.calls.load(Ordering::Relaxed), network.loads.load(Ordering::Relaxed)), (4, 2));
}

/// Runs on a thread with a runtime of its own.
fn on_own_runtime<T: Send>(work: impl AsyncFnOnce() -> T + Send) -> T {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work())
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap())
}

#[tokio::test]
async fn each_runtime_has_connections_of_its_own_and_may_end() {
    let network = network(&[]);
    let limiter = limiter(&network);
    assert!(limiter.check("key").await.allowed());
    for _ in 0..3 {
        let check = async || {
            for _ in 0..10 {
                assert!(limiter.check("key").await.allowed());
            }
        };
        on_own_runtime(check);
    }
    assert_eq!(network.opened.load(Ordering::Relaxed), 4);
    assert_eq!(network.threads.lock().unwrap().len(), 4);
    assert!(limiter.check("key").await.allowed());
}

/// A server that restarts closes idle connections, which must not cost a request.
#[tokio::test(start_paused = true)]
async fn idle_connection_that_closes_is_replaced_before_the_next_request() {
    let network = network(&[]);
    let limiter = limiter(&network);
    assert!(limiter.check("key").await.allowed());
    network.close.notify_waiters();
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(network.opened.load(Ordering::Relaxed), 2);
    assert!(limiter.check("key").await.allowed());
    assert_eq!(network.opened.load(Ordering::Relaxed), 2);
}

/// A router may forget a connection without a word.
#[tokio::test(start_paused = true)]
async fn idle_connection_is_verified() {
    let network = network(&[]);
    let limiter = limiter(&network);
    assert!(limiter.check("key").await.allowed());
    tokio::time::sleep(Duration::from_secs(61)).await;
    // One at the login. The first interval had a check, the next three had none.
    assert_eq!(network.pings.load(Ordering::Relaxed), 1 + 3);
    assert_eq!(network.opened.load(Ordering::Relaxed), 1);
}
