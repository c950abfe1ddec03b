use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// What is wrong with the way to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: bytes pass as they come.
    Pass,
    /// Whatever arrives is held back for so long before it is passed on, in both directions.
    Delay(Duration),
    /// Answers come one byte at a time, each after so long.
    Drip(Duration),
    /// Connections are accepted and everything is swallowed. What has lost bytes cannot go on: those connections end
    /// with the fault.
    HalfOpen,
    /// Connections end, and new ones are reset as soon as something is said on them.
    Reset,
}

/// A way to a server on this machine that can be made to fail.
///
/// Ends, with all its connections, when it is dropped.
#[derive(Debug)]
pub struct FaultProxy {
    port: u16,
    switch: Arc<Switch>,
    door: Option<JoinHandle<()>>,
}

/// Connections at a time; more are closed at once. Each takes two threads.
const CONNECTIONS_MAX: usize = 256;
/// How soon a thread that waits for bytes sees that the fault has changed.
const GLANCE: Duration = Duration::from_millis(10);
/// How long a peer may take none of its bytes before its connection ends.
const STUCK: Duration = Duration::from_secs(1);

impl FaultProxy {
    /// Listens on a free port, and passes everything to and from this port.
    ///
    /// # Errors
    /// If there is no free port.
    pub fn start(upstream: u16) -> io::Result<FaultProxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let switch = Arc::new(Switch::default());
        let door = std::thread::Builder::new().spawn({
            let switch = switch.clone();
            move || accept(&listener, upstream, &switch)
        })?;
        Ok(FaultProxy { port, switch, door: Some(door) })
    }

    /// From now on, this is wrong. It holds for the bytes under way, too.
    pub fn set(&self, fault: Fault) {
        self.switch.change(|setting| setting.fault = fault);
    }

    /// How many connections it serves at the moment.
    pub fn connections(&self) -> usize {
        self.switch.connections.load(Ordering::Relaxed)
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The address of a Redis server behind it.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.switch.change(|setting| setting.is_over = true);
        // The listening thread waits for somebody to come.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        if let Some(door) = self.door.take() {
            let _ = door.join();
        }
    }
}

/// What all threads look at.
#[derive(Debug, Default)]
struct Switch {
    setting: Mutex<Setting>,
    changed: Condvar,
    connections: AtomicUsize,
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    fault: Fault,
    is_over: bool,
    /// Counts the changes: a fault that is set anew is another one.
    version: u64,
}

impl Default for Setting {
    fn default() -> Setting {
        Setting { fault: Fault::Pass, is_over: false, version: 0 }
    }
}

impl Switch {
    fn lock(&self) -> MutexGuard<'_, Setting> {
        // A setting is whole at any time.
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

    /// Waits for so long, or until the setting is no longer this one. Says whether it still is.
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
            // An error ends this connection, as it would without a proxy.
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

/// Serves a connection until it ends.
fn connection(client: &TcpStream, upstream: u16, switch: &Switch) -> io::Result<()> {
    prepare(client)?;
    let setting = switch.now();
    match setting.fault {
        Fault::Reset => {
            // Closing a socket with bytes that nobody has read is what resets it.
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

/// The server sees an end; and the other direction's thread does, on both. The client sees its end when the last of
/// them has gone, and what it said meanwhile resets it.
fn hang_up(client: &TcpStream, server: &TcpStream) {
    let _ = client.shutdown(std::net::Shutdown::Read);
    let _ = server.shutdown(std::net::Shutdown::Both);
}

/// Whether there is something to read, or an end, within a glance.
fn is_ready(stream: &TcpStream) -> io::Result<bool> {
    match stream.peek(&mut [0]) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(false),
        // A signal.
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(false),
        Err(error) => Err(error),
    }
}

/// Carries bytes one way until the connection ends, on either side or by a fault.
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
        if length == 0 || !carry(&bytes[..length], to, is_answer, switch)? {
            return swallow(from, switch.now(), switch);
        }
    }
}

/// Passes bytes on as the fault has it. Says whether the connection can go on.
fn carry(mut bytes: &[u8], mut to: &TcpStream, is_answer: bool, switch: &Switch) -> io::Result<bool> {
    while !bytes.is_empty() {
        let setting = switch.now();
        let length = match setting.fault {
            _ if setting.is_over => return Ok(false),
            Fault::HalfOpen | Fault::Reset => return Ok(false),
            // The fault has changed meanwhile: look again.
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

/// Reads and forgets while the connection is half open, and ends with the fault.
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

    /// A server that says everything back, until the test's process ends.
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
        let mut heard = vec![0; text.len()];
        stream.write_all(text.as_bytes()).is_ok()
            && stream.read_exact(&mut heard).is_ok()
            && heard == text.as_bytes()
    }

    /// Whether there is nothing to read for so long.
    fn is_silent(mut stream: &TcpStream, length: Duration) -> bool {
        stream.set_read_timeout(Some(length)).unwrap();
        let read = stream.read(&mut [0; 100]);
        stream.set_read_timeout(Some(LONG)).unwrap();
        read.is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
    }

    /// Whether the other side has ended it, in either way.
    fn is_ended(mut stream: &TcpStream) -> bool {
        match stream.read(&mut [0; 100]) {
            Ok(length) => length == 0,
            Err(error) => matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
        }
    }

    #[test]
    fn bytes_pass_and_are_held_back_by_a_delay() {
        let proxy = FaultProxy::start(echo()).unwrap();
        assert_eq!(proxy.connections(), 0);
        let stream = connect(&proxy);
        assert!(echoes(&stream, "hello"));
        assert_eq!(proxy.connections(), 1);
        proxy.set(Fault::Delay(Duration::from_millis(300)));
        (&stream).write_all(b"slow").unwrap();
        assert!(is_silent(&stream, Duration::from_millis(50)), "there and back is 600 ms");
        let mut heard = [0; 4];
        (&stream).read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"slow");
        // What is held back goes on at once when the fault ends.
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
    fn a_half_open_connection_says_nothing_and_ends_with_the_fault() {
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
    fn it_ends_when_it_is_dropped_whatever_the_fault() {
        let upstream = echo();
        for fault in
            [Fault::Pass, Fault::Delay(LONG * 100), Fault::Drip(LONG * 100), Fault::HalfOpen, Fault::Reset]
        {
            let proxy = FaultProxy::start(upstream).unwrap();
            let port = proxy.port();
            let stream = connect(&proxy);
            assert!(echoes(&stream, "hello"));
            proxy.set(fault);
            // It may have ended already.
            let _ = (&stream).write_all(b"hello");
            drop(proxy);
            assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err(), "{fault:?}");
        }
    }

    #[test]
    fn a_server_that_is_gone_is_gone_behind_the_proxy_too() {
        let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let proxy = FaultProxy::start(nobody).unwrap();
        assert!(is_ended(&connect(&proxy)));
    }
}
