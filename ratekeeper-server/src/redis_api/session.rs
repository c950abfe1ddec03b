//! The session of one client: its authentication, and the commands that check no limit.

use std::fmt::Write;

use ratekeeper::Store;
use ratekeeper_config::Secret;
use subtle::ConstantTimeEq;

use super::check::{self, ErrorText};
use super::commands::{self, Command, CommandSpec};
use super::metrics::RedisApiMetrics;
use super::protocol::Words;
use super::reply::{Protocol, Replies, quoted};
use crate::runtime::metrics::CommandOutcome;

/// Wrong tokens before the connection is closed.
const FAILED_ATTEMPTS_MAX: u8 = 8;
/// Longest client name, in bytes.
const NAME_BYTES_MAX: usize = 64;

const AUTH_REQUIRED: &str = "NOAUTH Authentication required.";
const WRONG_TOKEN: &str = "WRONGPASS invalid username-password pair or user is disabled.";
const NO_TOKEN_CONFIGURED: &str = "ERR AUTH <password> called without any password configured for the default user. \
    Are you sure your configuration is correct?";
const HELLO_AUTH_REQUIRED: &str = "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO \
    <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at \
    the same time";
const NOT_AN_INTEGER: &str = "ERR value is not an integer or out of range";
const INVALID_NAME: &str = "ERR Client names cannot contain spaces, newlines or special characters.";

/// The state of a client between its commands.
#[derive(Debug)]
pub(crate) struct Session {
    number: u64,
    name: Vec<u8>,
    /// Whether it has sent the token, or there is none.
    is_authenticated: bool,
    failed_attempts: u8,
    /// Whether the connection is to be closed.
    pub(crate) is_closing: bool,
}

impl Session {
    pub(crate) fn new(number: u64, is_authenticated: bool) -> Session {
        Session { number, name: Vec::new(), is_authenticated, failed_attempts: 0, is_closing: false }
    }

    /// Whether the client has sent the token, or there is none.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.is_authenticated
    }

    /// Answers a command.
    pub(crate) async fn answer<S: Store>(
        &mut self,
        words: Words<'_>,
        limits: Option<check::Limits<'_, S>>,
        (token, metrics): (Option<&Secret>, &RedisApiMetrics),
        out: &mut Replies,
    ) -> Option<CommandOutcome> {
        // An empty line is not answered.
        let name = words.get(0)?;
        let result = match self.find(name, words) {
            Ok(spec) if spec.command.checks_limit() => {
                return Some(check::answer(spec.command, words, limits, out).await);
            }
            Ok(spec) => self.answer_other(spec.command, words, token, metrics, out),
            Err(error) => Err(error),
        };
        Some(match result {
            Ok(()) => CommandOutcome::Other,
            Err(error) => {
                if !error.is_empty() {
                    out.error(&error);
                }
                CommandOutcome::Error
            }
        })
    }

    /// The command and its key, if the client may use it and it checks a limit.
    pub(crate) fn limit_check<'a>(&self, words: Words<'a>) -> Option<(Command, &'a [u8])> {
        let spec = CommandSpec::find(words.get(0)?)
            .filter(|spec| self.is_authenticated && spec.command.checks_limit())?;
        let key = words.get(spec.key_index()).unwrap_or_default();
        spec.accepts_count(words.len()).then_some((spec.command, key))
    }

    /// Looks up the command, and rejects a wrong number of words and unauthenticated clients.
    fn find(&mut self, name: &[u8], words: Words<'_>) -> Result<&'static CommandSpec, ErrorText> {
        let Some(spec) = CommandSpec::find(name) else {
            // Cross-protocol attack: a web page can make a browser post a form here, which begins with these words.
            // The commands in its body must not be executed.
            if name.eq_ignore_ascii_case(b"post") || name.eq_ignore_ascii_case(b"host:") {
                tracing::debug!("connection closed: HTTP on the Redis API");
                self.is_closing = true;
                return Err("".into());
            }
            return Err(if self.is_authenticated {
                unknown_command(name, words).into()
            } else {
                AUTH_REQUIRED.into()
            });
        };
        if !self.is_authenticated && !spec.needs_no_auth {
            return Err(AUTH_REQUIRED.into());
        }
        if !spec.accepts_count(words.len()) {
            return Err(wrong_word_count(spec.name).into());
        }
        Ok(spec)
    }

    /// Answers the commands that check no limit.
    fn answer_other(
        &mut self,
        command: Command,
        words: Words<'_>,
        token: Option<&Secret>,
        metrics: &RedisApiMetrics,
        out: &mut Replies,
    ) -> Result<(), ErrorText> {
        match (command, words.len()) {
            (Command::Ping, 1) => out.simple("PONG"),
            (Command::Ping | Command::Echo, 2) => out.bulk(words.get(1).unwrap_or_default()),
            (Command::Hello, _) => self.hello(words, token, out)?,
            (Command::Auth, 2) => {
                self.authenticate(token, b"default", words.get(1))?;
                out.simple("OK");
            }
            (Command::Auth, 3) => {
                self.authenticate(token, words.get(1).unwrap_or_default(), words.get(2))?;
                out.simple("OK");
            }
            (Command::Commands, _) => {
                if !commands::describe(words, out) {
                    return Err(unknown_subcommand("COMMAND", words).into());
                }
            }
            (Command::Client, count) => self.client(words, count, out)?,
            (Command::Select, _) => match check::integer(words.get(1)) {
                Some(0) => out.simple("OK"),
                Some(_) => return Err("ERR DB index is out of range".into()),
                None => return Err(NOT_AN_INTEGER.into()),
            },
            (Command::Info, _) => out.bulk(info(metrics).as_bytes()),
            (Command::Quit, _) => {
                out.simple("OK");
                self.is_closing = true;
            }
            (Command::Reset, _) => {
                out.protocol = Protocol::Two;
                self.name = Vec::new();
                self.is_authenticated = token.is_none();
                out.simple("RESET");
            }
            (Command::Ping, _) => return Err(wrong_word_count("ping").into()),
            (Command::Auth, _) => return Err("ERR syntax error".into()),
            // The others check a limit, or have a valid number of words.
            _ => return Err(wrong_word_count("this").into()),
        }
        Ok(())
    }

    /// Checks the token. As in Redis without ACLs, there is one user, `default`.
    fn authenticate(
        &mut self,
        token: Option<&Secret>,
        user: &[u8],
        password: Option<&[u8]>,
    ) -> Result<(), ErrorText> {
        let Some(token) = token else { return Err(NO_TOKEN_CONFIGURED.into()) };
        // Constant-time comparison: the duration must not reveal how much of the token was right.
        let is_token = bool::from(password.unwrap_or_default().ct_eq(token.reveal().as_bytes()));
        if is_token && user == b"default" {
            self.is_authenticated = true;
            return Ok(());
        }
        self.failed_attempts += 1;
        self.is_closing = self.failed_attempts >= FAILED_ATTEMPTS_MAX;
        Err(WRONG_TOKEN.into())
    }

    /// `HELLO [2|3 [AUTH user pass] [SETNAME name]]`
    fn hello(
        &mut self,
        words: Words<'_>,
        token: Option<&Secret>,
        out: &mut Replies,
    ) -> Result<(), ErrorText> {
        let version = match (words.get(1), check::integer(words.get(1))) {
            (None, _) => None,
            (_, Some(2)) => Some(Protocol::Two),
            (_, Some(3)) => Some(Protocol::Three),
            (_, Some(_)) => return Err("NOPROTO unsupported protocol version".into()),
            (_, None) => return Err("ERR Protocol version is not an integer or out of range".into()),
        };
        let (mut at, mut name) = (2, None);
        while let Some(option) = words.get(at) {
            match (words.get(at + 1), words.get(at + 2)) {
                (Some(user), Some(password)) if option.eq_ignore_ascii_case(b"auth") => {
                    self.authenticate(token, user, Some(password))?;
                    at += 3;
                }
                (Some(value), _) if option.eq_ignore_ascii_case(b"setname") => {
                    name = Some(value);
                    at += 2;
                }
                _ => return Err(format!("ERR Syntax error in HELLO option '{}'", quoted(option)).into()),
            }
        }
        if !self.is_authenticated {
            return Err(HELLO_AUTH_REQUIRED.into());
        }
        if let Some(name) = name {
            self.set_name(name)?;
        }
        out.protocol = version.unwrap_or(out.protocol);
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
            true => Err(ErrorText::from(wrong_word_count(&format!("client|{name}")))),
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
            return Err(format!("ERR client name is longer than {NAME_BYTES_MAX} bytes").into());
        }
        if !name.iter().all(u8::is_ascii_graphic) {
            return Err(INVALID_NAME.into());
        }
        self.name = name.to_vec();
        Ok(())
    }

    fn id(&self) -> i64 {
        i64::try_from(self.number).unwrap_or(i64::MAX)
    }
}

/// The messages of Redis: clients match on them.
fn unknown_command(name: &[u8], words: Words<'_>) -> String {
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

pub(crate) fn wrong_word_count(name: &str) -> String {
    format!("ERR wrong number of arguments for '{name}' command")
}

fn unknown_subcommand(command: &str, words: Words<'_>) -> String {
    let subcommand = quoted(words.get(1).unwrap_or_default());
    format!("ERR unknown subcommand '{subcommand}'. Try {command} HELP.")
}

/// `INFO`: the fields that clients read when they connect, and the counters.
fn info(metrics: &RedisApiMetrics) -> String {
    let mut text = format!(
        "# Server\r\nserver_name:ratekeeper\r\nratekeeper_version:{}\r\nredis_mode:standalone\r\n\r\n\
         # Clients\r\nconnected_clients:{}\r\nrejected_connections:{}\r\n\r\n\
         # Persistence\r\nloading:0\r\n\r\n# Replication\r\nrole:master\r\n\r\n# Commands\r\n",
        env!("CARGO_PKG_VERSION"),
        metrics.open_connections(),
        metrics.rejected_connections(),
    );
    for (result, count) in metrics.commands() {
        let _ = write!(text, "commands_{result}:{count}\r\n");
    }
    text
}
