//! Records in the memory of this process.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tollgate::{Clock, SystemClock, Time};

use super::{Claimed, NotKept, Records, Taken};

/// Records that end with the process, as limits in memory do.
#[derive(Debug)]
pub struct MemoryRecords<C = SystemClock> {
    clock: C,
    max_records: usize,
    max_bytes: usize,
    kept: Mutex<Kept>,
}

/// What a record takes beside its text: its name, twice, and its place in two tables.
const BYTES_PER_RECORD: usize = 256;
/// The names of records that were taken, so that whoever asks again is told so. The oldest are forgotten first.
const GONE_MAX: usize = 10_000;
/// Claims that have expired are dropped so many at a time, by whoever brings a new one.
const DROPPED_AT_ONCE: usize = 8;

#[derive(Debug, Default)]
struct Kept {
    reservations: Expiring<Vec<u8>>,
    claims: Expiring<Claim>,
    gone: Gone,
    bytes: usize,
}

#[derive(Debug)]
struct Claim {
    asked: Vec<u8>,
    answer: Option<Vec<u8>>,
}

impl Claim {
    fn bytes(&self) -> usize {
        BYTES_PER_RECORD + self.asked.len() + self.answer.as_ref().map_or(0, Vec::len)
    }
}

/// Values by name, and the names by when they expire.
#[derive(Debug)]
struct Expiring<V> {
    values: HashMap<String, (Time, V)>,
    order: BTreeSet<(Time, String)>,
}

impl<V> Default for Expiring<V> {
    fn default() -> Expiring<V> {
        Expiring { values: HashMap::new(), order: BTreeSet::new() }
    }
}

impl<V> Expiring<V> {
    fn get(&self, name: &str, now: Time) -> Option<&V> {
        self.values.get(name).filter(|(expires, _)| *expires > now).map(|(_, value)| value)
    }

    fn insert(&mut self, name: &str, expires: Time, value: V) {
        if let Some((before, _)) = self.values.insert(name.to_owned(), (expires, value)) {
            self.order.remove(&(before, name.to_owned()));
        }
        self.order.insert((expires, name.to_owned()));
    }

    fn remove(&mut self, name: &str) -> Option<V> {
        let (expires, value) = self.values.remove(name)?;
        self.order.remove(&(expires, name.to_owned()));
        Some(value)
    }

    /// The one that expired first.
    fn pop_expired(&mut self, now: Time) -> Option<(String, V)> {
        let (expires, _) = self.order.first()?;
        if *expires > now {
            return None;
        }
        let (_, name) = self.order.pop_first()?;
        let (_, value) = self.values.remove(&name)?;
        Some((name, value))
    }
}

/// Names of what was taken, the newest last.
#[derive(Debug, Default)]
struct Gone {
    names: HashSet<String>,
    order: VecDeque<String>,
}

impl Gone {
    fn remember(&mut self, name: String) {
        if self.order.len() >= GONE_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.names.remove(&oldest);
        }
        self.names.insert(name.clone());
        self.order.push_back(name);
    }
}

impl MemoryRecords {
    /// Room for so many records, and for so many bytes of them, on the system's clock.
    pub fn new(max_records: usize, max_bytes: usize) -> MemoryRecords {
        MemoryRecords::on(SystemClock::new(), max_records, max_bytes)
    }
}

impl Default for MemoryRecords {
    /// Room for a hundred thousand records in 64 MiB.
    fn default() -> MemoryRecords {
        MemoryRecords::new(100_000, 64 << 20)
    }
}

impl<C: Clock> MemoryRecords<C> {
    /// The same on another clock.
    pub fn on(clock: C, max_records: usize, max_bytes: usize) -> MemoryRecords<C> {
        MemoryRecords { clock, max_records, max_bytes, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes so many bytes, if there is room for another record of them.
    fn make_room(&self, kept: &mut Kept, now: Time, bytes: usize) -> Result<(), NotKept> {
        for _ in 0..DROPPED_AT_ONCE {
            let Some((_, claim)) = kept.claims.pop_expired(now) else { break };
            kept.bytes = kept.bytes.saturating_sub(claim.bytes());
        }
        let records = kept.reservations.values.len() + kept.claims.values.len();
        let after = kept.bytes.saturating_add(bytes);
        if records >= self.max_records || after > self.max_bytes {
            return Err(NotKept::Full);
        }
        kept.bytes = after;
        Ok(())
    }
}

impl<C: Clock + Send + Sync + 'static> Records for MemoryRecords<C> {
    async fn put(&self, id: &str, record: &[u8], expires: Duration) -> Result<(), NotKept> {
        let (now, mut kept) = (self.clock.now(), self.kept());
        self.make_room(&mut kept, now, BYTES_PER_RECORD + record.len())?;
        kept.reservations.insert(id, now.saturating_add(expires), record.to_vec());
        Ok(())
    }

    async fn take(&self, id: &str) -> Result<Taken, NotKept> {
        let (now, mut kept) = (self.clock.now(), self.kept());
        if kept.gone.names.contains(id) {
            return Ok(Taken::Gone);
        }
        if kept.reservations.get(id, now).is_none() {
            // One that has expired is left to whoever asks what is due.
            let is_known = kept.reservations.values.contains_key(id);
            return Ok(if is_known { Taken::Gone } else { Taken::Unknown });
        }
        let Some(record) = kept.reservations.remove(id) else { return Ok(Taken::Unknown) };
        kept.bytes = kept.bytes.saturating_sub(BYTES_PER_RECORD + record.len());
        kept.gone.remember(id.to_owned());
        Ok(Taken::Record(record))
    }

    async fn due(&self, most: usize) -> Result<Vec<Vec<u8>>, NotKept> {
        let (now, mut kept) = (self.clock.now(), self.kept());
        let mut due = Vec::new();
        while due.len() < most {
            let Some((id, record)) = kept.reservations.pop_expired(now) else { break };
            kept.bytes = kept.bytes.saturating_sub(BYTES_PER_RECORD + record.len());
            kept.gone.remember(id);
            due.push(record);
        }
        Ok(due)
    }

    async fn claim(&self, name: &str, asked: &[u8], expires: Duration) -> Result<Claimed, NotKept> {
        let (now, mut kept) = (self.clock.now(), self.kept());
        if let Some(claim) = kept.claims.get(name, now) {
            return Ok(Claimed::Before { asked: claim.asked.clone(), answer: claim.answer.clone() });
        }
        if let Some(expired) = kept.claims.remove(name) {
            kept.bytes = kept.bytes.saturating_sub(expired.bytes());
        }
        let claim = Claim { asked: asked.to_vec(), answer: None };
        self.make_room(&mut kept, now, claim.bytes())?;
        kept.claims.insert(name, now.saturating_add(expires), claim);
        Ok(Claimed::First)
    }

    async fn answer(&self, name: &str, answer: &[u8], expires: Duration) -> Result<(), NotKept> {
        let (now, mut kept) = (self.clock.now(), self.kept());
        // A claim that has expired meanwhile may be somebody else's.
        let Some(mut claim) = kept.claims.remove(name) else { return Ok(()) };
        let before = claim.bytes();
        claim.answer = Some(answer.to_vec());
        kept.bytes = kept.bytes.saturating_sub(before).saturating_add(claim.bytes());
        kept.claims.insert(name, now.saturating_add(expires), claim);
        Ok(())
    }

    async fn release(&self, name: &str) {
        let mut kept = self.kept();
        if let Some(claim) = kept.claims.remove(name) {
            kept.bytes = kept.bytes.saturating_sub(claim.bytes());
        }
    }
}
