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
const GROUP_MAX: usize = 64;

/// A complete command, and its range in the buffer.
#[derive(Debug)]
pub(super) struct ParsedCommand {
    begin: usize,
    pub(super) end: usize,
    parser: Parser,
}

impl ParsedCommand {
    pub(super) fn words<'a>(&'a self, bytes: &'a [u8]) -> Words<'a> {
        self.parser.words(bytes.get(self.begin..self.end).unwrap_or_default())
    }
}

/// Splits the received bytes into groups.
#[derive(Debug)]
pub(super) struct CommandGroups<'a> {
    bytes: &'a [u8],
    at: usize,
    /// A command that did not fit into the last group.
    pending: Option<ParsedCommand>,
    /// The protocol error after the last complete command.
    pub(super) error: Option<ProtocolError>,
}

impl<'a> CommandGroups<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> CommandGroups<'a> {
        CommandGroups { bytes, at: 0, pending: None, error: None }
    }

    /// The next group: checks with different keys, or a single command of any other kind. Empty if no complete
    /// command is left.
    pub(super) fn next(
        &mut self,
        parser: &mut Parser,
        check_key: impl for<'w> Fn(Words<'w>) -> Option<&'w [u8]>,
    ) -> Vec<ParsedCommand> {
        let (mut group, mut keys) = (Vec::new(), HashSet::new());
        while group.len() < GROUP_MAX {
            let Some(command) = self.pending.take().or_else(|| self.parse(parser)) else { break };
            let key = check_key(command.words(self.bytes)).map(<[u8]>::to_vec);
            let is_single = key.is_none();
            let is_new = key.is_some_and(|key| keys.insert(key));
            if !is_new && !group.is_empty() {
                self.pending = Some(command);
                break;
            }
            group.push(command);
            if is_single {
                break;
            }
        }
        group
    }

    fn parse(&mut self, parser: &mut Parser) -> Option<ParsedCommand> {
        // After a protocol error, nothing can be parsed as a command.
        if self.error.is_some() {
            return None;
        }
        let begin = self.at;
        match parser.next(self.bytes.get(begin..).unwrap_or_default()) {
            Ok(length) => {
                self.at += length?;
                Some(ParsedCommand { begin, end: self.at, parser: mem::take(parser) })
            }
            Err(error) => {
                self.error = Some(error);
                None
            }
        }
    }
}

/// Polls all futures concurrently, and returns their results in order.
pub(super) async fn join_all<T>(mut futures: Vec<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> Vec<T> {
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
        let (mut groups, mut parser, mut sizes) = (CommandGroups::new(bytes), Parser::default(), Vec::new());
        loop {
            let group = groups.next(&mut parser, |words| words.get(1));
            if group.is_empty() {
                return (sizes, groups.error);
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
