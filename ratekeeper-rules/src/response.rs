//! Responses: rate limit headers and, for a denial, status and body.
//!
//! No HTTP library's types are used here: the middleware, the gateway, the Envoy API and the forward-auth API each
//! send the same names and values. Nothing here reads a clock or draws a random number.
//!
//! | start here | what it is |
//! |---|---|
//! | [`LimitDecision`] | a limit and its decision on the request |
//! | [`LimitResponse`] | a reusable buffer with the headers, status and body of a response |
//! | [`ExhaustedLimit`] | a concurrency limit without free permits, and its [denial](LimitResponse::write_exhausted) |
//! | [`LimitText`] | the text of a limit's responses that is the same for every decision |
//! | [`HeaderSet`] | which headers: those of the IETF draft, or widely used older ones |
//! | [`merge_header`] | appends our list members to an upstream's headers |
//! | [`DenialResponse`] | a custom status, body and content type for denials |
//!
//! # What the numbers mean
//! - `r`, the available quota, is the remaining budget of the decision, never more.
//! - `t`, the effective window, is the time in which at most `r` should be spent. For a limit that denied, it is the
//!   wait until the same request is allowed. For a limit that allowed, it is the time until the key has its full
//!   budget: in a fixed window the rest of the window; for other algorithms, which restore some budget sooner, a
//!   conservative value. If waiting does not help, there is no `t`.
//! - `q` and `w` are the limit as configured. For a bucket, `w` is the time from empty to full: `q` in any `w` is
//!   then what the bucket sustains.
//! - `Retry-After` is the longest `t` of the limits that denied, at least 1. It is omitted if one of them never
//!   allows the request.
//! - Every wait is rounded up to whole seconds, and no number has more than fifteen digits.
//!
//! # Behind a proxy
//! An upstream's response may already contain rate limit headers. List headers are [`merge_header`]. Of a set of
//! single-value headers, keep all of the upstream's and omit ours: a mixture would not describe any limit.
//!
//! ```
//! use std::time::Duration;
//! use ratekeeper_core::{Algorithm, WindowAlign, Limit, Time};
//! use ratekeeper_rules::response::{LimitResponse, LimitDecision, HeaderSet, PolicyName, ResponseContext};
//!
//! let limit = Limit::fixed_window(2, Duration::from_secs(60), WindowAlign::Clock)?;
//! let Limit::FixedWindow(window) = &limit else { unreachable!() };
//! let (name, mut state, mut response) = (PolicyName::new("per-user")?, window.fresh(), LimitResponse::default());
//! let context = ResponseContext::at(Time::from_secs(1_700_000_010));
//!
//! let decision = window.decide(&mut state, context.now, 2);
//! response.write(HeaderSet::default(), &[LimitDecision::new(&name, &limit, decision)], &context);
//! assert_eq!(response.status(), None);
//! assert_eq!(response.header("ratelimit"), Some(r#""per-user";r=0;t=30"#));
//! assert_eq!(response.header("ratelimit-policy"), Some(r#""per-user";q=2;w=60"#));
//!
//! let decision = window.decide(&mut state, context.now, 1);
//! response.write(HeaderSet::default(), &[LimitDecision::new(&name, &limit, decision)], &context);
//! assert_eq!(response.status(), Some(429));
//! assert_eq!(response.header("retry-after"), Some("30"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod concurrency;
mod denial;
mod headers;
mod limit_text;
mod merge;
mod name;
mod rejection;
mod status;
mod text;
mod wait;

use ratekeeper_core::{Decision, Limit, Time};

use denial::Denial;
use text::push_integer;

pub use concurrency::ExhaustedLimit;
pub use denial::{DenialResponse, DenialResponseError};
pub use headers::HeaderSet;
pub use limit_text::LimitText;
pub use merge::{MergedHeader, merge_header};
pub use name::{NameError, PolicyName};
pub use rejection::problem;
pub use status::{GrpcCode, ResponseStatus};
pub use text::INTEGER_MAX;
pub use wait::{Jitter, add_jitter};

/// A limit and its decision on a request.
#[derive(Clone, Copy, Debug)]
pub struct LimitDecision<'a> {
    /// The name that responses report.
    pub name: &'a PolicyName,
    /// The limit as configured.
    pub limit: &'a Limit,
    /// The limit's decision.
    pub decision: Decision,
    /// What the request cost.
    pub cost: u32,
    /// Distinguishes the keys of a limit for a client that has several. It is sent as it is, so it must not reveal
    /// the key: use a truncated keyed hash.
    pub partition: Option<&'a [u8]>,
    /// Replaces the default response if this limit denies.
    pub custom: Option<&'a DenialResponse>,
    /// Text prepared for this name, limit and custom response, which saves writing it.
    pub text: Option<&'a LimitText>,
}

impl<'a> LimitDecision<'a> {
    /// A limit and its decision on a request of cost 1, without a partition and with the default response.
    pub fn new(name: &'a PolicyName, limit: &'a Limit, decision: Decision) -> LimitDecision<'a> {
        LimitDecision { name, limit, decision, cost: 1, partition: None, custom: None, text: None }
    }
}

/// What a response depends on besides the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseContext {
    /// The instant of the decision: some headers state the instant at which a wait ends.
    pub now: Time,
    /// Whether the limits were decided while their store was unavailable. A denial is then not caused by the client.
    pub is_degraded: bool,
    /// Lengthens waits randomly, if set.
    pub jitter: Option<Jitter>,
}

impl ResponseContext {
    /// The default situation at this instant.
    pub fn at(now: Time) -> ResponseContext {
        ResponseContext { now, is_degraded: false, jitter: None }
    }
}

/// A header of an [`LimitResponse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header<'a> {
    /// The name in lower case, as HTTP/2 requires.
    pub name: &'static str,
    /// Always a valid field value: printable ASCII.
    pub value: &'a str,
    /// Whether it is a list, to be [`merge_header`] with an upstream's.
    pub is_list: bool,
}

/// The headers, status and body of a response. Reuse one for several requests to avoid allocations.
#[derive(Clone, Debug, Default)]
pub struct LimitResponse {
    /// The values of all headers, one after the other, and then the body.
    text: String,
    headers: Vec<HeaderEntry>,
    /// The status of a denial.
    status: Option<u16>,
}

/// A header whose value is in the text.
#[derive(Clone, Debug)]
struct HeaderEntry {
    name: &'static str,
    /// Where its value ends and the next one begins.
    end: usize,
    is_list: bool,
}

impl LimitResponse {
    /// Writes the response to a request that was checked against these limits, in their order, over the previous one.
    ///
    /// A request is allowed if all its limits allow it. Without limits, the response is empty.
    pub fn write(&mut self, set: HeaderSet, limits: &[LimitDecision], context: &ResponseContext) {
        self.text.clear();
        self.headers.clear();
        self.status = None;
        let Some(binding) = binding(limits) else { return };

        for (number, line) in set.lines().iter().enumerate() {
            if line.push(&mut self.text, number, limits, binding, context) {
                self.end_header(line.name, line.is_list());
            }
        }
        // If any limit denies, the binding one does.
        if !binding.decision.allowed {
            self.deny(limits, binding, context);
        }
    }

    fn deny(&mut self, limits: &[LimitDecision], binding: &LimitDecision, context: &ResponseContext) {
        let retry_after = wait::retry_after(limits, context);
        if let Some(wait) = retry_after {
            push_integer(&mut self.text, wait);
            self.end_header("retry-after", false);
        }
        // A cache must not store a 429, and no other denial is useful to store either.
        self.text.push_str("no-store");
        self.end_header("cache-control", false);
        let denial = Denial::new(limits, binding, context, retry_after);
        if let Some(content_type) = denial.content_type() {
            self.text.push_str(content_type);
            self.end_header("content-type", false);
        }
        self.status = Some(denial.status());
        denial.push_body(&mut self.text);
    }

    fn end_header(&mut self, name: &'static str, is_list: bool) {
        self.headers.push(HeaderEntry { name, end: self.text.len(), is_list });
    }

    /// The status of a denial. None if the request is allowed: its response then has its own status.
    pub fn status(&self) -> Option<u16> {
        self.status
    }

    /// The values of all headers, in order, and then the body, with nothing in between.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The headers to send, for allowed and denied requests.
    pub fn headers(&self) -> impl Iterator<Item = Header<'_>> {
        let mut start = 0;
        self.headers.iter().map(move |&HeaderEntry { name, end, is_list }| {
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

/// The binding limit: the one that denies, with the longest wait if several do, else the one with the least
/// remaining. The same choice as in [`Decision::and`].
fn binding<'a, 'b>(limits: &'b [LimitDecision<'a>]) -> Option<&'b LimitDecision<'a>> {
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

    use ratekeeper_core::{RetryAfter, WindowAlign};

    use super::*;

    #[test]
    fn rewriting_an_answer_reuses_its_memory() {
        let name = PolicyName::new("per-user").unwrap();
        let limit = Limit::fixed_window(100, Duration::from_secs(60), WindowAlign::Clock).unwrap();
        let decision = Decision {
            allowed: false,
            limit: 100,
            remaining: 0,
            retry_after: RetryAfter::After(Duration::from_secs(60)),
            reset_after: Duration::from_secs(60),
            delay: Duration::ZERO,
        };
        let context = ResponseContext::at(Time::from_secs(1_700_000_000));
        let mut response = LimitResponse::default();
        response.write(HeaderSet::default(), &[LimitDecision::new(&name, &limit, decision)], &context);
        let memory = (response.text.as_ptr(), response.headers.as_ptr());

        let allowed = Decision { allowed: true, retry_after: RetryAfter::Now, ..decision };
        response.write(HeaderSet::default(), &[LimitDecision::new(&name, &limit, allowed)], &context);
        assert_eq!((response.text.as_ptr(), response.headers.as_ptr()), memory);
        assert_eq!((response.status(), response.body(), response.headers().count()), (None, "", 2));

        // A failure policy allowed the request without a store: what remains is unknown, and not said.
        let unknown = Decision { remaining: Decision::UNKNOWN, reset_after: Duration::ZERO, ..allowed };
        for (set, headers) in [
            ("ietf", vec![r#"ratelimit-policy: "per-user";q=100;w=60"#]),
            ("draft6", vec!["ratelimit-limit: 100", "ratelimit-policy: 100;w=60"]),
            ("github", vec!["x-ratelimit-limit: 100", "x-ratelimit-resource: per-user"]),
            (
                "spring",
                vec![
                    "x-ratelimit-remaining: -1",
                    "x-ratelimit-replenish-rate: 1",
                    "x-ratelimit-burst-capacity: 100",
                    "x-ratelimit-requested-tokens: 1",
                ],
            ),
        ] {
            let set = HeaderSet::named(set).unwrap();
            response.write(set, &[LimitDecision::new(&name, &limit, unknown)], &context);
            let written: Vec<_> = response.headers().map(|it| format!("{}: {}", it.name, it.value)).collect();
            assert_eq!(written, headers, "{set:?}");
        }
        let both = [unknown, allowed].map(|decision| LimitDecision::new(&name, &limit, decision));
        response.write(HeaderSet::default(), &both, &context);
        assert_eq!(response.header("ratelimit"), Some(r#""per-user";r=0;t=60"#));

        response.write(HeaderSet::default(), &[], &context);
        assert_eq!((response.status(), response.body(), response.headers().count()), (None, "", 0));
    }
}
