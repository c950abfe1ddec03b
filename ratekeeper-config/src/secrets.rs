//! Finds the words of a file that may be secrets, so that messages mask them.
//!
//! Runs before the file is read: a secret may stand under a misspelt name, or where no secret belongs. In sections that
//! take secrets, each word is masked unless it stands under the name of another setting or cannot be a secret.

use std::net::SocketAddr;

use crate::environment::FILE;
use crate::file::DOCUMENT;
use crate::gateway::GATEWAY;
use crate::mask::{is_plain_address, is_reference};
use crate::nearest::nearest;
use crate::reader::{HiddenWord, Reader};
use crate::store::TLS;
use crate::syntax::written_with_colon;
use crate::table::{Row, Section};
use crate::tree::{Node, NodeValue};

/// What a field may hold.
#[derive(Clone, Copy)]
enum Content {
    /// Nothing that is secret.
    Plain,
    /// An address to listen on.
    ListenAddress,
    /// A secret, or `{ file: path }`.
    Secret,
    /// A mapping with secrets, or a word in its place.
    Section(&'static Section),
    /// A gateway, which has secrets in `tls` only, at any depth.
    Gateway,
}

/// Fields that are often written at the top of the file by mistake.
const MISPLACED: [&str; 7] = ["redis", "tls", "http", "envoy", "resp", "token", "secret"];
/// Names that are often written in place of `file`.
const FILE_MISTAKES: [&str; 4] = ["path", "env", "value", "name"];
/// Words that are settings, not secrets.
const PLAIN_WORDS: [&str; 6] = ["true", "false", "on", "off", "memory", "localhost"];

/// Marks every word of a file that may be a secret.
pub(crate) fn mark(reader: &mut Reader, file: &Node) {
    let sections = SecretSections::new();
    let known: Vec<&str> = sections.names_of(&DOCUMENT).chain(MISPLACED).chain(DOCUMENT.names()).collect();
    for (name, node) in file.entries() {
        let meant = nearest(name, &known).unwrap_or(name);
        let found = DOCUMENT.row(meant).map(|row| sections.content(row));
        let found = found.or_else(|| sections.find(meant).filter(|_| MISPLACED.contains(&meant)));
        content(reader, &sections, node, found.unwrap_or(Content::Plain));
    }
}

/// The sections outside of the gateway that take secrets.
struct SecretSections(Vec<&'static Section>);

impl SecretSections {
    fn new() -> SecretSections {
        let mut sections = SecretSections(Vec::new());
        for inner in DOCUMENT.rows().filter_map(|row| row.kind.section()) {
            if inner.name != GATEWAY.name {
                sections.add(inner);
            }
        }
        sections
    }

    /// Adds a section and those inside if it takes secrets, and returns whether it does.
    fn add(&mut self, section: &'static Section) -> bool {
        let index = self.0.len();
        self.0.push(section);
        let mut has_secrets = false;
        for row in section.rows() {
            has_secrets |= row.kind.is_secret() || row.kind.section().is_some_and(|inner| self.add(inner));
        }
        if !has_secrets {
            self.0.truncate(index);
        }
        has_secrets
    }

    fn content(&self, row: Row) -> Content {
        match row.kind.section() {
            _ if row.kind.is_secret() => Content::Secret,
            Some(section) if section.name == GATEWAY.name => Content::Gateway,
            Some(section) if self.0.iter().any(|other| other.name == section.name) => {
                Content::Section(section)
            }
            None if row.kind.is_listen_address() => Content::ListenAddress,
            _ => Content::Plain,
        }
    }

    /// The content of the first field of this name.
    fn find(&self, name: &str) -> Option<Content> {
        self.0.iter().find_map(|section| section.row(name)).map(|row| self.content(row))
    }

    /// The fields of a section that may hold secrets.
    fn names_of(&self, section: &'static Section) -> impl Iterator<Item = &'static str> {
        section.rows().filter(|row| !matches!(self.content(row), Content::Plain)).map(|row| row.name)
    }
}

fn content(reader: &mut Reader, sections: &SecretSections, node: &Node, content: Content) {
    match (content, &node.value) {
        (Content::Plain, _) | (_, NodeValue::Nothing) => {}
        (Content::Gateway, _) => gateway(reader, sections, node),
        (Content::Secret, _) => secret(reader, node),
        (Content::ListenAddress, NodeValue::Word(word)) if is_like_address(word) => {}
        (Content::Section(section), NodeValue::Word(word))
            if is_like_address(word) || is_setting(word) || nearest(word, &section.names()).is_some() => {}
        (Content::Section(section), NodeValue::Map(entries)) => {
            let known = section.names();
            for (name, node) in entries {
                entry(reader, sections, section, &known, name, node);
            }
        }
        (Content::Section(_), NodeValue::List(items)) => {
            items.iter().for_each(|item| self::content(reader, sections, item, content));
        }
        (Content::ListenAddress | Content::Section(_), _) => reader.hide(node),
    }
}

/// An entry of a section that takes secrets. `known` are the names of its fields.
fn entry(
    reader: &mut Reader,
    sections: &SecretSections,
    section: &'static Section,
    known: &[&str],
    name: &Node,
    node: &Node,
) {
    let NodeValue::Word(word) = &name.value else { return secret(reader, node) };
    let in_section = nearest(word, known).and_then(|meant| section.row(meant));
    match in_section.map(|row| sections.content(row)).or_else(|| sections.find(word)) {
        Some(content) => self::content(reader, sections, node, content),
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
                let is_name =
                    FILE_MISTAKES.contains(&word.as_str()) || nearest(word, &FILE.names()).is_some();
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
fn gateway(reader: &mut Reader, sections: &SecretSections, node: &Node) {
    match &node.value {
        NodeValue::Nothing | NodeValue::Word(_) => {}
        NodeValue::List(items) => items.iter().for_each(|item| gateway(reader, sections, item)),
        NodeValue::Map(entries) => {
            for (name, node) in entries {
                match &name.value {
                    NodeValue::Word(word) if word == "tls" => {
                        content(reader, sections, node, Content::Section(&TLS));
                    }
                    _ => gateway(reader, sections, node),
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
