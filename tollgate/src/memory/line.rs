//! One cache line of the table: a few keys with their states, under one lock that readers need not take.
//!
//! A line is eight words: a *control*, the *tags* of its keys, and their states of `W` words each. Control and tags
//! are half a word wide; a tag is 32 bits of the key's hash, and 0 in an empty slot. With one word of state a line
//! has five slots:
//!
//! ```text
//! word    0               1            2            3 ... 7
//!         control, tag 0  tags 1, 2    tags 3, 4    states 0 ... 4
//! ```
//!
//! The control is a lock bit, how many keys of this line had to go elsewhere, and a version that every change moves
//! on. A reader takes the control, reads what it needs, decides, and only if the state changes does it write: it
//! exchanges the first word as it saw it for the same with the lock bit. If that succeeds nothing has changed since,
//! and the line is its own until it stores the first word with the next version. One locked instruction a decision,
//! none if it is denied.

use crate::sync::{AtomicU64, Backoff, Ordering, fence};

/// Eight words: one cache line.
pub(crate) type Line = [AtomicU64; WORDS];
pub(crate) const WORDS: usize = 8;

// The first word: the control is its lower half, the first tag its upper.
const LOCKED: u64 = 1;
const SPILLED_ONE: u64 = 2;
const SPILLED_MAX: u64 = (1 << 5) - 1;
const SPILLED_MASK: u64 = SPILLED_MAX * SPILLED_ONE;
const VERSION_ONE: u64 = SPILLED_ONE * (SPILLED_MAX + 1);
const VERSION_MASK: u64 = HALF & !(SPILLED_MASK | LOCKED);
const HALF: u64 = u32::MAX as u64;

/// A key within its line: the lower half of its hash, and never zero. The line was chosen by the upper half.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag(u32);

impl Tag {
    #[inline]
    pub(crate) fn of(hash: u64) -> Tag {
        Tag((hash as u32).max(1))
    }
}

/// Slots in a line whose states have `W` words: fifteen half words, the control's aside.
pub(crate) const fn slots<const W: usize>() -> usize {
    15 / (2 * W + 1)
}

/// The first word of a line that nobody is changing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Control(u64);

/// The control of a line; waits until nobody is changing it.
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

/// Whether all that was read since `control` was taken belongs together.
#[inline]
pub(crate) fn is_unchanged(line: &Line, control: Control) -> bool {
    fence(Ordering::Acquire);
    line[0].load(Ordering::Relaxed) == control.0
}

/// Takes the lock, if the line has not changed since `control` was taken.
#[inline]
pub(crate) fn try_lock(line: &Line, control: Control) -> Option<LockedLine<'_>> {
    let Control(first) = control;
    line[0].compare_exchange(first, first | LOCKED, Ordering::Acquire, Ordering::Relaxed).ok()?;
    // No reader may see a word that is written from here on together with the control of before.
    fence(Ordering::Release);
    Some(LockedLine { line, first })
}

/// Takes the lock, waiting for it.
pub(crate) fn lock(line: &Line) -> LockedLine<'_> {
    let mut backoff = Backoff::default();
    loop {
        if let Some(locked) = try_lock(line, control(line)) {
            return locked;
        }
        backoff.wait();
    }
}

/// Takes the lock, if nobody has it.
pub(crate) fn lock_if_free(line: &Line) -> Option<LockedLine<'_>> {
    let first = line[0].load(Ordering::Acquire);
    if first & LOCKED == 0 { try_lock(line, Control(first)) } else { None }
}

/// The slot of a key. The processor guesses which, and goes on before the line has come from memory.
#[inline(always)]
pub(crate) fn find<const W: usize>(line: &Line, tag: Tag) -> Option<usize> {
    (0..slots::<W>()).find(|&slot| tag_at(line, slot) == tag.0)
}

/// The slot of a key whose line is in the cache: compares all, because a wrong guess would take longer.
#[inline(always)]
pub(crate) fn find_in_cache<const W: usize>(line: &Line, tag: Tag) -> Option<usize> {
    let is_here = |slot| u32::from(tag_at(line, slot) == tag.0) << slot;
    let found = (0..slots::<W>()).map(is_here).fold(0, |all, one| all | one);
    (found != 0).then(|| found.trailing_zeros() as usize)
}

/// The tag in a slot; 0 if it is empty.
#[inline]
fn tag_at(line: &Line, slot: usize) -> u32 {
    let (word, shift) = tag_place(slot);
    (line[word].load(Ordering::Relaxed) >> shift) as u32
}

/// The word and the bit at which a slot's tag begins.
#[inline]
const fn tag_place(slot: usize) -> (usize, usize) {
    let half = slot + 1;
    (half / 2, half % 2 * 32)
}

/// The state in a slot.
#[inline]
pub(crate) fn state<const W: usize>(line: &Line, slot: usize) -> [u64; W] {
    let first = first_word::<W>(slot);
    std::array::from_fn(|word| line[first + word].load(Ordering::Relaxed))
}

/// Whether a slot belongs to a key.
pub(crate) fn is_taken(line: &Line, slot: usize) -> bool {
    tag_at(line, slot) != 0
}

/// The state in a slot, unless somebody is changing the line: nobody waits, and nobody is waited for.
pub(crate) fn state_if_free<const W: usize>(line: &Line, slot: usize) -> Option<[u64; W]> {
    let control = Control(line[0].load(Ordering::Acquire));
    let state = state(line, slot);
    (control.0 & LOCKED == 0 && is_unchanged(line, control)).then_some(state)
}

/// Where a slot's state begins: after the words that hold the control and the tags.
#[inline]
const fn first_word<const W: usize>(slot: usize) -> usize {
    (1 + slots::<W>()).div_ceil(2) + slot * W
}

/// A line that one thread has to itself; readers try again once it is let go.
pub(crate) struct LockedLine<'a> {
    line: &'a Line,
    /// The first word as it will be, but for the version.
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
    pub(crate) fn set_state<const W: usize>(&mut self, slot: usize, state: [u64; W]) {
        let first = first_word::<W>(slot);
        for (word, value) in state.into_iter().enumerate() {
            self.line[first + word].store(value, Ordering::Relaxed);
        }
    }

    /// Gives a slot to a key, or empties it.
    pub(crate) fn set_tag(&mut self, slot: usize, tag: Option<Tag>) {
        let tag = u64::from(tag.map_or(0, |tag| tag.0));
        let (word, shift) = tag_place(slot);
        let others = |word: u64| word & !(HALF << shift);
        if word == 0 {
            self.first = others(self.first) | tag << shift;
            // The thread itself reads it before it lets go.
            self.line[0].store(self.first | LOCKED, Ordering::Relaxed);
        } else {
            let word = &self.line[word];
            word.store(others(word.load(Ordering::Relaxed)) | tag << shift, Ordering::Relaxed);
        }
    }

    /// A slot that belongs to no key.
    pub(crate) fn empty_slot<const W: usize>(&self) -> Option<usize> {
        (0..slots::<W>()).find(|&slot| tag_at(self.line, slot) == 0)
    }

    /// Whether keys of the line are elsewhere.
    pub(crate) fn has_spilled(&self) -> bool {
        self.first & SPILLED_MASK > 0
    }

    /// Notes that one more key of the line is elsewhere, if so many can be counted.
    pub(crate) fn add_spilled(&mut self) -> bool {
        let fits = self.first & SPILLED_MASK < SPILLED_MASK;
        if fits {
            self.first += SPILLED_ONE;
        }
        fits
    }

    /// Notes that a key of the line is no longer elsewhere.
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
