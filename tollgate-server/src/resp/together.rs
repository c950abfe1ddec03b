//! Commands that are asked at the same time, where a store takes its time to answer.
//!
//! A client that sends many commands at once would else wait for the store as often as it has sent one. Commands of the
//! same key still go one after the other, so that each sees what the one before it took; so do all that ask no limit.

use std::collections::HashSet;
use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::task::Poll;

use super::wire::{Parser, ProtocolError, Words};

/// As many commands as are asked at the same time.
const TOGETHER_MAX: usize = 64;

/// A whole command, and where it is.
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

/// What has come, cut into groups.
#[derive(Debug)]
pub(super) struct Groups<'a> {
    bytes: &'a [u8],
    at: usize,
    /// One that did not fit into the last group.
    kept: Option<Whole>,
    /// Behind the last whole command is something that is none.
    pub(super) wrong: Option<ProtocolError>,
}

impl<'a> Groups<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Groups<'a> {
        Groups { bytes, at: 0, kept: None, wrong: None }
    }

    /// The commands that go together next: those that ask about different keys, or one of any other kind. None if there
    /// is no whole command left.
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
        // What stands behind it may look like a command and is none.
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

/// What comes of all of them, in their order.
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

    /// The sizes of the groups. Commands that ask are those with a second word.
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
    fn different_keys_go_together_and_nothing_else() {
        assert_eq!(sizes(b"a 1\na 2\na 3\n").0, [3]);
        assert_eq!(sizes(b"a 1\na 1\na 2\na 1\n").0, [1, 2, 1]);
        assert_eq!(sizes(b"x\na 1\na 2\nx\nx\na 1\n").0, [1, 2, 1, 1, 1]);
        assert_eq!(sizes(b"a 1\n\na 2\na 3").0, [1, 1, 1]);
        assert_eq!(sizes(b"a 1\na 2\na '\n"), (vec![2], Some(ProtocolError::Quotes)));
        // A quote that closes on the next line opens there: what is behind the error is no command.
        assert_eq!(sizes(b"a 1\na '\na 2\n'\na 3\n"), (vec![1], Some(ProtocolError::Quotes)));
        let many: String = (0..150).map(|number| format!("a {number}\n")).collect();
        assert_eq!(sizes(many.as_bytes()).0, [64, 64, 22]);
    }
}
