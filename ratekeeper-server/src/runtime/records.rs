//! State between two requests: reservations, and responses to idempotent requests.
//!
//! A record is text that any process can read (the name of a limit, the values of a key, numbers), so any running
//! process can refund what another has reserved.

use std::time::Duration;

mod memory;
mod redis;

pub use memory::MemoryRecords;
pub use redis::RedisRecords;

/// A store of records until they are taken or expire.
///
/// The implementation supplies the clock: processes that share records do not have to agree on the time.
pub trait RecordStore: Send + Sync + 'static {
    /// Stores a record for the duration `lifetime`. After that it is [due](RecordStore::take_due).
    ///
    /// # Errors
    /// Returns an error if there is no capacity, or if it is not known whether the record is stored.
    fn put(
        &self,
        id: &str,
        record: &[u8],
        lifetime: Duration,
    ) -> impl Future<Output = Result<(), RecordError>> + Send;

    /// Reads a record that is not yet due, without a change.
    ///
    /// # Errors
    /// Returns an error if the records are unavailable.
    fn read(&self, id: &str) -> impl Future<Output = Result<TakeResult, RecordError>> + Send;

    /// Takes a record that is not yet due. One of several concurrent callers gets it.
    ///
    /// # Errors
    /// Returns an error if the records are unavailable. Unless the request was not sent, the record may have been
    /// taken in spite of the error.
    fn take(&self, id: &str) -> impl Future<Output = Result<TakeResult, RecordError>> + Send;

    /// Takes at most `max` expired records. One of several concurrent callers gets each: it is refunded once or, if
    /// that process ends at this moment, not at all.
    ///
    /// # Errors
    /// Returns an error if the records are unavailable.
    fn take_due(&self, max: usize) -> impl Future<Output = Result<Vec<Vec<u8>>, RecordError>> + Send;

    /// Claims a name for the first caller, for at most the duration `lifetime`.
    ///
    /// # Errors
    /// Returns an error if there is no capacity, or if the records are unavailable.
    fn claim(
        &self,
        claim: &Claim,
        lifetime: Duration,
    ) -> impl Future<Output = Result<ClaimResult, RecordError>> + Send;

    /// Stores the response of the claim's owner. Capacity is checked when the name is claimed, not here. An expired
    /// claim may belong to another caller by now and is not changed.
    ///
    /// # Errors
    /// Returns an error if the records are unavailable.
    fn set_response(
        &self,
        claim: &Claim,
        response: &[u8],
        lifetime: Duration,
    ) -> impl Future<Output = Result<(), RecordError>> + Send;

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
    pub fingerprint: Vec<u8>,
    /// Random bytes of the owner: they distinguish successive claims to the same name.
    pub nonce: [u8; CLAIM_NONCE_BYTES],
}

/// Bytes of a claim's nonce: enough that no two claims have the same.
pub const CLAIM_NONCE_BYTES: usize = 16;

/// The outcome of [`RecordStore::take`] and [`RecordStore::read`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakeResult {
    /// The record. If it was taken, no other caller gets it.
    Record(Vec<u8>),
    /// It was taken or has expired.
    Gone,
    /// There is no record of this id, or it was taken so long ago that its id is no longer stored.
    Unknown,
}

/// The outcome of [`RecordStore::claim`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimResult {
    /// This is the first claim to the name.
    First,
    /// Another caller has claimed the name.
    Existing {
        /// The fingerprint of that caller's request.
        fingerprint: Vec<u8>,
        /// Its response, if it is complete.
        response: Option<Vec<u8>>,
    },
}

/// Why a record is not stored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// There is no capacity.
    #[error("no capacity for another reservation or idempotency key; retry later")]
    Full,
    /// The request was not sent, so the record is certainly not stored; with the reason.
    #[error("the store of reservations and idempotency keys cannot be reached: {0}")]
    NotSent(String),
    /// The request was sent and not answered, so the record may be stored; with the reason.
    #[error("the store of reservations and idempotency keys does not answer: {0}")]
    Unavailable(String),
}
