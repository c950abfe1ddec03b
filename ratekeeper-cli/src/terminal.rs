//! The width and the colors of the terminal.

use std::io::{self, IsTerminal};

use ratekeeper_insight::TextStyle;

/// The widest report; longer lines are hard to read.
const WIDTH_MAX: usize = 120;

/// The widest table if stdout is not a terminal.
const TABLE_WIDTH_MAX: usize = 160;

/// Whether the environment allows colors on a terminal.
pub(crate) fn allows_color() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    !is_set("NO_COLOR") && !is_dumb
}

/// Returns the style of reports: the terminal's width, with colors if they are allowed; 80 columns without colors if
/// stdout is not a terminal.
pub(crate) fn text_style() -> TextStyle {
    if !io::stdout().is_terminal() {
        return TextStyle::default();
    }
    let (_, columns) = console::Term::stdout().size();
    TextStyle { width: usize::from(columns).min(WIDTH_MAX), color: allows_color() }
}

/// Returns the width that tables may have.
pub(crate) fn table_width() -> usize {
    match io::stdout().is_terminal() {
        true => usize::from(console::Term::stdout().size().1),
        false => TABLE_WIDTH_MAX,
    }
}
