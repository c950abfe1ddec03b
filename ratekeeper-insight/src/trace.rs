//! Reads CSV into requests, singly or in batches, in constant memory.

use std::io::{self, Read};

use ratekeeper::Time;
use ratekeeper_config::nearest;

use crate::instant::{Fault, instant};
use crate::{Batch, quoted};

/// One line of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// When the request arrived.
    pub time: Time,
    /// The time as written in the trace.
    pub time_text: &'a str,
    /// The key whose budget the request uses; empty if the trace has no keys.
    pub key: &'a str,
    /// Units that the request takes; 1 if the trace gives none.
    pub cost: u32,
}

/// A reader of a trace.
///
/// The header names the columns: `time` and optionally `key` and `cost`, in any order. The lines need not be sorted
/// by time; [`replay_sorted`](crate::replay_sorted) sorts them.
#[derive(Debug)]
pub struct Trace<R> {
    name: String,
    reader: csv::Reader<Bounded<R>>,
    record: csv::ByteRecord,
    time_at: usize,
    key_at: Option<usize>,
    cost_at: Option<usize>,
    /// Lines end in CR LF; the CSV reader leaves the LF for the next record.
    has_carriage_returns: bool,
}

/// Bytes per read: one system call for some thirty thousand lines.
const BLOCK_BYTES: usize = 1 << 20;
/// The longest line. Without a bound, an unclosed quote would read the rest of the trace into memory.
const LINE_BYTES_MAX: usize = 4 << 20;
const COLUMNS: [&str; 3] = ["time", "key", "cost"];

impl<R: Read> Trace<R> {
    /// Reads the header. Error messages call the trace `name`.
    ///
    /// # Errors
    /// Returns an error if the trace cannot be read or does not start with a header.
    pub fn open(name: &str, input: R) -> Result<Trace<R>, TraceError> {
        let mut reader =
            csv::ReaderBuilder::new().has_headers(false).buffer_capacity(BLOCK_BYTES).from_reader(Bounded {
                input,
                since_line: 0,
                bytes: 0,
                lines_end: 0,
                has_ended: false,
                quotes: Quotes::default(),
            });
        let mut record = csv::ByteRecord::new();
        let found = reader.read_byte_record(&mut record).map_err(|error| trace_error(name, 1, error))?;
        let [time_at, key_at, cost_at] =
            columns(found.then_some(&record)).map_err(|fault| TraceError::bad(name, 1, None, fault))?;
        Ok(Trace {
            name: name.to_owned(),
            has_carriage_returns: reader.position().line() == 1,
            reader,
            record,
            time_at: time_at.unwrap_or(0),
            key_at,
            cost_at,
        })
    }

    /// Returns the next request, or `None` at the end.
    ///
    /// # Errors
    /// Returns an error if the trace cannot be read or a line is invalid; it states where, why, and what to write
    /// instead.
    #[inline]
    pub fn next_request(&mut self) -> Result<Option<Request<'_>>, TraceError> {
        self.reader.get_mut().since_line = 0;
        let next_line = self.reader.position().line();
        match self.reader.read_byte_record(&mut self.record) {
            Ok(true) if self.reader.get_ref().is_cut_off() => {
                let what = "a quote is opened and not closed".to_owned();
                let instead = "close it; a quote within a key is written twice".to_owned();
                return Err(TraceError::bad(&self.name, self.line(), None, Fault { what, instead }));
            }
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => {
                let is_read = matches!(error.kind(), csv::ErrorKind::UnequalLengths { .. });
                let line =
                    if is_read { self.line() } else { next_line + u64::from(self.has_carriage_returns) };
                return Err(trace_error(&self.name, line, error));
            }
        }
        match self.request() {
            Ok(request) => Ok(Some(request)),
            Err((column, fault)) => Err(TraceError::bad(&self.name, self.line(), Some(column), fault)),
        }
    }

    /// Fills a batch with the next requests; leaves it empty at the end.
    ///
    /// A batch ends early if the next request has not arrived yet, so that available requests are not delayed.
    ///
    /// # Errors
    /// Fails as [`next_request`](Self::next_request) does. The batch contains the requests read before the error.
    pub fn next_batch(&mut self, batch: &mut Batch) -> Result<(), TraceError> {
        batch.clear();
        while let Some(request) = self.next_request()? {
            batch.push(&request);
            batch.is_all_for_now = self.must_wait();
            if batch.is_full() || batch.is_all_for_now {
                break;
            }
        }
        Ok(())
    }

    /// Returns true if every complete line that has arrived is read.
    #[inline]
    fn must_wait(&self) -> bool {
        self.reader.position().byte() + u64::from(self.has_carriage_returns)
            >= self.reader.get_ref().lines_end
    }

    /// Returns the line on which the current record starts. The reader knows only its current position and the one
    /// before any empty lines, so this counts back from the record's end.
    #[cold]
    fn line(&self) -> u64 {
        let here = self.reader.position().line();
        let is_on_next_line = !self.has_carriage_returns && !self.reader.get_ref().has_ended;
        let within = self.record.as_slice().iter().filter(|byte| **byte == b'\n').count() as u64;
        here.saturating_sub(u64::from(is_on_next_line) + within).max(1)
    }

    #[inline]
    fn request(&self) -> Result<Request<'_>, (&'static str, Fault)> {
        let time_text = &self.record[self.time_at];
        let time = instant(time_text).map_err(|fault| ("time", fault))?;
        Ok(Request {
            time,
            time_text: text(time_text).map_err(|fault| ("time", fault))?,
            key: self.key_at.map_or(Ok(""), |at| text(&self.record[at])).map_err(|fault| ("key", fault))?,
            cost: self.cost_at.map_or(Ok(1), |at| cost(&self.record[at])).map_err(|fault| ("cost", fault))?,
        })
    }
}

/// Returns the index of each known column.
fn columns(header: Option<&csv::ByteRecord>) -> Result<[Option<usize>; 3], Fault> {
    const BEGIN: &str = "begin with a line `time,key,cost`; key and cost may be left out";
    let Some(header) = header else {
        return Err(Fault { what: "the trace is empty".to_owned(), instead: BEGIN.to_owned() });
    };
    if header.iter().any(|cell| instant(cell).is_ok()) {
        return Err(Fault { what: "the header is missing".to_owned(), instead: BEGIN.to_owned() });
    }
    let mut positions = [None; COLUMNS.len()];
    for (at, cell) in header.iter().enumerate() {
        let name = String::from_utf8_lossy(cell);
        let Some(column) = COLUMNS.iter().position(|known| *known == name) else {
            let choice = "the columns are time, key and cost";
            return Err(Fault {
                what: format!("{} is not a column", quoted(cell)),
                instead: match nearest(name.trim(), &COLUMNS) {
                    Some(near) => format!("write `{near}`; {choice}"),
                    None => choice.to_owned(),
                },
            });
        };
        if positions[column].replace(at).is_some() {
            return Err(Fault {
                what: format!("the column {} stands here twice", quoted(cell)),
                instead: "remove one of the two".to_owned(),
            });
        }
    }
    if positions[0].is_none() {
        return Err(Fault { what: "there is no column `time`".to_owned(), instead: BEGIN.to_owned() });
    }
    Ok(positions)
}

#[inline]
fn text(cell: &[u8]) -> Result<&str, Fault> {
    std::str::from_utf8(cell).map_err(|_| Fault {
        what: format!("{} is not UTF-8", quoted(cell)),
        instead: "save the trace as UTF-8".to_owned(),
    })
}

#[inline]
fn cost(cell: &[u8]) -> Result<u32, Fault> {
    let value = cell.iter().try_fold(0_u64, |value, byte| {
        let digit = byte.wrapping_sub(b'0');
        (digit < 10).then(|| (value * 10 + u64::from(digit)).min(u64::from(u32::MAX) + 1))
    });
    match value.map(u32::try_from) {
        Some(Ok(_)) if cell.is_empty() => Ok(1),
        Some(Ok(cost)) => Ok(cost),
        Some(Err(_)) => wrong_cost(cell, "too large"),
        None if cell.starts_with(b"-") => wrong_cost(cell, "negative"),
        None => wrong_cost(cell, "not a whole number"),
    }
}

#[cold]
fn wrong_cost(cell: &[u8], what: &str) -> Result<u32, Fault> {
    Err(Fault {
        what: format!("{} is {what}", quoted(cell)),
        instead: "write a whole number from 0 to 4294967295, or nothing for 1".to_owned(),
    })
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The input failed.
    #[error("{name}: {error}")]
    Io {
        /// The trace's name in messages.
        name: String,
        /// The cause.
        #[source]
        error: io::Error,
    },
    /// The text is invalid.
    #[error(
        "{name}:{line}: {}{what}\n  = {instead}",
        .column.map_or(String::new(), |column| format!("in column {column}, "))
    )]
    Bad {
        /// The trace's name in messages.
        name: String,
        /// The line, counted from 1.
        line: u64,
        /// The column, if one column is at fault.
        column: Option<&'static str>,
        /// What is wrong.
        what: String,
        /// What to write instead.
        instead: String,
    },
}

impl TraceError {
    #[cold]
    fn bad(name: &str, line: u64, column: Option<&'static str>, fault: Fault) -> TraceError {
        TraceError::Bad { name: name.to_owned(), line, column, what: fault.what, instead: fault.instead }
    }
}

/// Converts an error of the CSV reader.
#[cold]
fn trace_error(name: &str, line: u64, error: csv::Error) -> TraceError {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => {
            match error.get_ref().and_then(|inner| inner.downcast_ref::<TooLong>()) {
                Some(TooLong) => TraceError::bad(
                    name,
                    line,
                    None,
                    Fault {
                        what: format!("a line is longer than {LINE_BYTES_MAX} bytes"),
                        instead: "look for a quote that is opened and not closed".to_owned(),
                    },
                ),
                None => TraceError::Io { name: name.to_owned(), error },
            }
        }
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => TraceError::bad(
            name,
            line,
            None,
            Fault {
                what: format!("the line has {len} values, and the header has {expected_len}"),
                instead: "write one value for each column; put a key that contains a comma in double quotes"
                    .to_owned(),
            },
        ),
        other => TraceError::Io { name: name.to_owned(), error: io::Error::other(format!("{other:?}")) },
    }
}

/// An input that fails if too much is read without reaching the end of a line.
#[derive(Debug)]
struct Bounded<R> {
    input: R,
    since_line: usize,
    /// Bytes read so far, and the end of the last complete line.
    bytes: u64,
    lines_end: u64,
    has_ended: bool,
    quotes: Quotes,
}

/// Tracks whether the input ends within quotes, because the CSV reader closes an open quote at the end of the input.
#[derive(Debug, Default)]
struct Quotes {
    is_open: bool,
    /// The last byte read: a quote opens a cell only at the cell's start.
    last: u8,
}

impl Quotes {
    fn read(&mut self, text: &[u8]) {
        let mut from = 0;
        while let Some(at) = memchr::memchr(b'"', &text[from..]).map(|at| from + at) {
            let before = if at == 0 { self.last } else { text[at - 1] };
            // A quote directly after a closing quote is an escaped quote and reopens the cell.
            self.is_open = !self.is_open && matches!(before, b',' | b'\n' | b'\r' | b'"');
            from = at + 1;
        }
        self.last = text.last().copied().unwrap_or(self.last);
    }
}

impl<R> Bounded<R> {
    fn is_cut_off(&self) -> bool {
        self.has_ended && self.quotes.is_open
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.since_line > LINE_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, TooLong));
        }
        let count = self.input.read(buffer)?;
        self.since_line += count;
        self.quotes.read(&buffer[..count]);
        if let Some(at) = buffer[..count].iter().rposition(|byte| *byte == b'\n') {
            self.lines_end = self.bytes + at as u64 + 1;
        }
        self.bytes += count as u64;
        self.has_ended = count == 0;
        Ok(count)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("a line is too long")]
struct TooLong;
