//! Connections to upstreams: how long they live, and how many there are.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::server::conn::http2 as server;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncWriteExt, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore};

use super::peers::{File, Folder, Identity, ask_http2, read_answer, read_head, scripted, speak_http2};
use super::support::{Upstream, get, parse, run, say, status, until};

/// What a client gets that asks for one thing after the other.
async fn ask(client: &mut TcpStream, path: &str) -> u16 {
    client.write_all(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).await.unwrap();
    status(&read_answer(client).await)
}

/// An upstream that answers everything, and how many connections to it were opened and are open.
struct Counting {
    address: SocketAddr,
    opened: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
}

async fn counting() -> Counting {
    let (opened, open) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let counts = (opened.clone(), open.clone());
    let address = scripted(move |mut stream, _| {
        let (opened, open) = counts.clone();
        async move {
            opened.fetch_add(1, Ordering::Relaxed);
            open.fetch_add(1, Ordering::Relaxed);
            while !read_head(&mut stream).await.is_empty() {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
            }
            open.fetch_sub(1, Ordering::Relaxed);
        }
    })
    .await;
    Counting { address, opened, open }
}

/// A connection was kept alive by the task that worked on it, and so was the upstream that a reload had replaced: each
/// reload left its connections open for ever.
#[tokio::test]
async fn a_reload_closes_the_connections_of_what_it_replaces() {
    let upstream = counting().await;
    let file = |idle: usize| {
        let setting = format!(", idle_timeout: {idle}s");
        File { upstream: &setting, ..File::default() }.to(&[upstream.address])
    };
    let gateway = run(&file(3_000)).await;
    // Its clients stay, and hold nothing back.
    let mut client = TcpStream::connect(gateway.address).await.unwrap();
    for number in 1..=5 {
        assert_eq!(ask(&mut client, "/").await, 200);
        assert_eq!(upstream.opened.load(Ordering::Relaxed), number);
        gateway.gateway.reload(&parse(&file(3_000 + number))).unwrap();
        until(|| upstream.open.load(Ordering::Relaxed) == 0).await;
    }
}

/// A wire to an upstream that can be cut without either side being told, as by a machine that loses its power.
struct Wire {
    address: SocketAddr,
    cut: Arc<Notify>,
    open: Arc<AtomicUsize>,
}

impl Wire {
    async fn to(upstream: &Upstream) -> Wire {
        let (to, cut, open) = (upstream.address, Arc::new(Notify::new()), Arc::<AtomicUsize>::default());
        let shared = (cut.clone(), open.clone());
        let address = scripted(move |mut near, _| {
            let (cut, open) = shared.clone();
            async move {
                open.fetch_add(1, Ordering::Relaxed);
                let mut far = TcpStream::connect(to).await.unwrap();
                tokio::select! {
                    _ = copy_bidirectional(&mut near, &mut far) => {}
                    // Both ends stay open.
                    () = cut.notified() => std::future::pending().await,
                }
                open.fetch_sub(1, Ordering::Relaxed);
            }
        })
        .await;
        Wire { address, cut, open }
    }

    /// Nothing more gets through on the connections that there are.
    fn cut(&self) {
        self.cut.notify_waiters();
    }

    fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }
}

/// A server that has gone without a word: the kernel tells of it after a quarter of an hour.
#[tokio::test]
async fn a_shared_connection_on_which_requests_time_out_is_replaced() {
    let upstream = Upstream::start().await;
    let wire = Wire::to(&upstream).await;
    let file = File {
        upstream: ", protocol: http2, idle_timeout: 1h, eject: off",
        route: ", timeout: 200ms",
        ..File::default()
    };
    let gateway = run(&file.to(&[wire.address])).await;
    let mut client = TcpStream::connect(gateway.address).await.unwrap();
    assert_eq!(ask(&mut client, "/").await, 200);
    wire.cut();
    let mut lost = 0;
    while ask(&mut client, "/").await != 200 {
        lost += 1;
        // The clock that says how long nothing was heard is coarse.
        assert!(lost <= 2, "the dead connection is still in use");
    }
    assert!(lost >= 1);
}

/// Nor does another worker go on with it.
#[tokio::test]
async fn a_dead_connection_of_several_workers_is_replaced_for_all() {
    let upstream = Upstream::start().await;
    let wire = Wire::to(&upstream).await;
    let file = File {
        upstream: ", protocol: http2, max_connections: 1, idle_timeout: 1h, eject: off",
        route: ", timeout: 200ms",
        ..File::default()
    };
    let gateway = run(&file.to(&[wire.address])).await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(TcpStream::connect(gateway.address).await.unwrap());
    }
    for client in &mut clients {
        assert_eq!(ask(client, "/").await, 200);
    }
    wire.cut();
    let mut lost = 0;
    while ask(&mut clients[0], "/").await != 200 {
        lost += 1;
        assert!(lost <= 3, "the dead connection is still in use");
    }
    for client in &mut clients {
        assert_eq!(ask(client, "/").await, 200);
    }
    assert_eq!(*upstream.connections.lock().unwrap(), 2);
}

/// An answer that comes late says nothing of the connection, as long as others come in time.
#[tokio::test]
async fn a_slow_answer_does_not_cost_the_others_their_connection() {
    let upstream = Upstream::start().await;
    let wire = Wire::to(&upstream).await;
    let file = File { upstream: ", protocol: http2, eject: off", route: ", timeout: 1s", ..File::default() };
    let gateway = run(&file.to(&[wire.address])).await;
    // HTTP/2, so that both are with one worker.
    let sender = speak_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    let get = |path: &str| Request::get(format!("http://a{path}")).body(Full::default()).unwrap();
    let (mut slow, mut quick, late) = (sender.clone(), sender, get("/hold"));
    let slow = tokio::spawn(async move { ask_http2(&mut slow, late).await.head.status });
    upstream.until_waiting(1).await;
    while !slow.is_finished() {
        assert_eq!(ask_http2(&mut quick, get("/")).await.head.status, 200);
        tokio::task::yield_now().await;
    }
    assert_eq!(slow.await.unwrap(), 504);
    assert_eq!(ask_http2(&mut quick, get("/")).await.head.status, 200);
    assert_eq!(*upstream.connections.lock().unwrap(), 1);
}

#[tokio::test]
async fn a_server_that_answers_no_ping_is_given_up() {
    let upstream = Upstream::start().await;
    let wire = Wire::to(&upstream).await;
    let file = File {
        upstream: ", protocol: http2, ping_after: 200ms, connect_timeout: 50ms",
        route: ", timeout: 1h",
        ..File::default()
    };
    let gateway = run(&file.to(&[wire.address])).await;
    let address = gateway.address;
    let request = "POST /hold HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let asked = tokio::spawn(async move { say(address, request).await });
    upstream.until_waiting(1).await;
    wire.cut();
    assert_eq!(status(&asked.await.unwrap()), 502);
}

/// One that answers pings may take as long as it likes, and the others need no connection of their own meanwhile.
#[tokio::test]
async fn a_shared_connection_is_closed_when_nobody_uses_it() {
    let upstream = Upstream::start().await;
    let wire = Wire::to(&upstream).await;
    let setting = ", protocol: http2, idle_timeout: 100ms";
    let gateway = run(&File { upstream: setting, ..File::default() }.to(&[wire.address])).await;
    // HTTP/2, so that both are with one worker.
    let sender = speak_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    let get = |path: &str| Request::get(format!("http://a{path}")).body(Full::default()).unwrap();
    let (mut slow, mut quick, late) = (sender.clone(), sender, get("/hold"));
    let slow = tokio::spawn(async move { ask_http2(&mut slow, late).await.head.status });
    upstream.until_waiting(1).await;
    // Long enough for it to be closed, were it not in use.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(ask_http2(&mut quick, get("/")).await.head.status, 200);
    assert_eq!(*upstream.connections.lock().unwrap(), 1);
    upstream.let_go(1);
    assert_eq!(slow.await.unwrap(), 200);
    until(|| wire.open() == 0).await;
    let gauge = || super::bounds::upstream_connections(&gateway);
    until(|| gauge() == 0).await;
    assert_eq!(ask_http2(&mut quick, get("/")).await.head.status, 200);
    assert_eq!((gauge(), *upstream.connections.lock().unwrap()), (1, 2));
}

/// The bound was divided among the workers and rounded up, so that each had one at least, and HTTP/2 did not know it.
#[tokio::test]
async fn a_bound_below_the_number_of_workers_holds() {
    for protocol in ["http1", "http2"] {
        let upstream = Upstream::start().await;
        let setting = format!(", protocol: {protocol}, max_connections: 1, connect_timeout: 30s");
        let gateway = run(&File { upstream: &setting, ..File::default() }.to(&[upstream.address])).await;
        let address = gateway.address;
        let all_at_once = || async {
            let asked: Vec<_> =
                (0..20).map(|_| tokio::spawn(async move { get(address, "/hold", "").await })).collect();
            upstream.let_go(20);
            for asked in asked {
                assert_eq!(status(&asked.await.unwrap()), 200, "{protocol}");
            }
        };
        // When there is none yet.
        all_at_once().await;
        // One after the other, from clients that are with different workers.
        let mut clients = Vec::new();
        for _ in 0..4 {
            clients.push(TcpStream::connect(address).await.unwrap());
        }
        for _ in 0..5 {
            for client in &mut clients {
                assert_eq!(ask(client, "/").await, 200, "{protocol}");
            }
        }
        all_at_once().await;
        assert_eq!(*upstream.connections.lock().unwrap(), 1, "{protocol}");
    }
}

/// While a worker opens the only connection that there may be, others come who need it, too.
#[tokio::test]
async fn whoever_waits_shares_the_connection_that_another_worker_opens() {
    let (folder, identity, gate) = (Folder::new(), Identity::new(), Arc::new(Semaphore::new(0)));
    let (acceptor, closed) = (identity.acceptor("h2"), gate.clone());
    let address = scripted(move |stream, _| {
        let (acceptor, closed) = (acceptor.clone(), closed.clone());
        async move {
            closed.acquire().await.unwrap().forget();
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let answer = |_| async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("ok"))) };
            let serving = server::Builder::new(TokioExecutor::new());
            let _ = serving.serve_connection(TokioIo::new(stream), service_fn(answer)).await;
        }
    })
    .await;
    let authority = folder.write("authority.pem", &identity.certificate);
    let setting = format!(
        ", protocol: http2, max_connections: 1, connect_timeout: 10s, tls: {{ authority: {{ file: {authority} }} }}"
    );
    let file = File { upstream: &setting, ..File::default() };
    let gateway = run(&file.to_urls(&[format!("https://{address}")])).await;
    let at = gateway.address;
    let asked: Vec<_> = (0..8).map(|_| tokio::spawn(async move { get(at, "/", "").await })).collect();
    let is_in_flight = || gateway.gateway.watched().metrics().contains("tollgate_requests_in_flight 8\n");
    until(is_in_flight).await;
    // One, and no more: a second connection would never come to an end.
    gate.add_permits(1);
    for asked in asked {
        assert_eq!(status(&asked.await.unwrap()), 200);
    }
    assert_eq!(super::bounds::upstream_connections(&gateway), 1);
}

#[tokio::test]
async fn a_bound_that_cannot_be_divided_holds() {
    let most = 2 * std::thread::available_parallelism().unwrap().get() - 1;
    let upstream = Upstream::start().await;
    let setting = format!(", max_connections: {most}, connect_timeout: 30s");
    let gateway = run(&File { upstream: &setting, ..File::default() }.to(&[upstream.address])).await;
    let address = gateway.address;
    let asked: Vec<_> =
        (0..4 * most).map(|_| tokio::spawn(async move { get(address, "/hold", "").await })).collect();
    upstream.until_waiting(most).await;
    let in_flight = || gateway.gateway.watched().metrics().contains(&format!("in_flight {}\n", 4 * most));
    until(in_flight).await;
    upstream.let_go(4 * most);
    for asked in asked {
        assert_eq!(status(&asked.await.unwrap()), 200);
    }
    assert_eq!(*upstream.connections.lock().unwrap(), most);
}

/// A connection on which something else than HTTP is spoken by now is still one.
#[tokio::test]
async fn a_websocket_counts() {
    let address = scripted(|mut stream, _| async move {
        while let head = read_head(&mut stream).await
            && !head.is_empty()
        {
            let answer: &[u8] = match head.contains("websocket") {
                true => {
                    b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
                }
                false => b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            };
            let _ = stream.write_all(answer).await;
        }
    })
    .await;
    let setting = ", max_connections: 1, connect_timeout: 100ms";
    let gateway = run(&File { upstream: setting, ..File::default() }.to(&[address])).await;
    let mut socket = TcpStream::connect(gateway.address).await.unwrap();
    let request = "GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    socket.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(status(&read_head(&mut socket).await), 101);
    assert_eq!(status(&get(gateway.address, "/", "").await), 503);
    drop(socket);
    until(|| super::bounds::upstream_connections(&gateway) == 0).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 200);
}
