//! Status and body of a denial.

use std::time::Duration;

use ratekeeper_core::{Limit, Rate, RetryAfter};

use super::text::{push_escaped, push_integer};
use super::{LimitDecision, LimitText, PolicyName, ResponseContext, ResponseStatus};

/// A problem type, as the draft of the `RateLimit` fields registers it for RFC 9457.
pub(super) struct Problem {
    /// The fragment of its type URI.
    kind: &'static str,
    title: &'static str,
    pub(super) status: ResponseStatus,
}

pub(super) const QUOTA_EXCEEDED: Problem =
    Problem { kind: "quota-exceeded", title: "Quota Exceeded", status: ResponseStatus::TooManyRequests };

pub(super) const REDUCED_CAPACITY: Problem = Problem {
    kind: "temporary-reduced-capacity",
    title: "Temporary Reduced Capacity",
    status: ResponseStatus::ServiceUnavailable,
};

impl Problem {
    /// Appends the body up to the `detail` text.
    pub(super) fn push_head(&self, text: &mut String, status: u16) {
        for piece in [r#"{"type":""#, PROBLEM_TYPES, self.kind, r#"","title":""#, self.title] {
            text.push_str(piece);
        }
        text.push_str(r#"","status":"#);
        push_integer(text, u64::from(status));
        text.push_str(r#","detail":""#);
    }
}

/// Appends the body after the `detail` text: the names of the limits that denied.
pub(super) fn push_violated<'a>(text: &mut String, names: impl Iterator<Item = &'a PolicyName>) {
    text.push_str(r#"","violated-policies":["#);
    for (index, name) in names.enumerate() {
        text.push_str(if index == 0 { "" } else { "," });
        text.push_str(name.quoted());
    }
    text.push_str("]}");
}

const PROBLEM_TYPES: &str = "https://iana.org/assignments/http-problem-types#";

pub(super) const PROBLEM_JSON: &str = "application/problem+json";
const PLAIN_TEXT: &str = "text/plain; charset=utf-8";

/// A limit's custom denial: status, body and content type.
///
/// Each replaces only its own default, whether the verdict is degraded or not. A body without a content type is plain
/// text. A content type without a body applies to the default body.
///
/// ```
/// use ratekeeper_rules::response::DenialResponse;
///
/// // nginx's auth_request passes on a 403, but turns a 429 into an error of its own.
/// let custom = DenialResponse::default().with_status(403)?;
/// let custom = custom.with_body("Slow down, please.").with_content_type("text/plain")?;
///
/// assert!(custom.clone().with_status(42).is_err());
/// assert!(custom.with_content_type("text/plain\r\nSet-Cookie: a=b").is_err());
/// # Ok::<(), ratekeeper_rules::response::DenialResponseError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DenialResponse {
    status: Option<u16>,
    content_type: Option<Box<str>>,
    body: Option<Box<str>>,
}

impl DenialResponse {
    /// Sets the status.
    ///
    /// # Errors
    /// If it is not the status of a final response, 200 to 599.
    pub fn with_status(mut self, status: u16) -> Result<DenialResponse, DenialResponseError> {
        if !(200..=599).contains(&status) {
            return Err(DenialResponseError::Status(status));
        }
        self.status = Some(status);
        Ok(self)
    }

    /// Sets the content type.
    ///
    /// # Errors
    /// If it is empty or not printable ASCII.
    pub fn with_content_type(mut self, content_type: &str) -> Result<DenialResponse, DenialResponseError> {
        let is_printable = content_type.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        if content_type.trim().is_empty() || !is_printable {
            return Err(DenialResponseError::ContentType);
        }
        self.content_type = Some(content_type.into());
        Ok(self)
    }

    /// Sets the body.
    #[must_use]
    pub fn with_body(mut self, body: &str) -> DenialResponse {
        self.body = Some(body.into());
        self
    }
}

/// What is wrong with a [`DenialResponse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DenialResponseError {
    /// A status outside 200 to 599.
    #[error("{0} is not a status that ends a request; write 200 to 599")]
    Status(u16),
    /// A content type that is empty or not printable ASCII.
    #[error("a content type is printable ASCII; write it as in `text/plain`")]
    ContentType,
}

/// A denial about to be written, with its problem type and customization resolved.
pub(super) struct Denial<'a> {
    limits: &'a [LimitDecision<'a>],
    problem: Problem,
    custom: Option<&'a DenialResponse>,
    retry_after: Option<u64>,
}

impl<'a> Denial<'a> {
    /// `binding` is the limit whose custom response applies.
    pub(super) fn new(
        limits: &'a [LimitDecision<'a>],
        binding: &LimitDecision<'a>,
        context: &ResponseContext,
        retry_after: Option<u64>,
    ) -> Denial<'a> {
        let problem = if context.is_degraded { REDUCED_CAPACITY } else { QUOTA_EXCEEDED };
        Denial { limits, problem, custom: binding.custom, retry_after }
    }

    pub(super) fn status(&self) -> u16 {
        self.custom.and_then(|custom| custom.status).unwrap_or(self.problem.status.code())
    }

    /// None if the body is empty.
    pub(super) fn content_type(&self) -> Option<&'a str> {
        let Some(custom) = self.custom else { return Some(PROBLEM_JSON) };
        match (custom.content_type.as_deref(), custom.body.as_deref()) {
            (_, Some("")) => None,
            (Some(content_type), _) => Some(content_type),
            (None, Some(_)) => Some(PLAIN_TEXT),
            (None, None) => Some(PROBLEM_JSON),
        }
    }

    pub(super) fn push_body(&self, text: &mut String) {
        if let Some(body) = self.custom.and_then(|custom| custom.body.as_deref()) {
            return text.push_str(body);
        }
        if let (Some(denial), Some(wait)) = (self.prepared(), self.retry_after) {
            return denial.push(text, wait);
        }
        self.problem.push_head(text, self.status());
        self.push_detail(text);
        push_violated(text, self.denied().map(|limit_decision| limit_decision.name));
    }

    /// The prepared text of the only limit, if it denied an ordinary request.
    fn prepared(&self) -> Option<&'a DenialText> {
        let [limit] = self.limits else { return None };
        let is_usual = limit.cost == 1 && self.problem.kind == QUOTA_EXCEEDED.kind;
        limit.text.filter(|_| is_usual).map(LimitText::denial)
    }

    fn denied(&self) -> impl Iterator<Item = &'a LimitDecision<'a>> + Clone {
        self.limits.iter().filter(|limit_decision| !limit_decision.decision.allowed)
    }

    /// Appends a sentence for people, escaped for JSON: which limit denied, and how long to wait.
    fn push_detail(&self, text: &mut String) {
        let is_degraded = self.problem.kind == REDUCED_CAPACITY.kind;
        if is_degraded {
            text.push_str(DEGRADED);
        }
        // A request that is never allowed now may be allowed once full capacity is restored.
        if self.retry_after.is_none() && !is_degraded {
            let never =
                |limit_decision: &&LimitDecision| limit_decision.decision.retry_after == RetryAfter::Never;
            let is_one =
                push_names(text, self.denied().filter(never).map(|limit_decision| limit_decision.name));
            text.push_str(if is_one { " never allows" } else { " never allow" });
            text.push_str(" a request of this cost. Do not retry.");
            return;
        }
        let is_one = push_names(text, self.denied().map(|limit_decision| limit_decision.name));
        match self.denied().next() {
            // A degraded store may enforce less than the limit.
            Some(denied) if is_one && !is_degraded => push_quota(text, denied.limit, denied.cost),
            _ => text.push_str(if is_one { " denies this request." } else { " deny this request." }),
        }
        if let Some(wait) = self.retry_after {
            push_retry(text, wait);
        }
    }
}

/// The body of a denial by a single limit of a request of cost 1, except the wait.
#[derive(Clone, Debug)]
pub(super) struct DenialText {
    before_wait: Box<str>,
    after_wait: Box<str>,
}

impl DenialText {
    pub(super) fn new(name: &PolicyName, limit: &Limit, custom: Option<&DenialResponse>) -> DenialText {
        let (mut before_wait, mut after_wait) = (String::new(), String::new());
        let status = custom.and_then(|custom| custom.status).unwrap_or(QUOTA_EXCEEDED.status.code());
        QUOTA_EXCEEDED.push_head(&mut before_wait, status);
        push_names(&mut before_wait, [name].into_iter());
        push_quota(&mut before_wait, limit, 1);
        push_violated(&mut after_wait, [name].into_iter());
        DenialText { before_wait: before_wait.into(), after_wait: after_wait.into() }
    }

    fn push(&self, text: &mut String, wait: u64) {
        text.push_str(&self.before_wait);
        push_retry(text, wait);
        text.push_str(&self.after_wait);
    }
}

/// Appends how long to wait: ` Retry in 30 seconds.`
fn push_retry(text: &mut String, wait: u64) {
    text.push_str(" Retry in ");
    push_wait(text, wait);
    text.push('.');
}

/// First sentence of a denial that was decided without the store.
pub(super) const DEGRADED: &str = "The service has reduced capacity. ";

/// Appends `Limit "a"`, or `Limits "a", "b" and "c"`, escaped for JSON; returns whether it is one.
pub(super) fn push_names<'a>(text: &mut String, names: impl Iterator<Item = &'a PolicyName> + Clone) -> bool {
    let count = names.clone().count();
    text.push_str(if count == 1 { "Limit " } else { "Limits " });
    for (index, name) in names.enumerate() {
        text.push_str(match index {
            0 => "",
            _ if index + 1 == count => " and ",
            _ => ", ",
        });
        text.push_str(r#"\""#);
        push_escaped(text, name.as_str());
        text.push_str(r#"\""#);
    }
    count == 1
}

/// Appends what a limit allows: ` allows 10 requests per minute.`
fn push_quota(text: &mut String, limit: &Limit, cost: u32) {
    let (size, rate) = (
        u64::from(limit.limit()),
        match limit {
            Limit::Bucket(it) => Some(it.rate()),
            Limit::SteppedBucket(it) => Some(it.rate()),
            Limit::FixedWindow(_) | Limit::Log(_) | Limit::Counter(_) => None,
        },
    );
    text.push_str(" allows ");
    push_integer(text, size);
    text.push_str(match (cost, size) {
        (1, 1) => " request",
        (1, _) => " requests",
        (_, 1) => " unit",
        _ => " units",
    });
    if let Some(rate) = rate {
        text.push_str(" at once and ");
        push_integer(text, rate.count());
    }
    text.push_str(" per ");
    push_period(text, rate.map_or_else(|| limit.window(), Rate::period));
    if cost != 1 {
        text.push_str("; this request costs ");
        push_integer(text, u64::from(cost));
    }
    text.push('.');
}

/// Appends a length as text: `minute`, `15 minutes`, `500 ms`.
fn push_period(text: &mut String, length: Duration) {
    let nanos = length.as_nanos();
    for (unit, name) in [(1_000_000_000, ""), (1_000_000, " ms"), (1_000, " us"), (1, " ns")] {
        let count = u64::try_from(nanos / unit).unwrap_or(u64::MAX);
        match (nanos.is_multiple_of(unit), name, count) {
            (false, ..) => continue,
            (true, "", 1) => text.push_str("second"),
            (true, "", 60) => text.push_str("minute"),
            (true, "", 3_600) => text.push_str("hour"),
            (true, "", 86_400) => text.push_str("day"),
            (true, "", _) => push_wait(text, count),
            (true, ..) => {
                push_integer(text, count);
                text.push_str(name);
            }
        }
        return;
    }
}

/// Appends seconds as text: `1 hour 5 minutes`.
fn push_wait(text: &mut String, wait: u64) {
    const UNITS: [(u64, &str); 4] = [(86_400, " day"), (3_600, " hour"), (60, " minute"), (1, " second")];
    let mut rest = wait;
    for (unit, name) in UNITS {
        let count = rest / unit;
        rest %= unit;
        if count > 0 {
            push_integer(text, count);
            text.push_str(name);
            text.push_str(if count == 1 { "" } else { "s" });
            text.push_str(if rest > 0 { " " } else { "" });
        }
    }
}

#[cfg(test)]
mod tests {
    use ratekeeper_core::{RefillStyle, WindowAlign};

    use super::*;

    #[test]
    fn waits_are_written_in_days_hours_minutes_and_seconds() {
        for (wait, expected) in [
            (1, "1 second"),
            (59, "59 seconds"),
            (60, "1 minute"),
            (3_661, "1 hour 1 minute 1 second"),
            (7_200, "2 hours"),
            (86_400, "1 day"),
            (2 * 86_400 + 59, "2 days 59 seconds"),
        ] {
            let mut text = String::new();
            push_wait(&mut text, wait);
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn quota_is_written_in_the_terms_of_the_limit() {
        let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
        let bucket = |count, period| {
            Limit::token_bucket(20, Rate::new(count, period).unwrap(), RefillStyle::Smooth).unwrap()
        };
        let window = |limit, window| Limit::fixed_window(limit, window, WindowAlign::Clock).unwrap();
        for (limit, cost, expected) in [
            (window(10, minute), 1, " allows 10 requests per minute."),
            (window(1, 15 * minute), 1, " allows 1 request per 15 minutes."),
            (window(100, second / 2), 1, " allows 100 requests per 500 ms."),
            (window(100, 60 * minute), 30, " allows 100 units per hour; this request costs 30."),
            (bucket(10, second), 1, " allows 20 requests at once and 10 per second."),
            (bucket(3, 2 * second), 1, " allows 20 requests at once and 3 per 2 seconds."),
        ] {
            let mut text = String::new();
            push_quota(&mut text, &limit, cost);
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn custom_response_rejects_bad_status_and_content_type() {
        for status in [0, 100, 199, 600] {
            assert_eq!(
                DenialResponse::default().with_status(status),
                Err(DenialResponseError::Status(status))
            );
        }
        for content_type in ["", " ", "a\nb", "a\rb", "é"] {
            let custom = DenialResponse::default().with_content_type(content_type);
            assert_eq!(custom, Err(DenialResponseError::ContentType), "{content_type:?}");
        }
    }
}
