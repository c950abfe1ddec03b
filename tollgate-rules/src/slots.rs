//! How many requests may be under way at once: which rule of that kind concerns a request, and whose slot it takes.

use crate::key::{Key, NoKey};
use crate::path::{PatternError, Spelling};
use crate::request::Request;
use crate::when::When;

/// How many requests of a key may be under way at once. A request takes a slot when it comes, and gives it back when its
/// response has ended.
///
/// ```
/// use tollgate_rules::key::{Key, Part};
/// use tollgate_rules::slots::Slots;
///
/// let slots = Slots::new("per-user", 20).key(Key::of(Part::header("X-User-Id")));
/// assert_eq!((slots.most, slots.is_shadow), (20, false));
/// ```
#[derive(Clone, Debug)]
pub struct Slots {
    /// Its name, which clients are told, too.
    pub name: String,
    /// Whose slots a request takes one of.
    pub key: Key,
    /// Which requests it concerns.
    pub when: When,
    /// How many may be under way at once; with 0, none.
    pub most: u32,
    /// It counts and reports, but never denies.
    pub is_shadow: bool,
}

impl Slots {
    /// So many requests at once, of all clients together.
    pub fn new(name: &str, most: u32) -> Slots {
        Slots { name: name.to_owned(), key: Key::global(), when: When::default(), most, is_shadow: false }
    }

    /// Whose slots a request takes one of.
    #[must_use]
    pub fn key(mut self, key: Key) -> Slots {
        self.key = key;
        self
    }

    /// Which requests it concerns.
    #[must_use]
    pub fn when(mut self, when: When) -> Slots {
        self.when = when;
        self
    }

    /// It counts and reports, but never denies.
    #[must_use]
    pub fn shadow(mut self) -> Slots {
        self.is_shadow = true;
        self
    }

    /// The same for paths of this spelling, whichever its patterns were read for.
    ///
    /// # Errors
    /// If a pattern has what such paths never have.
    pub fn spelt(mut self, spelling: Spelling) -> Result<Slots, PatternError> {
        self.key = self.key.spelt(spelling)?;
        for pattern in &mut self.when.paths {
            *pattern = pattern.spelt(spelling)?;
        }
        Ok(self)
    }

    /// Writes whose slot a request takes behind what is in `text`, and says whether it takes any.
    ///
    /// # Errors
    /// If the request must say whose it is and does not; `text` is as it was then. Slots that only count refuse nobody.
    pub fn ask(&self, request: &impl Request, text: &mut Vec<u8>) -> Result<bool, NoKey> {
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
