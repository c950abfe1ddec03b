//! The key of a list of entries, as bytes.

use super::{Descriptor, Value};

/// Marks a value, or a pattern whose values share one budget.
const OWN: u8 = 0;
const SHARED: u8 = 1;

/// Encodes the domain and all entries. Each text is prefixed with its length, so different lists never have the same
/// encoding. `path` yields the descriptor of each entry.
pub(super) fn of<'d>(
    domain: &str,
    entries: &[(&str, &str)],
    path: impl Iterator<Item = &'d Descriptor>,
) -> Vec<u8> {
    /// Bytes for lengths and the kind of value of most entries.
    const AROUND: usize = 3;
    let room = entries.iter().map(|(key, value)| key.len() + value.len() + AROUND).sum::<usize>();
    let mut written = Vec::with_capacity(domain.len() + AROUND + room);
    push(&mut written, domain);
    for ((key, value), descriptor) in entries.iter().zip(path) {
        push(&mut written, key);
        match &descriptor.value {
            Value::Pattern(pattern) if descriptor.shares => {
                written.push(SHARED);
                push(&mut written, pattern.as_str());
            }
            _ => {
                written.push(OWN);
                push(&mut written, value);
            }
        }
    }
    written
}

/// Writes the length as a LEB128 varint, then the text.
fn push(written: &mut Vec<u8>, text: &str) {
    const MORE: u8 = 0x80;
    let mut length = text.len();
    while length >= usize::from(MORE) {
        written.push(length.to_le_bytes()[0] | MORE);
        length >>= 7;
    }
    written.push(length.to_le_bytes()[0]);
    written.extend_from_slice(text.as_bytes());
}
