//! A panic while serving a request closes that client's connection and affects no other.
//!
//! No code of the gateway is known to panic, so the panic comes from the log subscriber, which the gateway calls in
//! the middle of a request.

use std::fmt::{self, Write as _};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use testbed::http::{get, read_all, read_response, status};
use testbed::wait_until;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::peers::{ConfigFile, closed_address};
use super::support::{Upstream, run};

/// The subscriber panics on a log event about this upstream.
static PANIC_ADDRESS: Mutex<Option<SocketAddr>> = Mutex::new(None);

struct PanickingSubscriber;

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, "{}={value:?} ", field.name());
    }
}

impl Subscriber for PanickingSubscriber {
    fn enabled(&self, about: &Metadata<'_>) -> bool {
        about.is_event() && about.target().starts_with("ratekeeper_server::gateway")
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let panic_address = *PANIC_ADDRESS.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(
            !panic_address.is_some_and(|it| text.0.contains(&format!("address={it} "))),
            "the panic of this test"
        );
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

#[tokio::test]
async fn panic_closes_only_the_affected_connection() {
    let panic_address = closed_address();
    *PANIC_ADDRESS.lock().unwrap() = Some(panic_address);
    // Global, because the workers are separate threads.
    tracing::subscriber::set_global_default(PanickingSubscriber).unwrap();
    let upstream = Upstream::start().await;
    let file = ConfigFile {
        limits: "limits: { at-once: { key: ip, concurrency: { limit: 3 } } }",
        gateway: "max_in_flight: 3",
        ..ConfigFile::default()
    };
    let file = file.to(&[upstream.address]);
    let bad = format!(
        "  routes:\n    - {{ id: bad, limits: all, path: /bad, upstream: http://{panic_address} }}\n"
    );
    let gateway = run(&file.replace("  routes:\n", &bad)).await;
    // Each worker has a connection that stays open.
    let mut others = Vec::new();
    for _ in 0..4 {
        others.push(TcpStream::connect(gateway.address).await.unwrap());
    }
    for _ in 0..10 {
        let mut affected = TcpStream::connect(gateway.address).await.unwrap();
        affected.write_all(b"GET /bad HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        assert_eq!(read_all(&mut affected).await, "", "closed without a response");
        for other in &mut others {
            other.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
            assert_eq!(status(&read_response(other).await), 200);
        }
    }
    let is = |line: &str| gateway.gateway.status().metrics().lines().any(|it| it == line);
    for line in ["ratekeeper_requests_in_flight 0", r#"ratekeeper_concurrency_permits{limit="at-once"} 0"#] {
        wait_until(|| is(line)).await;
    }
    wait_until(|| is("ratekeeper_connections 4")).await;
    drop(others);
    wait_until(|| is("ratekeeper_connections 0")).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
    *PANIC_ADDRESS.lock().unwrap() = None;
    assert_eq!(status(&get(gateway.address, "/bad", "").await), 502);
    assert_eq!(gateway.gateway.drain().await, 0);
}
