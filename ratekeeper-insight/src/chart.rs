//! Bar charts of counts over time, as text.

use std::time::Duration;

use ratekeeper::Time;

use crate::histogram::{Histogram, mark_ns};
use crate::style::{Ink, TextStyle, civil, short_count, width};

/// One row of bars: the histogram row that it shows, and a scale number that rows with a common scale share.
pub(crate) struct Bars {
    pub(crate) row: usize,
    pub(crate) label: &'static str,
    pub(crate) ink: Ink,
    pub(crate) scale: usize,
}

/// Text lines per bar. Two lines give sixteen heights, enough to see the shape of a burst.
const LINES: usize = 2;
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Widths of the labels left of the bars and of the maxima right of them.
const LABEL_WIDTH: usize = 18;
const MAX_WIDTH: usize = 7;

/// Returns the number of bar columns that fit the report's width, at least 10.
fn columns_max(style: TextStyle) -> usize {
    style.width.saturating_sub(LABEL_WIDTH + MAX_WIDTH).max(10)
}

pub(crate) fn print<const ROWS: usize>(
    style: TextStyle,
    what: &str,
    histogram: &Histogram<ROWS>,
    bars: &[Bars],
    out: &mut String,
) {
    let columns = histogram.columns(columns_max(style));
    out.push_str(&heading(style, what, columns.length));
    let max_of = |row: usize| columns.counts.iter().map(|counts| counts[row]).max().unwrap_or(0);
    for bar in bars {
        let scale = bars.iter().filter(|other| other.scale == bar.scale).map(|other| max_of(other.row)).max();
        let heights: Vec<u64> = columns
            .counts
            .iter()
            .map(|counts| height(counts[bar.row], scale.unwrap_or(0), LINES as u64 * 8))
            .collect();
        for line in (0..LINES).rev() {
            let cells: String = heights
                .iter()
                .map(|height| EIGHTHS[height.saturating_sub(line as u64 * 8).min(8) as usize])
                .collect();
            let text = if line == 0 {
                let gap = columns_max(style).saturating_sub(columns.counts.len()) + MAX_WIDTH;
                let (label, cells) = (bar.label, style.paint(bar.ink, &cells));
                format!("  {label:<0$}{cells}{1:>gap$}", LABEL_WIDTH - 2, short_count(max_of(bar.row)))
            } else {
                format!("{:LABEL_WIDTH$}{}", "", style.paint(bar.ink, cells.trim_end()))
            };
            out.push_str(text.trim_end());
            out.push('\n');
        }
    }
    axis(style, columns.start_ns, columns.length, columns.counts.len(), out);
}

/// Returns the heading: what the bars show, the length of a column, and the meaning of the numbers at the right.
fn heading(style: TextStyle, what: &str, column: Duration) -> String {
    let column = ratekeeper_config::duration_text(column);
    let (left, right) = (format!("{what}, {column} per column"), format!("max in {column}"));
    let gap = style.width.saturating_sub(2 + width(&left));
    format!("\n  {}\n", style.paint(Ink::Faint, &format!("{left}{right:>gap$}")))
}

/// Returns a value's height in eighths of a line. A value above zero is at least one eighth high, so it is visible.
fn height(value: u64, max: u64, eighths_max: u64) -> u64 {
    if value == 0 {
        return 0;
    }
    let exact = (u128::from(value) * u128::from(eighths_max)).div_ceil(u128::from(max.max(1)));
    u64::try_from(exact).unwrap_or(eighths_max).min(eighths_max)
}

/// Appends the axis with ticks at round times, and a line with the labels of these times.
fn axis(style: TextStyle, start_ns: u64, column: Duration, columns: usize, out: &mut String) {
    const LABEL_MAX: u64 = 8;
    let column_ns = column.as_nanos() as u64;
    let step_ns = mark_ns(column_ns, LABEL_MAX + 2);
    let (mut line, mut labels) = (String::new(), String::new());
    for at in 0..columns {
        let time_ns = start_ns.saturating_add(at as u64 * column_ns);
        let is_mark = time_ns.is_multiple_of(step_ns);
        line.push(if is_mark { '┬' } else { '─' });
        if is_mark && (at == 0 || width(&labels) < at) {
            labels.push_str(&" ".repeat(at - width(&labels)));
            labels.push_str(&time_label(Time::from_nanos(time_ns), step_ns));
        }
    }
    let indent = " ".repeat(LABEL_WIDTH);
    for text in [line, labels] {
        if !text.trim().is_empty() {
            out.push_str(&format!("{indent}{}\n", style.paint(Ink::Faint, &text)));
        }
    }
}

/// Returns true for times within 366 days of the epoch, which are shown as offsets from the start of the trace.
pub(crate) fn is_relative(last: Time) -> bool {
    last < Time::from_secs(366 * 86_400)
}

/// Formats an instant at an axis whose ticks are `step_ns` apart.
pub(crate) fn time_label(time: Time, step_ns: u64) -> String {
    const MINUTE_NS: u64 = 60_000_000_000;
    const DAY_NS: u64 = 1_440 * MINUTE_NS;
    if is_relative(time) {
        return ratekeeper_config::duration_text(Duration::from_nanos(time.as_nanos()));
    }
    let at = civil(time);
    if step_ns < 1_000_000_000 {
        format!("{:02}.{:03}s", at.second(), at.subsec_nanosecond() / 1_000_000)
    } else if step_ns < MINUTE_NS {
        format!("{:02}:{:02}:{:02}", at.hour(), at.minute(), at.second())
    } else if step_ns < DAY_NS {
        format!("{:02}:{:02}", at.hour(), at.minute())
    } else if step_ns < 28 * DAY_NS {
        format!("{:02}-{:02}", at.month(), at.day())
    } else {
        format!("{}-{:02}", at.year(), at.month())
    }
}
