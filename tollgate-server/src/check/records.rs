//! What has to be remembered between two requests: reservations, and answers to requests that may be sent again.
//!
//! A record is text that any process can read: the name of a limit, the values of a key, numbers. So whichever process is
//! alive can give back what another has reserved.

use std::fmt;
use std::time::Duration;

mod memory;
mod redis;

pub use memory::MemoryRecords;
pub use redis::RedisRecords;

/// Keeps records until they are taken or expire.
///
/// Whoever keeps them also tells the time for them: processes that share records need not agree on what time it is.
pub trait Records: Send + Sync + 'static {
    /// Keeps a record for so long. Once that is over, it is [due](Records::due).
    ///
    /// # Errors
    /// If there is no room, or it is not known whether it is kept.
    fn put(
        &self,
        id: &str,
        record: &[u8],
        expires: Duration,
    ) -> impl Future<Output = Result<(), NotKept>> + Send;

    /// Hands out a record that is not due yet. Of several who ask, one gets it.
    ///
    /// # Errors
    /// If the records cannot be reached. Then it may be gone, too.
    fn take(&self, id: &str) -> impl Future<Output = Result<Taken, NotKept>> + Send;

    /// Hands out records that have expired, so many at most. Of several who ask, one gets each of them: what it stands
    /// for is given back once, or, if that process ends at this very moment, not at all.
    ///
    /// # Errors
    /// If the records cannot be reached.
    fn due(&self, most: usize) -> impl Future<Output = Result<Vec<Vec<u8>>, NotKept>> + Send;

    /// Claims a name for whoever asks first, for so long at most.
    ///
    /// # Errors
    /// If there is no room, or the records cannot be reached.
    fn claim(
        &self,
        claim: &Claim,
        expires: Duration,
    ) -> impl Future<Output = Result<Claimed, NotKept>> + Send;

    /// Keeps the answer of whoever has claimed a name. There is always room for it: the claim has seen to that. A claim
    /// that is over may be somebody else's by now, who is left alone.
    ///
    /// # Errors
    /// If the records cannot be reached.
    fn answer(
        &self,
        claim: &Claim,
        answer: &[u8],
        expires: Duration,
    ) -> impl Future<Output = Result<(), NotKept>> + Send;

    /// Gives up a claim: nothing came of it, and the next who asks is the first again. Somebody else's stays.
    fn release(&self, claim: &Claim) -> impl Future<Output = ()> + Send;
}

/// A claim to a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The name.
    pub name: String,
    /// What it is for.
    pub asked: Vec<u8>,
    /// What only the claimer knows: by it one claim is told from the next of the same name.
    pub number: [u8; CLAIM_NUMBER_BYTES],
}

/// So many that no two claims ever have the same.
pub const CLAIM_NUMBER_BYTES: usize = 16;

/// What became of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Here it is, and nobody else gets it.
    Record(Vec<u8>),
    /// It was taken, or has expired.
    Gone,
    /// There is none of this name, or it was gone so long ago that nobody remembers.
    Unknown,
}

/// What came of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claimed {
    /// It is the first of this name.
    First,
    /// Somebody else was before.
    Before {
        /// What that one has asked.
        asked: Vec<u8>,
        /// The answer, if there is one already.
        answer: Option<Vec<u8>>,
    },
}

/// Why something is not remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotKept {
    /// There is no room.
    Full,
    /// Those that keep it were not asked, so it is surely not kept: why.
    NotSent(String),
    /// Those that keep it were asked and did not answer, so it may be kept: why.
    Unreached(String),
}

impl fmt::Display for NotKept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotKept::Full => {
                write!(f, "there is no room for another reservation or idempotency key; try again later")
            }
            NotKept::NotSent(why) => {
                write!(f, "what reservations and idempotency keys are kept in cannot be asked: {why}")
            }
            NotKept::Unreached(why) => {
                write!(f, "what reservations and idempotency keys are kept in does not answer: {why}")
            }
        }
    }
}

impl std::error::Error for NotKept {}
