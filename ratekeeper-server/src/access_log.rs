//! The access log: one line of JSON per request.
//!
//! Each worker appends to its own buffer and a thread writes the buffers out, so no request waits for a disk or a
//! terminal. If the output stays too slow, lines are dropped and counted.

use std::fmt::Write as _;
use std::io::Write;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use jiff::Timestamp;
use ratekeeper::Time;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Bytes that a worker buffers before it drops lines.
const BUFFER_BYTES_MAX: usize = 1 << 20;
/// Interval between flushes.
const FLUSH_INTERVAL: Duration = Duration::from_millis(100);
/// How long a graceful shutdown waits for the last lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The fields of one line.
#[derive(Debug)]
pub(crate) struct Line<'a> {
    pub(crate) id: &'a str,
    pub(crate) client: IpAddr,
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    pub(crate) route: &'a str,
    pub(crate) status: u16,
    pub(crate) decision: &'a str,
    /// The limit that denied or delayed the request.
    pub(crate) limit: &'a str,
    pub(crate) waited: Duration,
    pub(crate) took: Duration,
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) struct AccessLog {
    buffers: Box<[Mutex<Buffer>]>,
    dropped: AtomicU64,
    /// Asks the thread to flush and to report when it has; closing the channel ends the thread.
    flush_requests: mpsc::Sender<oneshot::Sender<()>>,
}

#[derive(Debug, Default)]
struct Buffer {
    lines: String,
    /// The second of the last line, with its text: most lines share it.
    second: u64,
    second_text: String,
}

impl AccessLog {
    /// Starts the writer thread. It ends when the log is dropped; lines still buffered then are lost.
    pub(crate) fn start(workers: usize, mut out: Box<dyn Write + Send>) -> std::io::Result<Arc<AccessLog>> {
        let (flush_requests, requests) = mpsc::channel::<oneshot::Sender<()>>();
        let buffers = (0..workers).map(|_| Mutex::default()).collect();
        let log = Arc::new(AccessLog { buffers, dropped: AtomicU64::new(0), flush_requests });
        let weak = Arc::downgrade(&log);
        std::thread::Builder::new().name("access-log".to_owned()).spawn(move || {
            while let Some(log) = weak.upgrade() {
                log.flush(&mut out);
                drop(log);
                if let Ok(done) = requests.recv_timeout(FLUSH_INTERVAL)
                    && let Some(log) = weak.upgrade()
                {
                    log.flush(&mut out);
                    // The receiver may have timed out.
                    let _ = done.send(());
                }
            }
        })?;
        Ok(log)
    }

    /// Lines that were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until the lines logged so far are written, at most [`FLUSH_TIMEOUT`].
    pub(crate) async fn wait_flushed(&self) {
        let (done, flushed) = oneshot::channel();
        if self.flush_requests.send(done).is_ok() {
            let _ = timeout(FLUSH_TIMEOUT, flushed).await;
        }
    }

    /// Writes out all buffers.
    fn flush(&self, out: &mut dyn Write) {
        for buffer in &self.buffers {
            let lines = std::mem::take(&mut buffer.lock().unwrap_or_else(PoisonError::into_inner).lines);
            // A closed output counts as dropped lines.
            if !lines.is_empty() && out.write_all(lines.as_bytes()).and_then(|()| out.flush()).is_err() {
                self.dropped.fetch_add(lines.lines().count() as u64, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn write(&self, worker: usize, now: Time, line: &Line<'_>) {
        let Some(buffer) = self.buffers.get(worker) else { return };
        let now = Duration::from_nanos(now.as_nanos());
        let mut buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
        if buffer.lines.len() > BUFFER_BYTES_MAX {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if buffer.second != now.as_secs() || buffer.second_text.is_empty() {
            let second = i64::try_from(now.as_secs()).ok().and_then(|it| Timestamp::from_second(it).ok());
            buffer.second_text = second.unwrap_or_default().to_string().trim_end_matches('Z').to_owned();
            buffer.second = now.as_secs();
        }
        let Buffer { lines, second_text, .. } = &mut *buffer;
        let Line { id, client, status, decision, bytes, .. } = line;
        let (method, path) = (Json(line.method), Json(line.path));
        let (route, limit) = (Json(line.route), Json(line.limit));
        let (waited, took, millis) = (line.waited.as_micros(), line.took.as_micros(), now.subsec_millis());
        // Writing into a string cannot fail.
        let _ = writeln!(
            lines,
            r#"{{"time":"{second_text}.{millis:03}Z","id":"{id}","client":"{client}","method":"{method}","path":"{path}","route":"{route}","status":{status},"decision":"{decision}","limit":"{limit}","waited_us":{waited},"took_us":{took},"bytes":{bytes}}}"#
        );
    }
}

/// Text escaped for the inside of a JSON string.
struct Json<'a>(&'a str);

impl std::fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let is_plain = |byte: u8| byte >= b' ' && byte != b'"' && byte != b'\\' && byte != 0x7f;
        if self.0.bytes().all(is_plain) {
            return f.write_str(self.0);
        }
        self.0.chars().try_for_each(|c| match c {
            '"' | '\\' => write!(f, "\\{c}"),
            c if c.is_control() => write!(f, "\\u{:04x}", u32::from(c)),
            c => f.write_char(c),
        })
    }
}
