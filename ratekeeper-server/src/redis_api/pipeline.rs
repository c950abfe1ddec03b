//! Groups of commands that are checked concurrently, for stores that do not decide immediately.
//!
//! Otherwise a client that pipelines commands would wait for one round trip to the store per command. Commands with
//! the same key are still executed in order, so that each sees the charge of the previous one; so are commands that
//! check no limit.

use std::collections::HashSet;
use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::task::Poll;

use super::protocol::{Parser, ProtocolError, Words};

/// Most commands in one group.
const TOGETHER_MAX: usize = 64;

/// A complete command, and its range in the buffer.
#[derive(Debug)]
pub(super) struct Whole {
    begin: usize,
    pub(super) end: usize,
    parser: Parser,
}

impl Whole {
    pub(super) fn words<'a>(&'a self, bytes: &'a [u8]) -> Words<'a> {
        self.parser.words(bytes.get(self.begin..self.end).unwrap_or_default())
    }
}

/// Splits the received bytes into groups.
#[derive(Debug)]
pub(super) struct Groups<'a> {
    bytes: &'a [u8],
    at: usize,
    /// A command that did not fit into the last group.
    kept: Option<Whole>,
    /// The protocol error after the last complete command.
    pub(super) wrong: Option<ProtocolError>,
}

impl<'a> Groups<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Groups<'a> {
        Groups { bytes, at: 0, kept: None, wrong: None }
    }

    /// The next group: checks with different keys, or a single command of any other kind. Empty if no complete
    /// command is left.
    pub(super) fn next(
        &mut self,
        parser: &mut Parser,
        asks_about: impl for<'w> Fn(Words<'w>) -> Option<&'w [u8]>,
    ) -> Vec<Whole> {
        let (mut group, mut keys) = (Vec::new(), HashSet::new());
        while group.len() < TOGETHER_MAX {
            let Some(whole) = self.kept.take().or_else(|| self.whole(parser)) else { break };
            let key = asks_about(whole.words(self.bytes)).map(<[u8]>::to_vec);
            let is_alone = key.is_none();
            let is_new = key.is_some_and(|key| keys.insert(key));
            if !is_new && !group.is_empty() {
                self.kept = Some(whole);
                break;
            }
            group.push(whole);
            if is_alone {
                break;
            }
        }
        group
    }

    fn whole(&mut self, parser: &mut Parser) -> Option<Whole> {
        // After a protocol error, nothing can be parsed as a command.
        if self.wrong.is_some() {
            return None;
        }
        let begin = self.at;
        match parser.next(self.bytes.get(begin..).unwrap_or_default()) {
            Ok(length) => {
                self.at += length?;
                Some(Whole { begin, end: self.at, parser: mem::take(parser) })
            }
            Err(wrong) => {
                self.wrong = Some(wrong);
                None
            }
        }
    }
}

/// Polls all futures concurrently, and returns their results in order.
pub(super) async fn all<T>(mut futures: Vec<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> Vec<T> {
    let mut done: Vec<Option<T>> = futures.iter().map(|_| None).collect();
    poll_fn(|context| {
        let mut is_waiting = false;
        for (future, done) in futures.iter_mut().zip(&mut done) {
            if done.is_none() {
                match future.as_mut().poll(context) {
                    Poll::Ready(value) => *done = Some(value),
                    Poll::Pending => is_waiting = true,
                }
            }
        }
        if is_waiting { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    done.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes of the groups. Commands with a second word count as checks.
    fn sizes(bytes: &[u8]) -> (Vec<usize>, Option<ProtocolError>) {
        let (mut groups, mut parser, mut sizes) = (Groups::new(bytes), Parser::default(), Vec::new());
        loop {
            let group = groups.next(&mut parser, |words| words.get(1));
            if group.is_empty() {
                return (sizes, groups.wrong);
            }
            sizes.push(group.len());
        }
    }

    #[test]
    fn only_checks_with_different_keys_share_a_group() {
        assert_eq!(sizes(b"a 1\na 2\na 3\n").0, [3]);
        assert_eq!(sizes(b"a 1\na 1\na 2\na 1\n").0, [1, 2, 1]);
        assert_eq!(sizes(b"x\na 1\na 2\nx\nx\na 1\n").0, [1, 2, 1, 1, 1]);
        assert_eq!(sizes(b"a 1\n\na 2\na 3").0, [1, 1, 1]);
        assert_eq!(sizes(b"a 1\na 2\na '\n"), (vec![2], Some(ProtocolError::Quotes)));
        // A quote that closes on a later line opens there: nothing after the error is a command.
        assert_eq!(sizes(b"a 1\na '\na 2\n'\na 3\n"), (vec![1], Some(ProtocolError::Quotes)));
        let many: String = (0..150).map(|number| format!("a {number}\n")).collect();
        assert_eq!(sizes(many.as_bytes()).0, [64, 64, 22]);
    }
}
