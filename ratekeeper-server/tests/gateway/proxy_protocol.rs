//! The PROXY protocol: a proxy in front sends the client's address.

use testbed::http::{read_response, send_raw, status};

use super::peers::{ConfigFile, Identity, TempDir};
use super::support::{TestGateway, Upstream, in_front_of, run};
use crate::support::parse;

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

async fn behind_a_proxy(upstream: &Upstream) -> TestGateway {
    let limits = "client: { trusted_proxies: 127.0.0.1 }
limits: { per-client: { key: ip, fixed_window: { limit: 1, window: 1h, align: first_request } } }";
    run(&ConfigFile { limits, listener: ", proxy_protocol: true", ..ConfigFile::default() }
        .to(&[upstream.address]))
    .await
}

fn v2(command: u8, family: u8, addresses: &[u8]) -> Vec<u8> {
    let length = u16::try_from(addresses.len()).unwrap().to_be_bytes();
    [SIGNATURE, &[0x20 | command, family], &length, addresses].concat()
}

async fn send(gateway: &TestGateway, header: &[u8]) -> String {
    send_raw(gateway.address, [header, GET].concat()).await
}

#[tokio::test]
async fn limits_use_the_client_address_of_the_proxy_header() {
    let upstream = Upstream::start().await;
    let gateway = behind_a_proxy(&upstream).await;
    let v4 = [192, 0, 2, 2, 10, 0, 0, 1, 0, 80, 0, 81];
    let mut v6 = [0; 36];
    v6[..16].copy_from_slice(&[0x20, 0x01, 0xd, 0xb8, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 2]);
    let mut mapped = [0; 36];
    mapped[..16].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 4]);
    // Unknown fields may follow the addresses.
    let with_more = [&v4[..3], &[3], &v4[4..], &[0x04, 0, 2, 1, 2]].concat();
    let headers: [(&str, Vec<u8>); 8] = [
        ("192.0.2.1", b"PROXY TCP4 192.0.2.1 10.0.0.1 1000 80\r\n".into()),
        ("2001:db8:0:1::1", b"PROXY TCP6 2001:db8:0:1::1 ::1 1000 80\r\n".into()),
        ("192.0.2.2", v2(1, 0x11, &v4)),
        ("2001:db8:0:7::2", v2(1, 0x21, &v6)),
        ("192.0.2.3", v2(1, 0x11, &with_more)),
        ("192.0.2.4", v2(1, 0x21, &mapped)),
        // The proxy sends no client address: LOCAL and UNKNOWN.
        ("127.0.0.1", v2(0, 0, &[])),
        ("127.0.0.1", b"PROXY UNKNOWN\r\n".into()),
    ];
    for (number, (client, header)) in headers.iter().enumerate() {
        // The last two are the same client.
        let wanted = if number == 7 { 429 } else { 200 };
        let response = send(&gateway, header).await;
        assert_eq!(status(&response), wanted, "{client}: {response}");
        if wanted == 200 {
            let seen = upstream.requests().pop().unwrap();
            assert_eq!(
                (seen.header("x-forwarded-for"), seen.header("x-real-ip")),
                (Some(*client), Some(*client))
            );
        }
        assert_eq!(status(&send(&gateway, header).await), 429, "{client} has used its limit");
    }
    let unknown = b"PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n";
    assert_eq!(status(&send(&gateway, unknown).await), 429, "addresses after UNKNOWN are ignored");
    assert_eq!(status(&send(&gateway, &v2(1, 0, &[])).await), 429);
    let lines = gateway.log.lines(headers.len() * 2 + 2).await;
    assert!(lines.iter().any(|line| line.contains(r#""client":"192.0.2.1""#)), "{lines:?}");
}

#[tokio::test]
async fn connection_without_a_valid_proxy_header_is_closed() {
    let upstream = Upstream::start().await;
    let gateway = behind_a_proxy(&upstream).await;
    let broken: [&[u8]; 14] = [
        b"",
        b"garbage garbage garbage\r\n",
        b"PROXY TCP4 192.0.2.1\r\n",
        b"PROXY TCP4 192.0.2.1 10.0.0.1 1000\r\n",
        b"PROXY TCP4 2001:db8::1 ::1 1000 80\r\n",
        b"PROXY TCP6 192.0.2.1 10.0.0.1 1000 80\r\n",
        b"PROXY TCP4 192.0.2.999 10.0.0.1 1000 80\r\n",
        b"PROXY UDP4 192.0.2.1 10.0.0.1 1000 80\r\n",
        b"proxy TCP4 192.0.2.1 10.0.0.1 1000 80\r\n",
        &[b'P'; 200],
        &v2(1, 0x11, &[192, 0, 2]),
        &v2(2, 0x11, &[0; 12]),
        &v2(1, 0x41, &[0; 12]),
        b"\r\n\r\n\0\r\nQUIT\n\x11\x11\0\x0c\xc0\0\x02\x01\x0a\0\0\x01\0\x50\0\x51",
    ];
    for header in broken {
        assert_eq!(send(&gateway, header).await, "", "{}", String::from_utf8_lossy(header));
    }
    // Longer than the longest allowed line.
    let long = format!("PROXY UNKNOWN {}\r\n", "a".repeat(100));
    assert_eq!(send(&gateway, long.as_bytes()).await, "");
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn proxy_header_is_rejected_on_a_plain_listener() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "", "").await;
    for header in [
        &b"PROXY TCP4 192.0.2.1 10.0.0.1 1000 80\r\n"[..],
        &v2(1, 0x11, &[192, 0, 2, 2, 10, 0, 0, 1, 0, 80, 0, 81]),
    ] {
        let response = send(&gateway, header).await;
        assert!(matches!(status(&response), 0 | 400), "{response}");
    }
    assert!(upstream.requests().is_empty());
}

/// A peer that can send the header chooses the client address that limits use.
#[tokio::test]
async fn proxy_header_is_accepted_only_from_trusted_proxies() {
    let upstream = Upstream::start().await;
    let file = |trusted: &str| {
        let limits = format!("client: {{ trusted_proxies: {trusted} }}");
        let listener = ", proxy_protocol: true";
        ConfigFile { limits: &limits, listener, ..ConfigFile::default() }.to(&[upstream.address])
    };
    let gateway = run(&file("10.0.0.0/8")).await;
    let header = b"PROXY TCP4 192.0.2.1 10.0.0.1 1000 80\r\n";
    assert_eq!(send(&gateway, header).await, "");
    assert_eq!(send(&gateway, &v2(0, 0, &[])).await, "");
    assert!(upstream.requests().is_empty());
    let metrics = gateway.gateway.status().metrics();
    assert!(
        metrics.contains("\nratekeeper_connections_rejected_total{reason=\"untrusted_proxy\"} 2\n"),
        "{metrics}"
    );
    gateway.gateway.reload(&parse(&file("[10.0.0.0/8, 127.0.0.0/8]"))).unwrap();
    assert_eq!(status(&send(&gateway, header).await), 200);
    assert_eq!(upstream.only_request().header("x-forwarded-for"), Some("192.0.2.1"));
}

#[tokio::test]
async fn proxy_header_precedes_tls() {
    use tokio::io::AsyncWriteExt;
    let (upstream, directory, identity) = (Upstream::start().await, TempDir::new(), Identity::new());
    let certificate = directory.write("cert.pem", &identity.certificate);
    let key = directory.write("key.pem", &identity.key);
    let listener = format!(
        ", proxy_protocol: true, tls: {{ certificate: {{ file: {certificate} }}, key: {{ file: {key} }} }}"
    );
    let limits = "client: { trusted_proxies: 127.0.0.1 }";
    let gateway =
        run(&ConfigFile { limits, listener: &listener, ..ConfigFile::default() }.to(&[upstream.address]))
            .await;
    let mut stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(b"PROXY TCP4 192.0.2.1 10.0.0.1 1000 443\r\n").await.unwrap();
    let mut stream = identity.secure(stream, "http/1.1").await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    assert_eq!(status(&read_response(&mut stream).await), 200);
    assert_eq!(upstream.only_request().header("x-forwarded-for"), Some("192.0.2.1"));
}

#[tokio::test]
async fn incomplete_connection_setup_times_out() {
    let (upstream, directory, identity) = (Upstream::start().await, TempDir::new(), Identity::new());
    let certificate = directory.write("cert.pem", &identity.certificate);
    let key = directory.write("key.pem", &identity.key);
    let tls = format!(", tls: {{ certificate: {{ file: {certificate} }}, key: {{ file: {key} }} }}");
    let half: &[u8] = &SIGNATURE[..6];
    for (listener, sent) in [
        (", proxy_protocol: true", &b""[..]),
        (", proxy_protocol: true", half),
        (&tls, b""),
        (&tls, b"\x16\x03\x01"),
    ] {
        let (limits, gateway) = ("client: { trusted_proxies: 127.0.0.1 }", "timeouts: { header: 200ms }");
        let file = ConfigFile { limits, listener, gateway, ..ConfigFile::default() };
        let gateway = run(&file.to(&[upstream.address])).await;
        assert_eq!(send_raw(gateway.address, sent).await, "", "{listener}");
    }
    assert!(upstream.requests().is_empty());
}
