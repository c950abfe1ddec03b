//! Keep-alive clients, and load from many of them.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use testbed::{TEST_TIMEOUT, wait_until};
use tokio::time::Instant;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// A complete response.
#[derive(Clone, Debug, Default)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        testbed::http::header(&self.head, name)
    }
}

/// A client with one connection, opened on demand.
pub(crate) struct Client {
    address: SocketAddr,
    stream: Option<BufReader<TcpStream>>,
    /// How often a kept connection was closed before a request could be sent on it. HTTP has clients retry these
    /// requests.
    pub(crate) resent: u64,
}

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Client {
        Client { address, stream: None, resent: 0 }
    }

    /// Creates a client that connects immediately.
    pub(crate) async fn connected(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).await.unwrap();
        Client { address, stream: Some(BufReader::new(stream)), resent: 0 }
    }

    pub(crate) async fn get(&mut self, path: &str, headers: &str) -> io::Result<Response> {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n").as_bytes()).await
    }

    pub(crate) async fn send(&mut self, request: &[u8]) -> io::Result<Response> {
        if let Some(stream) = self.stream.take() {
            match self.send_on(stream, request).await {
                Err(error) if error.kind() == io::ErrorKind::NotConnected => self.resent += 1,
                response => return response,
            }
        }
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        self.send_on(BufReader::new(stream), request).await
    }

    /// Returns `NotConnected` if the server has closed the connection without a response.
    async fn send_on(&mut self, mut stream: BufReader<TcpStream>, request: &[u8]) -> io::Result<Response> {
        let gone = || io::Error::from(io::ErrorKind::NotConnected);
        let response = timeout(TEST_TIMEOUT, async {
            stream.get_mut().write_all(request).await.map_err(|_| gone())?;
            let mut head = String::new();
            loop {
                let read = stream.read_line(&mut head).await;
                match read {
                    Ok(0) | Err(_) if head.is_empty() => return Err(gone()),
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Err(error) => return Err(error),
                    Ok(_) if head.ends_with("\r\n\r\n") => break,
                    Ok(_) => {}
                }
            }
            let mut response = Response { status: testbed::http::status(&head), head, body: Vec::new() };
            let length = response.header("content-length").map(|length| length.parse().unwrap());
            match length {
                Some(length) => {
                    response.body.resize(length, 0);
                    stream.read_exact(&mut response.body).await?;
                }
                None => drop(stream.read_to_end(&mut response.body).await?),
            }
            Ok(response)
        });
        let response = response.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let closes = response.header("connection").is_some_and(|it| it.eq_ignore_ascii_case("close"));
        if !closes && response.header("content-length").is_some() {
            self.stream = Some(stream);
        }
        Ok(response)
    }
}

/// Sends one request on a new connection.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Response {
    Client::new(address).get(path, "").await.unwrap()
}

/// The outcomes of many requests.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) statuses: BTreeMap<u16, u64>,
    /// Reasons for missing or wrong responses.
    pub(crate) failed: Vec<String>,
    pub(crate) resent: u64,
    pub(crate) slowest: Duration,
}

impl Tally {
    pub(crate) fn of(&self, status: u16) -> u64 {
        self.statuses.get(&status).copied().unwrap_or(0)
    }

    pub(crate) fn add(&mut self, took: Duration, response: &io::Result<Response>) {
        self.slowest = self.slowest.max(took);
        match response {
            Ok(response) => *self.statuses.entry(response.status).or_default() += 1,
            Err(error) => self.failed.push(error.to_string()),
        }
    }

    pub(crate) fn merge(&mut self, other: Tally) {
        for (status, count) in other.statuses {
            *self.statuses.entry(status).or_default() += count;
        }
        self.failed.extend(other.failed);
        self.resent += other.resent;
        self.slowest = self.slowest.max(other.slowest);
    }

    /// Asserts that every response had this status.
    pub(crate) fn assert_all(&self, status: u16) {
        assert!(self.failed.is_empty(), "{:?}", &self.failed[..self.failed.len().min(5)]);
        assert_eq!(self.statuses.keys().copied().collect::<Vec<_>>(), [status], "{self}");
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (status, count) in &self.statuses {
            write!(f, "{status}: {count}, ")?;
        }
        let Tally { failed, resent, slowest, .. } = self;
        write!(f, "failed: {}, resent: {resent}, slowest: {slowest:.1?}", failed.len())
    }
}

/// Clients that send requests until stopped.
pub(crate) struct Load {
    is_over: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    clients: JoinSet<Tally>,
}

impl Load {
    /// Starts `clients` numbered clients. `request` gets the client's number and its count of requests so far.
    pub(crate) fn start<R, C>(address: SocketAddr, clients: usize, request: R, check: C) -> Load
    where
        R: Fn(usize, u64) -> Vec<u8> + Send + Sync + 'static,
        C: Fn(&Response) -> Result<(), String> + Send + Sync + 'static,
    {
        let (is_over, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let exchange = Arc::new((request, check));
        let mut all = JoinSet::new();
        for number in 0..clients {
            let (is_over, answered, exchange) = (is_over.clone(), answered.clone(), exchange.clone());
            all.spawn(async move {
                let (mut client, mut tally, mut count) = (Client::new(address), Tally::default(), 0);
                while !is_over.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    let response = client.send(&exchange.0(number, count)).await;
                    tally.add(begun.elapsed(), &response);
                    if let Ok(response) = &response
                        && let Err(why) = exchange.1(response)
                    {
                        tally.failed.push(why);
                    }
                    count += 1;
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                tally.resent = client.resent;
                tally
            });
        }
        Load { is_over, answered, clients: all }
    }

    /// Sends the same request repeatedly; accepts any response.
    pub(crate) fn get(address: SocketAddr, clients: usize, path: &str) -> Load {
        let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").into_bytes();
        Load::start(address, clients, move |_, _| request.clone(), |_| Ok(()))
    }

    pub(crate) fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Waits until `count` more requests are answered.
    pub(crate) async fn more(&self, count: u64) {
        let goal = self.answered() + count;
        wait_until(|| self.answered() >= goal).await;
    }

    pub(crate) async fn stop(mut self) -> Tally {
        self.is_over.store(true, Ordering::Relaxed);
        let mut all = Tally::default();
        while let Some(tally) = self.clients.join_next().await {
            all.merge(tally.unwrap());
        }
        all
    }
}
