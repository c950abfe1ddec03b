//! One cache line of the table: a few keys with their states, under one lock that readers need not take.
//!
//! A line is eight words: a *control*, the *tags* of its keys, and their states of `W` words each. Control and tags
//! are half a word wide; a tag is 32 bits of the key's hash, and 0 in an empty entry. With one word of state a line
//! has five entries:
//!
//! ```text
//! word    0               1            2            3 ... 7
//!         control, tag 0  tags 1, 2    tags 3, 4    states 0 ... 4
//! ```
//!
//! The control is a lock bit, the number of keys spilled from this line, the bit of its scale, and a version that every
//! change increments.
//! A thread loads the control, reads the key's state and decides. Only if the state changes does it write: it sets
//! the lock bit by a compare-and-exchange of the first word. If that succeeds, the line has not changed since, and
//! the thread owns it until it stores the first word with the next version. A decision takes one locked instruction,
//! a denial none.

use crate::sync::{AtomicU64, Backoff, Ordering, fence};

/// Eight words: one cache line.
pub(crate) type Line = [AtomicU64; WORDS];
pub(crate) const WORDS: usize = 8;

// The first word: the control is its lower half, the first tag its upper half.
const LOCKED: u64 = 1;
const SPILLED_ONE: u64 = 2;
const SPILLED_MAX: u64 = (1 << 5) - 1;
const SPILLED_MASK: u64 = SPILLED_MAX * SPILLED_ONE;
const SCALE: u64 = SPILLED_ONE * (SPILLED_MAX + 1);
const VERSION_ONE: u64 = 2 * SCALE;
const VERSION_MASK: u64 = HALF & !(SCALE | SPILLED_MASK | LOCKED);
const HALF: u64 = u32::MAX as u64;

/// Identifies a key within its line: the lower half of its hash, never zero. The upper half selects the line.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag(u32);

impl Tag {
    #[inline]
    pub(crate) fn of(hash: u64) -> Tag {
        Tag((hash as u32).max(1))
    }
}

/// Entries in a line whose states have `W` words: the control leaves fifteen half words.
pub(crate) const fn entries<const W: usize>() -> usize {
    15 / (2 * W + 1)
}

/// The first word of a line that is not locked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Control(u64);

impl Control {
    /// The bit of the line's scale.
    #[inline]
    pub(crate) fn scale(self) -> bool {
        self.0 & SCALE != 0
    }
}

/// The control of a line; waits until the line is not locked.
#[inline]
pub(crate) fn control(line: &Line) -> Control {
    let mut backoff = Backoff::default();
    loop {
        let first = line[0].load(Ordering::Acquire);
        if first & LOCKED == 0 {
            return Control(first);
        }
        backoff.wait();
    }
}

/// Whether all reads since `control` was loaded form a consistent snapshot.
#[inline]
pub(crate) fn is_unchanged(line: &Line, control: Control) -> bool {
    fence(Ordering::Acquire);
    line[0].load(Ordering::Relaxed) == control.0
}

/// Locks the line, if it has not changed since `control` was loaded.
#[inline]
pub(crate) fn try_lock(line: &Line, control: Control) -> Option<LockedLine<'_>> {
    let Control(first) = control;
    line[0].compare_exchange(first, first | LOCKED, Ordering::Acquire, Ordering::Relaxed).ok()?;
    // A reader must not see a word written from here on together with the old control.
    fence(Ordering::Release);
    Some(LockedLine { line, first })
}

/// Locks the line, and waits for the lock if necessary.
pub(crate) fn lock(line: &Line) -> LockedLine<'_> {
    let mut backoff = Backoff::default();
    loop {
        if let Some(locked) = try_lock(line, control(line)) {
            return locked;
        }
        backoff.wait();
    }
}

/// Locks the line if its lock is free.
pub(crate) fn lock_if_free(line: &Line) -> Option<LockedLine<'_>> {
    let first = line[0].load(Ordering::Acquire);
    if first & LOCKED == 0 { try_lock(line, Control(first)) } else { None }
}

/// The entry of a key. Branches, so that the processor can predict the entry and continue before the line has arrived
/// from memory.
#[inline(always)]
pub(crate) fn find<const W: usize>(line: &Line, tag: Tag) -> Option<usize> {
    (0..entries::<W>()).find(|&index| tag_at(line, index) == tag.0)
}

/// The entry of a key whose line is in the cache. Compares all tags without branches, because a misprediction would
/// take longer.
#[inline(always)]
pub(crate) fn find_in_cache<const W: usize>(line: &Line, tag: Tag) -> Option<usize> {
    let is_here = |index| u32::from(tag_at(line, index) == tag.0) << index;
    let found = (0..entries::<W>()).map(is_here).fold(0, |all, one| all | one);
    (found != 0).then(|| found.trailing_zeros() as usize)
}

/// The tag of an entry; 0 if the entry is empty.
#[inline]
fn tag_at(line: &Line, index: usize) -> u32 {
    let (word, shift) = tag_position(index);
    (line[word].load(Ordering::Relaxed) >> shift) as u32
}

/// The word and the bit at which an entry's tag begins.
#[inline]
const fn tag_position(index: usize) -> (usize, usize) {
    let half = index + 1;
    (half / 2, half % 2 * 32)
}

/// The state of an entry.
#[inline]
pub(crate) fn state<const W: usize>(line: &Line, index: usize) -> [u64; W] {
    let first = first_word::<W>(index);
    std::array::from_fn(|word| line[first + word].load(Ordering::Relaxed))
}

/// Whether an entry belongs to a key.
pub(crate) fn is_in_use(line: &Line, index: usize) -> bool {
    tag_at(line, index) != 0
}

/// Whether no key is stored in the line or spilled from it, and no thread is about to change that.
pub(crate) fn is_empty<const W: usize>(line: &Line) -> bool {
    let control = line[0].load(Ordering::Acquire);
    control & (LOCKED | SPILLED_MASK) == 0 && (0..entries::<W>()).all(|index| !is_in_use(line, index))
}

/// The state of an entry, or None if another thread is changing the line: takes no lock and does not wait.
pub(crate) fn state_if_free<const W: usize>(line: &Line, index: usize) -> Option<[u64; W]> {
    let control = Control(line[0].load(Ordering::Acquire));
    let state = state(line, index);
    (control.0 & LOCKED == 0 && is_unchanged(line, control)).then_some(state)
}

/// The word at which an entry's state begins: the states follow the words of the control and the tags.
#[inline]
const fn first_word<const W: usize>(index: usize) -> usize {
    (1 + entries::<W>()).div_ceil(2) + index * W
}

/// A line locked by one thread; readers retry once it is unlocked.
pub(crate) struct LockedLine<'a> {
    line: &'a Line,
    /// The first word as it will be stored on unlock, except for the version.
    first: u64,
}

impl<'a> LockedLine<'a> {
    pub(crate) fn line(&self) -> &'a Line {
        self.line
    }

    pub(crate) fn is(&self, line: &Line) -> bool {
        std::ptr::eq(self.line, line)
    }

    #[inline]
    pub(crate) fn set_state<const W: usize>(&mut self, index: usize, state: [u64; W]) {
        let first = first_word::<W>(index);
        for (word, value) in state.into_iter().enumerate() {
            self.line[first + word].store(value, Ordering::Relaxed);
        }
    }

    /// Assigns an entry to a key, or empties it.
    pub(crate) fn set_tag(&mut self, index: usize, tag: Option<Tag>) {
        let tag = u64::from(tag.map_or(0, |tag| tag.0));
        let (word, shift) = tag_position(index);
        let others = |word: u64| word & !(HALF << shift);
        if word == 0 {
            self.first = others(self.first) | tag << shift;
            // This thread reads the word before it unlocks the line.
            self.line[0].store(self.first | LOCKED, Ordering::Relaxed);
        } else {
            let word = &self.line[word];
            word.store(others(word.load(Ordering::Relaxed)) | tag << shift, Ordering::Relaxed);
        }
    }

    /// An entry that belongs to no key.
    pub(crate) fn empty_entry<const W: usize>(&self) -> Option<usize> {
        (0..entries::<W>()).find(|&index| tag_at(self.line, index) == 0)
    }

    /// The bit of the line's scale.
    pub(crate) fn scale(&self) -> bool {
        self.first & SCALE != 0
    }

    pub(crate) fn set_scale(&mut self, bit: bool) {
        self.first = self.first & !SCALE | (SCALE * u64::from(bit));
    }

    /// Whether keys of the line are spilled.
    pub(crate) fn has_spilled(&self) -> bool {
        self.first & SPILLED_MASK > 0
    }

    /// Counts one more spilled key; returns false if the counter is at its maximum.
    pub(crate) fn add_spilled(&mut self) -> bool {
        let fits = self.first & SPILLED_MASK < SPILLED_MASK;
        if fits {
            self.first += SPILLED_ONE;
        }
        fits
    }

    /// Counts one spilled key less.
    pub(crate) fn remove_spilled(&mut self) {
        if self.has_spilled() {
            self.first -= SPILLED_ONE;
        }
    }
}

impl Drop for LockedLine<'_> {
    #[inline]
    fn drop(&mut self) {
        let version = self.first.wrapping_add(VERSION_ONE) & VERSION_MASK;
        self.line[0].store(self.first & !VERSION_MASK | version, Ordering::Release);
    }
}
