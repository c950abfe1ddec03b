//! The kinds of values that are text. The code of a section reads them.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::Mapping;
use super::kind::{Kind, Typed};
use super::page::Page;
use super::schema::Definitions;
use crate::environment::FILE;

/// A single word or number.
#[derive(Clone, Copy)]
pub(crate) struct TextValue {
    /// What it is, for the reference page.
    subject: &'static str,
    /// Whether YAML must read it as text: no number, no boolean.
    is_string: bool,
    pattern: &'static str,
    chars_min: usize,
    chars_max: usize,
    /// Words that it may not be.
    excluded: &'static [&'static str],
}

/// Any word or number.
pub(crate) const WORD: TextValue = TextValue {
    subject: "text",
    is_string: false,
    pattern: "",
    chars_min: 0,
    chars_max: usize::MAX,
    excluded: &[],
};

pub(crate) const fn string(subject: &'static str) -> TextValue {
    TextValue { subject, is_string: true, ..WORD }
}

impl TextValue {
    pub(crate) const fn named(self, subject: &'static str) -> TextValue {
        TextValue { subject, ..self }
    }

    pub(crate) const fn pattern(self, pattern: &'static str) -> TextValue {
        TextValue { pattern, ..self }
    }

    pub(crate) const fn chars(self, chars_min: usize, chars_max: usize) -> TextValue {
        TextValue { chars_min, chars_max, ..self }
    }

    /// At least one character.
    pub(crate) const fn filled(self) -> TextValue {
        self.chars(1, usize::MAX)
    }

    pub(crate) const fn except(self, excluded: &'static [&'static str]) -> TextValue {
        TextValue { excluded, ..self }
    }
}

impl Kind for TextValue {
    fn schema(&self, _: &mut Definitions) -> Value {
        let mut schema = json!({
            "type": if self.is_string { json!("string") } else { json!(["string", "number", "boolean"]) }
        });
        if self.chars_min > 0 {
            schema["minLength"] = json!(self.chars_min);
        }
        if self.chars_max < usize::MAX {
            schema["maxLength"] = json!(self.chars_max);
        }
        if !self.pattern.is_empty() {
            schema["pattern"] = json!(self.pattern);
        }
        if !self.excluded.is_empty() {
            schema["not"] = json!({ "enum": self.excluded });
        }
        schema
    }

    fn text(&self, _: &Page) -> String {
        self.subject.to_owned()
    }
}

impl Typed for TextValue {
    type Value = &'static str;

    fn typed(&self, value: &'static str) -> Value {
        json!(value)
    }
}

/// The name of a header.
#[derive(Clone, Copy)]
pub(crate) struct HeaderName;

impl Kind for HeaderName {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        string("header").pattern("^[!#$%&'*+.^_`|~0-9A-Za-z-]+$").schema(definitions)
    }

    fn text(&self, _: &Page) -> String {
        "header name".to_owned()
    }
}

impl Typed for HeaderName {
    type Value = &'static str;

    fn typed(&self, value: &'static str) -> Value {
        json!(value)
    }
}

/// An IP address and a port to listen on.
#[derive(Clone, Copy)]
pub(crate) struct Listen;

impl Kind for Listen {
    fn schema(&self, _: &mut Definitions) -> Value {
        json!({ "description": "IP address and port.", "type": "string" })
    }

    fn text(&self, _: &Page) -> String {
        "IP address and port".to_owned()
    }

    fn is_listen_address(&self) -> bool {
        true
    }
}

impl Typed for Listen {
    type Value = SocketAddr;

    fn typed(&self, value: SocketAddr) -> Value {
        json!(value.to_string())
    }
}

/// IP addresses and networks.
pub(crate) const fn network() -> TextValue {
    string("IP address or network")
}

/// A secret: text with environment variables, or a file.
#[derive(Clone, Copy)]
pub(crate) struct SecretText;

impl Kind for SecretText {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        let value = json!({ "oneOf": [WORD.filled().schema(definitions), FileText.schema(definitions)] });
        json!({ "$ref": definitions.secret(value) })
    }

    fn text(&self, page: &Page) -> String {
        format!("secret: text, or {}", page.link(&FILE))
    }

    fn is_secret(&self) -> bool {
        true
    }
}

/// The content of a file.
#[derive(Clone, Copy)]
pub(crate) struct FileText;

impl Kind for FileText {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        Mapping(&FILE).schema(definitions)
    }

    fn text(&self, page: &Page) -> String {
        page.link(&FILE)
    }
}

/// A mapping with any content.
#[derive(Clone, Copy)]
pub(crate) struct AnyMapping;

impl Kind for AnyMapping {
    fn schema(&self, _: &mut Definitions) -> Value {
        json!({ "type": "object" })
    }

    fn text(&self, _: &Page) -> String {
        "mapping".to_owned()
    }
}
