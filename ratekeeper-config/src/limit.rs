//! A limit: an algorithm and its parameters, all of which are optional.

use ratekeeper_core::{
    BUCKETS_MAX, EdgePolicy, LeakyMode, Limit, LimitError, LogPolicy, Rate, RefillStyle, WINDOW_MAX,
    WINDOW_MIN, WindowAlign,
};

use crate::error::{Position, known_help, listed, quoted};
use crate::reader::{Fields, Reader};
use crate::table::{Count, Field, Mapping, Or, Row, SECTION, Section, Time, UnitsPerTime, Words, secs};
use crate::tree::{Node, NodeValue};
use crate::{nearest, words};

pub(crate) const EXAMPLE: &str =
    "write an algorithm and its parameters, as in `token_bucket: { capacity: 10, refill: 1/s }`";

/// An algorithm in a configuration.
pub(crate) struct Algorithm {
    pub(crate) field: Field<Mapping>,
    read: fn(&mut Reader, &Fields<'_>) -> Result<Limit, LimitError>,
}

/// All algorithms: the only list of them.
pub(crate) static ALGORITHMS: [Algorithm; 5] = [
    Algorithm {
        field: Field::of(&TOKEN_BUCKET),
        read: |reader, fields| {
            let (capacity, refill) = (BURST.read(reader, fields), REFILL.read(reader, fields));
            Limit::token_bucket(capacity, refill, STYLE.read(reader, fields))
        },
    },
    Algorithm {
        field: Field::of(&LEAKY_BUCKET),
        read: |reader, fields| {
            let (capacity, leak) = (CAPACITY.read(reader, fields), LEAK.read(reader, fields));
            Limit::leaky_bucket(capacity, leak, MODE.read(reader, fields))
        },
    },
    Algorithm {
        field: Field::of(&FIXED_WINDOW),
        read: |reader, fields| {
            let (limit, window) = (PER_WINDOW.read(reader, fields), WINDOW.read(reader, fields));
            Limit::fixed_window(limit, window, ALIGN.read(reader, fields))
        },
    },
    Algorithm {
        field: Field::of(&SLIDING_WINDOW_LOG),
        read: |reader, fields| {
            let (limit, window) = (IN_ANY_WINDOW.read(reader, fields), WINDOW.read(reader, fields));
            Limit::sliding_window_log(limit, window, COUNT.read(reader, fields))
        },
    },
    Algorithm {
        field: Field::of(&SLIDING_WINDOW_COUNTER),
        read: |reader, fields| {
            let (limit, window) = (PER_WINDOW.read(reader, fields), WINDOW.read(reader, fields));
            let buckets = BUCKETS.read(reader, fields);
            Limit::sliding_window_counter(limit, window, buckets, EDGE.read(reader, fields))
        },
    },
];

/// The fields of the algorithms, for each section that has a limit.
pub(crate) static ALGORITHM_FIELDS: [Row; ALGORITHMS.len()] = [
    &ALGORITHMS[0].field,
    &ALGORITHMS[1].field,
    &ALGORITHMS[2].field,
    &ALGORITHMS[3].field,
    &ALGORITHMS[4].field,
];

pub(crate) static ALGORITHM_NAMES: [&str; ALGORITHMS.len()] = {
    let mut names = [""; ALGORITHMS.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = ALGORITHMS[index].field.name;
        index += 1;
    }
    names
};

static TOKEN_BUCKET: Section = Section {
    name: "token_bucket",
    meaning: "Token bucket: allows bursts up to the capacity, then requests at the refill rate.",
    fields: &[&[&BURST, &REFILL, &STYLE]],
    ..ALGORITHM
};
const BURST: Field<Or<Count>> = units("capacity", "Capacity of the bucket: the largest burst.");
const REFILL: Field<Or<UnitsPerTime>> = rate("refill", "Rate at which tokens are added.");
const STYLE: Field<Or<Words<RefillStyle>>> = Field::new(
    "style",
    "`smooth`: tokens are added continuously. `stepped`: all tokens of a period are added at the end of the period.",
    Words(&words::STYLES),
)
.or(RefillStyle::Smooth);

static LEAKY_BUCKET: Section = Section {
    name: "leaky_bucket",
    meaning: "Leaky bucket: limits requests to a steady rate.",
    fields: &[&[&CAPACITY, &LEAK, &MODE]],
    ..ALGORITHM
};
const CAPACITY: Field<Or<Count>> =
    units("capacity", "Capacity of the bucket: units that have not drained yet.");
const LEAK: Field<Or<UnitsPerTime>> = rate("leak", "Rate at which the bucket drains.");
const MODE: Field<Or<Words<LeakyMode>>> = Field::new(
    "mode",
    "`police`: allowed requests are forwarded immediately. `shape`: allowed requests are delayed to the leak rate.",
    Words(&words::MODES),
)
.or(LeakyMode::Police);

static FIXED_WINDOW: Section = Section {
    name: "fixed_window",
    meaning: "Fixed window: one counter per window.",
    fields: &[&[&PER_WINDOW, &WINDOW, &ALIGN]],
    ..ALGORITHM
};
const PER_WINDOW: Field<Or<Count>> = units("limit", "Maximum number of units per window.");
const WINDOW: Field<Or<Time>> = Field::new(
    "window",
    "Length of the window.",
    Time { subject: "a window", from: WINDOW_MIN, to: WINDOW_MAX },
)
.or(secs(60));
const ALIGN: Field<Or<Words<WindowAlign>>> = Field::new(
    "align",
    "`clock`: windows are aligned to the clock. `first_request`: a window starts with the first request of a key.",
    Words(&words::ALIGNS),
)
.or(WindowAlign::Clock);

static SLIDING_WINDOW_LOG: Section = Section {
    name: "sliding_window_log",
    meaning: "Sliding window log: exact in every window, wherever it starts.",
    fields: &[&[&IN_ANY_WINDOW, &WINDOW, &COUNT]],
    ..ALGORITHM
};
const IN_ANY_WINDOW: Field<Or<Count>> = units("limit", "Maximum number of units in any window.");
const COUNT: Field<Or<Words<LogPolicy>>> = Field::new(
    "count",
    "`admitted`: only allowed requests count. `all`: denied requests count as well.",
    Words(&words::COUNTS),
)
.or(LogPolicy::Admitted);

static SLIDING_WINDOW_COUNTER: Section = Section {
    name: "sliding_window_counter",
    meaning: "Sliding window counter: approximates the log in a few bytes per key.",
    fields: &[&[&PER_WINDOW, &WINDOW, &BUCKETS, &EDGE]],
    ..ALGORITHM
};
const BUCKETS: Field<Or<Count>> =
    Field::new("buckets", "Number of buckets per window.", Count { to: BUCKETS_MAX }).or(1);
const EDGE: Field<Or<Words<EdgePolicy>>> = Field::new(
    "edge",
    "Weight of the oldest bucket, which the window covers in part. `weigh`: its share. `drop`: nothing. `keep`: all of it.",
    Words(&words::EDGES),
)
.or(EdgePolicy::Weigh);

/// What all algorithms have in common: each parameter has a default.
const ALGORITHM: Section = Section { example: EXAMPLE, may_be_empty: true, ..SECTION };
const ONE_PER_SECOND: Rate = match Rate::new(1, secs(1)) {
    Ok(rate) => rate,
    Err(_) => unreachable!(),
};

const fn units(name: &'static str, meaning: &'static str) -> Field<Or<Count>> {
    Field::new(name, meaning, Count { to: u32::MAX }).or(10)
}

const fn rate(name: &'static str, meaning: &'static str) -> Field<Or<UnitsPerTime>> {
    Field::new(name, meaning, UnitsPerTime).or(ONE_PER_SECOND)
}

/// Reads a document that is one limit.
pub(crate) fn document(reader: &mut Reader, node: &Node) -> Option<Limit> {
    match &node.value {
        NodeValue::Map(entries) if !entries.is_empty() => {
            for (index, (name, _)) in entries.iter().enumerate() {
                let NodeValue::Word(word) = &name.value else { continue };
                if !ALGORITHM_NAMES.contains(&word.as_str()) {
                    let choice = format!("Algorithms: {}", listed(&ALGORITHM_NAMES));
                    let message = format!("unknown algorithm {}", quoted(word));
                    reader.error(name.position, message, known_help(word, &ALGORITHM_NAMES, &choice));
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
    let mut found = ALGORITHMS.iter().filter(|algorithm| fields.has(algorithm.field.name));
    let Some(Algorithm { field: Field { name, kind: Mapping(section), .. }, read }) = found.next() else {
        // A misspelt algorithm has been reported.
        let is_near = |name: &str| {
            nearest(name, &ALGORITHM_NAMES).is_some() || nearest(name, &["concurrency"]).is_some()
        };
        if fields.iter().any(|entry| is_near(entry.name)) {
            return None;
        }
        let message = format!("missing algorithm in {}", fields.owner);
        reader.error(fields.position, message, EXAMPLE);
        return None;
    };
    if let Some(other) = found.next() {
        let position = fields.entry(other.field.name).map_or(fields.position, |entry| entry.position);
        second(reader, position);
        return None;
    }
    let nothing = Node::nothing(fields.position);
    let node = fields.get(name).unwrap_or(&nothing);
    if matches!(node.value, NodeValue::Word(_) | NodeValue::List(_)) {
        reader.error(node.position, "the parameters of an algorithm must be a mapping", EXAMPLE);
        return None;
    }
    let fields = reader.parameters(node, &quoted(name), section)?;
    let before = reader.problems.len();
    let limit = read(reader, &fields);
    if reader.problems.len() > before {
        return None;
    }
    // The parameters have been checked where they are read, so this reports only checks that exist in the core alone.
    limit.map_err(|error| reader.error(fields.position, error.to_string(), "change the parameters")).ok()
}
