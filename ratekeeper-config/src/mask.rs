//! Hides secrets in source lines that messages show: passwords in addresses, and values of secret fields.
//!
//! Works on text, not on parsed values, because most lines shown could not be parsed. In doubt, it hides too much.

use std::ops::Range;

use crate::nearest;
use crate::words;

/// Replaces a secret.
pub(crate) const STARS: &str = "***";
/// Names whose values are secret, also if misspelt.
const SECRET_NAMES: [&str; 4] = ["secret", "password", "passphrase", "authorization"];
/// The name of bearer tokens.
const TOKEN: &str = "token";
/// Names whose values may be secret: a value over several lines is, a single word is not necessarily.
const PEM_NAMES: [&str; 5] = ["keys", "key", "certificate", "ca", "address"];
/// Bytes searched backwards for the parent name of a line. Beyond this bound, the line is hidden.
const BYTES_BACK_MAX: usize = 64 * 1024;

/// A single line with its secrets masked.
pub(crate) fn masked(text: &str) -> String {
    let mut shown = String::new();
    let mut from = 0;
    for range in hidden(text) {
        shown.push_str(&text[from..range.start]);
        shown.push_str(STARS);
        from = range.end;
    }
    shown.push_str(&text[from..]);
    shown
}

/// A character of a line, or a whole secret.
pub(crate) struct Cell<'t> {
    /// The text to show.
    pub(crate) shown: &'t str,
    /// Its byte range in the line.
    pub(crate) bytes: Range<usize>,
}

/// The cells of a line, with secrets masked: the `known` ranges, and detected ones. `before` is the text above the
/// line.
pub(crate) fn cells<'t>(
    line: &'t str,
    before: &str,
    known: impl Iterator<Item = Range<usize>>,
) -> Vec<Cell<'t>> {
    let indented = line.len() - line.trim_start().len();
    let whole = is_below_secret(line, before).then_some(indented..line.trim_end().len());
    let secrets = apart(hidden(line).into_iter().chain(known).chain(whole).collect());
    let mut cells = Vec::new();
    let mut at = 0;
    while let Some(character) = line[at..].chars().next() {
        let bytes = match secrets.iter().find(|range| range.start == at && !range.is_empty()) {
            Some(range) => range.clone(),
            None => at..at + character.len_utf8(),
        };
        let is_secret = secrets.contains(&bytes);
        at = bytes.end;
        cells.push(Cell { shown: if is_secret { STARS } else { &line[bytes.clone()] }, bytes });
    }
    cells
}

/// The secret ranges of a line, sorted and disjoint.
fn hidden(line: &str) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = values(line)
        .chain(values_without_colon(line))
        .filter_map(|(name, at)| value(line, name, at))
        .collect();
    ranges.extend(passwords(line));
    ranges.extend(line.find("-----BEGIN").map(|start| start..line.trim_end().len()));
    apart(ranges)
}

/// Sorts the ranges, and merges those that overlap or touch.
fn apart(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    let mut apart: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match apart.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => apart.push(range),
        }
    }
    apart
}

/// The names in a line, and the start of their values.
fn values(line: &str) -> impl Iterator<Item = (&str, usize)> {
    line.match_indices(':').map(|(colon, _)| {
        let before = line[..colon].trim_end().trim_end_matches(['"', '\'']);
        let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
        let name = before.rfind(|c| !is_name(c)).map_or(before, |at| {
            let after = before[at..].chars().next().map_or(0, char::len_utf8);
            &before[at + after..]
        });
        let behind = &line[colon + 1..];
        (name, line.len() - behind.trim_start().len())
    })
}

/// Names that a space separates from their values, because the colon was forgotten.
fn values_without_colon(line: &str) -> impl Iterator<Item = (&str, usize)> {
    let starts = std::iter::once(0).chain(line.match_indices(['{', ',']).map(|(at, _)| at + 1));
    starts.filter_map(|start| {
        let entry = line[start..].trim_start_matches([' ', '-', '"', '\'']);
        let (name, rest) = entry.split_once(' ')?;
        let value = rest.trim_start();
        (!name.ends_with(':') && !value.starts_with(':')).then(|| (name, line.len() - value.len()))
    })
}

/// Whether a name of several words contains the name of a secret, as in `hash_secret`.
fn has_secret_word(name: &str) -> bool {
    let is_name = |word: &str| SECRET_NAMES.contains(&word) || word == TOKEN;
    name != "token_bucket"
        && name.contains(['_', '-'])
        && name.split(['_', '-']).any(|word| is_name(&word.to_lowercase()))
}

fn is_secret(name: &str) -> bool {
    // Other lengths cannot be close to a secret name, and need no comparison.
    // `tokens` is a likely name of a limit, so no longer name counts as a misspelt `token`.
    let is_token = (4..=TOKEN.len()).contains(&name.len()) && nearest(name, &[TOKEN]).is_some();
    is_token || (4..=14).contains(&name.len()) && nearest(name, &SECRET_NAMES).is_some()
}

/// The range of the value that starts at `start`, if it is secret.
fn value(line: &str, name: &str, start: usize) -> Option<Range<usize>> {
    let value = &line[start..];
    // A mapping below a longer name is more likely a limit, as `reset-password`, than a secret.
    let may_be_secret = has_secret_word(name) && !value.starts_with(['{', '[']);
    if !is_secret(name) && name != "keys" && !may_be_secret || value.is_empty() || value.starts_with('#') {
        return None;
    }
    if let Some(inner) = value.strip_prefix('{') {
        let is_file = inner.trim_start().trim_start_matches(['"', '\'']).starts_with("file");
        let is_path = is_file && !inner.contains(['[', '{']);
        return (!is_path).then(|| start..line.trim_end().len());
    }
    let is_in_braces = line[..start].matches(['{', '[']).count() > line[..start].matches(['}', ']']).count();
    let end = match value.chars().next() {
        Some(quote @ ('"' | '\'')) => value[1..].find(quote).map(|at| {
            // Text after the closing mark is a mistake, and may belong to the secret.
            let behind = &value[at + 2..];
            let is_end =
                behind.trim_start().is_empty() || behind.trim_start().starts_with([',', '}', ']', '#']);
            let more = if is_end { 0 } else { behind.find([',', '}', ']']).unwrap_or(behind.len()) };
            start + at + 2 + more
        }),
        // A `${NAME}` contains a closing brace.
        _ if is_in_braces && !value.contains("${") => value.find([',', '}', ']']).map(|at| start + at),
        _ => None,
    };
    let range = start..end.unwrap_or(line.len());
    let range = start..start + line[range].trim_end().len();
    // `log: { keys: text }`: a word is not a key set.
    let is_word = name == "keys" && line[range.clone()].bytes().all(|byte| byte.is_ascii_lowercase());
    (!is_word && !is_reference(&line[range.clone()])).then_some(range)
}

/// Whether the value is `${NAME}`, which names a secret without revealing it.
pub(crate) fn is_reference(value: &str) -> bool {
    let plain = value.trim_matches(['"', '\'']);
    let name = plain.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
    name.is_some_and(is_variable)
}

/// Whether this is a valid name of an environment variable.
pub(crate) fn is_variable(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    name.bytes().next().is_some_and(is_letter)
        && name.bytes().all(|byte| is_letter(byte) || byte.is_ascii_digit())
}

/// The secret part of a word, which may be quoted: of an address, everything after the scheme.
pub(crate) fn behind_scheme(text: &str, word: Range<usize>) -> (usize, usize) {
    let is_scheme = |name: &str| words::SCHEMES.contains(&name) || name == "http" || name == "https";
    let written = &text[word.clone()];
    let quotes = ['"', '\''];
    match written.split_once("://") {
        Some((name, _)) if is_scheme(name.trim_start_matches(quotes)) => {
            let quote = usize::from(written.starts_with(quotes) && written.ends_with(quotes));
            (word.start + name.len() + "://".len(), word.end - quote)
        }
        _ => (word.start, word.end),
    }
}

/// Whether the word is an address that can hold a secret only before the `@`, where [`masked`] finds it.
pub(crate) fn is_plain_address(word: &str) -> bool {
    let Some((_, rest)) = word.split_once("://") else { return false };
    let (user, hosts) = rest.rsplit_once('@').unwrap_or(("", rest));
    let is_plain_user = user.chars().all(|c| !c.is_whitespace() && !"/?#,\"'".contains(c));
    is_plain_user && !rest.contains("://") && has_plain_hosts(hosts)
}

/// Whether the text behind the scheme and the user is `host:port,host:port/path`, so that it holds no password.
fn has_plain_hosts(text: &str) -> bool {
    let (hosts, path) = text.split_at(text.find('/').unwrap_or(text.len()));
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._${}".contains(&byte);
    let is_host = |host: &str| {
        let in_brackets = host.strip_prefix('[').and_then(|it| it.split_once(']'));
        let (name, port) = in_brackets.unwrap_or_else(|| host.split_at(host.find(':').unwrap_or(host.len())));
        let is_number = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
        (in_brackets.is_some() || name.bytes().all(is_name))
            && (port.is_empty() || port.strip_prefix(':').is_some_and(is_number))
    };
    hosts.split(',').all(is_host) && !path.contains(['?', '#'])
}

/// The rest of the word that starts at `start`: to a space, a quote, or the end of a flow mapping or list.
fn rest_of_word(line: &str, start: usize) -> Range<usize> {
    let mut at = start;
    while let Some(character) = line[at..].chars().next() {
        // A `${NAME}` contains a closing brace.
        let reference = line[at..].strip_prefix("${").and_then(|rest| rest.split_once('}'));
        let brackets = line[at..].strip_prefix('[').and_then(|rest| rest.split_once(']'));
        match (reference, brackets) {
            (Some((name, _)), _) => at += "${}".len() + name.len(),
            (_, Some((inside, _))) => at += "[]".len() + inside.len(),
            _ if character.is_whitespace() || "\"'`}])".contains(character) => break,
            _ => at += character.len_utf8(),
        }
    }
    start..start + line[start..at].trim_end_matches([',', '.', ';']).len()
}

/// Secrets in addresses: the text between `:` and `@` in `redis://user:password@host`, and everything in an address
/// without a plain host and port.
fn passwords(line: &str) -> Vec<Range<usize>> {
    let mut starts: Vec<usize> = line.match_indices("://").map(|(at, scheme)| at + scheme.len()).collect();
    let has_scheme = !starts.is_empty();
    if let (false, Some(at)) = (has_scheme, line.rfind('@')) {
        let separators = [": ", "- ", "\"", "'", "{", "["];
        let before = |it: &&str| line[..at].rfind(*it).map(|found| found + it.len());
        starts.push(separators.iter().filter_map(before).max().unwrap_or(0));
    }
    let ends = starts.iter().skip(1).copied().chain([line.len()]);
    let rests = starts.iter().zip(ends.clone()).filter(|_| has_scheme).filter_map(|(&start, end)| {
        let at = line[start..end].rfind('@').map(|at| start + at + 1);
        let rest = rest_of_word(line, at.unwrap_or(start));
        let rest = rest.start..rest.end.min(end);
        let text = &line[rest.clone()];
        let is_web = line[..start].ends_with("http://") || line[..start].ends_with("https://");
        match text.find(['?', '#']) {
            // The address of an upstream has no password, but may have a query.
            query if is_web => query.map(|query| rest.start + query..rest.end),
            // The scheme of a second address belongs to the next one.
            _ if rest.end == end && end < line.len() => None,
            _ => (!has_plain_hosts(text)).then_some(rest),
        }
    });
    let rests: Vec<_> = rests.collect();
    let addresses = starts.iter().zip(ends).filter_map(|(&start, end)| {
        let at = start + line[start..end].rfind('@')?;
        let from = match line[start..at].find(':') {
            Some(colon) => start + colon + 1,
            // Without a colon, the text may be a password alone.
            None if has_scheme => start,
            None => return None,
        };
        (!is_reference(&line[from..at])).then_some(from..at)
    });
    addresses.chain(rests).collect()
}

/// Whether the line is nested below the name of a secret, by its indentation.
fn is_below_secret(line: &str, before: &str) -> bool {
    let indent = |line: &str| line.len() - line.trim_start_matches([' ', '-']).len();
    let own = indent(line);
    let content = line.trim_start_matches([' ', '-']);
    if own == 0 || content.starts_with("file:") {
        return false;
    }
    let near = near_end(before);
    let mut above = near.rsplit(['\n', '\r']).filter(|line| !line.trim().is_empty());
    match above.find(|line| indent(line) < own) {
        Some(parent) => values(parent).next().is_some_and(|(name, at)| {
            let starts_text = parent[at..].starts_with(['|', '>', '"', '\'']);
            is_secret(name) || PEM_NAMES.contains(&name) && starts_text
        }),
        None => near.len() < before.len(),
    }
}

/// The last whole lines of a text, at most `BYTES_BACK_MAX` bytes.
fn near_end(before: &str) -> &str {
    let Some(from) = before.len().checked_sub(BYTES_BACK_MAX) else { return before };
    // A line break is also a character boundary.
    let is_break = |byte: &u8| matches!(byte, b'\n' | b'\r');
    let cut = before.as_bytes()[from..].iter().position(is_break).map_or(before.len(), |at| from + at + 1);
    &before[cut..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_passwords_and_secrets_are_hidden() {
        for (typed, shown) in [
            ("address: redis://user:hunter2@host:6379/0", "address: redis://user:***@host:6379/0"),
            ("address: redis://:hunter2@host", "address: redis://:***@host"),
            ("address: redis://hunter2@host", "address: redis://***@host"),
            ("address: redis://u:hunt@er2@host", "address: redis://u:***@host"),
            ("address: redis://u:hunter 2@host", "address: redis://u:***@host"),
            ("address: redis//u:hunter2@host", "address: redis//u:***@host"),
            ("store: redis:/u:hunter2@host", "store: redis:***@host"),
            ("redis://u:${PASSWORD}@host", "redis://u:${PASSWORD}@host"),
            ("redis://127.0.0.1:6379", "redis://127.0.0.1:6379"),
            ("{ a: redis://u:hunter2/host, b: c }", "{ a: redis://***, b: c }"),
            ("[redis://[::1]:6379, redis://h:1,i:2/0]", "[redis://[::1]:6379, redis://h:1,i:2/0]"),
            ("'redis://h:9?password=hunter2'", "'redis://***'"),
            ("upstream: http://h:808l/a?key=hunter2 # x", "upstream: http://h:808l/a*** # x"),
            ("[redis://a:hunter2@b, http://c:hunter2@d]", "[redis://a:***@b, http://c:***@d]"),
            ("secret: hunter2", "secret: ***"),
            ("http: { listen: 0.0.0.0:1, token: hunter2 }", "http: { listen: 0.0.0.0:1, token: *** }"),
            ("tokne: hunter2", "tokne: ***"),
            ("tokens: { key: ip }", "tokens: { key: ip }"),
            ("secret:   hunter2 # ours", "secret:   ***"),
            ("secret: 'hunter2' # ours", "secret: *** # ours"),
            ("- { secret: hunter2, instances: x }", "- { secret: ***, instances: x }"),
            ("{\"secret\":\"hunter2\",\"nodes\":3}", "{\"secret\":***,\"nodes\":3}"),
            ("secrt: hunter2", "secrt: ***"),
            ("secret hunter2", "secret ***"),
            ("- { address: a, tokn hunter2, instances: 3 }", "- { address: a, tokn ***, instances: 3 }"),
            ("hash_secret: hunter2", "hash_secret: ***"),
            ("{ api-token: hunter2, listen: a }", "{ api-token: ***, listen: a }"),
            ("hash_secret hunter2", "hash_secret ***"),
            ("reset-password: { key: ip }", "reset-password: { key: ip }"),
            ("the token of a client", "the token of a client"),
            ("Password : hunter2", "Password : ***"),
            ("secret: ${HASH_KEY}", "secret: ${HASH_KEY}"),
            ("secret: \"${HASH_KEY}\"", "secret: \"${HASH_KEY}\""),
            ("secret: ${HASH_KEY}hunter2", "secret: ***"),
            ("secret: ${hunter2", "secret: ***"),
            ("secret: { file: key.txt }", "secret: { file: key.txt }"),
            ("secret: { fle: hunter2 }", "secret: ***"),
            ("secret: [hunter2]", "secret: ***"),
            ("secret:", "secret:"),
            ("keys: '{\"keys\": []}'", "keys: ***"),
            ("keys: AbCd01", "keys: ***"),
            ("log: { keys: txt }", "log: { keys: txt }"),
            ("key: { header: X-User-Id }", "key: { header: X-User-Id }"),
            ("key: \"-----BEGIN PRIVATE KEY-----\\nMIIE", "key: \"***"),
            ("allow: [me@example.com, 10.0.0.1]", "allow: [me@example.com, 10.0.0.1]"),
            ("", ""),
        ] {
            assert_eq!(masked(typed), shown);
            let shown_by_cell: String =
                cells(typed, "", std::iter::empty()).iter().map(|cell| cell.shown).collect();
            assert_eq!(shown_by_cell, shown);
        }
    }

    #[test]
    fn lines_nested_below_a_secret_name_are_hidden() {
        let shown = |text: &str| {
            let (before, line) = text.rsplit_once('\n').unwrap();
            cells(line, before, std::iter::empty()).iter().map(|cell| cell.shown).collect::<String>()
        };
        assert_eq!(shown("redis:\n  secret: |\n    hunter2"), "    ***");
        assert_eq!(shown("redis:\n  secret:\n\n    - hunter2"), "    ***");
        assert_eq!(shown("redis:\n  secret:\n  - hunter2"), "  ***");
        assert_eq!(shown("tls:\n  key: |\n    MIIE\n    hunter2"), "    ***");
        assert_eq!(shown("secret:\n  file: key.txt"), "  file: key.txt");
        assert_eq!(shown("key:\n  header: X-User-Id"), "  header: X-User-Id");
        assert_eq!(shown("redis:\n  secret: a\n  instances: x"), "  instances: x");
        assert_eq!(shown("secret: a\ninstances: x"), "instances: x");
        // The parent name is beyond the search bound.
        let far = |between: &str| shown(&format!("limits:\n{}\n  a: x", between.repeat(BYTES_BACK_MAX)));
        assert_eq!((far("\n").as_str(), far("é").as_str()), ("  ***", "  ***"));
    }
}
