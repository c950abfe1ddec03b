//! A limit: an algorithm and its parameters, all of which are optional.

use ratekeeper_core::{BUCKETS_MAX, Limit, LimitError};

use crate::error::{Place, known_instead, listed, quoted};
use crate::quantity::{self, Fault};
use crate::reader::{Fields, Reader};
use crate::tree::{Node, Typed};
use crate::{nearest, words};

pub(crate) const EXAMPLE: &str =
    "write an algorithm and its parameters, as in `token_bucket: { capacity: 10, refill: 1/s }`";

/// The algorithms and their parameters.
pub(crate) const ALGORITHMS: [(&str, &[&str]); 5] = [
    ("token_bucket", &["capacity", "refill", "style"]),
    ("leaky_bucket", &["capacity", "leak", "mode"]),
    ("fixed_window", &["limit", "window", "align"]),
    ("sliding_window_log", &["limit", "window", "count"]),
    ("sliding_window_counter", &["limit", "window", "buckets", "edge"]),
];

pub(crate) fn algorithm_names() -> [&'static str; 5] {
    ALGORITHMS.map(|(name, _)| name)
}

const COUNT_DEFAULT: u32 = 10;
const RATE_DEFAULT: &str = "1/s";
const WINDOW_DEFAULT: &str = "60s";

/// Reads a document that is one limit.
pub(crate) fn document(reader: &mut Reader, node: &Node) -> Option<Limit> {
    match &node.typed {
        Typed::Map(entries) if !entries.is_empty() => {
            let names = algorithm_names();
            for (index, (name, _)) in entries.iter().enumerate() {
                let Typed::Word(word) = &name.typed else { continue };
                if !names.contains(&word.as_str()) {
                    let choice = format!("the algorithms are {}", listed(&names, "and"));
                    let what = format!("{} is not an algorithm", quoted(word));
                    reader.wrong(name.place, what, known_instead(word, &names, &choice));
                    return None;
                }
                if index > 0 {
                    second(reader, name.place);
                    return None;
                }
            }
            let fields = reader.named(node, "a limit", EXAMPLE)?;
            among(reader, &fields)
        }
        Typed::Word(_) => {
            reader.wrong(node.place, "an algorithm needs its parameters, or an empty `{}`", EXAMPLE);
            None
        }
        Typed::Map(_) | Typed::Nothing | Typed::List(_) => {
            reader.wrong(node.place, "there is no limit here", EXAMPLE);
            None
        }
    }
}

fn second(reader: &mut Reader, place: Place) {
    let what = "a limit has one algorithm, and this is a second one";
    reader.wrong(place, what, "remove one of the two, or make them two limits");
}

/// Reads the limit whose algorithm is one of the fields.
pub(crate) fn among(reader: &mut Reader, fields: &Fields<'_>) -> Option<Limit> {
    let mut found = ALGORITHMS.iter().filter(|(name, _)| fields.has(name));
    let Some((name, parameters)) = found.next() else {
        // A misspelt algorithm has been reported.
        let is_near = |name: &str| {
            nearest(name, &algorithm_names()).is_some() || nearest(name, &["concurrency"]).is_some()
        };
        if fields.iter().any(|entry| is_near(entry.name)) {
            return None;
        }
        let what = format!("{} has no algorithm", fields.owner);
        reader.wrong(fields.place, what, EXAMPLE);
        return None;
    };
    if let Some((other, _)) = found.next() {
        let place = fields.entry(other).map_or(fields.place, |entry| entry.place);
        second(reader, place);
        return None;
    }
    let nothing = Node::nothing(fields.place);
    let node = fields.get(name).unwrap_or(&nothing);
    if matches!(node.typed, Typed::Word(_) | Typed::List(_)) {
        reader.wrong(node.place, "the parameters must be a mapping", EXAMPLE);
        return None;
    }
    let fields = reader.parameters(node, name, parameters, EXAMPLE)?;
    let before = reader.problems.len();
    let limit = limit(reader, name, &fields);
    if reader.problems.len() > before {
        return None;
    }
    // The parameters have been checked where they are read, so this reports only checks that exist in the core alone.
    limit.map_err(|error| reader.wrong(fields.place, error.to_string(), "change the parameters")).ok()
}

fn limit(reader: &mut Reader, algorithm: &str, fields: &Fields<'_>) -> Result<Limit, LimitError> {
    let whole = |reader: &mut Reader, name: &str, default: u32, max: u32| {
        reader.or(fields.get(name), default, |reader, node| reader.whole(node, name, max))
    };
    match algorithm {
        "token_bucket" => Limit::token_bucket(
            whole(reader, "capacity", COUNT_DEFAULT, u32::MAX),
            quantity(reader, fields.get("refill"), RATE_DEFAULT, quantity::rate)?,
            word(reader, fields, "style", &words::STYLES),
        ),
        "leaky_bucket" => Limit::leaky_bucket(
            whole(reader, "capacity", COUNT_DEFAULT, u32::MAX),
            quantity(reader, fields.get("leak"), RATE_DEFAULT, quantity::rate)?,
            word(reader, fields, "mode", &words::MODES),
        ),
        "fixed_window" => Limit::fixed_window(
            whole(reader, "limit", COUNT_DEFAULT, u32::MAX),
            quantity(reader, fields.get("window"), WINDOW_DEFAULT, quantity::window)?,
            word(reader, fields, "align", &words::ALIGNS),
        ),
        "sliding_window_log" => Limit::sliding_window_log(
            whole(reader, "limit", COUNT_DEFAULT, u32::MAX),
            quantity(reader, fields.get("window"), WINDOW_DEFAULT, quantity::window)?,
            word(reader, fields, "count", &words::COUNTS),
        ),
        _ => Limit::sliding_window_counter(
            whole(reader, "limit", COUNT_DEFAULT, u32::MAX),
            quantity(reader, fields.get("window"), WINDOW_DEFAULT, quantity::window)?,
            whole(reader, "buckets", 1, BUCKETS_MAX),
            word(reader, fields, "edge", &words::EDGES),
        ),
    }
}

/// Reads a quantity. The default is text, and is parsed by the same function. It also replaces an invalid value,
/// whose error has been recorded.
fn quantity<T>(
    reader: &mut Reader,
    node: Option<&Node>,
    default: &str,
    parse: fn(&str) -> Result<T, Fault>,
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
