//! What a file refers to: variables of the environment, and other files.

use std::fmt;
use std::path::PathBuf;

use crate::error::quoted;
use crate::mask::{is_reference, is_variable};
use crate::names;
use crate::reader::Reader;
use crate::tree::{Node, Typed};

/// What a configuration refers to and does not hold itself.
pub trait Outside {
    /// A variable of the environment.
    fn variable(&self, name: &str) -> Option<String>;

    /// The text of a file.
    ///
    /// # Errors
    /// If it cannot be read; the message says why.
    fn file(&self, path: &str) -> Result<String, String>;

    /// Where that file is, for those who read it again later.
    fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(path)
    }
}

/// Text that is not to be seen: it is not printed, not even for debugging.
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

/// Whether nothing but the name of a variable would be shown.
fn is_only_variable(node: &Node) -> bool {
    matches!(&node.typed, Typed::Word(word) if is_reference(word) || word.contains("://"))
}

impl Reader {
    /// Text that may come from elsewhere: `${NAME}` in it stands for a variable, `{ file: path }` for the text of a
    /// file. Nothing of it is repeated in what is told.
    pub(crate) fn secret(&mut self, node: &Node, name: &str, outside: &dyn Outside) -> Option<Secret> {
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

    /// Hides every word of what may be secret, but for its names.
    pub(crate) fn hide(&mut self, node: &Node) {
        match &node.typed {
            Typed::Nothing => {}
            Typed::Word(_) => self.secrets.extend((!is_only_variable(node)).then_some(node.place)),
            Typed::List(items) => items.iter().for_each(|item| self.hide(item)),
            Typed::Map(entries) => entries.iter().for_each(|(_, item)| self.hide(item)),
        }
    }

    /// Such a text that is a certificate or a key.
    pub(crate) fn pem(&mut self, node: &Node, name: &str, outside: &dyn Outside) -> Option<Secret> {
        let text = self.secret(node, name, outside)?;
        if !text.reveal().contains("-----BEGIN ") {
            let what = format!("the {name} is not in PEM");
            self.wrong(node.place, what, "write a file with `-----BEGIN ...`");
        }
        Some(text)
    }

    /// A file by `{ file: path }`: where it is, and its text.
    pub(crate) fn file(
        &mut self,
        node: &Node,
        name: &str,
        outside: &dyn Outside,
    ) -> Option<(PathBuf, String)> {
        let fields = self.fields(node, name, names::SECRET, EXAMPLE)?;
        let Some(path) = fields.get("file") else {
            // Whoever has misspelt it, or has nothing behind it, has been told.
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

    fn text_with_variables(&mut self, node: &Node, outside: &dyn Outside) -> Option<String> {
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
