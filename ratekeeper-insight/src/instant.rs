//! Parses time text into an instant. Exact: integer arithmetic only.

use ratekeeper::Time;

/// What is wrong with a cell, and what to write instead.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) what: String,
    pub(crate) instead: String,
}

const NANOS_PER_SECOND: u64 = 1_000_000_000;
/// The last instant is 9223372036.854775807: ten digits before the point.
const SECONDS_DIGITS_MAX: usize = 10;
const DECIMALS_MAX: usize = 9;
const HOW: &str = "write seconds since 1970, as in 1700000000.5, or a time as in 2023-11-14T22:13:20.5Z";

/// Parses seconds since the epoch with up to nine decimals, or RFC 3339.
#[inline]
pub(crate) fn instant(text: &[u8]) -> Result<Time, Fault> {
    match seconds(text) {
        Some(time) => Ok(time),
        None => uncommon(text),
    }
}

/// The common case, kept fast: `1700000000` or `1700000000.123456`.
#[inline]
fn seconds(text: &[u8]) -> Option<Time> {
    let (seconds, point) = digits(text, SECONDS_DIGITS_MAX)?;
    let fraction = match text.get(point) {
        None => 0,
        Some(b'.') => {
            let decimals = &text[point + 1..];
            let (value, count) = digits(decimals, DECIMALS_MAX)?;
            if count < decimals.len() {
                return None;
            }
            value * POWERS_OF_TEN[DECIMALS_MAX - count]
        }
        Some(_) => return None,
    };
    // Ten digits of seconds are less than 10^19 ns, which fits 64 bits.
    let nanos = seconds * NANOS_PER_SECOND + fraction;
    (nanos <= Time::MAX.as_nanos()).then(|| Time::from_nanos(nanos))
}

/// Parses 1 to `max` leading digits; returns their value and their number.
#[inline]
fn digits(text: &[u8], max: usize) -> Option<(u64, usize)> {
    let mut value = 0;
    let mut count = 0;
    while let Some(digit) = text.get(count).map(|byte| byte.wrapping_sub(b'0')).filter(|digit| *digit < 10) {
        if count == max {
            return None;
        }
        value = value * 10 + u64::from(digit);
        count += 1;
    }
    (count > 0).then_some((value, count))
}

const POWERS_OF_TEN: [u64; DECIMALS_MAX + 1] =
    [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];

/// All other input: RFC 3339, or an error with an explanation.
#[cold]
fn uncommon(text: &[u8]) -> Result<Time, Fault> {
    let fault = |what: String, instead: String| Err(Fault { what, instead });
    let shown = crate::quoted(text);
    if text.is_empty() {
        return fault("the time is missing".to_owned(), HOW.to_owned());
    }
    if text[0] == b'-' {
        return fault(format!("{shown} is negative, and time begins in 1970"), HOW.to_owned());
    }
    let whole = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let decimals = match &text[whole..] {
        [] => Some(0),
        [b'.', rest @ ..] if rest.iter().all(u8::is_ascii_digit) => Some(rest.len()),
        _ => None,
    };
    match decimals {
        Some(count) if whole > 0 && count > DECIMALS_MAX => fault(
            format!("{shown} has {count} decimals"),
            format!("write at most {DECIMALS_MAX}, which are nanoseconds"),
        ),
        Some(count) if whole > 0 && (count > 0 || text.len() == whole) => {
            let unit = [(13, "milliseconds"), (16, "microseconds"), (19, "nanoseconds")];
            let instead = match unit.iter().find(|(digits, _)| *digits == whole) {
                Some((_, unit)) => {
                    let text = String::from_utf8_lossy(text);
                    let (seconds, rest) = text.split_at(SECONDS_DIGITS_MAX);
                    format!("time is in seconds: if these are {unit}, write {seconds}.{rest}")
                }
                None => HOW.to_owned(),
            };
            fault(format!("{shown} is after the year 2262"), instead)
        }
        _ => rfc3339(text).unwrap_or_else(|| fault(format!("{shown} is not a time"), HOW.to_owned())),
    }
}

fn rfc3339(text: &[u8]) -> Option<Result<Time, Fault>> {
    // jiff accepts more forms than RFC 3339; only RFC 3339's characters are allowed.
    if !text.iter().all(|byte| byte.is_ascii_digit() || b"Tt Zz:.+-".contains(byte)) {
        return None;
    }
    // It also accepts offsets of a day and more.
    let time = text.iter().position(|byte| b"Tt ".contains(byte))?;
    let offset = text[time..].iter().position(|byte| b"+-".contains(byte)).map(|at| &text[time + at + 1..]);
    if offset.is_some_and(|offset| offset.get(..2).is_none_or(|hours| hours > b"23".as_slice())) {
        return None;
    }
    let timestamp: jiff::Timestamp = std::str::from_utf8(text).ok()?.parse().ok()?;
    let shown = crate::quoted(text);
    let nanos = timestamp.as_nanosecond();
    Some(match u64::try_from(nanos) {
        Ok(nanos) if nanos <= Time::MAX.as_nanos() => Ok(Time::from_nanos(nanos)),
        Ok(_) => Err(Fault { what: format!("{shown} is after the year 2262"), instead: HOW.to_owned() }),
        Err(_) => {
            let what = if nanos < 0 { "before 1970" } else { "after the year 2262" };
            Err(Fault { what: format!("{shown} is {what}"), instead: HOW.to_owned() })
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_parsed_to_the_nanosecond() {
        for (text, nanos) in [
            ("0", 0),
            ("0.0", 0),
            ("0.000000001", 1),
            ("1", 1_000_000_000),
            ("0000000001.5", 1_500_000_000),
            ("1700000000", 1_700_000_000_000_000_000),
            ("1700000000.123456789", 1_700_000_000_123_456_789),
            ("9223372036.854775807", i64::MAX as u64),
            ("1970-01-01T00:00:00Z", 0),
            ("2023-11-14T22:13:20.5Z", 1_700_000_000_500_000_000),
            ("2023-11-14T23:13:20.123456789+01:00", 1_700_000_000_123_456_789),
            ("2023-11-14t22:13:20z", 1_700_000_000_000_000_000),
            ("2023-11-15T22:12:20+23:59", 1_700_000_000_000_000_000),
        ] {
            assert_eq!(instant(text.as_bytes()), Ok(Time::from_nanos(nanos)), "{text}");
        }
    }

    #[test]
    fn invalid_time_is_explained() {
        for (text, message) in [
            ("", "the time is missing"),
            ("-1", "`-1` is negative, and time begins in 1970"),
            ("1.0123456789", "`1.0123456789` has 10 decimals"),
            ("9223372036.854775808", "`9223372036.854775808` is after the year 2262"),
            ("9999999999", "`9999999999` is after the year 2262"),
            ("12345678901234567890123", "`12345678901234567890123` is after the year 2262"),
            ("2262-04-12T00:00:00Z", "`2262-04-12T00:00:00Z` is after the year 2262"),
            ("9999-12-30T00:00:00Z", "`9999-12-30T00:00:00Z` is after the year 2262"),
            ("1969-12-31T23:59:59Z", "`1969-12-31T23:59:59Z` is before 1970"),
            ("2023-11-14", "`2023-11-14` is not a time"),
            ("2023-11-14T22:13:20", "`2023-11-14T22:13:20` is not a time"),
            ("2023-11-14T22:13:20Z[UTC]", "`2023-11-14T22:13:20Z[UTC]` is not a time"),
            ("2023-02-30T22:13:20Z", "`2023-02-30T22:13:20Z` is not a time"),
            ("2023-11-14T22:13:20+25:00", "`2023-11-14T22:13:20+25:00` is not a time"),
            ("2023-11-14T22:13:20-24:00", "`2023-11-14T22:13:20-24:00` is not a time"),
            ("1.", "`1.` is not a time"),
            (".5", "`.5` is not a time"),
            ("1e9", "`1e9` is not a time"),
            (" 1", "` 1` is not a time"),
            ("1 ", "`1 ` is not a time"),
            ("+1", "`+1` is not a time"),
            ("1_000", "`1_000` is not a time"),
            ("noon", "`noon` is not a time"),
            ("１", "`１` is not a time"),
        ] {
            assert_eq!(
                instant(text.as_bytes()).map_err(|fault| fault.what),
                Err(message.to_owned()),
                "{text}"
            );
        }
    }

    #[test]
    fn finer_time_unit_is_recognized() {
        for (text, instead) in [
            ("1700000000123", "time is in seconds: if these are milliseconds, write 1700000000.123"),
            ("1700000000123456", "time is in seconds: if these are microseconds, write 1700000000.123456"),
            (
                "1700000000123456789",
                "time is in seconds: if these are nanoseconds, write 1700000000.123456789",
            ),
        ] {
            assert_eq!(instant(text.as_bytes()).map_err(|fault| fault.instead), Err(instead.to_owned()));
        }
    }
}
