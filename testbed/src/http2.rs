//! HTTP/2 frame by frame, for clients and servers that do with it what no library would.

/// What a client says first.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Kinds of frames.
pub mod kind {
    #![allow(missing_docs, reason = "the names are those of the standard")]
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// The last frame of its side of a stream.
pub const END_STREAM: u8 = 1;
/// The last frame of a head.
pub const END_HEADERS: u8 = 4;
/// The answer to a ping or to settings.
pub const ACK: u8 = 1;
/// How many bytes come before a frame's payload.
pub const HEAD_BYTES: usize = 9;

/// A frame as bytes.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// What a frame begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Of the payload.
    pub length: usize,
    /// One of [`kind`].
    pub kind: u8,
    /// What they mean is up to the kind.
    pub flags: u8,
    /// 0 is the connection.
    pub stream: u32,
}

impl Head {
    /// Reads one.
    pub fn of(bytes: [u8; HEAD_BYTES]) -> Head {
        let [first, second, third, kind, flags, stream @ ..] = bytes;
        let length = u32::from_be_bytes([0, first, second, third]) as usize;
        Head { length, kind, flags, stream: u32::from_be_bytes(stream) }
    }
}

/// A name or a value as HPACK has it, without any coding.
fn literal(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut left = text.len();
    match left < 127 {
        true => bytes.push(left as u8),
        false => {
            bytes.push(127);
            left -= 127;
            while left >= 128 {
                bytes.push((left % 128) as u8 | 128);
                left /= 128;
            }
            bytes.push(left as u8);
        }
    }
    bytes.extend(text.as_bytes());
    bytes
}

/// Headers as a frame carries them.
pub fn block<'a>(headers: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in headers {
        bytes.push(0);
        bytes.extend(literal(name));
        bytes.extend(literal(value));
    }
    bytes
}

/// What a request's head has to have.
pub fn request_head<'a>(method: &'a str, path: &'a str) -> [(&'a str, &'a str); 4] {
    [(":method", method), (":scheme", "http"), (":authority", "a"), (":path", path)]
}

/// A request without a body.
pub fn get(stream: u32, path: &str) -> Vec<u8> {
    frame(kind::HEADERS, END_STREAM | END_HEADERS, stream, &block(request_head("GET", path)))
}
