//! Replies into bytes, in the version of the protocol that a client has asked for.

/// The most bytes of a client's text in an error.
const QUOTED_BYTES_MAX: usize = 128;

/// Which types of replies a client knows.
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

/// Replies that have not been sent, one behind the other.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    pub(crate) bytes: Vec<u8>,
    pub(crate) protocol: Protocol,
}

impl Replies {
    /// A word that is one of ours, without line ends.
    pub(crate) fn simple(&mut self, text: &'static str) {
        self.line(b'+', text.as_bytes());
    }

    /// An error, whose first word is its kind. What would end the line does not get into it.
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

    /// An array: so many replies follow.
    pub(crate) fn array(&mut self, replies: usize) {
        self.count(b'*', length(replies));
    }

    /// A map: so many pairs of replies follow.
    pub(crate) fn map(&mut self, pairs: usize) {
        match self.protocol {
            Protocol::Two => self.array(2 * pairs),
            Protocol::Three => self.count(b'%', length(pairs)),
        }
    }

    /// Numbers: what all commands that ask a limit are told.
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
        // From behind, in as many places as the longest number has.
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

/// A client's own text, as much of it as an error may have.
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
    fn numbers_of_any_length_are_written() {
        for number in [0, 7, 10, -1, 1_234_567_890, i64::MAX, i64::MIN] {
            assert_eq!(
                written(Protocol::Two, |replies| replies.integer(number)),
                format!(":{number}\r\n"),
                "{number}"
            );
        }
    }

    #[test]
    fn what_only_the_third_version_knows_is_told_in_the_second_too() {
        let write = |replies: &mut Replies| {
            replies.map(2);
            replies.null();
        };
        assert_eq!(written(Protocol::Two, write), "*4\r\n$-1\r\n");
        assert_eq!(written(Protocol::Three, write), "%2\r\n_\r\n");
    }

    /// Whoever gets to write a line end into a reply writes the next reply, too.
    #[test]
    fn errors_are_one_line_whatever_a_client_writes() {
        let text = format!("ERR '{}'", quoted(b"a\r\n+OK\r\n\xff"));
        let written = written(Protocol::Two, |replies| replies.error(&text));
        assert_eq!(written, "-ERR 'a  +OK  \u{fffd}'\r\n");
        assert_eq!(quoted(&[b'a'; 1000]).len(), QUOTED_BYTES_MAX);
    }
}
