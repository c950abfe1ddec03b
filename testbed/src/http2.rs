//! HTTP/2 frames as bytes, for test clients and servers that violate the protocol as no library would.

/// The client connection preface.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Frame types.
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

/// Flag of the last frame that a peer sends on a stream.
pub const END_STREAM: u8 = 1;
/// Flag of the last frame of a header block.
pub const END_HEADERS: u8 = 4;
/// Flag that acknowledges a PING or SETTINGS frame.
pub const ACK: u8 = 1;
/// Length of a frame header in bytes.
pub const HEAD_BYTES: usize = 9;

/// Encodes a frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Length of the payload in bytes.
    pub length: usize,
    /// Frame type, one of [`kind`].
    pub kind: u8,
    /// Flags; their meaning depends on the frame type.
    pub flags: u8,
    /// Stream identifier; 0 is the connection.
    pub stream: u32,
}

impl Head {
    /// Decodes a frame header.
    pub fn of(bytes: [u8; HEAD_BYTES]) -> Head {
        let [first, second, third, kind, flags, stream @ ..] = bytes;
        let length = u32::from_be_bytes([0, first, second, third]) as usize;
        Head { length, kind, flags, stream: u32::from_be_bytes(stream) }
    }
}

/// An HPACK string literal without Huffman coding.
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

/// Encodes a header block.
pub fn block<'a>(headers: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in headers {
        bytes.push(0);
        bytes.extend(literal(name));
        bytes.extend(literal(value));
    }
    bytes
}

/// The pseudo-headers of a request.
pub fn request_head<'a>(method: &'a str, path: &'a str) -> [(&'a str, &'a str); 4] {
    [(":method", method), (":scheme", "http"), (":authority", "a"), (":path", path)]
}

/// Encodes a GET request without a body.
pub fn get(stream: u32, path: &str) -> Vec<u8> {
    frame(kind::HEADERS, END_STREAM | END_HEADERS, stream, &block(request_head("GET", path)))
}
