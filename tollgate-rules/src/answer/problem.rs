//! What those are told who are refused before any limit was asked.

/// The body of a problem (RFC 9457) without a type of its own: a status, its title, and a sentence.
///
/// What would end a string of JSON is in no sentence of ours, but may be in a name or a text that somebody else wrote: it
/// is left out.
///
/// ```
/// let body = tollgate_rules::answer::problem(404, "Not Found", "there is no limit \"a\"");
/// assert_eq!(body, r#"{"type":"about:blank","title":"Not Found","status":404,"detail":"there is no limit a"}"#);
/// ```
pub fn problem(status: u16, title: &str, detail: &str) -> String {
    let plain = |text: &str| -> String {
        text.chars().filter(|c| !c.is_control() && *c != '"' && *c != '\\').collect()
    };
    let (title, detail) = (plain(title), plain(detail));
    format!(r#"{{"type":"about:blank","title":"{title}","status":{status},"detail":"{detail}"}}"#)
}
