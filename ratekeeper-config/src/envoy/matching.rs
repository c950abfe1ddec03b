//! Descriptors of one level, and the lookup of an entry among them.

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;

use super::{Descriptor, Value};

/// Descriptors of one level, in file order.
#[derive(Clone, Default)]
pub struct Descriptors {
    all: Vec<Descriptor>,
    /// Indices by key: there may be thousands of descriptors, and every request looks one up.
    by_key: HashMap<String, KeyDescriptors>,
}

impl fmt::Debug for Descriptors {
    /// Prints the descriptors without the index.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.all).finish()
    }
}

/// The indices of the descriptors of one key.
#[derive(Clone, Default)]
struct KeyDescriptors {
    exact: HashMap<String, usize>,
    /// In file order.
    patterns: Vec<usize>,
    any: Option<usize>,
}

impl Descriptors {
    /// Builds the index. Of two descriptors with the same key and value, the first is found.
    pub fn new(all: Vec<Descriptor>) -> Descriptors {
        let mut by_key: HashMap<String, KeyDescriptors> = HashMap::new();
        for (number, descriptor) in all.iter().enumerate() {
            let of_key = by_key.entry(descriptor.key.clone()).or_default();
            match &descriptor.value {
                Value::Any => of_key.any = of_key.any.or(Some(number)),
                Value::Exact(value) => {
                    of_key.exact.entry(value.clone()).or_insert(number);
                }
                Value::Pattern(_) => of_key.patterns.push(number),
            }
        }
        Descriptors { all, by_key }
    }

    pub(super) fn find(&self, key: &str, value: &str) -> Option<&Descriptor> {
        let of_key = self.by_key.get(key)?;
        let fits = |number: &usize| match &self.all[*number].value {
            Value::Pattern(pattern) => pattern.fits(value),
            Value::Any | Value::Exact(_) => false,
        };
        let number = of_key.exact.get(value).copied();
        let number = number.or_else(|| of_key.patterns.iter().copied().find(fits)).or(of_key.any)?;
        self.all.get(number)
    }
}

impl Deref for Descriptors {
    type Target = [Descriptor];

    fn deref(&self) -> &[Descriptor] {
        &self.all
    }
}
