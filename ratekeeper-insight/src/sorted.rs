//! Replays a trace in the order of its times.

use std::io::{self, Read};
use std::mem;

use ratekeeper::Time;

use crate::{Batch, ReplayError, Request, Trace};

/// Number of requests that a request may be behind others and still be sorted.
pub const SORTED_WITHIN: usize = 1 << 16;
/// Bytes of text that also end a window, because keys may be long.
const TEXT_BYTES_MAX: usize = 64 << 20;

/// Requests that are read and not yet passed on, because an earlier one may follow.
#[derive(Default)]
struct Window {
    text: String,
    lines: Vec<WindowLine>,
    is_unsorted: bool,
}

/// A request; its text is in [`Window`].
#[derive(Clone, Copy)]
struct WindowLine {
    time: Time,
    cost: u32,
    start: usize,
    time_end: usize,
    key_end: usize,
}

impl Window {
    fn push(&mut self, request: &Request<'_>) {
        let start = self.text.len();
        self.text.push_str(request.time_text);
        let time_end = self.text.len();
        self.text.push_str(request.key);
        self.is_unsorted |= self.lines.last().is_some_and(|last| request.time < last.time);
        let (time, cost, key_end) = (request.time, request.cost, self.text.len());
        self.lines.push(WindowLine { time, cost, start, time_end, key_end });
    }

    fn request(&self, line: &WindowLine) -> Request<'_> {
        let time_text = &self.text[line.start..line.time_end];
        Request { time: line.time, time_text, key: &self.text[line.time_end..line.key_end], cost: line.cost }
    }
}

/// Passes the requests of a trace to `hand_on` in batches, in the order of their times; requests of the same time keep
/// their order. Returns the number of requests that were more than [`SORTED_WITHIN`] requests late: these are passed on
/// out of order.
///
/// # Errors
/// Returns an error if `hand_on` fails, or if the trace cannot be read; the requests before the unreadable line are
/// passed on first.
pub fn replay_sorted<R: Read>(
    trace: &mut Trace<R>,
    mut hand_on: impl FnMut(&Batch) -> io::Result<()>,
) -> Result<u64, ReplayError> {
    let (mut window, mut next) = (Window::default(), Window::default());
    let (mut batch, mut sorted) = (Batch::default(), Batch::default());
    let (mut latest, mut late) = (Time::EPOCH, 0);
    loop {
        let read = trace.next_batch(&mut batch);
        batch.requests().for_each(|request| window.push(&request));
        let is_last = read.is_err() || batch.is_empty();
        if window.lines.len() < 2 * SORTED_WITHIN && window.text.len() < TEXT_BYTES_MAX && !is_last {
            continue;
        }
        if mem::take(&mut window.is_unsorted) {
            window.lines.sort_by_key(|line| line.time);
        }
        let kept = if is_last { 0 } else { SORTED_WITHIN.min(window.lines.len() / 2) };
        let (ready, rest) = window.lines.split_at(window.lines.len() - kept);
        for line in ready {
            late += u64::from(line.time < latest);
            latest = latest.max(line.time);
            sorted.push(&window.request(line));
            if sorted.is_full() {
                hand_on(&sorted).map_err(ReplayError::Output)?;
                sorted.clear();
            }
        }
        rest.iter().for_each(|line| next.push(&window.request(line)));
        mem::swap(&mut window, &mut next);
        next.text.clear();
        next.lines.clear();
        if is_last {
            hand_on(&sorted).map_err(ReplayError::Output)?;
            read?;
            return Ok(late);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    /// Returns the times in the order in which they are passed on, and the number of late ones.
    fn replayed(times: impl Iterator<Item = u64>) -> (Vec<u64>, u64) {
        let mut csv = "time,key\n".to_owned();
        times.for_each(|time| writeln!(csv, "{time},k{time}").unwrap());
        let mut trace = Trace::open("t.csv", csv.as_bytes()).unwrap();
        let mut passed = Vec::new();
        let late = replay_sorted(&mut trace, |batch| {
            passed.extend(batch.requests().map(|request| {
                assert_eq!(request.key, format!("k{}", request.time_text));
                request.time_text.parse::<u64>().unwrap()
            }));
            Ok(())
        });
        (passed, late.unwrap())
    }

    #[test]
    fn requests_within_the_window_are_sorted() {
        let count = 3 * SORTED_WITHIN as u64 + 7;
        // Pairs and blocks are reversed, across the ends of windows.
        for block in [1, 2, 1000, SORTED_WITHIN as u64] {
            let times = (0..count).map(|at| {
                let start = at / block * block;
                let length = block.min(count - start);
                1 + start + (length - 1 - (at - start))
            });
            let (passed, late) = replayed(times);
            assert!(passed.len() as u64 == count && passed.is_sorted(), "{block}");
            assert_eq!(late, 0, "{block}");
        }
    }

    #[test]
    fn later_requests_are_counted_and_passed_on() {
        let count = 4 * SORTED_WITHIN as u64;
        let (passed, late) = replayed((1_000..count).chain([1, 2, 3]));
        assert_eq!((passed.len() as u64, late), (count - 1_000 + 3, 3));
    }

    #[test]
    fn requests_before_an_invalid_line_are_passed_on() {
        let mut trace = Trace::open("t.csv", "time\n3\n1\n2\nx\n".as_bytes()).unwrap();
        let mut passed = Vec::new();
        let result = replay_sorted(&mut trace, |batch| {
            passed.extend(batch.requests().map(|request| request.time_text.to_owned()));
            Ok(())
        });
        assert!(matches!(result, Err(ReplayError::Trace(_))));
        assert_eq!(passed, ["1", "2", "3"]);
    }
}
