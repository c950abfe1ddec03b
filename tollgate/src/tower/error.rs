//! A layer that cannot be made.

use std::fmt;

use tollgate_rules::answer::NameError;
use tollgate_rules::path::PatternError;
use tollgate_rules::rule::RulesError;

use crate::limiter::BuildError;

/// A layer that cannot be made. It says what to do about it.
///
/// ```
/// use tollgate::tower::{LayerError, RateLimitLayer};
///
/// let error = RateLimitLayer::builder().build().unwrap_err();
/// assert_eq!(error, LayerError::NoRules);
/// assert_eq!(error.to_string(), "there is no rule; add one with Builder::rule or Builder::slots");
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum LayerError {
    /// There is no rule.
    NoRules,
    /// The rules do not fit together.
    Rules(RulesError),
    /// [`Builder::answer`](super::Builder::answer) names a rule that there is not.
    UnknownRule(String),
    /// A rule's key has a part `Part::Custom`, by whose name there is no [`Builder::extractor`](super::Builder::extractor): the names of both.
    UnknownExtractor(String, String),
    /// A rule has a pattern that no path matches which [`Builder::paths`](super::Builder::paths) lets in: the rule, and what is wrong.
    Pattern(String, PatternError),
    /// A rule has a name that clients cannot be told.
    Name(String, NameError),
    /// The store in memory cannot be made.
    Memory(BuildError),
    /// The store in Redis cannot be made.
    #[cfg(feature = "redis")]
    Redis(crate::redis::SettingsError),
}

impl fmt::Display for LayerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerError::NoRules => {
                write!(f, "there is no rule; add one with Builder::rule or Builder::slots")
            }
            LayerError::Rules(error) => write!(f, "{error}"),
            LayerError::UnknownRule(name) => {
                write!(f, "there is an answer for the rule {name}, but no such rule")
            }
            LayerError::UnknownExtractor(rule, name) => write!(
                f,
                "the key of the rule {rule} has a part {name:?}, but no extractor has that name; add it with \
                 Builder::extractor"
            ),
            LayerError::Pattern(rule, error) => {
                write!(f, "a pattern of the rule {rule} matches no path: {error}")
            }
            LayerError::Name(name, error) => write!(f, "a limit cannot be called {name:?}: {error}"),
            LayerError::Memory(error) => write!(f, "{error}"),
            #[cfg(feature = "redis")]
            LayerError::Redis(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for LayerError {}
