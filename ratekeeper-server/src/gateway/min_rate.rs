//! The minimum rate of clients.
//!
//! A timeout between two parts of a body lets a client hold a request for ever with one byte now and then. So the time
//! that the gateway waits for a client adds up, and data restores it only at the minimum rate. Time during which an
//! upstream is awaited does not count.

use std::time::Duration;

/// A rate in bytes per second. With 0, any data restores the whole time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MinRate(pub(crate) u32);

impl MinRate {
    /// What is left of the time that the client was awaited, after it has sent or read `bytes`.
    pub(crate) fn left_after(self, waited: Duration, bytes: usize) -> Duration {
        if waited.is_zero() || self.0 == 0 {
            return Duration::ZERO;
        }
        let restored = (bytes as u64).saturating_mul(1_000_000) / u64::from(self.0);
        waited.saturating_sub(Duration::from_micros(restored))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_restores_time_at_the_minimum_rate() {
        let second = Duration::from_secs(1);
        let rate = MinRate(500);
        assert_eq!(rate.left_after(10 * second, 500), 9 * second);
        assert_eq!(rate.left_after(10 * second, 0), 10 * second);
        assert_eq!(rate.left_after(10 * second, 1_000_000), Duration::ZERO);
        assert_eq!(rate.left_after(10 * second, usize::MAX), Duration::ZERO);
        assert_eq!(MinRate(0).left_after(10 * second, 1), Duration::ZERO);
    }
}
