//! Where limits are kept.

use std::time::Duration;

use tollgate_core::Failure;

use crate::error::{known_instead, listed, quoted};
use crate::names;
use crate::outside::{Outside, Secret};
use crate::quantity;
use crate::reader::Reader;
use crate::rule::failure;
use crate::tree::{Node, Typed};
use crate::words;

/// Where limits are kept.
#[derive(Clone, Debug)]
pub enum Store {
    /// In this process.
    Memory {
        /// Room for so many keys of each limit.
        max_keys: Option<usize>,
        /// Bytes for all of them.
        max_bytes: Option<usize>,
        /// What is answered when there is no room.
        when_full: Option<WhenFull>,
    },
    /// In Redis.
    Redis(Box<Redis>),
}

/// What a store answers that has no room for another key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// Those without a place share a budget.
    Share,
    /// They are denied.
    Deny,
    /// They are allowed.
    Allow,
}

/// A Redis server, and how it is used. What is not said is as the store has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redis {
    /// Where it is; it may hold a password.
    pub address: Secret,
    /// With which keys are hashed.
    pub secret: Option<Secret>,
    /// Apart from others on the same server.
    pub namespace: Option<String>,
    /// How long a decision may take.
    pub deadline: Option<Duration>,
    /// What is decided while it does not answer.
    pub failure: Failure,
    /// How many connections.
    pub connections: Option<u32>,
    /// The authority that signs its certificate, in PEM.
    pub authority: Option<Secret>,
    /// A certificate of our own and its key, in PEM.
    pub certificate: Option<(Secret, Secret)>,
}

const EXAMPLE: &str = "write `memory`, `redis://127.0.0.1:6379`, or `redis: { address: ..., secret: ... }`";
const TLS_EXAMPLE: &str = "write files, as in `tls: { authority: { file: ca.pem } }`";
const NODES_MAX: u32 = 100_000;
const CONNECTIONS_MAX: u32 = 1_000;
/// How long a decision may take: longer is no decision any more.
const DEADLINES: [Duration; 2] = [Duration::from_millis(1), Duration::from_secs(60)];

/// The store, and how many processes share it.
pub(crate) fn store(reader: &mut Reader, node: Option<&Node>, outside: &dyn Outside) -> (Option<Store>, u32) {
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
            // Whoever has misspelt one has been told.
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
        failure: Failure::default(),
        connections: None,
        authority: None,
        certificate: None,
    }))
}

/// Where Redis is. What is wrong with it is told without it: it may hold a password.
fn address(reader: &mut Reader, node: &Node, outside: &dyn Outside) -> Option<Secret> {
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

fn redis(reader: &mut Reader, node: &Node, outside: &dyn Outside) -> (Option<Store>, u32) {
    let Some(fields) = reader.fields(node, "redis", names::REDIS, EXAMPLE) else { return (None, 1) };
    let nodes = reader.or(fields.get("nodes"), 1, |reader, node| reader.number(node, "nodes", 1..=NODES_MAX));
    if !fields.has("address") {
        reader.wrong(node.place, "redis has no address", EXAMPLE);
    }
    let address = fields.get("address").and_then(|node| address(reader, node, outside));
    let policy = reader
        .or(fields.get("failure"), Failure::Local { nodes }, |reader, node| failure(reader, node, nodes));
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
    outside: &dyn Outside,
) -> (Option<Secret>, Option<(Secret, Secret)>) {
    let Some(fields) = reader.fields(node, "tls", names::TLS, TLS_EXAMPLE) else { return (None, None) };
    if fields.has("certificate") != fields.has("key") {
        reader.wrong(node.place, "a certificate and its key belong together", TLS_EXAMPLE);
    }
    let mut pem = |name| fields.get(name).and_then(|node| reader.pem(node, name, outside));
    (pem("authority"), pem("certificate").zip(pem("key")))
}
