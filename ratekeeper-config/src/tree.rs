//! YAML text to a tree of mappings, lists and words with their positions.
//!
//! Scalars stay text, so that messages can quote `1e3`, `010` or `.nan` as written. Errors of the YAML parser are
//! translated here.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{
    DuplicateKeyPolicy, Error as Yaml, Location, NonFiniteFloatPolicy, Options, Spanned, alias_limits,
    budget, options,
};

use crate::TEXT_BYTES_MAX;
use crate::error::{Position, Problem, quoted};
use crate::syntax;

/// A node of the document, with its position.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) position: Position,
    pub(crate) value: NodeValue,
    /// Whether YAML reads the word as a string, not as a number or boolean. Most fields ignore this.
    pub(crate) is_text: bool,
}

impl Node {
    pub(crate) fn nothing(position: Position) -> Node {
        Node { position, value: NodeValue::Nothing, is_text: false }
    }

    /// The names of a mapping as written, with their values. A list of one mapping counts as that mapping.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &Node)> {
        let node = match &self.value {
            NodeValue::List(items) if items.len() == 1 => &items[0],
            _ => self,
        };
        let entries = if let NodeValue::Map(entries) = &node.value { entries.as_slice() } else { &[] };
        entries.iter().filter_map(|(name, node)| match &name.value {
            NodeValue::Word(name) => Some((name.as_str(), node)),
            _ => None,
        })
    }
}

#[derive(Debug)]
pub(crate) enum NodeValue {
    /// An empty value, or `~`.
    Nothing,
    Word(String),
    List(Vec<Node>),
    Map(Vec<(Node, Node)>),
}

/// Parses one document. `what` and `example` describe it in messages. Duplicate names are recorded as problems and do
/// not stop the parser.
pub(crate) fn read(
    yaml: &str,
    message: &'static str,
    example: &str,
    size: Size,
) -> Result<(Node, Vec<Problem>), Box<Problem>> {
    if yaml.len() > TEXT_BYTES_MAX {
        let message = format!("the text has {} bytes; the maximum is {TEXT_BYTES_MAX}", yaml.len());
        return Err(Box::new(Problem::new(Position::default(), message, example)));
    }
    match raw(yaml, size, DuplicateKeyPolicy::Error) {
        Ok(raw) => Ok((node(raw, yaml, &mut Vec::new()), Vec::new())),
        Err(error) => match error.without_snippet() {
            // An empty document is valid here.
            Yaml::Eof { .. } => Ok((Node::nothing(Position::default()), Vec::new())),
            Yaml::DuplicateMappingKey { .. } => {
                let first = Box::new(problem(&error, yaml, message, example));
                let Ok(raw) = raw(yaml, size, DuplicateKeyPolicy::LastWins) else { return Err(first) };
                let mut problems = Vec::new();
                let node = node(raw, yaml, &mut problems);
                // The YAML parser compares numbers by value, so it may find duplicates that differ as text.
                if problems.is_empty() { Err(first) } else { Ok((node, problems)) }
            }
            _ => Err(Box::new(problem(&error, yaml, message, example))),
        },
    }
}

fn raw(yaml: &str, size: Size, duplicates: DuplicateKeyPolicy) -> Result<Spanned<Raw>, Yaml> {
    let mut options = size.options();
    options.duplicate_keys = duplicates;
    serde_saphyr::from_str_with_options(yaml, options)
}

/// The size budget of a document.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Size {
    /// One limit: about a dozen events and a depth of two. The rest is for comments, anchors and mistakes.
    Limit,
    /// A file with the maximum number of limits and routes, at 25 events each. The YAML parser takes about four
    /// microseconds per event in a test build, so this also bounds the parse time.
    File,
}

impl Size {
    fn options(self) -> Options {
        let count = match self {
            Size::Limit => 10_000,
            Size::File => 50_000,
        };
        options! {
            budget: budget! {
                max_events: count,
                max_depth: 32,
                max_aliases: count / 10,
                max_anchors: count / 10,
                max_nodes: count,
                max_recorded_anchor_events: count,
                max_merge_keys: count / 10,
            },
            // Events replayed by aliases count against the budget as well.
            alias_limits: alias_limits! { max_total_replayed_events: count },
            with_snippet: false,
            non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        }
    }
}

/// A value from the YAML parser. Scalars that are not strings are read from the text at their position.
enum Raw {
    Nothing,
    Number,
    Text(String),
    List(Vec<Spanned<Raw>>),
    Map(Vec<(Spanned<Raw>, Spanned<Raw>)>),
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Raw, D::Error> {
        deserializer.deserialize_any(AnyNode)
    }
}

struct AnyNode;

impl<'de> Visitor<'de> for AnyNode {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping, a list or a word")
    }

    fn visit_str<E>(self, text: &str) -> Result<Raw, E> {
        Ok(Raw::Text(text.to_owned()))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Raw, E> {
        Ok(Raw::Number)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Raw, E> {
        Ok(Raw::Number)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Raw, E> {
        Ok(Raw::Number)
    }

    fn visit_i128<E>(self, _: i128) -> Result<Raw, E> {
        Ok(Raw::Number)
    }

    fn visit_u128<E>(self, _: u128) -> Result<Raw, E> {
        Ok(Raw::Number)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Raw, E> {
        Ok(Raw::Number)
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Nothing)
    }

    fn visit_none<E>(self) -> Result<Raw, E> {
        Ok(Raw::Nothing)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Raw, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Raw::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Raw::Map(entries))
    }
}

fn node(raw: Spanned<Raw>, yaml: &str, problems: &mut Vec<Problem>) -> Node {
    let Spanned { value, referenced, defined } = raw;
    let is_text = matches!(value, Raw::Text(_));
    let typed = match value {
        Raw::Nothing => NodeValue::Nothing,
        Raw::Text(text) => NodeValue::Word(text),
        Raw::Number => NodeValue::Word(text_at(position(defined), yaml)),
        Raw::List(items) => {
            NodeValue::List(items.into_iter().map(|item| node(item, yaml, problems)).collect())
        }
        Raw::Map(entries) => {
            let mut typed: Vec<(Node, Node)> = Vec::with_capacity(entries.len());
            let mut names = HashMap::new();
            for (name, value) in entries {
                let name = node(name, yaml, problems);
                if let NodeValue::Word(word) = &name.value {
                    match names.get(word) {
                        Some(first) => problems.push(duplicate(name.position, Some(*first), word)),
                        None => drop(names.insert(word.clone(), name.position)),
                    }
                }
                typed.push((name, node(value, yaml, problems)));
            }
            NodeValue::Map(typed)
        }
    };
    Node { position: position(referenced), value: typed, is_text }
}

fn duplicate(position: Position, first: Option<Position>, name: &str) -> Problem {
    let message = format!("duplicate name {}", quoted(name));
    Problem { first, ..Problem::new(position, message, "remove one of the two") }
}

/// The text of a word on one line.
fn text_at(position: Position, yaml: &str) -> String {
    yaml.get(position.byte..).unwrap_or_default().chars().take(position.chars).collect()
}

fn position(location: Location) -> Position {
    let span = location.span();
    Position {
        line: location.line() as usize,
        column: location.column() as usize,
        chars: span.len() as usize,
        byte: span.byte_offset().unwrap_or_default() as usize,
    }
}

/// The position of an error, whose location may lack a byte offset.
fn position_of(error: &Yaml, yaml: &str) -> Position {
    let Some(location) = error.location() else { return Position::default() };
    let position = position(location);
    if location.span().byte_offset().is_some() {
        return position;
    }
    let before: usize = yaml.split_inclusive('\n').take(position.line.saturating_sub(1)).map(str::len).sum();
    let line = yaml[before..].split('\n').next().unwrap_or_default();
    let column = line.char_indices().nth(position.column.saturating_sub(1)).map_or(line.len(), |(at, _)| at);
    Position { byte: before + column, ..position }
}

fn problem(error: &Yaml, yaml: &str, document: &str, example: &str) -> Problem {
    let position = position_of(error, yaml);
    let (message, help) = match error.without_snippet() {
        Yaml::DuplicateMappingKey { key, .. } => {
            return duplicate(position, None, key.as_deref().unwrap_or("a name"));
        }
        Yaml::MultipleDocuments { .. } => (
            "the text has a second YAML document".to_owned(),
            "remove the line `---` and what follows it".to_owned(),
        ),
        Yaml::RecursiveReferencesRequireWeakTypes { .. } => (
            "the alias is inside of its own anchor".to_owned(),
            "write the value instead of the alias".to_owned(),
        ),
        Yaml::Budget { .. }
        | Yaml::AliasReplayLimitExceeded { .. }
        | Yaml::AliasExpansionLimitExceeded { .. }
        | Yaml::AliasReplayStackDepthExceeded { .. } => (too_much(document), example.to_owned()),
        other => {
            let message = other.to_string();
            if TOO_MUCH.iter().any(|words| message.contains(words)) {
                return Problem::new(position, too_much(document), example);
            }
            return syntax::problem(yaml, position, without_position(&message));
        }
    };
    Problem::new(position, message, help)
}

/// How the parser reports an exceeded budget inside an alias, and nested brackets.
const TOO_MUCH: [&str; 2] = ["budget breached", "recursion limit exceeded"];

fn too_much(document: &str) -> String {
    format!("{document} cannot be this large: too long, too deeply nested, or too many aliases")
}

/// Removes the position from a message of the parser, because ours precedes it.
fn without_position(message: &str) -> &str {
    message.rsplit_once(" at line ").map_or(message, |(message, _)| message)
}
