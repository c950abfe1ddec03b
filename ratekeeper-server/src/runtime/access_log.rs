//! The access log: one line per request, JSON or readable.
//!
//! Each worker appends to its own buffer and a thread writes the buffers out, so no request waits for a disk or a
//! terminal. If the output stays too slow, lines are dropped and counted.

use std::fmt::{self, Write as _};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Write;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, mpsc};
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use ratekeeper::tower::key::shown;
use ratekeeper::{Decision, RetryAfter, Time};
use ratekeeper_config::{Config, LogKeys, Store};
use siphasher::sip::SipHasher24;
use siphasher::sip128;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Bytes that a worker buffers before it drops lines.
const BUFFER_BYTES_MAX: usize = 1 << 20;
/// Interval between flushes.
const FLUSH_INTERVAL: Duration = Duration::from_millis(100);
/// How long a graceful shutdown waits for the last lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogStyle {
    /// JSON: `time`, `level`, `message`, then fields.
    Json,
    /// For people, in local time.
    Human {
        /// Whether the status is coloured.
        has_color: bool,
    },
}

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
    /// Why the limits rejected the request.
    pub(crate) reason: Option<&'static str>,
    pub(crate) limit: Option<LineLimit<'a>>,
    pub(crate) took: Duration,
    pub(crate) bytes: u64,
}

/// The limit that denied or delayed the request, or else the one with the fewest units left.
#[derive(Debug)]
pub(crate) struct LineLimit<'a> {
    pub(crate) name: &'a str,
    pub(crate) key: &'a LoggedKey,
    pub(crate) decision: Decision,
}

/// A key as it appears in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoggedKey {
    None,
    Hash(u64),
    Text(Box<str>),
}

impl fmt::Display for LoggedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoggedKey::None => Ok(()),
            LoggedKey::Hash(hash) => write!(f, "{hash:016x}"),
            LoggedKey::Text(text) => f.write_str(text),
        }
    }
}

/// How keys are logged.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KeyLog {
    Off,
    /// A hash with this key.
    Hash(SipHasher24),
    Text,
}

/// The hash key if there is no secret; kept for the life of the process, so that reloads do not change the hashes.
static RANDOM_HASH_KEY: LazyLock<(u64, u64)> = LazyLock::new(|| {
    let random = || RandomState::new().hash_one("hash key of the access log");
    (random(), random())
});

impl KeyLog {
    pub(crate) fn new(config: &Config) -> KeyLog {
        let is_logged = config.gateway.as_ref().is_some_and(|gateway| gateway.access_log);
        match config.log_keys {
            _ if !is_logged => KeyLog::Off,
            LogKeys::Off => KeyLog::Off,
            LogKeys::Text => KeyLog::Text,
            LogKeys::Hash => {
                let secret = match &config.store {
                    Store::Redis(redis) => redis.secret.as_ref(),
                    Store::Memory { .. } => None,
                };
                let (one, two) = match secret {
                    // With a secret, all instances log the same hash for the same key.
                    Some(secret) => sip128::SipHasher24::new().hash(secret.reveal().as_bytes()).as_u64(),
                    None => *RANDOM_HASH_KEY,
                };
                KeyLog::Hash(SipHasher24::new_with_keys(one, two))
            }
        }
    }

    /// `written` is the key as a rule wrote it; one budget for all has none.
    pub(crate) fn logged(&self, written: &[u8]) -> LoggedKey {
        match self {
            _ if written.is_empty() => LoggedKey::None,
            KeyLog::Off => LoggedKey::None,
            KeyLog::Hash(hasher) => {
                let mut hasher = *hasher;
                hasher.write(written);
                LoggedKey::Hash(hasher.finish())
            }
            KeyLog::Text => LoggedKey::Text(shown(written).into()),
        }
    }
}

#[derive(Debug)]
pub(crate) struct AccessLog {
    buffers: Box<[Mutex<Buffer>]>,
    dropped: AtomicU64,
    /// Asks the thread to flush and to report when it has; closing the channel ends the thread.
    flush_requests: mpsc::Sender<oneshot::Sender<()>>,
    style: LogStyle,
    zone: TimeZone,
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
    pub(crate) fn start(
        workers: usize,
        mut out: Box<dyn Write + Send>,
        style: LogStyle,
    ) -> std::io::Result<Arc<AccessLog>> {
        let (flush_requests, requests) = mpsc::channel::<oneshot::Sender<()>>();
        let buffers = (0..workers).map(|_| Mutex::default()).collect();
        let zone = TimeZone::system();
        let log = Arc::new(AccessLog { buffers, dropped: AtomicU64::new(0), flush_requests, style, zone });
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
            let second = second.unwrap_or_default();
            buffer.second_text = match self.style {
                LogStyle::Json => second.to_string().trim_end_matches('Z').to_owned(),
                LogStyle::Human { .. } => second.to_zoned(self.zone.clone()).strftime("%H:%M:%S").to_string(),
            };
            buffer.second = now.as_secs();
        }
        let Buffer { lines, second_text, .. } = &mut *buffer;
        // Writing into a string cannot fail.
        let _ = match self.style {
            LogStyle::Json => line.write_json(lines, second_text, now.subsec_millis()),
            LogStyle::Human { has_color } => line.write_human(lines, second_text, has_color),
        };
    }
}

impl Line<'_> {
    fn write_json(&self, out: &mut String, second: &str, millis: u32) -> fmt::Result {
        let Line { id, client, status, decision, bytes, .. } = self;
        let (method, path, route) = (Json(self.method), Json(self.path), Json(self.route));
        write!(
            out,
            r#"{{"time":"{second}.{millis:03}Z","level":"INFO","message":"request","id":"{id}","client":"{client}","method":"{method}","path":"{path}","route":"{route}","status":{status},"decision":"{decision}","#
        )?;
        if let Some(reason) = self.reason {
            write!(out, r#""reason":"{reason}","#)?;
        }
        let delay = match &self.limit {
            Some(LineLimit { name, key, decision }) => {
                write!(out, r#""limit":"{}","key":""#, Json(name))?;
                match key {
                    LoggedKey::Text(text) => write!(out, "{}", Json(text))?,
                    key => write!(out, "{key}")?,
                }
                out.push_str(r#"","remaining":"#);
                match decision.known_remaining() {
                    Some(remaining) => write!(out, "{remaining}")?,
                    None => out.push_str("null"),
                }
                out.push_str(r#","retry_after":"#);
                match decision.retry_after {
                    RetryAfter::After(wait) => write!(out, "{}", Millis(wait))?,
                    RetryAfter::Never => out.push_str("\"never\""),
                    _ => out.push_str("null"),
                }
                decision.delay
            }
            None => {
                out.push_str(r#""limit":"","key":"","remaining":null,"retry_after":null"#);
                Duration::ZERO
            }
        };
        let (delay, took) = (delay.as_micros(), self.took.as_micros());
        writeln!(out, r#","delay_us":{delay},"duration_us":{took},"bytes":{bytes}}}"#)
    }

    /// `12:03:11 429 GET    /api/test   user123   per-user: retry in 42s`
    fn write_human(&self, out: &mut String, time: &str, has_color: bool) -> fmt::Result {
        let (on, off) = match (has_color, self.status) {
            (false, _) => ("", ""),
            (true, 429) => ("\x1b[1;31m", "\x1b[0m"),
            (true, 200..=299) => ("\x1b[32m", "\x1b[0m"),
            (true, 300..=399) => ("\x1b[36m", "\x1b[0m"),
            (true, 400..=499) => ("\x1b[33m", "\x1b[0m"),
            (true, _) => ("\x1b[31m", "\x1b[0m"),
        };
        let Line { status, method, .. } = self;
        let path = Json(self.path).to_string();
        write!(out, "{time} {on}{status}{off} {method:<6} {path:<24}")?;
        if let Some(LineLimit { name, key, decision }) = &self.limit {
            write!(out, "  {:<16}  {name}: ", key.to_string())?;
            match decision.retry_after {
                RetryAfter::After(wait) => write!(out, "retry in {}s", wait.as_millis().div_ceil(1000))?,
                RetryAfter::Never => out.push_str("cost above the limit"),
                _ if !decision.delay.is_zero() => write!(out, "delayed {} ms", decision.delay.as_millis())?,
                _ => match decision.known_remaining() {
                    Some(remaining) => write!(out, "{remaining} left")?,
                    None => out.push_str("store unavailable"),
                },
            }
        } else if self.decision != "allowed" {
            write!(out, "  {}", self.decision)?;
            if let Some(reason) = self.reason {
                write!(out, ": {reason}")?;
            }
        }
        writeln!(out)
    }
}

/// A wait in seconds with milliseconds, rounded up.
struct Millis(Duration);

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_nanos().div_ceil(1_000_000);
        write!(f, "{}.{:03}", millis / 1000, millis % 1000)
    }
}

/// Text escaped for the inside of a JSON string.
struct Json<'a>(&'a str);

impl fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
