//! Report on one limit: a table of keys and a chart over time.

use std::time::Duration;

use ratekeeper::{Decision, Limit};

use crate::Batch;
use crate::chart::{self, Bars};
use crate::histogram::Histogram;
use crate::peak::{EntryBudget, Peak, PeakTracker};
use crate::style::{self, Ink, TextStyle, count, counted};
use crate::svg::{self, Picture, PictureRow, Plot};
use crate::table::{Cell, Table, cell};
use crate::tally::{KEYS_MAX, Keys, Span, Tally, fetch};

/// Aggregates decisions as they arrive, in bounded memory.
#[derive(Debug)]
pub struct Summary {
    limit: Limit,
    window_ns: u64,
    keys: Keys,
    rows: Vec<Row>,
    others: Tally,
    budget: EntryBudget,
    span: Option<Span>,
    over_time: Histogram<2>,
    has_costs: bool,
    /// Key numbers of the current batch.
    numbers: Vec<Option<u32>>,
}

/// Statistics of one key.
type Row = (Tally, PeakTracker<1>);

/// Total entries of the queues behind the peaks: 64 MB.
pub(crate) const PEAK_ENTRIES_MAX: usize = 4 << 20;
/// Table column of the bar that shows the allowed share of the requests.
pub(crate) const SHARE_COLUMN: usize = 4;
/// Width of that bar in cells.
const SHARE_CELLS: u64 = 8;

impl Summary {
    /// Creates an empty summary.
    pub fn new(limit: &Limit) -> Summary {
        Summary {
            limit: limit.clone(),
            window_ns: window_ns(limit),
            keys: Keys::default(),
            rows: Vec::new(),
            others: Tally::default(),
            budget: EntryBudget(PEAK_ENTRIES_MAX),
            span: None,
            over_time: Histogram::default(),
            has_costs: false,
            numbers: Vec::new(),
        }
    }

    /// Counts the decisions of a batch.
    #[inline]
    pub fn count(&mut self, batch: &Batch, decisions: &[Decision]) {
        self.keys.numbers(batch, &mut self.numbers);
        self.rows.resize_with(self.keys.len(), Row::default);
        fetch(&self.rows, &self.numbers, |(tally, peak)| tally.requests ^ peak.touch());
        fetch(&self.rows, &self.numbers, |(_, peak)| peak.touch_entries());
        for ((line, decision), number) in batch.lines().iter().zip(decisions).zip(&self.numbers) {
            let (at_ns, cost) = (line.time.as_nanos(), line.cost);
            match number.and_then(|number| self.rows.get_mut(number as usize)) {
                Some((tally, peak)) => {
                    tally.count(cost, decision);
                    if decision.allowed && cost > 0 {
                        peak.add(at_ns, self.window_ns, cost, [true], &mut self.budget);
                    }
                }
                None => self.others.count(cost, decision),
            }
            self.has_costs |= cost != 1;
            Span::include(&mut self.span, line.time);
            self.over_time.add(at_ns, [1, u64::from(decision.allowed)]);
        }
    }

    /// Returns the report: `keys_shown` keys, those with the most denials first, and the totals.
    pub fn report(&self, trace: &str, keys_shown: usize, style: TextStyle) -> String {
        let mut out = String::new();
        let all = self.all();
        out.push_str(&format!("  limit  {}\n", ratekeeper_config::to_yaml(&self.limit)));
        out.push_str(&format!("  trace  {}\n\n", described(trace, &all, &self.keys, self.span)));
        self.table(&all, keys_shown, style, &mut out);
        if all.requests > 0 {
            let bars = [
                Bars { row: 0, label: "requests", ink: Ink::Faint, scale: 0 },
                Bars { row: 1, label: "allowed", ink: Ink::Green, scale: 0 },
            ];
            chart::print(style, "requests over time", &self.over_time, &bars, &mut out);
        }
        out
    }

    /// Returns the report as an SVG picture: all requests over time, then the totals of `keys_shown` keys, those with
    /// the most denials first.
    pub fn svg(&self, trace: &str, keys_shown: usize) -> String {
        // One row is for all requests, one for the keys that are not shown.
        let keys_shown = keys_shown.min(svg::ROWS_MAX - 2);
        let all = self.all();
        let by_denials = self.by_denials();
        let share_row = |name: String, tally, peak| PictureRow { name, tally, peak, plot: Plot::Share };
        let mut rows = vec![PictureRow {
            name: "all requests".to_owned(),
            tally: all,
            peak: Some(self.sum(&by_denials).1),
            plot: Plot::OverTime(self.over_time.columns(svg::COLUMNS_MAX)),
        }];
        let (shown, hidden) = by_denials.split_at(keys_shown.min(by_denials.len()));
        rows.extend(shown.iter().map(|number| {
            let (tally, tracker) = &self.rows[*number];
            share_row(self.keys.name(*number).to_owned(), *tally, Some(tracker.peak(0)))
        }));
        if !hidden.is_empty() || self.keys.is_full() {
            let (tally, peak) = self.sum(hidden);
            rows.push(share_row("other keys".to_owned(), tally.and(self.others), Some(peak)));
        }
        svg::draw(&Picture {
            title: "Requests allowed by one limit".to_owned(),
            subtitle: vec![
                format!("Limit: {}", ratekeeper_config::to_yaml(&self.limit)),
                format!("Trace: {trace}, {}.", trace_size(&all, &self.keys, self.span)),
            ],
            header: "key",
            limit: self.limit.limit(),
            window: style::length(self.limit.window()),
            rows,
        })
    }

    /// Returns the sum over all keys.
    fn all(&self) -> Tally {
        self.rows.iter().fold(self.others, |sum, (tally, _)| sum.and(*tally))
    }

    /// Returns the numbers of the keys, those with the most denials first.
    fn by_denials(&self) -> Vec<usize> {
        let mut numbers: Vec<usize> = (0..self.rows.len()).collect();
        // The sort is stable: ties keep the order in which the keys first appeared.
        numbers.sort_by_key(|number| std::cmp::Reverse(self.rows[*number].0.denied()));
        numbers
    }

    fn table(&self, all: &Tally, keys_shown: usize, style: TextStyle, out: &mut String) {
        let window = style::length(self.limit.window());
        let peak_header = format!("peak in any {window}");
        let mut header = vec!["key", "requests", "allowed", "denied", "", "max wait", &peak_header];
        if self.has_costs {
            header.insert(5, "units allowed");
        }
        let mut table = Table::new(&header);
        let by_denials = self.by_denials();
        for number in by_denials.iter().take(keys_shown) {
            let (tally, tracker) = &self.rows[*number];
            let name = cell(style::name(self.keys.name(*number), KEY_WIDTH_MAX));
            table.row(self.row(name, tally, Some(tracker.peak(0))));
        }
        let hidden = &by_denials[keys_shown.min(by_denials.len())..];
        if !hidden.is_empty() {
            let (tally, highest) = self.sum(hidden);
            let name = format!("{} more", counted(hidden.len() as u64, "key"));
            table.row(self.row(cell(name).ink(Ink::Faint), &tally, Some(highest)));
        }
        if self.keys.is_full() {
            table.row(self.row(cell("other keys").ink(Ink::Faint), &self.others, None));
        }
        let (_, highest) = self.sum(&by_denials);
        table.row(self.row(cell("all").ink(Ink::Bold), all, Some(highest)));
        table.print(style, SHARE_COLUMN, out);
        self.notes(highest, &window, style, out);
    }

    fn sum(&self, numbers: &[usize]) -> (Tally, Peak) {
        numbers.iter().fold((Tally::default(), Peak::default()), |(tally, highest), number| {
            let (one, tracker) = &self.rows[*number];
            (tally.and(*one), highest.max(tracker.peak(0)))
        })
    }

    fn row(&self, name: Cell, tally: &Tally, highest: Option<Peak>) -> Vec<Cell> {
        let mut row = vec![
            name,
            cell(count(tally.requests)),
            cell(count(tally.allowed)),
            cell(count(tally.denied())),
            cell(share(tally.allowed, tally.requests)),
            cell(style::wait(tally.longest_wait)),
            highest.map_or(cell("-"), |highest| peak(highest, self.limit.limit())),
        ];
        if self.has_costs {
            let units = format!("{} of {}", count(tally.units_allowed), count(tally.units));
            row.insert(5, cell(units));
        }
        row
    }

    fn notes(&self, highest: Peak, window: &str, style: TextStyle, out: &mut String) {
        let mut notes = peak_notes(highest, &self.limit, window);
        if self.keys.is_full() {
            notes.push(format!(
                "other keys: only the first {} have their own statistics, and only theirs have peaks",
                counted(self.keys.len().min(KEYS_MAX) as u64, "key")
            ));
        }
        print_notes(&notes, style, out);
    }
}

/// Width of a key in terminal cells.
const KEY_WIDTH_MAX: usize = 32;

/// Returns the window in nanoseconds, saturated at 584 years.
pub(crate) fn window_ns(limit: &Limit) -> u64 {
    u64::try_from(limit.window().as_nanos()).unwrap_or(u64::MAX)
}

/// Describes a trace in two lines: its name, then its size and time range.
pub(crate) fn described(name: &str, all: &Tally, keys: &Keys, span: Option<Span>) -> String {
    let mut text = format!("{name}\n         {}", trace_size(all, keys, span));
    if let Some(Span { first, last }) = span
        && !chart::is_relative(last)
    {
        let at = style::civil(first);
        text.push_str(&format!(
            ", from {} {:02}:{:02}:{:02} UTC",
            at.date(),
            at.hour(),
            at.minute(),
            at.second()
        ));
    }
    text
}

/// Describes the size of a trace: requests, keys and length.
pub(crate) fn trace_size(all: &Tally, keys: &Keys, span: Option<Span>) -> String {
    let more = if keys.is_full() { " and more" } else { "" };
    let size = format!("{} of {}{more}", counted(all.requests, "request"), counted(keys.len() as u64, "key"));
    match span.map(|span| span.last.saturating_since(span.first)) {
        Some(length) if length > Duration::ZERO => format!("{size} in {}", style::length(length)),
        _ => size,
    }
}

/// Returns the allowed share as a bar.
pub(crate) fn share(allowed: u64, requests: u64) -> String {
    let filled = (u128::from(allowed) * u128::from(SHARE_CELLS) + u128::from(requests / 2))
        .checked_div(u128::from(requests))
        .map_or(0, |cells| usize::try_from(cells).unwrap_or(0));
    let cells = SHARE_CELLS as usize;
    format!("{}{}", "█".repeat(filled), "░".repeat(cells - filled.min(cells)))
}

/// Returns a peak beside the limit.
pub(crate) fn peak(highest: Peak, limit: u32) -> Cell {
    let at_least = if highest.is_cut { "≥ " } else { "" };
    let text = format!("{at_least}{} / {}", count(highest.units), count(u64::from(limit)));
    if highest.units > u64::from(limit) { cell(text + " !").ink(Ink::Red) } else { cell(text + "  ") }
}

/// Returns notes on the peaks: above the limit, inexact, or out of order.
pub(crate) fn peak_notes(highest: Peak, limit: &Limit, window: &str) -> Vec<String> {
    let mut notes = Vec::new();
    if highest.units > u64::from(limit.limit()) {
        notes.push(format!(
            "! more than the limit of {} was allowed within {window}",
            count(u64::from(limit.limit()))
        ));
    }
    if highest.is_cut {
        notes.push("≥ too many requests in one window to track each: the peak may be higher".to_owned());
    }
    if highest.is_late {
        notes.push("lines are out of order: peaks count a late line at its key's newest time".to_owned());
    }
    notes
}

pub(crate) fn print_notes(notes: &[String], style: TextStyle, out: &mut String) {
    for note in notes {
        for line in style::wrapped(note, style.width.saturating_sub(2)) {
            out.push_str(&format!("  {}\n", style.paint(Ink::Faint, &line)));
        }
    }
}
