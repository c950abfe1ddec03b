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
    pub(crate) fn checks_limit(self) -> bool {
        matches!(self, Command::ClThrottle | Command::Throttle | Command::Check)
    }
}

/// The specification of a command.
#[derive(Debug)]
pub(crate) struct CommandSpec {
    pub(crate) command: Command,
    pub(crate) name: &'static str,
    /// Number of words, including the name; if negative, the minimum number.
    arity: i64,
    flags: &'static [&'static str],
    /// The index of the word that is the key; 0 if there is none.
    key_index: i64,
    /// Whether it is allowed before authentication.
    pub(crate) needs_no_auth: bool,
}

const fn check_command(command: Command, name: &'static str, arity: i64, key_index: i64) -> CommandSpec {
    CommandSpec { command, name, arity, flags: &["write", "fast"], key_index, needs_no_auth: false }
}

const fn other_command(command: Command, name: &'static str, arity: i64, needs_no_auth: bool) -> CommandSpec {
    let flags: &[&str] = if needs_no_auth { &["fast", "no_auth"] } else { &["fast"] };
    CommandSpec { command, name, arity, flags, key_index: 0, needs_no_auth }
}

/// All commands, the most frequent first.
const COMMANDS: [CommandSpec; 13] = [
    check_command(Command::ClThrottle, "cl.throttle", -1, 1),
    check_command(Command::Throttle, "throttle", -5, 1),
    check_command(Command::Check, "rk.check", -2, 2),
    other_command(Command::Ping, "ping", -1, true),
    other_command(Command::Echo, "echo", 2, false),
    other_command(Command::Hello, "hello", -1, true),
    other_command(Command::Auth, "auth", -2, true),
    other_command(Command::Commands, "command", -1, false),
    other_command(Command::Client, "client", -2, false),
    other_command(Command::Select, "select", 2, false),
    other_command(Command::Info, "info", -1, false),
    other_command(Command::Quit, "quit", -1, true),
    other_command(Command::Reset, "reset", 1, true),
];

impl CommandSpec {
    /// The command of this name, case-insensitively.
    pub(crate) fn find(name: &[u8]) -> Option<&'static CommandSpec> {
        COMMANDS.iter().find(|spec| spec.name.as_bytes().eq_ignore_ascii_case(name))
    }

    pub(crate) fn accepts_count(&self, words: usize) -> bool {
        let words = i64::try_from(words).unwrap_or(i64::MAX);
        if self.arity < 0 { words >= -self.arity } else { words == self.arity }
    }

    /// The index of the key among the words.
    pub(crate) fn key_index(&self) -> usize {
        usize::try_from(self.key_index).unwrap_or_default()
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
        for number in [self.key_index, self.key_index, i64::from(self.key_index > 0)] {
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
            out.array(COMMANDS.len());
            COMMANDS.iter().for_each(|spec| spec.describe(out));
        }
        2 if is("count") => out.integer(COMMANDS.len() as i64),
        2 if is("list") => {
            out.array(COMMANDS.len());
            COMMANDS.iter().for_each(|spec| out.bulk(spec.name.as_bytes()));
        }
        2 if is("info") => {
            out.array(COMMANDS.len());
            COMMANDS.iter().for_each(|spec| spec.describe(out));
        }
        3.. if is("info") => {
            out.array(words.len() - 2);
            for name in words.iter().skip(2) {
                match CommandSpec::find(name) {
                    Some(spec) => spec.describe(out),
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
        assert_eq!(CommandSpec::find(b"Cl.ThRottle").unwrap().command, Command::ClThrottle);
        assert_eq!(CommandSpec::find(b"PING").unwrap().command, Command::Ping);
        assert!(CommandSpec::find(b"").is_none() && CommandSpec::find(b"ping ").is_none());
    }

    #[test]
    fn arity_is_enforced() {
        let accepts_count = |name: &[u8], words| CommandSpec::find(name).unwrap().accepts_count(words);
        assert!(accepts_count(b"echo", 2) && !accepts_count(b"echo", 1) && !accepts_count(b"echo", 3));
        assert!(
            accepts_count(b"throttle", 5)
                && accepts_count(b"throttle", 100)
                && !accepts_count(b"throttle", 4)
        );
    }
}
