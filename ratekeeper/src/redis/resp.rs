//! The protocol of Redis (RESP2): commands are appended to a buffer, replies are parsed without copies.

/// Longest reply that is accepted.
pub(crate) const REPLY_BYTES_MAX: usize = 64 << 20;
/// Longest line that is accepted: a status, an error or a number.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Arrays in arrays that are accepted.
const DEPTH_MAX: usize = 8;
/// Elements of an array for which memory is reserved before they have arrived.
const RESERVED_MAX: usize = 1_024;

/// Appends the head of a command; as many [arguments](push_argument) must follow.
pub(crate) fn push_command(out: &mut Vec<u8>, arguments: usize) {
    push_head(out, b'*', arguments);
}

/// Appends an argument of a command; its name is the first.
pub(crate) fn push_argument(out: &mut Vec<u8>, argument: &[u8]) {
    push_head(out, b'$', argument.len());
    out.extend_from_slice(argument);
    out.extend_from_slice(b"\r\n");
}

/// Appends a number as an argument.
pub(crate) fn push_number(out: &mut Vec<u8>, number: usize) {
    let mut digits = [0; 20];
    push_argument(out, decimal(&mut digits, number));
}

/// Appends a whole command.
pub(crate) fn push_all(out: &mut Vec<u8>, arguments: &[&[u8]]) {
    push_command(out, arguments.len());
    arguments.iter().for_each(|argument| push_argument(out, argument));
}

fn push_head(out: &mut Vec<u8>, kind: u8, number: usize) {
    let mut digits = [0; 20];
    out.push(kind);
    out.extend_from_slice(decimal(&mut digits, number));
    out.extend_from_slice(b"\r\n");
}

/// The decimal digits of a number.
fn decimal(digits: &mut [u8; 20], mut number: usize) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        // A remainder is one digit.
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[at..];
        }
    }
}

/// A reply, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RespValue<'a> {
    /// A status, such as `OK`.
    Status(&'a [u8]),
    /// The text of an error, with its code in front.
    Error(&'a [u8]),
    Integer(i64),
    Bulk(&'a [u8]),
    Nil,
    Array(Vec<RespValue<'a>>),
}

impl<'a> RespValue<'a> {
    /// The elements of an array.
    pub(crate) fn elements(&self) -> Option<&[RespValue<'a>]> {
        match self {
            RespValue::Array(elements) => Some(elements),
            _ => None,
        }
    }

    /// A status or a bulk string, as text.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            RespValue::Status(bytes) | RespValue::Bulk(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }
}

/// The peer does not speak RESP2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reply is not in the protocol of Redis")]
pub(crate) struct NotResp;

/// Parses the reply at the front of `input`. Returns it with its length, or None if more bytes are needed.
pub(crate) fn parse(input: &[u8]) -> Result<Option<(RespValue<'_>, usize)>, NotResp> {
    let mut rest = input;
    let value = value(&mut rest, 0)?;
    if value.is_none() && input.len() >= REPLY_BYTES_MAX {
        return Err(NotResp);
    }
    Ok(value.map(|value| (value, input.len() - rest.len())))
}

fn value<'a>(rest: &mut &'a [u8], depth: usize) -> Result<Option<RespValue<'a>>, NotResp> {
    let Some((kind, line)) = line(rest)? else { return Ok(None) };
    Ok(Some(match kind {
        b'+' => RespValue::Status(line),
        b'-' => RespValue::Error(line),
        b':' => RespValue::Integer(number(line)?),
        b'$' => match number(line)? {
            -1 => RespValue::Nil,
            length => {
                let length = usize::try_from(length).map_err(|_| NotResp)?;
                if length > REPLY_BYTES_MAX {
                    return Err(NotResp);
                }
                let Some((text, behind)) = rest.split_at_checked(length) else { return Ok(None) };
                let Some((end, behind)) = behind.split_first_chunk() else { return Ok(None) };
                if end != b"\r\n" {
                    return Err(NotResp);
                }
                *rest = behind;
                RespValue::Bulk(text)
            }
        },
        b'*' => match number(line)? {
            -1 => RespValue::Nil,
            length => {
                let length = usize::try_from(length).map_err(|_| NotResp)?;
                if depth == DEPTH_MAX {
                    return Err(NotResp);
                }
                let mut elements = Vec::with_capacity(length.min(RESERVED_MAX));
                for _ in 0..length {
                    let Some(element) = value(rest, depth + 1)? else { return Ok(None) };
                    elements.push(element);
                }
                RespValue::Array(elements)
            }
        },
        _ => return Err(NotResp),
    }))
}

/// Takes a line from the front: its kind, and the rest of it.
fn line<'a>(rest: &mut &'a [u8]) -> Result<Option<(u8, &'a [u8])>, NotResp> {
    let Some((&kind, text)) = rest.split_first() else { return Ok(None) };
    // More bytes cannot make this a reply.
    if !b"+-:$*".contains(&kind) {
        return Err(NotResp);
    }
    let Some(end) = text.iter().take(LINE_BYTES_MAX).position(|byte| *byte == b'\r') else {
        return if text.len() < LINE_BYTES_MAX { Ok(None) } else { Err(NotResp) };
    };
    match text.get(end + 1) {
        None => Ok(None),
        Some(b'\n') => {
            *rest = &text[end + 2..];
            Ok(Some((kind, &text[..end])))
        }
        Some(_) => Err(NotResp),
    }
}

fn number(text: &[u8]) -> Result<i64, NotResp> {
    std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).ok_or(NotResp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_encoded() {
        let mut out = Vec::new();
        push_all(&mut out, &[b"GET", b"a\r\nb"]);
        push_command(&mut out, 2);
        push_argument(&mut out, b"SELECT");
        push_number(&mut out, 10);
        assert_eq!(out, b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n*2\r\n$6\r\nSELECT\r\n$2\r\n10\r\n");
        let mut digits = [0; 20];
        assert_eq!(decimal(&mut digits, 0), b"0");
        assert_eq!(decimal(&mut digits, usize::MAX), usize::MAX.to_string().as_bytes());
    }

    #[test]
    fn replies_are_parsed_wherever_they_are_cut() {
        let all = b"+OK\r\n-ERR no\r\n:-7\r\n$4\r\na\r\nb\r\n$-1\r\n*2\r\n$0\r\n\r\n*1\r\n:1\r\n*-1\r\n";
        let expected = [
            RespValue::Status(b"OK"),
            RespValue::Error(b"ERR no"),
            RespValue::Integer(-7),
            RespValue::Bulk(b"a\r\nb"),
            RespValue::Nil,
            RespValue::Array(vec![RespValue::Bulk(b""), RespValue::Array(vec![RespValue::Integer(1)])]),
            RespValue::Nil,
        ];
        let mut rest = &all[..];
        for expected in expected {
            let (value, length) = parse(rest).unwrap().unwrap();
            assert_eq!(value, expected);
            for cut in 0..length {
                assert_eq!(parse(&rest[..cut]), Ok(None), "{expected:?} cut at {cut}");
            }
            rest = &rest[length..];
        }
        assert_eq!(rest, b"");
    }

    #[test]
    fn other_protocols_are_rejected() {
        let deep = b"*1\r\n".repeat(DEPTH_MAX + 1);
        let wrong: [&[u8]; 9] = [
            b"HTTP/1.1 400 Bad Request\r\n",
            b"+OK\rx",
            b":x\r\n",
            b"$x\r\n",
            b"$-2\r\n",
            b"$1\r\nabc",
            b"$99999999999\r\n",
            b"*-2\r\n",
            &deep,
        ];
        for wrong in wrong {
            assert_eq!(parse(wrong), Err(NotResp), "{:?}", String::from_utf8_lossy(wrong));
        }
    }
}
