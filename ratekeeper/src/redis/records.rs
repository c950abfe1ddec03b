//! Short-lived records of the APIs, shared by all processes and stored by `records.lua`.

use std::sync::Arc;
use std::time::Duration;

use super::call::Task;
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
const TIMEOUT: Duration = Duration::from_secs(1);

/// The result of taking a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakeResult {
    /// The record. No other caller gets it.
    Record(Vec<u8>),
    /// The record was already taken, or its time is over.
    Gone,
    /// The record never existed, or was removed more than an hour ago.
    Unknown,
}

/// An earlier claim of the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordClaim {
    /// The request for which the name was claimed.
    pub request: Vec<u8>,
    /// The response, if it is known.
    pub response: Option<Vec<u8>>,
}

impl RecordClaim {
    fn read(reply: &[u8]) -> Option<RecordClaim> {
        let (length, rest) = reply.split_first_chunk()?;
        let (request, response) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        let response = (!response.is_empty()).then(|| response.to_vec());
        Some(RecordClaim { request: request.to_vec(), response })
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
        let (max, lasts) = (RECORDS_MAX.to_string(), millis(lasts));
        let arguments = [b"put", id.as_bytes(), value, lasts.as_bytes(), max.as_bytes()];
        Ok(self.call(self.names.records(), &arguments).await? == [b"1"])
    }

    /// Takes a record. Only one of several callers gets it.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn take(&self, id: &str) -> Result<TakeResult, StoreError> {
        self.find(b"take", id).await
    }

    /// Returns what [`take`](Self::take) would, without a change.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn read(&self, id: &str) -> Result<TakeResult, StoreError> {
        self.find(b"read", id).await
    }

    async fn find(&self, command: &[u8], id: &str) -> Result<TakeResult, StoreError> {
        let reply = self.call(self.names.records(), &[command, id.as_bytes()]).await?.pop();
        Ok(match reply {
            None => TakeResult::Unknown,
            Some(gone) if gone.is_empty() => TakeResult::Gone,
            Some(value) => TakeResult::Record(value),
        })
    }

    /// Takes up to `max` records that are due. Concurrent callers get different records.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn take_due(&self, max: usize) -> Result<Vec<Vec<u8>>, StoreError> {
        let max = max.to_string();
        self.call(self.names.records(), &[b"due", max.as_bytes()]).await
    }

    /// Claims a name for a request. Returns None for the first caller, and the first caller's claim for all others.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn claim(
        &self,
        name: &str,
        request: &[u8],
        lasts: Duration,
    ) -> Result<Option<RecordClaim>, StoreError> {
        let (name, lasts) = (vec![self.names.record(name)], millis(lasts));
        let Some(reply) = self.call(name, &[b"claim", request, lasts.as_bytes()]).await?.pop() else {
            return Ok(None);
        };
        RecordClaim::read(&reply).map(Some).ok_or(StoreError::UnexpectedReply)
    }

    /// Stores the response for a [claimed](Self::claim) name, unless the claim has expired.
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn set_response(&self, name: &str, response: &[u8], lasts: Duration) -> Result<(), StoreError> {
        let lasts = millis(lasts);
        self.call(vec![self.names.record(name)], &[b"answer", response, lasts.as_bytes()]).await.map(drop)
    }

    /// Removes a [claim](Self::claim).
    ///
    /// # Errors
    /// Returns an error if Redis does not answer.
    pub async fn remove(&self, name: &str) -> Result<(), StoreError> {
        let name = self.names.record(name);
        let slot = self.servers.slot(&name);
        self.servers.execute(slot, Task::Unlink(vec![name]), TIMEOUT).await.map(drop)
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
        Ok(self.servers.execute(slot, task, TIMEOUT).await?.records)
    }
}

/// At least 1, because Redis rejects an expiry of 0.
fn millis(lasts: Duration) -> String {
    lasts.as_millis().max(1).to_string()
}
