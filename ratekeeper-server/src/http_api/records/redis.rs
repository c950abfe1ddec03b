//! Records in Redis, shared by all processes that use it: any of them can refund what another has reserved.
//!
//! Records contain keys, and the store must not hold keys in plain text: records are encrypted with a key derived
//! from the deployment's secret.

use std::time::Duration;

use ratekeeper::Limiter;
use ratekeeper::redis::{self, Redis, StoreError};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use super::{CLAIM_NUMBER_BYTES, Claim, Claimed, NotKept, Records, Taken};

/// Records in Redis.
#[derive(Clone, Debug)]
pub struct RedisRecords {
    records: redis::Records,
    seal: Seal,
}

impl RedisRecords {
    /// Uses the limiter's connection, beside its limits.
    pub fn new(limiter: &Limiter<Redis>) -> RedisRecords {
        let records = limiter.records();
        let seal = Seal(records.key("records of apis"));
        RedisRecords { records, seal }
    }
}

/// Authenticated encryption: the text can be neither read nor changed without the key.
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

    /// Encrypts the text, after a random nonce.
    fn seal(&self, text: &[u8]) -> Result<Vec<u8>, NotKept> {
        let unable = || NotKept::NotSent("the system has no random numbers".to_owned());
        let mut once = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut once).map_err(|_| unable())?;
        let mut sealed = text.to_vec();
        let key = self.key().ok_or_else(unable)?;
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(once), Aad::empty(), &mut sealed)
            .map_err(|_| unable())?;
        Ok([&once[..], &sealed].concat())
    }

    /// Decrypts the text, if it was encrypted with this key.
    fn open(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        let (once, text) = sealed.split_first_chunk::<NONCE_LEN>()?;
        let mut text = text.to_vec();
        let nonce = Nonce::assume_unique_for_key(*once);
        let opened = self.key()?.open_in_place(nonce, Aad::empty(), &mut text).ok()?;
        Some(opened.to_vec())
    }
}

impl From<StoreError> for NotKept {
    fn from(why: StoreError) -> NotKept {
        match why {
            StoreError::CircuitOpen | StoreError::Overloaded | StoreError::Unreachable(_) => {
                NotKept::NotSent(why.to_string())
            }
            // It was sent, and may have been executed.
            _ => NotKept::StoreUnavailable(why.to_string()),
        }
    }
}

/// Lifetime of a claim that is renewed only to be released.
const MOMENT: Duration = Duration::from_secs(1);

/// The stored form of a claim: its fingerprint, then its owner's number.
fn signed(claim: &Claim) -> Vec<u8> {
    [&claim.asked[..], &claim.number].concat()
}

impl RedisRecords {
    /// Whether the claim still belongs to its owner. An expired one is claimed again, unless another caller has
    /// claimed it meanwhile.
    ///
    /// The check and the write are two steps. Another claim could come in between only if this one expired at that
    /// moment, long after its response was due.
    async fn is_still_ours(&self, claim: &Claim, expires: Duration) -> Result<bool, NotKept> {
        let signed = signed(claim);
        let before = self.records.claim(&claim.name, &signed, expires).await?;
        Ok(before.is_none_or(|before| before.request == signed))
    }
}

impl Records for RedisRecords {
    async fn put(&self, id: &str, record: &[u8], expires: Duration) -> Result<(), NotKept> {
        let sealed = self.seal.seal(record)?;
        let has_room = self.records.put(id, &sealed, expires).await?;
        if has_room { Ok(()) } else { Err(NotKept::Full) }
    }

    async fn take(&self, id: &str) -> Result<Taken, NotKept> {
        let taken = self.records.take(id).await?;
        Ok(match taken {
            // A value that another program has written is not a record.
            redis::TakeResult::Record(sealed) => {
                self.seal.open(&sealed).map_or(Taken::Unknown, Taken::Record)
            }
            redis::TakeResult::Gone => Taken::Gone,
            redis::TakeResult::Unknown => Taken::Unknown,
        })
    }

    async fn due(&self, most: usize) -> Result<Vec<Vec<u8>>, NotKept> {
        let sealed = self.records.take_due(most).await?;
        Ok(sealed.iter().filter_map(|sealed| self.seal.open(sealed)).collect())
    }

    async fn claim(&self, claim: &Claim, expires: Duration) -> Result<Claimed, NotKept> {
        let before = self.records.claim(&claim.name, &signed(claim), expires).await?;
        Ok(before.map_or(Claimed::First, |mut before| {
            before.request.truncate(before.request.len().saturating_sub(CLAIM_NUMBER_BYTES));
            Claimed::Before { asked: before.request, answer: before.response }
        }))
    }

    async fn answer(&self, claim: &Claim, answer: &[u8], expires: Duration) -> Result<(), NotKept> {
        if self.is_still_ours(claim, expires).await? {
            self.records.set_response(&claim.name, answer, expires).await?;
        }
        Ok(())
    }

    async fn release(&self, claim: &Claim) {
        // A claim that cannot be deleted expires.
        if self.is_still_ours(claim, MOMENT).await == Ok(true) {
            let _ = self.records.remove(&claim.name).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_record_opens_only_with_its_key() {
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
