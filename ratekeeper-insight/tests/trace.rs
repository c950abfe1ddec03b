//! Accepted forms of a trace, and errors of an invalid one.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::cell::Cell;
use std::error::Error;
use std::io::{self, Read};

use ratekeeper_insight::{Batch, ReplayError, Request, Trace, TraceError};

/// Returns the requests as `nanoseconds|time as written|key|cost`, or the error.
fn read(csv: impl AsRef<[u8]>) -> Result<Vec<String>, String> {
    let mut trace = Trace::open("t.csv", csv.as_ref()).map_err(|error| error.to_string())?;
    let mut requests = Vec::new();
    while let Some(it) = trace.next_request().map_err(|error| error.to_string())? {
        requests.push(shown(it));
    }
    Ok(requests)
}

fn shown(it: Request<'_>) -> String {
    format!("{}|{}|{}|{}", it.time.as_nanos(), it.time_text, it.key, it.cost)
}

#[test]
fn valid_traces_are_read() {
    for (csv, expected) in [
        ("time,key,cost\n0.5,a,3\n", &["500000000|0.5|a|3"][..]),
        // Columns in any order; only the time is required.
        ("cost,time,key\n3,0.5,a\n", &["500000000|0.5|a|3"]),
        ("time\n1\n2\n", &["1000000000|1||1", "2000000000|2||1"]),
        ("key,time\na,1\n", &["1000000000|1|a|1"]),
        (
            "cost,time\n,1\n0,2\n4294967295,3\n",
            &["1000000000|1||1", "2000000000|2||0", "3000000000|3||4294967295"],
        ),
        // Line endings, byte order marks and quotes of any system.
        ("time,key\r\n1,a\r\n2,b\r\n", &["1000000000|1|a|1", "2000000000|2|b|1"]),
        ("\u{feff}time,key\n1,a\n", &["1000000000|1|a|1"]),
        ("time,key\n1,a", &["1000000000|1|a|1"]),
        ("time,key\n\n1,a\n\n\n2,b\n\n", &["1000000000|1|a|1", "2000000000|2|b|1"]),
        ("\"time\",\"key\"\n\"1\",\"a, \"\"b\"\"\nc\"\n", &["1000000000|1|a, \"b\"\nc|1"]),
        ("time,key\n1,日本\n2, spaced \n", &["1000000000|1|日本|1", "2000000000|2| spaced |1"]),
        // Times in any order and of both kinds.
        (
            "time\n1970-01-01T00:00:02Z\n1\n1970-01-01T01:00:00.25+01:00\n",
            &[
                "2000000000|1970-01-01T00:00:02Z||1",
                "1000000000|1||1",
                "250000000|1970-01-01T01:00:00.25+01:00||1",
            ],
        ),
        ("time,key,cost\n", &[]),
    ] {
        assert_eq!(
            read(csv).as_deref(),
            Ok(&expected.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>()[..]),
            "{csv}"
        );
    }
}

#[test]
fn invalid_traces_are_reported_with_position_and_remedy() {
    const BEGIN: &str = "begin with a line `time,key,cost`; key and cost may be left out";
    const TIME: &str = "write seconds since 1970, as in 1700000000.5, or a time as in 2023-11-14T22:13:20.5Z";
    const COST: &str = "write a whole number from 0 to 4294967295, or nothing for 1";
    for (csv, message) in [
        ("", format!("t.csv:1: the trace is empty\n  = {BEGIN}")),
        ("1,a\n2,b\n", format!("t.csv:1: the header is missing\n  = {BEGIN}")),
        ("key,cost\na,1\n", format!("t.csv:1: there is no column `time`\n  = {BEGIN}")),
        (
            "tiem,key\n1,a\n",
            "t.csv:1: `tiem` is not a column\n  = write `time`; the columns are time, key and cost".to_owned(),
        ),
        (
            "time, key\n1, a\n",
            "t.csv:1: ` key` is not a column\n  = write `key`; the columns are time, key and cost".to_owned(),
        ),
        (
            "time,user\n1,a\n",
            "t.csv:1: `user` is not a column\n  = the columns are time, key and cost".to_owned(),
        ),
        (
            "time;key;cost\n1;a;1\n",
            "t.csv:1: `time;key;cost` is not a column\n  = the columns are time, key and cost".to_owned(),
        ),
        (
            "time,key,time\n1,a,1\n",
            "t.csv:1: the column `time` stands here twice\n  = remove one of the two".to_owned(),
        ),
        ("time,key\n1,a\n,b\n", format!("t.csv:3: in column time, the time is missing\n  = {TIME}")),
        (
            "time,key\n-1,a\n",
            format!("t.csv:2: in column time, `-1` is negative, and time begins in 1970\n  = {TIME}"),
        ),
        (
            "time,key\n1.0000000001,a\n",
            "t.csv:2: in column time, `1.0000000001` has 10 decimals\n  = write at most 9, which are nanoseconds"
                .to_owned(),
        ),
        (
            "key,time\na,9223372036.854775808\n",
            format!("t.csv:2: in column time, `9223372036.854775808` is after the year 2262\n  = {TIME}"),
        ),
        ("time\n1\n2\nthree\n", format!("t.csv:4: in column time, `three` is not a time\n  = {TIME}")),
        ("time,cost\n1,-1\n", format!("t.csv:2: in column cost, `-1` is negative\n  = {COST}")),
        ("time,cost\n1,1.5\n", format!("t.csv:2: in column cost, `1.5` is not a whole number\n  = {COST}")),
        ("time,cost\n1,4294967296\n", format!("t.csv:2: in column cost, `4294967296` is too large\n  = {COST}")),
        (
            "time,cost\n1,99999999999999999999999999\n",
            format!("t.csv:2: in column cost, `99999999999999999999999999` is too large\n  = {COST}"),
        ),
        (
            "time,key\n1,a\n2\n",
            "t.csv:3: the line has 1 values, and the header has 2\n  = write one value for each column; put a key \
             that contains a comma in double quotes"
                .to_owned(),
        ),
        (
            "time,key\n1,a,b\n",
            "t.csv:2: the line has 3 values, and the header has 2\n  = write one value for each column; put a key \
             that contains a comma in double quotes"
                .to_owned(),
        ),
        // The line number is that of the file, also after empty lines and line breaks within quotes.
        ("time,key\n\n\n1,\"a\nb\"\n\nx,c\n", format!("t.csv:7: in column time, `x` is not a time\n  = {TIME}")),
        ("time,key\n\n\n1,\"a\nb\"\n\nx,c", format!("t.csv:7: in column time, `x` is not a time\n  = {TIME}")),
        ("time,key\n\n1,a\n\nx,\"c\nd\"\n", format!("t.csv:5: in column time, `x` is not a time\n  = {TIME}")),
        ("time,key\r\n\r\n\r\n1,\"a\r\nb\"\r\n\r\nx,c\r\n", format!("t.csv:7: in column time, `x` is not a time\n  = {TIME}")),
    ] {
        assert_eq!(read(csv), Err(message), "{csv}");
    }
}

#[test]
fn key_that_is_not_utf8_is_rejected() {
    assert_eq!(
        read(b"time,key\n1,a\xff\n"),
        Err("t.csv:2: in column key, `a\u{fffd}` is not UTF-8\n  = save the trace as UTF-8".to_owned())
    );
}

#[test]
fn quoted_cells_are_short_and_without_control_characters() {
    let message = read(format!("time\n\x1b[2J{}\n", "x".repeat(1_000))).unwrap_err();
    assert!(message.len() < 300 && !message.contains('\x1b'), "{message:?}");
}

/// The end of a trace does not close a quote; otherwise the text after the quote would become a key.
#[test]
fn unclosed_quote_is_rejected() {
    for (csv, line) in [
        ("time,key\n1,a\n2,\"b\n3,c\n", 3),
        ("time,key\n1,\"a\"\"\n", 2),
        ("time,key\r\n1,\"a\r\n2,b\r\n", 2),
    ] {
        assert_eq!(
            read(csv).unwrap_err(),
            format!(
                "t.csv:{line}: a quote is opened and not closed\n  = close it; a quote within a key is written twice"
            ),
            "{csv:?}"
        );
    }
    // Closed quotes, and quotes that do not open a cell.
    for csv in [
        "time,key\n1,\"a\"\"b\"\n",
        "time,key\n1,5\" disk\n2,a\n",
        "time,key\n1,\"a,\nb\"\n",
        "time,key\n1,\"\"\n",
    ] {
        assert!(read(csv).is_ok(), "{csv:?}");
    }
}

/// An endless trace with an unclosed quote must not be read into memory.
#[test]
fn unclosed_quote_does_not_buffer_the_whole_trace() {
    let endless = "time,key\n1,a\n2,\"b\n".as_bytes().chain(io::repeat(b'x'));
    let mut trace = Trace::open("t.csv", endless).unwrap();
    assert!(trace.next_request().is_ok());
    assert_eq!(
        trace.next_request().unwrap_err().to_string(),
        "t.csv:3: a line is longer than 4194304 bytes\n  = look for a quote that is opened and not closed"
    );
}

#[test]
fn failing_input_is_an_io_error() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the disk is gone"))
        }
    }
    let mut trace = Trace::open("t.csv", "time\n1\n".as_bytes().chain(Broken)).unwrap();
    assert!(trace.next_request().is_ok());
    let error = trace.next_request().unwrap_err();
    assert!(matches!(error, TraceError::Io { .. }));
    assert_eq!(error.to_string(), "t.csv: the disk is gone");

    let is_io = |error: &dyn Error| error.source().is_some_and(|source| source.is::<io::Error>());
    assert!(is_io(&error));
    assert!(is_io(&ReplayError::from(error)), "the trace's error is not repeated in the chain");
}

/// An input that arrives in pieces, and that fails the test if it is read more often than allowed.
struct Pieces<'a> {
    pieces: &'a [&'a str],
    allowed: &'a Cell<usize>,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        assert!(self.allowed.get() > 0, "it waits for what it does not need");
        self.allowed.set(self.allowed.get() - 1);
        let Some((piece, rest)) = self.pieces.split_first() else { return Ok(0) };
        self.pieces = rest;
        buffer[..piece.len()].copy_from_slice(piece.as_bytes());
        Ok(piece.len())
    }
}

fn keys(batch: &Batch) -> Vec<String> {
    batch.requests().map(|request| request.key.to_owned()).collect()
}

/// A slow pipe: available lines are not delayed by later ones.
#[test]
fn batch_does_not_wait_for_lines_that_have_not_arrived() {
    for pieces in [
        ["time,key\n", "1,a\n2,b\n", "3,c\n4,", "d\n5,e\n"],
        ["time,key\r\n", "1,a\r\n2,b\r\n", "3,c\r\n4,", "d\r\n5,e\r\n"],
    ] {
        let allowed = Cell::new(1);
        let mut trace = Trace::open("t.csv", Pieces { pieces: &pieces, allowed: &allowed }).unwrap();
        let mut batch = Batch::default();
        for expected in [&["a", "b"][..], &["c"], &["d", "e"], &[]] {
            allowed.set(1);
            trace.next_batch(&mut batch).unwrap();
            assert_eq!(keys(&batch), expected);
        }
    }
}

#[test]
fn batches_contain_every_request_in_order() {
    let csv: String = (0..1_000).map(|n| format!("{n}.5,{},{n}\n", "k".repeat(n * n % 1_999))).collect();
    let csv = format!("time,key,cost\n{csv}");
    let mut trace = Trace::open("t.csv", csv.as_bytes()).unwrap();
    let (mut batch, mut requests) = (Batch::default(), Vec::new());
    while requests.is_empty() || !batch.is_empty() {
        trace.next_batch(&mut batch).unwrap();
        requests.extend(batch.requests().map(shown));
    }
    assert_eq!(Ok(requests), read(csv));
}

#[test]
fn requests_before_an_invalid_line_are_in_the_batch() {
    let mut trace = Trace::open("t.csv", "time,key\n1,a\n2,b\nthree,c\n4,d\n".as_bytes()).unwrap();
    let mut batch = Batch::default();
    let message = trace.next_batch(&mut batch).unwrap_err().to_string();
    assert!(message.starts_with("t.csv:4: in column time, `three` is not a time"), "{message}");
    assert_eq!(keys(&batch), ["a", "b"]);
}
