//! The body of a rejection before any limit is checked.

use super::ResponseStatus;

/// A Problem Details body (RFC 9457) without a specific type: a status and a sentence.
///
/// Our own sentences contain nothing that would end a JSON string, but a name or text from elsewhere may: such
/// characters are removed.
///
/// ```
/// use ratekeeper_rules::response::{ResponseStatus, problem};
///
/// let body = problem(ResponseStatus::NotFound, "there is no limit \"a\"");
/// assert_eq!(body, r#"{"type":"about:blank","title":"Not Found","status":404,"detail":"there is no limit a"}"#);
/// ```
pub fn problem(status: ResponseStatus, detail: &str) -> String {
    let detail: String = detail.chars().filter(|c| !c.is_control() && *c != '"' && *c != '\\').collect();
    let (status, title) = (status.code(), status.title());
    format!(r#"{{"type":"about:blank","title":"{title}","status":{status},"detail":"{detail}"}}"#)
}
