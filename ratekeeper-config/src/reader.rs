//! Nodes to values. Errors are recorded and reading continues, so that all errors of a file are reported together.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use ratekeeper_rules::path::PathNormalization;

use crate::ERRORS_MAX;
use crate::error::{Place, Problem, known_instead, listed, quoted};
use crate::names;
use crate::nearest::{TYPED_CHARS_MAX, nearest};
use crate::quantity::{self, Fault};
use crate::tree::{Node, Typed};

#[derive(Default)]
pub(crate) struct Reader {
    pub(crate) problems: Vec<Problem>,
    /// Path normalization of the file.
    pub(crate) spelling: PathNormalization,
    /// Whether the file configures `jwt`. Without it, claims cannot be used.
    pub(crate) has_tokens: bool,
    /// Whether the file lists trusted proxies.
    pub(crate) has_proxies: bool,
    /// Routes that limits have named so far, with positions.
    pub(crate) routes_named: Vec<(String, Place)>,
    /// Addresses to listen on so far, with positions.
    pub(crate) listening: Vec<(SocketAddr, Place)>,
    /// Positions of secrets.
    pub(crate) secrets: Vec<Place>,
    /// Work spent on suggestions so far: characters of known names times characters of unknown names.
    pub(crate) compared: usize,
}

/// Maximum work spent on suggestions. A file may have a thousand names and a hundred mistakes; beyond this bound,
/// messages list the names without a suggestion.
const COMPARED_MAX: usize = 2_000_000;

/// The entries of a mapping, by name.
pub(crate) struct Fields<'n> {
    /// What the mapping is, for messages.
    pub(crate) owner: String,
    pub(crate) place: Place,
    entries: Vec<Entry<'n>>,
}

/// A name, its position and its value.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'n> {
    pub(crate) name: &'n str,
    pub(crate) place: Place,
    pub(crate) node: &'n Node,
}

impl<'n> Fields<'n> {
    /// The value of a name, unless it is missing or empty.
    pub(crate) fn get(&self, name: &str) -> Option<&'n Node> {
        let node = self.entry(name)?.node;
        (!matches!(node.typed, Typed::Nothing)).then_some(node)
    }

    /// Whether the name is present, even without a value.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// Whether neither the name nor a misspelling of it is present. A misspelling has been reported.
    pub(crate) fn lacks(&self, name: &str) -> bool {
        !self.entries.iter().any(|entry| nearest(entry.name, &[name]).is_some())
    }

    pub(crate) fn entry(&self, name: &str) -> Option<Entry<'n>> {
        self.entries.iter().find(|entry| entry.name == name).copied()
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = Entry<'n>> {
        self.entries.iter().copied()
    }
}

impl Reader {
    pub(crate) fn wrong(&mut self, place: Place, what: impl Into<String>, instead: impl Into<String>) {
        if !self.is_full() {
            self.problems.push(Problem { place, what: what.into(), instead: instead.into() });
        }
    }

    /// Whether the maximum number of errors is reached. Reading then stops, which bounds the time of a file full of
    /// mistakes.
    pub(crate) fn is_full(&self) -> bool {
        self.problems.len() >= ERRORS_MAX
    }

    /// What to write for an unknown name, if the known names are defined by the file.
    pub(crate) fn given_instead(&mut self, typed: &str, given: &[&str], choice: &str) -> String {
        let letters = given.iter().map(|name| name.len()).sum::<usize>();
        self.compared = self.compared.saturating_add(letters * typed.len().min(TYPED_CHARS_MAX));
        known_instead(typed, if self.compared > COMPARED_MAX { &[] } else { given }, choice)
    }

    pub(crate) fn fault(&mut self, node: &Node, fault: Fault) {
        self.wrong(node.place, fault.what, fault.instead);
    }

    /// A mapping with arbitrary names.
    pub(crate) fn named<'n>(&mut self, node: &'n Node, owner: &str, example: &str) -> Option<Fields<'n>> {
        let entries = match &node.typed {
            Typed::Map(entries) => entries.as_slice(),
            Typed::Nothing => &[],
            _ if self.is_full() => return None,
            Typed::Word(_) | Typed::List(_) => {
                self.wrong(node.place, format!("{owner} must be a mapping"), example);
                return None;
            }
        };
        let mut fields = Fields { owner: owner.to_owned(), place: node.place, entries: Vec::new() };
        for (name, node) in entries {
            match &name.typed {
                Typed::Word(word) => fields.entries.push(Entry { name: word, place: name.place, node }),
                _ => self.wrong(name.place, "a name must be a word", example),
            }
        }
        Some(fields)
    }

    /// A mapping with known names only. Each must have a value.
    pub(crate) fn fields<'n>(
        &mut self,
        node: &'n Node,
        owner: &str,
        known: &[&str],
        example: &str,
    ) -> Option<Fields<'n>> {
        let fields = self.parameters(node, owner, known, example)?;
        for Entry { name, place, node } in fields.iter() {
            if matches!(node.typed, Typed::Nothing) && known.contains(&name) && !names::may_be_empty(name) {
                let what = format!("there is nothing behind `{name}`");
                self.wrong(place, what, format!("write a value, or remove `{name}`"));
            }
        }
        Some(fields)
    }

    /// A mapping with known names only. Values are optional.
    pub(crate) fn parameters<'n>(
        &mut self,
        node: &'n Node,
        owner: &str,
        known: &[&str],
        example: &str,
    ) -> Option<Fields<'n>> {
        let fields = self.named(node, owner, example)?;
        for Entry { name, place, .. } in fields.iter() {
            if self.is_full() {
                return None;
            }
            if !known.contains(&name) {
                let what = format!("{} is not a parameter of {owner}", quoted(name));
                let choice = format!("{owner} has {}", listed(known, "and"));
                self.wrong(place, what, known_instead(name, known, &choice));
            }
        }
        Some(fields)
    }

    /// One word or number.
    pub(crate) fn word<'n>(&mut self, node: &'n Node) -> Option<&'n str> {
        match &node.typed {
            _ if self.is_full() => None,
            Typed::Word(word) => Some(word),
            Typed::Nothing => {
                self.wrong(node.place, "there is nothing here", "write one word or number");
                None
            }
            Typed::List(_) | Typed::Map(_) => {
                let what = "a single value is expected here, not a list or a mapping";
                self.wrong(node.place, what, "write one word or number");
                None
            }
        }
    }

    /// A list, or a single value as a list of one.
    pub(crate) fn list<'n>(&mut self, node: &'n Node) -> Vec<&'n Node> {
        match &node.typed {
            _ if self.is_full() => Vec::new(),
            Typed::List(items) => items.iter().collect(),
            Typed::Nothing => Vec::new(),
            Typed::Word(_) | Typed::Map(_) => vec![node],
        }
    }

    /// A list with at least one item, or a single value. An empty list of conditions would match everything.
    pub(crate) fn some<'n>(&mut self, node: &'n Node, example: &str) -> Vec<&'n Node> {
        let items = self.list(node);
        if items.is_empty() {
            self.wrong(node.place, "this list is empty", example);
        }
        items
    }

    /// A word that is not empty.
    pub(crate) fn name<'n>(&mut self, node: &'n Node, example: &str) -> Option<&'n str> {
        let word = self.word(node)?;
        if word.is_empty() {
            self.wrong(node.place, "this name is empty", example);
            return None;
        }
        Some(word)
    }

    pub(crate) fn parsed<T>(
        &mut self,
        node: &Node,
        parse: impl FnOnce(&str) -> Result<T, Fault>,
    ) -> Option<T> {
        let word = self.word(node)?;
        match parse(word) {
            Ok(value) => Some(value),
            Err(fault) => {
                self.fault(node, fault);
                None
            }
        }
    }

    /// Reads an optional value. Returns the default if it is missing or invalid.
    pub(crate) fn or<T>(
        &mut self,
        node: Option<&Node>,
        default: T,
        read: impl FnOnce(&mut Reader, &Node) -> Option<T>,
    ) -> T {
        node.and_then(|node| read(self, node)).unwrap_or(default)
    }

    pub(crate) fn whole(&mut self, node: &Node, name: &str, max: u32) -> Option<u32> {
        self.parsed(node, |word| quantity::whole(name, word, max))
    }

    pub(crate) fn length(
        &mut self,
        node: &Node,
        name: &str,
        from: Duration,
        to: Duration,
    ) -> Option<Duration> {
        self.parsed(node, |word| quantity::length(name, word, from, to))
    }

    /// One of a few words.
    pub(crate) fn choice<T: Copy>(&mut self, node: &Node, name: &str, words: &[(&str, T)]) -> Option<T> {
        self.parsed(node, |word| {
            let meant = words.iter().find(|(known, _)| *known == word).map(|(_, meaning)| *meaning);
            meant.ok_or_else(|| {
                let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
                let noun = name.strip_prefix("value of ").unwrap_or(name);
                let choice = format!("{noun} is {}", listed(&known, "or"));
                let instead = known_instead(word, &known, &choice);
                Fault { what: format!("{} is not a {name}", quoted(word)), instead }
            })
        })
    }

    pub(crate) fn number(&mut self, node: &Node, name: &str, range: RangeInclusive<u32>) -> Option<u32> {
        self.parsed(node, |word| quantity::number(name, word, range))
    }

    /// `true` or `false`. Other boolean words of YAML 1.1 are rejected.
    pub(crate) fn yes_or_no(&mut self, node: &Node, name: &str) -> Option<bool> {
        self.parsed(node, |word| match word {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(Fault {
                what: format!("{name} is {}, which is neither true nor false", quoted(word)),
                instead: match word.to_ascii_lowercase().as_str() {
                    "yes" | "on" | "y" | "1" | "true" => "write `true`".to_owned(),
                    "no" | "off" | "n" | "0" | "false" => "write `false`".to_owned(),
                    _ => format!("write `{name}: true` or `{name}: false`"),
                },
            }),
        })
    }
}
