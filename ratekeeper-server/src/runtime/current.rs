//! A value that a reload replaces.

use std::sync::Arc;

use arc_swap::ArcSwap;

/// The current settings and limits of a service. Each request reads them once, so that a reload takes effect from the
/// next request on.
#[derive(Debug)]
pub struct Current<T>(ArcSwap<T>);

impl<T> Current<T> {
    /// Starts with a value.
    pub fn new(value: T) -> Current<T> {
        Current(ArcSwap::from_pointee(value))
    }

    /// The value now.
    pub fn load(&self) -> Arc<T> {
        self.0.load_full()
    }

    /// Replaces the value.
    pub fn replace(&self, value: T) {
        self.0.store(Arc::new(value));
    }
}
