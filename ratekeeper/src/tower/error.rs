//! Errors of layer construction.

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
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// There is no rule.
    #[error("there is no rule; add one with LayerBuilder::rule or LayerBuilder::in_flight_limit")]
    NoRules,
    /// The rules are inconsistent.
    #[error(transparent)]
    Rules(RulesError),
    /// [`LayerBuilder::deny_response`](super::LayerBuilder::deny_response) names a rule that does not exist.
    #[error("there is an answer for the rule {0}, but no such rule")]
    UnknownRule(String),
    /// A rule's key has a part `KeyPart::Custom` without a [`LayerBuilder::extractor`](super::LayerBuilder::extractor)
    /// of its name: the names of the rule and of the part.
    #[error(
        "the key of the rule {0} has a part {1:?}, but no extractor has that name; add it with LayerBuilder::extractor"
    )]
    UnknownExtractor(String, String),
    /// A rule has a pattern that matches no path normalized by
    /// [`LayerBuilder::path_normalization`](super::LayerBuilder::path_normalization): the rule's name and the error.
    #[error("a pattern of the rule {0} matches no path: {1}")]
    Pattern(String, #[source] PatternError),
    /// A rule's name cannot be sent in response headers.
    #[error("a limit cannot be called {0:?}: {1}")]
    Name(String, #[source] NameError),
    /// The store in memory cannot be created.
    #[error(transparent)]
    Memory(BuildError),
    /// The store in Redis cannot be created.
    #[cfg(feature = "redis")]
    #[error(transparent)]
    Redis(crate::redis::SettingsError),
}
