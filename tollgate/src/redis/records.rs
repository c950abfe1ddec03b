//! What doors remember for a while, shared by all processes: as `records.lua` has it.

use std::sync::Arc;
use std::time::Duration;

use super::key::Names;
use super::link::Task;
use super::route::Servers;
use super::{Inner, Redis, StoreError};
use crate::Limiter;

/// Things that are remembered for a while in Redis, for all processes that use it: whoever is there sees to it that the
/// time of one has come, also if it was another that put it there.
#[derive(Clone, Debug)]
pub struct Records {
    servers: Arc<Servers>,
    names: Names,
}

/// How many there may be.
const RECORDS_MAX: usize = 1_000_000;
/// How long an answer is waited for: nobody's request is decided by one.
const PATIENCE: Duration = Duration::from_secs(1);

/// What became of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Here it is, and nobody else gets it.
    Record(Vec<u8>),
    /// It was taken, or its time has come.
    Gone,
    /// There is none of this name, or it was gone so long ago that nobody remembers.
    Unknown,
}

/// What somebody else has claimed before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// What for.
    pub asked: Vec<u8>,
    /// What came of it, if that is known.
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
    /// What is remembered for a while, beside the limits.
    pub fn records(&self) -> Records {
        let Inner { servers, names, .. } = &*self.store().0;
        Records { servers: servers.clone(), names: names.clone() }
    }
}

impl Records {
    /// Remembers a value, until it is taken or its time has come. Whether there was room for it.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub async fn put(&self, id: &str, value: &[u8], lasts: Duration) -> Result<bool, StoreError> {
        let (most, lasts) = (RECORDS_MAX.to_string(), millis(lasts));
        let arguments = [b"put", id.as_bytes(), value, lasts.as_bytes(), most.as_bytes()];
        Ok(self.call(self.names.records(), &arguments).await? == [b"1"])
    }

    /// Takes what is remembered under a name: only one who asks gets it.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub async fn take(&self, id: &str) -> Result<Taken, StoreError> {
        let told = self.call(self.names.records(), &[b"take", id.as_bytes()]).await?.pop();
        Ok(match told {
            None => Taken::Unknown,
            Some(gone) if gone.is_empty() => Taken::Gone,
            Some(value) => Taken::Record(value),
        })
    }

    /// Takes some of those whose time has come: of several who ask, each gets others.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub async fn due(&self, most: usize) -> Result<Vec<Vec<u8>>, StoreError> {
        let most = most.to_string();
        self.call(self.names.records(), &[b"due", most.as_bytes()]).await
    }

    /// Claims a name for whoever asks first, with what it is for. None if this is the first.
    ///
    /// # Errors
    /// If Redis does not answer.
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

    /// Keeps the answer of whoever has [claimed](Self::claim) a name, unless the claim is over.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub async fn answer(&self, name: &str, answer: &[u8], lasts: Duration) -> Result<(), StoreError> {
        let lasts = millis(lasts);
        self.call(vec![self.names.record(name)], &[b"answer", answer, lasts.as_bytes()]).await.map(drop)
    }

    /// Forgets what was [claimed](Self::claim).
    ///
    /// # Errors
    /// If Redis does not answer.
    pub async fn forget(&self, name: &str) -> Result<(), StoreError> {
        let name = self.names.record(name);
        let slot = self.servers.slot(&name);
        self.servers.carry_out(slot, Task::Forget(vec![name]), PATIENCE).await.map(drop)
    }

    /// A key for a purpose, the same in every process that has the deployment's secret: for values that nobody is to read
    /// who only sees the server.
    pub fn key(&self, purpose: &str) -> [u8; 32] {
        self.names.derived(purpose)
    }

    async fn call(&self, keys: Vec<String>, arguments: &[&[u8]]) -> Result<Vec<Vec<u8>>, StoreError> {
        // All of them have the same tag.
        let slot = self.servers.slot(&keys[0]);
        let task = Task::Record { keys, arguments: arguments.iter().map(|it| it.to_vec()).collect() };
        Ok(self.servers.carry_out(slot, task, PATIENCE).await?.records)
    }
}

/// At least one: Redis refuses none.
fn millis(lasts: Duration) -> String {
    lasts.as_millis().max(1).to_string()
}
