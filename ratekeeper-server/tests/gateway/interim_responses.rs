//! Interim (1xx) responses of an upstream. The gateway may drop them; the final response must be complete.

use std::net::SocketAddr;

use http::{Request, StatusCode};
use http_body_util::Full;
use testbed::http::{header, read_head, read_response, status};
use testbed::http2::kind::{DATA, HEADERS, SETTINGS};
use testbed::http2::{ACK, END_HEADERS, END_STREAM, PREFACE, block, frame};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::peers::{ConfigFile, RawHttp2, connect_http2, request_http2, scripted};
use super::support::{TestGateway, run};

const HINTS: &str = "</style.css>; rel=preload";

/// Sends several interim responses before each final one.
async fn interim_http1_server() -> SocketAddr {
    scripted(|mut stream, _| async move {
        while !read_head(&mut stream).await.is_empty() {
            let early = format!(
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n\
                 HTTP/1.1 103 Early Hints\r\nLink: {HINTS}\r\nContent-Length: 3\r\n\r\n\
                 HTTP/1.1 103 Early Hints\r\nLink: {HINTS}\r\n\r\n"
            );
            stream.write_all(early.as_bytes()).await.unwrap();
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nX-Final: 1\r\nContent-Length: 5\r\n\r\nhello")
                .await
                .unwrap();
        }
    })
    .await
}

/// Like `interim_http1_server`, with HTTP/2.
async fn interim_http2_server() -> SocketAddr {
    scripted(|mut stream, _| async move {
        let mut preface = [0; PREFACE.len()];
        stream.read_exact(&mut preface).await.unwrap();
        let greeting = [frame(SETTINGS, 0, 0, &[]), frame(SETTINGS, ACK, 0, &[])].concat();
        stream.write_all(&greeting).await.unwrap();
        let mut server = RawHttp2(stream);
        while let Some(request) = server.next_of(HEADERS).await {
            let early = |status| {
                frame(HEADERS, END_HEADERS, request.stream, &block([(":status", status), ("link", HINTS)]))
            };
            let response = [
                early("100"),
                early("103"),
                early("103"),
                frame(HEADERS, END_HEADERS, request.stream, &block([(":status", "200"), ("x-final", "1")])),
                frame(DATA, END_STREAM, request.stream, b"hello"),
            ];
            server.0.write_all(&response.concat()).await.unwrap();
        }
    })
    .await
}

/// Sends three requests on one connection, with each protocol. Only early hints may precede a final response.
async fn check(gateway: &TestGateway) {
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    for _ in 0..3 {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut head = read_head(&mut stream).await;
        while status(&head) == 103 {
            assert_eq!(header(&head, "link"), Some(HINTS), "{head}");
            head = read_head(&mut stream).await;
        }
        let final_head = (status(&head), header(&head, "x-final"), header(&head, "link"));
        assert_eq!(final_head, (200, Some("1"), None), "{head}");
        let mut body = match header(&head, "content-length") {
            Some(_) => vec![0; 5],
            // One chunk, as it arrived in one frame.
            None => vec![0; "5\r\nhello\r\n0\r\n\r\n".len()],
        };
        stream.read_exact(&mut body).await.unwrap();
        assert!(body.windows(5).any(|it| it == b"hello"), "{body:?}");
    }
    let mut sender = connect_http2(TcpStream::connect(gateway.address).await.unwrap()).await;
    for _ in 0..3 {
        let response =
            request_http2(&mut sender, Request::get("http://a/").body(Full::default()).unwrap()).await;
        assert_eq!((response.head.status, response.body.as_ref()), (StatusCode::OK, &b"hello"[..]));
        assert!(response.head.headers.contains_key("x-final"));
        assert_eq!(response.head.headers.get("link"), None);
    }
}

#[tokio::test]
async fn interim_responses_do_not_replace_the_final_one() {
    check(&run(&ConfigFile::default().to(&[interim_http1_server().await])).await).await;
    let file = ConfigFile { upstream: ", protocol: http2", ..ConfigFile::default() };
    check(&run(&file.to(&[interim_http2_server().await])).await).await;
}

/// The gateway itself sends 100 Continue, so the one from the upstream is not forwarded.
#[tokio::test]
async fn client_gets_one_100_continue() {
    let address = scripted(|mut stream, _| async move {
        loop {
            let head = read_head(&mut stream).await;
            if head.is_empty() {
                return;
            }
            assert_eq!(header(&head, "expect"), Some("100-continue"), "{head}");
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.unwrap();
            let mut body = [0; 4];
            stream.read_exact(&mut body).await.unwrap();
            let response = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n".as_bytes();
            stream.write_all(&[response, &body].concat()).await.unwrap();
        }
    })
    .await;
    let gateway = run(&ConfigFile::default().to(&[address])).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    for body in ["one,", "two."] {
        let head = "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        assert_eq!(status(&read_head(&mut stream).await), 100);
        stream.write_all(body.as_bytes()).await.unwrap();
        let response = read_response(&mut stream).await;
        assert!(status(&response) == 200 && response.ends_with(body), "{response}");
    }
}
