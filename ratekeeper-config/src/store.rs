//! The store.

use std::time::Duration;

use ratekeeper_core::FailurePolicy;

use crate::environment::{Environment, RedisAddressError, Secret};
use crate::error::{known_help, listed, quoted};
use crate::names;
use crate::quantity;
use crate::reader::Reader;
use crate::rule::failure_policy;
use crate::tree::{Node, NodeValue};
use crate::words;

/// Where limit state is stored.
#[derive(Clone, Debug)]
pub enum Store {
    /// In the memory of this process.
    Memory {
        /// Maximum number of active keys per limit.
        max_keys: usize,
        /// Maximum memory of all limits together, in bytes.
        max_bytes: usize,
        /// The decision for new keys while the store is full.
        when_full: WhenFull,
    },
    /// In Redis.
    Redis(Box<Redis>),
}

/// The decision for new keys while the memory store is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// New keys share one budget.
    Share,
    /// New keys are denied.
    Deny,
    /// New keys are allowed.
    Allow,
}

/// A Redis server and its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redis {
    /// The address, which may contain a password.
    pub address: Secret,
    /// The secret with which keys are hashed.
    pub secret: Option<Secret>,
    /// The namespace, which separates installations on the same server.
    pub namespace: Option<String>,
    /// Time limit of a decision.
    pub deadline: Duration,
    /// The failure policy: what decides while Redis is unavailable.
    pub failure: FailurePolicy,
    /// The number of connections.
    pub connections: Option<u32>,
    /// The certificate authority of the server, in PEM.
    pub ca: Option<Secret>,
    /// The client certificate and its key, in PEM.
    pub certificate: Option<(Secret, Secret)>,
}

const EXAMPLE: &str = "write `memory`, `redis://127.0.0.1:6379`, or `redis: { address: ..., secret: ... }`";
const TLS_EXAMPLE: &str = "write files, as in `tls: { ca: { file: ca.pem } }`";
const NO_SECRET: &str =
    "keys are stored without a secret: a reader of Redis can find out user names and addresses";
const SECRET_HELP: &str =
    "write the same secret for all instances, as in `redis: { address: ..., secret: ${RATEKEEPER_SECRET} }`";
const NO_INSTANCES: &str =
    "`instances` is not set: while Redis is unavailable, each instance allows the whole limit";
const INSTANCES_HELP: &str =
    "write how many instances share the limits, as in `redis: { address: ..., instances: 3 }`";
/// A shorter secret can be found by trial.
const SECRET_BYTES_MIN: usize = 16;
const MAX_KEYS_DEFAULT: u32 = 1_000_000;
const MAX_BYTES_DEFAULT: usize = 1 << 30;
const DEADLINE_DEFAULT: Duration = Duration::from_millis(20);
const INSTANCES_MAX: u32 = 100_000;
const CONNECTIONS_MAX: u32 = 1_000;
/// Maximum time limit of a decision.
const DEADLINES: [Duration; 2] = [Duration::from_millis(1), Duration::from_secs(60)];

/// Reads the store, and the number of instances that share it, if it is known.
pub(crate) fn store(
    reader: &mut Reader,
    node: Option<&Node>,
    environment: &dyn Environment,
) -> (Option<Store>, Option<u32>) {
    let memory = Store::Memory {
        max_keys: MAX_KEYS_DEFAULT as usize,
        max_bytes: MAX_BYTES_DEFAULT,
        when_full: WhenFull::Share,
    };
    let Some(node) = node else { return (Some(memory), Some(1)) };
    if let NodeValue::Word(word) = &node.value {
        return match word.as_str() {
            "memory" => (Some(memory), Some(1)),
            word if word.contains("://") || word.contains("${") => (plain(reader, node, environment), None),
            word => {
                let message = format!("{} is not a store", quoted(word));
                reader.error(node.position, message, known_help(word, &["memory"], EXAMPLE));
                (None, Some(1))
            }
        };
    }
    let Some(fields) = reader.fields(node, "`store`", names::STORE, EXAMPLE) else { return (None, Some(1)) };
    match (fields.entry("memory"), fields.entry("redis")) {
        (Some(entry), None) => (self::memory(reader, entry.node), Some(1)),
        (None, Some(entry)) if matches!(entry.node.value, NodeValue::Nothing) => (None, Some(1)),
        (None, Some(entry)) => redis(reader, entry.node, environment),
        (Some(_), Some(second)) => {
            reader.error(second.position, "the file has two stores", "remove one of the two");
            (None, Some(1))
        }
        (None, None) => {
            // A misspelt name has been reported.
            if fields.iter().len() == 0 {
                reader.error(node.position, "`store` is empty", EXAMPLE);
            }
            (None, Some(1))
        }
    }
}

/// Redis by its address alone.
fn plain(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Store> {
    let address = address(reader, node, environment)?;
    reader.warn(node.position, NO_SECRET, SECRET_HELP);
    reader.warn(node.position, NO_INSTANCES, INSTANCES_HELP);
    Some(Store::Redis(Box::new(Redis {
        address,
        secret: None,
        namespace: None,
        deadline: DEADLINE_DEFAULT,
        failure: FailurePolicy::default(),
        connections: None,
        ca: None,
        certificate: None,
    })))
}

/// Reads the address of Redis. Messages do not quote it, because it may contain a password.
fn address(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Secret> {
    let address = reader.secret(node, "address", environment)?;
    let scheme = address.reveal().split_once("://").map_or("", |(scheme, _)| scheme);
    let choice = format!("Schemes: {}", listed(&words::SCHEMES));
    if !words::SCHEMES.contains(&scheme) {
        let help = known_help(scheme, &words::SCHEMES, &choice);
        let help =
            if scheme.is_empty() { format!("write as in `redis://127.0.0.1:6379`. {choice}") } else { help };
        reader.error(node.position, "invalid Redis address", help);
        return None;
    }
    if let Err(RedisAddressError { reason, example }) = environment.check_redis_address(address.reveal()) {
        reader.error(node.position, reason, format!("write as in `{example}`"));
        return None;
    }
    Some(address)
}

fn secret(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Secret> {
    let secret = reader.secret(node, "secret", environment)?;
    let bytes = secret.reveal().len();
    if bytes < SECRET_BYTES_MIN {
        let message = format!("the secret has {bytes} bytes and could be guessed");
        let help = format!("use at least {SECRET_BYTES_MIN} random bytes, as from `openssl rand -hex 32`");
        reader.warn(node.position, message, help);
    }
    Some(secret)
}

fn memory(reader: &mut Reader, node: &Node) -> Option<Store> {
    let fields =
        reader.fields(node, "`memory`", names::MEMORY, "write as in `memory: { max_keys: 100000 }`")?;
    let max_keys = reader.or(fields.get("max_keys"), MAX_KEYS_DEFAULT, |reader, node| {
        reader.number(node, "max_keys", 1..=u32::MAX)
    });
    let max_bytes = reader
        .or(fields.get("max_bytes"), MAX_BYTES_DEFAULT, |reader, node| reader.parsed(node, quantity::bytes));
    let when_full = reader.or(fields.get("when_full"), WhenFull::Share, |reader, node| {
        reader.choice(node, "when_full", &words::WHEN_FULL)
    });
    Some(Store::Memory { max_keys: max_keys as usize, max_bytes, when_full })
}

fn redis(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> (Option<Store>, Option<u32>) {
    let Some(fields) = reader.fields(node, "`redis`", names::REDIS, EXAMPLE) else { return (None, Some(1)) };
    let instances =
        fields.get("instances").and_then(|node| reader.number(node, "instances", 1..=INSTANCES_MAX));
    // An invalid number has been reported.
    let instances = instances.or((!fields.lacks("instances")).then_some(1));
    reader.require(&fields, &["address"], EXAMPLE);
    let address = fields.get("address").and_then(|node| address(reader, node, environment));
    let default = FailurePolicy::Local { instances: instances.unwrap_or(1) };
    let failure = reader
        .or(fields.get("on_store_failure"), default, |reader, node| failure_policy(reader, node, instances));
    if instances.is_none() && !fields.has("on_store_failure") {
        reader.warn(node.position, NO_INSTANCES, INSTANCES_HELP);
    }
    let secret = fields.get("secret").and_then(|node| secret(reader, node, environment));
    if !fields.has("secret") {
        reader.warn(node.position, NO_SECRET, SECRET_HELP);
    }
    let namespace = fields.get("namespace").and_then(|node| reader.word(node)).map(str::to_owned);
    let [from, to] = DEADLINES;
    let deadline = reader.or(fields.get("deadline"), DEADLINE_DEFAULT, |reader, node| {
        reader.length(node, "a deadline", from, to)
    });
    let connections =
        fields.get("connections").and_then(|node| reader.number(node, "connections", 1..=CONNECTIONS_MAX));
    let (ca, certificate) = match fields.get("tls") {
        Some(node) => tls(reader, node, environment),
        None => (None, None),
    };
    let store = address.map(|address| {
        let redis = Redis { address, secret, namespace, deadline, failure, connections, ca, certificate };
        Store::Redis(Box::new(redis))
    });
    (store, instances)
}

fn tls(
    reader: &mut Reader,
    node: &Node,
    environment: &dyn Environment,
) -> (Option<Secret>, Option<(Secret, Secret)>) {
    let Some(fields) = reader.fields(node, "`tls`", names::TLS, TLS_EXAMPLE) else { return (None, None) };
    if fields.lacks("certificate") != fields.lacks("key") {
        reader.error(node.position, "`certificate` and `key` must both be set", TLS_EXAMPLE);
    }
    let mut pem = |name| fields.get(name).and_then(|node| reader.pem(node, name, environment));
    (pem("ca"), pem("certificate").zip(pem("key")))
}
