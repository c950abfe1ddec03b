//! The store.

use std::time::Duration;

use ratekeeper_core::FailurePolicy;

use crate::environment::{Environment, RedisAddressError, Secret};
use crate::error::{known_help, listed, quoted};
use crate::reader::Reader;
use crate::rule::failure_policy;
use crate::table::{
    Constraint, Field, MemorySize, Or, SECTION, SecretText, Section, Time, WORD, Whole, Words, ms, secs,
};
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
    /// The number of connections of each tokio runtime; by default one for each of its threads.
    pub connections: Option<u32>,
    /// The certificate authority of the server, in PEM.
    pub ca: Option<Secret>,
    /// The client certificate and its key, in PEM.
    pub certificate: Option<(Secret, Secret)>,
}

pub(crate) static STORE: Section = Section {
    name: "store",
    meaning: "Store type with its settings.",
    example: EXAMPLE,
    fields: &[&[&Field::of(&MEMORY), &Field::of(&REDIS)]],
    constraints: &[Constraint::ExactlyOne(&[&["memory", "redis"]])],
    ..SECTION
};

static MEMORY: Section = Section {
    name: "memory",
    meaning: "Store in the memory of this process.",
    example: "write as in `memory: { max_keys: 100000 }`",
    fields: &[&[&MAX_KEYS, &MAX_BYTES, &WHEN_FULL]],
    may_be_empty: true,
    ..SECTION
};
const MAX_KEYS: Field<Or<Whole>> =
    Field::new("max_keys", "Maximum number of active keys per limit.", Whole { from: 1, to: u32::MAX })
        .or(1_000_000);
const MAX_BYTES: Field<Or<MemorySize>> =
    Field::new("max_bytes", "Maximum memory of all limits together, such as `64MiB`.", MemorySize)
        .or(1 << 30);
const WHEN_FULL: Field<Or<Words<WhenFull>>> = Field::new(
    "when_full",
    "Decision for new keys while the store is full. `share`: they share one budget. `deny`: they are denied. `allow`: they are allowed.",
    Words(&words::WHEN_FULL),
)
.or(WhenFull::Share);

static REDIS: Section = Section {
    name: "redis",
    meaning: "Redis store, shared by several instances.",
    example: EXAMPLE,
    fields: &[&[
        &ADDRESS,
        &Field::new("secret", "Secret with which keys are hashed before they are stored.", SecretText),
        &Field::new(
            "namespace",
            "Prefix that separates this installation from others on the same server.",
            WORD,
        ),
        &DEADLINE,
        &ON_STORE_FAILURE,
        &INSTANCES,
        &CONNECTIONS,
        &Field::section("tls", &TLS),
    ]],
    constraints: &[Constraint::NeedsIf("on_store_failure", "local", "instances")],
    ..SECTION
};
const ADDRESS: Field<SecretText> = Field::new(
    "address",
    "Address: `redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://` or `rediss+cluster://`.",
    SecretText,
)
.required();
const DEADLINE: Field<Or<Time>> = Field::new(
    "deadline",
    "Time limit of a decision. The failure policy decides after it.",
    Time { subject: "a deadline", from: ms(1), to: secs(60) },
)
.or(FailurePolicy::DEADLINE_DEFAULT);
const ON_STORE_FAILURE: Field<Or<Words<FailurePolicy>>> =
    Field::new("on_store_failure", FAILURE_POLICY, Words(&words::FAILURES))
        .or(FailurePolicy::Local { instances: 1 });
const INSTANCES: Field<Whole> = Field::new(
    "instances",
    "Number of instances that share the limits. Required if `on_store_failure: local` is written. Without both, the policy is `local` with one instance, and a warning says that each instance allows the whole limit.",
    Whole { from: 1, to: 100_000 },
);
pub(crate) const CONNECTIONS: Field<Whole> =
    Field::new("connections", "Connections of each worker thread of the gateway, and of the threads of the APIs together, to each server.", Whole { from: 1, to: 1_000 })
        .otherwise("one per thread");

pub(crate) static TLS: Section = Section {
    name: "tls",
    meaning: "TLS certificates, in PEM.",
    example: "write files, as in `tls: { ca: { file: ca.pem } }`",
    fields: &[&[
        &Field::new("ca", "Certificate authority of the server.", SecretText),
        &Field::new("certificate", "Client certificate.", SecretText),
        &Field::new("key", "Private key of the certificate.", SecretText),
    ]],
    constraints: &[Constraint::Needs("certificate", "key"), Constraint::Needs("key", "certificate")],
    ..SECTION
};

/// The meaning of the failure policy, of the store and of a limit.
pub(crate) const FAILURE_POLICY: &str = "Failure policy: decides while the store is unavailable. `local`: each instance enforces its share of the limit. `open`: all requests are allowed. `closed`: all requests are denied.";
const EXAMPLE: &str = "write `memory`, `redis://127.0.0.1:6379`, or `redis: { address: ..., secret: ... }`";
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

/// Reads the store, and the number of instances that share it, if it is known.
pub(crate) fn store(
    reader: &mut Reader,
    node: Option<&Node>,
    environment: &dyn Environment,
) -> (Option<Store>, Option<u32>) {
    let memory = Store::Memory {
        max_keys: MAX_KEYS.default() as usize,
        max_bytes: MAX_BYTES.default(),
        when_full: WHEN_FULL.default(),
    };
    let Some(node) = node else { return (Some(memory), Some(1)) };
    if let NodeValue::Word(word) = &node.value {
        return match word.as_str() {
            "memory" => (Some(memory), Some(1)),
            word if word.contains("://") || word.contains("${") => (plain(reader, node, environment), None),
            word => {
                let message = format!("{} is not a store", quoted(word));
                reader.error(node.position, message, known_help(word, &["memory"], STORE.example));
                (None, Some(1))
            }
        };
    }
    let Some(fields) = reader.fields(node, "`store`", &STORE) else { return (None, Some(1)) };
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
                reader.error(node.position, "`store` is empty", STORE.example);
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
        deadline: DEADLINE.default(),
        failure: ON_STORE_FAILURE.default(),
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
    let fields = reader.fields(node, "`memory`", &MEMORY)?;
    Some(Store::Memory {
        max_keys: MAX_KEYS.read(reader, &fields) as usize,
        max_bytes: MAX_BYTES.read(reader, &fields),
        when_full: WHEN_FULL.read(reader, &fields),
    })
}

fn redis(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> (Option<Store>, Option<u32>) {
    let Some(fields) = reader.fields(node, "`redis`", &REDIS) else { return (None, Some(1)) };
    let instances = INSTANCES.optional(reader, &fields);
    // An invalid number has been reported.
    let instances = instances.or((!fields.lacks("instances")).then_some(1));
    reader.require(&fields);
    let address = fields.get("address").and_then(|node| address(reader, node, environment));
    let failure = fields.get("on_store_failure").and_then(|node| failure_policy(reader, node, instances));
    let failure = failure.unwrap_or_else(|| match (ON_STORE_FAILURE.default(), instances) {
        (FailurePolicy::Local { .. }, Some(instances)) => FailurePolicy::Local { instances },
        (policy, _) => policy,
    });
    if instances.is_none() && !fields.has("on_store_failure") {
        reader.warn(node.position, NO_INSTANCES, INSTANCES_HELP);
    }
    let secret = fields.get("secret").and_then(|node| secret(reader, node, environment));
    if !fields.has("secret") {
        reader.warn(node.position, NO_SECRET, SECRET_HELP);
    }
    let namespace = fields.get("namespace").and_then(|node| reader.word(node)).map(str::to_owned);
    let deadline = DEADLINE.read(reader, &fields);
    let connections = CONNECTIONS.optional(reader, &fields);
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
    let Some(fields) = reader.fields(node, "`tls`", &TLS) else { return (None, None) };
    if fields.lacks("certificate") != fields.lacks("key") {
        reader.error(node.position, "`certificate` and `key` must both be set", TLS.example);
    }
    let mut pem = |name| fields.get(name).and_then(|node| reader.pem(node, name, environment));
    (pem("ca"), pem("certificate").zip(pem("key")))
}
