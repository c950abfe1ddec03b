//! Writes a commented configuration file to start from: the choice guide as questions.

use std::fs::File;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::Path;

use ratekeeper_config::{Environment, RedisAddressError};

use crate::args::{Init, Need};
use crate::config_source::FILE_DEFAULT;
use crate::environment::{FileEnvironment, Files};
use crate::error::{CliError, reason, with_help};
use crate::validate::{self, print};

const RATE_DEFAULT: &str = "100/min";
const KEY_DEFAULT: &str = "ip";
const UPSTREAM_DEFAULT: &str = "http://127.0.0.1:3000";
const STORE_DEFAULT: &str = "memory";
const INSTANCES_DEFAULT: &str = "1";
/// The maximum of `instances` in a configuration file.
const INSTANCES_MAX: u32 = 100_000;
/// Questions asked again after an invalid answer, before giving up.
const TRIES_MAX: usize = 5;

/// The choice guide.
const NEEDS: [(&str, Need, &str); 5] = [
    ("bursts", Need::Bursts, "Allow bursts, then a steady rate          (token bucket)"),
    ("steady", Need::Steady, "Send requests on at a steady rate         (leaky bucket)"),
    ("simplest", Need::Simplest, "The simplest limit to explain             (fixed window)"),
    ("exact", Need::Exact, "The limit must hold in every window       (sliding window log)"),
    ("unsure", Need::Unsure, "Not sure                                  (sliding window counter)"),
];

pub(crate) fn run(args: &Init) -> Result<(), CliError> {
    let is_printed = args.output == Path::new("-");
    if !is_printed && !args.force && args.output.exists() {
        let name = args.output.display();
        return Err(CliError::usage(
            &format!("{name} already exists"),
            "choose another file with `--output FILE`, or replace this one with `--force`",
        ));
    }
    let name = if is_printed { Path::new(FILE_DEFAULT) } else { &args.output }.display().to_string();
    let mut questions = Questions { is_asking: io::stdin().is_terminal(), defaults: Vec::new() };
    let starter = Starter::from(args, &mut questions)?;
    let text = starter.text(&name);
    // The starter must be valid, whatever was typed.
    let environment = FileEnvironment::of(&args.output, Files::default());
    let config = ratekeeper_config::parse(&text, &Placeholders(&environment))
        .map_err(|errors| CliError::Config(Box::new(errors.in_file("generated file, not written"))))?;
    validate::warn(&config, &name);
    questions.note_defaults();
    if is_printed {
        return print(&text);
    }
    let cannot = |error: io::Error| CliError::Input(format!("cannot write {name}: {}", reason(&error)));
    let mut options = File::options();
    let mut file = match args.force {
        true => options.write(true).create(true).truncate(true).open(&args.output),
        // Fails if the file was created in the meantime.
        false => options.write(true).create_new(true).open(&args.output),
    }
    .map_err(cannot)?;
    file.write_all(text.as_bytes()).map_err(cannot)?;
    let mut steps = String::new();
    if starter.redis.is_some() {
        steps.push_str("  set the secret  export RATEKEEPER_SECRET=...  # the same for all instances; generate it once with `openssl rand -hex 16`\n");
    }
    print(&format!(
        "{name} written\n\n{steps}  check it        ratekeeper validate {name} --explain\n  run it          ratekeeper run {name}\n"
    ))
}

/// The environment of a starter file: its secrets are not set yet.
struct Placeholders<'a>(&'a FileEnvironment);

impl Environment for Placeholders<'_> {
    fn variable(&self, name: &str) -> Option<String> {
        self.0.variable(name).or_else(|| Some("a placeholder for the check".to_owned()))
    }

    fn file(&self, path: &str) -> Result<String, String> {
        self.0.file(path)
    }

    fn check_redis_address(&self, address: &str) -> Result<(), RedisAddressError> {
        self.0.check_redis_address(address)
    }

    fn path(&self, path: &str) -> std::path::PathBuf {
        self.0.path(path)
    }
}

/// The answers that make up the starter file.
#[derive(Debug, PartialEq, Eq)]
struct Starter {
    need: Need,
    rate: Rate,
    key: StarterKey,
    upstream: String,
    /// A Redis address and the number of instances that share it, or none for the memory store.
    redis: Option<(String, u32)>,
}

/// Requests per period.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rate {
    count: u32,
    /// The unit as in `100/min`, and the window of the same length.
    unit: &'static str,
    window: &'static str,
    word: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum StarterKey {
    Ip,
    Global,
    Header(String),
}

/// Asks questions on stderr and reads answers from stdin.
struct Questions {
    is_asking: bool,
    /// Flags and values that stand for questions that were not asked.
    defaults: Vec<String>,
}

impl Questions {
    /// Prints the defaults that were used without a question.
    fn note_defaults(&self) {
        if self.defaults.is_empty() {
            return;
        }
        eprintln!("note: stdin is not a terminal, so defaults are used: {}\n", self.defaults.join(" "));
    }

    /// The flag's value if there is one; else the answer; else the default.
    fn value<T>(
        &mut self,
        flag: Option<&str>,
        name: &str,
        question: &str,
        default: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<T, CliError> {
        if let Some(typed) = flag {
            return parse(typed)
                .map_err(|help| CliError::usage(&format!("invalid value `{typed}` for `{name}`"), &help));
        }
        let mut tries = 0;
        loop {
            let typed = match self.is_asking {
                true => self.ask(question, default)?,
                false => {
                    self.defaults.push(format!("{name} {default}"));
                    default.to_owned()
                }
            };
            match parse(&typed) {
                Ok(value) => return Ok(value),
                Err(help) if self.is_asking && tries < TRIES_MAX => {
                    eprintln!("  {help}");
                    tries += 1;
                }
                Err(help) => {
                    return Err(CliError::usage(&format!("invalid value `{typed}`"), &help));
                }
            }
        }
    }

    fn ask(&self, question: &str, default: &str) -> Result<String, CliError> {
        eprint!("{question} [{default}] ");
        let mut line = String::new();
        let read = io::stdin().lock().read_line(&mut line);
        let bytes = read.map_err(|error| CliError::Input(format!("cannot read the answer: {error}")))?;
        if bytes == 0 {
            eprintln!();
            return Err(CliError::Input(with_help(
                "the input ended, nothing written",
                "answer all questions, or give the answers as flags: `ratekeeper init --help`",
            )));
        }
        let typed = line.trim();
        Ok(if typed.is_empty() { default.to_owned() } else { typed.to_owned() })
    }
}

impl Starter {
    fn from(args: &Init, questions: &mut Questions) -> Result<Starter, CliError> {
        let need = match args.need {
            Some(need) => need,
            None if questions.is_asking => {
                eprintln!("What matters most?");
                for (number, (_, _, text)) in NEEDS.iter().enumerate() {
                    eprintln!("  {}  {text}", number + 1);
                }
                questions.value(None, "--need", "Choose 1 to 5", "5", need)?
            }
            None => questions.value(None, "--need", "", "unsure", need)?,
        };
        let rate =
            questions.value(args.rate.as_deref(), "--rate", "Requests per period", RATE_DEFAULT, rate)?;
        let question = "Which key has its own budget (ip, header:NAME, or global for one budget in all)?";
        let key = questions.value(args.key.as_deref(), "--key", question, KEY_DEFAULT, key)?;
        let question = "Where does the gateway forward requests?";
        let upstream =
            questions.value(args.upstream.as_deref(), "--upstream", question, UPSTREAM_DEFAULT, upstream)?;
        let question = "Where are limits kept (memory, or redis://HOST:PORT to share them)?";
        let address = questions.value(args.store.as_deref(), "--store", question, STORE_DEFAULT, store)?;
        let redis = match (address, args.instances.as_deref()) {
            (Some(address), flag) => {
                let question = "How many instances share the limits?";
                let count = questions.value(flag, "--instances", question, INSTANCES_DEFAULT, instances)?;
                Some((address, count))
            }
            (None, None) => None,
            (None, Some(_)) => {
                return Err(CliError::usage(
                    "`--instances` has no effect on `--store memory`",
                    "write `--store redis://HOST:PORT`, or remove `--instances`",
                ));
            }
        };
        Ok(Starter { need, rate, key, upstream, redis })
    }

    /// The name of the limit.
    fn name(&self) -> &'static str {
        match self.key {
            StarterKey::Ip => "per-ip",
            StarterKey::Global => "total",
            StarterKey::Header(_) => "per-user",
        }
    }

    /// The file; its comments call it `file`.
    fn text(&self, file: &str) -> String {
        let (store, secret) = match &self.redis {
            None => (
                "# Limits are kept in this process. To share them among instances, write as in\n\
                 # store: { redis: { address: redis://127.0.0.1:6379, secret: \"${RATEKEEPER_SECRET}\", instances: 2 } }\n\
                 store: memory\n"
                    .to_owned(),
                "",
            ),
            Some((address, instances)) => (
                format!(
                    "# Limits are shared by all instances through Redis. If Redis does not answer within 20 ms, each instance\n\
                     # enforces its share of the limits, so `instances` is the number of instances.\n\
                     store:\n  redis:\n    address: {}\n    secret: \"${{RATEKEEPER_SECRET}}\"   # hides keys in Redis; at least 16 bytes\n    \
                     instances: {instances}\n",
                    quoted(address)
                ),
                "#   export RATEKEEPER_SECRET=...   # the same for all instances; generate it once with `openssl rand -hex 16`\n",
            ),
        };
        let (scope, key) = match &self.key {
            StarterKey::Ip => ("Each client address has its own budget.".to_owned(), "ip".to_owned()),
            StarterKey::Global => ("All requests share one budget.".to_owned(), "global".to_owned()),
            StarterKey::Header(name) => (
                format!("Each value of {name} has its own budget; requests without it share one."),
                format!("{{ header: {}, fallback: anonymous }}", quoted(name)),
            ),
        };
        let (why, limit) = self.limit();
        let proxies = match self.key {
            StarterKey::Ip => {
                "\n# Behind a load balancer, list its networks: the client address is then taken from X-Forwarded-For.\n\
                 # client: { trusted_proxies: [10.0.0.0/8] }\n"
            }
            _ => "",
        };
        format!(
            "# Ratekeeper: {count} requests per {word}.\n\
             #\n\
             {secret}\
             #   ratekeeper validate {file} --explain\n\
             #   ratekeeper run {file}\n\
             \n\
             {store}{proxies}\n\
             limits:\n  \
               {name}:\n    \
                 # {scope}\n    \
                 key: {key}\n    \
                 # {why}\n    \
                 {limit}\n    \
                 # To try the limit without enforcing it, add:\n    \
                 # shadow: true\n\
             \n\
             gateway:\n  \
               # Local connections only. Use 0.0.0.0:8080 to accept connections from other machines.\n  \
               listen: 127.0.0.1:8080\n  \
               routes:\n    \
                 - id: all\n      \
                   path: /**\n      \
                   upstream: {upstream}\n      \
                   # Names of limits, `all` or `none`.\n      \
                   limits: [{name}]\n\
             \n\
             # Metrics and health checks.\n\
             admin: 127.0.0.1:9180\n",
            count = self.rate.count,
            word = self.rate.word,
            name = self.name(),
            upstream = quoted(&self.upstream),
        )
    }

    /// Why this algorithm, and the algorithm with its parameters.
    fn limit(&self) -> (String, String) {
        let Rate { count, unit, window, word } = &self.rate;
        let rate = format!("{count}/{unit}");
        match self.need {
            Need::Bursts => (
                format!("Up to {count} requests at once, refilled at {count} per {word}."),
                format!("token_bucket: {{ capacity: {count}, refill: {rate} }}"),
            ),
            Need::Steady => (
                format!("Requests are delayed and sent on evenly, {count} per {word}; at most {count} wait."),
                format!("leaky_bucket: {{ capacity: {count}, leak: {rate}, mode: shape }}"),
            ),
            Need::Simplest => (
                format!(
                    "A counter per clock {word}. Around the edge of two windows, twice the limit may pass."
                ),
                format!("fixed_window: {{ limit: {count}, window: {window} }}"),
            ),
            Need::Exact => (
                format!("At most {count} requests in any period of one {word}; 8 bytes per allowed request."),
                format!("sliding_window_log: {{ limit: {count}, window: {window} }}"),
            ),
            Need::Unsure => (
                format!("About {count} requests in any period of one {word}, with two counters per key."),
                format!("sliding_window_counter: {{ limit: {count}, window: {window} }}"),
            ),
        }
    }
}

fn need(typed: &str) -> Result<Need, String> {
    let by_number = typed.parse::<usize>().ok().and_then(|it| NEEDS.get(it.checked_sub(1)?));
    let found = by_number.or_else(|| NEEDS.iter().find(|(word, _, _)| *word == typed));
    found.map(|(_, need, _)| *need).ok_or_else(|| "write a number from 1 to 5".to_owned())
}

fn rate(typed: &str) -> Result<Rate, String> {
    let help = || "write requests per second, minute, hour or day, as in `100/min`".to_owned();
    let (count, unit) = typed.split_once('/').ok_or_else(help)?;
    let count = count.trim().parse().ok().filter(|it| *it > 0).ok_or_else(help)?;
    let (unit, window, word) = match unit.trim() {
        "s" | "sec" | "second" => ("s", "1s", "second"),
        "m" | "min" | "minute" => ("min", "1m", "minute"),
        "h" | "hour" => ("h", "1h", "hour"),
        "d" | "day" => ("day", "1d", "day"),
        _ => return Err(help()),
    };
    Ok(Rate { count, unit, window, word })
}

fn key(typed: &str) -> Result<StarterKey, String> {
    match typed.split_once(':') {
        None if typed == "ip" => Ok(StarterKey::Ip),
        None if typed == "global" => Ok(StarterKey::Global),
        Some(("header", name)) if is_header(name.trim()) => Ok(StarterKey::Header(name.trim().to_owned())),
        _ => Err("write `ip`, `global`, or a header as in `header:X-User-Id`".to_owned()),
    }
}

/// Whether the text is a header name.
fn is_header(name: &str) -> bool {
    let is_token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    !name.is_empty() && name.chars().all(is_token)
}

fn upstream(typed: &str) -> Result<String, String> {
    match typed.starts_with("http://") || typed.starts_with("https://") {
        true => Ok(typed.to_owned()),
        false => Err("write a URL, as in `http://127.0.0.1:3000`".to_owned()),
    }
}

fn store(typed: &str) -> Result<Option<String>, String> {
    match typed {
        "memory" => Ok(None),
        address if address.contains("://") => Ok(Some(address.to_owned())),
        _ => Err("write `memory`, or an address as in `redis://127.0.0.1:6379`".to_owned()),
    }
}

fn instances(typed: &str) -> Result<u32, String> {
    let count = typed.parse().ok().filter(|it| (1..=INSTANCES_MAX).contains(it));
    count.ok_or_else(|| format!("write a whole number from 1 to {INSTANCES_MAX}"))
}

/// Text as a YAML value: quoted unless it is plain.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@".contains(c);
    match text.chars().all(is_plain) && !text.ends_with(':') {
        true => text.to_owned(),
        false => format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

    use super::*;

    #[test]
    fn every_combination_of_answers_is_a_valid_file_without_warnings() {
        let environment = FileEnvironment::of(Path::new(""), Files::default());
        for (_, need, _) in NEEDS {
            for typed in ["1/s", "100/min", "1000/hour", "5/d"] {
                for typed_key in ["ip", "global", "header:X-User-Id"] {
                    for typed_store in ["memory", "redis://127.0.0.1:6379"] {
                        let starter = Starter {
                            need,
                            rate: rate(typed).unwrap(),
                            key: key(typed_key).unwrap(),
                            upstream: upstream("http://127.0.0.1:3000").unwrap(),
                            redis: store(typed_store).unwrap().map(|address| (address, 3)),
                        };
                        let text = starter.text(FILE_DEFAULT);
                        match ratekeeper_config::parse(&text, &Placeholders(&environment)) {
                            Ok(config) => {
                                assert!(config.warnings.is_empty(), "{:?}\n{text}", config.warnings);
                            }
                            Err(errors) => panic!("{errors:?}\n{text}"),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn invalid_answers_are_rejected_with_an_example() {
        assert_eq!(need("6"), Err("write a number from 1 to 5".to_owned()));
        assert!(rate("100").unwrap_err().contains("`100/min`"));
        assert!(rate("0/s").is_err() && rate("1/fortnight").is_err());
        assert!(key("header:").unwrap_err().contains("`header:X-User-Id`"));
        assert!(key("header:X User").unwrap_err().contains("`header:X-User-Id`"));
        assert!(instances("0").is_err() && instances("100001").is_err() && instances("100000").is_ok());
        assert!(upstream("127.0.0.1:3000").unwrap_err().contains("`http://127.0.0.1:3000`"));
        assert!(store("redis").unwrap_err().contains("`redis://127.0.0.1:6379`"));
    }
}
