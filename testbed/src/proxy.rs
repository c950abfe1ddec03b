use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A network fault between a client and a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No fault: bytes are forwarded immediately.
    Pass,
    /// Bytes are forwarded after this delay, in both directions.
    Delay(Duration),
    /// Replies are forwarded one byte at a time, each after this delay.
    Drip(Duration),
    /// Connections are accepted and all bytes are discarded. Connections that have lost bytes are closed when the
    /// fault ends.
    HalfOpen,
    /// Connections are closed, and new ones are reset as soon as the client sends something.
    Reset,
}

/// A TCP proxy to a local server that injects faults.
///
/// Dropping it closes the listener and all connections.
#[derive(Debug)]
pub struct FaultProxy {
    port: u16,
    switch: Arc<Switch>,
    api: Option<JoinHandle<()>>,
}

/// Maximum of open connections; further ones are closed immediately. Each takes two threads.
const CONNECTIONS_MAX: usize = 256;
/// Interval at which a thread that waits for bytes checks whether the fault has changed.
const GLANCE: Duration = Duration::from_millis(10);
/// Timeout of a write to a peer that does not read, after which its connection is closed.
const STUCK: Duration = Duration::from_secs(1);

impl FaultProxy {
    /// Listens on a free port and forwards connections to the port `upstream`.
    ///
    /// # Errors
    /// If there is no free port.
    pub fn start(upstream: u16) -> io::Result<FaultProxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let switch = Arc::new(Switch::default());
        let api = std::thread::Builder::new().spawn({
            let switch = switch.clone();
            move || accept(&listener, upstream, &switch)
        })?;
        Ok(FaultProxy { port, switch, api: Some(api) })
    }

    /// Sets the fault, which also applies to bytes in flight.
    pub fn set(&self, fault: Fault) {
        self.switch.change(|setting| setting.fault = fault);
    }

    /// Number of open connections.
    pub fn connections(&self) -> usize {
        self.switch.connections.load(Ordering::Relaxed)
    }

    /// Number of bytes that clients have sent.
    pub fn received(&self) -> usize {
        self.switch.received.load(Ordering::Relaxed)
    }

    /// The port on which the proxy listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a Redis server behind the proxy.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.switch.change(|setting| setting.is_over = true);
        // Wakes the accepting thread, which waits for a connection.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        if let Some(api) = self.api.take() {
            let _ = api.join();
        }
    }
}

/// State shared by all threads.
#[derive(Debug, Default)]
struct Switch {
    setting: Mutex<Setting>,
    changed: Condvar,
    connections: AtomicUsize,
    received: AtomicUsize,
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    fault: Fault,
    is_over: bool,
    /// Incremented by every change: setting the same fault again is a change, too.
    version: u64,
}

impl Default for Setting {
    fn default() -> Setting {
        Setting { fault: Fault::Pass, is_over: false, version: 0 }
    }
}

impl Switch {
    fn lock(&self) -> MutexGuard<'_, Setting> {
        // A setting is consistent at any time, so a poisoned lock is harmless.
        self.setting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Setting {
        *self.lock()
    }

    fn change(&self, change: impl FnOnce(&mut Setting)) {
        let mut setting = self.lock();
        change(&mut setting);
        setting.version += 1;
        self.changed.notify_all();
    }

    /// Waits for `length` or until the setting changes; returns whether it is unchanged.
    fn holds_for(&self, setting: Setting, length: Duration) -> bool {
        let (now, _) = self
            .changed
            .wait_timeout_while(self.lock(), length, |now| now.version == setting.version)
            .unwrap_or_else(PoisonError::into_inner);
        now.version == setting.version
    }
}

fn accept(listener: &TcpListener, upstream: u16, switch: &Arc<Switch>) {
    let mut connections: Vec<JoinHandle<()>> = Vec::new();
    while let Ok((client, _)) = listener.accept() {
        if switch.now().is_over {
            break;
        }
        connections.retain(|connection| !connection.is_finished());
        if connections.len() < CONNECTIONS_MAX {
            let switch = switch.clone();
            // An error closes this connection, as it would without a proxy.
            let thread = std::thread::Builder::new().spawn(move || {
                switch.connections.fetch_add(1, Ordering::Relaxed);
                let _ = connection(&client, upstream, &switch);
                switch.connections.fetch_sub(1, Ordering::Relaxed);
            });
            connections.extend(thread);
        }
    }
    for connection in connections {
        let _ = connection.join();
    }
}

/// Serves a connection until it is closed.
fn connection(client: &TcpStream, upstream: u16, switch: &Switch) -> io::Result<()> {
    prepare(client)?;
    let setting = switch.now();
    match setting.fault {
        Fault::Reset => {
            // Closing a socket with unread bytes resets the connection.
            let mut waited = Duration::ZERO;
            while !is_ready(client)? && waited < STUCK && switch.now().version == setting.version {
                waited += GLANCE;
            }
            return Ok(());
        }
        Fault::HalfOpen => return swallow(client, setting, switch),
        Fault::Pass | Fault::Delay(_) | Fault::Drip(_) => {}
    }
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream))?;
    prepare(&server)?;
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let _ = pump(&server, client, true, switch);
            hang_up(client, &server);
        });
        let pumped = pump(client, &server, false, switch);
        hang_up(client, &server);
        pumped
    })
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GLANCE))?;
    stream.set_write_timeout(Some(STUCK))
}

/// Ends the connection for the server and for the thread of the other direction. The client's socket is closed when
/// both threads have ended, and bytes that it has sent meanwhile reset it.
fn hang_up(client: &TcpStream, server: &TcpStream) {
    let _ = client.shutdown(std::net::Shutdown::Read);
    let _ = server.shutdown(std::net::Shutdown::Both);
}

/// Whether bytes or the end of the stream can be read within [`GLANCE`].
fn is_ready(stream: &TcpStream) -> io::Result<bool> {
    match stream.peek(&mut [0]) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(false),
        // Interrupted by a signal.
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(false),
        Err(error) => Err(error),
    }
}

/// Forwards bytes in one direction until the connection is closed, by a peer or by a fault.
fn pump(mut from: &TcpStream, to: &TcpStream, is_answer: bool, switch: &Switch) -> io::Result<()> {
    let mut bytes = [0; 4096];
    loop {
        let is_ready = is_ready(from)?;
        let setting = switch.now();
        if setting.is_over || setting.fault == Fault::Reset {
            return Ok(());
        }
        if !is_ready {
            continue;
        }
        let length = from.read(&mut bytes)?;
        if !is_answer {
            switch.received.fetch_add(length, Ordering::Relaxed);
        }
        if length == 0 || !carry(&bytes[..length], to, is_answer, switch)? {
            return swallow(from, switch.now(), switch);
        }
    }
}

/// Forwards bytes according to the fault; returns whether the connection can continue.
fn carry(mut bytes: &[u8], mut to: &TcpStream, is_answer: bool, switch: &Switch) -> io::Result<bool> {
    while !bytes.is_empty() {
        let setting = switch.now();
        let length = match setting.fault {
            _ if setting.is_over => return Ok(false),
            Fault::HalfOpen | Fault::Reset => return Ok(false),
            // The fault has changed during the wait, so it is read again.
            Fault::Delay(length) if !switch.holds_for(setting, length) => continue,
            Fault::Drip(length) if is_answer && !switch.holds_for(setting, length) => continue,
            Fault::Drip(_) if is_answer => 1,
            Fault::Pass | Fault::Delay(_) | Fault::Drip(_) => bytes.len(),
        };
        to.write_all(&bytes[..length])?;
        bytes = &bytes[length..];
    }
    Ok(true)
}

/// Discards bytes while the connection is half open; returns when the fault ends.
fn swallow(mut from: &TcpStream, setting: Setting, switch: &Switch) -> io::Result<()> {
    let mut bytes = [0; 4096];
    while setting.fault == Fault::HalfOpen && switch.now().version == setting.version {
        if is_ready(from)? && from.read(&mut bytes)? == 0 {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    /// An echo server that runs until the test's process ends.
    fn echo() -> u16 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                std::thread::spawn(move || io::copy(&mut &stream, &mut &stream));
            }
        });
        port
    }

    fn connect(proxy: &FaultProxy) -> TcpStream {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    }

    fn echoes(mut stream: &TcpStream, text: &str) -> bool {
        let mut received = vec![0; text.len()];
        stream.write_all(text.as_bytes()).is_ok()
            && stream.read_exact(&mut received).is_ok()
            && received == text.as_bytes()
    }

    /// Whether nothing can be read for this long.
    fn is_silent(mut stream: &TcpStream, length: Duration) -> bool {
        stream.set_read_timeout(Some(length)).unwrap();
        let read = stream.read(&mut [0; 100]);
        stream.set_read_timeout(Some(LONG)).unwrap();
        read.is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
    }

    /// Whether the peer has closed or reset the connection.
    fn is_ended(mut stream: &TcpStream) -> bool {
        match stream.read(&mut [0; 100]) {
            Ok(length) => length == 0,
            Err(error) => matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
        }
    }

    #[test]
    fn bytes_are_forwarded_immediately_or_after_the_delay() {
        let proxy = FaultProxy::start(echo()).unwrap();
        assert_eq!(proxy.connections(), 0);
        let stream = connect(&proxy);
        assert!(echoes(&stream, "hello"));
        assert_eq!((proxy.connections(), proxy.received()), (1, 5));
        proxy.set(Fault::Delay(Duration::from_millis(300)));
        (&stream).write_all(b"slow").unwrap();
        assert!(is_silent(&stream, Duration::from_millis(50)), "there and back is 600 ms");
        let mut received = [0; 4];
        (&stream).read_exact(&mut received).unwrap();
        assert_eq!(&received, b"slow");
        // Delayed bytes are forwarded immediately when the fault ends.
        proxy.set(Fault::Delay(LONG * 100));
        (&stream).write_all(b"stuck").unwrap();
        assert!(is_silent(&stream, Duration::from_millis(50)));
        proxy.set(Fault::Pass);
        (&stream).read_exact(&mut [0; 5]).unwrap();
    }

    #[test]
    fn answers_drip() {
        let proxy = FaultProxy::start(echo()).unwrap();
        proxy.set(Fault::Drip(Duration::from_millis(300)));
        let stream = connect(&proxy);
        (&stream).write_all(b"drip").unwrap();
        assert_eq!((&stream).read(&mut [0; 100]).unwrap(), 1, "a byte comes alone");
        proxy.set(Fault::Pass);
        (&stream).read_exact(&mut [0; 3]).unwrap();
        assert!(echoes(&stream, "hello"));
    }

    #[test]
    fn half_open_connection_discards_bytes_and_closes_when_the_fault_ends() {
        let proxy = FaultProxy::start(echo()).unwrap();
        let (old, idle) = (connect(&proxy), connect(&proxy));
        assert!(echoes(&old, "hello") && echoes(&idle, "hello"));
        proxy.set(Fault::HalfOpen);
        let new = connect(&proxy);
        for stream in [&old, &new] {
            (&mut &*stream).write_all(b"anybody?").unwrap();
            assert!(is_silent(stream, Duration::from_millis(50)));
        }
        proxy.set(Fault::Pass);
        assert!(is_ended(&old) && is_ended(&new));
        assert!(echoes(&idle, "it lost nothing"));
        assert!(echoes(&connect(&proxy), "hello"));
    }

    #[test]
    fn connections_are_reset() {
        let proxy = FaultProxy::start(echo()).unwrap();
        let old = connect(&proxy);
        assert!(echoes(&old, "hello"));
        proxy.set(Fault::Reset);
        assert!(is_ended(&old));
        let new = connect(&proxy);
        (&new).write_all(b"anybody?").unwrap();
        let error = (&new).read(&mut [0; 100]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        proxy.set(Fault::Pass);
        assert!(echoes(&connect(&proxy), "hello"));
    }

    #[test]
    fn dropped_proxy_stops_listening_with_any_fault() {
        let upstream = echo();
        for fault in
            [Fault::Pass, Fault::Delay(LONG * 100), Fault::Drip(LONG * 100), Fault::HalfOpen, Fault::Reset]
        {
            let proxy = FaultProxy::start(upstream).unwrap();
            let port = proxy.port();
            let stream = connect(&proxy);
            assert!(echoes(&stream, "hello"));
            proxy.set(fault);
            // The fault may already have closed the connection.
            let _ = (&stream).write_all(b"hello");
            drop(proxy);
            assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err(), "{fault:?}");
        }
    }

    #[test]
    fn connection_to_an_unavailable_server_is_closed() {
        let closed_port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let proxy = FaultProxy::start(closed_port).unwrap();
        assert!(is_ended(&connect(&proxy)));
    }
}
