//! What a process says of its slots, and what it is told: as `slots.lua` has it.
#![cfg_attr(
    not(feature = "tower"),
    allow(dead_code, reason = "only the middleware counts requests under way")
)]

use std::time::Duration;

use ::redis::Cmd;

/// How many slots of a key a process wants to have.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) key: String,
    pub(crate) process: u64,
    /// Greater than that of any claim of the process before.
    pub(crate) number: u64,
    /// How many of its requests are under way.
    pub(crate) under_way: u32,
    /// How many slots it keeps of those that it has: at least as many as requests are under way.
    pub(crate) kept: u32,
    /// How many more it wants.
    pub(crate) more: u32,
    /// How many there are.
    pub(crate) most: u32,
    /// For how long, unless it is said again.
    pub(crate) hold: Duration,
}

/// How many slots there are after a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claimed {
    pub(crate) own: u32,
    pub(crate) others: u32,
    /// Somebody was denied lately.
    pub(crate) is_contended: bool,
}

/// What is told if somebody was denied lately.
const CONTENDED: u8 = 3;
/// What is told of a key that is not what was written to it.
const GARBLED: u8 = 64;

impl Claim {
    /// Adds the keys of claims to a call, and then the claims.
    pub(crate) fn push_all<'a>(command: &mut Cmd, claims: impl Iterator<Item = &'a Claim> + Clone) {
        command.arg(claims.clone().count());
        for claim in claims.clone() {
            command.arg(&claim.key);
        }
        for claim in claims {
            command.arg(&claim.packed()[..]);
        }
    }

    fn packed(&self) -> [u8; 40] {
        let mut packed = [0; 40];
        packed[..8].copy_from_slice(&self.process.to_le_bytes());
        // Lua counts in doubles. Neither of the two comes near 2^53.
        packed[8..16].copy_from_slice(&(self.number as f64).to_le_bytes());
        for (at, number) in [self.under_way, self.kept, self.more, self.most].into_iter().enumerate() {
            packed[16 + at * 4..20 + at * 4].copy_from_slice(&number.to_le_bytes());
        }
        packed[32..].copy_from_slice(&(self.hold.as_micros() as f64).to_le_bytes());
        packed
    }
}

impl Claimed {
    /// Takes what is told of one key off the front of a reply.
    ///
    /// The outer option is None if the reply is no such thing, the inner if the key is not what was written to it.
    pub(crate) fn take(reply: &mut &[u8]) -> Option<Option<Claimed>> {
        let (kind, rest) = reply.split_first()?;
        *reply = rest;
        if *kind == GARBLED {
            return Some(None);
        }
        let (own, rest) = rest.split_first_chunk()?;
        let (others, rest) = rest.split_first_chunk()?;
        *reply = rest;
        Some(Some(Claimed {
            own: u32::from_le_bytes(*own),
            others: u32::from_le_bytes(*others),
            is_contended: *kind == CONTENDED,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_read() {
        let told =
            [&[1, 3, 0, 0, 0, 4, 1, 0, 0][..], &[GARBLED], &[CONTENDED, 0, 0, 0, 0, 0, 0, 0, 0], &[1, 0]]
                .concat();
        let mut rest = &told[..];
        assert_eq!(
            Claimed::take(&mut rest),
            Some(Some(Claimed { own: 3, others: 260, is_contended: false }))
        );
        assert_eq!(Claimed::take(&mut rest), Some(None));
        assert_eq!(Claimed::take(&mut rest), Some(Some(Claimed { own: 0, others: 0, is_contended: true })));
        assert_eq!(Claimed::take(&mut rest), None, "cut off");
    }
}
