//! Records in the memory of this process.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ratekeeper::{Clock, SystemClock, Time};

use super::{CLAIM_NUMBER_BYTES, Claim, Claimed, NotKept, Records, Taken};

/// Records that end with the process, like limits in memory. Reservations and claims have separate capacities, so
/// that neither can crowd out the other.
#[derive(Debug)]
pub struct MemoryRecords<C = SystemClock> {
    clock: C,
    max_records: usize,
    max_bytes: usize,
    kept: Mutex<Kept>,
}

/// Bytes that a record takes beside its text: its name, twice, and its entries in two tables.
const BYTES_PER_RECORD: usize = 256;
/// Ids of taken records that are kept, so that a second settlement gets a conflict. The oldest are evicted first.
const GONE_MAX: usize = 10_000;
/// Expired claims that each new claim evicts, at most.
const DROPPED_AT_ONCE: usize = 8;

#[derive(Debug, Default)]
struct Kept {
    reservations: Expiring<Vec<u8>>,
    claims: Expiring<KeptClaim>,
    gone: Gone,
}

#[derive(Debug)]
struct KeptClaim {
    asked: Vec<u8>,
    number: [u8; CLAIM_NUMBER_BYTES],
    answer: Option<Vec<u8>>,
}

impl KeptClaim {
    /// Whether it is this claim, and not a later one to the same name.
    fn is(&self, claim: &Claim) -> bool {
        self.number == claim.number && self.asked == claim.asked
    }
}

/// A value with a size in memory.
trait Weighed {
    /// Its bytes, beyond [`BYTES_PER_RECORD`].
    fn bytes(&self) -> usize;
}

impl Weighed for Vec<u8> {
    fn bytes(&self) -> usize {
        self.len()
    }
}

impl Weighed for KeptClaim {
    fn bytes(&self) -> usize {
        self.asked.len() + self.number.len() + self.answer.as_ref().map_or(0, Vec::len)
    }
}

/// Values by name, names by expiry, and the bytes of all.
#[derive(Debug)]
struct Expiring<V> {
    values: HashMap<String, (Time, V)>,
    order: BTreeSet<(Time, String)>,
    bytes: usize,
}

impl<V> Default for Expiring<V> {
    fn default() -> Expiring<V> {
        Expiring { values: HashMap::new(), order: BTreeSet::new(), bytes: 0 }
    }
}

impl<V: Weighed> Expiring<V> {
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
    /// A capacity of `max_records` reservations and as many claims, and `max_bytes` bytes of each, on the system's
    /// clock.
    pub fn new(max_records: usize, max_bytes: usize) -> MemoryRecords {
        MemoryRecords::on(SystemClock::new(), max_records, max_bytes)
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
    pub fn on(clock: C, max_records: usize, max_bytes: usize) -> MemoryRecords<C> {
        MemoryRecords { clock, max_records, max_bytes, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the capacity allows another value of this kind.
    fn room<V: Weighed>(&self, among: &Expiring<V>, value: &V) -> Result<(), NotKept> {
        let after = among.bytes.saturating_add(BYTES_PER_RECORD + value.bytes());
        let has_room = among.values.len() < self.max_records && after <= self.max_bytes;
        if has_room { Ok(()) } else { Err(NotKept::Full) }
    }
}

impl<C: Clock + Send + Sync + 'static> Records for MemoryRecords<C> {
    async fn put(&self, id: &str, record: &[u8], expires: Duration) -> Result<(), NotKept> {
        let (now, mut kept) = (self.clock.now(), self.kept());
        let record = record.to_vec();
        self.room(&kept.reservations, &record)?;
        kept.reservations.insert(id, now.saturating_add(expires), record);
        Ok(())
    }

    async fn take(&self, id: &str) -> Result<Taken, NotKept> {
        let (now, mut kept) = (self.clock.now(), self.kept());
        if kept.gone.names.contains(id) {
            return Ok(Taken::Gone);
        }
        if kept.reservations.get(id, now).is_none() {
            // An expired reservation is left to `due`.
            let is_known = kept.reservations.get_any(id).is_some();
            return Ok(if is_known { Taken::Gone } else { Taken::Unknown });
        }
        let Some(record) = kept.reservations.remove(id) else { return Ok(Taken::Unknown) };
        kept.gone.remember(id.to_owned());
        Ok(Taken::Record(record))
    }

    async fn due(&self, most: usize) -> Result<Vec<Vec<u8>>, NotKept> {
        let (now, mut kept) = (self.clock.now(), self.kept());
        let mut due = Vec::new();
        while due.len() < most {
            let Some((id, record)) = kept.reservations.pop_expired(now) else { break };
            kept.gone.remember(id);
            due.push(record);
        }
        Ok(due)
    }

    async fn claim(&self, claim: &Claim, expires: Duration) -> Result<Claimed, NotKept> {
        let (now, mut kept) = (self.clock.now(), self.kept());
        if let Some(before) = kept.claims.get(&claim.name, now) {
            return Ok(Claimed::Before { asked: before.asked.clone(), answer: before.answer.clone() });
        }
        kept.claims.remove(&claim.name);
        for _ in 0..DROPPED_AT_ONCE {
            if kept.claims.pop_expired(now).is_none() {
                break;
            }
        }
        let first = KeptClaim { asked: claim.asked.clone(), number: claim.number, answer: None };
        self.room(&kept.claims, &first)?;
        kept.claims.insert(&claim.name, now.saturating_add(expires), first);
        Ok(Claimed::First)
    }

    async fn answer(&self, claim: &Claim, answer: &[u8], expires: Duration) -> Result<(), NotKept> {
        let (now, mut kept) = (self.clock.now(), self.kept());
        if kept.claims.get_any(&claim.name).is_some_and(|it| it.is(claim))
            && let Some(ours) = kept.claims.remove(&claim.name)
        {
            let answered = KeptClaim { answer: Some(answer.to_vec()), ..ours };
            kept.claims.insert(&claim.name, now.saturating_add(expires), answered);
        }
        Ok(())
    }

    async fn release(&self, claim: &Claim) {
        let mut kept = self.kept();
        if kept.claims.get_any(&claim.name).is_some_and(|it| it.is(claim)) {
            kept.claims.remove(&claim.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use ratekeeper::ManualClock;

    use super::*;

    fn claim(number: u8) -> Claim {
        Claim { name: "n".to_owned(), asked: vec![7], number: [number; CLAIM_NUMBER_BYTES] }
    }

    /// The first claim has expired and the second owns the name when the first stores its response.
    #[tokio::test]
    async fn expired_claim_does_not_change_its_successor() {
        let clock = ManualClock::new(Time::from_secs(1_000));
        let records = MemoryRecords::on(clock.clone(), 1, 1 << 20);
        let (first, second, moment) = (claim(1), claim(2), Duration::from_secs(1));
        assert_eq!(records.claim(&first, moment).await, Ok(Claimed::First));
        clock.advance(moment);
        assert_eq!(records.claim(&second, moment).await, Ok(Claimed::First));
        records.release(&first).await;
        assert_eq!(records.answer(&first, b"first", moment).await, Ok(()));
        let before = |answer: Option<&[u8]>| {
            Ok(Claimed::Before { asked: vec![7], answer: answer.map(<[u8]>::to_vec) })
        };
        assert_eq!(records.claim(&first, moment).await, before(None));
        assert_eq!(records.answer(&second, b"second", moment).await, Ok(()));
        assert_eq!(records.claim(&first, moment).await, before(Some(b"second")));
        records.release(&second).await;
        assert_eq!(records.kept().claims.bytes, 0);
    }

    #[tokio::test]
    async fn claims_and_reservations_have_separate_capacities() {
        let records = MemoryRecords::on(ManualClock::new(Time::from_secs(1_000)), 1, 1 << 20);
        let moment = Duration::from_secs(1);
        assert_eq!(records.claim(&claim(1), moment).await, Ok(Claimed::First));
        assert_eq!(records.put("r", b"record", moment).await, Ok(()));
        let other = Claim { name: "other".to_owned(), ..claim(1) };
        assert_eq!(records.claim(&other, moment).await, Err(NotKept::Full));
        assert_eq!(records.put("s", b"record", moment).await, Err(NotKept::Full));
    }
}
