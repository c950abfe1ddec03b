//! What a client is told about the limits of its request, as headers and, if it is denied, as status and body.
//!
//! There are no types of any HTTP library here: the middleware, the gateway, the Envoy service and the forward-auth
//! door each send the same names and values in their own way. Nothing here reads a clock or draws a random number.
//!
//! | start here | what it is |
//! |---|---|
//! | [`Applied`] | a limit and what it said to the request |
//! | [`Answer`] | a buffer that is written anew for each request, and read as headers, status and body |
//! | [`Full`] | a rule whose slots are all taken, and [what is told](Answer::write_full) then |
//! | [`HeaderSet`] | which headers: the IETF's draft, or those that clients know from elsewhere |
//! | [`merged`] | our members appended to an upstream's own headers |
//! | [`Custom`] | a status, body and content type of one's own |
//!
//! # What the numbers mean
//! - `r`, the available quota, is what the decision says, never more.
//! - `t`, the effective window, is the time in which no more than `r` should be spent. For a limit that denied it is
//!   the wait until it admits the same request. For one that allowed it is the time until the key is as good as new:
//!   in a fixed window the rest of the window; for the others, of which something comes back sooner, on the safe side.
//!   Where waiting does not help there is no `t`.
//! - `q` and `w` are the limit as configured, `w` for a bucket being the time from empty to full: `q` in any `w` is
//!   then what a bucket sustains.
//! - `Retry-After` is the longest `t` of the limits that denied, at least 1. There is none if one of them will never
//!   admit the request.
//! - Every wait is rounded up to whole seconds, and no number has more than fifteen digits.
//!
//! # Behind a proxy
//! A response that an upstream sent may have such headers already. List headers are [`merged`]. Of a set of single
//! values the upstream's are to be kept, all of them, and ours left out: a mixture would describe no limit at all.
//!
//! ```
//! use std::time::Duration;
//! use tollgate_core::{Algorithm, Align, Limit, Time};
//! use tollgate_rules::answer::{Answer, Applied, HeaderSet, PolicyName, Situation};
//!
//! let limit = Limit::fixed_window(2, Duration::from_secs(60), Align::Clock)?;
//! let Limit::FixedWindow(window) = &limit else { unreachable!() };
//! let (name, mut state, mut answer) = (PolicyName::new("per-user")?, window.fresh(), Answer::default());
//! let situation = Situation::at(Time::from_secs(1_700_000_010));
//!
//! let decision = window.decide(&mut state, situation.now, 2);
//! answer.write(HeaderSet::default(), &[Applied::new(&name, &limit, decision)], &situation);
//! assert_eq!(answer.status(), None);
//! assert_eq!(answer.header("ratelimit"), Some(r#""per-user";r=0;t=30"#));
//! assert_eq!(answer.header("ratelimit-policy"), Some(r#""per-user";q=2;w=60"#));
//!
//! let decision = window.decide(&mut state, situation.now, 1);
//! answer.write(HeaderSet::default(), &[Applied::new(&name, &limit, decision)], &situation);
//! assert_eq!(answer.status(), Some(429));
//! assert_eq!(answer.header("retry-after"), Some("30"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod denial;
mod headers;
mod merge;
mod name;
mod problem;
mod slots;
mod text;
mod wait;

use tollgate_core::{Decision, Limit, Time};

use denial::Denial;
use text::push_integer;

pub use denial::{Custom, CustomError};
pub use headers::HeaderSet;
pub use merge::{Merged, merged};
pub use name::{NameError, PolicyName};
pub use problem::problem;
pub use slots::Full;
pub use text::INTEGER_MAX;
pub use wait::{Jitter, lengthened};

/// A limit and what it said to a request.
#[derive(Clone, Copy, Debug)]
pub struct Applied<'a> {
    /// What clients call the limit.
    pub name: &'a PolicyName,
    /// The limit as configured.
    pub limit: &'a Limit,
    /// What it decided.
    pub decision: Decision,
    /// What the request cost.
    pub cost: u32,
    /// Tells apart the keys of a limit, for a client that has several. It goes out as it is, so it must not say whose
    /// key it is: a keyed hash, cut short.
    pub partition: Option<&'a [u8]>,
    /// What to tell those whom this limit denies, in place of the usual.
    pub custom: Option<&'a Custom>,
}

impl<'a> Applied<'a> {
    /// A limit and its decision on a request of cost 1, with no partition and the usual answer.
    pub fn new(name: &'a PolicyName, limit: &'a Limit, decision: Decision) -> Applied<'a> {
        Applied { name, limit, decision, cost: 1, partition: None, custom: None }
    }
}

/// What an answer depends on beside the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// The instant of the decision: some headers name the instant at which a wait ends.
    pub now: Time,
    /// Whether the limits were decided without their store. A denial is then not the client's fault.
    pub is_degraded: bool,
    /// Lengthens waits, if it is wanted.
    pub jitter: Option<Jitter>,
}

impl Situation {
    /// The usual situation, at this instant.
    pub fn at(now: Time) -> Situation {
        Situation { now, is_degraded: false, jitter: None }
    }
}

/// A header of an [`Answer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header<'a> {
    /// In lower case, as HTTP/2 wants it.
    pub name: &'static str,
    /// Always a valid field value: printable ASCII.
    pub value: &'a str,
    /// Whether it is a list, to be [`merged`] with that of an upstream.
    pub is_list: bool,
}

/// What a client is told. Keep one and write it anew for each request: then nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The values of all headers, one after the other, and then the body.
    text: String,
    headers: Vec<Written>,
    /// Of a denial.
    status: Option<u16>,
}

/// A header whose value is in the text.
#[derive(Clone, Debug)]
struct Written {
    name: &'static str,
    /// Where its value ends, and that of the next one begins.
    end: usize,
    is_list: bool,
}

impl Answer {
    /// Writes the answer to a request that met these limits, in their order, over what was there before.
    ///
    /// A request is allowed if all its limits allow it. One that met none is told nothing.
    pub fn write(&mut self, set: HeaderSet, limits: &[Applied], situation: &Situation) {
        self.text.clear();
        self.headers.clear();
        self.status = None;
        let Some(binding) = binding(limits) else { return };

        for line in set.lines() {
            line.push(&mut self.text, limits, binding, situation);
            self.end_header(line.name, line.is_list());
        }
        // If one denies, that is the one that binds.
        if !binding.decision.allowed {
            self.deny(limits, binding, situation);
        }
    }

    fn deny(&mut self, limits: &[Applied], binding: &Applied, situation: &Situation) {
        let retry_after = wait::retry_after(limits, situation);
        if let Some(wait) = retry_after {
            push_integer(&mut self.text, wait);
            self.end_header("retry-after", false);
        }
        // A cache must not keep a 429, and would do no better to keep any other denial.
        self.text.push_str("no-store");
        self.end_header("cache-control", false);
        let denial = Denial::new(limits, binding, situation, retry_after);
        if let Some(content_type) = denial.content_type() {
            self.text.push_str(content_type);
            self.end_header("content-type", false);
        }
        self.status = Some(denial.status());
        denial.push_body(&mut self.text);
    }

    fn end_header(&mut self, name: &'static str, is_list: bool) {
        self.headers.push(Written { name, end: self.text.len(), is_list });
    }

    /// The status of a denial. None if the request is allowed: then its response has a status already.
    pub fn status(&self) -> Option<u16> {
        self.status
    }

    /// The headers to send, whether it is allowed or not.
    pub fn headers(&self) -> impl Iterator<Item = Header<'_>> {
        let mut start = 0;
        self.headers.iter().map(move |&Written { name, end, is_list }| {
            let value = &self.text[start..end];
            start = end;
            Header { name, value, is_list }
        })
    }

    /// The value of the header with this name, in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers().find(|header| header.name == name).map(|header| header.value)
    }

    /// The body of a denial; empty if the request is allowed.
    pub fn body(&self) -> &str {
        &self.text[self.headers.last().map_or(0, |last| last.end)..]
    }
}

/// The limit that a client feels: the one that denies, with the longest wait if several do, else the one with the least
/// remaining. The same that [`Decision::and`] tells.
fn binding<'a, 'b>(limits: &'b [Applied<'a>]) -> Option<&'b Applied<'a>> {
    limits.iter().reduce(|first, second| {
        let (one, other) = (&first.decision, &second.decision);
        let second_binds = match (one.allowed, other.allowed) {
            (true, true) => other.remaining < one.remaining,
            (false, false) => other.retry_after > one.retry_after,
            (one_allows, _) => one_allows,
        };
        if second_binds { second } else { first }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tollgate_core::{Align, RetryAfter};

    use super::*;

    #[test]
    fn an_answer_is_written_over_the_last_one_in_the_same_memory() {
        let name = PolicyName::new("per-user").unwrap();
        let limit = Limit::fixed_window(100, Duration::from_secs(60), Align::Clock).unwrap();
        let decision = Decision {
            allowed: false,
            limit: 100,
            remaining: 0,
            retry_after: RetryAfter::After(Duration::from_secs(60)),
            reset_after: Duration::from_secs(60),
            delay: Duration::ZERO,
        };
        let situation = Situation::at(Time::from_secs(1_700_000_000));
        let mut answer = Answer::default();
        answer.write(HeaderSet::default(), &[Applied::new(&name, &limit, decision)], &situation);
        let memory = (answer.text.as_ptr(), answer.headers.as_ptr());

        let allowed = Decision { allowed: true, retry_after: RetryAfter::Now, ..decision };
        answer.write(HeaderSet::default(), &[Applied::new(&name, &limit, allowed)], &situation);
        assert_eq!((answer.text.as_ptr(), answer.headers.as_ptr()), memory);
        assert_eq!((answer.status(), answer.body(), answer.headers().count()), (None, "", 2));

        answer.write(HeaderSet::default(), &[], &situation);
        assert_eq!((answer.status(), answer.body(), answer.headers().count()), (None, "", 0));
    }
}
