//! Reports as SVG pictures for pages and slides, readable on light and dark backgrounds.
//!
//! A picture is a table with a plot in each row. All lengths are integers, in tenths of a pixel where whole pixels are
//! too coarse, so the same report is the same bytes on every machine. The size is bounded: so many rows, columns and
//! characters.

use std::fmt::Write as _;
use std::time::Duration;

use ratekeeper::Time;

use crate::chart::time_label;
use crate::histogram::{Columns, mark_ns};
use crate::peak::Peak;
use crate::style::{self, count, short_count};
use crate::tally::Tally;

/// A picture of a report.
pub(crate) struct Picture {
    pub(crate) title: String,
    /// Lines below the title.
    pub(crate) subtitle: Vec<String>,
    /// Header of the first column.
    pub(crate) header: &'static str,
    pub(crate) limit: u32,
    /// The window of the peaks, as text.
    pub(crate) window: String,
    pub(crate) rows: Vec<PictureRow>,
}

/// A row: totals and a plot.
pub(crate) struct PictureRow {
    pub(crate) name: String,
    pub(crate) tally: Tally,
    pub(crate) peak: Option<Peak>,
    pub(crate) plot: Plot,
}

impl PictureRow {
    fn exceeds(&self, limit: u32) -> bool {
        self.peak.is_some_and(|peak| peak.units > u64::from(limit))
    }
}

/// The plot of a row.
pub(crate) enum Plot {
    /// Requests and allowed requests over time. All rows of a picture with such a plot have the same columns.
    OverTime(Columns<2>),
    /// One horizontal bar: the allowed share of the row's requests.
    Share,
}

/// Columns of a plot over time.
pub(crate) const COLUMNS_MAX: usize = 60;
/// Rows of a picture.
pub(crate) const ROWS_MAX: usize = 50;

/// Characters of a title or a subtitle, and of a row's name.
const LINE_CHARS_MAX: usize = 118;
const NAME_CHARS_MAX: usize = 15;

// Positions in pixels.
const WIDTH: u64 = 900;
const MARGIN: u64 = 24;
const PLOT_X: u64 = 168;
const PLOT_WIDTH: u64 = 424;
const ALLOWED_X: u64 = 662;
const DENIED_X: u64 = 726;
const PEAK_X: u64 = 852;
const RIGHT_X: u64 = WIDTH - MARGIN;

/// Height of the row and of its plot.
const TIME_ROW: (u64, u64) = (72, 52);
const SHARE_ROW: (u64, u64) = (40, 14);

/// Colors, with a second set for dark pages.
const CSS: &str = "\
text { font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; font-size: 14px; fill: #1f2328; \
font-variant-numeric: tabular-nums; }
.title { font-size: 18px; font-weight: 600; }
.name { font-weight: 600; }
.small { font-size: 12px; fill: #59636e; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.card { fill: #ffffff; stroke: #d1d9e0; }
.line { stroke: #d1d9e0; }
.grid { stroke: #eaeef2; }
.offered { fill: #c8d0d9; }
.allowed { fill: #1a7f37; }
.over { fill: #cf222e; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.small { fill: #9198a1; }
.card { fill: #0d1117; stroke: #3d444d; }
.line { stroke: #3d444d; }
.grid { stroke: #212830; }
.offered { fill: #4a525c; }
.allowed { fill: #3fb950; }
.over { fill: #ff7b72; }
}
";

/// Draws a picture.
pub(crate) fn draw(picture: &Picture) -> String {
    let rows = &picture.rows[..picture.rows.len().min(ROWS_MAX)];
    let plots = || {
        rows.iter().filter_map(|row| match &row.plot {
            Plot::OverTime(columns) => Some(columns),
            Plot::Share => None,
        })
    };
    let scale = plots().flat_map(|columns| &columns.counts).map(|[all, _]| *all).max().unwrap_or(0);
    let axis = plots().next().filter(|columns| !columns.counts.is_empty());

    let mut body = String::new();
    let mut y = 40;
    text(&mut body, "title", MARGIN, y, &style::name(&picture.title, LINE_CHARS_MAX));
    for line in &picture.subtitle {
        y += 20;
        text(&mut body, "small", MARGIN, y, &style::name(line, LINE_CHARS_MAX));
    }
    y += 36;
    header(&mut body, picture, axis, y);
    y += 12;
    rule(&mut body, y);
    // Rows with a plot over time come first, and the axis is below them.
    for row in rows.iter().filter(|row| matches!(row.plot, Plot::OverTime(_))) {
        draw_row(&mut body, picture, row, y, scale);
        y += TIME_ROW.0;
    }
    if let Some(axis) = axis {
        time_axis(&mut body, axis, y);
        y += 28;
    }
    for row in rows.iter().filter(|row| matches!(row.plot, Plot::Share)) {
        draw_row(&mut body, picture, row, y, scale);
        y += SHARE_ROW.0;
    }
    y += 8;
    rule(&mut body, y);
    y += 24;
    footer(&mut body, picture, axis.map(|columns| (columns.length, scale)), y);
    page(picture, rows, &body, y + 20)
}

/// Wraps the body into an SVG document with a card behind it and a description for screen readers.
fn page(picture: &Picture, rows: &[PictureRow], body: &str, height: u64) -> String {
    let description: Vec<String> = rows.iter().map(|row| describe(picture, row)).collect();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\" aria-labelledby=\"title desc\">\n\
         <title id=\"title\">{}</title>\n<desc id=\"desc\">{}</desc>\n<style>\n{CSS}</style>\n\
         <clipPath id=\"names\"><rect x=\"{MARGIN}\" y=\"0\" width=\"{}\" height=\"{height}\"/></clipPath>\n\
         <rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"8\"/>\n{body}</svg>\n",
        escaped(&style::name(&picture.title, LINE_CHARS_MAX)),
        escaped(&description.join(" ")),
        PLOT_X - MARGIN - 6,
        WIDTH - 1,
        height - 1,
    )
}

fn describe(picture: &Picture, row: &PictureRow) -> String {
    let name = style::name(&row.name, NAME_CHARS_MAX);
    let peak = row.peak.map_or(String::new(), |peak| {
        let (peak, limit) = (count(peak.units), count(u64::from(picture.limit)));
        format!(", peak {peak} in any {}, limit {limit}", picture.window)
    });
    format!("{name}: {} allowed, {} denied{peak}.", count(row.tally.allowed), count(row.tally.denied()))
}

fn header(out: &mut String, picture: &Picture, axis: Option<&Columns<2>>, y: u64) {
    text(out, "small", MARGIN, y, picture.header);
    let per_column = axis.map_or("requests".to_owned(), |columns| {
        format!("requests per {}", ratekeeper_config::duration_text(columns.length))
    });
    text(out, "small", PLOT_X, y, &per_column);
    for (class, label, x) in [("offered", "offered", PLOT_X + 130), ("allowed", "allowed", PLOT_X + 206)] {
        let _ = writeln!(
            out,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{}\" width=\"10\" height=\"10\" rx=\"2\"/>",
            y - 9
        );
        text(out, "small", x + 16, y, label);
    }
    text(out, "small right", ALLOWED_X, y, "allowed");
    text(out, "small right", DENIED_X, y, "denied");
    text(out, "small right", RIGHT_X, y, &format!("peak in any {}", picture.window));
}

fn draw_row(out: &mut String, picture: &Picture, row: &PictureRow, top: u64, scale: u64) {
    let (height, plot_height) = match row.plot {
        Plot::OverTime(_) => TIME_ROW,
        Plot::Share => SHARE_ROW,
    };
    let middle = top + height / 2 + 5;
    let name_y = if matches!(row.plot, Plot::OverTime(_)) { middle - 9 } else { middle };
    let name = escaped(&style::name(&row.name, NAME_CHARS_MAX));
    let _ = writeln!(
        out,
        "<text class=\"name\" x=\"{MARGIN}\" y=\"{name_y}\" clip-path=\"url(#names)\">{name}</text>"
    );
    match row.plot {
        Plot::OverTime(ref columns) => {
            bars(out, columns, scale, top + height, plot_height);
            let wait = format!("max wait {}", style::wait(row.tally.longest_wait));
            text(out, "small", MARGIN, middle + 9, &wait);
        }
        Plot::Share => {
            let y = top + (height - plot_height) / 2;
            for (class, value) in [("offered", row.tally.requests), ("allowed", row.tally.allowed)] {
                let width = tenths(scaled(value, row.tally.requests, PLOT_WIDTH * 10));
                let _ = writeln!(
                    out,
                    "<rect class=\"{class}\" x=\"{PLOT_X}\" y=\"{y}\" width=\"{width}\" height=\"{plot_height}\"/>"
                );
            }
        }
    }
    text(out, "right", ALLOWED_X, middle, &total(row.tally.allowed));
    text(out, "right", DENIED_X, middle, &total(row.tally.denied()));
    let Some(peak) = row.peak else { return text(out, "right", PEAK_X, middle, "-") };
    let at_least = if peak.is_cut { "≥ " } else { "" };
    let shown = format!("{at_least}{} / {}", short_count(peak.units), short_count(u64::from(picture.limit)));
    if row.exceeds(picture.limit) {
        text(out, "right name over", PEAK_X, middle, &shown);
        mark(out, RIGHT_X - 14, middle);
    } else {
        text(out, "right", PEAK_X, middle, &shown);
    }
}

/// Draws two series of bars on one baseline: requests, and over them the allowed ones.
fn bars(out: &mut String, columns: &Columns<2>, scale: u64, baseline: u64, plot_height: u64) {
    let number = columns.counts.len().max(1) as u64;
    let step = PLOT_WIDTH * 10 / number;
    let width = if step >= 30 { step - 10 } else { step };
    for (row, class) in ["offered", "allowed"].into_iter().enumerate() {
        let mut path = String::new();
        for (at, counts) in (0..).zip(&columns.counts) {
            let height = scaled(counts[row], scale, plot_height * 10);
            if height > 0 {
                let (x, width, height) = (tenths(PLOT_X * 10 + at * step), tenths(width), tenths(height));
                let _ = write!(path, "M{x} {baseline}v-{height}h{width}v{height}z");
            }
        }
        if !path.is_empty() {
            let _ = writeln!(out, "<path class=\"{class}\" d=\"{path}\"/>");
        }
    }
    let end = PLOT_X + PLOT_WIDTH;
    let _ = writeln!(
        out,
        "<path class=\"line\" d=\"M{PLOT_X} {0}H{end}\"/>",
        // On half a pixel, a line of one pixel is sharp.
        tenths(baseline * 10 + 5)
    );
}

/// Draws ticks at round times and their labels.
fn time_axis(out: &mut String, columns: &Columns<2>, y: u64) {
    const COLUMNS_PER_LABEL: u64 = 10;
    let column_ns = u64::try_from(columns.length.as_nanos()).unwrap_or(u64::MAX);
    let step = PLOT_WIDTH * 10 / columns.counts.len().max(1) as u64;
    // A label needs about 60 pixels.
    let mark_ns = mark_ns(column_ns, COLUMNS_PER_LABEL.max(600_u64.div_ceil(step.max(1))));
    for at in 0..columns.counts.len() as u64 {
        let time_ns = columns.start_ns.saturating_add(at.saturating_mul(column_ns));
        if time_ns.is_multiple_of(mark_ns) {
            let x = PLOT_X * 10 + at * step;
            let _ = writeln!(out, "<path class=\"line\" d=\"M{} {y}v5\"/>", tenths(x + 5));
            text(out, "small", x / 10, y + 18, &time_label(Time::from_nanos(time_ns), mark_ns));
        }
    }
}

fn footer(out: &mut String, picture: &Picture, column: Option<(Duration, u64)>, y: u64) {
    if let Some((length, requests)) = column {
        let length = ratekeeper_config::duration_text(length);
        let requests = style::counted(requests, "request");
        text(out, "small", MARGIN, y, &format!("Full height of a plot: {requests} in {length}."));
    }
    if picture.rows.iter().any(|row| row.exceeds(picture.limit)) {
        let limit = short_count(u64::from(picture.limit));
        let label = format!("peak above the limit of {limit} in {}", picture.window);
        text(out, "small right", RIGHT_X - 22, y, &label);
        mark(out, RIGHT_X - 14, y);
    }
}

/// Draws a triangle with an exclamation mark; its shape marks the row without the color, too.
fn mark(out: &mut String, x: u64, baseline: u64) {
    let _ = writeln!(
        out,
        "<path class=\"over\" fill-rule=\"evenodd\" d=\"M{} {}l7 12.5h-14zm-1 4v4.5h2v-4.5zm0 5.5v2h2v-2z\"/>",
        x + 7,
        baseline - 11
    );
}

fn rule(out: &mut String, y: u64) {
    let _ = writeln!(out, "<path class=\"grid\" d=\"M{MARGIN} {}H{RIGHT_X}\"/>", tenths(y * 10 + 5));
}

fn text(out: &mut String, class: &str, x: u64, y: u64, content: &str) {
    let _ = writeln!(out, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{}</text>", escaped(content));
}

/// Formats a total; seven digits and more are abbreviated.
fn total(value: u64) -> String {
    if value < 1_000_000 { count(value) } else { short_count(value) }
}

/// Returns `value` of `scale` as a length. A value above zero is at least one pixel long, so it is visible.
fn scaled(value: u64, scale: u64, full: u64) -> u64 {
    if value == 0 {
        return 0;
    }
    let exact = u128::from(value) * u128::from(full) / u128::from(scale.max(value));
    u64::try_from(exact).unwrap_or(full).clamp(10, full)
}

/// Formats tenths of a pixel.
fn tenths(value: u64) -> String {
    match value % 10 {
        0 => format!("{}", value / 10),
        rest => format!("{}.{rest}", value / 10),
    }
}

/// Escapes markup, and replaces characters that XML does not allow.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratekeeper::RetryAfter;

    fn tally(requests: u64, allowed: u64) -> Tally {
        Tally { requests, allowed, units: requests, units_allowed: allowed, longest_wait: RetryAfter::Now }
    }

    fn picture(rows: Vec<PictureRow>) -> Picture {
        Picture {
            title: "Requests allowed".to_owned(),
            subtitle: vec!["trace".to_owned()],
            header: "key",
            limit: 10,
            window: "1m".to_owned(),
            rows,
        }
    }

    fn share_row(name: &str, peak: u64) -> PictureRow {
        PictureRow {
            name: name.to_owned(),
            tally: tally(4, 1),
            peak: Some(Peak { units: peak, ..Peak::default() }),
            plot: Plot::Share,
        }
    }

    #[test]
    fn markup_in_names_is_escaped() {
        let drawn = draw(&picture(vec![share_row("<b a='\"'>&\u{1}\u{ffff}", 1)]));
        assert!(drawn.contains("&lt;b a=&#39;&quot;&#39;&gt;&amp;\u{fffd}\u{fffd}"), "{drawn}");
        assert!(!drawn.contains("<b"), "{drawn}");
    }

    #[test]
    fn only_a_peak_above_the_limit_is_marked() {
        let marks = |peak| draw(&picture(vec![share_row("a", peak)])).matches("class=\"over\"").count();
        // The second mark is in the legend.
        assert_eq!((marks(10), marks(11)), (0, 2));
    }

    #[test]
    fn size_is_bounded() {
        let name = "界".repeat(100_000);
        let counts = vec![[u64::MAX, u64::MAX - 1]; COLUMNS_MAX];
        let row = |at: u64| PictureRow {
            name: name.clone(),
            tally: tally(u64::MAX, at),
            peak: None,
            plot: Plot::OverTime(Columns {
                start_ns: u64::MAX,
                length: Duration::from_nanos(u64::MAX),
                counts: counts.clone(),
            }),
        };
        let drawn = draw(&picture((0..1_000).map(row).collect()));
        assert!(drawn.len() < 300_000, "{}", drawn.len());
    }

    #[test]
    fn small_values_stay_visible_and_none_exceeds_the_plot() {
        assert_eq!(scaled(0, 10, 520), 0);
        assert_eq!(scaled(1, u64::MAX, 520), 10);
        assert_eq!(scaled(10, 10, 520), 520);
        assert_eq!(scaled(u64::MAX, 1, 520), 520);
    }
}
