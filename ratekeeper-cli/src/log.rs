//! The event log on stderr: one line per event, readable or JSON.
//!
//! Both logs, events and requests, have the same schema in JSON: `time`, `level`, `message`, then fields.

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use ratekeeper::{Clock as _, SystemClock};
use ratekeeper_server::{LogStyle, Printable};
use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::prelude::*;
use tracing_subscriber::registry::LookupSpan;

use crate::args::{LogArgs, LogFormat};
use crate::terminal::allows_color;

/// The style of a stream: that of `--log-format`, else by whether the stream is a terminal.
pub(crate) fn style(args: LogArgs, stream: &impl IsTerminal) -> LogStyle {
    let is_terminal = stream.is_terminal();
    match args.log_format {
        Some(LogFormat::Json) => LogStyle::Json,
        None if !is_terminal => LogStyle::Json,
        Some(LogFormat::Human) | None => LogStyle::Human { has_color: is_terminal && allows_color() },
    }
}

/// Most lines that wait to be written. If stderr is not read, further lines are dropped: logging must not block.
const QUEUE_LINES_MAX: usize = 4_096;
/// Time to write the waiting lines before the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The log of events. A thread writes it to stderr. On drop, it waits until the lines are written.
pub(crate) struct EventLog(EventQueue);

/// Takes lines without blocking.
#[derive(Clone)]
struct EventQueue {
    sender: SyncSender<Message>,
    /// Lines that were dropped since the start.
    dropped: Arc<AtomicU64>,
}

enum Message {
    Text(Vec<u8>),
    /// Responds when everything before it is written.
    Flush(SyncSender<()>),
}

/// Starts logging. `RATEKEEPER_LOG` sets the level (`warn`, `info`, `debug`), optionally per module
/// (`info,ratekeeper_server=debug`).
pub(crate) fn start(style: LogStyle) -> io::Result<EventLog> {
    let filter = filter(std::env::var("RATEKEEPER_LOG").ok().as_deref());
    let (sender, messages) = sync_channel(QUEUE_LINES_MAX);
    let queue = EventQueue { sender, dropped: Arc::default() };
    let dropped = Arc::clone(&queue.dropped);
    std::thread::Builder::new().name("event-log".to_owned()).spawn(move || write_all(&messages, &dropped))?;
    let lines = EventLines { style, clock: SystemClock::new(), zone: TimeZone::system() };
    let writer = queue.clone();
    let lines = tracing_subscriber::fmt::layer().event_format(lines).with_writer(move || writer.clone());
    // Fails only if a subscriber is already installed, and this is the only one.
    let _ = tracing_subscriber::registry().with(filter).with(lines).try_init();
    Ok(EventLog(queue))
}

/// The events that are logged. The warnings of `h2` are about frames that clients send: a client could fill the log with
/// them, so they are logged only if `configured` names that module.
fn filter(configured: Option<&str>) -> Targets {
    let configured = configured.and_then(|text| format!("h2=error,{text}").parse().ok());
    let default = || Targets::new().with_default(LevelFilter::INFO).with_target("h2", LevelFilter::ERROR);
    configured.unwrap_or_else(default)
}

fn write_all(messages: &Receiver<Message>, dropped: &AtomicU64) {
    let mut reported = 0;
    for message in messages {
        match message {
            // A failed write is ignored: there is no other channel to report it on.
            Message::Text(text) => drop(io::stderr().write_all(&text)),
            Message::Flush(done) => drop(done.send(())),
        }
        let dropped = dropped.load(Ordering::Relaxed);
        if dropped > reported {
            reported = dropped;
            tracing::warn!(dropped, "log lines dropped: stderr was not read fast enough");
        }
    }
}

impl EventLog {
    /// Prints a text with several lines, as the messages about a configuration are, below an event.
    pub(crate) fn print_below(&self, text: &str) {
        self.print(text.lines().map(|line| format!("  {}\n", Printable(line))).collect());
    }

    /// Prints a text between the events.
    pub(crate) fn print(&self, text: String) {
        self.0.send(text.into_bytes());
    }
}

impl Drop for EventLog {
    fn drop(&mut self) {
        let (done, flushed) = sync_channel(1);
        if self.0.sender.try_send(Message::Flush(done)).is_ok() {
            let _ = flushed.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

impl EventQueue {
    fn send(&self, line: Vec<u8>) {
        if self.sender.try_send(Message::Text(line)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl io::Write for EventQueue {
    /// Takes one event, which is one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.send(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Formats events as lines.
struct EventLines {
    style: LogStyle,
    clock: SystemClock,
    zone: TimeZone,
}

impl<S, N> FormatEvent<S, N> for EventLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let now = i128::from(self.clock.now().as_nanos());
        let now = Timestamp::from_nanosecond(now).unwrap_or_default();
        let mut fields = EventFields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        match self.style {
            LogStyle::Json => {
                let mut line = Map::new();
                line.insert("time".to_owned(), json!(format!("{now:.3}")));
                line.insert("level".to_owned(), json!(metadata.level().as_str()));
                line.insert("message".to_owned(), json!(fields.message));
                line.insert("target".to_owned(), json!(metadata.target()));
                line.extend(fields.others);
                writeln!(out, "{}", Printable(&Value::Object(line).to_string()))
            }
            LogStyle::Human { has_color } => {
                let time = now.to_zoned(self.zone.clone()).strftime("%H:%M:%S").to_string();
                let mut text = fields.message;
                for (name, value) in &fields.others {
                    match value {
                        Value::String(value) if is_plain(value) => write!(text, " {name}={value}")?,
                        value => write!(text, " {name}={value}")?,
                    }
                }
                let (on, off) = match (has_color, *metadata.level()) {
                    (true, Level::ERROR) => ("\x1b[31m", "\x1b[0m"),
                    (true, Level::WARN) => ("\x1b[33m", "\x1b[0m"),
                    (true, _) => ("\x1b[2m", "\x1b[0m"),
                    (false, _) => ("", ""),
                };
                // Errors of stores and upstreams contain text from outside.
                writeln!(out, "{time} {on}{}{off} {}", metadata.level(), Printable(&text))
            }
        }
    }
}

/// Whether a value needs no quotes.
fn is_plain(value: &str) -> bool {
    !value.is_empty() && !value.contains(|c: char| c == ' ' || c == '"' || c.is_control())
}

/// The fields of an event, in order.
#[derive(Default)]
struct EventFields {
    message: String,
    others: Map<String, Value>,
}

impl EventFields {
    fn add(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            (name, value) => {
                self.others.insert(name.to_owned(), value);
            }
        }
    }
}

impl Visit for EventFields {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, json!(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, json!(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, json!(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, json!(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, json!(format!("{value:?}")));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, PoisonError};

    use super::*;

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn clients_cannot_fill_the_log_with_warnings_of_h2() {
        for configured in [None, Some("info"), Some("debug,ratekeeper_server=trace"), Some("a=b=c")] {
            let filter = filter(configured);
            assert!(!filter.would_enable("h2::proto::ping_pong", &Level::WARN), "{configured:?}");
            assert!(
                filter.would_enable("h2", &Level::ERROR) && filter.would_enable("ratekeeper", &Level::INFO)
            );
        }
        assert!(filter(Some("info,h2=debug")).would_enable("h2::server", &Level::DEBUG));
        assert!(filter(Some("h2=debug,warn")).would_enable("h2::server", &Level::DEBUG));
    }

    #[test]
    fn event_lines_have_no_control_characters() {
        for style in [LogStyle::Json, LogStyle::Human { has_color: false }] {
            let output = Output::default();
            let writer = output.clone();
            let lines = EventLines { style, clock: SystemClock::new(), zone: TimeZone::UTC };
            let layer =
                tracing_subscriber::fmt::layer().event_format(lines).with_writer(move || writer.clone());
            tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
                tracing::warn!(error = "a\n\u{1b}[2J\u{7f}\u{9b}31m\u{202e}", "store\nunavailable");
            });
            let bytes = output.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let text = String::from_utf8(bytes).unwrap_or_default();
            let line = text.strip_suffix('\n').unwrap_or_default();
            assert!(!line.is_empty() && line.chars().all(|c| matches!(c, ' '..='~')), "{text:?}");
        }
    }
}
