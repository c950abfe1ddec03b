//! Detects the width and color support of stdout.

use std::io::{self, IsTerminal};

use ratekeeper_insight::TextStyle;

/// The widest report; longer lines are hard to read.
const WIDTH_MAX: usize = 120;

/// Returns the terminal's width, with color; 80 columns without color if stdout is not a terminal.
pub(crate) fn text_style() -> TextStyle {
    if !io::stdout().is_terminal() {
        return TextStyle::default();
    }
    let (_, columns) = console::Term::stdout().size();
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    TextStyle { width: usize::from(columns).min(WIDTH_MAX), color: !is_set("NO_COLOR") && !is_dumb }
}
