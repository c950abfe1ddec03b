//! Short-lived records of the APIs, shared by all processes and stored by `records.lua`.

use std::sync::Arc;
use std::time::Duration;

use super::batcher::Task;
use super::key::Names;
use super::route::Servers;
use super::{Inner, Redis, StoreError};
use crate::Limiter;

/// Short-lived records in Redis, shared by all processes. Any process may collect a record that is due, whichever
/// process stored it.
#[derive(Clone, Debug)]
pub struct Records {
    servers: Arc<Servers>,
    names: Names,
}

/// Maximum number of records.
const RECORDS_MAX: usize = 1_000_000;
/// Time limit of a call; no rate limit decision waits for one.
const PATIENCE: Duration = Duration::from_secs(1);

/// The result of taking a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The record. No other caller gets it.
    Record(Vec<u8>),
    /// The record was already taken, or its time is over.
    Gone,
    /// The record never existed, or was removed more than an hour ago.
    Unknown,
}

/// An earlier claim of the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The request for which the name was claimed.
    pub asked: Vec<u8>,
    /// The response, if it is known.
    pub answer: Option<Vec<u8>>,
}

impl Claim {
    fn read(told: &[u8]) -> Option<Claim> {
        let (length, rest) = told.split_first_chunk()?;
        let (asked, answer) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        let answer = (!answer.is_empty()).then(|| answer.to_vec());
        Some(Claim { asked: asked.to_vec(), answer })
    }
}

impl Limiter<Redis> {
    /// The records that are stored beside the limits.
    pub fn records(&self) -> Records {
        let Inner { servers, names, .. } = &*self.store().0;
        Records { servers: servers.clone(), names: names.clone() }
    }
}

impl Records {
    /// Stores a record until it is taken or due. Returns false if the store is full.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn put(&self, id: &str, value: &[u8], lasts: Duration) -> Result<bool, StoreError> {
        let (most, lasts) = (RECORDS_MAX.to_string(), millis(lasts));
        let arguments = [b"put", id.as_bytes(), value, lasts.as_bytes(), most.as_bytes()];
        Ok(self.call(self.names.records(), &arguments).await? == [b"1"])
    }

    /// Takes a record. Only one of several callers gets it.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn take(&self, id: &str) -> Result<Taken, StoreError> {
        let told = self.call(self.names.records(), &[b"take", id.as_bytes()]).await?.pop();
        Ok(match told {
            None => Taken::Unknown,
            Some(gone) if gone.is_empty() => Taken::Gone,
            Some(value) => Taken::Record(value),
        })
    }

    /// Takes up to `most` records that are due. Concurrent callers get different records.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn due(&self, most: usize) -> Result<Vec<Vec<u8>>, StoreError> {
        let most = most.to_string();
        self.call(self.names.records(), &[b"due", most.as_bytes()]).await
    }

    /// Claims a name for a request. Returns None for the first caller, and the first caller's claim for all others.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn claim(
        &self,
        name: &str,
        asked: &[u8],
        lasts: Duration,
    ) -> Result<Option<Claim>, StoreError> {
        let (name, lasts) = (vec![self.names.record(name)], millis(lasts));
        let Some(told) = self.call(name, &[b"claim", asked, lasts.as_bytes()]).await?.pop() else {
            return Ok(None);
        };
        Claim::read(&told).map(Some).ok_or(StoreError::Garbled)
    }

    /// Stores the response for a [claimed](Self::claim) name, unless the claim has expired.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn answer(&self, name: &str, answer: &[u8], lasts: Duration) -> Result<(), StoreError> {
        let lasts = millis(lasts);
        self.call(vec![self.names.record(name)], &[b"answer", answer, lasts.as_bytes()]).await.map(drop)
    }

    /// Removes a [claim](Self::claim).
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn forget(&self, name: &str) -> Result<(), StoreError> {
        let name = self.names.record(name);
        let slot = self.servers.slot(&name);
        self.servers.carry_out(slot, Task::Forget(vec![name]), PATIENCE).await.map(drop)
    }

    /// A key derived from the deployment's secret, the same in every process, to encrypt values that must not be
    /// readable in Redis.
    pub fn key(&self, purpose: &str) -> [u8; 32] {
        self.names.derived(purpose)
    }

    async fn call(&self, keys: Vec<String>, arguments: &[&[u8]]) -> Result<Vec<Vec<u8>>, StoreError> {
        // All keys share a hash tag.
        let slot = self.servers.slot(&keys[0]);
        let task = Task::Record { keys, arguments: arguments.iter().map(|it| it.to_vec()).collect() };
        Ok(self.servers.carry_out(slot, task, PATIENCE).await?.records)
    }
}

/// At least 1, because Redis rejects an expiry of 0.
fn millis(lasts: Duration) -> String {
    lasts.as_millis().max(1).to_string()
}
