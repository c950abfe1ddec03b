//! What stdout is.

use std::io::{self, IsTerminal};

use tollgate_sim::Look;

/// The widest report: beyond it the eye loses the line.
const WIDTH_MAX: usize = 120;

/// As wide as the terminal and in colour, or plain and 80 wide if stdout is none.
pub(crate) fn look() -> Look {
    if !io::stdout().is_terminal() {
        return Look::default();
    }
    let (_, columns) = console::Term::stdout().size();
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    Look { width: usize::from(columns).min(WIDTH_MAX), color: !is_set("NO_COLOR") && !is_dumb }
}
