//! Records in memory with injected failures.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ratekeeper::ManualClock;
use ratekeeper_server::http_api::{Claim, ClaimResult, MemoryRecords, RecordError, RecordStore, TakeResult};

/// How storing a reservation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PutFailure {
    /// Nothing is sent.
    NotSent,
    /// The record is stored, and only the store's response is lost.
    ResponseLost,
}

/// How settling a reservation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakeFailure {
    /// The record is not read, and nothing changes.
    ReadUnanswered,
    /// The record is read, and the request to take it is not sent.
    NotSent,
    /// The record is taken, and only the store's response is lost.
    ResponseLost,
}

/// Records that work unless a failure is injected.
pub(crate) struct FaultyRecords {
    records: MemoryRecords<ManualClock>,
    put_failure: Mutex<Option<PutFailure>>,
    take_failure: Mutex<Option<TakeFailure>>,
    /// How many of the next responses are not stored.
    pub(crate) responses_lost: AtomicUsize,
    /// Expired reservations that were taken.
    pub(crate) taken_due: AtomicUsize,
}

impl FaultyRecords {
    pub(crate) fn new(records: MemoryRecords<ManualClock>) -> FaultyRecords {
        FaultyRecords {
            records,
            put_failure: Mutex::default(),
            take_failure: Mutex::default(),
            responses_lost: AtomicUsize::new(0),
            taken_due: AtomicUsize::new(0),
        }
    }

    /// Sets how storing reservations fails from now on.
    pub(crate) fn fail_puts(&self, failure: Option<PutFailure>) {
        *self.put_failure.lock().unwrap() = failure;
    }

    /// Sets how taking reservations fails from now on.
    pub(crate) fn fail_takes(&self, failure: Option<TakeFailure>) {
        *self.take_failure.lock().unwrap() = failure;
    }
}

impl RecordStore for FaultyRecords {
    async fn put(&self, id: &str, record: &[u8], lifetime: Duration) -> Result<(), RecordError> {
        let failure = *self.put_failure.lock().unwrap();
        if failure == Some(PutFailure::NotSent) {
            return Err(RecordError::NotSent("injected failure".to_owned()));
        }
        self.records.put(id, record, lifetime).await?;
        match failure {
            Some(_) => Err(RecordError::Unavailable("injected failure".to_owned())),
            None => Ok(()),
        }
    }

    async fn read(&self, id: &str) -> Result<TakeResult, RecordError> {
        match *self.take_failure.lock().unwrap() {
            Some(TakeFailure::ReadUnanswered) => {
                return Err(RecordError::Unavailable("injected failure".to_owned()));
            }
            Some(TakeFailure::NotSent | TakeFailure::ResponseLost) | None => {}
        }
        self.records.read(id).await
    }

    async fn take(&self, id: &str) -> Result<TakeResult, RecordError> {
        let failure = *self.take_failure.lock().unwrap();
        if failure == Some(TakeFailure::NotSent) {
            return Err(RecordError::NotSent("injected failure".to_owned()));
        }
        let taken = self.records.take(id).await?;
        match failure {
            Some(_) => Err(RecordError::Unavailable("injected failure".to_owned())),
            None => Ok(taken),
        }
    }

    async fn take_due(&self, max: usize) -> Result<Vec<Vec<u8>>, RecordError> {
        let due = self.records.take_due(max).await?;
        self.taken_due.fetch_add(due.len(), Ordering::SeqCst);
        Ok(due)
    }

    async fn claim(&self, claim: &Claim, lifetime: Duration) -> Result<ClaimResult, RecordError> {
        self.records.claim(claim, lifetime).await
    }

    async fn set_response(
        &self,
        claim: &Claim,
        response: &[u8],
        lifetime: Duration,
    ) -> Result<(), RecordError> {
        let lost = self
            .responses_lost
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
        match lost {
            Ok(_) => Err(RecordError::Unavailable("injected failure".to_owned())),
            Err(_) => self.records.set_response(claim, response, lifetime).await,
        }
    }

    async fn release(&self, claim: &Claim) {
        self.records.release(claim).await;
    }
}
