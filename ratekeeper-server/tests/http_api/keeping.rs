//! Records in memory with injected failures.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ratekeeper::ManualClock;
use ratekeeper_server::http_api::{Claim, Claimed, MemoryRecords, NotKept, Records, Taken};

/// How storing a reservation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failing {
    /// Nothing is sent.
    Before,
    /// It is stored, and only the answer is lost.
    After,
}

/// Records that work unless a failure is injected.
pub(crate) struct Keeping {
    records: MemoryRecords<ManualClock>,
    puts: Mutex<Option<Failing>>,
    /// The next answers, this many, are not stored.
    pub(crate) answers_lost: AtomicUsize,
    /// Expired reservations that were handed out.
    pub(crate) handed_out: AtomicUsize,
}

impl Keeping {
    pub(crate) fn new(records: MemoryRecords<ManualClock>) -> Keeping {
        Keeping {
            records,
            puts: Mutex::default(),
            answers_lost: AtomicUsize::new(0),
            handed_out: AtomicUsize::new(0),
        }
    }

    /// Sets how storing reservations fails from now on.
    pub(crate) fn puts(&self, failing: Option<Failing>) {
        *self.puts.lock().unwrap() = failing;
    }
}

impl Records for Keeping {
    async fn put(&self, id: &str, record: &[u8], expires: Duration) -> Result<(), NotKept> {
        let failing = *self.puts.lock().unwrap();
        if failing == Some(Failing::Before) {
            return Err(NotKept::NotSent("it is a test".to_owned()));
        }
        self.records.put(id, record, expires).await?;
        match failing {
            Some(_) => Err(NotKept::StoreUnavailable("it is a test".to_owned())),
            None => Ok(()),
        }
    }

    async fn take(&self, id: &str) -> Result<Taken, NotKept> {
        self.records.take(id).await
    }

    async fn due(&self, most: usize) -> Result<Vec<Vec<u8>>, NotKept> {
        let due = self.records.due(most).await?;
        self.handed_out.fetch_add(due.len(), Ordering::SeqCst);
        Ok(due)
    }

    async fn claim(&self, claim: &Claim, expires: Duration) -> Result<Claimed, NotKept> {
        self.records.claim(claim, expires).await
    }

    async fn answer(&self, claim: &Claim, answer: &[u8], expires: Duration) -> Result<(), NotKept> {
        let lost =
            self.answers_lost.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        match lost {
            Ok(_) => Err(NotKept::StoreUnavailable("it is a test".to_owned())),
            Err(_) => self.records.answer(claim, answer, expires).await,
        }
    }

    async fn release(&self, claim: &Claim) {
        self.records.release(claim).await;
    }
}
