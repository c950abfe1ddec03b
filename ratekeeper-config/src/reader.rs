//! Nodes to values. Errors are recorded and reading continues, so that all errors of a file are reported together.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

use ratekeeper_rules::path::PathNormalization;

use crate::ERRORS_MAX;
use crate::error::{Position, Problem, known_help, listed, quoted};
use crate::gateway::Address;
use crate::mask::STARS;
use crate::nearest::{TYPED_CHARS_MAX, nearest};
use crate::quantity::{self, ValueError};
use crate::syntax::written_with_colon;
use crate::table::Section;
use crate::tree::{Node, NodeValue};

#[derive(Default)]
pub(crate) struct Reader {
    pub(crate) problems: Vec<Problem>,
    /// Risks in a valid file.
    pub(crate) warnings: Vec<Problem>,
    /// Path normalization of the file.
    pub(crate) paths: PathNormalization,
    /// Whether the file configures `jwt`. Without it, claims cannot be used.
    pub(crate) has_tokens: bool,
    /// Whether the file lists trusted proxies.
    pub(crate) has_proxies: bool,
    /// Routes that limits have named so far, with positions.
    pub(crate) routes_named: Vec<(String, Position)>,
    /// Addresses to listen on so far, with positions.
    pub(crate) listening: Vec<(SocketAddr, Position)>,
    /// Addresses of upstreams, with positions.
    pub(crate) upstream_addresses: Vec<(Address, Position)>,
    /// Words that may be secrets.
    pub(crate) secrets: Vec<HiddenWord>,
    /// Names that stand in an outer mapping: the owner they belong to, and the name.
    pub(crate) misplaced: Vec<(String, String)>,
    /// Work spent on suggestions so far: characters of known names times characters of unknown names.
    pub(crate) compared: usize,
}

/// A word that messages do not show.
pub(crate) struct HiddenWord {
    pub(crate) position: Position,
    pub(crate) word: String,
}

/// Maximum work spent on suggestions. A file may have a thousand names and a hundred mistakes; beyond this bound,
/// messages list the names without a suggestion.
const COMPARED_MAX: usize = 2_000_000;

/// The entries of a mapping, by name.
pub(crate) struct Fields<'n> {
    /// What the mapping is, for messages.
    pub(crate) owner: String,
    pub(crate) position: Position,
    /// The known names, unless the file chooses them.
    section: Option<&'static Section>,
    entries: Vec<Entry<'n>>,
    /// Names that belong here and stand in an outer mapping, which has been reported.
    misplaced: Vec<String>,
}

/// A name, its position and its value.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'n> {
    pub(crate) name: &'n str,
    pub(crate) position: Position,
    pub(crate) node: &'n Node,
}

impl<'n> Fields<'n> {
    /// A mapping that is missing or invalid.
    pub(crate) fn none(section: &'static Section) -> Fields<'n> {
        let (position, entries, misplaced) = (Position::default(), Vec::new(), Vec::new());
        Fields { owner: String::new(), position, section: Some(section), entries, misplaced }
    }

    /// The value of a name, unless it is missing or empty.
    pub(crate) fn get(&self, name: &str) -> Option<&'n Node> {
        let node = self.entry(name)?.node;
        (!matches!(node.value, NodeValue::Nothing)).then_some(node)
    }

    /// Whether the name is present, even without a value.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// Whether neither the name nor a misspelling of it is present. A misspelling has been reported, and so has a name
    /// in an outer mapping.
    pub(crate) fn lacks(&self, name: &str) -> bool {
        !self.entries.iter().any(|entry| nearest(entry.name, &[name]).is_some())
            && !self.misplaced.iter().any(|misplaced| misplaced == name)
    }

    pub(crate) fn entry(&self, name: &str) -> Option<Entry<'n>> {
        // A name that is read but not in the table would be an unknown field.
        debug_assert!(self.section.is_none_or(|section| section.row(name).is_some()), "{name}");
        self.entries.iter().find(|entry| entry.name == name).copied()
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = Entry<'n>> {
        self.entries.iter().copied()
    }
}

impl Reader {
    pub(crate) fn error(&mut self, position: Position, message: impl Into<String>, help: impl Into<String>) {
        if !self.is_full() {
            let problem = self.without_secret(Problem::new(position, message, help));
            self.problems.push(problem);
        }
    }

    /// Masks the word at the position of a problem in its message, if that word may be a secret.
    fn without_secret(&self, problem: Problem) -> Problem {
        let hidden = self.secrets.iter().find(|it| it.position.byte == problem.position.byte);
        let Some(HiddenWord { word, .. }) = hidden else { return problem };
        let masked = |text: &str| text.replace(&quoted(word), &quoted(STARS));
        Problem { message: masked(&problem.message), help: masked(&problem.help), ..problem }
    }

    /// Records that the name at `position` has been used at `first`.
    pub(crate) fn duplicate(&mut self, position: Position, first: Position, message: impl Into<String>) {
        if !self.is_full() {
            self.problems.push(Problem::duplicate(position, first, message));
        }
    }

    /// Remembers the position of a name, or records a duplicate. Returns whether the name is new.
    pub(crate) fn is_new<N: Eq + Hash>(
        &mut self,
        seen: &mut HashMap<N, Position>,
        name: N,
        position: Position,
        message: impl FnOnce(&N) -> String,
    ) -> bool {
        match seen.get(&name).copied() {
            Some(first) => self.duplicate(position, first, message(&name)),
            None => {
                seen.insert(name, position);
                return true;
            }
        }
        false
    }

    /// Records a risk. There are at most as many warnings as errors.
    pub(crate) fn warn(&mut self, position: Position, message: impl Into<String>, help: impl Into<String>) {
        if self.warnings.len() < ERRORS_MAX {
            let problem = self.without_secret(Problem::new(position, message, help));
            self.warnings.push(problem);
        }
    }

    /// Whether the maximum number of errors is reached. Reading then stops, which bounds the time of a file full of
    /// mistakes.
    pub(crate) fn is_full(&self) -> bool {
        self.problems.len() >= ERRORS_MAX
    }

    /// What to write for an unknown name, if the known names are defined by the file.
    pub(crate) fn file_names_help(&mut self, typed: &str, given: &[&str], choice: &str) -> String {
        let letters = given.iter().map(|name| name.len()).sum::<usize>();
        self.compared = self.compared.saturating_add(letters * typed.len().min(TYPED_CHARS_MAX));
        known_help(typed, if self.compared > COMPARED_MAX { &[] } else { given }, choice)
    }

    pub(crate) fn value_error(&mut self, node: &Node, value_error: ValueError) {
        self.error(node.position, value_error.message, value_error.help);
    }

    /// A mapping with arbitrary names.
    pub(crate) fn named<'n>(&mut self, node: &'n Node, owner: &str, example: &str) -> Option<Fields<'n>> {
        let entries = match &node.value {
            NodeValue::Map(entries) => entries.as_slice(),
            NodeValue::Nothing => &[],
            _ if self.is_full() => return None,
            NodeValue::Word(_) | NodeValue::List(_) => {
                self.error(node.position, format!("{owner} must be a mapping"), example);
                return None;
            }
        };
        let misplaced =
            self.misplaced.iter().filter(|(other, _)| other == owner).map(|(_, name)| name.clone());
        let misplaced = misplaced.collect();
        let mut fields = Fields {
            owner: owner.to_owned(),
            position: node.position,
            section: None,
            entries: Vec::new(),
            misplaced,
        };
        for (name, node) in entries {
            match &name.value {
                NodeValue::Word(word) => {
                    fields.entries.push(Entry { name: word, position: name.position, node });
                }
                _ => self.error(name.position, "a name must be a word", example),
            }
        }
        Some(fields)
    }

    /// A mapping with the fields of a section only. Each must have a value.
    pub(crate) fn fields<'n>(
        &mut self,
        node: &'n Node,
        owner: &str,
        section: &'static Section,
    ) -> Option<Fields<'n>> {
        let fields = self.parameters(node, owner, section)?;
        for Entry { name, position, node } in fields.iter() {
            let Some(row) = section.row(name) else { continue };
            let is_empty = matches!(node.value, NodeValue::Nothing) && !row.kind.may_be_empty();
            // The value of a mapping may stand below it without an indent, which has been reported.
            let is_outdented = || self.misplaced.iter().any(|(owner, _)| *owner == quoted(name));
            if is_empty && !is_outdented() {
                let help = match row.is_required {
                    true => section.example.to_owned(),
                    false => format!("write a value, or remove `{name}`"),
                };
                self.error(position, format!("`{name}` has no value"), help);
            }
        }
        Some(fields)
    }

    /// A mapping with the fields of a section only. Values are optional.
    pub(crate) fn parameters<'n>(
        &mut self,
        node: &'n Node,
        owner: &str,
        section: &'static Section,
    ) -> Option<Fields<'n>> {
        let fields = self.known(node, owner, &section.names(), section.example, Some(section))?;
        Some(Fields { section: Some(section), ..fields })
    }

    /// A mapping with known names only: the fields of a section, or the names of another format.
    pub(crate) fn known<'n>(
        &mut self,
        node: &'n Node,
        owner: &str,
        known: &[&str],
        example: &str,
        section: Option<&'static Section>,
    ) -> Option<Fields<'n>> {
        let fields = self.named(node, owner, example)?;
        for Entry { name, position, .. } in fields.iter() {
            if self.is_full() {
                return None;
            }
            if !known.contains(&name) {
                if let Some(meant) = written_with_colon(name).filter(|it| starts_with_one_of(it, known)) {
                    self.error(
                        position,
                        format!("{} has no value", quoted(name)),
                        format!("write `{meant}`"),
                    );
                    continue;
                }
                // A name cannot be indented under a word.
                let is_open = |entry: &Entry<'_>| !matches!(entry.node.value, NodeValue::Word(_));
                let before = fields.iter().take_while(|entry| entry.position.byte < position.byte);
                let before = before.filter(is_open).map(|entry| entry.name);
                let help = match section.and_then(|section| section.owner_of(name, before)) {
                    Some(field) => {
                        self.misplaced.push((quoted(field), name.to_owned()));
                        format!("indent this under `{field}`")
                    }
                    None => known_help(name, known, &format!("Fields: {}", known.join(", "))),
                };
                self.error(position, format!("unknown field {} in {owner}", quoted(name)), help);
            }
        }
        Some(fields)
    }

    /// Records which of the required fields a mapping lacks.
    pub(crate) fn require(&mut self, fields: &Fields<'_>) {
        let required = fields.section.iter().flat_map(|section| section.rows()).filter(|row| row.is_required);
        self.require_names(fields, &required.map(|row| row.name).collect::<Vec<_>>());
    }

    /// Records which of the names a mapping lacks. Misspellings of them have been reported.
    pub(crate) fn require_names(&mut self, fields: &Fields<'_>, names: &[&str]) {
        let missing = names.iter().filter(|name| fields.lacks(name)).map(|name| format!("`{name}`"));
        let missing: Vec<String> = missing.collect();
        let help = fields.section.map_or("", |section| section.example);
        if !missing.is_empty() {
            self.error(fields.position, format!("missing {} in {}", missing.join(", "), fields.owner), help);
        }
    }

    /// One word or number.
    pub(crate) fn word<'n>(&mut self, node: &'n Node) -> Option<&'n str> {
        match &node.value {
            _ if self.is_full() => None,
            NodeValue::Word(word) => Some(word),
            NodeValue::Nothing => {
                self.error(node.position, "the value is missing", "write a single word or number");
                None
            }
            NodeValue::List(_) | NodeValue::Map(_) => {
                let message = "expected a single value, not a list or a mapping";
                self.error(node.position, message, "write a single word or number");
                None
            }
        }
    }

    /// A list, or a single value as a list of one.
    pub(crate) fn list<'n>(&mut self, node: &'n Node) -> Vec<&'n Node> {
        match &node.value {
            _ if self.is_full() => Vec::new(),
            NodeValue::List(items) => items.iter().collect(),
            NodeValue::Nothing => Vec::new(),
            NodeValue::Word(_) | NodeValue::Map(_) => vec![node],
        }
    }

    /// A list with at least one item, or a single value. An empty list of conditions would match everything.
    pub(crate) fn some<'n>(&mut self, node: &'n Node, example: &str) -> Vec<&'n Node> {
        let items = self.list(node);
        if items.is_empty() {
            self.error(node.position, "the list is empty", example);
        }
        items
    }

    /// A word that is not empty.
    pub(crate) fn name<'n>(&mut self, node: &'n Node, example: &str) -> Option<&'n str> {
        let word = self.word(node)?;
        if word.is_empty() {
            self.error(node.position, "the name is empty", example);
            return None;
        }
        Some(word)
    }

    pub(crate) fn parsed<T>(
        &mut self,
        node: &Node,
        parse: impl FnOnce(&str) -> Result<T, ValueError>,
    ) -> Option<T> {
        let word = self.word(node)?;
        match parse(word) {
            Ok(value) => Some(value),
            Err(value_error) => {
                self.value_error(node, value_error);
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

    /// One of a few words.
    pub(crate) fn choice<T: Copy>(&mut self, node: &Node, name: &str, words: &[(&str, T)]) -> Option<T> {
        self.parsed(node, |word| {
            let meant = words.iter().find(|(known, _)| *known == word).map(|(_, meaning)| *meaning);
            meant.ok_or_else(|| {
                let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
                let choice = format!("Values: {}", listed(&known));
                let help = known_help(word, &known, &choice);
                ValueError { message: format!("unknown value {} of `{name}`", quoted(word)), help }
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
            _ => Err(ValueError {
                message: format!("`{name}` is {}, not `true` or `false`", quoted(word)),
                help: match word.to_ascii_lowercase().as_str() {
                    "yes" | "on" | "y" | "1" | "true" => "write `true`".to_owned(),
                    "no" | "off" | "n" | "0" | "false" => "write `false`".to_owned(),
                    _ => format!("write `{name}: true` or `{name}: false`"),
                },
            }),
        })
    }
}

fn starts_with_one_of(text: &str, names: &[&str]) -> bool {
    text.split_once(':').is_some_and(|(name, _)| names.contains(&name))
}
