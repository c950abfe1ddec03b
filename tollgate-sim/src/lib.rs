//! Replays a trace of requests through Tollgate's production limiter, on a clock that the trace cranks.
//!
//! Trace -> request -> decision -> a line of JSON, or a count in a report:
//!
//! | a file of this crate | its step |
//! |---|---|
//! | `trace`, `instant`, `batch` | CSV -> [`Request`]s, a few at a time |
//! | `replay` | request -> the limiter's decision, by a [`Simulator`] |
//! | `jsonl` | decision -> a line of JSON, to the byte |
//! | `summary` | decisions of one limit -> a report by key |
//! | `compare` | the same requests through all five algorithms -> a report side by side |
//! | `tally`, `peak`, `histogram` | what reports count, each in bounded memory |
//! | `look`, `table`, `chart` | reports as text |
//!
//! There is no network here and no wall clock: the same trace and limit always give the same bytes.
//!
//! ```
//! use tollgate_sim::{Jsonl, Simulator, Trace, replay};
//!
//! let limit = tollgate_config::parse_limit("fixed_window: { limit: 1, window: 60s }")?;
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
mod look;
mod peak;
mod replay;
mod summary;
mod table;
mod tally;
mod trace;

pub use batch::Batch;
pub use compare::{CompareError, Comparison};
pub use jsonl::{Jsonl, line};
pub use look::Look;
pub use replay::{ReplayError, Simulator, replay, replay_batches};
pub use summary::Summary;
pub use trace::{Request, Trace, TraceError};

/// The text of a cell as a message repeats it: short, and with nothing that could command a terminal.
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
