//! Records in Redis, for all processes that use it: whichever is alive gives back what another has reserved.
//!
//! Records name keys, and no key is in a store as it is: they are sealed, with a key that comes from the deployment's
//! secret.

use std::time::Duration;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use tollgate::Limiter;
use tollgate::redis::{self, Redis, StoreError};

use super::{Claimed, NotKept, Records, Taken};

/// Records in Redis.
#[derive(Clone, Debug)]
pub struct RedisRecords {
    records: redis::Records,
    seal: Seal,
}

impl RedisRecords {
    /// Beside the limits.
    pub fn new(limiter: &Limiter<Redis>) -> RedisRecords {
        let records = limiter.records();
        let seal = Seal(records.key("records of doors"));
        RedisRecords { records, seal }
    }
}

/// Makes text that nobody can read, or change, who does not know the key.
#[derive(Clone)]
struct Seal([u8; 32]);

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seal")
    }
}

impl Seal {
    fn key(&self) -> Option<LessSafeKey> {
        UnboundKey::new(&CHACHA20_POLY1305, &self.0).ok().map(LessSafeKey::new)
    }

    /// The text behind a number that is used once.
    fn seal(&self, text: &[u8]) -> Result<Vec<u8>, NotKept> {
        let unable = || NotKept::Unreached("the system has no random numbers".to_owned());
        let mut once = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut once).map_err(|_| unable())?;
        let mut sealed = text.to_vec();
        let key = self.key().ok_or_else(unable)?;
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(once), Aad::empty(), &mut sealed)
            .map_err(|_| unable())?;
        Ok([&once[..], &sealed].concat())
    }

    /// The text, if it was sealed by somebody who knows the key.
    fn open(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        let (once, text) = sealed.split_first_chunk::<NONCE_LEN>()?;
        let mut text = text.to_vec();
        let nonce = Nonce::assume_unique_for_key(*once);
        let opened = self.key()?.open_in_place(nonce, Aad::empty(), &mut text).ok()?;
        Some(opened.to_vec())
    }
}

fn unreached(why: StoreError) -> NotKept {
    NotKept::Unreached(why.to_string())
}

impl Records for RedisRecords {
    async fn put(&self, id: &str, record: &[u8], expires: Duration) -> Result<(), NotKept> {
        let sealed = self.seal.seal(record)?;
        let has_room = self.records.put(id, &sealed, expires).await.map_err(unreached)?;
        if has_room { Ok(()) } else { Err(NotKept::Full) }
    }

    async fn take(&self, id: &str) -> Result<Taken, NotKept> {
        let taken = self.records.take(id).await.map_err(unreached)?;
        Ok(match taken {
            // What another program has written is no record.
            redis::Taken::Record(sealed) => self.seal.open(&sealed).map_or(Taken::Unknown, Taken::Record),
            redis::Taken::Gone => Taken::Gone,
            redis::Taken::Unknown => Taken::Unknown,
        })
    }

    async fn due(&self, most: usize) -> Result<Vec<Vec<u8>>, NotKept> {
        let sealed = self.records.due(most).await.map_err(unreached)?;
        Ok(sealed.iter().filter_map(|sealed| self.seal.open(sealed)).collect())
    }

    async fn claim(&self, name: &str, asked: &[u8], expires: Duration) -> Result<Claimed, NotKept> {
        let before = self.records.claim(name, asked, expires).await.map_err(unreached)?;
        Ok(before
            .map_or(Claimed::First, |before| Claimed::Before { asked: before.asked, answer: before.answer }))
    }

    async fn answer(&self, name: &str, answer: &[u8], expires: Duration) -> Result<(), NotKept> {
        self.records.answer(name, answer, expires).await.map_err(unreached)
    }

    async fn release(&self, name: &str) {
        // What cannot be forgotten expires.
        let _ = self.records.forget(name).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_is_read_by_those_who_know_the_key_only() {
        let (seal, other) = (Seal([7; 32]), Seal([8; 32]));
        let sealed = seal.seal(b"alice").unwrap_or_default();
        assert!(!sealed.windows(5).any(|part| part == b"alice"));
        assert_ne!(Ok(&sealed), seal.seal(b"alice").as_ref(), "never the same twice");
        assert_eq!(seal.open(&sealed).as_deref(), Some(&b"alice"[..]));
        assert_eq!(other.open(&sealed), None);
        let mut changed = sealed.clone();
        changed[NONCE_LEN] ^= 1;
        assert_eq!(seal.open(&changed), None);
        assert_eq!(seal.open(b"short"), None);
    }
}
