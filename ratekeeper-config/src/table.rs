//! The field table: each fact about a field of the configuration, once.
//!
//! Each mapping of the file is a [`Section`] next to the code that reads it, and its rows are [`Field`]s. The reader takes
//! names, defaults and ranges from the rows; the JSON Schema and the reference page are generated from them.

mod kind;
mod page;
mod scalar;
mod schema;
mod text;

use std::fmt::Display;

pub(crate) use kind::{Kind, ListOf, Mapping, Named, OffOr, OneOf, Or, Parsed, Short, Typed};
pub(crate) use page::Page;
pub use page::reference_page;
pub(crate) use scalar::{
    Count, Flag, MemorySize, Percent, Time, UnitsPerTime, Whole, Words, days, hours, ms, secs,
};
pub(crate) use schema::Definitions;
pub use schema::schema;
pub(crate) use text::{
    AnyMapping, FileText, HeaderName, Listen, SecretText, TextValue, WORD, network, string,
};

use crate::reader::{Fields, Reader};
use crate::tree::Node;

/// A mapping of the file with known names.
pub(crate) struct Section {
    /// The name of its definition in the JSON Schema. No two sections share it.
    pub(crate) name: &'static str,
    pub(crate) meaning: &'static str,
    /// What to write, for messages.
    pub(crate) example: &'static str,
    /// The fields, in groups, because some sections share fields.
    pub(crate) fields: &'static [&'static [Row]],
    /// What fields require of each other. The reader checks it with messages of its own.
    pub(crate) constraints: &'static [Constraint],
    /// Whether a name without a value means an empty mapping. Otherwise the value was probably forgotten.
    pub(crate) may_be_empty: bool,
}

/// A field of any kind.
pub(crate) type Row = &'static Field<dyn Kind>;

/// A section without fields, for the rest of a struct expression.
pub(crate) const SECTION: Section =
    Section { name: "", meaning: "", example: "", fields: &[], constraints: &[], may_be_empty: false };

/// A field of a section: its name, its meaning, and the kind of its value with range and default.
pub(crate) struct Field<K: ?Sized> {
    pub(crate) name: &'static str,
    pub(crate) meaning: &'static str,
    pub(crate) is_required: bool,
    /// What applies without the field, if it depends on other settings.
    pub(crate) fallback: &'static str,
    pub(crate) kind: K,
}

/// What the fields of a section require of each other.
pub(crate) enum Constraint {
    /// Exactly one of these fields, in groups; a flag counts if it is true.
    ExactlyOne(&'static [&'static [&'static str]]),
    AtMostOne(&'static [&'static [&'static str]]),
    /// Any field.
    AtLeastOne,
    /// The first field needs the second.
    Needs(&'static str, &'static str),
    /// The first field needs the third if it has this value.
    NeedsIf(&'static str, &'static str, &'static str),
    /// Without the first field, or without all of the others.
    Excludes(&'static str, &'static [&'static str]),
}

/// Words as a list of code, for the reference page.
pub(crate) fn as_code<T: Display>(words: impl IntoIterator<Item = T>) -> String {
    let words: Vec<String> = words.into_iter().map(|word| format!("`{word}`")).collect();
    words.join(", ")
}

impl Section {
    pub(crate) fn rows(&self) -> impl Iterator<Item = Row> {
        self.fields.iter().copied().flatten().copied()
    }

    pub(crate) fn row(&self, name: &str) -> Option<Row> {
        self.rows().find(|row| row.name == name)
    }

    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.rows().map(|row| row.name).collect()
    }

    /// The field, of those in a mapping, that a misplaced name should be indented under. Those fields may themselves be
    /// misplaced.
    pub(crate) fn owner_of<'f>(
        &'static self,
        name: &str,
        fields: impl Iterator<Item = &'f str>,
    ) -> Option<&'f str> {
        let mut open = vec![self];
        let mut owner = None;
        for field in fields {
            let inner =
                open.iter().rev().find_map(|section| section.row(field)).and_then(|row| row.kind.section());
            let Some(inner) = inner else { continue };
            if inner.row(name).is_some() {
                owner = Some(field);
            }
            open.push(inner);
        }
        owner
    }
}

impl Field<Mapping> {
    /// A field that has the name and the meaning of its section.
    pub(crate) const fn of(section: &'static Section) -> Field<Mapping> {
        Field::section(section.name, section)
    }

    /// A field that has the meaning of its section.
    pub(crate) const fn section(name: &'static str, section: &'static Section) -> Field<Mapping> {
        Field::new(name, section.meaning, Mapping(section))
    }
}

impl<K: Copy> Field<K> {
    pub(crate) const fn new(name: &'static str, meaning: &'static str, kind: K) -> Field<K> {
        Field { name, meaning, is_required: false, fallback: "", kind }
    }

    pub(crate) const fn required(self) -> Field<K> {
        Field { is_required: true, ..self }
    }

    /// Says what applies without the field.
    pub(crate) const fn otherwise(self, fallback: &'static str) -> Field<K> {
        Field { fallback, ..self }
    }
}

impl<K: Typed> Field<K> {
    /// Sets the default.
    pub(crate) const fn or(self, default: K::Value) -> Field<Or<K>> {
        let Field { name, meaning, is_required, fallback, kind } = self;
        Field { name, meaning, is_required, fallback, kind: Or { kind, default } }
    }
}

impl<K: Typed> Field<Or<K>> {
    pub(crate) const fn default(&self) -> K::Value {
        self.kind.default
    }
}

impl<K: Parsed> Field<K> {
    /// Reads a value of the field.
    pub(crate) fn parse(&self, reader: &mut Reader, node: &Node) -> Option<K::Value> {
        self.kind.parse(reader, node, self.name)
    }

    /// Reads the field if it is there.
    pub(crate) fn optional(&self, reader: &mut Reader, fields: &Fields<'_>) -> Option<K::Value> {
        fields.get(self.name).and_then(|node| self.parse(reader, node))
    }
}

impl<K: Parsed> Field<Or<K>> {
    /// Reads the field. Returns its default if it is missing or invalid.
    pub(crate) fn read(&self, reader: &mut Reader, fields: &Fields<'_>) -> K::Value {
        self.optional(reader, fields).unwrap_or(self.default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::DOCUMENT;

    fn visit(section: &'static Section, all: &mut Vec<&'static Section>) {
        if all.iter().any(|other| std::ptr::eq(*other, section)) {
            return;
        }
        all.push(section);
        for row in section.rows() {
            row.kind.visit("", &mut |_, section| visit(section, all));
        }
    }

    #[test]
    fn names_of_sections_and_fields_are_unique() {
        let mut all = Vec::new();
        visit(&DOCUMENT, &mut all);
        assert!(all.len() > 35, "{} sections", all.len());
        for (index, section) in all.iter().enumerate() {
            assert!(all[..index].iter().all(|other| other.name != section.name), "{}", section.name);
            let names = section.names();
            assert!((1..names.len()).all(|index| !names[..index].contains(&names[index])), "{names:?}");
            assert!(section.example.starts_with("write "), "{}", section.name);
        }
    }

    #[test]
    fn constraints_name_fields_of_their_section() {
        let mut all = Vec::new();
        visit(&DOCUMENT, &mut all);
        for section in all {
            for constraint in section.constraints {
                let names = match constraint {
                    Constraint::ExactlyOne(groups) | Constraint::AtMostOne(groups) => groups.concat(),
                    Constraint::AtLeastOne => Vec::new(),
                    Constraint::Needs(name, other) | Constraint::NeedsIf(name, _, other) => {
                        vec![*name, *other]
                    }
                    Constraint::Excludes(name, others) => [&[*name], *others].concat(),
                };
                assert!(names.iter().all(|name| section.row(name).is_some()), "{}: {names:?}", section.name);
            }
        }
    }

    #[test]
    fn misplaced_name_has_an_owner() {
        let owner = |name, fields: &[&'static str]| DOCUMENT.owner_of(name, fields.iter().copied());
        assert_eq!(owner("routes", &["gateway", "log"]), Some("gateway"));
        assert_eq!(owner("listen", &["gateway", "admin"]), Some("admin"));
        // `redis` is misplaced as well.
        assert_eq!(owner("deadline", &["store", "redis"]), Some("redis"));
        assert_eq!(owner("deadline", &["store"]), None);
    }
}
