//! What was typed -> what it means, one value at a time. Whatever is wrong is noted, and reading goes on: a person is told
//! everything at once.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use tollgate_rules::path::Spelling;

use crate::ERRORS_MAX;
use crate::error::{Place, Problem, known_instead, listed, quoted};
use crate::names;
use crate::nearest::{TYPED_CHARS_MAX, nearest};
use crate::quantity::{self, Fault};
use crate::tree::{Node, Typed};

#[derive(Default)]
pub(crate) struct Reader {
    pub(crate) problems: Vec<Problem>,
    /// How the file has paths spelt.
    pub(crate) spelling: Spelling,
    /// Whether the file says how tokens are verified: claims of others are nobody's word.
    pub(crate) has_tokens: bool,
    /// Whether the file names proxies whose word counts.
    pub(crate) has_proxies: bool,
    /// Routes that limits have named so far, and where.
    pub(crate) routes_named: Vec<(String, Place)>,
    /// Addresses that are listened on so far, and where they stand.
    pub(crate) listening: Vec<(SocketAddr, Place)>,
    /// Where secrets stand.
    pub(crate) secrets: Vec<Place>,
    /// Letters of names that the file gives itself, each compared with each of those that were mistaken for them.
    pub(crate) compared: usize,
}

/// There may be a thousand names, each taken for another a hundred times: whoever errs more often than this is told the
/// names, but not which is meant.
const COMPARED_MAX: usize = 2_000_000;

/// The entries of a mapping, by name.
pub(crate) struct Fields<'n> {
    /// What the mapping is, in words.
    pub(crate) owner: String,
    pub(crate) place: Place,
    entries: Vec<Entry<'n>>,
}

/// A name, where it stands, and what stands behind it.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'n> {
    pub(crate) name: &'n str,
    pub(crate) place: Place,
    pub(crate) node: &'n Node,
}

impl<'n> Fields<'n> {
    /// What stands under a name, unless nothing does.
    pub(crate) fn get(&self, name: &str) -> Option<&'n Node> {
        let node = self.entry(name)?.node;
        (!matches!(node.typed, Typed::Nothing)).then_some(node)
    }

    /// Whether the name is there, even with nothing behind it.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// Whether a name is not there, not even misspelt: of that the reader has been told.
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

    /// Whether nothing more is noted. Then nothing more is read, either: a file with endless mistakes must end soon.
    pub(crate) fn is_full(&self) -> bool {
        self.problems.len() >= ERRORS_MAX
    }

    /// What to write for an unknown name, where the file itself gives the known ones.
    pub(crate) fn given_instead(&mut self, typed: &str, given: &[&str], choice: &str) -> String {
        let letters = given.iter().map(|name| name.len()).sum::<usize>();
        self.compared = self.compared.saturating_add(letters * typed.len().min(TYPED_CHARS_MAX));
        known_instead(typed, if self.compared > COMPARED_MAX { &[] } else { given }, choice)
    }

    pub(crate) fn fault(&mut self, node: &Node, fault: Fault) {
        self.wrong(node.place, fault.what, fault.instead);
    }

    /// A mapping with any names.
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

    /// A mapping with known names only, behind each of which something must stand.
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

    /// A mapping with known names only, behind which nothing need stand.
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

    /// A list, or one thing that stands for a list of one.
    pub(crate) fn list<'n>(&mut self, node: &'n Node) -> Vec<&'n Node> {
        match &node.typed {
            _ if self.is_full() => Vec::new(),
            Typed::List(items) => items.iter().collect(),
            Typed::Nothing => Vec::new(),
            Typed::Word(_) | Typed::Map(_) => vec![node],
        }
    }

    /// A list with at least one item, or one thing. An empty one would not say nothing, but everything.
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

    /// What stands under a name, read; the default if nothing does or it is wrong.
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

    /// `true` or `false`. What else YAML once took for them is no word of ours.
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
