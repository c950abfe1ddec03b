//! Encodes replies, in the protocol version that the client has chosen.

/// Most bytes of client input quoted in an error.
const QUOTED_BYTES_MAX: usize = 128;

/// The protocol version: it decides which reply types the client understands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Protocol {
    #[default]
    Two,
    Three,
}

impl Protocol {
    pub(crate) fn number(self) -> i64 {
        match self {
            Protocol::Two => 2,
            Protocol::Three => 3,
        }
    }
}

/// Encoded replies that are not yet sent.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    pub(crate) bytes: Vec<u8>,
    pub(crate) protocol: Protocol,
}

impl Replies {
    /// A simple string: a fixed text without line ends.
    pub(crate) fn simple(&mut self, text: &'static str) {
        self.line(b'+', text.as_bytes());
    }

    /// An error, whose first word is its kind. Control characters become spaces, so that the text cannot end the
    /// line.
    pub(crate) fn error(&mut self, text: &str) {
        self.bytes.push(b'-');
        self.bytes.extend(text.bytes().map(|byte| if byte.is_ascii_control() { b' ' } else { byte }));
        self.bytes.extend_from_slice(b"\r\n");
    }

    pub(crate) fn integer(&mut self, number: i64) {
        self.count(b':', number);
    }

    pub(crate) fn bulk(&mut self, bytes: &[u8]) {
        self.count(b'$', length(bytes.len()));
        self.bytes.extend_from_slice(bytes);
        self.bytes.extend_from_slice(b"\r\n");
    }

    pub(crate) fn null(&mut self) {
        self.bytes.extend_from_slice(match self.protocol {
            Protocol::Two => b"$-1\r\n",
            Protocol::Three => b"_\r\n",
        });
    }

    /// The header of an array; `replies` replies follow.
    pub(crate) fn array(&mut self, replies: usize) {
        self.count(b'*', length(replies));
    }

    /// The header of a map; `pairs` pairs of replies follow.
    pub(crate) fn map(&mut self, pairs: usize) {
        match self.protocol {
            Protocol::Two => self.array(2 * pairs),
            Protocol::Three => self.count(b'%', length(pairs)),
        }
    }

    /// An array of integers: the reply of every command that checks a limit.
    pub(crate) fn numbers(&mut self, numbers: &[i64]) {
        self.array(numbers.len());
        for number in numbers {
            self.integer(*number);
        }
    }

    fn line(&mut self, kind: u8, text: &[u8]) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(text);
        self.bytes.extend_from_slice(b"\r\n");
    }

    fn count(&mut self, kind: u8, number: i64) {
        // Written from the end; 20 bytes hold the longest number.
        let (mut digits, mut begin, mut rest) = ([0; 20], 20, number.unsigned_abs());
        loop {
            begin -= 1;
            digits[begin] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        if number < 0 {
            begin -= 1;
            digits[begin] = b'-';
        }
        self.line(kind, &digits[begin..]);
    }
}

fn length(length: usize) -> i64 {
    i64::try_from(length).unwrap_or(i64::MAX)
}

/// Client input, shortened for an error.
pub(crate) fn quoted(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(QUOTED_BYTES_MAX)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(protocol: Protocol, write: impl Fn(&mut Replies)) -> String {
        let mut replies = Replies { protocol, ..Replies::default() };
        write(&mut replies);
        String::from_utf8(replies.bytes).unwrap()
    }

    #[test]
    fn integers_of_any_length_are_encoded() {
        for number in [0, 7, 10, -1, 1_234_567_890, i64::MAX, i64::MIN] {
            assert_eq!(
                written(Protocol::Two, |replies| replies.integer(number)),
                format!(":{number}\r\n"),
                "{number}"
            );
        }
    }

    #[test]
    fn resp3_types_fall_back_in_resp2() {
        let write = |replies: &mut Replies| {
            replies.map(2);
            replies.null();
        };
        assert_eq!(written(Protocol::Two, write), "*4\r\n$-1\r\n");
        assert_eq!(written(Protocol::Three, write), "%2\r\n_\r\n");
    }

    /// Client input that could end a line could forge the next reply.
    #[test]
    fn client_input_cannot_end_an_error_line() {
        let text = format!("ERR '{}'", quoted(b"a\r\n+OK\r\n\xff"));
        let written = written(Protocol::Two, |replies| replies.error(&text));
        assert_eq!(written, "-ERR 'a  +OK  \u{fffd}'\r\n");
        assert_eq!(quoted(&[b'a'; 1000]).len(), QUOTED_BYTES_MAX);
    }
}
