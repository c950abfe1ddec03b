//! Edits of paths and headers.

use std::collections::HashMap;

use ratekeeper_rules::path::{Pattern, Template, normalize};
use ratekeeper_rules::when::When;

use crate::HEADER_EDITS_MAX;
use crate::environment::{Environment, Secret};
use crate::error::quoted;
use crate::quantity::ValueError;
use crate::reader::{Entry, Fields, Reader};
use crate::table::{Field, HeaderName, ListOf, Named, SECTION, SecretText, Section};
use crate::tree::{Node, NodeValue};
use crate::when::header_name;

/// The edit of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathEdit {
    /// Keeps the path.
    Keep,
    /// Removes this prefix where it matches whole segments. It starts with a slash and does not end with one. `/api`
    /// turns `/api/x` into `/x` and `/api` into `/`, and keeps `/apis`.
    Strip(String),
    /// Builds a new path from the names of the pattern. The route has exactly one pattern.
    Rewrite(Template),
}

/// The edits of headers, in this order: remove, set, add.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderEdits {
    /// Headers to set, with names in lower case. Existing values are replaced.
    pub set: Vec<(String, Secret)>,
    /// Headers to add, with names in lower case. Existing values are kept.
    pub add: Vec<(String, Secret)>,
    /// Headers to remove, with names in lower case.
    pub remove: Vec<String>,
}

const STRIP_EXAMPLE: &str = "write the segments to remove, as in `strip_prefix: /api`";

/// The edits of headers in one direction.
pub(super) static HEADERS: Section = Section {
    name: "headers",
    meaning: "Changes to headers.",
    example: "write as in `{ set: { X-Env: live }, add: { Vary: Origin }, remove: [Server] }`",
    fields: &[&[
        &Field::new(
            "set",
            "Headers to set. Existing values are replaced.",
            Named::any(HeaderName, SecretText),
        ),
        &Field::new(
            "add",
            "Headers to add. Existing values are kept.",
            Named::any(HeaderName, ListOf::some(SecretText)),
        ),
        &Field::new("remove", "Headers to remove.", ListOf::any(HeaderName)),
    ]],
    ..SECTION
};

/// Headers that the gateway sets itself: message framing, host, and hop-by-hop headers.
const OWN_NAMES: [&str; 8] =
    ["connection", "transfer-encoding", "content-length", "host", "keep-alive", "te", "trailer", "upgrade"];
const OWN_PREFIX: &str = "proxy-";
/// Maximum length of a value, in bytes. Servers reject headers that are much longer.
const VALUE_BYTES_MAX: usize = 4_096;

pub(super) fn path_edit(reader: &mut Reader, fields: &Fields<'_>, when: &When) -> PathEdit {
    match (fields.get("strip_prefix"), fields.get("rewrite")) {
        (None, None) => PathEdit::Keep,
        (Some(node), None) => reader.or(Some(node), PathEdit::Keep, |reader, node| strip(reader, node, when)),
        (None, Some(node)) => {
            reader.or(Some(node), PathEdit::Keep, |reader, node| rewrite(reader, fields, node, when))
        }
        (Some(_), Some(node)) => {
            let message = "a route has `strip_prefix` or `rewrite`, not both";
            reader.error(
                node.position,
                message,
                "remove `strip_prefix`, and write the complete path in `rewrite`",
            );
            PathEdit::Keep
        }
    }
}

fn strip(reader: &mut Reader, node: &Node, when: &When) -> Option<PathEdit> {
    let paths = reader.paths;
    let prefix = reader.parsed(node, |word| {
        let value_error = |message: String, help: &str| Err(ValueError { message, help: help.to_owned() });
        let typed = word.trim_end_matches('/');
        if !word.starts_with('/') {
            let message = format!("the prefix {} does not start with a slash", quoted(word));
            return value_error(message, &format!("write {}", quoted(&format!("/{word}"))));
        }
        if typed.is_empty() {
            return value_error("the prefix is empty".to_owned(), STRIP_EXAMPLE);
        }
        if word.contains(['*', '{', '}']) {
            let message = "a prefix cannot be a pattern".to_owned();
            return value_error(message, "write as in `strip_prefix: /api`, or use `rewrite`");
        }
        match normalize(typed, paths) {
            Ok(normal) if normal == typed || paths.ignore_case => Ok(normal.into_owned()),
            Ok(normal) => {
                let message = format!("the prefix {} is not normalized", quoted(word));
                value_error(message, &format!("write {}", quoted(&normal)))
            }
            Err(why) => value_error(format!("the prefix contains {}", why.what), STRIP_EXAMPLE),
        }
    })?;
    if !when.paths.is_empty() && !when.paths.iter().any(|pattern| may_begin_with(pattern, &prefix)) {
        let message = format!("no path of the route starts with {}", quoted(&prefix));
        reader.error(node.position, message, "write the start of the route's `path`");
        return None;
    }
    Some(PathEdit::Strip(prefix))
}

/// Whether a path that matches the pattern can start with these segments.
fn may_begin_with(pattern: &Pattern, prefix: &str) -> bool {
    let pattern = pattern.to_string();
    let mut segments = pattern.split('/').skip(1);
    for wanted in prefix.split('/').skip(1) {
        match segments.next() {
            Some("**") => return true,
            Some(segment) if segment.contains(['*', '{']) || segment == wanted => {}
            _ => return false,
        }
    }
    true
}

fn rewrite(reader: &mut Reader, fields: &Fields<'_>, node: &Node, when: &When) -> Option<PathEdit> {
    let [pattern] = when.paths.as_slice() else {
        // An invalid pattern is missing here, and its error has been recorded.
        if fields.lacks("path") || when.paths.len() > 1 {
            let message = "`rewrite` needs exactly one `path`";
            reader.error(node.position, message, "write one path, as in `path: /users/{id}/**`");
        }
        return None;
    };
    let template = reader.parsed(node, |word| {
        Template::parse(word, pattern).map_err(|error| ValueError {
            message: error.what().to_owned(),
            help: error.instead().to_owned(),
        })
    });
    template.map(PathEdit::Rewrite)
}

/// `owner` is the field that contains the edits.
pub(super) fn header_edits(
    reader: &mut Reader,
    node: &Node,
    owner: &str,
    environment: &dyn Environment,
) -> HeaderEdits {
    let mut edits = HeaderEdits::default();
    let fields = reader.fields(node, &quoted(owner), &HEADERS);
    let Some(fields) = fields else { return edits };
    // Values are marked as secret even if there are other errors, because error messages show the line.
    for entry in fields.iter().filter(|entry| entry.name != "remove") {
        reader.hide(entry.node);
    }
    let set = values(reader, &fields, "set");
    let add = values(reader, &fields, "add");
    let remove = fields.get("remove").map_or(Vec::new(), |node| reader.list(node));
    let count = set.len() + add.len() + remove.len();
    if count > HEADER_EDITS_MAX {
        let message = format!("too many header edits: {count} of at most {HEADER_EDITS_MAX}");
        reader.error(node.position, message, "remove some of them");
        return edits;
    }
    let mut removed = HashMap::new();
    for node in remove {
        let Some(name) = reader.parsed(node, edited_name) else { continue };
        let is_written = set.iter().chain(&add).any(|(other, _)| *other == name);
        if is_written {
            let message = format!("the header {} is both removed and written", quoted(&name));
            reader.error(node.position, message, "write it only under `set`, which replaces existing values");
        } else {
            reader.is_new(&mut removed, name.clone(), node.position, |name| {
                format!("duplicate header {}", quoted(name))
            });
        }
        edits.remove.push(name);
    }
    let mut read = |named: Vec<(String, &Node)>| -> Vec<(String, Secret)> {
        let values =
            named.into_iter().filter_map(|(name, node)| Some((name, value(reader, node, environment)?)));
        values.collect()
    };
    edits.set = read(set);
    edits.add = read(add);
    edits
}

/// Header names in lower case, with the nodes of their values.
fn values<'n>(reader: &mut Reader, fields: &Fields<'n>, kind: &str) -> Vec<(String, &'n Node)> {
    let Some(node) = fields.get(kind) else { return Vec::new() };
    let Some(named) = reader.named(node, &quoted(kind), HEADERS.example) else { return Vec::new() };
    let mut all: Vec<(String, &'n Node)> = Vec::new();
    let mut seen = HashMap::new();
    for Entry { name, position, node } in named.iter() {
        let name = match edited_name(name) {
            Ok(name) => name,
            Err(value_error) => {
                reader.error(position, value_error.message, value_error.help);
                continue;
            }
        };
        if !reader
            .is_new(&mut seen, name.clone(), position, |name| format!("duplicate header {}", quoted(name)))
        {
            continue;
        }
        if matches!(node.value, NodeValue::Nothing) {
            let message = format!("the header {} has no value", quoted(&name));
            reader.error(position, message, "write a value, or put the name under `remove`");
            continue;
        }
        if kind == "set" && matches!(node.value, NodeValue::List(_)) {
            let help = "write one value; use `add` for several values";
            reader.error(node.position, "`set` needs a single value", help);
            continue;
        }
        let nodes = reader.some(node, HEADERS.example);
        all.extend(nodes.into_iter().map(|node| (name.clone(), node)));
    }
    all
}

/// The name of a header that may be edited.
fn edited_name(word: &str) -> Result<String, ValueError> {
    let name = header_name(word)?;
    let message = match name.as_str() {
        "host" => "the gateway sets `host` itself".to_owned(),
        own if OWN_NAMES.contains(&own) || own.starts_with(OWN_PREFIX) => {
            format!("{} is a hop-by-hop header, which the gateway sets itself", quoted(own))
        }
        _ => return Ok(name),
    };
    Err(ValueError { message, help: "remove it; only end-to-end headers can be edited".to_owned() })
}

/// The value of a header. It may be a password, so messages do not quote it.
fn value(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Secret> {
    let value = reader.secret(node, "the value", environment)?;
    let text = value.reveal();
    let is_visible = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
    let message = if text.len() > VALUE_BYTES_MAX {
        format!("the value has {} bytes; the maximum is {VALUE_BYTES_MAX}", text.len())
    } else if !text.bytes().all(is_visible) || text.trim() != text {
        "a header value must be plain ASCII on one line, without surrounding spaces".to_owned()
    } else {
        return Some(value);
    };
    reader.error(node.position, message, "write printable ASCII characters, or `${NAME}`");
    None
}
