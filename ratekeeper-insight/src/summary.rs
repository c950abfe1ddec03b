//! Report on one limit: a table of keys and a chart over time.

use std::time::Duration;

use ratekeeper::{Decision, Limit};

use crate::Batch;
use crate::chart::{self, Bars};
use crate::histogram::Histogram;
use crate::look::{self, Ink, Look, count, counted};
use crate::peak::{Most, Peak, Room};
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
    room: Room,
    span: Option<Span>,
    over_time: Histogram<2>,
    has_costs: bool,
    /// Key numbers of the current batch.
    numbers: Vec<Option<u32>>,
}

/// Statistics of one key.
type Row = (Tally, Peak<1>);

/// Total entries of the queues behind the peaks: 64 MB.
pub(crate) const PEAK_ENTRIES_MAX: usize = 4 << 20;
/// Table column of the bar that shows the admitted share of the requests.
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
            room: Room(PEAK_ENTRIES_MAX),
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
        fetch(&self.rows, &self.numbers, |(tally, peak)| tally.asked ^ peak.touch());
        fetch(&self.rows, &self.numbers, |(_, peak)| peak.touch_entries());
        for ((line, decision), number) in batch.lines().iter().zip(decisions).zip(&self.numbers) {
            let (at_ns, cost) = (line.time.as_nanos(), line.cost);
            match number.and_then(|number| self.rows.get_mut(number as usize)) {
                Some((tally, peak)) => {
                    tally.count(cost, decision);
                    if decision.allowed && cost > 0 {
                        peak.admit(at_ns, self.window_ns, cost, [true], &mut self.room);
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
    pub fn report(&self, trace: &str, keys_shown: usize, look: Look) -> String {
        let mut out = String::new();
        let all = self.rows.iter().fold(self.others, |sum, (tally, _)| sum.and(*tally));
        out.push_str(&format!("  limit  {}\n", ratekeeper_config::to_yaml(&self.limit)));
        out.push_str(&format!("  trace  {}\n\n", described(trace, &all, &self.keys, self.span)));
        self.table(&all, keys_shown, look, &mut out);
        if all.asked > 0 {
            let bars = [
                Bars { row: 0, label: "asked", ink: Ink::Faint, scale: 0 },
                Bars { row: 1, label: "admitted", ink: Ink::Green, scale: 0 },
            ];
            chart::print(look, "requests over time", &self.over_time, &bars, &mut out);
        }
        out
    }

    fn table(&self, all: &Tally, keys_shown: usize, look: Look, out: &mut String) {
        let window = look::length(self.limit.window());
        let peak_header = format!("peak in any {window}");
        let mut header = vec!["key", "asked", "admitted", "denied", "", "worst wait", &peak_header];
        if self.has_costs {
            header.insert(5, "units admitted");
        }
        let mut table = Table::new(&header);
        let mut by_denials: Vec<usize> = (0..self.rows.len()).collect();
        // The sort is stable: ties keep the order in which the keys first appeared.
        by_denials.sort_by_key(|number| std::cmp::Reverse(self.rows[*number].0.denied()));
        for number in by_denials.iter().take(keys_shown) {
            let (tally, peak) = &self.rows[*number];
            let name = cell(look::name(self.keys.name(*number), KEY_WIDTH_MAX));
            table.row(self.row(name, tally, Some(peak.most(0))));
        }
        let hidden = &by_denials[keys_shown.min(by_denials.len())..];
        if !hidden.is_empty() {
            let (tally, most) = self.sum(hidden);
            let name = format!("{} more", counted(hidden.len() as u64, "key"));
            table.row(self.row(cell(name).ink(Ink::Faint), &tally, Some(most)));
        }
        if self.keys.is_full() {
            table.row(self.row(cell("other keys").ink(Ink::Faint), &self.others, None));
        }
        let (_, most) = self.sum(&by_denials);
        table.row(self.row(cell("all").ink(Ink::Bold), all, Some(most)));
        table.print(look, SHARE_COLUMN, out);
        self.notes(most, &window, look, out);
    }

    fn sum(&self, numbers: &[usize]) -> (Tally, Most) {
        numbers.iter().fold((Tally::default(), Most::default()), |(tally, most), number| {
            let (one, peak) = &self.rows[*number];
            (tally.and(*one), most.max(peak.most(0)))
        })
    }

    fn row(&self, name: Cell, tally: &Tally, most: Option<Most>) -> Vec<Cell> {
        let mut row = vec![
            name,
            cell(count(tally.asked)),
            cell(count(tally.admitted)),
            cell(count(tally.denied())),
            cell(share(tally.admitted, tally.asked)),
            cell(look::wait(tally.worst_wait)),
            most.map_or(cell("-"), |most| peak(most, self.limit.limit())),
        ];
        if self.has_costs {
            let units = format!("{} of {}", count(tally.units_admitted), count(tally.units_asked));
            row.insert(5, cell(units));
        }
        row
    }

    fn notes(&self, most: Most, window: &str, look: Look, out: &mut String) {
        let mut notes = peak_notes(most, &self.limit, window);
        if self.keys.is_full() {
            notes.push(format!(
                "other keys: only the first {} are followed one by one, and none of their peaks",
                counted(self.keys.len().min(KEYS_MAX) as u64, "key")
            ));
        }
        print_notes(&notes, look, out);
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
    let more = if keys.is_full() { " and more" } else { "" };
    let mut text = format!(
        "{name}\n         {} of {}{more}",
        counted(all.asked, "request"),
        counted(keys.len() as u64, "key")
    );
    if let Some(Span { first, last }) = span {
        let length = last.saturating_since(first);
        if length > Duration::ZERO {
            text.push_str(&format!(" in {}", look::length(length)));
        }
        if !chart::is_relative(last) {
            let at = look::civil(first);
            text.push_str(&format!(
                ", from {} {:02}:{:02}:{:02} UTC",
                at.date(),
                at.hour(),
                at.minute(),
                at.second()
            ));
        }
    }
    text
}

/// Returns the admitted share as a bar.
pub(crate) fn share(admitted: u64, asked: u64) -> String {
    let filled = (u128::from(admitted) * u128::from(SHARE_CELLS) + u128::from(asked / 2))
        .checked_div(u128::from(asked))
        .map_or(0, |cells| usize::try_from(cells).unwrap_or(0));
    let cells = SHARE_CELLS as usize;
    format!("{}{}", "█".repeat(filled), "░".repeat(cells - filled.min(cells)))
}

/// Returns a peak beside the limit.
pub(crate) fn peak(most: Most, limit: u32) -> Cell {
    let at_least = if most.is_cut { "≥ " } else { "" };
    let text = format!("{at_least}{} / {}", count(most.units), count(u64::from(limit)));
    if most.units > u64::from(limit) { cell(text + " !").ink(Ink::Red) } else { cell(text + "  ") }
}

/// Returns notes on the peaks: above the limit, inexact, or out of order.
pub(crate) fn peak_notes(most: Most, limit: &Limit, window: &str) -> Vec<String> {
    let mut notes = Vec::new();
    if most.units > u64::from(limit.limit()) {
        notes.push(format!(
            "! more than the limit of {} passed within {window}",
            count(u64::from(limit.limit()))
        ));
    }
    if most.is_cut {
        notes.push("≥ too many requests in one window to remember each: the peak may be higher".to_owned());
    }
    if most.is_late {
        notes.push(
            "lines are out of order: in the peaks, a late one counts at its key's newest time".to_owned(),
        );
    }
    notes
}

pub(crate) fn print_notes(notes: &[String], look: Look, out: &mut String) {
    for note in notes {
        for line in look::wrapped(note, look.width.saturating_sub(2)) {
            out.push_str(&format!("  {}\n", look.paint(Ink::Faint, &line)));
        }
    }
}
