//! Text primitives of a response, appended to an existing buffer.

/// The largest Integer of a structured field: fifteen digits (RFC 9651, section 3.3.1).
pub const INTEGER_MAX: u64 = 999_999_999_999_999;

/// Appends an integer, at most [`INTEGER_MAX`]. Called several times for every allowed request.
pub(super) fn push_integer(text: &mut String, number: u64) {
    text.push_str(itoa::Buffer::new().format(number.min(INTEGER_MAX)));
}

/// Appends bytes as a Byte Sequence: base64 between colons.
pub(super) fn push_bytes(text: &mut String, bytes: &[u8]) {
    let bytes = sfv::RefBareItem::ByteSequence(bytes);
    let _ = sfv::ItemSerializer::with_buffer(text).bare_item(bytes).finish();
}

/// Appends printable ASCII with quotes and backslashes escaped, as both a structured field String and a JSON string
/// require.
pub(super) fn push_escaped(text: &mut String, printable: &str) {
    for character in printable.chars() {
        if matches!(character, '"' | '\\') {
            text.push('\\');
        }
        text.push(character);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(push: impl FnOnce(&mut String)) -> String {
        let mut text = String::new();
        push(&mut text);
        text
    }

    #[test]
    fn numbers_are_written_up_to_fifteen_digits() {
        for (number, expected) in [
            (0, "0"),
            (9, "9"),
            (10, "10"),
            (4_294_967_295, "4294967295"),
            (INTEGER_MAX, "999999999999999"),
            (INTEGER_MAX + 1, "999999999999999"),
            (u64::MAX, "999999999999999"),
        ] {
            assert_eq!(written(|text| push_integer(text, number)), expected);
        }
    }

    #[test]
    fn bytes_are_canonical_base64() {
        for (bytes, expected) in [
            (b"".as_slice(), "::"),
            (b"trial121323", ":dHJpYWwxMjEzMjM=:"),
            // An example of the draft, whose last base64 digit there has unused bits set.
            (&[0xb1, 0xd7, 0xe3, 0x2c, 0x95, 0x0e, 0x50], ":sdfjLJUOUA==:"),
        ] {
            assert_eq!(written(|text| push_bytes(text, bytes)), expected);
        }
    }
}
