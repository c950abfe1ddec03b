//! Listeners of the gateway.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::LISTENERS_MAX;
use crate::error::{Place, quoted};
use crate::names;
use crate::outside::Environment;
use crate::quantity::Fault;
use crate::reader::Reader;
use crate::tree::{Node, Typed};

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

const EXAMPLE: &str = "write as in `127.0.0.1:8080`, or `{ address: 0.0.0.0:8443, tls: { ... } }`";
const TLS_EXAMPLE: &str =
    "write files, as in `tls: { certificate: { file: cert.pem }, key: { file: key.pem } }`";
const DEFAULT: ([u8; 4], u16) = ([127, 0, 0, 1], 8080);

pub(super) fn listeners(
    reader: &mut Reader,
    node: Option<&Node>,
    outside: &dyn Environment,
) -> Vec<Listener> {
    let usual = Listener { address: DEFAULT.into(), tls: None, proxy_protocol: false };
    let Some(node) = node else {
        reader.listening.push((usual.address, Place::default()));
        return vec![usual];
    };
    let nodes = reader.some(node, EXAMPLE);
    if nodes.len() > LISTENERS_MAX {
        let what = format!("there are {} addresses, and a gateway has at most {LISTENERS_MAX}", nodes.len());
        reader.wrong(node.place, what, "listen on all addresses of a port at once, as in `0.0.0.0:8080`");
        return Vec::new();
    }
    nodes.into_iter().filter_map(|node| listener(reader, node, outside)).collect()
}

fn listener(reader: &mut Reader, node: &Node, outside: &dyn Environment) -> Option<Listener> {
    if !matches!(node.typed, Typed::Map(_)) {
        let address = address_taken(reader, node, address)?;
        return Some(Listener { address, tls: None, proxy_protocol: false });
    }
    let fields = reader.fields(node, "listen", names::LISTENER, EXAMPLE)?;
    if fields.lacks("address") {
        reader.wrong(node.place, "this does not say where to listen", EXAMPLE);
    }
    let address = fields.get("address").and_then(|node| address_taken(reader, node, address));
    let tls = fields.get("tls").map(|node| tls(reader, node, outside));
    let proxy_protocol = reader.or(fields.get("proxy_protocol"), false, proxy_protocol);
    // A listener with invalid TLS settings must not become a listener without TLS.
    let tls = match tls {
        Some(tls) => Some(tls?),
        None => None,
    };
    Some(Listener { address: address?, tls, proxy_protocol })
}

/// A peer that may send a PROXY header chooses its client address, so trusted proxies are required.
fn proxy_protocol(reader: &mut Reader, node: &Node) -> Option<bool> {
    let is_spoken = reader.yes_or_no(node, "proxy_protocol")?;
    if is_spoken && !reader.has_proxies {
        let what = "nobody is trusted, so nobody could connect here";
        let instead = "write whose PROXY header counts, at the top of the file, as in `client: { trusted_proxies: [10.0.0.0/8] }`";
        reader.wrong(node.place, what, instead);
    }
    Some(is_spoken)
}

/// Reads an address to listen on, and rejects one that the file already uses.
pub(crate) fn address_taken(
    reader: &mut Reader,
    node: &Node,
    parse: impl FnOnce(&str) -> Result<SocketAddr, Fault>,
) -> Option<SocketAddr> {
    let address = reader.parsed(node, parse)?;
    // Each port 0 selects a different port.
    if address.port() != 0 && reader.listening.iter().any(|(other, _)| *other == address) {
        let what = format!("{} is listened on already", quoted(&address.to_string()));
        reader.wrong(node.place, what, "remove it, or write another port");
        return None;
    }
    reader.listening.push((address, node.place));
    Some(address)
}

fn address(word: &str) -> Result<SocketAddr, Fault> {
    word.parse().map_err(|_| {
        let port = word.rsplit(':').next().filter(|port| port.parse::<u16>().is_ok()).unwrap_or("8080");
        Fault {
            what: format!("{} is not an address to listen on", quoted(word)),
            instead: format!(
                "write an IP address and a port, as in `127.0.0.1:{port}`; `0.0.0.0:{port}` is for everybody"
            ),
        }
    })
}

fn tls(reader: &mut Reader, node: &Node, outside: &dyn Environment) -> Option<Tls> {
    let fields = reader.fields(node, "tls", names::LISTENER_TLS, TLS_EXAMPLE)?;
    if !fields.has("certificate") || !fields.has("key") {
        reader.wrong(node.place, "a certificate and its key belong together", TLS_EXAMPLE);
    }
    let certificate =
        fields.get("certificate").and_then(|node| pem(reader, node, "certificate", is_certificate, outside));
    let key = fields.get("key").and_then(|node| pem(reader, node, "key", is_key, outside));
    Some(Tls { certificate: certificate?, key: key? })
}

/// Reads a reference to a PEM file and checks its content. It must be a file because it is reloaded.
fn pem(
    reader: &mut Reader,
    node: &Node,
    name: &str,
    check: fn(&str) -> Result<(), Fault>,
    outside: &dyn Environment,
) -> Option<PathBuf> {
    if !matches!(node.typed, Typed::Map(_)) {
        reader.secrets.push(node.place);
        let what = format!("the {name} is read again when it changes, and so it must be a file");
        reader.wrong(node.place, what, format!("write its path, as in `{name}: {{ file: {name}.pem }}`"));
        return None;
    }
    let (path, text) = reader.file(node, name, outside)?;
    if let Err(fault) = check(&text) {
        reader.fault(node, fault);
        return None;
    }
    Some(path)
}

fn is_certificate(text: &str) -> Result<(), Fault> {
    match text.contains("-----BEGIN CERTIFICATE-----") {
        true => Ok(()),
        false => Err(Fault {
            what: "there is no certificate in this file".to_owned(),
            instead: "write a file in PEM, with `-----BEGIN CERTIFICATE-----`".to_owned(),
        }),
    }
}

fn is_key(text: &str) -> Result<(), Fault> {
    let (what, instead) = if text.contains("-----BEGIN ENCRYPTED ") || text.contains("Proc-Type: 4,ENCRYPTED")
    {
        (
            "this key has a passphrase, and nobody is there to type it",
            "take it off, as in `openssl pkey -in key.pem -out plain.pem`",
        )
    } else if text.contains("PRIVATE KEY-----") {
        return Ok(());
    } else {
        ("there is no private key in this file", "write a file in PEM, with `-----BEGIN PRIVATE KEY-----`")
    };
    Err(Fault { what: what.to_owned(), instead: instead.to_owned() })
}
