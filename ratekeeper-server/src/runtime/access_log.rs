//! The access log: one line per request, JSON or readable.
//!
//! Each worker appends to its own buffer and a thread writes the buffers out, so no request waits for a disk or a
//! terminal. If the output stays too slow, lines are dropped and counted.

use std::borrow::Cow;
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

use super::log_text::{JsonLine, Printable, hex, hex_text};

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
        /// Whether the status is colored.
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
    /// The store was unavailable, so the failure policy decided.
    pub(crate) is_degraded: bool,
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
            LoggedKey::Hash(hash) => f.write_str(hex_text(&hex(*hash))),
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
        match self.style {
            LogStyle::Json => line.write_json(lines, second_text, now.subsec_millis()),
            // Writing into a string cannot fail.
            LogStyle::Human { has_color } => _ = line.write_human(lines, second_text, has_color),
        }
    }
}

impl Line<'_> {
    /// By hand: the formatting of the standard library takes three times as long, for every request.
    fn write_json(&self, out: &mut String, second: &str, millis: u32) {
        let mut out = JsonLine(out);
        out.raw(r#"{"time":""#);
        out.raw(second);
        out.raw(".");
        out.three_digits(millis);
        out.raw(r#"Z","level":"INFO","message":"request","id":"#);
        out.text(self.id);
        out.raw(r#","client":""#);
        out.address(self.client);
        out.raw(r#"","method":"#);
        out.text(self.method);
        out.raw(r#","path":"#);
        out.text(self.path);
        out.raw(r#","route":"#);
        out.text_or_null(Some(self.route).filter(|route| !route.is_empty()));
        out.raw(r#","status":"#);
        out.number(self.status);
        out.raw(r#","decision":"#);
        out.text(self.decision);
        out.raw(r#","degraded":"#);
        out.raw(if self.is_degraded { "true" } else { "false" });
        out.raw(r#","reason":"#);
        out.text_or_null(self.reason);
        let mut delay = Duration::ZERO;
        match &self.limit {
            Some(LineLimit { name, key, decision }) => {
                out.raw(r#","limit":"#);
                out.text(name);
                out.raw(r#","key":"#);
                match key {
                    LoggedKey::None => out.raw("null"),
                    LoggedKey::Text(text) => out.text(text),
                    LoggedKey::Hash(hash) => out.text(hex_text(&hex(*hash))),
                }
                out.raw(r#","remaining":"#);
                match decision.known_remaining() {
                    Some(remaining) => out.number(remaining),
                    None => out.raw("null"),
                }
                out.raw(r#","retry_after":"#);
                match decision.retry_after {
                    RetryAfter::After(wait) => {
                        // Seconds with milliseconds, rounded up.
                        let millis = wait.as_nanos().div_ceil(1_000_000);
                        out.number(millis / 1_000);
                        out.raw(".");
                        out.three_digits((millis % 1_000) as u32);
                    }
                    RetryAfter::Never => out.raw(r#""never""#),
                    RetryAfter::Now => out.raw("null"),
                }
                delay = decision.delay;
            }
            None => out.raw(r#","limit":null,"key":null,"remaining":null,"retry_after":null"#),
        }
        out.raw(r#","delay_us":"#);
        out.number(micros(delay));
        out.raw(r#","duration_us":"#);
        out.number(micros(self.took));
        out.raw(r#","bytes":"#);
        out.number(self.bytes);
        out.raw("}\n");
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
        let path = cut(self.path, PATH_CHARS_MAX);
        let (status, method, path) = (self.status, Printable(self.method), Printable(&path));
        write!(out, "{time} {on}{status}{off} {method:<6} {path:<24}")?;
        if let Some(LineLimit { name, key, decision }) = &self.limit {
            let (key, name) = (key.to_string(), cut(name, NAME_CHARS_MAX));
            write!(out, "  {:<16}  {}: ", Printable(&cut(&key, NAME_CHARS_MAX)), Printable(&name))?;
            match decision.retry_after {
                RetryAfter::After(wait) => write!(out, "retry in {}", ShortWait(wait))?,
                RetryAfter::Never => out.push_str("cost above the limit"),
                _ if !decision.delay.is_zero() => write!(out, "delayed {} ms", decision.delay.as_millis())?,
                _ => match decision.known_remaining() {
                    Some(remaining) => write!(out, "{remaining} left")?,
                    None => out.push_str("store unavailable"),
                },
            }
        } else if self.decision != "allowed" {
            write!(out, "  {:<16}  {}", "", Printable(self.decision))?;
            if let Some(reason) = self.reason {
                write!(out, ": {reason}")?;
            }
        }
        if self.is_degraded {
            out.push_str("  (store unavailable)");
        }
        writeln!(out)
    }
}

/// The longest path, and the longest key or name of a limit, in a line for people.
const PATH_CHARS_MAX: usize = 48;
const NAME_CHARS_MAX: usize = 32;

/// A text for people, shortened to a number of characters.
fn cut(text: &str, chars_max: usize) -> Cow<'_, str> {
    match text.char_indices().nth(chars_max - 1) {
        Some((end, last)) if end + last.len_utf8() < text.len() => Cow::Owned(format!("{}…", &text[..end])),
        _ => Cow::Borrowed(text),
    }
}

/// A wait in whole seconds, rounded up, with its two largest units: `42s`, `1m 5s`, `3d 4h`.
struct ShortWait(Duration);

impl fmt::Display for ShortWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_nanos().div_ceil(1_000_000_000);
        let units = [(86_400, 'd'), (3_600, 'h'), (60, 'm'), (1, 's')];
        let first = units.iter().position(|(unit, _)| rest >= *unit).unwrap_or(units.len() - 1);
        for (number, (unit, name)) in units[first..].iter().take(2).enumerate() {
            let count = rest / unit;
            rest %= unit;
            match (number, count) {
                (0, _) => write!(f, "{count}{name}")?,
                (_, 0) => {}
                _ => write!(f, " {count}{name}")?,
            }
        }
        Ok(())
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends a JSON string, a line and a terminal's escape sequence, and reorders text.
    const HOSTILE: &str =
        "a\",\"status\":200,\"b\":\"\\\n\r\t\u{1b}[2J\u{7f}\u{85}\u{9b}31m\u{2028}\u{202e}\u{2066}\u{e9}";

    fn written(style: LogStyle) -> String {
        let decision = Decision {
            allowed: false,
            limit: 1,
            remaining: 0,
            retry_after: RetryAfter::Never,
            reset_after: Duration::ZERO,
            delay: Duration::ZERO,
        };
        let key = LoggedKey::Text(HOSTILE.into());
        let line = Line {
            id: HOSTILE,
            client: IpAddr::from([127, 0, 0, 1]),
            method: HOSTILE,
            path: HOSTILE,
            route: HOSTILE,
            status: 429,
            decision: HOSTILE,
            is_degraded: false,
            reason: None,
            limit: Some(LineLimit { name: HOSTILE, key: &key, decision }),
            took: Duration::ZERO,
            bytes: 0,
        };
        let mut out = String::new();
        match style {
            LogStyle::Json => line.write_json(&mut out, "2026-01-01T00:00:00", 0),
            LogStyle::Human { has_color } => {
                line.write_human(&mut out, "00:00:00", has_color).unwrap_or_default();
            }
        }
        out
    }

    #[test]
    fn waits_and_long_texts_are_short_for_people() {
        for (secs, expected) in [
            (1, "1s"),
            (42, "42s"),
            (60, "1m"),
            (65, "1m 5s"),
            (3_600, "1h"),
            (3_725, "1h 2m"),
            (86_399, "23h 59m"),
        ] {
            assert_eq!(ShortWait(Duration::from_secs(secs)).to_string(), expected);
        }
        assert_eq!(ShortWait(Duration::from_millis(41_001)).to_string(), "42s");
        assert_eq!(ShortWait(Duration::ZERO).to_string(), "0s");
        assert_eq!((&*cut("/abc", 4), &*cut("/abcd", 4)), ("/abc", "/ab…"));
    }

    #[test]
    fn no_text_field_can_write_another_field_or_line() {
        let json = written(LogStyle::Json);
        let line: serde_json::Value = serde_json::from_str(&json).unwrap_or_default();
        for name in ["id", "method", "path", "route", "decision", "limit", "key"] {
            assert_eq!(line[name], HOSTILE, "{name}: {json}");
        }
        assert_eq!(line["status"], 429, "{json}");
        for text in [json, written(LogStyle::Human { has_color: false })] {
            let text = text.strip_suffix('\n').unwrap_or_default();
            let is_special = |c: char| !matches!(c, ' '..='~' | '\u{e9}' | '…');
            assert!(!text.is_empty() && !text.contains(is_special), "{text:?}");
        }
    }
}
