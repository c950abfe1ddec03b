//! Whole numbers, durations and rates: the one grammar that is parsed and printed.

use std::ops::RangeInclusive;
use std::time::Duration;

use ratekeeper_core::{LimitError, Rate, WINDOW_MAX, WINDOW_MIN};

use crate::error::quoted;
use crate::nearest;

/// What is wrong with a value, and what to write instead.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) what: String,
    pub(crate) instead: String,
}

impl Fault {
    fn new<T>(what: String, instead: impl Into<String>) -> Result<T, Fault> {
        Err(Fault { what, instead: instead.into() })
    }
}

/// A unit of time: its length, its name after a number and after a slash, and all accepted names.
struct Unit {
    nanos: u64,
    short: &'static str,
    per: &'static str,
    spellings: &'static [&'static str],
}

/// Longest first. The two shortest exist so that every limit can be printed.
const UNITS: [Unit; 8] = [
    Unit { nanos: 604_800_000_000_000, short: "w", per: "week", spellings: &["w", "week", "weeks"] },
    Unit { nanos: 86_400_000_000_000, short: "d", per: "day", spellings: &["d", "day", "days"] },
    Unit { nanos: 3_600_000_000_000, short: "h", per: "h", spellings: &["h", "hour", "hours"] },
    Unit { nanos: 60_000_000_000, short: "m", per: "min", spellings: &["m", "min", "minute", "minutes"] },
    Unit { nanos: 1_000_000_000, short: "s", per: "s", spellings: &["s", "sec", "second", "seconds"] },
    Unit { nanos: 1_000_000, short: "ms", per: "ms", spellings: &["ms"] },
    Unit { nanos: 1_000, short: "us", per: "us", spellings: &["us"] },
    Unit { nanos: 1, short: "ns", per: "ns", spellings: &["ns"] },
];

const UNITS_KNOWN: &str = "the units are ms, s, m, h, d and w";

/// Parses a whole number from 1 to `max`. Zero would deny everything.
pub(crate) fn whole(name: &str, typed: &str, max: u32) -> Result<u32, Fault> {
    number(name, typed, 1..=max).map_err(|fault| match typed.parse() {
        Ok(0_u32) => Fault { what: format!("{name} is 0, so nothing would ever pass"), ..fault },
        _ => fault,
    })
}

/// Parses a whole number in a range.
pub(crate) fn number(name: &str, typed: &str, range: RangeInclusive<u32>) -> Result<u32, Fault> {
    let instead = format!("write a whole number from {} to {}", range.start(), range.end());
    if typed.is_empty() {
        return Fault::new(format!("{name} is empty"), instead);
    }
    if !typed.bytes().all(|b| b.is_ascii_digit()) {
        return Fault::new(format!("{name} is {}, which is {}", quoted(typed), not_whole(typed)), instead);
    }
    match typed.parse::<u32>() {
        Ok(value) if range.contains(&value) => Ok(value),
        Ok(value) if value < *range.start() => {
            Fault::new(format!("{name} is {}, which is too small", quoted(typed)), instead)
        }
        _ => Fault::new(format!("{name} is {}, which is too large", quoted(typed)), instead),
    }
}

/// Parses a percentage: `20%`.
pub(crate) fn percent(name: &str, typed: &str) -> Result<u32, Fault> {
    let number = typed.strip_suffix('%').map(|digits| digits.parse::<u32>());
    match number {
        Some(Ok(percent)) if percent <= 100 => Ok(percent),
        _ => Fault::new(
            format!("{name} is {}, which is not a share of 0% to 100%", quoted(typed)),
            format!("write a whole number of percent, as in `{name}: 20%`"),
        ),
    }
}

/// Parses an amount of memory: `64MiB`, `1GiB`.
pub(crate) fn bytes(typed: &str) -> Result<usize, Fault> {
    const UNITS: [(&str, usize); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("B", 1)];
    let number = typed.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = typed[number.len()..].trim();
    let unit = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, size)| *size);
    let size = unit.and_then(|unit| number.parse::<usize>().ok()?.checked_mul(unit)).filter(|size| *size > 0);
    match size {
        Some(size) => Ok(size),
        None => Fault::new(
            format!("{} is not an amount of memory", quoted(typed)),
            "write a whole number and a unit, as in `64MiB`; the units are KiB, MiB and GiB",
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

/// Parses the length of a window, in the range of limits.
pub(crate) fn window(typed: &str) -> Result<Duration, Fault> {
    length("a window", typed, WINDOW_MIN, WINDOW_MAX)
}

/// Parses a duration in a range.
pub(crate) fn length(name: &str, typed: &str, from: Duration, to: Duration) -> Result<Duration, Fault> {
    let length = duration(typed)?;
    if length < from || length > to {
        let what = if length < from { "short" } else { "long" };
        return Fault::new(
            format!("{name} of {} is too {what}", quoted(typed)),
            format!("write {} to {}", duration_text(from), duration_text(to)),
        );
    }
    Ok(length)
}

/// Parses a number and a unit: `500ms`, `60s`, `15m`, `1h`, `1d`, `1w`.
pub(crate) fn duration(typed: &str) -> Result<Duration, Fault> {
    let trimmed = typed.trim();
    let number_end = trimmed.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
    let (number, unit_typed) = (&trimmed[..number_end], trimmed[number_end..].trim_start());
    let example = if number.is_empty() { "60" } else { number };
    if number.is_empty() {
        let what = if trimmed.starts_with('-') { "is negative" } else { "has no number" };
        return Fault::new(
            format!("{} {what}", quoted(typed)),
            "write a whole number and a unit, as in `60s`",
        );
    }
    if unit_typed.is_empty() {
        return Fault::new(
            format!("{} has no unit", quoted(typed)),
            format!("write `{example}s` if seconds are meant; {UNITS_KNOWN}"),
        );
    }
    if unit_typed.bytes().any(|b| b.is_ascii_digit()) {
        return Fault::new(
            format!("{} is more than a number and a unit", quoted(typed)),
            "write one number and one unit, as in `90m`",
        );
    }
    let unit = unit(unit_typed)?;
    let Some(nanos) = scaled(number, unit.nanos) else {
        return Fault::new(
            format!("{} is not a whole number of a unit", quoted(typed)),
            format!("write a whole number and one unit; {UNITS_KNOWN}"),
        );
    };
    let length = u64::try_from(nanos).map_or(Duration::MAX, Duration::from_nanos);
    if number.contains('.') {
        return Fault::new(
            format!("{} is not a whole number of a unit", quoted(typed)),
            format!("write `{}`", duration_text(length)),
        );
    }
    Ok(length)
}

/// Parses a count per unit or per duration: `4/min`, `100/1h`, `5/week`.
pub(crate) fn rate(typed: &str) -> Result<Rate, Fault> {
    let Some((count, per)) = typed.split_once('/') else {
        let number: String = typed.chars().take_while(char::is_ascii_digit).collect();
        let number = if number.is_empty() { "10" } else { &number };
        return Fault::new(
            format!("{} does not say in what time", quoted(typed)),
            format!("write `{number}/s` if a second is meant; or as in `4/min`, `100/1h`, `5/week`"),
        );
    };
    let (count, per) = (count.trim(), per.trim());
    if per.is_empty() {
        let is_number = !count.is_empty() && count.len() < 20 && count.bytes().all(|b| b.is_ascii_digit());
        let count = if is_number { count } else { "10" };
        return Fault::new(
            format!("{} has nothing after the slash", quoted(typed)),
            format!("write `{count}/s` if a second is meant; {UNITS_KNOWN}"),
        );
    }
    let starts_with_number = per.starts_with(|c: char| c.is_ascii_digit() || c == '-');
    let period = if starts_with_number { duration(per)? } else { Duration::from_nanos(unit(per)?.nanos) };
    if count.is_empty() {
        return Fault::new(
            format!("{} has nothing before the slash", quoted(typed)),
            "write a whole number before the slash, as in `4/min`",
        );
    }
    if !count.bytes().all(|b| b.is_ascii_digit()) {
        let what = format!("{} is {}", quoted(count), not_whole(count));
        return Fault::new(
            what,
            match whole_rate(count, period) {
                Some(rate) => format!("write `{}`", rate_text(rate)),
                None => "write a whole number before the slash, as in `4/min`".to_owned(),
            },
        );
    }
    let Ok(count) = count.parse::<u64>() else { return too_fast(typed) };
    match Rate::new(count, period) {
        Ok(rate) => Ok(rate),
        Err(LimitError::RateZero) => {
            Fault::new(format!("{} never lets anything in", quoted(typed)), "write at least `1/366d`")
        }
        Err(LimitError::PeriodOutOfRange(_)) => Fault::new(
            format!("the time in {} is out of range", quoted(typed)),
            "write a time from 1ms to 366d after the slash",
        ),
        Err(_) => too_fast(typed),
    }
}

fn too_fast<T>(typed: &str) -> Result<T, Fault> {
    Fault::new(format!("{} is too fast", quoted(typed)), format!("write at most {}/s", Rate::MAX_PER_SECOND))
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

fn unit(typed: &str) -> Result<&'static Unit, Fault> {
    if let Some(unit) = UNITS.iter().find(|unit| unit.spellings.contains(&typed)) {
        return Ok(unit);
    }
    let spellings: Vec<&str> = UNITS.iter().flat_map(|unit| unit.spellings).copied().collect();
    let instead = match nearest(typed, &spellings) {
        Some(near) => format!("write `{near}`; {UNITS_KNOWN}"),
        None => UNITS_KNOWN.to_owned(),
    };
    Fault::new(format!("{} is not a unit of time", quoted(typed)), instead)
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

/// The longest unit that divides the duration.
fn in_units(duration: Duration) -> (u128, &'static Unit) {
    let nanos = duration.as_nanos();
    let divides = |unit: &&Unit| nanos > 0 && nanos.is_multiple_of(u128::from(unit.nanos));
    let unit = UNITS.iter().find(divides).unwrap_or(&UNITS[SECOND]);
    (nanos / u128::from(unit.nanos), unit)
}

const SECOND: usize = 4;
