//! Claims of concurrency permits and their results, in the format of `concurrency.lua`.
#![cfg_attr(
    not(feature = "tower"),
    allow(dead_code, reason = "only the middleware counts requests in flight")
)]

use std::time::Duration;

use super::resp;

/// The permits of a key that a process claims.
#[derive(Clone, Debug)]
pub(crate) struct PermitClaim {
    pub(crate) key: String,
    pub(crate) process: u64,
    /// Greater than in any earlier claim of this process.
    pub(crate) number: u64,
    /// Requests of this process in flight.
    pub(crate) in_flight: u32,
    /// Permits to keep of those that the process has: at least the requests in flight.
    pub(crate) kept: u32,
    /// Permits to add.
    pub(crate) more: u32,
    /// The concurrency limit.
    pub(crate) max: u32,
    /// How long the permits are held without a renewal.
    pub(crate) hold: Duration,
}

/// The permits of a key after a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClaimResult {
    pub(crate) own: u32,
    pub(crate) others: u32,
    /// A request was denied recently.
    pub(crate) is_contended: bool,
}

/// First byte of a result if a request was denied recently.
const CONTENDED: u8 = 3;
/// First byte of a result if the key holds a foreign value.
const GARBLED: u8 = 64;

impl PermitClaim {
    /// Appends the keys of claims to a command, then the claims: 1 argument, and 2 for each claim.
    pub(crate) fn push_claims<'a>(out: &mut Vec<u8>, claims: impl Iterator<Item = &'a PermitClaim> + Clone) {
        resp::push_number(out, claims.clone().count());
        for claim in claims.clone() {
            resp::push_argument(out, claim.key.as_bytes());
        }
        for claim in claims {
            resp::push_argument(out, &claim.packed());
        }
    }

    fn packed(&self) -> [u8; 40] {
        let mut packed = [0; 40];
        packed[..8].copy_from_slice(&self.process.to_le_bytes());
        // Lua's numbers are doubles; both values stay far below 2^53.
        packed[8..16].copy_from_slice(&(self.number as f64).to_le_bytes());
        for (at, number) in [self.in_flight, self.kept, self.more, self.max].into_iter().enumerate() {
            packed[16 + at * 4..20 + at * 4].copy_from_slice(&number.to_le_bytes());
        }
        packed[32..].copy_from_slice(&(self.hold.as_micros() as f64).to_le_bytes());
        packed
    }
}

impl ClaimResult {
    /// Reads one result from the front of a reply.
    ///
    /// The outer option is None if the reply is malformed, the inner if the key holds a foreign value.
    pub(crate) fn take(reply: &mut &[u8]) -> Option<Option<ClaimResult>> {
        let (kind, rest) = reply.split_first()?;
        *reply = rest;
        if *kind == GARBLED {
            return Some(None);
        }
        let (own, rest) = rest.split_first_chunk()?;
        let (others, rest) = rest.split_first_chunk()?;
        *reply = rest;
        Some(Some(ClaimResult {
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
    fn claim_results_are_parsed() {
        let reply =
            [&[1, 3, 0, 0, 0, 4, 1, 0, 0][..], &[GARBLED], &[CONTENDED, 0, 0, 0, 0, 0, 0, 0, 0], &[1, 0]]
                .concat();
        let mut rest = &reply[..];
        assert_eq!(
            ClaimResult::take(&mut rest),
            Some(Some(ClaimResult { own: 3, others: 260, is_contended: false }))
        );
        assert_eq!(ClaimResult::take(&mut rest), Some(None));
        assert_eq!(
            ClaimResult::take(&mut rest),
            Some(Some(ClaimResult { own: 0, others: 0, is_contended: true }))
        );
        assert_eq!(ClaimResult::take(&mut rest), None, "cut off");
    }
}
