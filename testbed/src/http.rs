//! An HTTP/1.1 client that works on text, so that tests can send malformed requests and see responses byte by byte.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::TEST_TIMEOUT;

/// Sends bytes on a new connection and reads until the other side closes it.
///
/// # Panics
/// If the connection is refused or stays open.
#[expect(clippy::unwrap_used, reason = "a connection that is refused fails the test")]
pub async fn send_raw(address: SocketAddr, bytes: impl AsRef<[u8]>) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // A server that rejects a request may not read all of it.
    let _ = stream.write_all(bytes.as_ref()).await;
    read_all(&mut stream).await
}

/// Sends a GET request with these headers, each with its line end, on a new connection.
///
/// # Panics
/// If the connection is refused or stays open.
pub async fn get(address: SocketAddr, path: &str, headers: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{headers}\r\n");
    send_raw(address, request).await
}

/// Reads until the other side ends the connection, cleanly or not.
///
/// # Panics
/// If the connection stays open.
pub async fn read_all(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut all = Vec::new();
    let _ = timeout(TEST_TIMEOUT, stream.read_to_end(&mut all)).await.expect("the connection stayed open");
    String::from_utf8_lossy(&all).into_owned()
}

/// Reads a head and nothing after it; less if the other side closes first.
///
/// # Panics
/// If the head is not complete in time.
pub async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    let reading = async {
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => return,
            }
        }
    };
    timeout(TEST_TIMEOUT, reading).await.expect("no head received");
    String::from_utf8_lossy(&head).into_owned()
}

/// Reads one response on a connection that may stay open: its head and a body of `Content-Length` bytes.
///
/// # Panics
/// If the response is not complete in time.
#[expect(clippy::unwrap_used, reason = "an incomplete response fails the test")]
pub async fn read_response(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let head = read_head(stream).await;
    let length = header(&head, "content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    timeout(TEST_TIMEOUT, stream.read_exact(&mut body)).await.expect("no body received").unwrap();
    head + &String::from_utf8_lossy(&body)
}

/// The status of a response; 0 if it has none.
pub fn status(response: &str) -> u16 {
    response.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

/// The only value of a header of a response.
///
/// # Panics
/// If the header is repeated.
pub fn header<'a>(response: &'a str, name: &str) -> Option<&'a str> {
    let head = response.split("\r\n\r\n").next()?;
    let mut values = head.lines().skip(1).filter_map(|line| {
        let (its, value) = line.split_once(':')?;
        its.eq_ignore_ascii_case(name).then(|| value.trim())
    });
    let value = values.next();
    assert!(values.next().is_none(), "{name} is sent twice\n{head}");
    value
}
