//! Test support: an API from a few lines of YAML, and clients.

use std::net::{SocketAddr, TcpListener};
use std::ops::Deref;
use std::sync::Arc;

use ratekeeper::tower::RatekeeperLayer;
use ratekeeper::tower::client::{TrustedProxies, parse_cidr};
use ratekeeper::{ManualClock, Memory, Store, Time};
use ratekeeper_config::Config;
use ratekeeper_server::Exposition;
use ratekeeper_server::http_api::{self, HttpApi, HttpApiSettings, HttpApiSnapshot, MemoryRecords};
use serde_json::Value;
use testbed::wait_for;
use tokio::sync::watch;

use super::faulty_records::FaultyRecords;
use crate::support::{layer_builder, parse};

/// The initial time of the tests.
pub(crate) const START: Time = Time::from_secs(1_700_000_000);

/// The API under test, with its clock.
pub(crate) struct TestContext<S = Memory<ManualClock>> {
    pub(crate) clock: ManualClock,
    pub(crate) api: Arc<HttpApi<S, FaultyRecords>>,
}

impl<S> Deref for TestContext<S> {
    type Target = HttpApi<S, FaultyRecords>;

    fn deref(&self) -> &HttpApi<S, FaultyRecords> {
        &self.api
    }
}

impl TestContext {
    /// With the limits of a configuration and changed settings. Refunds and resets are on.
    pub(crate) fn new(yaml: &str, change: impl FnOnce(&mut HttpApiSettings)) -> Arc<TestContext> {
        TestContext::with_capacity(yaml, 10_000, change)
    }

    /// The same, with a capacity of this many records.
    pub(crate) fn with_capacity(
        yaml: &str,
        records: usize,
        change: impl FnOnce(&mut HttpApiSettings),
    ) -> Arc<TestContext> {
        let config = parse(yaml);
        let clock = ManualClock::new(START);
        let has_limits = config.rules.rules().len() > 0;
        let layer = has_limits.then(|| layer_builder(&config).build_on(clock.clone()).unwrap());
        TestContext::with_layer(config, clock, layer, records, change)
    }
}

impl<S> TestContext<S> {
    /// The same, with limits in any store.
    pub(crate) fn with_layer(
        config: Config,
        clock: ManualClock,
        layer: Option<RatekeeperLayer<S>>,
        records: usize,
        change: impl FnOnce(&mut HttpApiSettings),
    ) -> Arc<TestContext<S>> {
        let mut settings = HttpApiSettings {
            limits: config.rules.rules().len(),
            token: config.admin.and_then(|admin| admin.token),
            refunds: true,
            resets: true,
            trusted_proxies: TrustedProxies::proxies([parse_cidr("127.0.0.0/8").unwrap()]),
            ..HttpApiSettings::default()
        };
        change(&mut settings);
        let snapshot = HttpApiSnapshot { layer, settings: Arc::new(settings) };
        let records = FaultyRecords::new(MemoryRecords::with_clock(clock.clone(), records, 1 << 24));
        Arc::new(TestContext { clock, api: Arc::new(HttpApi::new(snapshot, records)) })
    }
}

/// A running API.
pub(crate) struct TestApi<S = Memory<ManualClock>> {
    pub(crate) context: Arc<TestContext<S>>,
    pub(crate) address: SocketAddr,
    pub(crate) drain: watch::Sender<bool>,
    pub(crate) ended: tokio::task::JoinHandle<std::io::Result<()>>,
}

/// Opens an API.
pub(crate) fn open<S: Store + Send + Sync + 'static>(context: Arc<TestContext<S>>) -> TestApi<S> {
    let (drain, draining) = watch::channel(false);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, serving) = http_api::listen(listener, context.api.clone(), draining).unwrap();
    TestApi { context, address, drain, ended: tokio::spawn(serving) }
}

/// Runs an API with the limits of a configuration.
pub(crate) fn run(yaml: &str) -> TestApi {
    open(TestContext::new(yaml, |_| {}))
}

/// Ten per hour for each user; the clock stands still.
pub(crate) const PER_USER: &str = "limits:
  per-user: { key: { header: X-User-Id }, fixed_window: { limit: 10, window: 1h, align: first_request } }";

/// A response.
#[derive(Debug)]
pub(crate) struct TestResponse {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: String,
}

impl TestResponse {
    fn of(text: &str) -> TestResponse {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("not a response: {text:?}"));
        TestResponse { status: testbed::http::status(head), head: head.to_owned(), body: body.to_owned() }
    }

    /// The single value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        testbed::http::header(&self.head, name)
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The `detail` of a Problem Details response with this status.
    #[track_caller]
    pub(crate) fn problem(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        assert_eq!(self.header("cache-control"), Some("no-store"), "{self:?}");
        let problem = self.json();
        assert_eq!(problem["status"], status, "{self:?}");
        problem["detail"].as_str().unwrap().to_owned()
    }
}

/// Sends bytes on a new connection, and reads until the server closes it.
pub(crate) async fn send_raw(address: SocketAddr, bytes: impl AsRef<[u8]>) -> TestResponse {
    TestResponse::of(&testbed::http::send_raw(address, bytes).await)
}

/// Sends a request without a body; each header ends with its line end.
pub(crate) async fn get(address: SocketAddr, method: &str, target: &str, headers: &str) -> TestResponse {
    let text = format!("{method} {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}\r\n");
    send_raw(address, text).await
}

/// Posts a body unchanged, with additional headers.
pub(crate) async fn send(address: SocketAddr, target: &str, headers: &str, body: &str) -> TestResponse {
    let length = body.len();
    let text = format!(
        "POST {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n{headers}\r\n{body}"
    );
    send_raw(address, text).await
}

/// Posts JSON.
pub(crate) async fn post(address: SocketAddr, target: &str, body: &Value) -> TestResponse {
    send(address, target, "", &body.to_string()).await
}

/// What remains of the only limit in a response.
#[track_caller]
pub(crate) fn remaining(response: &TestResponse) -> u64 {
    let json = response.json();
    json["limits"][0]["remaining"].as_u64().unwrap_or_else(|| panic!("{response:?}"))
}

/// Peeks at what remains of a limit for a key.
pub(crate) async fn peek_remaining(address: SocketAddr, limit: &str, key: &str) -> u64 {
    let body = serde_json::json!({ "limit": limit, "key": key, "cost": 0 });
    remaining(&post(address, "/v1/peek", &body).await)
}

/// Waits until this much remains of a limit for a key.
pub(crate) async fn wait_for_remaining(address: SocketAddr, limit: &str, key: &str, remaining: u64) {
    wait_for(async || (peek_remaining(address, limit, key).await == remaining).then_some(())).await;
}

/// The number of lost refunds.
pub(crate) fn lost_refunds<S: Store + Send + Sync + 'static>(api: &TestApi<S>) -> u64 {
    let mut out = Exposition::default();
    api.context.metrics.write(&mut out);
    let text = out.into_text();
    let mut lines = text.lines();
    let count = lines.find_map(|line| line.strip_prefix("ratekeeper_http_api_refunds_lost_total "));
    count.unwrap().parse().unwrap()
}
