//! The parser of commands: arrays of bulk strings, and inline commands.
//!
//! Nothing is copied: words are ranges of the buffer that the command was read into. The parser keeps its state
//! across incomplete commands, so that no byte is scanned twice, however slowly bytes arrive.

/// Most bytes of one command, and so of the buffer for an incomplete one.
pub const COMMAND_BYTES_MAX: usize = 64 << 10;
/// Most bytes of one word. Keys are only hashed and not stored, but hashing takes time as well.
pub const WORD_BYTES_MAX: usize = 8 << 10;
/// Most words of one command.
pub const WORDS_MAX: usize = 128;
/// Longest inline command, in bytes.
pub const LINE_BYTES_MAX: usize = 4 << 10;
/// Longest line with a count or a length, in bytes.
pub const COUNT_LINE_BYTES_MAX: usize = 32;

/// Finds the commands in a client's input.
///
/// ```
/// use ratekeeper_server::redis_api::protocol::Parser;
///
/// let mut parser = Parser::default();
/// let bytes = b"*2\r\n$4\r\nECHO\r\n$2\r\nhi\r\nPING\r\n";
/// let length = parser.next(bytes)?.expect("a complete command");
/// assert_eq!(parser.words(bytes).iter().collect::<Vec<_>>(), [&b"ECHO"[..], b"hi"]);
/// // The next one begins where this one ends.
/// assert_eq!(parser.next(&bytes[length..])?, Some(b"PING\r\n".len()));
/// // This one is incomplete.
/// assert_eq!(parser.next(b"PI")?, None);
/// # Ok::<(), ratekeeper_server::redis_api::protocol::ProtocolError>(())
/// ```
#[derive(Debug, Default)]
pub struct Parser {
    /// The words of the command so far.
    words: Vec<WordRange>,
    /// Bytes of it that were parsed.
    at: usize,
    /// Up to where the end of the line was searched.
    scanned: usize,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, Default)]
enum Stage {
    /// Before the first byte, or in the first line.
    #[default]
    Start,
    /// `left` words follow; the length of one comes next.
    Length { left: usize },
    /// `left` words follow; a word of this length comes next.
    Word { left: usize, length: usize },
}

/// A word's range in a command of at most [`COMMAND_BYTES_MAX`] bytes.
#[derive(Clone, Copy, Debug)]
struct WordRange {
    begin: u32,
    end: u32,
}

impl WordRange {
    fn new(begin: usize, end: usize) -> WordRange {
        // Larger commands were rejected before.
        let short = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        WordRange { begin: short(begin), end: short(end) }
    }
}

/// The words of a command. The first one is its name.
#[derive(Clone, Copy, Debug)]
pub struct Words<'a> {
    bytes: &'a [u8],
    ranges: &'a [WordRange],
}

impl<'a> Words<'a> {
    /// The number of words. Empty lines and empty arrays have none, and are not answered.
    pub fn len(self) -> usize {
        self.ranges.len()
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.ranges.is_empty()
    }

    /// The word with this index, from 0.
    pub fn get(self, number: usize) -> Option<&'a [u8]> {
        let range = self.ranges.get(number)?;
        self.bytes.get(range.begin as usize..range.end as usize)
    }

    /// All words.
    pub fn iter(self) -> impl Iterator<Item = &'a [u8]> {
        (0..self.len()).filter_map(move |number| self.get(number))
    }
}

impl Parser {
    /// Returns the length of the next command if it is complete. Until then, the caller passes the same bytes again
    /// with those that followed.
    ///
    /// # Errors
    /// Returns an error if the input is not a command. Nothing after it can be parsed either.
    pub fn next(&mut self, bytes: &[u8]) -> Result<Option<usize>, ProtocolError> {
        match self.find(bytes)? {
            // A caller that buffers at most one longest command has no capacity for its end.
            None if bytes.len() >= COMMAND_BYTES_MAX => Err(ProtocolError::CommandLength),
            found => Ok(found),
        }
    }

    /// The words of the last command found, in the same bytes.
    pub fn words<'a>(&'a self, bytes: &'a [u8]) -> Words<'a> {
        Words { bytes, ranges: &self.words }
    }

    fn find(&mut self, bytes: &[u8]) -> Result<Option<usize>, ProtocolError> {
        loop {
            match self.stage {
                Stage::Start => {
                    self.words.clear();
                    match bytes.first() {
                        None => return Ok(None),
                        Some(b'*') => {}
                        Some(_) => return self.inline_command(bytes),
                    }
                    let Some(count) = self.count(bytes, ProtocolError::WordCount)? else { return Ok(None) };
                    match usize::try_from(count) {
                        Ok(left @ 1..=WORDS_MAX) => self.stage = Stage::Length { left },
                        Ok(1..) => return Err(ProtocolError::WordCount),
                        // An empty array, or a null array.
                        _ => return Ok(Some(self.end())),
                    }
                }
                Stage::Length { left } => {
                    match bytes.get(self.at) {
                        None => return Ok(None),
                        Some(b'$') => {}
                        Some(other) => return Err(ProtocolError::ExpectedWord(*other)),
                    }
                    let Some(length) = self.count(bytes, ProtocolError::WordLength)? else { return Ok(None) };
                    let length = usize::try_from(length).map_err(|_| ProtocolError::WordLength)?;
                    if length > WORD_BYTES_MAX {
                        return Err(ProtocolError::WordLength);
                    }
                    if self.at + length + 2 > COMMAND_BYTES_MAX {
                        return Err(ProtocolError::CommandLength);
                    }
                    self.stage = Stage::Word { left, length };
                }
                Stage::Word { left, length } => {
                    let end = self.at + length;
                    match bytes.get(end..end + 2) {
                        None => return Ok(None),
                        Some(b"\r\n") => {}
                        // A wrong length could make the rest of a word pass for a command.
                        Some(_) => return Err(ProtocolError::WordEnd),
                    }
                    self.words.push(WordRange::new(self.at, end));
                    self.at = end + 2;
                    match left {
                        0 | 1 => return Ok(Some(self.end())),
                        _ => self.stage = Stage::Length { left: left - 1 },
                    }
                }
            }
        }
    }

    /// Prepares for the next command, and returns the length of this one.
    fn end(&mut self) -> usize {
        (self.stage, self.scanned) = (Stage::Start, 0);
        std::mem::take(&mut self.at)
    }

    /// The end of the next line, before its `\n`, if it has arrived.
    fn line(
        &mut self,
        bytes: &[u8],
        max: usize,
        error: ProtocolError,
    ) -> Result<Option<usize>, ProtocolError> {
        let from = self.scanned.max(self.at);
        let there = bytes.get(from..).unwrap_or_default();
        let end = there.iter().position(|byte| *byte == b'\n').map(|length| from + length);
        self.scanned = end.map_or(bytes.len(), |end| end + 1);
        if end.unwrap_or(bytes.len()).saturating_sub(self.at) > max {
            return Err(error);
        }
        Ok(end)
    }

    /// The number after the first byte of a line.
    fn count(&mut self, bytes: &[u8], error: ProtocolError) -> Result<Option<i64>, ProtocolError> {
        let Some(end) = self.line(bytes, COUNT_LINE_BYTES_MAX, error)? else { return Ok(None) };
        let line = bytes.get(self.at + 1..end).and_then(|line| line.strip_suffix(b"\r"));
        let number = line.and_then(number).ok_or(error)?;
        self.at = end + 1;
        Ok(Some(number))
    }

    /// Parses an inline command.
    fn inline_command(&mut self, bytes: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let Some(end) = self.line(bytes, LINE_BYTES_MAX, ProtocolError::LineLength)? else { return Ok(None) };
        self.at = end + 1;
        let line = bytes.get(..end).unwrap_or_default();
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let mut at = 0;
        while let Some(space) = line.get(at..).and_then(|rest| rest.iter().position(|byte| !is_space(*byte)))
        {
            at += space;
            if self.words.len() == WORDS_MAX {
                return Err(ProtocolError::WordCount);
            }
            let range = word(line, at)?;
            self.words.push(range);
            // Skips the closing quote, if there is one.
            at = range.end as usize + usize::from(matches!(line.get(at), Some(b'"' | b'\'')));
        }
        Ok(Some(self.end()))
    }
}

/// The word that begins at `begin`. A quoted word may contain spaces.
fn word(line: &[u8], begin: usize) -> Result<WordRange, ProtocolError> {
    let rest = line.get(begin..).unwrap_or_default();
    let quote = rest.first().copied().filter(|byte| matches!(byte, b'"' | b'\''));
    let Some(quote) = quote else {
        let length = rest.iter().position(|byte| is_space(*byte)).unwrap_or(rest.len());
        // Parsers disagree about quotes inside a word, so they are rejected.
        if rest.iter().take(length).any(|byte| matches!(byte, b'"' | b'\'')) {
            return Err(ProtocolError::Quotes);
        }
        return Ok(WordRange::new(begin, begin + length));
    };
    let inner = rest.get(1..).unwrap_or_default();
    let length = inner.iter().position(|byte| *byte == quote).ok_or(ProtocolError::Quotes)?;
    if inner.iter().take(length).any(|byte| *byte == b'\\') {
        return Err(ProtocolError::Escape);
    }
    match inner.get(length + 1) {
        Some(next) if !is_space(*next) => Err(ProtocolError::Quotes),
        _ => Ok(WordRange::new(begin + 1, begin + 1 + length)),
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | 0x0b | 0x0c | 0)
}

/// A whole number in its only valid form: no leading zeros, no `+`, no `-0`.
fn number(digits: &[u8]) -> Option<i64> {
    let (digits, is_negative) = match digits.strip_prefix(b"-") {
        Some(digits) => (digits, true),
        None => (digits, false),
    };
    if digits.is_empty() || (digits.starts_with(b"0") && (digits.len() > 1 || is_negative)) {
        return None;
    }
    digits.iter().try_fold(0_i64, |number, digit| {
        let digit = i64::from(digit.wrapping_sub(b'0'));
        let digit = if digit > 9 { return None } else { digit };
        let number = number.checked_mul(10)?;
        if is_negative { number.checked_sub(digit) } else { number.checked_add(digit) }
    })
}

/// Why the input is not a command. Nothing after it can be parsed.
///
/// The messages are those of Redis where it has the same errors, with the bounds of this parser.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The number of words is not a number, or too large.
    #[error("invalid multibulk length; a command has at most {WORDS_MAX} words")]
    WordCount,
    /// Something other than a word begins: commands contain no nested arrays.
    #[error("expected '$', got '{}'", if .0.is_ascii_graphic() { char::from(*.0) } else { '?' })]
    ExpectedWord(u8),
    /// A word's length is not a number, or too large.
    #[error("invalid bulk length; a word has at most {WORD_BYTES_MAX} bytes")]
    WordLength,
    /// A word does not end where its length states.
    #[error("a word does not end at its stated length")]
    WordEnd,
    /// The words together are too long.
    #[error("too big command; it has at most {COMMAND_BYTES_MAX} bytes")]
    CommandLength,
    /// A line is too long.
    #[error("too big inline request; a line has at most {LINE_BYTES_MAX} bytes")]
    LineLength,
    /// Quotes are not closed, or do not close at the end of a word.
    #[error("unbalanced quotes in request")]
    Quotes,
    /// An inline command contains a backslash.
    #[error("escapes are not supported in inline commands; send an array of bulk strings")]
    Escape,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All commands in the bytes, and the error after them.
    fn commands(bytes: &[u8]) -> (Vec<Vec<String>>, Option<ProtocolError>) {
        let (mut parser, mut at, mut found) = (Parser::default(), 0, Vec::new());
        loop {
            match parser.next(&bytes[at..]) {
                Ok(Some(length)) => {
                    let words = parser.words(&bytes[at..]);
                    found.push(words.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect());
                    at += length;
                }
                Ok(None) => return (found, None),
                Err(error) => return (found, Some(error)),
            }
        }
    }

    #[track_caller]
    fn check(bytes: &[u8], expected: &[&[&str]], error: Option<ProtocolError>) {
        let (found, actual) = commands(bytes);
        let begin = bytes[..bytes.len().min(200)].escape_ascii();
        assert_eq!(found, expected, "{begin}");
        assert_eq!(actual, error, "{begin}");
    }

    #[test]
    fn arrays_and_lines_are_commands() {
        check(b"*1\r\n$4\r\nPING\r\n*2\r\n$1\r\na\r\n$0\r\n\r\n", &[&["PING"], &["a", ""]], None);
        check(b"PING\r\n  echo\t hi  \nx", &[&["PING"], &["echo", "hi"]], None);
        check(b"echo \"a b\" 'c \" d' ''\r\n", &[&["echo", "a b", "c \" d", ""]], None);
        check(b"*0\r\n\r\n*-1\r\n \n*1\r\n$1\r\n\n\r\n", &[&[], &[], &[], &[], &["\n"]], None);
    }

    #[test]
    fn malformed_input_is_rejected_as_early_as_possible() {
        use ProtocolError::*;
        for bytes in [&b"*x\r\n"[..], b"*129\r\n", b"*1\n", b"*+1\r\n", b"*01\r\n", b"*-0\r\n", b"*\r\n"] {
            check(bytes, &[], Some(WordCount));
        }
        check(b"*99999999999999999999\r\n", &[], Some(WordCount));
        check(format!("*{}", "1".repeat(COUNT_LINE_BYTES_MAX)).as_bytes(), &[], Some(WordCount));
        for bytes in [&b"*1\r\n$-1\r\n"[..], b"*1\r\n$8193\r\n", b"*1\r\n$\r\n", b"*1\r\n$1 \r\n"] {
            check(bytes, &[], Some(WordLength));
        }
        check(b"*1\r\n$9223372036854775808\r\n", &[], Some(WordLength));
        check(b"*1\r\n*1\r\n$4\r\nPING\r\n", &[], Some(ExpectedWord(b'*')));
        check(b"*1\r\n$4\r\nPINGxx", &[], Some(WordEnd));
        check(b"*1\r\n$4\r\nPIN\r\n", &[], None);
        check(&[b'a'; LINE_BYTES_MAX], &[], None);
        check(&[b'a'; LINE_BYTES_MAX + 1], &[], Some(LineLength));
        check(b"a\r\nb \"c\r\n", &[&["a"]], Some(Quotes));
        for bytes in [&b"a \"b\"c\r\n"[..], b"a b\"c\"\r\n", b"a 'b\r\n"] {
            check(bytes, &[], Some(Quotes));
        }
        check(b"a \"\\n\"\r\n", &[], Some(Escape));
    }

    #[test]
    fn total_length_of_a_command_is_bounded() {
        let word = [&b"$8192\r\n"[..], &[b'a'; WORD_BYTES_MAX], b"\r\n"].concat();
        let bytes = [&b"*8\r\n"[..], &word.repeat(8)].concat();
        check(&bytes, &[], Some(ProtocolError::CommandLength));
        let bytes = [&b"*7\r\n"[..], &word.repeat(7)].concat();
        assert_eq!(Parser::default().next(&bytes), Ok(Some(bytes.len())));
        // The buffer is full, and more words follow.
        let short = COMMAND_BYTES_MAX - 7 * word.len() - b"*9\r\n$8000\r\n\r\n".len();
        let short = format!("${short}\r\n{}\r\n", "a".repeat(short));
        let bytes = [&b"*9\r\n"[..], &word.repeat(7), short.as_bytes()].concat();
        assert_eq!(bytes.len(), COMMAND_BYTES_MAX);
        check(&bytes, &[], Some(ProtocolError::CommandLength));
        let words = "a ".repeat(WORDS_MAX) + "b\r\n";
        check(words.as_bytes(), &[], Some(ProtocolError::WordCount));
    }

    /// The result does not depend on how the input is split.
    #[test]
    fn split_commands_are_parsed_alike() {
        let bytes =
            b"*3\r\n$1\r\na\r\n$10\r\n0123456789\r\n$0\r\n\r\nPING 'x y'\r\n*0\r\n*1\r\n$1\r\nb\r\n*1\r\n#";
        let unsplit = commands(bytes);
        assert_eq!(unsplit.1, Some(ProtocolError::ExpectedWord(b'#')));
        for step in 1..bytes.len() {
            let (mut parser, mut at, mut found, mut error) = (Parser::default(), 0, Vec::new(), None);
            for end in (1..=bytes.len()).filter(|end| end % step == 0 || *end == bytes.len()) {
                while error.is_none() {
                    match parser.next(&bytes[at..end]) {
                        Ok(Some(length)) => {
                            let words = parser.words(&bytes[at..end]).iter();
                            found.push(
                                words
                                    .map(|word| String::from_utf8_lossy(word).into_owned())
                                    .collect::<Vec<_>>(),
                            );
                            at += length;
                        }
                        Ok(None) => break,
                        Err(found) => error = Some(found),
                    }
                }
            }
            assert_eq!((found, error), unsplit, "in steps of {step}");
        }
    }

    #[test]
    fn only_canonical_numbers_are_accepted() {
        for (text, expected) in [
            ("0", Some(0)),
            ("-1", Some(-1)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("-9223372036854775809", None),
            ("", None),
            ("-", None),
            ("00", None),
            ("-0", None),
            ("1a", None),
        ] {
            assert_eq!(number(text.as_bytes()), expected, "{text}");
        }
    }
}
