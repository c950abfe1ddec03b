//! Test support: an API on a manual clock, and a client that works on bytes.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ratekeeper::tower::key::{Key, KeyPart};
use ratekeeper::tower::rule::{Ban, Rule};
use ratekeeper::tower::{LayerBuilder, RatekeeperLayer};
use ratekeeper::{LeakyMode, Limit, ManualClock, Memory, Rate, Store, Time, WindowAlign};
use ratekeeper_config::Secret;
use ratekeeper_server::redis_api::{ClientTimeouts, RedisApi, RedisApiMetrics, RedisApiSnapshot, listen};
use ratekeeper_server::{Current, Sockets};
use testbed::TEST_TIMEOUT;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::support::parse;

pub(crate) type Layer = RatekeeperLayer<Memory<ManualClock>>;

/// The settings of the API under test.
pub(crate) struct TestSettings {
    pub(crate) token: Option<&'static str>,
    pub(crate) max_connections: usize,
    pub(crate) timeouts: ClientTimeouts,
}

impl Default for TestSettings {
    fn default() -> TestSettings {
        TestSettings { token: None, max_connections: 100, timeouts: ClientTimeouts::default() }
    }
}

/// A running API.
pub(crate) struct TestApi<S = Memory<ManualClock>> {
    pub(crate) address: SocketAddr,
    /// The clock of the limits, unless they are in Redis.
    pub(crate) clock: ManualClock,
    pub(crate) current: Arc<Current<RedisApiSnapshot<S>>>,
    pub(crate) metrics: Arc<RedisApiMetrics>,
    pub(crate) drain: watch::Sender<bool>,
    pub(crate) server: JoinHandle<()>,
}

/// Parses a secret as the configuration does.
fn secret(text: &str) -> Secret {
    let yaml = format!("admin: {{ listen: 127.0.0.1:0, token: {text} }}\n");
    parse(&yaml).admin.unwrap().token.unwrap()
}

pub(crate) fn layer(clock: &ManualClock) -> Layer {
    rules().build_on(clock.clone()).unwrap()
}

/// The last rule: it belongs to a descriptor and cannot be checked by name.
const DESCRIPTOR_RULE: &str = "edge/user";

/// Named limits, one of each kind.
pub(crate) fn rules() -> LayerBuilder {
    let minute = Duration::from_secs(60);
    let window = |limit| Limit::fixed_window(limit, minute, WindowAlign::FirstRequest).unwrap();
    let leak = Rate::new(1, Duration::from_secs(1)).unwrap();
    let user = || Key::of(KeyPart::header("x-user"));
    let mut listed = Rule::new("listed", window(2)).key(user());
    listed.deny.keys.push("mallory".to_owned());
    listed.allow.keys.push("root".to_owned());
    listed.ban = Some(Ban { after: 1, within: minute, lasts: Duration::from_secs(3600) });
    RatekeeperLayer::builder()
        .rule(listed)
        .rule(Rule::new("per-user", window(3)).key(user()))
        .rule(Rule::new("per-user-and-method", window(3)).key(user().and(KeyPart::Method)))
        .rule(Rule::new("all", window(3)))
        .rule(Rule::new("planned", window(1)).key(user()).shadow())
        .rule(Rule::new("shaped", Limit::leaky_bucket(3, leak, LeakyMode::Shape).unwrap()).key(user()))
        .rule(Rule::new(DESCRIPTOR_RULE, window(3)).key(user()))
}

impl TestApi {
    pub(crate) async fn start() -> TestApi {
        TestApi::start_with(TestSettings::default()).await
    }

    pub(crate) async fn start_with(settings: TestSettings) -> TestApi {
        let clock = ManualClock::new(Time::from_secs(1_700_000_000));
        TestApi::open(layer(&clock), clock, settings)
    }
}

impl<S: Store + Send + Sync + 'static> TestApi<S> {
    /// Opens an API on the given limits.
    pub(crate) fn open(layer: RatekeeperLayer<S>, clock: ManualClock, settings: TestSettings) -> TestApi<S> {
        let named_limits = layer.rules().filter(|rule| rule.name != DESCRIPTOR_RULE).count();
        let current = Arc::new(Current::new(RedisApiSnapshot {
            layer: Some(layer),
            named_limits,
            token: settings.token.map(secret),
            max_connections: settings.max_connections,
        }));
        let metrics = Arc::new(RedisApiMetrics::default());
        let (drain, draining) = watch::channel(false);
        let api = RedisApi {
            current: current.clone(),
            metrics: metrics.clone(),
            timeouts: settings.timeouts,
            draining,
        };
        let listener = Sockets::default().listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let (address, serving) = listen(listener, api).unwrap();
        TestApi { address, clock, current, metrics, drain, server: tokio::spawn(serving) }
    }

    /// Replaces the limits, as a reload does.
    pub(crate) fn set_limits(&self, layer: Option<RatekeeperLayer<S>>) {
        let RedisApiSnapshot { named_limits, token, max_connections, .. } = &*self.current.load();
        let (named_limits, token, max_connections) = (*named_limits, token.clone(), *max_connections);
        self.current.replace(RedisApiSnapshot { layer, named_limits, token, max_connections });
    }

    pub(crate) async fn connect(&self) -> Client {
        Client::connect(self.address).await
    }

    /// The fields of `INFO`.
    pub(crate) async fn info(&self) -> HashMap<String, String> {
        let text = self.connect().await.call("INFO").await;
        let pairs = text.lines().filter_map(|line| line.split_once(':'));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }
}

/// A client that sends raw bytes and reads replies one by one.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    read: Vec<u8>,
}

/// Encodes words as an array of bulk strings.
pub(crate) fn array(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// Encodes a line of words in the same way.
pub(crate) fn command(line: &str) -> Vec<u8> {
    array(&line.split(' ').map(str::as_bytes).collect::<Vec<_>>())
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Client { stream, read: Vec::new() }
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        timeout(TEST_TIMEOUT, self.stream.write_all(bytes)).await.unwrap().unwrap();
    }

    /// Sends a line of words as an array, and returns the raw reply.
    pub(crate) async fn call(&mut self, line: &str) -> String {
        self.send(&command(line)).await;
        self.reply().await
    }

    /// The same, for a reply of integers.
    pub(crate) async fn numbers(&mut self, line: &str) -> Vec<i64> {
        let reply = self.call(line).await;
        let numbers = reply.split("\r\n").skip(1).filter(|line| !line.is_empty());
        let number = |line: &str| line.strip_prefix(':').and_then(|number| number.parse().ok());
        numbers.map(|line| number(line).unwrap_or_else(|| panic!("{reply}"))).collect()
    }

    /// The next complete reply.
    pub(crate) async fn reply(&mut self) -> String {
        let mut length = self.line(0).await;
        let mut pending = 1_usize;
        let mut begin = 0;
        loop {
            let line = String::from_utf8_lossy(&self.read[begin..length - 2]).into_owned();
            let (kind, rest) = line.split_at(1);
            pending -= 1;
            match (kind, rest.parse::<usize>()) {
                ("*", Ok(count)) => pending += count,
                ("%", Ok(count)) => pending += 2 * count,
                ("$", Ok(count)) => length = self.until(length + count + 2).await,
                _ => {}
            }
            if pending == 0 {
                let reply = self.read.drain(..length).collect();
                return String::from_utf8(reply).unwrap();
            }
            begin = length;
            length = self.line(begin).await;
        }
    }

    /// The end of the line that begins here.
    async fn line(&mut self, begin: usize) -> usize {
        loop {
            if let Some(end) = self.read[begin..].windows(2).position(|two| two == b"\r\n") {
                return begin + end + 2;
            }
            self.more().await;
        }
    }

    async fn until(&mut self, length: usize) -> usize {
        while self.read.len() < length {
            self.more().await;
        }
        length
    }

    async fn more(&mut self) {
        let read = timeout(TEST_TIMEOUT, self.stream.read_buf(&mut self.read)).await.unwrap().unwrap();
        assert_ne!(read, 0, "the connection ended after {:?}", String::from_utf8_lossy(&self.read));
    }

    /// Everything up to the end of the connection. A reset counts as the end.
    pub(crate) async fn rest(&mut self) -> String {
        let reading =
            async { while self.stream.read_buf(&mut self.read).await.is_ok_and(|read| read > 0) {} };
        timeout(TEST_TIMEOUT, reading).await.unwrap();
        String::from_utf8_lossy(&std::mem::take(&mut self.read)).into_owned()
    }
}
