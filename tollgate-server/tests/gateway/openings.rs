//! What comes before the first request, and how long it may take.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use super::peers::{File, Folder, Identity};
use super::support::{Upstream, read_all, run};

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
