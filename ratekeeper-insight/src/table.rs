//! Plain-text tables.

use crate::style::{Ink, TextStyle, width};

/// A table. The first column is left-aligned, the others right-aligned.
pub(crate) struct Table {
    rows: Vec<Vec<Cell>>,
}

/// A cell and its color.
pub(crate) struct Cell {
    text: String,
    ink: Ink,
}

pub(crate) fn cell(text: impl Into<String>) -> Cell {
    Cell { text: text.into(), ink: Ink::Plain }
}

impl Cell {
    pub(crate) fn ink(mut self, ink: Ink) -> Cell {
        self.ink = ink;
        self
    }
}

impl Table {
    pub(crate) fn new(header: &[&str]) -> Table {
        Table { rows: vec![header.iter().map(|name| cell(*name).ink(Ink::Faint)).collect()] }
    }

    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// Prints the table, without the column `spare` if it would exceed the report's width.
    pub(crate) fn print(&self, style: TextStyle, spare: usize, out: &mut String) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let mut widths: Vec<usize> = (0..columns).map(|at| self.column_width(at)).collect();
        if widths.iter().map(|width| width + GAP.len()).sum::<usize>() > style.width {
            widths[spare] = 0;
        }
        for row in &self.rows {
            let mut line = String::new();
            for (at, (cell, column)) in row.iter().zip(&widths).enumerate() {
                if *column == 0 {
                    continue;
                }
                let padding = " ".repeat(column - width(&cell.text));
                let text = style.paint(cell.ink, &cell.text);
                line.push_str(GAP);
                line.push_str(&if at == 0 { text + &padding } else { padding + &text });
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }

    fn column_width(&self, at: usize) -> usize {
        self.rows.iter().filter_map(|row| row.get(at)).map(|cell| width(&cell.text)).max().unwrap_or(0)
    }
}

const GAP: &str = "  ";
