//! Spellings that servers treat as one: names of headers, cookies and parameters, and white space around values. And
//! values of which some servers read only a part.
//!
//! A server that merges two spellings which a rule keeps apart gives a client several budgets.
//!
//! | who merges | what |
//! |---|---|
//! | CGI, WSGI, Rack, PHP | `-` `_` in header names; PHP `.`, and lighttpd all that is neither a letter nor a digit |
//! | PHP | space `.` `[` `_` in names of cookies and parameters, leading spaces, and all from a NUL byte on |
//! | PHP, Rack, `qs` | `name[]` and `name[0]` are elements of `name`; Rack and `qs` drop brackets before and after a name |
//! | ASP.NET | upper and lower case in names of cookies and parameters |
//! | Java, Go, Python, PHP, JavaScript | white space around values, each another set of characters |
//! | Python (space), old versions of Tomcat and Rack (comma, space) | what follows the separator is another cookie |
//! | Tomcat, Express | text after a quoted cookie, or the last character of one without its closing quotation mark |
//! | servers in C | all from a NUL byte on in values |
//! | PHP, Python, Node.js | base64 without padding, with unused bits that are set, or with other characters in it |

/// Whether some servers read the header `name` as the header `of`. Both are in lower case.
///
/// ```
/// use ratekeeper_rules::spelling::is_header_alias;
///
/// assert!(is_header_alias("x_user!id", "x-user-id") && is_header_alias("x-user-id", "x_user_id"));
/// assert!(!is_header_alias("x-user-id", "x-user-id"), "the name itself");
/// ```
pub fn is_header_alias(name: &str, of: &str) -> bool {
    // Nearly all pairs of names differ in length, so their bytes are not compared.
    let folded = |byte: u8| if byte.is_ascii_alphanumeric() { byte } else { b'_' };
    name.len() == of.len() && name != of && name.bytes().map(folded).eq(of.bytes().map(folded))
}

/// The configured headers that are aliases of each other. Some servers merge them, so each is read in all configured
/// spellings, and a request may have only one of them.
///
/// ```
/// use ratekeeper_rules::spelling::HeaderAliases;
///
/// let aliases = HeaderAliases::among(&["x-user-id", "x_user_id", "x-cost"]);
/// assert!(aliases.of("x-user-id").eq(["x_user_id"]));
/// assert_eq!(aliases.of("x-cost").count(), 0);
/// ```
#[derive(Clone, Debug, Default)]
pub struct HeaderAliases(Vec<(String, String)>);

impl HeaderAliases {
    /// The aliases among different names in lower case.
    pub fn among<N: AsRef<str>>(names: &[N]) -> HeaderAliases {
        let names = || names.iter().map(AsRef::as_ref);
        let pairs = names().flat_map(|name| names().map(move |other| (name, other)));
        let pairs = pairs.filter(|(name, other)| is_header_alias(name, other));
        HeaderAliases(pairs.map(|(name, other)| (name.to_owned(), other.to_owned())).collect())
    }

    /// The other configured spellings of a header.
    pub fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        self.0.iter().filter(move |(its, _)| its == name).map(|(_, other)| other.as_str())
    }

    /// Two spellings of one header that are both present.
    pub fn both_present(&self, is_present: impl Fn(&str) -> bool) -> Option<(&str, &str)> {
        let pairs = self.0.iter().map(|(name, other)| (name.as_str(), other.as_str()));
        pairs.into_iter().find(|(name, other)| is_present(name) && is_present(other))
    }
}

/// Whether some servers read the decoded name of a cookie or parameter as `name`.
pub(crate) fn is_same_name(sent: &[u8], name: &[u8]) -> bool {
    if sent == name {
        return true;
    }
    let sent = sent.split(|byte| *byte == 0).next().unwrap_or_default();
    let sent = trim(sent);
    if begins_with_name(sent, name) {
        return true;
    }
    let is_bracket = |byte: &u8| matches!(byte, b'[' | b']');
    let brackets = sent.iter().take_while(|byte| is_bracket(byte)).count();
    brackets > 0 && begins_with_name(&sent[brackets..], name)
}

/// Whether the text is the name in any spelling, alone or with a bracket behind it.
fn begins_with_name(sent: &[u8], name: &[u8]) -> bool {
    let Some((start, rest)) = sent.split_at_checked(name.len()) else { return false };
    matches!(rest, [] | [b'[' | b']', ..])
        && start.iter().copied().map(folded).eq(name.iter().copied().map(folded))
}

/// The byte that stands for all those that servers merge with it in names of cookies and parameters.
fn folded(byte: u8) -> u8 {
    match byte {
        b'-' | b'.' | b'[' | b' ' => b'_',
        other => other.to_ascii_lowercase(),
    }
}

/// A value without the white space around it that some servers remove.
///
/// Text in UTF-8 is trimmed as such. Other bytes are Latin-1, in which a single byte is a no-break space; of a
/// character in UTF-8, that byte would be a part.
pub(crate) fn trim(value: &[u8]) -> &[u8] {
    // The fast path, for nearly all values.
    if let (Some(b'!'..=b'~'), Some(b'!'..=b'~')) = (value.first(), value.last()) {
        return value;
    }
    match std::str::from_utf8(value) {
        Ok(text) => text.trim_matches(is_trimmed).as_bytes(),
        Err(_) => {
            let is_kept = |byte: &u8| !is_trimmed(char::from(*byte));
            let start = value.iter().position(is_kept).unwrap_or(value.len());
            let end = value.iter().rposition(is_kept).map_or(start, |last| last + 1);
            &value[start..end]
        }
    }
}

/// Whether some servers remove the character from the ends of a value: white space, Java's control characters, and
/// the invisible ones of JavaScript (U+FEFF) and of old versions of .NET.
fn is_trimmed(character: char) -> bool {
    character <= ' ' || character.is_whitespace() || matches!(character, '\u{180e}' | '\u{200b}' | '\u{feff}')
}
