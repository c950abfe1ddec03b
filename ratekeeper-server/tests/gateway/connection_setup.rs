//! Connection setup before the first request, and its timeout.

use std::time::Duration;

use testbed::http::{read_all, read_response, send_raw, status};
use testbed::http2::kind::{DATA, SETTINGS};
use testbed::http2::{frame, get as request};
use testbed::wait_until;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use super::peers::{ConfigFile, Identity, RawHttp2 as Client, TempDir};
use super::support::{Upstream, run};

/// TLS settings for a listener.
fn tls(directory: &TempDir, identity: &Identity) -> String {
    let certificate = directory.write("cert.pem", &identity.certificate);
    let key = directory.write("key.pem", &identity.key);
    format!(", tls: {{ certificate: {{ file: {certificate} }}, key: {{ file: {key} }} }}")
}

/// A client that is nearly too slow at each step must not get the full timeout for each.
#[tokio::test]
async fn connection_setup_steps_share_one_timeout() {
    let (upstream, directory, identity) = (Upstream::start().await, TempDir::new(), Identity::new());
    let tls = tls(&directory, &identity);
    let header = b"PROXY TCP4 192.0.2.1 10.0.0.1 1000 80\r\n";
    let cases = [
        ("", &b"G"[..], false),
        (", proxy_protocol: true", header, false),
        ("", b"PRI", false),
        (&tls, b"", true),
    ];
    let closing = cases.map(|(listener, sent, is_tls)| {
        let (limits, gateway) = ("client: { trusted_proxies: 127.0.0.1 }", "timeouts: { header: 1s }");
        let file = ConfigFile { limits, listener, gateway, ..ConfigFile::default() }.to(&[upstream.address]);
        let identity = &identity;
        async move {
            let gateway = run(&file).await;
            let mut stream = TcpStream::connect(gateway.address).await.unwrap();
            let begin = Instant::now();
            // Most of the timeout passes before the first byte, which must not start it again.
            sleep(Duration::from_millis(800)).await;
            match is_tls {
                true => {
                    let mut stream = identity.secure(stream, "http/1.1").await.unwrap();
                    stream.write_all(b"G").await.unwrap();
                    read_all(&mut stream).await;
                }
                false => {
                    stream.write_all(sent).await.unwrap();
                    assert_eq!(read_all(&mut stream).await, "");
                }
            }
            (listener.len(), begin.elapsed())
        }
    });
    let [plain, proxied, http2, secured] = closing;
    let (plain, proxied, http2, secured) = tokio::join!(plain, proxied, http2, secured);
    for (case, elapsed) in [plain, proxied, http2, secured] {
        let wanted = Duration::from_millis(900)..Duration::from_millis(1_500);
        assert!(wanted.contains(&elapsed), "{case}: {elapsed:?}");
    }
}

/// Sends each byte alone: a pause keeps the kernel from joining two.
async fn send_byte_by_byte(stream: &mut TcpStream, bytes: &[u8]) {
    stream.set_nodelay(true).unwrap();
    for byte in bytes {
        stream.write_all(&[*byte]).await.unwrap();
        sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn first_request_may_arrive_byte_by_byte() {
    let upstream = Upstream::start().await;
    let gateway = run(&ConfigFile::default().to(&[upstream.address])).await;
    // The second method shares its first bytes with the HTTP/2 preface.
    for (number, method) in ["GET", "PROPFIND"].into_iter().enumerate() {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        let head = format!("{method} / HTTP/1.1\r\nHost: a\r\n\r\n");
        send_byte_by_byte(&mut stream, head.as_bytes()).await;
        assert_eq!(status(&read_response(&mut stream).await), 200);
        assert_eq!(upstream.requests()[number].method.as_str(), method);
    }
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    sent.extend([frame(SETTINGS, 0, 0, &[]), request(1, "/")].concat());
    send_byte_by_byte(&mut stream, &sent).await;
    let data = Client(stream).next_of(DATA).await.expect("the connection ended");
    assert_eq!(data.payload, b"hello");
}

/// Longer than the first read.
#[tokio::test]
async fn head_longer_than_the_first_read_arrives_complete() {
    let upstream = Upstream::start().await;
    let gateway = run(&ConfigFile::default().to(&[upstream.address])).await;
    let long = "a".repeat(10_000);
    let body = "b".repeat(10_000);
    let head = format!(
        "POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Long: {long}\r\nContent-Length: 10000\r\n\r\n"
    );
    assert_eq!(status(&send_raw(gateway.address, head + &body).await), 200);
    let seen = upstream.only_request();
    assert_eq!((seen.header("x-long"), &*seen.body), (Some(&*long), body.as_bytes()));
}

#[tokio::test]
async fn silent_clients_do_not_delay_graceful_shutdown() {
    let (upstream, directory, identity) = (Upstream::start().await, TempDir::new(), Identity::new());
    let tls = tls(&directory, &identity);
    let file = ConfigFile {
        listener: &tls,
        gateway: "timeouts: { header: 10s, drain: 20s }",
        ..ConfigFile::default()
    };
    let gateway = run(&file.to(&[upstream.address])).await;
    let mut silent = vec![];
    for protocol in ["http/1.1", "h2"] {
        silent.push(identity.connect(gateway.address, protocol).await.unwrap());
    }
    // A connection without even a TLS handshake.
    let mut without_handshake = TcpStream::connect(gateway.address).await.unwrap();
    wait_until(|| gateway.gateway.status().metrics().contains("\nratekeeper_connections 3\n")).await;
    let begin = Instant::now();
    assert_eq!(gateway.gateway.drain().await, 0, "no connection was still open");
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    for stream in &mut silent {
        read_all(stream).await;
    }
    read_all(&mut without_handshake).await;
}
