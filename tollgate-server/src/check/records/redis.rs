//! Records in Redis, for all processes that use it: whichever is alive gives back what another has reserved.

use std::time::Duration;

use tollgate::Limiter;
use tollgate::redis::{self, Redis, StoreError};

use super::{Claimed, NotKept, Records, Taken};

/// Records in Redis.
#[derive(Clone, Debug)]
pub struct RedisRecords(redis::Records);

impl RedisRecords {
    /// Beside the limits.
    pub fn new(limiter: &Limiter<Redis>) -> RedisRecords {
        RedisRecords(limiter.records())
    }
}

fn unreached(why: StoreError) -> NotKept {
    NotKept::Unreached(why.to_string())
}

impl Records for RedisRecords {
    async fn put(&self, id: &str, record: &[u8], expires: Duration) -> Result<(), NotKept> {
        let has_room = self.0.put(id, record, expires).await.map_err(unreached)?;
        if has_room { Ok(()) } else { Err(NotKept::Full) }
    }

    async fn take(&self, id: &str) -> Result<Taken, NotKept> {
        let taken = self.0.take(id).await.map_err(unreached)?;
        Ok(match taken {
            redis::Taken::Record(record) => Taken::Record(record),
            redis::Taken::Gone => Taken::Gone,
            redis::Taken::Unknown => Taken::Unknown,
        })
    }

    async fn due(&self, most: usize) -> Result<Vec<Vec<u8>>, NotKept> {
        self.0.due(most).await.map_err(unreached)
    }

    async fn claim(&self, name: &str, asked: &[u8], expires: Duration) -> Result<Claimed, NotKept> {
        let before = self.0.claim(name, asked, expires).await.map_err(unreached)?;
        Ok(before
            .map_or(Claimed::First, |before| Claimed::Before { asked: before.asked, answer: before.answer }))
    }

    async fn answer(&self, name: &str, answer: &[u8], expires: Duration) -> Result<(), NotKept> {
        self.0.answer(name, answer, expires).await.map_err(unreached)
    }

    async fn release(&self, name: &str) {
        // What cannot be forgotten expires.
        let _ = self.0.forget(name).await;
    }
}
