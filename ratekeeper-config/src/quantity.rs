//! Whole numbers, durations and rates: the one grammar that is parsed and printed.

use std::ops::RangeInclusive;
use std::time::Duration;

use ratekeeper_core::{LimitError, Rate};

use crate::error::{quoted, subject};
use crate::nearest;

/// What is wrong with a value, and what to write instead.
#[derive(Debug)]
pub(crate) struct ValueError {
    pub(crate) message: String,
    pub(crate) help: String,
}

impl ValueError {
    fn new<T>(message: String, help: impl Into<String>) -> Result<T, ValueError> {
        Err(ValueError { message, help: help.into() })
    }
}

/// A unit of time: its length, its name after a number and after a slash, and all accepted names.
struct TimeUnit {
    nanos: u64,
    short: &'static str,
    per: &'static str,
    names: &'static [&'static str],
}

/// Longest first. The two shortest exist so that every limit can be printed.
const UNITS: [TimeUnit; 8] = [
    TimeUnit { nanos: 604_800_000_000_000, short: "w", per: "week", names: &["w", "week", "weeks"] },
    TimeUnit { nanos: 86_400_000_000_000, short: "d", per: "day", names: &["d", "day", "days"] },
    TimeUnit { nanos: 3_600_000_000_000, short: "h", per: "h", names: &["h", "hour", "hours"] },
    TimeUnit { nanos: 60_000_000_000, short: "m", per: "min", names: &["m", "min", "minute", "minutes"] },
    TimeUnit { nanos: 1_000_000_000, short: "s", per: "s", names: &["s", "sec", "second", "seconds"] },
    TimeUnit { nanos: 1_000_000, short: "ms", per: "ms", names: &["ms"] },
    TimeUnit { nanos: 1_000, short: "us", per: "us", names: &["us"] },
    TimeUnit { nanos: 1, short: "ns", per: "ns", names: &["ns"] },
];

/// How other tools write a period, and the unit it is here.
const PERIODS: [(&[&str], &str); 4] = [
    (&["rps", "qps", "per second", "per sec"], "s"),
    (&["rpm", "qpm", "per minute", "per min"], "min"),
    (&["rph", "per hour"], "h"),
    (&["rpd", "per day"], "day"),
];
const UNITS_KNOWN: &str = "Units: ms, s, m or min, h, d, w";

/// Parses a whole number from 1 to `max`. Zero would deny everything.
pub(crate) fn whole(name: &str, typed: &str, max: u32) -> Result<u32, ValueError> {
    number(name, typed, 1..=max).map_err(|value_error| match typed.parse() {
        Ok(0_u32) => ValueError {
            message: format!("{} is 0, which would deny every request", subject(name)),
            ..value_error
        },
        _ => value_error,
    })
}

/// Parses a whole number in a range.
pub(crate) fn number(name: &str, typed: &str, range: RangeInclusive<u32>) -> Result<u32, ValueError> {
    let help = format!("write a whole number from {} to {}", range.start(), range.end());
    let subject = subject(name);
    if typed.is_empty() {
        return ValueError::new(format!("{subject} is empty"), help);
    }
    if !typed.bytes().all(|b| b.is_ascii_digit()) {
        return ValueError::new(
            format!("{subject} is {}, which is {}", quoted(typed), not_whole(typed)),
            help,
        );
    }
    match typed.parse::<u32>() {
        Ok(value) if range.contains(&value) => Ok(value),
        Ok(value) if value < *range.start() => {
            ValueError::new(format!("{subject} is {}, which is too small", quoted(typed)), help)
        }
        _ => ValueError::new(format!("{subject} is {}, which is too large", quoted(typed)), help),
    }
}

/// Parses a percentage: `20%`.
pub(crate) fn percent(name: &str, typed: &str) -> Result<u32, ValueError> {
    let number = typed.strip_suffix('%').map(|digits| digits.parse::<u32>());
    match number {
        Some(Ok(percent)) if percent <= 100 => Ok(percent),
        _ => ValueError::new(
            format!("`{name}` is {}, which is not a percentage from 0% to 100%", quoted(typed)),
            format!("write a whole percentage, as in `{name}: 20%`"),
        ),
    }
}

/// Parses an amount of memory: `64MiB`, `1GiB`.
pub(crate) fn bytes(typed: &str) -> Result<usize, ValueError> {
    const UNITS: [(&str, usize); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("B", 1)];
    let number = typed.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = typed[number.len()..].trim();
    let unit = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, size)| *size);
    let size = unit.and_then(|unit| number.parse::<usize>().ok()?.checked_mul(unit)).filter(|size| *size > 0);
    match size {
        Some(size) => Ok(size),
        None => ValueError::new(
            format!("invalid amount of memory {}", quoted(typed)),
            "write a whole number and a unit, as in `64MiB`. Units: KiB, MiB, GiB",
        ),
    }
}

fn not_whole(typed: &str) -> &'static str {
    let unsigned = typed.strip_prefix(['-', '+']).unwrap_or(typed);
    let looks_numeric = unsigned.bytes().next().is_some_and(|b| b.is_ascii_digit() || b == b'.')
        && unsigned.bytes().any(|b| b.is_ascii_digit());
    if !looks_numeric {
        "not a number"
    } else if typed.starts_with('-') {
        "negative"
    } else {
        "not a whole number"
    }
}

/// Parses a duration in a range.
pub(crate) fn length(name: &str, typed: &str, from: Duration, to: Duration) -> Result<Duration, ValueError> {
    let length = duration(typed)?;
    if length < from || length > to {
        let message = if length < from { "short" } else { "long" };
        return ValueError::new(
            format!("{name} of {} is too {message}", quoted(typed)),
            format!("write {} to {}", duration_text(from), duration_text(to)),
        );
    }
    Ok(length)
}

/// Parses a number and a unit: `500ms`, `60s`, `15m`, `1h`, `1d`, `1w`.
pub(crate) fn duration(typed: &str) -> Result<Duration, ValueError> {
    let trimmed = typed.trim();
    let number_end = trimmed.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
    let (number, unit_typed) = (&trimmed[..number_end], trimmed[number_end..].trim_start());
    let example = if number.is_empty() { "60" } else { number };
    if number.is_empty() {
        let message = if trimmed.starts_with('-') { "is negative" } else { "has no number" };
        return ValueError::new(
            format!("{} {message}", quoted(typed)),
            "write a whole number and a unit, as in `60s`",
        );
    }
    if unit_typed.is_empty() {
        return ValueError::new(
            format!("{} has no unit", quoted(typed)),
            format!("write `{example}s` for seconds. {UNITS_KNOWN}"),
        );
    }
    if unit_typed.bytes().any(|b| b.is_ascii_digit()) {
        return ValueError::new(
            format!("{} has more than one number and unit", quoted(typed)),
            "write one number and one unit, as in `90m`",
        );
    }
    let unit = unit(unit_typed)?;
    let Some(nanos) = scaled(number, unit.nanos) else {
        return ValueError::new(
            format!("{} is not a whole number", quoted(typed)),
            format!("write a whole number and one unit. {UNITS_KNOWN}"),
        );
    };
    let length = u64::try_from(nanos).map_or(Duration::MAX, Duration::from_nanos);
    if number.contains('.') {
        return ValueError::new(
            format!("{} is not a whole number", quoted(typed)),
            format!("write `{}`", duration_text(length)),
        );
    }
    Ok(length)
}

/// Parses a count per unit or per duration: `4/min`, `100/1h`, `5/week`.
pub(crate) fn rate(typed: &str) -> Result<Rate, ValueError> {
    let Some((count, per)) = typed.split_once('/') else {
        let number: String = typed.chars().take_while(char::is_ascii_digit).collect();
        let period = typed[number.len()..].trim().to_ascii_lowercase();
        let number = if number.is_empty() { "10" } else { &number };
        let help = match PERIODS.iter().find(|(names, _)| names.contains(&&*period)) {
            Some((_, unit)) => format!("write `{number}/{unit}`"),
            None => format!("write `{number}/s` for a second, or as in `4/min`, `100/1h`, `5/week`"),
        };
        return ValueError::new(format!("the rate {} has no slash and period", quoted(typed)), help);
    };
    let (count, per) = (count.trim(), per.trim());
    if per.is_empty() {
        let is_number = !count.is_empty() && count.len() < 20 && count.bytes().all(|b| b.is_ascii_digit());
        let count = if is_number { count } else { "10" };
        return ValueError::new(
            format!("the rate {} has no unit after the slash", quoted(typed)),
            format!("write `{count}/s` for a second. {UNITS_KNOWN}"),
        );
    }
    let starts_with_number = per.starts_with(|c: char| c.is_ascii_digit() || c == '-');
    let period = if starts_with_number { duration(per)? } else { Duration::from_nanos(unit(per)?.nanos) };
    if count.is_empty() {
        return ValueError::new(
            format!("the rate {} has no number before the slash", quoted(typed)),
            "write a whole number before the slash, as in `4/min`",
        );
    }
    if !count.bytes().all(|b| b.is_ascii_digit()) {
        let message = format!("{} is {}", quoted(count), not_whole(count));
        // nginx writes `10r/s`.
        let number = count.strip_suffix('r').unwrap_or(count);
        return ValueError::new(
            message,
            match whole_rate(number, period) {
                Some(rate) => format!("write `{}`", rate_text(rate)),
                None => "write a whole number before the slash, as in `4/min`".to_owned(),
            },
        );
    }
    let Ok(count) = count.parse::<u64>() else { return too_fast(typed) };
    match Rate::new(count, period) {
        Ok(rate) => Ok(rate),
        Err(LimitError::RateZero) => ValueError::new(
            format!("the rate {} would deny every request", quoted(typed)),
            "write at least `1/366d`",
        ),
        Err(LimitError::PeriodOutOfRange(_)) => ValueError::new(
            format!("the period of {} is out of range", quoted(typed)),
            "write a period from 1ms to 366d after the slash",
        ),
        Err(_) => too_fast(typed),
    }
}

fn too_fast<T>(typed: &str) -> Result<T, ValueError> {
    ValueError::new(
        format!("the rate {} is too high", quoted(typed)),
        format!("write at most {}/s", Rate::MAX_PER_SECOND),
    )
}

/// Converts a decimal rate to whole numbers: `0.5` per second is `1/2s`.
fn whole_rate(count: &str, period: Duration) -> Option<Rate> {
    const SCALE: u64 = 1_000_000;
    let millionths = u64::try_from(scaled(count, SCALE)?).ok()?;
    let common = gcd(millionths, SCALE);
    let times = u32::try_from(SCALE / common).ok()?;
    Rate::new(millionths / common, period.checked_mul(times)?).ok()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}

fn unit(typed: &str) -> Result<&'static TimeUnit, ValueError> {
    if let Some(unit) = UNITS.iter().find(|unit| unit.names.contains(&typed)) {
        return Ok(unit);
    }
    let names: Vec<&str> = UNITS.iter().flat_map(|unit| unit.names).copied().collect();
    let help = match nearest(typed, &names) {
        Some(near) => format!("did you mean `{near}`? {UNITS_KNOWN}"),
        None => UNITS_KNOWN.to_owned(),
    };
    ValueError::new(format!("unknown unit of time {}", quoted(typed)), help)
}

/// A decimal number times `scale`, if the product is a whole number far from overflow.
fn scaled(number: &str, scale: u64) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() + fraction.len() > 18 {
        // Larger than any range allows, so the exact value does not matter.
        return fraction.is_empty().then_some(u128::MAX);
    }
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let ten = 10_u128.pow(fraction.len() as u32);
    let product = digits * u128::from(scale);
    product.is_multiple_of(ten).then(|| product / ten)
}

/// Prints a duration with the fewest digits in one unit: `90m`, `1h`, `500ms`.
pub fn duration_text(duration: Duration) -> String {
    let (count, unit) = in_units(duration);
    format!("{count}{}", unit.short)
}

/// Prints a rate: `4/min`, `100/15m`.
pub fn rate_text(rate: Rate) -> String {
    match in_units(rate.period()) {
        (1, unit) => format!("{}/{}", rate.count(), unit.per),
        (count, unit) => format!("{}/{count}{}", rate.count(), unit.short),
    }
}

/// An amount of memory in the largest unit that divides it.
pub(crate) fn bytes_text(bytes: usize) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    unit.map_or(format!("{bytes}B"), |(shift, name)| format!("{}{name}", bytes >> shift))
}

/// The longest unit that divides the duration.
fn in_units(duration: Duration) -> (u128, &'static TimeUnit) {
    let nanos = duration.as_nanos();
    let divides = |unit: &&TimeUnit| nanos > 0 && nanos.is_multiple_of(u128::from(unit.nanos));
    let unit = UNITS.iter().find(divides).unwrap_or(&UNITS[SECOND]);
    (nanos / u128::from(unit.nanos), unit)
}

const SECOND: usize = 4;
