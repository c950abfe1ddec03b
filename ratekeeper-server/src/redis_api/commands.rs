//! The table of commands, and the replies that describe it.

use super::protocol::Words;
use super::reply::Replies;

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    ClThrottle,
    Throttle,
    Check,
    Ping,
    Echo,
    Hello,
    Auth,
    Commands,
    Client,
    Select,
    Info,
    Quit,
    Reset,
}

impl Command {
    /// Whether it checks a limit.
    pub(crate) fn asks(self) -> bool {
        matches!(self, Command::ClThrottle | Command::Throttle | Command::Check)
    }
}

/// The description of a command.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) command: Command,
    pub(crate) name: &'static str,
    /// Number of words, including the name; if negative, the minimum number.
    arity: i64,
    flags: &'static [&'static str],
    /// The index of the word that is the key; 0 if there is none.
    key: i64,
    /// Whether it is allowed before authentication.
    pub(crate) is_for_all: bool,
}

const fn asks(command: Command, name: &'static str, arity: i64, key: i64) -> Known {
    Known { command, name, arity, flags: &["write", "fast"], key, is_for_all: false }
}

const fn talks(command: Command, name: &'static str, arity: i64, is_for_all: bool) -> Known {
    let flags: &[&str] = if is_for_all { &["fast", "no_auth"] } else { &["fast"] };
    Known { command, name, arity, flags, key: 0, is_for_all }
}

/// All commands, the most frequent first.
const ALL: [Known; 13] = [
    asks(Command::ClThrottle, "cl.throttle", -1, 1),
    asks(Command::Throttle, "throttle", -5, 1),
    asks(Command::Check, "rk.check", -2, 2),
    talks(Command::Ping, "ping", -1, true),
    talks(Command::Echo, "echo", 2, false),
    talks(Command::Hello, "hello", -1, true),
    talks(Command::Auth, "auth", -2, true),
    talks(Command::Commands, "command", -1, false),
    talks(Command::Client, "client", -2, false),
    talks(Command::Select, "select", 2, false),
    talks(Command::Info, "info", -1, false),
    talks(Command::Quit, "quit", -1, true),
    talks(Command::Reset, "reset", 1, true),
];

impl Known {
    /// The command of this name, case-insensitively.
    pub(crate) fn of(name: &[u8]) -> Option<&'static Known> {
        ALL.iter().find(|known| known.name.as_bytes().eq_ignore_ascii_case(name))
    }

    pub(crate) fn takes(&self, words: usize) -> bool {
        let words = i64::try_from(words).unwrap_or(i64::MAX);
        if self.arity < 0 { words >= -self.arity } else { words == self.arity }
    }

    /// The index of its key among its words.
    pub(crate) fn key(&self) -> usize {
        usize::try_from(self.key).unwrap_or_default()
    }

    /// Writes the entry of `COMMAND`, which clients read to locate a command's key.
    fn describe(&self, out: &mut Replies) {
        out.array(10);
        out.bulk(self.name.as_bytes());
        out.integer(self.arity);
        out.array(self.flags.len());
        for flag in self.flags {
            out.simple(flag);
        }
        for number in [self.key, self.key, i64::from(self.key > 0)] {
            out.integer(number);
        }
        // Categories, tips, key specifications and subcommands are empty.
        for _ in 0..4 {
            out.array(0);
        }
    }
}

/// Answers `COMMAND` and its subcommands. Returns false for an unknown subcommand.
pub(crate) fn describe(words: Words<'_>, out: &mut Replies) -> bool {
    let is = |name: &str| words.get(1).is_none_or(|word| word.eq_ignore_ascii_case(name.as_bytes()));
    match words.len() {
        1 => {
            out.array(ALL.len());
            ALL.iter().for_each(|known| known.describe(out));
        }
        2 if is("count") => out.integer(ALL.len() as i64),
        2 if is("list") => {
            out.array(ALL.len());
            ALL.iter().for_each(|known| out.bulk(known.name.as_bytes()));
        }
        2 if is("info") => {
            out.array(ALL.len());
            ALL.iter().for_each(|known| known.describe(out));
        }
        3.. if is("info") => {
            out.array(words.len() - 2);
            for name in words.iter().skip(2) {
                match Known::of(name) {
                    Some(known) => known.describe(out),
                    None => out.null(),
                }
            }
        }
        _ if is("docs") => out.map(0),
        _ => return false,
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_names_are_case_insensitive() {
        assert_eq!(Known::of(b"Cl.ThRottle").unwrap().command, Command::ClThrottle);
        assert_eq!(Known::of(b"PING").unwrap().command, Command::Ping);
        assert!(Known::of(b"").is_none() && Known::of(b"ping ").is_none());
    }

    #[test]
    fn arity_is_enforced() {
        let takes = |name: &[u8], words| Known::of(name).unwrap().takes(words);
        assert!(takes(b"echo", 2) && !takes(b"echo", 1) && !takes(b"echo", 3));
        assert!(takes(b"throttle", 5) && takes(b"throttle", 100) && !takes(b"throttle", 4));
    }
}
