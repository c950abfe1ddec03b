//! The kinds of values: what they are in the JSON Schema and on the reference page, and the kinds made of others.

use serde_json::{Value, json};

use super::Section;
use super::page::Page;
use super::schema::Definitions;
use crate::reader::Reader;
use crate::tree::Node;

/// What the value of a field may be.
pub(crate) trait Kind: Sync {
    /// The JSON Schema of the value.
    fn schema(&self, definitions: &mut Definitions) -> Value;

    /// The value on the reference page.
    fn text(&self, page: &Page) -> String;

    /// The default, as typed.
    fn default(&self) -> Option<Value> {
        None
    }

    /// The section, if the value may be a mapping with known names.
    fn section(&self) -> Option<&'static Section> {
        None
    }

    /// Visits each section below the value, with its path in the file.
    fn visit(&self, path: &str, visit: &mut dyn FnMut(&str, &'static Section)) {
        if let Some(section) = self.section() {
            visit(path, section);
        }
    }

    /// Whether the value is `true` or `false`.
    fn is_flag(&self) -> bool {
        false
    }

    /// Whether the value is a secret, which messages do not show.
    fn is_secret(&self) -> bool {
        false
    }

    /// Whether the value is an address to listen on.
    fn is_listen_address(&self) -> bool {
        false
    }

    /// Whether the value may be missing.
    fn may_be_empty(&self) -> bool {
        self.section().is_some_and(|section| section.may_be_empty)
    }
}

/// A kind whose values can be a default.
pub(crate) trait Typed: Kind + Copy {
    type Value: Copy + Sync;

    /// The value as it is typed in a file.
    fn typed(&self, value: Self::Value) -> Value;
}

/// A kind whose values are read by the row alone.
pub(crate) trait Parsed: Typed {
    /// Reads a value of the field `name`.
    fn parse(&self, reader: &mut Reader, node: &Node, name: &str) -> Option<Self::Value>;
}

/// A value with a default.
#[derive(Clone, Copy)]
pub(crate) struct Or<K: Typed> {
    pub(crate) kind: K,
    pub(crate) default: K::Value,
}

impl<K: Typed> Kind for Or<K> {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        self.kind.schema(definitions)
    }

    fn text(&self, page: &Page) -> String {
        self.kind.text(page)
    }

    fn default(&self) -> Option<Value> {
        Some(self.kind.typed(self.default))
    }

    fn section(&self) -> Option<&'static Section> {
        self.kind.section()
    }

    fn visit(&self, path: &str, visit: &mut dyn FnMut(&str, &'static Section)) {
        self.kind.visit(path, visit);
    }

    fn is_flag(&self) -> bool {
        self.kind.is_flag()
    }

    fn is_secret(&self) -> bool {
        self.kind.is_secret()
    }

    fn is_listen_address(&self) -> bool {
        self.kind.is_listen_address()
    }
}

impl<K: Typed> Typed for Or<K> {
    type Value = K::Value;

    fn typed(&self, value: K::Value) -> Value {
        self.kind.typed(value)
    }
}

impl<K: Parsed> Parsed for Or<K> {
    fn parse(&self, reader: &mut Reader, node: &Node, name: &str) -> Option<K::Value> {
        self.kind.parse(reader, node, name)
    }
}

/// A mapping with known names.
#[derive(Clone, Copy)]
pub(crate) struct Mapping(pub(crate) &'static Section);

impl Kind for Mapping {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        json!({ "$ref": definitions.section(self.0) })
    }

    fn text(&self, page: &Page) -> String {
        page.link(self.0)
    }

    fn section(&self) -> Option<&'static Section> {
        Some(self.0)
    }
}

/// A mapping with known names, or a single value in its place.
#[derive(Clone, Copy)]
pub(crate) struct Short<K>(pub(crate) K, pub(crate) &'static Section);

impl<K: Kind> Kind for Short<K> {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        json!({ "oneOf": [self.0.schema(definitions), Mapping(self.1).schema(definitions)] })
    }

    fn text(&self, page: &Page) -> String {
        format!("{}, or {}", self.0.text(page), page.link(self.1))
    }

    fn section(&self) -> Option<&'static Section> {
        Some(self.1)
    }

    fn is_secret(&self) -> bool {
        self.0.is_secret()
    }
}

impl<K: Typed> Typed for Short<K> {
    type Value = K::Value;

    fn typed(&self, value: K::Value) -> Value {
        self.0.typed(value)
    }
}

/// A value, or `off`.
#[derive(Clone, Copy)]
pub(crate) struct OffOr<K>(pub(crate) K);

impl<K: Kind> Kind for OffOr<K> {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        let off =
            json!({ "description": "Disabled. YAML 1.1 parsers read off as false.", "enum": ["off", false] });
        json!({ "anyOf": [self.0.schema(definitions), off] })
    }

    fn text(&self, page: &Page) -> String {
        format!("{}, or `off`", self.0.text(page))
    }

    fn section(&self) -> Option<&'static Section> {
        self.0.section()
    }

    fn is_secret(&self) -> bool {
        self.0.is_secret()
    }
}

impl<K: Typed> Typed for OffOr<K> {
    type Value = K::Value;

    fn typed(&self, value: K::Value) -> Value {
        self.0.typed(value)
    }
}

/// A list, or a single value as a list of one.
#[derive(Clone, Copy)]
pub(crate) struct ListOf<K> {
    pub(crate) item: K,
    pub(crate) from: usize,
    /// No maximum if it is `usize::MAX`.
    pub(crate) to: usize,
}

impl<K> ListOf<K> {
    /// A list of any length.
    pub(crate) const fn any(item: K) -> ListOf<K> {
        ListOf { item, from: 0, to: usize::MAX }
    }

    /// A list with at least one item.
    pub(crate) const fn some(item: K) -> ListOf<K> {
        ListOf { item, from: 1, to: usize::MAX }
    }
}

impl<K: Kind> Kind for ListOf<K> {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        let mut list = json!({ "type": "array", "items": self.item.schema(definitions) });
        if self.from > 0 {
            list["minItems"] = json!(self.from);
        }
        if self.to < usize::MAX {
            list["maxItems"] = json!(self.to);
        }
        json!({ "oneOf": [self.item.schema(definitions), list] })
    }

    fn text(&self, page: &Page) -> String {
        let bound = if self.to < usize::MAX { format!(" of at most {}", self.to) } else { String::new() };
        format!("{}, or a list{bound}", self.item.text(page))
    }

    fn section(&self) -> Option<&'static Section> {
        self.item.section()
    }

    fn visit(&self, path: &str, visit: &mut dyn FnMut(&str, &'static Section)) {
        self.item.visit(path, visit);
    }

    fn is_secret(&self) -> bool {
        self.item.is_secret()
    }

    fn may_be_empty(&self) -> bool {
        false
    }
}

impl<K: Typed> Typed for ListOf<K> {
    type Value = K::Value;

    fn typed(&self, value: K::Value) -> Value {
        self.item.typed(value)
    }
}

/// One of several kinds.
#[derive(Clone, Copy)]
pub(crate) struct OneOf(pub(crate) &'static [&'static dyn Kind]);

impl Kind for OneOf {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        let kinds: Vec<Value> = self.0.iter().map(|kind| kind.schema(definitions)).collect();
        json!({ "oneOf": kinds })
    }

    fn text(&self, page: &Page) -> String {
        let texts: Vec<String> = self.0.iter().map(|kind| kind.text(page)).collect();
        texts.join(", or ")
    }

    fn section(&self) -> Option<&'static Section> {
        self.0.iter().find_map(|kind| kind.section())
    }

    fn is_secret(&self) -> bool {
        self.0.iter().any(|kind| kind.is_secret())
    }
}

/// A mapping whose names the file chooses.
#[derive(Clone, Copy)]
pub(crate) struct Named<N, K> {
    /// What the names are.
    pub(crate) names: N,
    pub(crate) value: K,
    pub(crate) from: usize,
    /// No maximum if it is `usize::MAX`.
    pub(crate) to: usize,
    pub(crate) may_be_empty: bool,
}

impl<N, K> Named<N, K> {
    /// A mapping of any length.
    pub(crate) const fn any(names: N, value: K) -> Named<N, K> {
        Named { names, value, from: 0, to: usize::MAX, may_be_empty: false }
    }
}

impl<N: Kind, K: Kind> Kind for Named<N, K> {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        let mut mapping = json!({
            "type": if self.may_be_empty { json!(["object", "null"]) } else { json!("object") },
            "additionalProperties": self.value.schema(definitions),
            "propertyNames": self.names.schema(definitions),
        });
        if self.from > 0 {
            mapping["minProperties"] = json!(self.from);
        }
        if self.to < usize::MAX {
            mapping["maxProperties"] = json!(self.to);
        }
        mapping
    }

    fn text(&self, page: &Page) -> String {
        let bound = if self.to < usize::MAX { format!("at most {} of ", self.to) } else { String::new() };
        format!("mapping, {bound}{} to: {}", self.names.text(page), self.value.text(page))
    }

    fn visit(&self, path: &str, visit: &mut dyn FnMut(&str, &'static Section)) {
        self.value.visit(&format!("{path}.NAME"), visit);
    }

    fn may_be_empty(&self) -> bool {
        self.may_be_empty
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{SECTION, SecretText};

    static EMPTY: Section = SECTION;
    static CHOICE: OneOf = OneOf(&[&ListOf::any(SecretText), &SecretText]);

    #[test]
    fn wrapped_secrets_are_secrets() {
        let wrapped: [&dyn Kind; 4] =
            [&Short(SecretText, &EMPTY), &OffOr(SecretText), &ListOf::any(SecretText), &CHOICE];
        assert!(wrapped.iter().all(|kind| kind.is_secret()));
        assert!(!Short(Mapping(&EMPTY), &EMPTY).is_secret());
    }
}
