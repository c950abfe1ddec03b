//! Listeners of the gateway.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use crate::LISTENERS_MAX;
use crate::environment::Environment;
use crate::error::{Position, quoted};
use crate::quantity::ValueError;
use crate::reader::Reader;
use crate::table::{Field, FileText, Flag, ListOf, Listen, Or, SECTION, Section, Short};
use crate::tree::{Node, NodeValue};

/// A listener of the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The address. Port 0 selects a free port.
    pub address: SocketAddr,
    /// The certificate and key, if connections use TLS.
    pub tls: Option<Tls>,
    /// Whether each connection starts with a PROXY protocol header, which contains the client address. Only trusted
    /// proxies can then connect.
    pub proxy_protocol: bool,
}

/// The files of a certificate and its key. They have been checked, and are reloaded when they change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The file of the certificate, in PEM, followed by its intermediate certificates.
    pub certificate: PathBuf,
    /// The file of the private key, in PEM.
    pub key: PathBuf,
}

pub(super) const LISTEN: Field<Or<ListOf<Short<Listen>>>> = Field::new(
    "listen",
    "One or more addresses to listen on.",
    ListOf { item: Short(Listen, &LISTENER), from: 1, to: LISTENERS_MAX },
)
.or(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080));

static LISTENER: Section = Section {
    name: "listener",
    meaning: "Address with TLS and PROXY protocol settings.",
    example: "write as in `127.0.0.1:8080`, or `{ address: 0.0.0.0:8443, tls: { ... } }`",
    fields: &[&[
        &Field::new("address", "Address to listen on.", Listen).required(),
        &Field::section("tls", &LISTENER_TLS),
        &PROXY_PROTOCOL,
    ]],
    ..SECTION
};
const PROXY_PROTOCOL: Field<Or<Flag>> = Field::new(
    "proxy_protocol",
    "Whether each connection starts with a PROXY protocol header. Only connections from `client.trusted_proxies` are then accepted.",
    Flag,
)
.or(false);

static LISTENER_TLS: Section = Section {
    name: "listener_tls",
    meaning: "Certificate and private key, in PEM. Both are reloaded when they change.",
    example: "write files, as in `tls: { certificate: { file: cert.pem }, key: { file: key.pem } }`",
    fields: &[&[
        &Field::new("certificate", "Certificate, followed by its intermediate certificates.", FileText)
            .required(),
        &Field::new("key", "Private key of the certificate.", FileText).required(),
    ]],
    ..SECTION
};

pub(super) fn listeners(
    reader: &mut Reader,
    node: Option<&Node>,
    environment: &dyn Environment,
) -> Vec<Listener> {
    let defaults =
        Listener { address: LISTEN.default(), tls: None, proxy_protocol: PROXY_PROTOCOL.default() };
    let Some(node) = node else {
        reader.listening.push((defaults.address, Position::default()));
        return vec![defaults];
    };
    let nodes = reader.some(node, LISTENER.example);
    if nodes.len() > LISTENERS_MAX {
        let message = format!("too many listeners: {} of at most {LISTENERS_MAX}", nodes.len());
        reader.error(node.position, message, "listen on all addresses of a port, as in `0.0.0.0:8080`");
        return Vec::new();
    }
    nodes.into_iter().filter_map(|node| listener(reader, node, environment)).collect()
}

fn listener(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Listener> {
    if !matches!(node.value, NodeValue::Map(_)) {
        let address = listen_address(reader, node, address)?;
        return Some(Listener { address, tls: None, proxy_protocol: PROXY_PROTOCOL.default() });
    }
    let fields = reader.fields(node, "`listen`", &LISTENER)?;
    reader.require(&fields);
    let address = fields.get("address").and_then(|node| listen_address(reader, node, address));
    let tls = fields.get("tls").map(|node| tls(reader, node, environment));
    let proxy_protocol = reader.or(fields.get("proxy_protocol"), PROXY_PROTOCOL.default(), proxy_protocol);
    // A listener with invalid TLS settings must not become a listener without TLS.
    let tls = match tls {
        Some(tls) => Some(tls?),
        None => None,
    };
    Some(Listener { address: address?, tls, proxy_protocol })
}

/// A peer that may send a PROXY header chooses its client address, so trusted proxies are required.
fn proxy_protocol(reader: &mut Reader, node: &Node) -> Option<bool> {
    let is_spoken = PROXY_PROTOCOL.parse(reader, node)?;
    if is_spoken && !reader.has_proxies {
        let message = "`proxy_protocol` needs `trusted_proxies`: no other peer may connect";
        let help = "write the networks of your proxies at the top level, as in `client: { trusted_proxies: [10.0.0.0/8] }`";
        reader.error(node.position, message, help);
    }
    Some(is_spoken)
}

/// Reads an address to listen on, and rejects one that the file already uses.
pub(crate) fn listen_address(
    reader: &mut Reader,
    node: &Node,
    parse: impl FnOnce(&str) -> Result<SocketAddr, ValueError>,
) -> Option<SocketAddr> {
    let address = reader.parsed(node, parse)?;
    // Each port 0 selects a different port.
    let first = reader.listening.iter().find(|(other, _)| address.port() != 0 && *other == address);
    if let Some((_, first)) = first.copied() {
        reader.duplicate(
            node.position,
            first,
            format!("duplicate listen address {}", quoted(&address.to_string())),
        );
        return None;
    }
    reader.listening.push((address, node.position));
    Some(address)
}

fn address(word: &str) -> Result<SocketAddr, ValueError> {
    word.parse().map_err(|_| {
        let port = word.rsplit(':').next().filter(|port| port.parse::<u16>().is_ok()).unwrap_or("8080");
        ValueError {
            message: format!("invalid listen address {}", quoted(word)),
            help: format!(
                "write an IP address and a port, as in `127.0.0.1:{port}`, or `0.0.0.0:{port}` for all interfaces"
            ),
        }
    })
}

fn tls(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Tls> {
    let fields = reader.fields(node, "`tls`", &LISTENER_TLS)?;
    if fields.lacks("certificate") || fields.lacks("key") {
        reader.error(node.position, "`certificate` and `key` must both be set", LISTENER_TLS.example);
    }
    let certificate = fields
        .get("certificate")
        .and_then(|node| pem(reader, node, "certificate", is_certificate, environment));
    let key = fields.get("key").and_then(|node| pem(reader, node, "key", is_key, environment));
    Some(Tls { certificate: certificate?, key: key? })
}

/// Reads a reference to a PEM file and checks its content. It must be a file because it is reloaded.
fn pem(
    reader: &mut Reader,
    node: &Node,
    name: &str,
    check: fn(&str) -> Result<(), ValueError>,
    environment: &dyn Environment,
) -> Option<PathBuf> {
    if !matches!(node.value, NodeValue::Map(_)) {
        reader.hide(node);
        let message = format!("`{name}` must be a file, because it is reloaded when it changes");
        reader.error(
            node.position,
            message,
            format!("write its path, as in `{name}: {{ file: {name}.pem }}`"),
        );
        return None;
    }
    let (path, text) = reader.file(node, name, environment)?;
    if let Err(value_error) = check(&text) {
        reader.value_error(node, value_error);
        return None;
    }
    Some(path)
}

fn is_certificate(text: &str) -> Result<(), ValueError> {
    match text.contains("-----BEGIN CERTIFICATE-----") {
        true => Ok(()),
        false => Err(ValueError {
            message: "the file contains no certificate".to_owned(),
            help: "write a PEM file that contains `-----BEGIN CERTIFICATE-----`".to_owned(),
        }),
    }
}

fn is_key(text: &str) -> Result<(), ValueError> {
    let (message, help) = if text.contains("-----BEGIN ENCRYPTED ") || text.contains("Proc-Type: 4,ENCRYPTED")
    {
        (
            "the key is encrypted with a passphrase",
            "remove the passphrase, as in `openssl pkey -in key.pem -out plain.pem`",
        )
    } else if text.contains("PRIVATE KEY-----") {
        return Ok(());
    } else {
        ("the file contains no private key", "write a PEM file that contains `-----BEGIN PRIVATE KEY-----`")
    };
    Err(ValueError { message: message.to_owned(), help: help.to_owned() })
}
