//! What comes before the first request, and how long it may take.

use std::time::Duration;

use testbed::http2::kind::{DATA, SETTINGS};
use testbed::http2::{frame, get as request};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use super::peers::{File, Folder, Identity, RawHttp2 as Client, read_answer};
use super::support::{Upstream, read_all, run, say, status, until};

/// The end of a line in a file: a listener that speaks TLS.
fn tls(folder: &Folder, identity: &Identity) -> String {
    let certificate = folder.write("cert.pem", &identity.certificate);
    let key = folder.write("key.pem", &identity.key);
    format!(", tls: {{ certificate: {{ file: {certificate} }}, key: {{ file: {key} }} }}")
}

/// A client that is almost too late at each step would otherwise be waited for at each.
#[tokio::test]
async fn all_that_comes_before_a_request_has_one_time_together() {
    let (upstream, folder, identity) = (Upstream::start().await, Folder::new(), Identity::new());
    let tls = tls(&folder, &identity);
    let header = b"PROXY TCP4 192.0.2.1 10.0.0.1 1000 80\r\n";
    let cases = [
        ("", &b"G"[..], false),
        (", proxy_protocol: true", header, false),
        ("", b"PRI", false),
        (&tls, b"", true),
    ];
    let closing = cases.map(|(listener, said, is_tls)| {
        let (limits, gateway) = ("client: { trusted: 127.0.0.1 }", "timeouts: { header: 1s }");
        let file = File { limits, listener, gateway, ..File::default() }.to(&[upstream.address]);
        let identity = &identity;
        async move {
            let gateway = run(&file).await;
            let mut stream = TcpStream::connect(gateway.address).await.unwrap();
            let begin = Instant::now();
            sleep(Duration::from_millis(800)).await;
            match is_tls {
                true => {
                    let mut stream = identity.secure(stream, "http/1.1").await.unwrap();
                    stream.write_all(b"G").await.unwrap();
                    until_end(&mut stream).await;
                }
                false => {
                    stream.write_all(said).await.unwrap();
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

/// Reads until the other side ends, in whatever way.
async fn until_end(stream: &mut (impl tokio::io::AsyncRead + Unpin)) {
    let mut all = Vec::new();
    let reading = tokio::io::AsyncReadExt::read_to_end(stream, &mut all);
    let _ =
        tokio::time::timeout(super::support::PATIENCE, reading).await.expect("the connection stayed open");
}

#[tokio::test]
async fn first_words_may_come_byte_by_byte() {
    let upstream = Upstream::start().await;
    let gateway = run(&File::default().to(&[upstream.address])).await;
    // The second begins as HTTP/2 does.
    for (number, method) in ["GET", "PROPFIND"].into_iter().enumerate() {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        for byte in format!("{method} / HTTP/1.1\r\nHost: a\r\n\r\n").bytes() {
            stream.write_all(&[byte]).await.unwrap();
            sleep(Duration::from_millis(2)).await;
        }
        assert_eq!(status(&read_answer(&mut stream).await), 200);
        assert_eq!(upstream.seen()[number].method.as_str(), method);
    }
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut said = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    said.extend([frame(SETTINGS, 0, 0, &[]), request(1, "/")].concat());
    for byte in said {
        stream.write_all(&[byte]).await.unwrap();
        sleep(Duration::from_millis(2)).await;
    }
    let data = Client(stream).next_of(DATA).await.expect("the connection ended");
    assert_eq!(data.payload, b"hello");
}

/// More than is read at first.
#[tokio::test]
async fn a_long_head_comes_whole() {
    let upstream = Upstream::start().await;
    let gateway = run(&File::default().to(&[upstream.address])).await;
    let long = "a".repeat(10_000);
    let body = "b".repeat(10_000);
    let head = format!(
        "POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Long: {long}\r\nContent-Length: 10000\r\n\r\n"
    );
    assert_eq!(status(&say(gateway.address, head + &body).await), 200);
    let seen = upstream.only();
    assert_eq!((seen.header("x-long"), &*seen.body), (Some(&*long), body.as_bytes()));
}

#[tokio::test]
async fn clients_that_say_nothing_do_not_keep_the_gateway_from_ending() {
    let (upstream, folder, identity) = (Upstream::start().await, Folder::new(), Identity::new());
    let tls = tls(&folder, &identity);
    let file = File { listener: &tls, gateway: "timeouts: { header: 10s, drain: 20s }", ..File::default() };
    let gateway = run(&file.to(&[upstream.address])).await;
    let mut silent = vec![];
    for protocol in ["http/1.1", "h2"] {
        silent.push(identity.connect(gateway.address, protocol).await.unwrap());
    }
    // Not even a handshake.
    let mut mute = TcpStream::connect(gateway.address).await.unwrap();
    until(|| gateway.gateway.watched().metrics().contains("\ntollgate_connections 3\n")).await;
    let begin = Instant::now();
    assert_eq!(gateway.gateway.drain().await, 0, "nobody was cut off");
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    for stream in &mut silent {
        until_end(stream).await;
    }
    until_end(&mut mute).await;
}
