//! A limit: an algorithm and its parameters, all of which are optional.

use ratekeeper_core::{BUCKETS_MAX, Limit, LimitError};

use crate::error::{Position, known_help, listed, quoted};
use crate::quantity::{self, ValueError};
use crate::reader::{Fields, Reader};
use crate::tree::{Node, NodeValue};
use crate::{nearest, words};

pub(crate) const EXAMPLE: &str =
    "write an algorithm and its parameters, as in `token_bucket: { capacity: 10, refill: 1/s }`";

/// An algorithm in a configuration.
#[derive(Clone, Copy)]
pub(crate) struct Algorithm {
    pub(crate) name: &'static str,
    pub(crate) parameters: &'static [&'static str],
    read: fn(&mut Reader, &Fields<'_>) -> Result<Limit, LimitError>,
}

/// All algorithms: the only list of their names, parameters and defaults.
pub(crate) const ALGORITHMS: [Algorithm; 5] = [
    Algorithm {
        name: "token_bucket",
        parameters: &["capacity", "refill", "style"],
        read: |reader, fields| {
            Limit::token_bucket(
                count(reader, fields, "capacity"),
                quantity(reader, fields.get("refill"), RATE_DEFAULT, quantity::rate)?,
                word(reader, fields, "style", &words::STYLES),
            )
        },
    },
    Algorithm {
        name: "leaky_bucket",
        parameters: &["capacity", "leak", "mode"],
        read: |reader, fields| {
            Limit::leaky_bucket(
                count(reader, fields, "capacity"),
                quantity(reader, fields.get("leak"), RATE_DEFAULT, quantity::rate)?,
                word(reader, fields, "mode", &words::MODES),
            )
        },
    },
    Algorithm {
        name: "fixed_window",
        parameters: &["limit", "window", "align"],
        read: |reader, fields| {
            Limit::fixed_window(
                count(reader, fields, "limit"),
                quantity(reader, fields.get("window"), WINDOW_DEFAULT, quantity::window)?,
                word(reader, fields, "align", &words::ALIGNS),
            )
        },
    },
    Algorithm {
        name: "sliding_window_log",
        parameters: &["limit", "window", "count"],
        read: |reader, fields| {
            Limit::sliding_window_log(
                count(reader, fields, "limit"),
                quantity(reader, fields.get("window"), WINDOW_DEFAULT, quantity::window)?,
                word(reader, fields, "count", &words::COUNTS),
            )
        },
    },
    Algorithm {
        name: "sliding_window_counter",
        parameters: &["limit", "window", "buckets", "edge"],
        read: |reader, fields| {
            Limit::sliding_window_counter(
                count(reader, fields, "limit"),
                quantity(reader, fields.get("window"), WINDOW_DEFAULT, quantity::window)?,
                whole(reader, fields, "buckets", 1, BUCKETS_MAX),
                word(reader, fields, "edge", &words::EDGES),
            )
        },
    },
];

pub(crate) fn algorithm_names() -> [&'static str; 5] {
    ALGORITHMS.map(|algorithm| algorithm.name)
}

const COUNT_DEFAULT: u32 = 10;
const RATE_DEFAULT: &str = "1/s";
const WINDOW_DEFAULT: &str = "60s";

/// Reads a document that is one limit.
pub(crate) fn document(reader: &mut Reader, node: &Node) -> Option<Limit> {
    match &node.value {
        NodeValue::Map(entries) if !entries.is_empty() => {
            let names = algorithm_names();
            for (index, (name, _)) in entries.iter().enumerate() {
                let NodeValue::Word(word) = &name.value else { continue };
                if !names.contains(&word.as_str()) {
                    let choice = format!("Algorithms: {}", listed(&names));
                    let message = format!("unknown algorithm {}", quoted(word));
                    reader.error(name.position, message, known_help(word, &names, &choice));
                    return None;
                }
                if index > 0 {
                    second(reader, name.position);
                    return None;
                }
            }
            let fields = reader.named(node, "a limit", EXAMPLE)?;
            among(reader, &fields)
        }
        NodeValue::Word(_) => {
            reader.error(node.position, "the algorithm has no parameters", EXAMPLE);
            None
        }
        NodeValue::Map(_) | NodeValue::Nothing | NodeValue::List(_) => {
            reader.error(node.position, "the limit is empty", EXAMPLE);
            None
        }
    }
}

fn second(reader: &mut Reader, position: Position) {
    let message = "a limit has only one algorithm";
    reader.error(position, message, "remove one of the two, or write two limits");
}

/// Reads the limit whose algorithm is one of the fields.
pub(crate) fn among(reader: &mut Reader, fields: &Fields<'_>) -> Option<Limit> {
    let mut found = ALGORITHMS.iter().filter(|algorithm| fields.has(algorithm.name));
    let Some(Algorithm { name, parameters, read }) = found.next() else {
        // A misspelt algorithm has been reported.
        let is_near = |name: &str| {
            nearest(name, &algorithm_names()).is_some() || nearest(name, &["concurrency"]).is_some()
        };
        if fields.iter().any(|entry| is_near(entry.name)) {
            return None;
        }
        let message = format!("missing algorithm in {}", fields.owner);
        reader.error(fields.position, message, EXAMPLE);
        return None;
    };
    if let Some(other) = found.next() {
        let position = fields.entry(other.name).map_or(fields.position, |entry| entry.position);
        second(reader, position);
        return None;
    }
    let nothing = Node::nothing(fields.position);
    let node = fields.get(name).unwrap_or(&nothing);
    if matches!(node.value, NodeValue::Word(_) | NodeValue::List(_)) {
        reader.error(node.position, "the parameters of an algorithm must be a mapping", EXAMPLE);
        return None;
    }
    let fields = reader.parameters(node, &quoted(name), parameters, EXAMPLE)?;
    let before = reader.problems.len();
    let limit = read(reader, &fields);
    if reader.problems.len() > before {
        return None;
    }
    // The parameters have been checked where they are read, so this reports only checks that exist in the core alone.
    limit.map_err(|error| reader.error(fields.position, error.to_string(), "change the parameters")).ok()
}

fn count(reader: &mut Reader, fields: &Fields<'_>, name: &str) -> u32 {
    whole(reader, fields, name, COUNT_DEFAULT, u32::MAX)
}

fn whole(reader: &mut Reader, fields: &Fields<'_>, name: &str, default: u32, max: u32) -> u32 {
    reader.or(fields.get(name), default, |reader, node| reader.whole(node, name, max))
}

/// Reads a quantity. The default is text, and is parsed by the same function. It also replaces an invalid value,
/// whose error has been recorded.
fn quantity<T>(
    reader: &mut Reader,
    node: Option<&Node>,
    default: &str,
    parse: fn(&str) -> Result<T, ValueError>,
) -> Result<T, LimitError> {
    match node.and_then(|node| reader.parsed(node, parse)) {
        Some(value) => Ok(value),
        // The defaults are valid. An invalid default would be reported as out of range.
        None => parse(default).map_err(|_| LimitError::RateZero),
    }
}

/// One of a few words. The first is the default.
fn word<T: Copy>(reader: &mut Reader, fields: &Fields<'_>, name: &str, words: &[(&str, T)]) -> T {
    reader.or(fields.get(name), words[0].1, |reader, node| reader.choice(node, name, words))
}
