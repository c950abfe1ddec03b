//! Certificates of the gateway, replaced on reload, and of upstreams.

use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::Bytes;
use http::Response;
use http_body_util::Full;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::CertificateDer;
use testbed::http::{get, read_head, read_response, status};
use tokio::io::AsyncWriteExt;

use super::peers::{ConfigFile, Identity, TempDir, scripted};
use super::support::{TestGateway, Upstream, run};
use crate::support::parse;

pub(crate) fn listener(directory: &TempDir, name: &str, identity: &Identity) -> String {
    let certificate = directory.write(&format!("{name}.pem"), &identity.certificate);
    let key = directory.write(&format!("{name}-key.pem"), &identity.key);
    format!("tls: {{ certificate: {{ file: {certificate} }}, key: {{ file: {key} }} }}")
}

/// Sends a request and returns the certificate that the gateway presents.
async fn presented_certificate(address: SocketAddr, wanted: &Identity) -> Option<CertificateDer<'static>> {
    let mut stream = wanted.connect(address, "http/1.1").await.ok()?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    assert_eq!(status(&read_response(&mut stream).await), 200);
    Some(stream.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned())
}

#[tokio::test]
async fn reload_replaces_the_certificate() {
    let (upstream, directory) = (Upstream::start().await, TempDir::new());
    let (old, new) = (Identity::new(), Identity::new());
    let listening = format!(", {}", listener(&directory, "cert", &old));
    let file = ConfigFile { listener: &listening, ..ConfigFile::default() }.to(&[upstream.address]);
    let gateway = run(&file).await;
    assert_eq!(presented_certificate(gateway.address, &old).await, Some(old.der()));
    let mut kept = old.connect(gateway.address, "http/1.1").await.unwrap();

    listener(&directory, "cert", &new);
    gateway.gateway.reload(&parse(&file)).unwrap();
    assert_eq!(presented_certificate(gateway.address, &new).await, Some(new.der()));
    assert_eq!(
        presented_certificate(gateway.address, &old).await,
        None,
        "the old certificate is no longer presented"
    );
    // Existing connections stay open.
    kept.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    assert_eq!(status(&read_response(&mut kept).await), 200);
}

#[tokio::test]
async fn invalid_certificate_files_change_nothing() {
    let (upstream, directory) = (Upstream::start().await, TempDir::new());
    let (one, other, new) = (Identity::new(), Identity::new(), Identity::new());
    let (first, second) = (listener(&directory, "first", &one), listener(&directory, "second", &other));
    let file = format!(
        "gateway:
  listen: [{{ address: 127.0.0.1:0, {first} }}, {{ address: 127.0.0.1:0, {second} }}]
  routes: [{{ id: all, limits: all, upstream: http://{} }}]
",
        upstream.address
    );
    let config = parse(&file);
    let TestGateway { gateway, .. } = run(&file).await;
    let (at_first, at_second) = (gateway.addresses()[0].address, gateway.addresses()[1].address);
    // The first certificate is valid and the second is not: neither changes.
    listener(&directory, "first", &new);
    for broken in [&other.certificate[..other.certificate.len() / 2], "", &new.certificate] {
        directory.write("second.pem", broken);
        let error = gateway.reload(&config).unwrap_err();
        assert!(error.to_string().contains("second.pem"), "{error}");
        assert_eq!(presented_certificate(at_first, &one).await, Some(one.der()));
        assert_eq!(presented_certificate(at_second, &other).await, Some(other.der()));
    }
    directory.write("second-key.pem", &new.key);
    directory.write("second.pem", &new.certificate);
    gateway.reload(&config).unwrap();
    assert_eq!(presented_certificate(at_first, &new).await, Some(new.der()));
    assert_eq!(presented_certificate(at_second, &new).await, Some(new.der()));
}

/// Certificates used to be read last, after the metrics of the new configuration were registered.
#[tokio::test]
async fn failed_reload_does_not_change_the_metrics() {
    let (upstream, directory, identity) = (Upstream::start().await, TempDir::new(), Identity::new());
    let listening = format!(", {}", listener(&directory, "cert", &identity));
    let file = |id: &str, upstream_setting: &str| {
        let limits = format!("limits: {{ {id}-limit: {{ key: ip, fixed_window: {{ limit: 9 }} }} }}");
        let file = ConfigFile {
            limits: &limits,
            listener: &listening,
            upstream: upstream_setting,
            ..ConfigFile::default()
        };
        file.to_urls(&[format!("https://{}", upstream.address)]).replace("id: all", &format!("id: {id}"))
    };
    let gateway = run(&file("old", "")).await.gateway;
    let metrics = || gateway.status().metrics().replace(r#"failure"} 1"#, r#"failure"} 0"#);
    let before = metrics();
    assert!(before.contains(r#"route="old""#) && before.contains(r#"limit="old-limit""#), "{before}");
    // An invalid CA certificate, then a certificate that does not match its key.
    let authority =
        directory.write("authority.pem", "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n");
    let setting = format!(", tls: {{ ca: {{ file: {authority} }} }}");
    gateway.reload(&parse(&file("new", &setting))).unwrap_err();
    assert_eq!(metrics(), before);
    directory.write("cert.pem", &Identity::new().certificate);
    gateway.reload(&parse(&file("new", ""))).unwrap_err();
    assert_eq!(metrics().replace(r#"failure"} 2"#, r#"failure"} 0"#), before);

    directory.write("cert.pem", &identity.certificate);
    gateway.reload(&parse(&file("new", ""))).unwrap();
    let after = metrics();
    assert!(after.contains(r#"route="new""#) && after.contains(r#"limit="new-limit""#), "{after}");
    assert!(!after.contains(r#"route="old""#) && !after.contains(r#"limit="old-limit""#), "{after}");
}

#[tokio::test]
async fn plain_text_on_a_tls_listener_is_closed() {
    let (upstream, directory, identity) = (Upstream::start().await, TempDir::new(), Identity::new());
    let listening = format!(", {}", listener(&directory, "cert", &identity));
    let gateway =
        run(&ConfigFile { listener: &listening, ..ConfigFile::default() }.to(&[upstream.address])).await;
    let response = get(gateway.address, "/", "").await;
    assert!(!response.contains("HTTP/1.1 200"), "{response}");
    assert!(upstream.requests().is_empty());
    assert_eq!(presented_certificate(gateway.address, &identity).await, Some(identity.der()));
}

/// A TLS server that answers `secret` with the given protocol.
async fn secured(identity: &Identity, protocol: &'static str) -> SocketAddr {
    let acceptor = identity.acceptor(protocol);
    scripted(move |stream, _| {
        let acceptor = acceptor.clone();
        async move {
            let Ok(mut stream) = acceptor.accept(stream).await else { return };
            if protocol == "h2" {
                let response =
                    |_| async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("secret"))) };
                let serving = http2::Builder::new(TokioExecutor::new());
                let _ = serving.serve_connection(TokioIo::new(stream), service_fn(response)).await;
                return;
            }
            while !read_head(&mut stream).await.is_empty() {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret").await.unwrap();
            }
        }
    })
    .await
}

#[tokio::test]
async fn upstream_certificate_must_be_trusted() {
    let (directory, right, wrong) = (TempDir::new(), Identity::new(), Identity::new());
    for (protocol, alpn) in [("http1", "http/1.1"), ("http2", "h2")] {
        let address = secured(&right, alpn).await;
        for (authority, wanted) in [(&right, 200), (&wrong, 502)] {
            let authority = directory.write("authority.pem", &authority.certificate);
            let setting = format!(", protocol: {protocol}, tls: {{ ca: {{ file: {authority} }} }}");
            let gateway = run(&ConfigFile { upstream: &setting, ..ConfigFile::default() }
                .to_urls(&[format!("https://{address}")]))
            .await;
            let response = get(gateway.address, "/", "").await;
            assert_eq!(status(&response), wanted, "{protocol}: {response}");
            assert_eq!(response.ends_with("secret"), wanted == 200, "{protocol}: {response}");
        }
    }
}

/// The gateway does not fall back to plain text if an upstream does not use TLS.
#[tokio::test]
async fn https_upstream_without_tls_gets_no_request() {
    let (upstream, directory, identity) = (Upstream::start().await, TempDir::new(), Identity::new());
    let authority = directory.write("authority.pem", &identity.certificate);
    let setting = format!(", tls: {{ ca: {{ file: {authority} }} }}");
    let url = format!("https://{}", upstream.address);
    let gateway = run(&ConfigFile { upstream: &setting, ..ConfigFile::default() }.to_urls(&[url])).await;
    assert_eq!(status(&get(gateway.address, "/", "").await), 502);
    assert!(upstream.requests().is_empty());
}
