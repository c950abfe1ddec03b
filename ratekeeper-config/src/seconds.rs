//! Decimal seconds: one format for all APIs.

use std::time::Duration;

use ratekeeper_core::RetryAfter;

/// Writes how long to wait before a retry, as JSON: `null` if the request was allowed, `"never"` if no wait helps.
#[inline]
pub fn push_retry_after(out: &mut Vec<u8>, retry_after: RetryAfter) {
    match retry_after {
        RetryAfter::Now => out.extend_from_slice(b"null"),
        RetryAfter::After(wait) => push_seconds(out, wait),
        RetryAfter::Never => out.extend_from_slice(b"\"never\""),
    }
}

/// Writes seconds, rounded up to the microsecond, with the fewest decimals but at least one. Zero is `0`.
///
/// ```
/// let mut text = Vec::new();
/// ratekeeper_config::push_seconds(&mut text, std::time::Duration::from_millis(1500));
/// assert_eq!(text, b"1.5");
/// ```
#[inline]
pub fn push_seconds(out: &mut Vec<u8>, wait: Duration) {
    if wait.is_zero() {
        out.push(b'0');
        return;
    }
    let mut micros = wait.subsec_nanos().div_ceil(1_000);
    let mut whole_seconds = wait.as_secs();
    if micros == 1_000_000 {
        micros = 0;
        whole_seconds = whole_seconds.saturating_add(1);
    }
    out.extend_from_slice(itoa::Buffer::new().format(whole_seconds).as_bytes());
    let mut decimals = *b".000000";
    let mut last = 1;
    for position in (1..decimals.len()).rev() {
        let digit = (micros % 10) as u8;
        micros /= 10;
        decimals[position] += digit;
        if digit != 0 {
            last = last.max(position);
        }
    }
    out.extend_from_slice(&decimals[..=last]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_rounded_up_to_the_microsecond() {
        for (nanos, expected) in [
            (0, "0"),
            (1, "0.000001"),
            (1_000, "0.000001"),
            (1_001, "0.000002"),
            (333_333_334, "0.333334"),
            (500_000_000, "0.5"),
            (120_000_000, "0.12"),
            (999_999_000, "0.999999"),
            (999_999_001, "1.0"),
            (1_000_000_000, "1.0"),
            (59_999_999_999, "60.0"),
            (60_000_000_001, "60.000001"),
            (100_000_000_000, "100.0"),
            (u64::MAX, "18446744073.709552"),
        ] {
            let mut out = Vec::new();
            push_seconds(&mut out, Duration::from_nanos(nanos));
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
        let mut out = Vec::new();
        push_seconds(&mut out, Duration::MAX);
        assert_eq!(out, b"18446744073709551615.0");
    }
}
