//! YAML text to a tree of mappings, lists and words with their positions.
//!
//! Scalars stay text, so that messages can quote `1e3`, `010` or `.nan` as written. Errors of the YAML parser are
//! translated here.

use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{
    DuplicateKeyPolicy, Error as Yaml, Location, NonFiniteFloatPolicy, Options, Spanned, alias_limits,
    budget, options,
};

use crate::TEXT_BYTES_MAX;
use crate::error::{Place, Problem, quoted};

/// A node of the document, with its position.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) place: Place,
    pub(crate) typed: Typed,
    /// Whether YAML reads the word as a string, not as a number or boolean. Most fields ignore this.
    pub(crate) is_text: bool,
}

impl Node {
    pub(crate) fn nothing(place: Place) -> Node {
        Node { place, typed: Typed::Nothing, is_text: false }
    }
}

#[derive(Debug)]
pub(crate) enum Typed {
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
    what: &'static str,
    example: &str,
    size: Size,
) -> Result<(Node, Vec<Problem>), Problem> {
    if yaml.len() > TEXT_BYTES_MAX {
        return Err(Problem {
            place: Place::default(),
            what: format!("the text has {} bytes, and at most {TEXT_BYTES_MAX} are read", yaml.len()),
            instead: example.to_owned(),
        });
    }
    match raw(yaml, size, DuplicateKeyPolicy::Error) {
        Ok(raw) => Ok((node(raw, yaml, &mut Vec::new()), Vec::new())),
        Err(error) => match error.without_snippet() {
            // An empty document is valid here.
            Yaml::Eof { .. } => Ok((Node::nothing(Place::default()), Vec::new())),
            Yaml::DuplicateMappingKey { .. } => {
                let first = problem(&error, yaml, what, example);
                let Ok(raw) = raw(yaml, size, DuplicateKeyPolicy::LastWins) else { return Err(first) };
                let mut problems = Vec::new();
                let node = node(raw, yaml, &mut problems);
                // The YAML parser compares numbers by value, so it may find duplicates that differ as text.
                if problems.is_empty() { Err(first) } else { Ok((node, problems)) }
            }
            _ => Err(problem(&error, yaml, what, example)),
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
        Raw::Nothing => Typed::Nothing,
        Raw::Text(text) => Typed::Word(text),
        Raw::Number => Typed::Word(text_at(place(defined), yaml)),
        Raw::List(items) => Typed::List(items.into_iter().map(|item| node(item, yaml, problems)).collect()),
        Raw::Map(entries) => {
            let mut typed: Vec<(Node, Node)> = Vec::with_capacity(entries.len());
            let mut names = HashSet::new();
            for (name, value) in entries {
                let name = node(name, yaml, problems);
                if let Typed::Word(word) = &name.typed
                    && !names.insert(word.clone())
                {
                    problems.push(twice(name.place, word));
                }
                typed.push((name, node(value, yaml, problems)));
            }
            Typed::Map(typed)
        }
    };
    Node { place: place(referenced), typed, is_text }
}

fn twice(place: Place, name: &str) -> Problem {
    let what = format!("{} stands here twice", quoted(name));
    Problem { place, what, instead: "remove one of the two".to_owned() }
}

/// The text of a word on one line.
fn text_at(place: Place, yaml: &str) -> String {
    yaml.get(place.byte..).unwrap_or_default().chars().take(place.chars).collect()
}

fn place(location: Location) -> Place {
    let span = location.span();
    Place {
        line: location.line() as usize,
        column: location.column() as usize,
        chars: span.len() as usize,
        byte: span.byte_offset().unwrap_or_default() as usize,
    }
}

/// The position of an error, whose location may lack a byte offset.
fn place_of(error: &Yaml, yaml: &str) -> Place {
    let Some(location) = error.location() else { return Place::default() };
    let place = place(location);
    if location.span().byte_offset().is_some() {
        return place;
    }
    let before: usize = yaml.split_inclusive('\n').take(place.line.saturating_sub(1)).map(str::len).sum();
    let line = yaml[before..].split('\n').next().unwrap_or_default();
    let column = line.char_indices().nth(place.column.saturating_sub(1)).map_or(line.len(), |(at, _)| at);
    Place { byte: before + column, ..place }
}

fn problem(error: &Yaml, yaml: &str, document: &str, example: &str) -> Problem {
    let place = place_of(error, yaml);
    let (what, instead) = match error.without_snippet() {
        Yaml::DuplicateMappingKey { key, .. } => {
            return twice(place, key.as_deref().unwrap_or("a name"));
        }
        Yaml::MultipleDocuments { .. } => (
            format!("{document} is one YAML document, and this is a second one"),
            "remove the line `---` and what follows it".to_owned(),
        ),
        Yaml::RecursiveReferencesRequireWeakTypes { .. } => {
            ("this alias stands inside of what it names".to_owned(), "write the value itself".to_owned())
        }
        Yaml::Budget { .. }
        | Yaml::AliasReplayLimitExceeded { .. }
        | Yaml::AliasExpansionLimitExceeded { .. }
        | Yaml::AliasReplayStackDepthExceeded { .. } => (too_much(document), example.to_owned()),
        other => {
            let message = other.to_string();
            if TOO_MUCH.iter().any(|words| message.contains(words)) {
                return Problem { place, what: too_much(document), instead: example.to_owned() };
            }
            let message = without_place(&message);
            (format!("this is not YAML: {message}"), remedy(message).to_owned())
        }
    };
    Problem { place, what, instead }
}

/// How the parser reports an exceeded budget inside an alias, and nested brackets.
const TOO_MUCH: [&str; 2] = ["budget breached", "recursion limit exceeded"];

fn too_much(document: &str) -> String {
    format!("there is far more here than {document} has: too long, too deep, or too many aliases")
}

/// Removes the position from a message of the parser, because ours precedes it.
fn without_place(message: &str) -> &str {
    message.rsplit_once(" at line ").map_or(message, |(what, _)| what)
}

/// The remedy for a syntax error.
fn remedy(message: &str) -> &'static str {
    const REMEDIES: [(&str, &str); 5] = [
        ("tab", "indent with spaces"),
        ("unclosed", "close it, or put the text into quotes if the bracket belongs to it"),
        ("anchor", "write `&name` in front of the value that `*name` is to repeat"),
        ("merge", "write `<<: *name`, where `&name` stands in front of a mapping"),
        ("expected key", "begin all names of a mapping in the same column"),
    ];
    let known = REMEDIES.iter().find(|(word, _)| message.contains(word));
    known.map_or("look for a wrong indentation, quote or bracket here or in the line above", |(_, remedy)| {
        remedy
    })
}
