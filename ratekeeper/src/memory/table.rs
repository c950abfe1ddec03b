//! The table for keys whose states are a few words: a decision accesses one cache line.
//!
//! A key's hash selects its line. The table neither grows nor probes: it reserves its memory when it is created (the
//! system commits a page when it is first used), and a key whose line is full of keys in use is *spilled* to a small
//! side map. A new key may overwrite the entry of an idle one, so the lines need no sweep.
//!
//! The generations of a limit share the lines and the side map; each has its own algorithm (see `scale`).

mod conversion;

use std::sync::Arc;
use std::time::Duration;

use ratekeeper_core::{Algorithm, Decision, Limit, State, Time};

use super::Bounds;
use super::budget::Reservation;
use super::line::{self, Control, Line, LockedLine, Tag, WORDS};
use super::overflow::{HeldOverflow, Overflow, Quota, WhenFull};
use super::pack::PackState;
use super::predecessor::{Migratable, Predecessor};
use super::scale::{CurrentScale, Scale, ScaleId, Scales};
use super::shard::{Shard, scale, shard_count};
use crate::sync::{AtomicU64, Mutex, lock};

/// Entries per 100 keys: the more entries, the fewer keys find their line full.
const ENTRIES_PERCENT: usize = 230;
/// Extra capacity of the side map, because small tables fill unevenly.
const SPILL_EXTRA: usize = 64;
/// Spilled keys that a newly spilled key scans for idle ones.
const SWEEP: usize = 16;
/// Counting the keys of a larger table scans at most this many lines, 64 MiB, and extrapolates.
const COUNTED_LINES_MAX: usize = 1 << 20;

#[derive(Clone, Debug)]
pub(crate) struct Table<A: Algorithm, const W: usize> {
    /// A copy of the algorithm of `scale`, and of its id: a check reads them without another pointer.
    algorithm: A,
    id: ScaleId,
    shared: Arc<SharedTable<A, A::State>>,
    scale: Arc<Scale<A>>,
    window: Duration,
    when_full: WhenFull,
}

/// What the generations of a limit share.
#[derive(Debug)]
struct SharedTable<A, S> {
    words: Box<[AtomicU64]>,
    /// Index of the first word that is aligned to a cache line.
    first: usize,
    lines: usize,
    max_keys: usize,
    scales: Scales<A>,
    spill: Box<[Mutex<Shard<S>>]>,
    spilled: Quota,
    overflow: Overflow<S>,
    predecessor: Predecessor,
    _reserved: Reservation,
}

impl<A, S> SharedTable<A, S> {
    #[inline]
    fn lines(&self) -> &[Line] {
        self.words[self.first..].as_chunks().0
    }
}

#[cfg(not(loom))]
fn zeroed(words: usize) -> Box<[AtomicU64]> {
    bytemuck::allocation::zeroed_slice_box(words)
}

#[cfg(loom)]
fn zeroed(words: usize) -> Box<[AtomicU64]> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}

impl<A: PackState<W> + Migratable, const W: usize> Table<A, W> {
    /// Bytes of a spilled key, including its share of the shards.
    const BYTES_PER_SPILLED: usize = Shard::<A::State>::BYTES_PER_KEY_MAX + 1;

    /// A table for `max_keys` keys in use, or for as many as fit into the reserved bytes. If it has a predecessor,
    /// `limit` has replaced the predecessor's limit at `now`.
    pub(crate) fn new(
        algorithm: A,
        limit: &Limit,
        bounds: Bounds,
        mut reserved: Reservation,
        predecessor: Option<(Predecessor, Time)>,
    ) -> Table<A, W> {
        let Bounds { max_keys, when_full, .. } = bounds;
        let max_bytes = reserved.bytes();
        let per_1000_keys = Self::bytes_for(1000) - Self::bytes_for(0);
        let room = max_bytes.saturating_sub(Self::bytes_for(0)) as u128 * 1000 / per_1000_keys as u128;
        let mut max_keys = max_keys.min(usize::try_from(room).unwrap_or(usize::MAX)).max(1);
        // Corrects for rounding: lines and spilled entries are whole numbers.
        while max_keys > 1 && Self::bytes_for(max_keys) > max_bytes {
            max_keys -= max_keys / 1000 + 1;
        }
        reserved.shrink_to(Self::bytes_for(max_keys));
        let (lines, spill_max) = (Self::lines_for(max_keys), Self::spill_for(max_keys));
        let words = zeroed((lines + 1) * WORDS);
        let changes = predecessor.iter().map(|(_, at)| (limit.clone(), *at)).collect();
        let scales = Scales::new(&algorithm, limit, changes);
        let scale = scales.current();
        let shared = SharedTable {
            first: words.as_ptr().align_offset(WORDS * size_of::<u64>()) % WORDS,
            words,
            lines,
            max_keys,
            scales,
            spill: (0..shard_count(spill_max)).map(|_| Mutex::new(Shard::default())).collect(),
            spilled: Quota::new(spill_max),
            overflow: Overflow::new(algorithm.fresh_in_place()),
            predecessor: predecessor.map(|(predecessor, _)| predecessor).unwrap_or_default(),
            _reserved: reserved,
        };
        Table::of(algorithm, scale, Arc::new(shared), when_full)
    }

    fn of(
        algorithm: A,
        scale: Arc<Scale<A>>,
        shared: Arc<SharedTable<A, A::State>>,
        when_full: WhenFull,
    ) -> Table<A, W> {
        Table { id: scale.id, window: algorithm.window(), algorithm, shared, scale, when_full }
    }

    /// The next generation, on the same lines: `limit`, which `algorithm` computes, replaces the current limit at
    /// `now`.
    pub(crate) fn next(&self, algorithm: A, limit: &Limit, when_full: WhenFull, now: Time) -> Table<A, W> {
        let shared = &self.shared;
        shared.predecessor.extend(limit, now);
        self.end_windows(limit, now);
        // Without a scale, the first generation stays the current one.
        let current = if A::HAS_SCALE { shared.scales.settled(&self.scale) } else { self.scale.clone() };
        let scale = match current.limit == *limit {
            true => current,
            false => {
                self.convert_all(&current);
                Arc::new(shared.scales.next(&current, algorithm.clone(), limit, now))
            }
        };
        Table::of(algorithm, scale, shared.clone(), when_full)
    }

    fn lines_for(max_keys: usize) -> usize {
        (max_keys.saturating_mul(ENTRIES_PERCENT) / 100 / line::entries::<W>()).max(1)
    }

    /// Capacity of the side map, several times the expected number of spilled keys: with five, three and one entries
    /// per line, 1.5, 5 and 19 % of the keys find their line full by chance.
    fn spill_for(max_keys: usize) -> usize {
        max_keys / (2 * line::entries::<W>()) + SPILL_EXTRA
    }

    fn bytes_for(max_keys: usize) -> usize {
        (Self::lines_for(max_keys) + 1) * size_of::<Line>()
            + Self::spill_for(max_keys) * Self::BYTES_PER_SPILLED
    }

    /// The maximum bytes of the table, side map included.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.shared.words) + self.shared.spilled.max() * Self::BYTES_PER_SPILLED
    }

    pub(crate) fn overflowed(&self) -> u64 {
        self.shared.overflow.requests()
    }

    /// Number of keys in use, approximate for lines that change during the count. Takes no locks.
    pub(crate) fn keys(&self, now: Time) -> usize {
        let lines = &self.shared.lines()[..self.shared.lines];
        let step = lines.len().div_ceil(COUNTED_LINES_MAX);
        let (scanned, keys) = lines.iter().step_by(step).fold((0, 0), |(scanned, keys), line| {
            // A key whose line is being changed counts as in use.
            let is_idle = |index| {
                line::state_if_free(line, index)
                    .is_some_and(|state| self.algorithm.is_fresh(&self.algorithm.unpack(state), now))
            };
            let in_use =
                (0..line::entries::<W>()).filter(|&index| line::is_in_use(line, index) && !is_idle(index));
            (scanned + 1, keys + in_use.count())
        });
        // At most the number of entries, which fits into a usize.
        (keys as u128 * lines.len() as u128 / scanned as u128) as usize + self.shared.spilled.used()
    }

    #[inline]
    fn line(&self, hash: u64) -> &Line {
        &self.shared.lines()[scale(hash, self.shared.lines)]
    }

    /// Fetches a key's line from memory without waiting for it.
    #[inline]
    pub(crate) fn touch(&self, hash: u64) -> u64 {
        self.line(hash)[0].load(crate::sync::Ordering::Relaxed)
    }

    /// Fetches the lines of some keys from memory, in a loop so short that the processor runs all loads in parallel.
    #[inline]
    pub(crate) fn touch_many(&self, hashes: &[u64]) -> u64 {
        hashes.iter().fold(0, |all, &hash| all ^ self.touch(hash))
    }

    /// Decides and charges a request, and returns the result of `read` for the decision: fields that `read` does not
    /// use are optimised out.
    ///
    /// The clock is read while the line is fetched from memory: each takes about as long as all the rest.
    #[inline]
    pub(crate) fn decide<R>(
        &self,
        hash: u64,
        now: impl FnOnce() -> Time,
        cost: u32,
        read: impl FnOnce(Decision) -> R,
    ) -> R {
        self.decide_with(line::find::<W>, hash, now, cost, read)
    }

    /// The same as `decide` for a key that was [touched](Self::touch).
    #[inline]
    pub(crate) fn decide_touched<R>(
        &self,
        hash: u64,
        now: Time,
        cost: u32,
        read: impl FnOnce(Decision) -> R,
    ) -> R {
        self.decide_with(line::find_in_cache::<W>, hash, || now, cost, read)
    }

    #[inline(always)]
    fn decide_with<R>(
        &self,
        find: impl Fn(&Line, Tag) -> Option<usize>,
        hash: u64,
        now: impl FnOnce() -> Time,
        cost: u32,
        read: impl FnOnce(Decision) -> R,
    ) -> R {
        let (line, tag) = (self.line(hash), Tag::of(hash));
        let mut control = line::control(line);
        let now = now();
        loop {
            let Some(index) = find(line, tag).filter(|_| self.is_in_scale(control)) else {
                return read(self.decide_held(hash, now, cost));
            };
            let before = line::state::<W>(line, index);
            // A state of one word is always consistent; several words may belong to two states.
            if W == 1 || line::is_unchanged(line, control) {
                let mut state = self.algorithm.unpack(before);
                let decision = self.algorithm.decide(&mut state, now, cost);
                let after = self.algorithm.pack(&state);
                if after == before {
                    if line::is_unchanged(line, control) {
                        return read(decision);
                    }
                } else if let Some(mut locked) = line::try_lock(line, control) {
                    locked.set_state(index, after);
                    // Unlocks first, because `map` may check a key of the same line.
                    drop(locked);
                    return read(decision);
                }
            }
            control = line::control(line);
        }
    }

    /// Whether a line is in the scale of this generation, as of the time when its control was loaded.
    #[inline(always)]
    fn is_in_scale(&self, control: Control) -> bool {
        !A::HAS_SCALE || (control.scale() == self.id.bit && self.shared.scales.is_current(self.id))
    }

    /// Decides a request of a key that is not in its line, or whose line is to be converted: rare, so its code is kept out of the hot path.
    #[cold]
    #[inline(never)]
    fn decide_held(&self, hash: u64, now: Time, cost: u32) -> Decision {
        self.hold(hash, now).decide(cost)
    }

    /// Decides a request without charging it.
    pub(crate) fn peek(&self, hash: u64, now: Time, cost: u32) -> Decision {
        let (line, tag) = (self.line(hash), Tag::of(hash));
        loop {
            let control = line::control(line);
            let state = match line::find::<W>(line, tag).filter(|_| self.is_in_scale(control)) {
                Some(index) => self.algorithm.unpack(line::state(line, index)),
                None => return self.hold(hash, now).peek(cost),
            };
            if line::is_unchanged(line, control) {
                return self.algorithm.peek(&state, now, cost);
            }
        }
    }

    /// Locks a key: no other request for it is decided until the returned value is dropped.
    pub(crate) fn hold(&self, hash: u64, now: Time) -> LockedEntry<'_, A, W> {
        let (locked, scale) = self.lock(hash);
        let mut held = LockedEntry { table: self, locked, scale, hash, now, entry: TableEntry::New };
        held.entry = held.find();
        held
    }

    /// Locks the line of a key, and converts it to the current scale.
    fn lock(&self, hash: u64) -> (LockedLine<'_>, CurrentScale<'_, A>) {
        let mut locked = line::lock(self.line(hash));
        let scale = self.shared.scales.of_locked_line(&self.scale);
        self.convert(&mut locked, super::shard::scale(hash, self.shared.lines), &scale);
        (locked, scale)
    }

    pub(crate) fn extend_predecessor(&self, to: &Limit, at: Time) {
        self.shared.predecessor.extend(to, at);
    }

    pub(crate) fn predecessor_bytes(&self) -> usize {
        self.shared.predecessor.bytes()
    }

    /// A key's state at `now`, with the limit that it belongs to.
    pub(crate) fn state(&self, hash: u64, now: Time) -> Option<(Limit, State)> {
        let (locked, scale) = self.lock(hash);
        let spilled = || lock(self.spill_of(hash)).get(hash).cloned();
        let own = match line::find::<W>(locked.line(), Tag::of(hash)) {
            Some(index) => Some(self.algorithm.unpack(line::state(locked.line(), index))),
            None => locked.has_spilled().then(spilled).flatten(),
        };
        let state = match own {
            Some(own) => A::any_state(own),
            None => self.shared.predecessor.state(hash, now, &scale.changes)?,
        };
        Some((scale.limit.clone(), state))
    }

    /// The keys that the table has room for, however their hashes are distributed.
    pub(crate) fn max_keys(&self) -> usize {
        self.shared.max_keys
    }

    /// Replaces the state of a key, unless the table is full.
    #[cfg(feature = "tower")]
    pub(crate) fn put(&self, hash: u64, state: State, now: Time) {
        if let Some(state) = self.algorithm.own_state(state) {
            self.hold(hash, now).change(|_, own| *own = state);
        }
    }

    fn spill_of(&self, hash: u64) -> &Mutex<Shard<A::State>> {
        &self.shared.spill[scale(hash, self.shared.spill.len())]
    }
}

/// Where the state of a locked key is or will be stored.
enum TableEntry<'a, S> {
    /// In an entry of the line.
    InLine(usize),
    /// In the side map. The key is locked by its line's lock; the shard's lock only guards the shard.
    Spilled,
    /// No entry, and none is reserved.
    New,
    /// No entry yet; this entry of the line is free for it.
    NewInLine(usize),
    /// No entry yet; an entry of the side map is reserved for it.
    NewSpilled,
    /// The line and the side map are full.
    Overflow(HeldOverflow<'a, S>),
}

/// A key locked by one request.
pub(crate) struct LockedEntry<'a, A: PackState<W> + Migratable, const W: usize> {
    table: &'a Table<A, W>,
    locked: LockedLine<'a>,
    /// The scale of the line.
    scale: CurrentScale<'a, A>,
    hash: u64,
    now: Time,
    entry: TableEntry<'a, A::State>,
}

impl<'a, A: PackState<W> + Migratable, const W: usize> LockedEntry<'a, A, W> {
    fn find(&mut self) -> TableEntry<'a, A::State> {
        let table = self.table;
        if let Some(index) = line::find::<W>(self.locked.line(), Tag::of(self.hash)) {
            return TableEntry::InLine(index);
        }
        let free = self.free_entry(self.now.saturating_sub(table.window));
        if self.locked.has_spilled() {
            let mut spill = lock(table.spill_of(self.hash));
            if spill.get(self.hash).is_some() {
                // The line has a free entry again, so the key moves back.
                let Some(index) = free else { return TableEntry::Spilled };
                if let Some(state) = spill.remove(self.hash) {
                    table.shared.spilled.refund(1);
                    self.locked.remove_spilled();
                    self.write(index, &state);
                    return TableEntry::InLine(index);
                }
            }
        }
        let entry = match free {
            Some(index) => TableEntry::NewInLine(index),
            None if self.reserve_spilled() => TableEntry::NewSpilled,
            // As a last resort, an entry that is idle now but would not be if the clock stepped back.
            None => match self.free_entry(self.now) {
                Some(index) => TableEntry::NewInLine(index),
                None => return TableEntry::Overflow(self.overflow()),
            },
        };
        match (self.migrated(), entry) {
            (Some(state), TableEntry::NewInLine(index)) => {
                self.write(index, &state);
                TableEntry::InLine(index)
            }
            (Some(state), TableEntry::NewSpilled) => {
                lock(table.spill_of(self.hash)).insert(self.hash, state);
                TableEntry::Spilled
            }
            (_, entry) => entry,
        }
    }

    /// The state of a key without an entry in the table's predecessor, if it still counts.
    fn migrated(&self) -> Option<A::State> {
        let Scale { algorithm, changes, .. } = &*self.scale;
        let state = self.table.shared.predecessor.state(self.hash, self.now, changes)?;
        algorithm.own_state(state).filter(|state| !algorithm.is_fresh(state, self.now))
    }

    fn overflow(&self) -> HeldOverflow<'a, A::State> {
        let Table { shared, when_full, .. } = self.table;
        shared.overflow.hold(*when_full, self.scale.id.bit, |state| self.scale.convert(state))
    }

    /// An entry that is empty or whose key has been idle since `then`.
    fn free_entry(&self, then: Time) -> Option<usize> {
        let idle = |index: &usize| {
            let state = self.scale.algorithm.unpack(line::state(self.locked.line(), *index));
            self.scale.algorithm.is_fresh(&state, then)
        };
        self.locked.empty_entry::<W>().or_else(|| (0..line::entries::<W>()).find(idle))
    }

    fn reserve_spilled(&mut self) -> bool {
        // Keys that are idle now, but would not be if the clock stepped back, are evicted only if the map is full.
        let long_ago = self.now.saturating_sub(self.table.window);
        self.sweep_spilled(long_ago);
        let taken = self.table.shared.spilled.take(1) || {
            self.sweep_spilled(self.now);
            self.table.shared.spilled.take(1)
        };
        taken && {
            let counted = self.locked.add_spilled();
            self.table.shared.spilled.refund(usize::from(!counted));
            counted
        }
    }

    /// Evicts spilled keys that have been idle since `then`.
    fn sweep_spilled(&mut self, then: Time) {
        let LockedEntry { table, locked, scale, hash, .. } = self;
        let mut spill = lock(table.spill_of(*hash));
        let is_idle = |state: &A::State| scale.algorithm.is_fresh(state, then);
        spill.sweep(SWEEP, is_idle, |idle, _| {
            // The line counts its spilled keys, so an eviction needs the line's lock; keys of a locked line are
            // skipped.
            let home = table.line(idle);
            let is_evicted = if locked.is(home) {
                locked.remove_spilled();
                true
            } else {
                // The states of a line that is not converted yet are in another scale.
                let home = line::lock_if_free(home).filter(|home| home.scale() == scale.id.bit);
                home.map(|mut home| home.remove_spilled()).is_some()
            };
            table.shared.spilled.refund(usize::from(is_evicted));
            is_evicted
        });
        spill.shrink();
    }

    fn write(&mut self, index: usize, state: &A::State) {
        self.locked.set_tag(index, Some(Tag::of(self.hash)));
        self.locked.set_state(index, self.scale.algorithm.pack(state));
    }

    fn state(&self) -> A::State {
        let algorithm = &self.scale.algorithm;
        match self.entry {
            TableEntry::InLine(index) => algorithm.unpack(line::state(self.locked.line(), index)),
            TableEntry::Spilled => {
                let spill = lock(self.table.spill_of(self.hash));
                spill.get(self.hash).cloned().unwrap_or_else(|| algorithm.fresh())
            }
            _ => algorithm.fresh(),
        }
    }

    pub(crate) fn peek(&self, cost: u32) -> Decision {
        match &self.entry {
            TableEntry::Overflow(overflow) => overflow.peek(&self.scale.algorithm, self.now, cost),
            _ => self.scale.algorithm.peek(&self.state(), self.now, cost),
        }
    }

    pub(crate) fn decide(&mut self, cost: u32) -> Decision {
        let now = self.now;
        match &mut self.entry {
            TableEntry::Overflow(overflow) => overflow.decide(&self.scale.algorithm, now, cost),
            _ => self.change(|algorithm, state| algorithm.decide(state, now, cost)),
        }
    }

    pub(crate) fn refund(&mut self, cost: u32, at: Option<Time>) {
        let now = self.now;
        match &mut self.entry {
            TableEntry::Overflow(overflow) => overflow.refund(&self.scale.algorithm, now, cost, at),
            _ => self.change(|algorithm, state| algorithm.refund(state, now, cost, at)),
        }
    }

    /// Changes the state of a key, and gives the key its reserved entry if it is no longer fresh.
    fn change<R>(&mut self, change: impl FnOnce(&A, &mut A::State) -> R) -> R {
        let algorithm = &self.scale.algorithm;
        if matches!(self.entry, TableEntry::Spilled)
            && let Some(state) = lock(self.table.spill_of(self.hash)).get_mut(self.hash)
        {
            return change(algorithm, state);
        }
        let mut state = self.state();
        let result = change(algorithm, &mut state);
        // A key that is still fresh needs no entry.
        let stays_new = algorithm.is_fresh(&state, self.now);
        match self.entry {
            TableEntry::InLine(index) => {
                let packed = algorithm.pack(&state);
                self.locked.set_state(index, packed);
            }
            TableEntry::NewInLine(index) if !stays_new => {
                self.write(index, &state);
                self.entry = TableEntry::InLine(index);
            }
            TableEntry::NewSpilled if !stays_new => {
                lock(self.table.spill_of(self.hash)).insert(self.hash, state);
                self.entry = TableEntry::Spilled;
            }
            _ => {}
        }
        result
    }

    pub(crate) fn reset(&mut self) {
        self.table.shared.predecessor.reset(self.hash, self.now);
        match self.entry {
            TableEntry::InLine(index) => {
                self.locked.set_tag(index, None);
                self.locked.set_state(index, [0; W]);
            }
            TableEntry::Spilled => {
                lock(self.table.spill_of(self.hash)).remove(self.hash);
                self.locked.remove_spilled();
                self.table.shared.spilled.refund(1);
            }
            _ => return,
        }
        self.entry = TableEntry::New;
    }

    pub(crate) fn counts_denied(&self) -> bool {
        self.scale.algorithm.counts_denied()
    }
}

impl<A: PackState<W> + Migratable, const W: usize> Drop for LockedEntry<'_, A, W> {
    fn drop(&mut self) {
        if matches!(self.entry, TableEntry::NewSpilled) {
            self.locked.remove_spilled();
            self.table.shared.spilled.refund(1);
        }
    }
}
