//! Commands of the Redis protocol: any bytes, in any fragmentation, give the same commands, and the parser buffers no
//! more than the documented maximum.
//!
//! A second, simple implementation parses the expected commands from all bytes together.

use ratekeeper_server::redis_api::protocol::{
    COMMAND_BYTES_MAX, COUNT_LINE_BYTES_MAX, LINE_BYTES_MAX, Parser, ProtocolError, WORD_BYTES_MAX, WORDS_MAX,
};

use super::input::Input;
use super::is_harmless;

type Command = Vec<Vec<u8>>;

/// Meaningful fragments, so that the fuzzer need not discover them.
const PIECES: [&[u8]; 16] = [
    b"\r\n",
    b"*0\r\n",
    b"*-1\r\n",
    b"*1\r\n",
    b"*2\r\n",
    b"*128\r\n",
    b"*129\r\n",
    b"$0\r\n\r\n",
    b"$1\r\na\r\n",
    b"$4\r\nPING\r\n",
    b"$8192\r\n",
    b"$8193\r\n",
    b"PING\r\n",
    b"ECHO 'a b' \"c\"\n",
    b"$-1\r\n",
    b"*9223372036854775807\r\n",
];

/// Builds a client's stream: meaningful fragments, words of any bytes, and long words.
fn stream(input: &mut Input<'_>) -> Vec<u8> {
    let mut stream = Vec::new();
    while !input.is_empty() {
        match input.below(5) {
            0 | 1 => stream.extend_from_slice(input.one_of(&PIECES)),
            2 => stream.extend_from_slice(input.bytes(32)),
            3 => {
                let word = input.bytes(64);
                stream.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
                stream.extend_from_slice(word);
                stream.extend_from_slice(b"\r\n");
            }
            // Lengths around the maxima of lines and words.
            _ => {
                let length = usize::from(input.byte()) * 33;
                stream.extend(std::iter::repeat_n(b'a', length));
            }
        }
    }
    stream
}

/// Parses a stream that arrives in pieces, as the server does: parsed commands are dropped from the buffer.
fn found(stream: &[u8], mut pieces: impl FnMut() -> usize) -> (Vec<Command>, Option<ProtocolError>) {
    let (mut parser, mut buffer, mut commands) = (Parser::default(), Vec::new(), Vec::new());
    let mut rest = stream;
    while !rest.is_empty() {
        let room = COMMAND_BYTES_MAX - buffer.len();
        assert!(room > 0, "a server that keeps the longest command can always read on");
        let (piece, behind) = rest.split_at(pieces().clamp(1, room).min(rest.len()));
        buffer.extend_from_slice(piece);
        rest = behind;
        let mut at = 0;
        loop {
            match parser.next(&buffer[at..]) {
                Ok(Some(length)) => {
                    assert!(length > 0 && length <= COMMAND_BYTES_MAX && at + length <= buffer.len());
                    let words = parser.words(&buffer[at..at + length]);
                    assert!(words.len() <= WORDS_MAX);
                    commands.push(words.iter().map(<[u8]>::to_vec).collect());
                    at += length;
                }
                Ok(None) => break,
                Err(error) => return (commands, Some(error)),
            }
        }
        buffer.drain(..at);
    }
    (commands, None)
}

/// Returns the first line without its line feed, and the rest; `None` if the line is incomplete.
fn line(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    Some((&bytes[..end], &bytes[end + 1..]))
}

/// A command and the rest; `None` if it is incomplete, an error if it is invalid.
type Plain<'a> = Result<Option<(Command, &'a [u8])>, ()>;

/// Parses a line with a number after a type byte.
fn count(bytes: &[u8]) -> Result<Option<(i64, &[u8])>, ()> {
    let Some((line, rest)) = line(bytes) else {
        return if bytes.len() > COUNT_LINE_BYTES_MAX { Err(()) } else { Ok(None) };
    };
    let digits = line.get(1..).and_then(|line| line.strip_suffix(b"\r")).ok_or(())?;
    let text = std::str::from_utf8(digits).map_err(|_| ())?;
    let number: i64 = text.parse().map_err(|_| ())?;
    // Accept only the canonical form of the number.
    if line.len() > COUNT_LINE_BYTES_MAX || number.to_string() != text {
        Err(())
    } else {
        Ok(Some((number, rest)))
    }
}

fn plain(bytes: &[u8]) -> Plain<'_> {
    match bytes.first() {
        None => Ok(None),
        Some(b'*') => plain_array(bytes),
        Some(_) => plain_line(bytes),
    }
}

fn plain_array(bytes: &[u8]) -> Plain<'_> {
    let Some((words, mut rest)) = count(bytes)? else { return Ok(None) };
    if words > WORDS_MAX as i64 {
        return Err(());
    }
    let mut command = Command::new();
    while (command.len() as i64) < words {
        match rest.first() {
            None => return Ok(None),
            Some(b'$') => {}
            Some(_) => return Err(()),
        }
        let Some((length, behind)) = count(rest)? else { return Ok(None) };
        let length = usize::try_from(length).ok().filter(|length| *length <= WORD_BYTES_MAX).ok_or(())?;
        if bytes.len() - behind.len() + length + 2 > COMMAND_BYTES_MAX {
            return Err(());
        }
        let Some((word, end)) = behind.get(..length + 2).map(|word| word.split_at(length)) else {
            return Ok(None);
        };
        if end != b"\r\n" {
            return Err(());
        }
        command.push(word.to_vec());
        rest = &behind[length + 2..];
    }
    Ok(Some((command, rest)))
}

fn plain_line(bytes: &[u8]) -> Plain<'_> {
    let Some((line, rest)) = line(bytes) else {
        return if bytes.len() > LINE_BYTES_MAX { Err(()) } else { Ok(None) };
    };
    if line.len() > LINE_BYTES_MAX {
        return Err(());
    }
    let is_space = |byte: u8| b" \t\r\0\x0b\x0c".contains(&byte);
    let mut command = Command::new();
    let mut left = line.iter().copied().peekable();
    while let Some(first) = left.by_ref().find(|byte| !is_space(*byte)) {
        let mut word = Vec::new();
        if first == b'"' || first == b'\'' {
            loop {
                match left.next().ok_or(())? {
                    byte if byte == first => break,
                    b'\\' => return Err(()),
                    byte => word.push(byte),
                }
            }
            if left.next().is_some_and(|byte| !is_space(byte)) {
                return Err(());
            }
        } else {
            word.push(first);
            while let Some(byte) = left.next_if(|byte| !is_space(*byte)) {
                word.push(byte);
            }
            if word.iter().any(|byte| b"'\"".contains(byte)) {
                return Err(());
            }
        }
        command.push(word);
    }
    if command.len() > WORDS_MAX { Err(()) } else { Ok(Some((command, rest))) }
}

/// Checks a client's stream: whole, in pieces, and byte by byte.
pub(crate) fn check(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let steps = [input.byte(), input.byte(), input.byte()].map(|step| usize::from(step) + 1);
    let stream = stream(&mut input);

    let (commands, wrong) = found(&stream, || usize::MAX);
    let mut turn = 0;
    let in_steps = found(&stream, || {
        turn += 1;
        steps[turn % steps.len()]
    });
    assert_eq!((&commands, &wrong), (&in_steps.0, &in_steps.1), "in steps of {steps:?}");
    let by_bytes = found(&stream, || 1);
    assert_eq!((&commands, &wrong), (&by_bytes.0, &by_bytes.1), "byte by byte");

    let (mut rest, mut expected) = (stream.as_slice(), Vec::new());
    let is_wrong = loop {
        match plain(rest) {
            Ok(Some((command, behind))) => {
                expected.push(command);
                rest = behind;
            }
            Ok(None) => break rest.len() >= COMMAND_BYTES_MAX,
            Err(()) => break true,
        }
    };
    assert_eq!(commands, expected, "{}", stream.escape_ascii());
    assert_eq!(wrong.is_some(), is_wrong, "{wrong:?} for {}", stream.escape_ascii());
    if let Some(wrong) = wrong {
        assert!(is_harmless(&wrong.to_string()), "{wrong}");
    }
}
