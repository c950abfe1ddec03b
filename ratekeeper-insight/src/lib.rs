//! Replays a trace of requests through Ratekeeper's production limiter, on a manual clock set from the trace.
//!
//! Trace -> requests -> decisions -> lines of JSON, or counts in a report:
//!
//! | module | step |
//! |---|---|
//! | `trace`, `instant`, `batch` | CSV -> [`Request`]s, in small batches |
//! | `replay` | request -> the limiter's decision, with a [`Simulator`] |
//! | `sorted` | requests in the order of their times, for reports |
//! | `jsonl` | decision -> a line of JSON, reproducible byte for byte |
//! | `summary` | decisions of one limit -> a report per key |
//! | `compare` | the same requests through all five algorithms -> a side-by-side report |
//! | `tally`, `peak`, `histogram` | the statistics behind the reports, each in bounded memory |
//! | `style`, `table`, `chart` | reports as text |
//! | `svg` | reports as pictures |
//!
//! This crate uses neither the network nor the wall clock: the same trace and limit always produce the same bytes.
//!
//! ```
//! use ratekeeper_insight::{Jsonl, Simulator, Trace, replay};
//!
//! let limit = ratekeeper_config::parse_limit("fixed_window: { limit: 1, window: 60s }")?;
//! let mut trace = Trace::open("example", "time,key\n0.5,alice\n1.5,alice\n".as_bytes())?;
//! let (simulator, mut out) = (Simulator::new(limit, 1000)?, Vec::new());
//! let mut lines = Jsonl::new(&mut out);
//! replay(&mut trace, |request| simulator.decide(request), |request, decision| lines.write(request, decision))?;
//! lines.finish()?;
//! assert_eq!(
//!     String::from_utf8(out)?.lines().last(),
//!     Some(r#"{"time":"1.5","key":"alice","cost":1,"allowed":false,"limit":1,"remaining":0,"retry_after":58.5,"reset_after":58.5,"delay":0}"#)
//! );
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batch;
mod chart;
mod compare;
mod histogram;
mod instant;
mod jsonl;
mod peak;
mod replay;
mod sorted;
mod style;
mod summary;
mod svg;
mod table;
mod tally;
mod trace;

pub use batch::Batch;
pub use compare::{CompareError, Comparison};
pub use jsonl::{Jsonl, line};
pub use replay::{ReplayError, Simulator, replay, replay_batches};
pub use sorted::{SORTED_WITHIN, replay_sorted};
pub use style::TextStyle;
pub use summary::Summary;
pub use trace::{Request, Trace, TraceError};

/// Quotes a cell for an error message: at most 40 characters, control characters replaced so that none reach the
/// terminal.
pub(crate) fn quoted(cell: &[u8]) -> String {
    const CHARS_MAX: usize = 40;
    let text = String::from_utf8_lossy(cell);
    let mut shown: String =
        text.chars().take(CHARS_MAX).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        shown.push('…');
    }
    format!("`{shown}`")
}
