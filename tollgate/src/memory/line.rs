//! One cache line of the table: a few keys with their states, under one lock that readers need not take.
//!
//! A line is eight words. The first is its *control*: a lock bit, how many keys of this line had to go elsewhere,
//! and a version that every change moves on. The others hold the slots: 48 bits of each key's hash, and its state
//! of `W` words. With one word of state a line has four slots:
//!
//! ```text
//! word     0        1          2          3              4 ... 7
//!       control  low 32 bits of hash   high 16 bits   state of slot
//!                0 and 1    2 and 3    of 0 1 2 3     0  1  2  3
//! ```
//!
//! With more words a slot's hash has a word of its own. A hash of 0 is an empty slot.
//!
//! A reader takes the control, reads what it needs, decides, and only if the state changes does it write: it
//! exchanges the control it saw for the same one with the lock bit. If that succeeds nothing has changed since, and
//! the line is its own until it stores the control with the next version. One locked instruction a decision, none
//! if it is denied.

use crate::sync::{AtomicU64, Backoff, Ordering, fence};

/// Eight words: one cache line.
pub(crate) type Line = [AtomicU64; WORDS];
pub(crate) const WORDS: usize = 8;

const LOCKED: u64 = 1;
const SPILLED_ONE: u64 = 2;
const SPILLED_BITS: u32 = 23;
const SPILLED_MAX: u64 = (1 << SPILLED_BITS) - 1;
const VERSION_ONE: u64 = SPILLED_ONE << SPILLED_BITS;

/// The part of a hash that a slot keeps. The line is chosen by the hash's upper bits, so together they know it
/// almost whole.
const TAG_BITS: u32 = 48;

/// A key within its line; never zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag(u64);

impl Tag {
    #[inline]
    pub(crate) fn of(hash: u64) -> Tag {
        let tag = hash & ((1 << TAG_BITS) - 1);
        Tag(if tag == 0 { 1 } else { tag })
    }
}

/// Slots in a line whose states have `W` words.
pub(crate) const fn slots<const W: usize>() -> usize {
    if W == 1 { 4 } else { (WORDS - 1) / (W + 1) }
}

/// What a control word says.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Control(u64);

impl Control {
    /// How many keys of the line are elsewhere.
    #[inline]
    pub(crate) fn spilled(self) -> u64 {
        (self.0 / SPILLED_ONE) & SPILLED_MAX
    }
}

/// The control of a line that nobody is changing; waits until there is one.
#[inline]
pub(crate) fn control(line: &Line) -> Control {
    let mut backoff = Backoff::default();
    loop {
        let control = line[0].load(Ordering::Acquire);
        if control & LOCKED == 0 {
            return Control(control);
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
    let locked = control.0 | LOCKED;
    line[0].compare_exchange(control.0, locked, Ordering::Acquire, Ordering::Relaxed).ok()?;
    // No reader may see a word that is written from here on together with the control of before.
    fence(Ordering::Release);
    Some(LockedLine { line, control })
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
    let control = line[0].load(Ordering::Acquire);
    if control & LOCKED == 0 { try_lock(line, Control(control)) } else { None }
}

/// The slot of a key.
#[inline]
pub(crate) fn find<const W: usize>(line: &Line, tag: Tag) -> Option<usize> {
    (0..slots::<W>()).find(|&slot| tag_at::<W>(line, slot) == tag.0)
}

/// The tag in a slot; 0 if it is empty.
#[inline]
fn tag_at<const W: usize>(line: &Line, slot: usize) -> u64 {
    if W > 1 {
        return line[1 + slot].load(Ordering::Relaxed);
    }
    let low = line[1 + slot / 2].load(Ordering::Relaxed) >> (32 * (slot % 2)) & 0xffff_ffff;
    let high = line[3].load(Ordering::Relaxed) >> (16 * slot) & 0xffff;
    high << 32 | low
}

/// The state in a slot.
#[inline]
pub(crate) fn state<const W: usize>(line: &Line, slot: usize) -> [u64; W] {
    let first = first_word::<W>(slot);
    std::array::from_fn(|word| line[first + word].load(Ordering::Relaxed))
}

#[inline]
const fn first_word<const W: usize>(slot: usize) -> usize {
    if W == 1 { 4 + slot } else { 1 + slots::<W>() + slot * W }
}

/// A line that one thread has to itself; readers try again once it is let go.
pub(crate) struct LockedLine<'a> {
    line: &'a Line,
    control: Control,
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
    pub(crate) fn set_tag<const W: usize>(&mut self, slot: usize, tag: Option<Tag>) {
        let tag = tag.map_or(0, |tag| tag.0);
        if W > 1 {
            return self.line[1 + slot].store(tag, Ordering::Relaxed);
        }
        self.set_bits(1 + slot / 2, 32 * (slot % 2), 0xffff_ffff, tag);
        self.set_bits(3, 16 * slot, 0xffff, tag >> 32);
    }

    fn set_bits(&mut self, word: usize, shift: usize, mask: u64, value: u64) {
        let others = self.line[word].load(Ordering::Relaxed) & !(mask << shift);
        self.line[word].store(others | (value & mask) << shift, Ordering::Relaxed);
    }

    /// A slot that belongs to no key.
    pub(crate) fn empty_slot<const W: usize>(&self) -> Option<usize> {
        (0..slots::<W>()).find(|&slot| tag_at::<W>(self.line, slot) == 0)
    }

    pub(crate) fn spilled(&self) -> u64 {
        self.control.spilled()
    }

    /// Notes that one more key of the line is elsewhere, if so many can be counted.
    pub(crate) fn add_spilled(&mut self) -> bool {
        let fits = self.control.spilled() < SPILLED_MAX;
        if fits {
            self.control.0 += SPILLED_ONE;
        }
        fits
    }

    /// Notes that a key of the line is no longer elsewhere.
    pub(crate) fn remove_spilled(&mut self) {
        if self.control.spilled() > 0 {
            self.control.0 -= SPILLED_ONE;
        }
    }
}

impl Drop for LockedLine<'_> {
    #[inline]
    fn drop(&mut self) {
        self.line[0].store(self.control.0.wrapping_add(VERSION_ONE), Ordering::Release);
    }
}
