//! Text -> typed. What the YAML reader says is turned into our own words here.

use serde_saphyr::{Error as Yaml, Location, Options, budget, options};

use crate::error::{Error, Place, Problem, known_instead, listed, quoted};
use crate::{TEXT_BYTES_MAX, typed};

const EXAMPLE: &str =
    "write an algorithm and its parameters, as in `token_bucket: { capacity: 10, refill: 1/s }`";

pub(crate) fn limit(yaml: &str) -> Result<typed::Limit, Error> {
    if yaml.len() > TEXT_BYTES_MAX {
        return Err(Problem {
            place: Place::default(),
            what: format!("the text has {} bytes, and at most {TEXT_BYTES_MAX} are read", yaml.len()),
            instead: EXAMPLE.to_owned(),
        }
        .in_text(""));
    }
    serde_saphyr::from_str_with_options(yaml, options()).map_err(|error| problem(&error, yaml).in_text(yaml))
}

/// A limit needs a dozen events and a depth of two; the rest is for comments, anchors and slips.
fn options() -> Options {
    options! {
        budget: budget! {
            max_events: 10_000,
            max_depth: 32,
            max_aliases: 100,
            max_anchors: 100,
            max_nodes: 10_000,
        },
        with_snippet: false,
    }
}

fn problem(error: &Yaml, yaml: &str) -> Problem {
    let (what, instead) = match error.without_snippet() {
        Yaml::SerdeUnknownVariant { variant, expected, .. } => (
            format!("{} is not an algorithm", quoted(variant)),
            known_instead(variant, expected, &format!("the algorithms are {}", listed(expected, "and"))),
        ),
        Yaml::SerdeUnknownField { field, expected, .. } => {
            let owner = algorithm_of(expected);
            (
                format!("{} is not a parameter of {owner}", quoted(field)),
                known_instead(field, expected, &format!("{owner} has {}", listed(expected, "and"))),
            )
        }
        Yaml::DuplicateMappingKey { key, .. } => (
            format!("{} stands here twice", quoted(key.as_deref().unwrap_or("a name"))),
            "remove one of the two".to_owned(),
        ),
        Yaml::ExpectedMappingEndAfterEnumVariantValue { .. } => (
            "a limit has one algorithm, and this is a second one".to_owned(),
            "remove one of the two, or make them two limits".to_owned(),
        ),
        Yaml::Eof { .. } if !yaml.trim().is_empty() => {
            return Problem {
                place: first_word(yaml),
                what: "an algorithm needs its parameters, or an empty `{}`".to_owned(),
                instead: EXAMPLE.to_owned(),
            };
        }
        Yaml::Eof { .. }
        | Yaml::ExpectedStringKeyForExternallyTaggedEnum { .. }
        | Yaml::ExternallyTaggedEnumExpectedScalarOrMapping { .. } => {
            ("there is no limit here".to_owned(), EXAMPLE.to_owned())
        }
        Yaml::Unexpected { expected: "mapping start", .. } => {
            ("the parameters must be a mapping".to_owned(), EXAMPLE.to_owned())
        }
        Yaml::Unexpected { expected: "string scalar", .. } => (
            "a single value is expected here, not a list or a mapping".to_owned(),
            "write one word or number".to_owned(),
        ),
        Yaml::MultipleDocuments { .. } => (
            "a limit is one YAML document, and this is a second one".to_owned(),
            "remove the line `---` and what follows it".to_owned(),
        ),
        Yaml::RecursiveReferencesRequireWeakTypes { .. } => {
            ("this alias stands inside of what it names".to_owned(), "write the value itself".to_owned())
        }
        Yaml::Budget { .. }
        | Yaml::AliasReplayLimitExceeded { .. }
        | Yaml::AliasExpansionLimitExceeded { .. }
        | Yaml::AliasReplayStackDepthExceeded { .. } => (
            "there is far more here than a limit has: too long, too deep, or too many aliases".to_owned(),
            EXAMPLE.to_owned(),
        ),
        other => (format!("this is not YAML: {}", without_place(&other.to_string())), EXAMPLE.to_owned()),
    };
    Problem { place: error.location().map_or(Place::default(), place), what, instead }
}

pub(crate) fn place(location: Location) -> Place {
    Place {
        line: location.line() as usize,
        column: location.column() as usize,
        chars: location.span().len() as usize,
    }
}

fn first_word(yaml: &str) -> Place {
    let (line, text) = yaml.lines().enumerate().find(|(_, text)| !text.trim().is_empty()).unwrap_or_default();
    let indent = text.chars().take_while(|c| c.is_whitespace()).count();
    Place { line: line + 1, column: indent + 1, chars: text.trim().chars().count() }
}

/// The reader names the place in its message, too; ours stands in front.
fn without_place(message: &str) -> &str {
    message.rsplit_once(" at line ").map_or(message, |(what, _)| what)
}

/// Which algorithm has these parameters. Serde names the parameters that would have been right, not their owner.
fn algorithm_of(parameters: &[&str]) -> &'static str {
    match parameters.last() {
        Some(&"style") => "token_bucket",
        Some(&"mode") => "leaky_bucket",
        Some(&"align") => "fixed_window",
        Some(&"count") => "sliding_window_log",
        _ => "sliding_window_counter",
    }
}
