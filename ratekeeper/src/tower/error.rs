//! Errors of layer construction.

use std::fmt;

use ratekeeper_rules::path::PatternError;
use ratekeeper_rules::response::NameError;
use ratekeeper_rules::rule::RulesError;

use crate::limiter::BuildError;

/// Why a layer could not be built. The message states the remedy.
///
/// ```
/// use ratekeeper::tower::{LayerError, RatekeeperLayer};
///
/// let error = RatekeeperLayer::builder().build().unwrap_err();
/// assert_eq!(error, LayerError::NoRules);
/// assert_eq!(error.to_string(), "there is no rule; add one with LayerBuilder::rule or LayerBuilder::in_flight_limit");
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum LayerError {
    /// There is no rule.
    NoRules,
    /// The rules are inconsistent.
    Rules(RulesError),
    /// [`LayerBuilder::deny_response`](super::LayerBuilder::deny_response) names a rule that does not exist.
    UnknownRule(String),
    /// A rule's key has a part `KeyPart::Custom` without a [`LayerBuilder::extractor`](super::LayerBuilder::extractor)
    /// of its name: the names of the rule and of the part.
    UnknownExtractor(String, String),
    /// A rule has a pattern that matches no path normalized by
    /// [`LayerBuilder::path_normalization`](super::LayerBuilder::path_normalization): the rule's name and the error.
    Pattern(String, PatternError),
    /// A rule's name cannot be sent in response headers.
    Name(String, NameError),
    /// The store in memory cannot be created.
    Memory(BuildError),
    /// The store in Redis cannot be created.
    #[cfg(feature = "redis")]
    Redis(crate::redis::SettingsError),
}

impl fmt::Display for LayerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerError::NoRules => {
                write!(
                    f,
                    "there is no rule; add one with LayerBuilder::rule or LayerBuilder::in_flight_limit"
                )
            }
            LayerError::Rules(error) => write!(f, "{error}"),
            LayerError::UnknownRule(name) => {
                write!(f, "there is an answer for the rule {name}, but no such rule")
            }
            LayerError::UnknownExtractor(rule, name) => write!(
                f,
                "the key of the rule {rule} has a part {name:?}, but no extractor has that name; add it with \
                 LayerBuilder::extractor"
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
