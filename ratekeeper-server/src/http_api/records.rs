//! State between two requests: reservations, and responses to idempotent requests.
//!
//! A record is text that any process can read (the name of a limit, the values of a key, numbers), so any running
//! process can refund what another has reserved.

use std::fmt;
use std::time::Duration;

mod memory;
mod redis;

pub use memory::MemoryRecords;
pub use redis::RedisRecords;

/// Stores records until they are taken or expire.
///
/// The implementation supplies the clock: processes that share records do not have to agree on the time.
pub trait Records: Send + Sync + 'static {
    /// Stores a record for the duration `expires`. After that it is [due](Records::due).
    ///
    /// # Errors
    /// Returns an error if there is no capacity, or if it is not known whether the record is stored.
    fn put(
        &self,
        id: &str,
        record: &[u8],
        expires: Duration,
    ) -> impl Future<Output = Result<(), NotKept>> + Send;

    /// Takes a record that is not yet due. One of several concurrent callers gets it.
    ///
    /// # Errors
    /// Returns an error if the records are unavailable. The record may have been taken all the same.
    fn take(&self, id: &str) -> impl Future<Output = Result<Taken, NotKept>> + Send;

    /// Takes at most `most` expired records. One of several concurrent callers gets each: it is refunded once or, if
    /// that process ends at this moment, not at all.
    ///
    /// # Errors
    /// Returns an error if the records are unavailable.
    fn due(&self, most: usize) -> impl Future<Output = Result<Vec<Vec<u8>>, NotKept>> + Send;

    /// Claims a name for the first caller, for at most the duration `expires`.
    ///
    /// # Errors
    /// Returns an error if there is no capacity, or if the records are unavailable.
    fn claim(
        &self,
        claim: &Claim,
        expires: Duration,
    ) -> impl Future<Output = Result<Claimed, NotKept>> + Send;

    /// Stores the response of the claim's owner. There is always capacity for it: only the claim is checked. A claim
    /// that has expired may belong to another caller by now and is not changed.
    ///
    /// # Errors
    /// Returns an error if the records are unavailable.
    fn answer(
        &self,
        claim: &Claim,
        answer: &[u8],
        expires: Duration,
    ) -> impl Future<Output = Result<(), NotKept>> + Send;

    /// Releases a claim without a response: the next caller is the first again. Another caller's claim is not
    /// changed.
    fn release(&self, claim: &Claim) -> impl Future<Output = ()> + Send;
}

/// A claim to a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The name.
    pub name: String,
    /// The fingerprint of the request that the name is claimed for.
    pub asked: Vec<u8>,
    /// A random number of the owner: it distinguishes successive claims to the same name.
    pub number: [u8; CLAIM_NUMBER_BYTES],
}

/// Bytes of a claim's number: enough that no two claims have the same.
pub const CLAIM_NUMBER_BYTES: usize = 16;

/// The outcome of [`Records::take`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The record; no other caller gets it.
    Record(Vec<u8>),
    /// It was taken or has expired.
    Gone,
    /// There is no record of this id, or it was taken so long ago that its id is no longer stored.
    Unknown,
}

/// The outcome of [`Records::claim`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claimed {
    /// This is the first claim to the name.
    First,
    /// Another caller has claimed the name.
    Before {
        /// The fingerprint of that caller's request.
        asked: Vec<u8>,
        /// Its response, if it is complete.
        answer: Option<Vec<u8>>,
    },
}

/// Why a record is not stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotKept {
    /// There is no capacity.
    Full,
    /// The request was not sent, so the record is certainly not stored; with the reason.
    NotSent(String),
    /// The request was sent and not answered, so the record may be stored; with the reason.
    StoreUnavailable(String),
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
            NotKept::StoreUnavailable(why) => {
                write!(f, "what reservations and idempotency keys are kept in does not answer: {why}")
            }
        }
    }
}

impl std::error::Error for NotKept {}
