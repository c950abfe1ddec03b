//! Concurrency limits: which requests they apply to, and whose permit a request takes.

use crate::key::{Key, NoKey};
use crate::path::{PathNormalization, Pattern, PatternError};
use crate::request::Request;
use crate::when::When;

/// A limit on the requests in flight of a key. A request takes a permit when it arrives and releases it when its
/// response has ended.
///
/// ```
/// use ratekeeper_rules::key::{Key, KeyPart};
/// use ratekeeper_rules::concurrency::InFlightLimit;
///
/// let limit = InFlightLimit::new("per-user", 20).key(Key::of(KeyPart::header("X-User-Id")));
/// assert_eq!((limit.max, limit.is_shadow), (20, false));
/// ```
#[derive(Clone, Debug)]
pub struct InFlightLimit {
    /// The limit's name, which responses report.
    pub name: String,
    /// Whose permits a request takes.
    pub key: Key,
    /// Which requests the limit applies to.
    pub when: When,
    /// Maximum requests in flight; 0 denies every request.
    pub max: u32,
    /// Shadow: evaluated and reported, never enforced.
    pub is_shadow: bool,
}

impl InFlightLimit {
    /// At most `max` requests in flight, over all clients.
    pub fn new(name: &str, max: u32) -> InFlightLimit {
        InFlightLimit {
            name: name.to_owned(),
            key: Key::global(),
            when: When::default(),
            max,
            is_shadow: false,
        }
    }

    /// Sets whose permits a request takes.
    #[must_use]
    pub fn key(mut self, key: Key) -> InFlightLimit {
        self.key = key;
        self
    }

    /// Sets which requests the limit applies to.
    #[must_use]
    pub fn when(mut self, when: When) -> InFlightLimit {
        self.when = when;
        self
    }

    /// Makes it a shadow limit: evaluated and reported, never enforced.
    #[must_use]
    pub fn shadow(mut self) -> InFlightLimit {
        self.is_shadow = true;
        self
    }

    /// Every header that the limit may read, in lower case.
    pub fn header_names(&self) -> impl Iterator<Item = &str> {
        self.key.header_names().chain(self.when.header_names())
    }

    /// Every path pattern of the limit: of its key and its conditions.
    pub fn patterns(&self) -> impl Iterator<Item = &Pattern> {
        self.key.patterns().chain(&self.when.paths)
    }

    /// The same limit with its patterns read for this path normalization.
    ///
    /// # Errors
    /// If a pattern contains text that never occurs in paths normalized this way.
    pub fn with_normalization(
        mut self,
        normalization: PathNormalization,
    ) -> Result<InFlightLimit, PatternError> {
        self.key = self.key.with_normalization(normalization)?;
        for pattern in &mut self.when.paths {
            *pattern = pattern.with_normalization(normalization)?;
        }
        Ok(self)
    }

    /// Appends the key whose permit a request takes to `text`, and returns whether the limit applies.
    ///
    /// # Errors
    /// If the request has no key and the limit requires one; `text` is then unchanged. A shadow limit never fails.
    pub fn write_key(&self, request: &impl Request, text: &mut Vec<u8>) -> Result<bool, NoKey> {
        if !self.when.fits(request) {
            return Ok(false);
        }
        match self.key.write(request, text) {
            Ok(()) => Ok(true),
            Err(NoKey::Skipped) => Ok(false),
            Err(_) if self.is_shadow => Ok(false),
            Err(why) => Err(why),
        }
    }
}
