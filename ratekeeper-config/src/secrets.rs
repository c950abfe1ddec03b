//! Finds the words of a file that may be secrets, so that messages mask them.
//!
//! Runs before the file is read: a secret may stand under a misspelt name, or where no secret belongs. In sections that
//! take secrets, each word is masked unless it stands under the name of another setting or cannot be a secret.

use std::net::SocketAddr;

use crate::file::DOCUMENT;
use crate::mask::{is_plain_address, is_reference};
use crate::nearest::nearest;
use crate::reader::{HiddenWord, Reader};
use crate::syntax::written_with_colon;
use crate::tree::{Node, NodeValue};

/// What a setting may hold.
#[derive(Clone, Copy)]
enum Content {
    /// Nothing that is secret.
    Plain,
    /// An address to listen on.
    ListenAddress,
    /// A secret, or `{ file: path }`.
    Secret,
    /// A mapping with these settings, or a word in its place.
    Section(&'static [(&'static str, Content)]),
    /// A gateway, which has secrets in `tls` only, at any depth.
    Gateway,
}

use Content::{Gateway, ListenAddress, Plain, Secret, Section};

const FILE: &[(&str, Content)] = &[
    ("store", Section(STORE)),
    ("jwt", Section(JWT)),
    ("apis", Section(APIS)),
    ("admin", Section(API)),
    ("gateway", Gateway),
    // Settings in the wrong place.
    ("redis", Section(REDIS)),
    ("tls", Section(TLS)),
    ("http", Section(API)),
    ("envoy", Section(API)),
    ("resp", Section(API)),
    ("token", Secret),
    ("secret", Secret),
];
const STORE: &[(&str, Content)] = &[("memory", Plain), ("redis", Section(REDIS))];
const REDIS: &[(&str, Content)] = &[
    ("address", Secret),
    ("secret", Secret),
    ("namespace", Plain),
    ("deadline", Plain),
    ("on_store_failure", Plain),
    ("instances", Plain),
    ("connections", Plain),
    ("tls", Section(TLS)),
];
const TLS: &[(&str, Content)] = &[("ca", Secret), ("certificate", Secret), ("key", Secret)];
const JWT: &[(&str, Content)] =
    &[("keys", Secret), ("header", Plain), ("issuer", Plain), ("audience", Plain), ("algorithms", Plain)];
const APIS: &[(&str, Content)] = &[("http", Section(API)), ("envoy", Section(API)), ("resp", Section(API))];
/// The settings of all APIs and of the admin listener.
const API: &[(&str, Content)] = &[
    ("listen", ListenAddress),
    ("token", Secret),
    ("refunds", Plain),
    ("resets", Plain),
    ("authorize", Plain),
    ("headers", Plain),
    ("header_names", Plain),
    ("max_connections", Plain),
];
const SECTIONS: [&[(&str, Content)]; 6] = [STORE, REDIS, TLS, JWT, APIS, API];

/// Names that are often written in place of `file`.
const FILE_MISTAKES: [&str; 4] = ["path", "env", "value", "name"];
/// Words that are settings, not secrets.
const PLAIN_WORDS: [&str; 6] = ["true", "false", "on", "off", "memory", "localhost"];

/// Marks every word of a file that may be a secret.
pub(crate) fn mark(reader: &mut Reader, file: &Node) {
    for (name, node) in file.entries() {
        let known: Vec<&str> = FILE.iter().map(|(name, _)| *name).chain(DOCUMENT.names()).collect();
        let meant = nearest(name, &known).unwrap_or(name);
        content(reader, node, find(FILE, meant).unwrap_or(Plain));
    }
}

fn find(section: &[(&'static str, Content)], name: &str) -> Option<Content> {
    section.iter().find(|(known, _)| *known == name).map(|(_, content)| *content)
}

fn content(reader: &mut Reader, node: &Node, content: Content) {
    match (content, &node.value) {
        (Plain, _) | (_, NodeValue::Nothing) => {}
        (Gateway, _) => gateway(reader, node),
        (Secret, _) => secret(reader, node),
        (ListenAddress, NodeValue::Word(word)) if is_like_address(word) => {}
        (Section(section), NodeValue::Word(word))
            if is_like_address(word) || is_setting(word) || nearest(word, &names_of(section)).is_some() => {}
        (Section(section), NodeValue::Map(entries)) => {
            for (name, node) in entries {
                entry(reader, section, name, node);
            }
        }
        (Section(_), NodeValue::List(items)) => {
            items.iter().for_each(|item| self::content(reader, item, content));
        }
        (ListenAddress | Section(_), _) => reader.hide(node),
    }
}

fn names_of(section: &[(&'static str, Content)]) -> Vec<&'static str> {
    section.iter().map(|(name, _)| *name).collect()
}

/// An entry of a section that takes secrets.
fn entry(reader: &mut Reader, section: &[(&'static str, Content)], name: &Node, node: &Node) {
    let NodeValue::Word(word) = &name.value else { return secret(reader, node) };
    let in_section = nearest(word, &names_of(section)).and_then(|meant| find(section, meant));
    let elsewhere = || SECTIONS.iter().find_map(|section| find(section, word));
    match in_section.or_else(elsewhere) {
        Some(content) => self::content(reader, node, content),
        None => {
            // A word without a value may be a secret whose name is missing.
            if matches!(node.value, NodeValue::Nothing) && written_with_colon(word).is_none() {
                hide_word(reader, name, word);
            }
            secret(reader, node);
        }
    }
}

/// A secret, or a mapping in its place. Only the path of `{ file: path }` is no secret.
fn secret(reader: &mut Reader, node: &Node) {
    let NodeValue::Map(entries) = &node.value else { return reader.hide(node) };
    let is_file = |name: &Node| matches!(&name.value, NodeValue::Word(word) if word == "file");
    for (name, node) in entries {
        match (&name.value, &node.value) {
            (_, NodeValue::Word(_)) if is_file(name) => {}
            (NodeValue::Word(word), NodeValue::Word(_) | NodeValue::Nothing) => {
                // The secret may stand in braces, and so be a name.
                let is_name = FILE_MISTAKES.contains(&word.as_str()) || nearest(word, &["file"]).is_some();
                if !is_name && entries.len() == 1 {
                    hide_word(reader, name, word);
                }
                reader.hide(node);
            }
            _ => secret(reader, node),
        }
    }
}

/// Marks the secrets of `tls` and of listeners.
fn gateway(reader: &mut Reader, node: &Node) {
    match &node.value {
        NodeValue::Nothing | NodeValue::Word(_) => {}
        NodeValue::List(items) => items.iter().for_each(|item| gateway(reader, item)),
        NodeValue::Map(entries) => {
            for (name, node) in entries {
                match &name.value {
                    NodeValue::Word(word) if word == "tls" => content(reader, node, Section(TLS)),
                    _ => gateway(reader, node),
                }
            }
        }
    }
}

/// Whether the word is an address to listen on, or a mistyped one: `localhost:8080`, `0.0.0.0:99999`, `9180`.
fn is_like_address(word: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_host =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._*:[]".contains(&byte));
    word.rsplit_once(':').is_some_and(|(host, port)| is_host(host) && is_number(port))
        || word.bytes().all(|byte| byte.is_ascii_digit() || b".:[]".contains(&byte))
}

/// Whether the word is made of small letters only, as `disk` in `store: disk`: a setting where no secret belongs.
fn is_setting(word: &str) -> bool {
    word.bytes().all(|byte| byte.is_ascii_lowercase())
}

/// Whether the word cannot be a secret.
fn is_plain(word: &str) -> bool {
    is_reference(word)
        || word.is_empty()
        || PLAIN_WORDS.contains(&word)
        || is_plain_address(word)
        || word.parse::<SocketAddr>().is_ok()
}

fn hide_word(reader: &mut Reader, node: &Node, word: &str) {
    if !is_plain(word) {
        reader.secrets.push(HiddenWord { position: node.position, word: word.to_owned() });
    }
}

impl Reader {
    /// Marks every word of a node as a possible secret, except names.
    pub(crate) fn hide(&mut self, node: &Node) {
        match &node.value {
            NodeValue::Nothing => {}
            NodeValue::Word(word) => hide_word(self, node, word),
            NodeValue::List(items) => items.iter().for_each(|item| self.hide(item)),
            NodeValue::Map(entries) => entries.iter().for_each(|(_, item)| self.hide(item)),
        }
    }
}
