//! Environment variables and files that a configuration refers to.

use std::fmt;
use std::path::PathBuf;

use crate::error::quoted;
use crate::mask::{is_reference, is_variable};
use crate::names;
use crate::reader::Reader;
use crate::tree::{Node, Typed};

/// The environment of a configuration: variables and files.
pub trait Environment {
    /// The value of an environment variable.
    fn variable(&self, name: &str) -> Option<String>;

    /// The content of a file.
    ///
    /// # Errors
    /// Returns the reason if the file cannot be read.
    fn file(&self, path: &str) -> Result<String, String>;

    /// The path of that file, for later reloads.
    fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(path)
    }
}

/// A secret text. It is never printed, not even by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

const EXAMPLE: &str =
    "write the text itself, `${NAME}` for a variable of the environment, or `{ file: path }`";

/// Whether the node shows only the name of a variable, or an address whose password is masked separately.
fn is_only_variable(node: &Node) -> bool {
    matches!(&node.typed, Typed::Word(word) if is_reference(word) || word.contains("://"))
}

impl Reader {
    /// Reads a secret: text in which `${NAME}` is replaced by an environment variable, or `{ file: path }` for the
    /// content of a file. Messages never quote it.
    pub(crate) fn secret(&mut self, node: &Node, name: &str, outside: &dyn Environment) -> Option<Secret> {
        let text = match node.typed {
            Typed::Map(_) => self.file(node, name, outside)?.1,
            _ => {
                self.secrets.extend((!is_only_variable(node)).then_some(node.place));
                self.text_with_variables(node, outside)?
            }
        };
        if text.is_empty() {
            self.wrong(node.place, format!("the {name} is empty"), EXAMPLE);
            return None;
        }
        Some(Secret(text))
    }

    /// Marks every word of a possible secret as secret, except names.
    pub(crate) fn hide(&mut self, node: &Node) {
        match &node.typed {
            Typed::Nothing => {}
            Typed::Word(_) => self.secrets.extend((!is_only_variable(node)).then_some(node.place)),
            Typed::List(items) => items.iter().for_each(|item| self.hide(item)),
            Typed::Map(entries) => entries.iter().for_each(|(_, item)| self.hide(item)),
        }
    }

    /// Reads a secret that is a certificate or a key.
    pub(crate) fn pem(&mut self, node: &Node, name: &str, outside: &dyn Environment) -> Option<Secret> {
        let text = self.secret(node, name, outside)?;
        if !text.reveal().contains("-----BEGIN ") {
            let what = format!("the {name} is not in PEM");
            self.wrong(node.place, what, "write a file with `-----BEGIN ...`");
        }
        Some(text)
    }

    /// Reads `{ file: path }`: the path of the file and its content.
    pub(crate) fn file(
        &mut self,
        node: &Node,
        name: &str,
        outside: &dyn Environment,
    ) -> Option<(PathBuf, String)> {
        let fields = self.fields(node, name, names::SECRET, EXAMPLE)?;
        let Some(path) = fields.get("file") else {
            // A misspelt or empty `file` has been reported.
            if fields.iter().len() == 0 {
                self.wrong(node.place, "this does not say which file", EXAMPLE);
            }
            return None;
        };
        let word = self.word(path)?;
        match outside.file(word) {
            Ok(text) => Some((outside.path(word), text.trim_end_matches(['\r', '\n']).to_owned())),
            Err(why) => {
                let what = format!("the file cannot be read: {why}");
                let instead = "write the path of a file that can be read, from the folder of this file";
                self.wrong(path.place, what, instead);
                None
            }
        }
    }

    fn text_with_variables(&mut self, node: &Node, outside: &dyn Environment) -> Option<String> {
        let mut rest = self.word(node)?;
        let mut text = String::new();
        while let Some((before, after)) = rest.split_once("${") {
            let Some((name, behind)) = after.split_once('}') else {
                self.wrong(
                    node.place,
                    "`${` is not closed",
                    "write `${NAME}` for a variable of the environment",
                );
                return None;
            };
            if !is_variable(name) {
                let instead = "write letters, digits and `_` between `${` and `}`";
                self.wrong(node.place, "a variable of the environment cannot be called like that", instead);
                return None;
            }
            let Some(value) = outside.variable(name) else {
                let what = format!("the environment has no variable {}", quoted(name));
                self.wrong(node.place, what, format!("set it first, as in `export {name}=...`"));
                return None;
            };
            text.push_str(before);
            text.push_str(&value);
            rest = behind;
        }
        text.push_str(rest);
        Some(text)
    }
}
