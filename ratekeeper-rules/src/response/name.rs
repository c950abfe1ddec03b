use std::fmt;

use super::text::push_escaped;

/// The name by which responses identify a limit: printable ASCII, as a structured field String requires.
///
/// ```
/// use ratekeeper_rules::response::PolicyName;
///
/// assert_eq!(PolicyName::new("per-user")?.as_str(), "per-user");
/// assert_eq!(
///     PolicyName::new("täglich").unwrap_err().to_string(),
///     "the name of a policy has 'ä' at character 2; write it in printable ASCII"
/// );
/// # Ok::<(), ratekeeper_rules::response::NameError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PolicyName {
    /// Quoted and escaped once here, because every response needs this form.
    quoted: Box<str>,
    plain: Box<str>,
}

impl PolicyName {
    /// Maximum length in characters: every response contains the name twice.
    pub const LENGTH_MAX: usize = 128;

    /// Checks a name.
    ///
    /// # Errors
    /// If it is empty, longer than [`LENGTH_MAX`](Self::LENGTH_MAX), or has a character that is not printable ASCII.
    pub fn new(name: &str) -> Result<PolicyName, NameError> {
        if name.is_empty() {
            return Err(NameError::Empty);
        }
        let odd = name.chars().enumerate().find(|(_, character)| !matches!(character, ' '..='~'));
        if let Some((before, character)) = odd {
            return Err(NameError::NotPrintable { character, at: before + 1 });
        }
        if name.len() > PolicyName::LENGTH_MAX {
            return Err(NameError::TooLong(name.len()));
        }
        let mut quoted = String::with_capacity(name.len() + 2);
        quoted.push('"');
        push_escaped(&mut quoted, name);
        quoted.push('"');
        Ok(PolicyName { quoted: quoted.into(), plain: name.into() })
    }

    /// The name as it was given.
    pub fn as_str(&self) -> &str {
        &self.plain
    }

    /// The name as a structured field String. For printable ASCII, a JSON string is the same.
    pub(super) fn quoted(&self) -> &str {
        &self.quoted
    }
}

impl fmt::Debug for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PolicyName({})", self.quoted)
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.plain)
    }
}

/// Why a text is not a valid policy name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// The text is empty.
    #[error("the name of a policy is empty; write at least one character")]
    Empty,
    /// The text is too long, with its number of characters.
    #[error("the name of a policy has {0} characters; write at most {max}", max = PolicyName::LENGTH_MAX)]
    TooLong(usize),
    /// A character that a header cannot carry.
    #[error("the name of a policy has {character:?} at character {at}; write it in printable ASCII")]
    NotPrintable {
        /// The first invalid character.
        character: char,
        /// Its position, counted from 1.
        at: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_and_backslashes_are_escaped_once() {
        for (name, quoted) in [
            ("daily", r#""daily""#),
            (r#"the "best""#, r#""the \"best\"""#),
            (r"a\b", r#""a\\b""#),
            (" ~", r#"" ~""#),
        ] {
            let name = PolicyName::new(name).unwrap();
            assert_eq!(name.quoted(), quoted);
        }
    }

    #[test]
    fn names_outside_printable_ascii_are_rejected() {
        let not_printable = |character, at| Err(NameError::NotPrintable { character, at });
        assert_eq!(PolicyName::new("a\r\nb"), not_printable('\r', 2));
        assert_eq!(PolicyName::new("a\tb"), not_printable('\t', 2));
        assert_eq!(PolicyName::new("a\x7f"), not_printable('\x7f', 2));
        assert_eq!(PolicyName::new("한도"), not_printable('한', 1));
        assert_eq!(PolicyName::new("é, then ü"), not_printable('é', 1));
        assert_eq!(PolicyName::new(""), Err(NameError::Empty));
        assert_eq!(PolicyName::new(&"a".repeat(129)), Err(NameError::TooLong(129)));
        assert!(PolicyName::new(&"a".repeat(128)).is_ok());
    }
}
