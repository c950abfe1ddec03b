//! The store.

use std::time::Duration;

use ratekeeper_core::FailurePolicy;

use crate::error::{known_instead, listed, quoted};
use crate::names;
use crate::outside::{Environment, Secret};
use crate::quantity;
use crate::reader::Reader;
use crate::rule::failure;
use crate::tree::{Node, Typed};
use crate::words;

/// Where limit state is stored.
#[derive(Clone, Debug)]
pub enum Store {
    /// In the memory of this process.
    Memory {
        /// Maximum number of active keys per limit.
        max_keys: Option<usize>,
        /// Maximum memory of all limits together, in bytes.
        max_bytes: Option<usize>,
        /// The decision for new keys while the store is full.
        when_full: Option<WhenFull>,
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

/// A Redis server and its settings. Unset fields use the defaults of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redis {
    /// The address, which may contain a password.
    pub address: Secret,
    /// The secret with which keys are hashed.
    pub secret: Option<Secret>,
    /// The namespace, which separates installations on the same server.
    pub namespace: Option<String>,
    /// Time limit of a decision.
    pub deadline: Option<Duration>,
    /// The failure policy: what decides while Redis is unavailable.
    pub failure: FailurePolicy,
    /// The number of connections.
    pub connections: Option<u32>,
    /// The certificate authority of the server, in PEM.
    pub authority: Option<Secret>,
    /// The client certificate and its key, in PEM.
    pub certificate: Option<(Secret, Secret)>,
}

const EXAMPLE: &str = "write `memory`, `redis://127.0.0.1:6379`, or `redis: { address: ..., secret: ... }`";
const TLS_EXAMPLE: &str = "write files, as in `tls: { ca: { file: ca.pem } }`";
const NODES_MAX: u32 = 100_000;
const CONNECTIONS_MAX: u32 = 1_000;
/// Maximum time limit of a decision.
const DEADLINES: [Duration; 2] = [Duration::from_millis(1), Duration::from_secs(60)];

/// Reads the store, and the number of instances that share it.
pub(crate) fn store(
    reader: &mut Reader,
    node: Option<&Node>,
    outside: &dyn Environment,
) -> (Option<Store>, u32) {
    let memory = Store::Memory { max_keys: None, max_bytes: None, when_full: None };
    let Some(node) = node else { return (Some(memory), 1) };
    if let Typed::Word(word) = &node.typed {
        return match word.as_str() {
            "memory" => (Some(memory), 1),
            word if word.contains("://") || word.contains("${") => {
                (address(reader, node, outside).map(plain_redis), 1)
            }
            word => {
                let what = format!("{} is not a store", quoted(word));
                reader.wrong(node.place, what, known_instead(word, &["memory"], EXAMPLE));
                (None, 1)
            }
        };
    }
    let Some(fields) = reader.fields(node, "store", names::STORE, EXAMPLE) else { return (None, 1) };
    match (fields.entry("memory"), fields.entry("redis")) {
        (Some(entry), None) => (self::memory(reader, entry.node), 1),
        (None, Some(entry)) if matches!(entry.node.typed, Typed::Nothing) => (None, 1),
        (None, Some(entry)) => redis(reader, entry.node, outside),
        (Some(_), Some(second)) => {
            reader.wrong(second.place, "this is a second store", "remove one of the two");
            (None, 1)
        }
        (None, None) => {
            // A misspelt name has been reported.
            if fields.iter().len() == 0 {
                reader.wrong(node.place, "this does not say which store", EXAMPLE);
            }
            (None, 1)
        }
    }
}

fn plain_redis(address: Secret) -> Store {
    Store::Redis(Box::new(Redis {
        address,
        secret: None,
        namespace: None,
        deadline: None,
        failure: FailurePolicy::default(),
        connections: None,
        authority: None,
        certificate: None,
    }))
}

/// Reads the address of Redis. Messages do not quote it, because it may contain a password.
fn address(reader: &mut Reader, node: &Node, outside: &dyn Environment) -> Option<Secret> {
    let address = reader.secret(node, "address", outside)?;
    let (scheme, rest) = address.reveal().split_once("://").unwrap_or_default();
    let choice = format!("an address begins with {} and `://`", listed(&words::SCHEMES, "or"));
    if !words::SCHEMES.contains(&scheme) {
        let instead = known_instead(scheme, &words::SCHEMES, &choice);
        let instead = if scheme.is_empty() {
            format!("write as in `redis://127.0.0.1:6379`; {choice}")
        } else {
            instead
        };
        reader.wrong(node.place, "this is not an address of Redis", instead);
        return None;
    }
    if rest.is_empty() {
        reader.wrong(node.place, "this address names no server", "write as in `redis://127.0.0.1:6379`");
        return None;
    }
    Some(address)
}

fn memory(reader: &mut Reader, node: &Node) -> Option<Store> {
    let fields =
        reader.fields(node, "memory", names::MEMORY, "write as in `memory: { max_keys: 100000 }`")?;
    let max_keys = fields.get("max_keys").and_then(|node| reader.number(node, "max_keys", 1..=u32::MAX));
    let max_bytes = fields.get("max_bytes").and_then(|node| reader.parsed(node, quantity::bytes));
    let when_full =
        fields.get("when_full").and_then(|node| reader.choice(node, "value of when_full", &words::WHEN_FULL));
    Some(Store::Memory { max_keys: max_keys.map(|keys| keys as usize), max_bytes, when_full })
}

fn redis(reader: &mut Reader, node: &Node, outside: &dyn Environment) -> (Option<Store>, u32) {
    let Some(fields) = reader.fields(node, "redis", names::REDIS, EXAMPLE) else { return (None, 1) };
    let nodes =
        reader.or(fields.get("instances"), 1, |reader, node| reader.number(node, "instances", 1..=NODES_MAX));
    if !fields.has("address") {
        reader.wrong(node.place, "redis has no address", EXAMPLE);
    }
    let address = fields.get("address").and_then(|node| address(reader, node, outside));
    let policy = reader.or(
        fields.get("on_store_failure"),
        FailurePolicy::Local { instances: nodes },
        |reader, node| failure(reader, node, nodes),
    );
    let secret = fields.get("secret").and_then(|node| reader.secret(node, "secret", outside));
    let namespace = fields.get("namespace").and_then(|node| reader.word(node)).map(str::to_owned);
    let [from, to] = DEADLINES;
    let deadline = fields.get("deadline").and_then(|node| reader.length(node, "a deadline", from, to));
    let connections =
        fields.get("connections").and_then(|node| reader.number(node, "connections", 1..=CONNECTIONS_MAX));
    let (authority, certificate) = match fields.get("tls") {
        Some(node) => tls(reader, node, outside),
        None => (None, None),
    };
    let store = address.map(|address| {
        let failure = policy;
        let redis =
            Redis { address, secret, namespace, deadline, failure, connections, authority, certificate };
        Store::Redis(Box::new(redis))
    });
    (store, nodes)
}

fn tls(
    reader: &mut Reader,
    node: &Node,
    outside: &dyn Environment,
) -> (Option<Secret>, Option<(Secret, Secret)>) {
    let Some(fields) = reader.fields(node, "tls", names::TLS, TLS_EXAMPLE) else { return (None, None) };
    if fields.has("certificate") != fields.has("key") {
        reader.wrong(node.place, "a certificate and its key belong together", TLS_EXAMPLE);
    }
    let mut pem = |name| fields.get(name).and_then(|node| reader.pem(node, name, outside));
    (pem("ca"), pem("certificate").zip(pem("key")))
}
