//! Reads choices and texts from a fuzzer's bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes consumed from the front. At the end, every choice is the first and every text is empty.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Creates an input of these bytes.
    pub(crate) fn new(bytes: &'a [u8]) -> Input<'a> {
        Input(bytes)
    }

    /// Returns the next byte.
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Returns a boolean.
    pub(crate) fn flag(&mut self) -> bool {
        self.byte() % 2 == 1
    }

    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: u8) -> u8 {
        self.byte() % end.max(1)
    }

    /// Returns one of the choices.
    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()]
    }

    /// Returns at most `most` bytes; a length byte precedes them.
    pub(crate) fn bytes(&mut self, most: u8) -> &'a [u8] {
        let length = usize::from(self.below(most.saturating_add(1))).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes
    }

    /// Returns the bytes up to `end`, which is dropped, or all remaining ones.
    pub(crate) fn until(&mut self, end: u8) -> &'a [u8] {
        let length = self.0.iter().position(|byte| *byte == end).unwrap_or(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest.get(1..).unwrap_or_default();
        bytes
    }

    /// Returns text of at most `most` bytes; invalid UTF-8 is replaced.
    pub(crate) fn text(&mut self, most: u8) -> String {
        String::from_utf8_lossy(self.bytes(most)).into_owned()
    }

    /// Returns true if no bytes are left.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns an address of one of four kinds, equally likely: IPv4, IPv6, IPv4-mapped and NAT64.
    pub(crate) fn address(&mut self) -> IpAddr {
        let kind = self.below(4);
        let mut octets = [0; 16];
        let read = self.bytes(16);
        // Right-aligned, so that few bytes give short addresses: `::1`, `0.0.0.1`.
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
