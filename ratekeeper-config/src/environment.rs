//! Environment variables and files that a configuration refers to.

use std::fmt;
use std::path::PathBuf;

use crate::error::{quoted, subject};
use crate::mask::is_variable;
use crate::reader::Reader;
use crate::table::{Field, SECTION, Section, string};
use crate::tree::{Node, NodeValue};

/// The environment of a configuration: variables and files.
pub trait Environment {
    /// The value of an environment variable.
    fn variable(&self, name: &str) -> Option<String>;

    /// The content of a file.
    ///
    /// # Errors
    /// Returns the reason if the file cannot be read.
    fn file(&self, path: &str) -> Result<String, String>;

    /// Checks the address of Redis by the parser of the store, which does not belong to this crate.
    ///
    /// # Errors
    /// Returns why the address cannot be used, and what to write instead. Neither quotes the address, which may
    /// contain a password.
    fn check_redis_address(&self, _address: &str) -> Result<(), RedisAddressError> {
        Ok(())
    }

    /// The path of that file, for later reloads.
    fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(path)
    }
}

/// An environment without variables and files.
#[derive(Clone, Copy, Debug)]
pub struct EmptyEnvironment;

impl Environment for EmptyEnvironment {
    fn variable(&self, _name: &str) -> Option<String> {
        None
    }

    fn file(&self, _path: &str) -> Result<String, String> {
        Err(std::io::ErrorKind::NotFound.to_string())
    }
}

/// Why an address of Redis cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisAddressError {
    /// What is wrong.
    pub reason: String,
    /// A valid address of this kind.
    pub example: String,
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

pub(crate) static FILE: Section = Section {
    name: "file",
    meaning: "Content of a file.",
    example: EXAMPLE,
    fields: &[&[&Field::new(
        "file",
        "Path of the file, relative to the directory of the configuration file.",
        string("path"),
    )
    .required()]],
    ..SECTION
};
const EXAMPLE: &str = "write the text, `${NAME}` for an environment variable, or `{ file: path }`";

impl Reader {
    /// Reads a secret: text in which `${NAME}` is replaced by an environment variable, or `{ file: path }` for the
    /// content of a file. Messages never quote it.
    pub(crate) fn secret(
        &mut self,
        node: &Node,
        name: &str,
        environment: &dyn Environment,
    ) -> Option<Secret> {
        let text = match node.value {
            NodeValue::Map(_) => self.file(node, name, environment)?.1,
            _ => {
                self.hide(node);
                self.text_with_variables(node, environment)?
            }
        };
        if text.is_empty() {
            self.error(node.position, format!("{} is empty", subject(name)), EXAMPLE);
            return None;
        }
        Some(Secret(text))
    }

    /// Reads a secret that is a certificate or a key.
    pub(crate) fn pem(&mut self, node: &Node, name: &str, environment: &dyn Environment) -> Option<Secret> {
        let text = self.secret(node, name, environment)?;
        if !text.reveal().contains("-----BEGIN ") {
            let message = format!("{} is not in PEM format", subject(name));
            self.error(node.position, message, "write a file that contains `-----BEGIN ...`");
        }
        Some(text)
    }

    /// Reads `{ file: path }`: the path of the file and its content.
    pub(crate) fn file(
        &mut self,
        node: &Node,
        name: &str,
        environment: &dyn Environment,
    ) -> Option<(PathBuf, String)> {
        let fields = self.fields(node, &subject(name), &FILE)?;
        let Some(path) = fields.get("file") else {
            // A misspelt or empty `file` has been reported.
            if fields.iter().len() == 0 {
                self.error(node.position, "missing `file`", EXAMPLE);
            }
            return None;
        };
        let word = self.word(path)?;
        match environment.file(word) {
            Ok(text) => Some((environment.path(word), text.trim_end_matches(['\r', '\n']).to_owned())),
            Err(why) => {
                let message = format!("cannot read the file: {why}");
                let help = "write the path of a readable file, relative to the folder of this configuration";
                self.error(path.position, message, help);
                None
            }
        }
    }

    fn text_with_variables(&mut self, node: &Node, environment: &dyn Environment) -> Option<String> {
        let mut rest = self.word(node)?;
        let mut text = String::new();
        while let Some((before, after)) = rest.split_once("${") {
            let Some((name, behind)) = after.split_once('}') else {
                self.error(
                    node.position,
                    "`${` is not closed",
                    "write `${NAME}` for an environment variable",
                );
                return None;
            };
            if !is_variable(name) {
                let help = "write letters, digits and `_` between `${` and `}`";
                self.error(node.position, "invalid name of an environment variable", help);
                return None;
            }
            let Some(value) = environment.variable(name) else {
                self.error(
                    node.position,
                    format!("environment variable {} is not set", quoted(name)),
                    format!("set it before the start, as in `export {name}=...`"),
                );
                if let Some(problem) = self.problems.last_mut() {
                    problem.has_one_cause = true;
                }
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
