//! Edits of paths and headers.

use std::collections::HashSet;

use ratekeeper_rules::path::{Pattern, Template, normalise};
use ratekeeper_rules::when::When;

use crate::error::quoted;
use crate::outside::{Environment, Secret};
use crate::quantity::Fault;
use crate::reader::{Entry, Fields, Reader};
use crate::tree::{Node, Typed};
use crate::when::header_name;
use crate::{HEADER_EDITS_MAX, names};

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

const STRIP_EXAMPLE: &str = "write the segments that are taken off, as in `strip_prefix: /api`";
const HEADERS_EXAMPLE: &str =
    "write as in `{ set: { X-Env: live }, add: { Vary: Origin }, remove: [Server] }`";
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
            let what = "a path is stripped or rewritten, not both";
            reader.wrong(
                node.place,
                what,
                "remove `strip_prefix`, and write the whole new path in `rewrite`",
            );
            PathEdit::Keep
        }
    }
}

fn strip(reader: &mut Reader, node: &Node, when: &When) -> Option<PathEdit> {
    let spelling = reader.spelling;
    let prefix = reader.parsed(node, |word| {
        let fault = |what: String, instead: &str| Err(Fault { what, instead: instead.to_owned() });
        let typed = word.trim_end_matches('/');
        if !word.starts_with('/') {
            let what = format!("the prefix {} does not begin with a slash", quoted(word));
            return fault(what, &format!("write {}", quoted(&format!("/{word}"))));
        }
        if typed.is_empty() {
            return fault("this prefix has nothing to take off".to_owned(), STRIP_EXAMPLE);
        }
        if word.contains(['*', '{', '}']) {
            let what = "a prefix is plain text, and no pattern".to_owned();
            return fault(what, "write as in `strip_prefix: /api`, or make the new path by `rewrite`");
        }
        match normalise(typed, spelling) {
            Ok(normal) if normal == typed || spelling.ignore_case => Ok(normal.into_owned()),
            Ok(normal) => {
                let what = format!("the prefix {} can be read in several ways", quoted(word));
                fault(what, &format!("write {}", quoted(&normal)))
            }
            Err(why) => fault(format!("the prefix has {}", why.what), STRIP_EXAMPLE),
        }
    })?;
    if !when.paths.is_empty() && !when.paths.iter().any(|pattern| may_begin_with(pattern, &prefix)) {
        let what = format!("no path of this route begins with {}", quoted(&prefix));
        reader.wrong(node.place, what, "write what stands in front of the `path` of the route");
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
        if !fields.has("path") || when.paths.len() > 1 {
            let what = "a rewritten path is made of one pattern, and this route does not have one";
            reader.wrong(node.place, what, "give the route one `path`, as in `path: /users/{id}/**`");
        }
        return None;
    };
    let template = reader.parsed(node, |word| {
        Template::parse(word, pattern)
            .map_err(|error| Fault { what: error.what().to_owned(), instead: error.instead().to_owned() })
    });
    template.map(PathEdit::Rewrite)
}

/// `owner` is the field that contains the edits.
pub(super) fn header_edits(
    reader: &mut Reader,
    node: &Node,
    owner: &str,
    outside: &dyn Environment,
) -> HeaderEdits {
    let mut edits = HeaderEdits::default();
    let Some(fields) = reader.fields(node, owner, names::HEADERS, HEADERS_EXAMPLE) else { return edits };
    // Values are marked as secret even if there are other errors, because error messages show the line.
    for entry in fields.iter().filter(|entry| entry.name != "remove") {
        reader.hide(entry.node);
    }
    let set = values(reader, &fields, "set");
    let add = values(reader, &fields, "add");
    let remove = fields.get("remove").map_or(Vec::new(), |node| reader.list(node));
    let count = set.len() + add.len() + remove.len();
    if count > HEADER_EDITS_MAX {
        let what = format!("there are {count} edits of headers, and a route has at most {HEADER_EDITS_MAX}");
        reader.wrong(node.place, what, "have fewer of them");
        return edits;
    }
    let mut removed = HashSet::new();
    for node in remove {
        let Some(name) = reader.parsed(node, edited_name) else { continue };
        let is_written = set.iter().chain(&add).any(|(other, _)| *other == name);
        if is_written {
            let what = format!("{} is removed here, and written as well", quoted(&name));
            reader.wrong(node.place, what, "write it under `set` alone: that takes away what there was");
        } else if !removed.insert(name.clone()) {
            let what = format!("{} stands here twice", quoted(&name));
            reader.wrong(node.place, what, "remove one of the two");
        }
        edits.remove.push(name);
    }
    let mut read = |named: Vec<(String, &Node)>| -> Vec<(String, Secret)> {
        let values = named.into_iter().filter_map(|(name, node)| Some((name, value(reader, node, outside)?)));
        values.collect()
    };
    edits.set = read(set);
    edits.add = read(add);
    edits
}

/// Header names in lower case, with the nodes of their values.
fn values<'n>(reader: &mut Reader, fields: &Fields<'n>, kind: &str) -> Vec<(String, &'n Node)> {
    let Some(node) = fields.get(kind) else { return Vec::new() };
    let Some(named) = reader.named(node, kind, HEADERS_EXAMPLE) else { return Vec::new() };
    let mut all: Vec<(String, &'n Node)> = Vec::new();
    let mut seen = HashSet::new();
    for Entry { name, place, node } in named.iter() {
        let name = match edited_name(name) {
            Ok(name) => name,
            Err(fault) => {
                reader.wrong(place, fault.what, fault.instead);
                continue;
            }
        };
        if !seen.insert(name.clone()) {
            let what = format!("{} stands here twice", quoted(&name));
            reader.wrong(place, what, "remove one of the two: case does not count");
            continue;
        }
        if matches!(node.typed, Typed::Nothing) {
            let what = format!("there is nothing behind {}", quoted(&name));
            reader.wrong(place, what, "write a value, or put the name under `remove`");
            continue;
        }
        if kind == "set" && matches!(node.typed, Typed::List(_)) {
            let instead = "write one value; several for one name stand under `add`";
            reader.wrong(node.place, "a header is set to one value", instead);
            continue;
        }
        let nodes = reader.some(node, HEADERS_EXAMPLE);
        all.extend(nodes.into_iter().map(|node| (name.clone(), node)));
    }
    all
}

/// The name of a header that may be edited.
fn edited_name(word: &str) -> Result<String, Fault> {
    let name = header_name(word)?;
    let what = match name.as_str() {
        "host" => "`host` says for whom a request is, and the gateway writes it itself".to_owned(),
        own if OWN_NAMES.contains(&own) || own.starts_with(OWN_PREFIX) => {
            format!("{} is between two servers, and the gateway writes it itself", quoted(own))
        }
        _ => return Ok(name),
    };
    Err(Fault { what, instead: "remove it; headers that both ends see can be edited".to_owned() })
}

/// The value of a header. It may be a password, so messages do not quote it.
fn value(reader: &mut Reader, node: &Node, outside: &dyn Environment) -> Option<Secret> {
    let value = reader.secret(node, "value", outside)?;
    let text = value.reveal();
    let is_visible = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
    let what = if text.len() > VALUE_BYTES_MAX {
        format!("this value has {} bytes, and a header has at most {VALUE_BYTES_MAX}", text.len())
    } else if !text.bytes().all(is_visible) || text.trim() != text {
        "a header has plain ASCII, on one line and without spaces around it".to_owned()
    } else {
        return Some(value);
    };
    reader.wrong(node.place, what, "write letters, digits, signs and single spaces, or `${NAME}`");
    None
}
