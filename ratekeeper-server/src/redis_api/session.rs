//! The session of one client: its authentication, and the commands that check no limit.

use std::fmt::Write;

use subtle::ConstantTimeEq;

use super::ServiceContext;
use super::ask::{self, ErrorText};
use super::commands::{self, Command, Known};
use super::counts::{Became, Counts};
use super::protocol::Words;
use super::reply::{Protocol, Replies, quoted};

/// Wrong tokens before the connection is closed.
const GUESSES_MAX: u8 = 8;
/// Longest client name, in bytes.
const NAME_BYTES_MAX: usize = 64;

const NO_TOKEN: &str = "NOAUTH Authentication required.";
const WRONG_TOKEN: &str = "WRONGPASS invalid username-password pair or user is disabled.";
const NO_TOKEN_HERE: &str = "ERR AUTH <password> called without any password configured for the default user. \
    Are you sure your configuration is correct?";
const HELLO_FIRST: &str = "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO \
    <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at \
    the same time";
const NO_INTEGER: &str = "ERR value is not an integer or out of range";
const BAD_NAME: &str = "ERR Client names cannot contain spaces, newlines or special characters.";

/// The state of a client between its commands.
#[derive(Debug)]
pub(crate) struct Session {
    number: u64,
    name: Vec<u8>,
    /// Whether it has sent the token, or there is none.
    is_known: bool,
    guesses: u8,
    /// Whether the connection is to be closed.
    pub(crate) is_over: bool,
}

impl Session {
    pub(crate) fn new(number: u64, is_known: bool) -> Session {
        Session { number, name: Vec::new(), is_known, guesses: 0, is_over: false }
    }

    /// Whether the client has sent the token, or there is none.
    pub(crate) fn is_known(&self) -> bool {
        self.is_known
    }

    /// Answers a command.
    pub(crate) async fn answer<B: ServiceContext>(
        &mut self,
        words: Words<'_>,
        limits: Option<ask::Limits<'_, B::Store>>,
        (behind, counts): (&B, &Counts),
        out: &mut Replies,
    ) -> Option<Became> {
        // An empty line is not answered.
        let name = words.get(0)?;
        let answered = match self.find(name, words) {
            Ok(known) if known.command.asks() => {
                return Some(ask::answer(known.command, words, limits, out).await);
            }
            Ok(known) => self.talk(known.command, words, behind, counts, out),
            Err(refused) => Err(refused),
        };
        Some(match answered {
            Ok(()) => Became::Other,
            Err(refused) => {
                if !refused.is_empty() {
                    out.error(&refused);
                }
                Became::Refused
            }
        })
    }

    /// The command and its key, if the client may use it and it checks a limit.
    pub(crate) fn asks_about<'a>(&self, words: Words<'a>) -> Option<(Command, &'a [u8])> {
        let known = Known::of(words.get(0)?).filter(|known| self.is_known && known.command.asks())?;
        let key = words.get(known.key()).unwrap_or_default();
        known.takes(words.len()).then_some((known.command, key))
    }

    /// Looks up the command, and rejects a wrong number of words and unauthenticated clients.
    fn find(&mut self, name: &[u8], words: Words<'_>) -> Result<&'static Known, ErrorText> {
        let Some(known) = Known::of(name) else {
            // Cross-protocol attack: a web page can make a browser post a form here, which begins with these words.
            // The commands in its body must not be executed.
            if name.eq_ignore_ascii_case(b"post") || name.eq_ignore_ascii_case(b"host:") {
                tracing::debug!("connection closed: HTTP on the Redis API");
                self.is_over = true;
                return Err("".into());
            }
            return Err(if self.is_known { unknown(name, words).into() } else { NO_TOKEN.into() });
        };
        if !self.is_known && !known.is_for_all {
            return Err(NO_TOKEN.into());
        }
        if !known.takes(words.len()) {
            return Err(wrong_count(known.name).into());
        }
        Ok(known)
    }

    /// Answers the commands that check no limit.
    fn talk<B: ServiceContext>(
        &mut self,
        command: Command,
        words: Words<'_>,
        behind: &B,
        counts: &Counts,
        out: &mut Replies,
    ) -> Result<(), ErrorText> {
        match (command, words.len()) {
            (Command::Ping, 1) => out.simple("PONG"),
            (Command::Ping | Command::Echo, 2) => out.bulk(words.get(1).unwrap_or_default()),
            (Command::Hello, _) => self.hello(words, behind, out)?,
            (Command::Auth, 2) => {
                self.authenticate(behind, b"default", words.get(1))?;
                out.simple("OK");
            }
            (Command::Auth, 3) => {
                self.authenticate(behind, words.get(1).unwrap_or_default(), words.get(2))?;
                out.simple("OK");
            }
            (Command::Commands, _) => {
                if !commands::describe(words, out) {
                    return Err(unknown_subcommand("COMMAND", words).into());
                }
            }
            (Command::Client, count) => self.client(words, count, out)?,
            (Command::Select, _) => match ask::integer(words.get(1)) {
                Some(0) => out.simple("OK"),
                Some(_) => return Err("ERR DB index is out of range".into()),
                None => return Err(NO_INTEGER.into()),
            },
            (Command::Info, _) => out.bulk(info(counts).as_bytes()),
            (Command::Quit, _) => {
                out.simple("OK");
                self.is_over = true;
            }
            (Command::Reset, _) => {
                out.protocol = Protocol::Two;
                self.name = Vec::new();
                self.is_known = behind.token().is_none();
                out.simple("RESET");
            }
            (Command::Ping, _) => return Err(wrong_count("ping").into()),
            (Command::Auth, _) => return Err("ERR syntax error".into()),
            // The others check a limit, or have a valid number of words.
            _ => return Err(wrong_count("this").into()),
        }
        Ok(())
    }

    /// Checks the token. As in Redis without ACLs, there is one user, `default`.
    fn authenticate<B: ServiceContext>(
        &mut self,
        behind: &B,
        user: &[u8],
        said: Option<&[u8]>,
    ) -> Result<(), ErrorText> {
        let Some(token) = behind.token() else { return Err(NO_TOKEN_HERE.into()) };
        // Constant-time comparison: the duration must not reveal how much of the token was right.
        let is_right = bool::from(said.unwrap_or_default().ct_eq(token.reveal().as_bytes()));
        if is_right && user == b"default" {
            self.is_known = true;
            return Ok(());
        }
        self.guesses += 1;
        self.is_over = self.guesses >= GUESSES_MAX;
        Err(WRONG_TOKEN.into())
    }

    /// `HELLO [2|3 [AUTH user pass] [SETNAME name]]`
    fn hello<B: ServiceContext>(
        &mut self,
        words: Words<'_>,
        behind: &B,
        out: &mut Replies,
    ) -> Result<(), ErrorText> {
        let wanted = match (words.get(1), ask::integer(words.get(1))) {
            (None, _) => None,
            (_, Some(2)) => Some(Protocol::Two),
            (_, Some(3)) => Some(Protocol::Three),
            (_, Some(_)) => return Err("NOPROTO unsupported protocol version".into()),
            (_, None) => return Err("ERR Protocol version is not an integer or out of range".into()),
        };
        let (mut at, mut name) = (2, None);
        while let Some(option) = words.get(at) {
            match (words.get(at + 1), words.get(at + 2)) {
                (Some(user), Some(token)) if option.eq_ignore_ascii_case(b"auth") => {
                    self.authenticate(behind, user, Some(token))?;
                    at += 3;
                }
                (Some(its), _) if option.eq_ignore_ascii_case(b"setname") => {
                    name = Some(its);
                    at += 2;
                }
                _ => return Err(format!("ERR Syntax error in HELLO option '{}'", quoted(option)).into()),
            }
        }
        if !self.is_known {
            return Err(HELLO_FIRST.into());
        }
        if let Some(name) = name {
            self.set_name(name)?;
        }
        out.protocol = wanted.unwrap_or(out.protocol);
        let text = |out: &mut Replies, key: &str, value: &str| {
            out.bulk(key.as_bytes());
            out.bulk(value.as_bytes());
        };
        out.map(7);
        text(out, "server", "ratekeeper");
        text(out, "version", env!("CARGO_PKG_VERSION"));
        out.bulk(b"proto");
        out.integer(out.protocol.number());
        out.bulk(b"id");
        out.integer(self.id());
        text(out, "mode", "standalone");
        text(out, "role", "master");
        out.bulk(b"modules");
        out.array(0);
        Ok(())
    }

    fn client(&mut self, words: Words<'_>, count: usize, out: &mut Replies) -> Result<(), ErrorText> {
        let subcommand = words.get(1).unwrap_or_default();
        let is = |name: &str| subcommand.eq_ignore_ascii_case(name.as_bytes());
        let takes = |name: &str, words: usize| match is(name) && count != words {
            true => Err(ErrorText::from(wrong_count(&format!("client|{name}")))),
            false => Ok(is(name)),
        };
        if takes("setname", 3)? {
            self.set_name(words.get(2).unwrap_or_default())?;
            out.simple("OK");
        } else if takes("getname", 2)? {
            match self.name.as_slice() {
                [] => out.null(),
                name => out.bulk(name),
            }
        } else if takes("id", 2)? {
            out.integer(self.id());
        } else if takes("setinfo", 4)? {
            // Client libraries send their names; they are not used.
            out.simple("OK");
        } else {
            return Err(unknown_subcommand("CLIENT", words).into());
        }
        Ok(())
    }

    fn set_name(&mut self, name: &[u8]) -> Result<(), ErrorText> {
        if name.len() > NAME_BYTES_MAX {
            return Err(format!("ERR a client's name has at most {NAME_BYTES_MAX} bytes").into());
        }
        if !name.iter().all(u8::is_ascii_graphic) {
            return Err(BAD_NAME.into());
        }
        self.name = name.to_vec();
        Ok(())
    }

    fn id(&self) -> i64 {
        i64::try_from(self.number).unwrap_or(i64::MAX)
    }
}

/// The messages of Redis: clients match on them.
fn unknown(name: &[u8], words: Words<'_>) -> String {
    let mut text = format!("ERR unknown command '{}', with args beginning with: ", quoted(name));
    let begin = text.len();
    for word in words.iter().skip(1) {
        // Writing into a string cannot fail.
        let _ = write!(text, "'{}' ", quoted(word));
        if text.len() - begin >= 128 {
            break;
        }
    }
    text
}

pub(crate) fn wrong_count(name: &str) -> String {
    format!("ERR wrong number of arguments for '{name}' command")
}

fn unknown_subcommand(command: &str, words: Words<'_>) -> String {
    let subcommand = quoted(words.get(1).unwrap_or_default());
    format!("ERR unknown subcommand '{subcommand}'. Try {command} HELP.")
}

/// `INFO`: the fields that clients read when they connect, and the counters.
fn info(counts: &Counts) -> String {
    let mut text = format!(
        "# Server\r\nserver_name:ratekeeper\r\nratekeeper_version:{}\r\nredis_mode:standalone\r\n\r\n\
         # Clients\r\nconnected_clients:{}\r\nrejected_connections:{}\r\n\r\n\
         # Persistence\r\nloading:0\r\n\r\n# Replication\r\nrole:master\r\n\r\n# Commands\r\n",
        env!("CARGO_PKG_VERSION"),
        counts.open(),
        counts.turned_away(),
    );
    for (result, count) in counts.commands() {
        let _ = write!(text, "commands_{result}:{count}\r\n");
    }
    text
}
