//! Records in the memory of this process.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ratekeeper::{Clock, SystemClock, Time};

use super::{CLAIM_NONCE_BYTES, Claim, ClaimResult, RecordError, RecordStore, TakeResult};

/// Records that end with the process, like limits in memory. Reservations and claims have separate capacities, so
/// that neither can crowd out the other.
#[derive(Debug)]
pub struct MemoryRecords<C = SystemClock> {
    clock: C,
    max_records: usize,
    max_bytes: usize,
    tables: Mutex<RecordTables>,
}

/// Bytes that a record takes beside its text: its name, twice, and its entries in two tables.
const BYTES_PER_RECORD: usize = 256;
/// Ids of taken records that are kept, so that a second settlement gets a conflict. The oldest are evicted first.
const TAKEN_IDS_MAX: usize = 10_000;
/// Expired claims that each new claim evicts, at most.
const EVICTIONS_PER_CLAIM: usize = 8;

#[derive(Debug, Default)]
struct RecordTables {
    reservations: ExpiringMap<Vec<u8>>,
    claims: ExpiringMap<ClaimEntry>,
    taken: TakenIds,
}

impl RecordTables {
    /// A reservation that is not yet due.
    fn read(&self, id: &str, now: Time) -> TakeResult {
        match self.reservations.get(id, now) {
            _ if self.taken.names.contains(id) => TakeResult::Gone,
            Some(record) => TakeResult::Record(record.clone()),
            // An expired reservation is left to `take_due`.
            None if self.reservations.get_any(id).is_some() => TakeResult::Gone,
            None => TakeResult::Unknown,
        }
    }
}

#[derive(Debug)]
struct ClaimEntry {
    fingerprint: Vec<u8>,
    nonce: [u8; CLAIM_NONCE_BYTES],
    response: Option<Vec<u8>>,
}

impl ClaimEntry {
    /// Whether it is this claim, and not a later one to the same name.
    fn is(&self, claim: &Claim) -> bool {
        self.nonce == claim.nonce && self.fingerprint == claim.fingerprint
    }
}

/// A value with a size in memory.
trait MemorySize {
    /// Its bytes, beyond [`BYTES_PER_RECORD`].
    fn bytes(&self) -> usize;
}

impl MemorySize for Vec<u8> {
    fn bytes(&self) -> usize {
        self.len()
    }
}

impl MemorySize for ClaimEntry {
    fn bytes(&self) -> usize {
        self.fingerprint.len() + self.nonce.len() + self.response.as_ref().map_or(0, Vec::len)
    }
}

/// Values by name, names by expiry, and the bytes of all.
#[derive(Debug)]
struct ExpiringMap<V> {
    values: HashMap<String, (Time, V)>,
    order: BTreeSet<(Time, String)>,
    bytes: usize,
}

impl<V> Default for ExpiringMap<V> {
    fn default() -> ExpiringMap<V> {
        ExpiringMap { values: HashMap::new(), order: BTreeSet::new(), bytes: 0 }
    }
}

impl<V: MemorySize> ExpiringMap<V> {
    fn get(&self, name: &str, now: Time) -> Option<&V> {
        self.values.get(name).filter(|(expires, _)| *expires > now).map(|(_, value)| value)
    }

    /// Returns the value even if it has expired.
    fn get_any(&self, name: &str) -> Option<&V> {
        self.values.get(name).map(|(_, value)| value)
    }

    fn insert(&mut self, name: &str, expires: Time, value: V) {
        self.remove(name);
        self.bytes = self.bytes.saturating_add(BYTES_PER_RECORD + value.bytes());
        self.values.insert(name.to_owned(), (expires, value));
        self.order.insert((expires, name.to_owned()));
    }

    fn remove(&mut self, name: &str) -> Option<V> {
        let (expires, value) = self.values.remove(name)?;
        self.order.remove(&(expires, name.to_owned()));
        self.bytes = self.bytes.saturating_sub(BYTES_PER_RECORD + value.bytes());
        Some(value)
    }

    /// Removes and returns the value that expired first, if there is one.
    fn pop_expired(&mut self, now: Time) -> Option<(String, V)> {
        let (expires, name) = self.order.first()?;
        if *expires > now {
            return None;
        }
        let name = name.clone();
        let value = self.remove(&name)?;
        Some((name, value))
    }
}

/// Ids of taken records, the newest last.
#[derive(Debug, Default)]
struct TakenIds {
    names: HashSet<String>,
    order: VecDeque<String>,
}

impl TakenIds {
    fn insert(&mut self, name: String) {
        if self.order.len() >= TAKEN_IDS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.names.remove(&oldest);
        }
        self.names.insert(name.clone());
        self.order.push_back(name);
    }
}

impl MemoryRecords {
    /// A capacity of `max_records` reservations and as many claims, and `max_bytes` bytes of each, on the system's
    /// clock.
    pub fn new(max_records: usize, max_bytes: usize) -> MemoryRecords {
        MemoryRecords::with_clock(SystemClock::new(), max_records, max_bytes)
    }
}

impl Default for MemoryRecords {
    /// A capacity of 100,000 reservations in 32 MiB, and of as many claims.
    fn default() -> MemoryRecords {
        MemoryRecords::new(100_000, 32 << 20)
    }
}

impl<C: Clock> MemoryRecords<C> {
    /// The same on another clock.
    pub fn with_clock(clock: C, max_records: usize, max_bytes: usize) -> MemoryRecords<C> {
        MemoryRecords { clock, max_records, max_bytes, tables: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, RecordTables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an error if there is no capacity for another value of this kind.
    fn check_capacity<V: MemorySize>(&self, map: &ExpiringMap<V>, value: &V) -> Result<(), RecordError> {
        let after = map.bytes.saturating_add(BYTES_PER_RECORD + value.bytes());
        let has_capacity = map.values.len() < self.max_records && after <= self.max_bytes;
        if has_capacity { Ok(()) } else { Err(RecordError::Full) }
    }
}

impl<C: Clock + Send + Sync + 'static> RecordStore for MemoryRecords<C> {
    async fn put(&self, id: &str, record: &[u8], lifetime: Duration) -> Result<(), RecordError> {
        let (now, mut tables) = (self.clock.now(), self.lock());
        let record = record.to_vec();
        self.check_capacity(&tables.reservations, &record)?;
        tables.reservations.insert(id, now.saturating_add(lifetime), record);
        Ok(())
    }

    async fn read(&self, id: &str) -> Result<TakeResult, RecordError> {
        Ok(self.lock().read(id, self.clock.now()))
    }

    async fn take(&self, id: &str) -> Result<TakeResult, RecordError> {
        let (now, mut tables) = (self.clock.now(), self.lock());
        let found = tables.read(id, now);
        if matches!(found, TakeResult::Record(_)) {
            tables.reservations.remove(id);
            tables.taken.insert(id.to_owned());
        }
        Ok(found)
    }

    async fn take_due(&self, max: usize) -> Result<Vec<Vec<u8>>, RecordError> {
        let (now, mut tables) = (self.clock.now(), self.lock());
        let mut due = Vec::new();
        while due.len() < max {
            let Some((id, record)) = tables.reservations.pop_expired(now) else { break };
            tables.taken.insert(id);
            due.push(record);
        }
        Ok(due)
    }

    async fn claim(&self, claim: &Claim, lifetime: Duration) -> Result<ClaimResult, RecordError> {
        let (now, mut tables) = (self.clock.now(), self.lock());
        if let Some(existing) = tables.claims.get(&claim.name, now) {
            let (fingerprint, response) = (existing.fingerprint.clone(), existing.response.clone());
            return Ok(ClaimResult::Existing { fingerprint, response });
        }
        tables.claims.remove(&claim.name);
        for _ in 0..EVICTIONS_PER_CLAIM {
            if tables.claims.pop_expired(now).is_none() {
                break;
            }
        }
        let first = ClaimEntry { fingerprint: claim.fingerprint.clone(), nonce: claim.nonce, response: None };
        self.check_capacity(&tables.claims, &first)?;
        tables.claims.insert(&claim.name, now.saturating_add(lifetime), first);
        Ok(ClaimResult::First)
    }

    async fn set_response(
        &self,
        claim: &Claim,
        response: &[u8],
        lifetime: Duration,
    ) -> Result<(), RecordError> {
        let (now, mut tables) = (self.clock.now(), self.lock());
        if tables.claims.get_any(&claim.name).is_some_and(|it| it.is(claim))
            && let Some(entry) = tables.claims.remove(&claim.name)
        {
            let entry = ClaimEntry { response: Some(response.to_vec()), ..entry };
            tables.claims.insert(&claim.name, now.saturating_add(lifetime), entry);
        }
        Ok(())
    }

    async fn release(&self, claim: &Claim) {
        let mut tables = self.lock();
        if tables.claims.get_any(&claim.name).is_some_and(|it| it.is(claim)) {
            tables.claims.remove(&claim.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use ratekeeper::ManualClock;

    use super::*;

    fn claim(nonce: u8) -> Claim {
        Claim { name: "n".to_owned(), fingerprint: vec![7], nonce: [nonce; CLAIM_NONCE_BYTES] }
    }

    /// The first claim has expired and the second owns the name when the first stores its response.
    #[tokio::test]
    async fn expired_claim_does_not_change_its_successor() {
        let clock = ManualClock::new(Time::from_secs(1_000));
        let records = MemoryRecords::with_clock(clock.clone(), 1, 1 << 20);
        let (first, second, lifetime) = (claim(1), claim(2), Duration::from_secs(1));
        assert_eq!(records.claim(&first, lifetime).await, Ok(ClaimResult::First));
        clock.advance(lifetime);
        assert_eq!(records.claim(&second, lifetime).await, Ok(ClaimResult::First));
        records.release(&first).await;
        assert_eq!(records.set_response(&first, b"first", lifetime).await, Ok(()));
        let existing = |response: Option<&[u8]>| {
            Ok(ClaimResult::Existing { fingerprint: vec![7], response: response.map(<[u8]>::to_vec) })
        };
        assert_eq!(records.claim(&first, lifetime).await, existing(None));
        assert_eq!(records.set_response(&second, b"second", lifetime).await, Ok(()));
        assert_eq!(records.claim(&first, lifetime).await, existing(Some(b"second")));
        records.release(&second).await;
        assert_eq!(records.lock().claims.bytes, 0);
    }

    #[tokio::test]
    async fn claims_and_reservations_have_separate_capacities() {
        let records = MemoryRecords::with_clock(ManualClock::new(Time::from_secs(1_000)), 1, 1 << 20);
        let lifetime = Duration::from_secs(1);
        assert_eq!(records.claim(&claim(1), lifetime).await, Ok(ClaimResult::First));
        assert_eq!(records.put("r", b"record", lifetime).await, Ok(()));
        let other = Claim { name: "other".to_owned(), ..claim(1) };
        assert_eq!(records.claim(&other, lifetime).await, Err(RecordError::Full));
        assert_eq!(records.put("s", b"record", lifetime).await, Err(RecordError::Full));
    }
}
