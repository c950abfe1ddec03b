//! Formatting for the terminal: widths, colors and readable numbers.

use std::time::Duration;

use ratekeeper::{RetryAfter, Time};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Width and color of a report.
#[derive(Clone, Copy, Debug)]
pub struct TextStyle {
    /// Width in terminal columns.
    pub width: usize,
    /// Whether to use colors.
    pub color: bool,
}

impl Default for TextStyle {
    /// 80 columns without colors, as for a file.
    fn default() -> TextStyle {
        TextStyle { width: 80, color: false }
    }
}

/// A color or weight, applied only if colors are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ink {
    Plain,
    Bold,
    Faint,
    Red,
    Green,
    Yellow,
    Blue,
    Magenta,
    Cyan,
}

impl TextStyle {
    pub(crate) fn paint(self, ink: Ink, text: &str) -> String {
        let code = match ink {
            Ink::Plain => return text.to_owned(),
            Ink::Bold => "1",
            Ink::Faint => "2",
            Ink::Red => "31",
            Ink::Green => "32",
            Ink::Yellow => "33",
            Ink::Blue => "34",
            Ink::Magenta => "35",
            Ink::Cyan => "36",
        };
        if self.color && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Returns the number of terminal cells of a text.
pub(crate) fn width(text: &str) -> usize {
    text.width()
}

/// Truncates a name to at most `width_max` cells and replaces control characters, so that none reach the terminal.
pub(crate) fn name(text: &str, width_max: usize) -> String {
    if text.is_empty() {
        return "(none)".to_owned();
    }
    let mut shown = String::new();
    let mut left = width_max;
    for c in text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }) {
        let cells = c.width().unwrap_or(0);
        if cells > left {
            // Drop characters until the ellipsis fits.
            while width(&shown) >= width_max {
                shown.pop();
            }
            shown.push('…');
            return shown;
        }
        left -= cells;
        shown.push(c);
    }
    shown
}

/// Wraps a text at spaces into lines of at most `width_max` cells, but not within `backquotes`.
pub(crate) fn wrapped(text: &str, width_max: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut is_quoted = false;
    let words = text.split(|c| {
        is_quoted ^= c == '`';
        c == ' ' && !is_quoted
    });
    for word in words {
        match lines.last_mut() {
            Some(line) if width(line) + 1 + width(word) <= width_max => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Groups digits: `1,234,567`.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Abbreviates, rounded down: `999`, `12k`, `3M`. At most five cells below 10^19.
pub(crate) fn short_count(value: u64) -> String {
    let mut value = value;
    for unit in ["", "k", "M", "G", "T"] {
        if value < 10_000 {
            return format!("{value}{unit}");
        }
        value /= 1_000;
    }
    format!("{value}P")
}

/// Adds a noun: `1 request`, `2 requests`.
pub(crate) fn counted(value: u64, what: &str) -> String {
    format!("{} {what}{}", count(value), if value == 1 { "" } else { "s" })
}

/// Formats the longest wait until a retry, rounded up; `-` if no request was denied.
pub(crate) fn wait(wait: RetryAfter) -> String {
    match wait {
        RetryAfter::Now => "-".to_owned(),
        RetryAfter::After(wait) => length(wait),
        RetryAfter::Never => "never".to_owned(),
    }
}

/// Formats a duration in one or two units, rounded up.
pub(crate) fn length(length: Duration) -> String {
    let tenths = length.as_nanos().div_ceil(100_000_000);
    let secs = length.as_nanos().div_ceil(1_000_000_000);
    let two = |first: u128, unit: &str, second: u128, finer: &str| match second {
        0 => format!("{first}{unit}"),
        _ => format!("{first}{unit} {second}{finer}"),
    };
    if length < Duration::from_secs(1) {
        format!("{}ms", length.as_nanos().div_ceil(1_000_000))
    } else if tenths < 600 {
        let rest = tenths % 10;
        if rest == 0 { format!("{}s", tenths / 10) } else { format!("{}.{rest}s", tenths / 10) }
    } else {
        match secs {
            0..3_600 => two(secs / 60, "m", secs % 60, "s"),
            3_600..86_400 => two(secs / 3_600, "h", secs % 3_600 / 60, "m"),
            _ => two(secs / 86_400, "d", secs % 86_400 / 3_600, "h"),
        }
    }
}

/// Returns the date and time in UTC; every [`Time`] has one.
pub(crate) fn civil(time: Time) -> jiff::civil::DateTime {
    let timestamp = jiff::Timestamp::from_nanosecond(i128::from(time.as_nanos())).unwrap_or_default();
    jiff::tz::Offset::UTC.to_datetime(timestamp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_short_and_rounded_up() {
        for (nanos, text) in [
            (1, "1ms"),
            (999_000_000, "999ms"),
            (1_000_000_000, "1s"),
            (1_000_000_001, "1.1s"),
            (59_900_000_000, "59.9s"),
            (60_000_000_000, "1m"),
            (61_000_000_000, "1m 1s"),
            (3_600_000_000_000, "1h"),
            (5_430_000_000_000, "1h 30m"),
            (86_400_000_000_000, "1d"),
            (90_000_000_000_000, "1d 1h"),
        ] {
            assert_eq!(length(Duration::from_nanos(nanos)), text);
        }
    }

    #[test]
    fn digits_are_grouped_by_thousands() {
        assert_eq!(
            ["0", "999", "1,000", "1,234,567"],
            [0, 999, 1_000, 1_234_567].map(count).each_ref().map(|s| &**s)
        );
    }

    #[test]
    fn large_numbers_are_shortened() {
        for (value, text) in
            [(0, "0"), (9_999, "9999"), (10_000, "10k"), (9_999_999, "9999k"), (10_000_000, "10M")]
        {
            assert_eq!(short_count(value), text);
        }
        assert_eq!(short_count(u64::MAX), "18446P");
    }

    #[test]
    fn names_are_truncated_and_control_characters_replaced() {
        assert_eq!(name("alice", 8), "alice");
        assert_eq!(name("alice-in-wonderland", 8), "alice-i…");
        assert_eq!(name("日本語日本語", 8), "日本語…");
        assert_eq!(name("a\x1b[31mb", 20), "a\u{fffd}[31mb");
        assert_eq!(name("", 8), "(none)");
    }

    #[test]
    fn text_wraps_between_words_but_not_in_backquotes() {
        assert_eq!(wrapped("one two three", 8), ["one two", "three"]);
        assert_eq!(wrapped("one `two three` four", 8), ["one", "`two three`", "four"]);
        assert_eq!(wrapped("incomprehensible", 8), ["incomprehensible"]);
    }
}
