//! Choices and texts out of a fuzzer's bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes that are used up from the front. At their end, every choice is the first and every text is empty.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of these bytes.
    pub(crate) fn new(bytes: &'a [u8]) -> Input<'a> {
        Input(bytes)
    }

    /// The next byte.
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Yes or no.
    pub(crate) fn flag(&mut self) -> bool {
        self.byte() % 2 == 1
    }

    /// A number below this one.
    pub(crate) fn below(&mut self, end: u8) -> u8 {
        self.byte() % end.max(1)
    }

    /// One of these.
    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()]
    }

    /// So many bytes at most, of a length that is read first.
    pub(crate) fn bytes(&mut self, most: u8) -> &'a [u8] {
        let length = usize::from(self.below(most.saturating_add(1))).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes
    }

    /// Everything up to this byte, which is dropped, or up to the end.
    pub(crate) fn until(&mut self, end: u8) -> &'a [u8] {
        let length = self.0.iter().position(|byte| *byte == end).unwrap_or(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest.get(1..).unwrap_or_default();
        bytes
    }

    /// Text of so many bytes at most; what is not UTF-8 is replaced.
    pub(crate) fn text(&mut self, most: u8) -> String {
        String::from_utf8_lossy(self.bytes(most)).into_owned()
    }

    /// Whether nothing is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// An address of any kind, the kinds with a meaning of their own as often as the others.
    pub(crate) fn address(&mut self) -> IpAddr {
        let kind = self.below(4);
        let mut octets = [0; 16];
        let read = self.bytes(16);
        // From the right, where short ones are: `::1`, `0.0.0.1`.
        octets[16 - read.len()..].copy_from_slice(read);
        let [.., a, b, c, d] = octets;
        let ipv4 = Ipv4Addr::new(a, b, c, d);
        match kind {
            0 => ipv4.into(),
            1 => Ipv6Addr::from(octets).into(),
            2 => ipv4.to_ipv6_mapped().into(),
            _ => {
                let [.., high, low] = ipv4.to_ipv6_mapped().segments();
                Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low).into()
            }
        }
    }
}
