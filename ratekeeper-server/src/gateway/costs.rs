//! The cost of a request: how often its path is normalized, and how often memory is allocated for it. A gateway's
//! worker runs on the thread of the test, which counts.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use ratekeeper::Memory;
use ratekeeper_config::{Config, EmptyEnvironment};
use ratekeeper_rules::path::normalized_count;

use super::accept::GatewayListener;
use super::client_timeouts::ConnectionActivity;
use super::min_rate::MinRate;
use super::{Gateway, GatewayDraft, GatewaySockets, connection};
use crate::runtime::access_log::{AccessLog, LogStyle};
use crate::runtime::engine::EngineState;
use crate::runtime::metrics::Metrics;

/// The cost of some requests. The allocations include those of hyper and tokio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cost {
    normalized: u64,
    allocated: u64,
}

fn gateway(config: &Config) -> Gateway<Memory> {
    let metrics = Metrics::new(1);
    let mut draft = metrics.draft();
    let settings = config.gateway.as_ref().unwrap();
    let log = |workers| AccessLog::start(workers, Box::new(std::io::sink()), LogStyle::Json);
    let gateway = GatewayDraft::new(settings, 1, &mut draft, log).unwrap();
    let engine = Arc::new(EngineState::new(config, &mut draft, None).unwrap());
    Gateway::start(config, settings, GatewaySockets(Vec::new()), gateway, &engine).unwrap()
}

/// Answers every request of every connection with 200 and no body, on threads that are not counted.
fn upstream() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || serve_upstream(stream.unwrap()));
        }
    });
    address
}

fn serve_upstream(mut stream: TcpStream) {
    while read_head(&mut stream).is_some() {
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
    }
}

/// Reads a head; `None` at the end of the connection.
fn read_head(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            Ok(1) => head.push(byte[0]),
            _ => return None,
        }
    }
    Some(head)
}

/// Sends requests for a path over one connection and returns their cost, which includes that of the connection.
fn cost(config: &Config, path: &'static str, status: &'static str, requests: usize) -> Cost {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let gateway = gateway(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let client = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        for number in 0..requests {
            let request = format!("GET {path} HTTP/1.1\r\nHost: a.test\r\nX-User: alice\r\n\r\n");
            stream.write_all(request.as_bytes()).unwrap();
            let head = String::from_utf8(read_head(&mut stream).unwrap()).unwrap();
            // The first request is allowed, even if it uses up the limit.
            assert!(number == 0 || head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
            stream.read_exact(&mut body).unwrap();
        }
    });
    let (stream, peer) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    let stream = tokio::net::TcpStream::from_std(stream).unwrap();
    let info = GatewayListener { port: 80, proxy_protocol: false, tls: None, certificate: None };
    let worker = gateway.workers[0].clone();
    let activity = ConnectionActivity::new(worker.shared.ticker.clone(), MinRate(0));
    let before = normalized_count();
    let allocated = allocation_counter::measure(|| {
        runtime.block_on(connection::serve(worker, stream, peer, Arc::new(info), activity));
    });
    client.join().unwrap();
    Cost { normalized: normalized_count() - before, allocated: allocated.count_total }
}

/// The cost of one more request, when buffers and connections are there.
fn cost_of_one(target: &'static str, request_cost: u32, status: &'static str) -> Cost {
    let upstream = upstream();
    let yaml = format!(
        "limits:
  per-user: {{ key: {{ header: X-User }}, cost: {request_cost}, fixed_window: {{ limit: 100000, window: 1h }} }}
  api: {{ when: {{ path: /api/** }}, fixed_window: {{ limit: 1000000, window: 1h }} }}
gateway:
  listen: 127.0.0.1:0
  routes:
    - {{ id: api, path: /api/**, limits: all, upstream: http://{upstream}, timeout: 30s }}
"
    );
    let config =
        ratekeeper_config::parse(&yaml, &EmptyEnvironment).unwrap_or_else(|errors| panic!("{errors}"));
    let run = |requests| cost(&config, target, status, requests);
    let (some, more) = (run(100), run(300));
    assert_eq!((more.normalized - some.normalized) % 200, 0, "{some:?} {more:?}");
    Cost {
        normalized: (more.normalized - some.normalized) / 200,
        // Rounded: a buffer may grow once more in one of the runs.
        allocated: (more.allocated - some.allocated + 100) / 200,
    }
}

#[test]
fn allowed_request_is_normalized_once() {
    assert_eq!(cost_of_one("/api/users/7?x=y", 1, "200"), Cost { normalized: 1, allocated: 16 });
}

#[test]
fn denied_request_is_normalized_once() {
    assert_eq!(cost_of_one("/api/users/7?x=y", 100_000, "429"), Cost { normalized: 1, allocated: 8 });
}

#[test]
fn path_with_an_escape_allocates_no_more() {
    // Normalized for the rules, and for the upstream.
    assert_eq!(cost_of_one("/api/users/a%20b.c?x=y", 1, "200"), Cost { normalized: 2, allocated: 16 });
}
