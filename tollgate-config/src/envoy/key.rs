//! Whose budget a list of entries uses, as bytes.

use super::{Descriptor, Value};

/// A value as it came, or a pattern that stands for all that fit it.
const OWN: u8 = 0;
const SHARED: u8 = 1;

/// The domain and each entry, each text behind its length, so that no text can look like the end of another. `path` has
/// the descriptor of each entry.
pub(super) fn of<'d>(
    domain: &str,
    entries: &[(&str, &str)],
    path: impl Iterator<Item = &'d Descriptor>,
) -> Vec<u8> {
    /// For most texts, the length and what kind of value it is take so much.
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

/// A length in groups of seven bits, the lowest first, of which all but the last are marked; then the text.
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
