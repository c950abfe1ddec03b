//! The body of a rejection before any limit is checked.

/// A Problem Details body (RFC 9457) without a specific type: a status, its title and a sentence.
///
/// Our own sentences contain nothing that would end a JSON string, but a name or text from elsewhere may: such
/// characters are removed.
///
/// ```
/// let body = ratekeeper_rules::response::problem(404, "Not Found", "there is no limit \"a\"");
/// assert_eq!(body, r#"{"type":"about:blank","title":"Not Found","status":404,"detail":"there is no limit a"}"#);
/// ```
pub fn problem(status: u16, title: &str, detail: &str) -> String {
    let plain = |text: &str| -> String {
        text.chars().filter(|c| !c.is_control() && *c != '"' && *c != '\\').collect()
    };
    let (title, detail) = (plain(title), plain(detail));
    format!(r#"{{"type":"about:blank","title":"{title}","status":{status},"detail":"{detail}"}}"#)
}
