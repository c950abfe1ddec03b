//! The atomics and locks of the store. With `--cfg loom` they are loom's, which explores every interleaving.

#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, AtomicUsize, Ordering, fence},
};

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, AtomicUsize, Ordering, fence},
};

/// Locks, also if the mutex is poisoned: the data that the store's locks guard is consistent at every step, even if a
/// thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Locks if the lock is free, without waiting.
pub(crate) fn lock_if_free<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(std::sync::TryLockError::WouldBlock) => None,
    }
}

/// Exponential backoff while another thread holds a lock: each wait is longer than the previous one.
#[derive(Default)]
pub(crate) struct Backoff {
    #[cfg(not(loom))]
    turns: u32,
}

impl Backoff {
    /// Beyond 2^6 spins the other thread is probably not running, so this one yields the core.
    #[cfg(not(loom))]
    const SPINS_LOG2_MAX: u32 = 6;

    #[cfg(not(loom))]
    #[cold]
    pub(crate) fn wait(&mut self) {
        if self.turns < Self::SPINS_LOG2_MAX {
            for _ in 0..1 << self.turns {
                std::hint::spin_loop();
            }
            self.turns += 1;
        } else {
            std::thread::yield_now();
        }
    }

    #[cfg(loom)]
    pub(crate) fn wait(&mut self) {
        loom::thread::yield_now();
    }
}
