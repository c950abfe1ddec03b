//! Records in Redis, shared by all processes that use it: any of them can refund what another has reserved.
//!
//! Records contain keys, and the store must not hold keys in plain text: records are encrypted with a key derived
//! from the deployment's secret.

use std::time::Duration;

use ratekeeper::Limiter;
use ratekeeper::redis::{self, Redis, StoreError};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use super::{CLAIM_NONCE_BYTES, Claim, ClaimResult, RecordError, RecordStore, TakeResult};

/// Records in Redis.
#[derive(Clone, Debug)]
pub struct RedisRecords {
    records: redis::Records,
    cipher: RecordCipher,
}

impl RedisRecords {
    /// Uses the limiter's connection, beside its limits.
    pub fn new(limiter: &Limiter<Redis>) -> RedisRecords {
        let records = limiter.records();
        let cipher = RecordCipher(records.key("records of apis"));
        RedisRecords { records, cipher }
    }
}

/// Authenticated encryption: the text can be neither read nor changed without the key.
#[derive(Clone)]
struct RecordCipher([u8; 32]);

impl std::fmt::Debug for RecordCipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RecordCipher")
    }
}

impl RecordCipher {
    fn key(&self) -> Option<LessSafeKey> {
        UnboundKey::new(&CHACHA20_POLY1305, &self.0).ok().map(LessSafeKey::new)
    }

    /// Encrypts the text, after a random nonce.
    fn encrypt(&self, text: &[u8]) -> Result<Vec<u8>, RecordError> {
        let failed = || RecordError::NotSent("the operating system returned no random numbers".to_owned());
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| failed())?;
        let mut encrypted = text.to_vec();
        let key = self.key().ok_or_else(failed)?;
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut encrypted)
            .map_err(|_| failed())?;
        Ok([&nonce[..], &encrypted].concat())
    }

    /// Decrypts the text, if it was encrypted with this key.
    fn decrypt(&self, encrypted: &[u8]) -> Option<Vec<u8>> {
        let (nonce, text) = encrypted.split_first_chunk::<NONCE_LEN>()?;
        let mut text = text.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let opened = self.key()?.open_in_place(nonce, Aad::empty(), &mut text).ok()?;
        Some(opened.to_vec())
    }
}

impl From<StoreError> for RecordError {
    fn from(why: StoreError) -> RecordError {
        match why {
            StoreError::CircuitOpen | StoreError::Overloaded | StoreError::Unreachable(_) => {
                RecordError::NotSent(why.to_string())
            }
            // It was sent, and may have been executed.
            _ => RecordError::Unavailable(why.to_string()),
        }
    }
}

/// Lifetime of a claim that is renewed only to be released.
const RELEASE_LIFETIME: Duration = Duration::from_secs(1);

/// The stored form of a claim: its fingerprint, then its owner's nonce.
fn claim_value(claim: &Claim) -> Vec<u8> {
    [&claim.fingerprint[..], &claim.nonce].concat()
}

impl RedisRecords {
    fn decrypted(&self, found: redis::TakeResult) -> TakeResult {
        match found {
            // A value that another program has written is not a record.
            redis::TakeResult::Record(encrypted) => {
                self.cipher.decrypt(&encrypted).map_or(TakeResult::Unknown, TakeResult::Record)
            }
            redis::TakeResult::Gone => TakeResult::Gone,
            redis::TakeResult::Unknown => TakeResult::Unknown,
        }
    }

    /// Whether the claim still belongs to its owner. An expired one is claimed again, unless another caller has
    /// claimed it meanwhile.
    ///
    /// The check and the write are two steps. Another claim could come in between only if this one expired at that
    /// moment, long after its response was due.
    async fn owns_claim(&self, claim: &Claim, lifetime: Duration) -> Result<bool, RecordError> {
        let value = claim_value(claim);
        let existing = self.records.claim(&claim.name, &value, lifetime).await?;
        Ok(existing.is_none_or(|existing| existing.request == value))
    }
}

impl RecordStore for RedisRecords {
    async fn put(&self, id: &str, record: &[u8], lifetime: Duration) -> Result<(), RecordError> {
        let encrypted = self.cipher.encrypt(record)?;
        let has_capacity = self.records.put(id, &encrypted, lifetime).await?;
        if has_capacity { Ok(()) } else { Err(RecordError::Full) }
    }

    async fn read(&self, id: &str) -> Result<TakeResult, RecordError> {
        Ok(self.decrypted(self.records.read(id).await?))
    }

    async fn take(&self, id: &str) -> Result<TakeResult, RecordError> {
        Ok(self.decrypted(self.records.take(id).await?))
    }

    async fn take_due(&self, max: usize) -> Result<Vec<Vec<u8>>, RecordError> {
        // A server that was suspended executes a request that was given up, and the records would be lost. So it has
        // to answer a read first.
        self.records.read("").await?;
        let encrypted = self.records.take_due(max).await?;
        Ok(encrypted.iter().filter_map(|encrypted| self.cipher.decrypt(encrypted)).collect())
    }

    async fn claim(&self, claim: &Claim, lifetime: Duration) -> Result<ClaimResult, RecordError> {
        let existing = self.records.claim(&claim.name, &claim_value(claim), lifetime).await?;
        Ok(existing.map_or(ClaimResult::First, |mut existing| {
            existing.request.truncate(existing.request.len().saturating_sub(CLAIM_NONCE_BYTES));
            ClaimResult::Existing { fingerprint: existing.request, response: existing.response }
        }))
    }

    async fn set_response(
        &self,
        claim: &Claim,
        response: &[u8],
        lifetime: Duration,
    ) -> Result<(), RecordError> {
        if self.owns_claim(claim, lifetime).await? {
            self.records.set_response(&claim.name, response, lifetime).await?;
        }
        Ok(())
    }

    async fn release(&self, claim: &Claim) {
        // A claim that cannot be deleted expires.
        if self.owns_claim(claim, RELEASE_LIFETIME).await == Ok(true) {
            let _ = self.records.remove(&claim.name).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_is_decrypted_only_with_its_key() {
        let (cipher, other) = (RecordCipher([7; 32]), RecordCipher([8; 32]));
        let encrypted = cipher.encrypt(b"alice").unwrap_or_default();
        assert!(!encrypted.windows(5).any(|part| part == b"alice"));
        assert_ne!(Ok(&encrypted), cipher.encrypt(b"alice").as_ref(), "the nonce is random");
        assert_eq!(cipher.decrypt(&encrypted).as_deref(), Some(&b"alice"[..]));
        assert_eq!(other.decrypt(&encrypted), None);
        let mut changed = encrypted.clone();
        changed[NONCE_LEN] ^= 1;
        assert_eq!(cipher.decrypt(&changed), None);
        assert_eq!(cipher.decrypt(b"short"), None);
    }
}
