//! Finds messages whose length two parsers could read differently.
//!
//! [`check_framing`] checks the headers of requests and responses. For HTTP/1 requests that is too late: hyper drops `Content-Length` beside `Transfer-Encoding`, and all but one of several equal lengths, before the
//! gateway sees the request. So the bytes are scanned while hyper reads them. The scanner only counts requests and
//! finds ambiguous ones; hyper parses and validates, and closes the connection at the first error.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Context;

use http::header::{CONTENT_LENGTH, HeaderMap, TRANSFER_ENCODING};
use memchr::memchr;

use crate::runtime::observed_stream::{PolledIo, StreamObserver};

/// Bytes kept of a line: the longest name of a framing header, white space and a 64-bit number.
const LINE_BYTES_MAX: usize = 64;

/// Why the length of a body is ambiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FramingError {
    /// `Content-Length` twice or beside `Transfer-Encoding`.
    TwoLengths,
    /// `Content-Length` is not a number.
    BadLength,
    /// A `Transfer-Encoding` other than `chunked`: hop-by-hop removal would lose it, and the body would stay encoded.
    UnsupportedCoding,
}

impl FramingError {
    pub(crate) fn text(self) -> &'static str {
        match self {
            FramingError::TwoLengths => "the length of the body is stated more than once",
            FramingError::BadLength => "Content-Length is not a number",
            FramingError::UnsupportedCoding => "unsupported Transfer-Encoding; only chunked is supported",
        }
    }
}

/// Checks that the headers state one length or none, and no coding but `chunked`.
pub(crate) fn check_framing(headers: &HeaderMap) -> Result<(), FramingError> {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let length = lengths.next();
    if lengths.next().is_some() {
        return Err(FramingError::TwoLengths);
    }
    if length.is_some_and(|length| parse_number(length.as_bytes(), 10).is_none()) {
        return Err(FramingError::BadLength);
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let Some(coding) = codings.next() else { return Ok(()) };
    if length.is_some() {
        return Err(FramingError::TwoLengths);
    }
    let is_chunked = coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
    if is_chunked && codings.next().is_none() { Ok(()) } else { Err(FramingError::UnsupportedCoding) }
}

/// What the scanner has found on a connection. Requests are counted from 1.
#[derive(Debug, Default)]
pub(crate) struct ScannedRequests {
    /// Requests whose head is complete.
    heads: AtomicU64,
    /// The first ambiguous request, or 0. Its connection is closed, so later ones do not matter.
    ambiguous: AtomicU64,
    /// Requests that hyper has parsed. hyper may be behind the scanner, because requests can be pipelined.
    parsed: AtomicU64,
}

impl ScannedRequests {
    /// Counts the next request that hyper has parsed, and returns an error if it states the length of its body more than
    /// once. A request whose head the scanner has not found is ambiguous, too.
    pub(crate) fn check_next(&self) -> Result<(), FramingError> {
        let number = self.parsed.fetch_add(1, Ordering::Relaxed) + 1;
        let is_ambiguous =
            number == self.ambiguous.load(Ordering::Relaxed) || number > self.heads.load(Ordering::Relaxed);
        if is_ambiguous { Err(FramingError::TwoLengths) } else { Ok(()) }
    }
}

/// The element that the next byte belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    Head,
    /// Bytes left of a body with a length.
    Body(u64),
    ChunkSize,
    /// Bytes left of a chunk, with the line end after it.
    Chunk(u64),
    Trailers,
    /// The scanner cannot follow; neither can hyper.
    Unknown,
}

/// Scans the bytes of one connection as they are read.
#[derive(Debug)]
pub(crate) struct RequestScanner {
    element: Element,
    /// The beginning of a line whose end has not been received.
    line: HeaderLine,
    head: HeadFraming,
    requests: Arc<ScannedRequests>,
}

/// The beginning of a line and its last byte.
#[derive(Clone, Copy, Debug)]
struct HeaderLine {
    start: [u8; LINE_BYTES_MAX],
    /// Bytes of `start` in use.
    kept: usize,
    last: u8,
}

impl HeaderLine {
    fn push(&mut self, bytes: &[u8]) {
        let count = bytes.len().min(LINE_BYTES_MAX - self.kept);
        self.start[self.kept..self.kept + count].copy_from_slice(&bytes[..count]);
        self.kept += count;
        self.last = bytes.last().copied().unwrap_or(self.last);
    }
}

/// How the current head frames the body.
#[derive(Clone, Copy, Debug, Default)]
struct HeadFraming {
    has_request_line: bool,
    lengths: u32,
    length: u64,
    is_chunked: bool,
    is_unclear: bool,
}

impl HeadFraming {
    fn add_field(&mut self, line: &[u8]) {
        // Most lines end here.
        if !matches!(line.first(), Some(b'c' | b'C' | b't' | b'T')) {
            return;
        }
        if let Some(value) = field_value(line, b"content-length") {
            self.lengths += 1;
            match parse_number(value.trim_ascii(), 10) {
                Some(length) if line.len() < LINE_BYTES_MAX => self.length = length,
                _ => self.is_unclear = true,
            }
        } else if field_value(line, b"transfer-encoding").is_some() {
            self.is_chunked = true;
        }
    }

    fn is_ambiguous(&self) -> bool {
        self.is_unclear || self.lengths > 1 || self.is_chunked && self.lengths > 0
    }
}

fn field_value<'l>(line: &'l [u8], name: &[u8]) -> Option<&'l [u8]> {
    let (front, rest) = line.split_at_checked(name.len())?;
    rest.strip_prefix(b":").filter(|_| front.eq_ignore_ascii_case(name))
}

fn parse_number(digits: &[u8], radix: u32) -> Option<u64> {
    // Unlike `from_str_radix`, hyper accepts no sign.
    let is_number = digits.iter().all(u8::is_ascii_alphanumeric);
    std::str::from_utf8(digits).ok().filter(|_| is_number).and_then(|it| u64::from_str_radix(it, radix).ok())
}

impl RequestScanner {
    pub(crate) fn new(requests: Arc<ScannedRequests>) -> RequestScanner {
        let line = HeaderLine { start: [0; LINE_BYTES_MAX], kept: 0, last: 0 };
        RequestScanner { element: Element::Head, line, head: HeadFraming::default(), requests }
    }

    fn scan(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match &mut self.element {
                Element::Unknown => return,
                Element::Body(left) | Element::Chunk(left) => {
                    let count = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    *left -= count as u64;
                    bytes = &bytes[count..];
                    match self.element {
                        Element::Body(0) => self.element = Element::Head,
                        Element::Chunk(0) => self.element = Element::ChunkSize,
                        _ => {}
                    }
                }
                Element::Head | Element::ChunkSize | Element::Trailers => {
                    let Some(end) = memchr(b'\n', bytes) else { return self.line.push(bytes) };
                    let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
                    bytes = rest;
                    if self.line.kept == 0 {
                        let last = line.last().copied().unwrap_or(0);
                        self.element = self.end_line(line, last);
                    } else {
                        self.line.push(line);
                        let HeaderLine { start, kept, last } = self.line;
                        self.line.kept = 0;
                        self.element = self.end_line(&start[..kept], last);
                    }
                }
            }
        }
    }

    /// Handles the line without its `\n`, or its beginning if it was split; returns the element after it.
    fn end_line(&mut self, line: &[u8], last: u8) -> Element {
        let is_empty = matches!(line, b"" | b"\r");
        match self.element {
            Element::Head if !is_empty => {
                if self.head.has_request_line {
                    self.head.add_field(&line[..line.len().min(LINE_BYTES_MAX)]);
                }
                self.head.has_request_line = true;
                Element::Head
            }
            // Empty lines before the request line are ignored.
            Element::Head if !self.head.has_request_line => Element::Head,
            Element::Head => self.end_head(),
            Element::ChunkSize => {
                let is_digit = |byte: &u8| byte.is_ascii_hexdigit();
                let digits = line.iter().position(|byte| !is_digit(byte)).filter(|end| *end < LINE_BYTES_MAX);
                match digits.and_then(|end| parse_number(&line[..end], 16)) {
                    Some(0) => Element::Trailers,
                    Some(size) => Element::Chunk(size.saturating_add(2)),
                    None => Element::Unknown,
                }
            }
            Element::Trailers if line == b"\r" => Element::Head,
            Element::Trailers => {
                // hyper ends trailers only at `\r\n`: a `\n` alone does not end the line.
                if last != b'\r' {
                    self.line.push(b"\n");
                }
                Element::Trailers
            }
            element => element,
        }
    }

    fn end_head(&mut self) -> Element {
        let head = std::mem::take(&mut self.head);
        let number = self.requests.heads.fetch_add(1, Ordering::Relaxed) + 1;
        if head.is_ambiguous() {
            self.requests.ambiguous.store(number, Ordering::Relaxed);
            return Element::Unknown;
        }
        match head.length {
            _ if head.is_chunked => Element::ChunkSize,
            0 => Element::Head,
            length => Element::Body(length),
        }
    }
}

impl StreamObserver for RequestScanner {
    fn after_read(&mut self, _: &mut Context<'_>, bytes: &[u8], read: PolledIo<()>) -> PolledIo<()> {
        self.scan(bytes);
        read
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Text that a scanner at the wrong element would take for a head.
    const FAKE_HEAD: &str =
        "\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n";

    fn request() -> impl Strategy<Value = String> {
        let length = FAKE_HEAD.len();
        prop_oneof![
            Just("\r\n\nGET / HTTP/1.1\r\nHost: a\r\nContent-Type: b\r\n\r\n".to_owned()),
            Just("GET / HTTP/1.1\nHost: a\nTE: trailers\n\n".to_owned()),
            Just(format!("POST / HTTP/1.1\r\nCONTENT-length:\t {length} \r\n\r\n{FAKE_HEAD}")),
            (1..length).prop_map(move |size| format!(
                "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n00{size:x}\r\n{}\r\n{:X} ;a=\"{}\"\r\n{}\r\n0\r\n\r\n",
                &FAKE_HEAD[..size],
                length - size,
                "b".repeat(size),
                &FAKE_HEAD[size..],
            )),
            // A line feed alone does not end a trailer.
            Just("PUT / HTTP/1.1\r\ntransfer-encoding:chunked\r\n\r\n0\r\nA: b\n\nContent-Length: 1\r\n\n\r\n\r\n".to_owned()),
        ]
    }

    fn scanned(text: &str, pieces: &[usize]) -> Arc<ScannedRequests> {
        let requests = Arc::<ScannedRequests>::default();
        let mut scanner = RequestScanner::new(requests.clone());
        let (mut bytes, mut sizes) = (text.as_bytes(), pieces.iter().cycle());
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at((*sizes.next().unwrap_or(&1)).min(bytes.len()));
            scanner.scan(piece);
            bytes = rest;
        }
        requests
    }

    proptest! {
        #![proptest_config(testbed::property::cases(256))]

        #[test]
        fn requests_are_counted_however_their_bytes_arrive(
            requests in proptest::collection::vec(request(), 0..6),
            ambiguous in proptest::option::of(0..3_usize),
            pieces in proptest::collection::vec(1..200_usize, 1..8),
        ) {
            let two_lengths = [
                "Content-Length: 0\r\nTransfer-Encoding: chunked",
                "transfer-encoding: chunked\r\ncontent-length: 0",
                "Content-Length: 0\r\nContent-Length: 0",
            ];
            let mut text = requests.concat();
            let count = requests.len() as u64;
            if let Some(number) = ambiguous {
                text += &format!("POST / HTTP/1.1\r\n{}\r\n\r\n", two_lengths[number]);
            }
            let scanned = scanned(&text, &pieces);
            for _ in 0..count {
                prop_assert!(scanned.check_next().is_ok());
            }
            // After the last request, there is either an ambiguous one or none.
            prop_assert!(scanned.check_next().is_err());
            prop_assert_eq!(scanned.heads.load(Ordering::Relaxed), count + u64::from(ambiguous.is_some()));
        }

        #[test]
        fn any_bytes_are_scanned(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            RequestScanner::new(Arc::default()).scan(&bytes);
        }
    }

    #[test]
    fn length_that_the_scanner_cannot_read_is_ambiguous() {
        for length in [format!("{}1", " ".repeat(100)), "1 1".to_owned(), "+1".to_owned(), "9".repeat(30)] {
            let head = format!("POST / HTTP/1.1\r\nContent-Length: {length}\r\n\r\n");
            for piece in [1, 1000] {
                assert!(scanned(&head, &[piece]).check_next().is_err(), "{length}");
            }
        }
        let zeros = "0".repeat(100);
        let chunked =
            format!("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{zeros}1\r\na\r\n0\r\n\r\n");
        let requests = scanned(&(chunked + "GET / HTTP/1.1\r\n\r\n"), &[1000]);
        assert!(requests.check_next().is_ok());
        assert!(requests.check_next().is_err(), "after a chunk size that the scanner cannot read");
    }
}
