//! Syntax errors in the words of a user: the YAML parser reports what it expected, often on a later line than the
//! mistake. The text around its position shows what was probably meant.

use crate::error::{Position, Problem, boundary_before, quoted};

/// A syntax error. `at` and `message` are those of the parser.
pub(crate) fn problem(yaml: &str, at: Position, message: &str) -> Problem {
    let at = Position { byte: boundary_before(yaml, at.byte), ..at };
    let text = Text { yaml, at };
    let known = match message {
        _ if message.contains("tab") => text.plain("a tab cannot indent a line", "indent with spaces"),
        _ if message.contains("mismatched bracket") => text.mismatch(message),
        _ if message.contains("expected ',' or") => text.comma().or_else(|| text.bracket(false)),
        _ if message.contains("trailing content") => text.comma().or_else(|| {
            text.plain(
                "unexpected text after the closing quotation mark",
                "write it in a new line, or inside the quotation marks",
            )
        }),
        _ if message.contains("unclosed bracket") => text.bracket(true),
        _ if message.contains("simple key expected") => text.no_colon(at.line),
        _ if message.contains("quoted scalar") || message.contains("end of stream") => text.quote(),
        _ if message.contains("mapping values are not allowed") => text.second_colon(),
        _ if message.contains("expected key") => {
            text.plain("the indentation matches no line above", "indent all names of a mapping equally")
        }
        _ if message.contains("'-' indicator") => text.plain(
            "expected the next item of a list, or a name of the item above",
            "start it with `- `, or indent it like the other names of the item",
        ),
        _ if message.contains("misplaced bracket") => text
            .plain("the bracket closes nothing", "remove it, or quote the text if the bracket belongs to it"),
        _ if message.contains("unexpected character") => text.unquoted(),
        _ if message.contains("anchor or alias") => {
            text.plain("`*` or `&` needs a name", "write a name after it, or quote the value, as in `'*'`")
        }
        _ if message.contains("unknown anchor") => text.plain(
            "the alias has no anchor",
            "define the anchor first: `&name` before the value that `*name` repeats",
        ),
        _ if message.contains("merge") => {
            text.plain("`<<` needs a mapping", "write `<<: *name`, where `&name` is the anchor of a mapping")
        }
        _ if message.starts_with("invalid ") => {
            text.plain("the value does not match its tag", "remove the tag, such as `!!int`")
        }
        _ => None,
    };
    known.unwrap_or_else(|| {
        let help = "check the indentation, quotes and brackets here and in the line above";
        Problem::new(at, format!("invalid YAML: {message}"), help)
    })
}

/// The text, and where the parser stopped.
struct Text<'t> {
    yaml: &'t str,
    at: Position,
}

impl<'t> Text<'t> {
    fn plain(&self, message: &str, help: &str) -> Option<Problem> {
        Some(Problem::new(self.at, message, help))
    }

    /// A line from 1, and its byte offset.
    fn line(&self, number: usize) -> Option<(&'t str, usize)> {
        let mut lines = self.yaml.split_inclusive('\n').scan(0, |start, line| {
            *start += line.len();
            Some((line.trim_end_matches(['\n', '\r']), *start - line.len()))
        });
        lines.nth(number.checked_sub(1)?)
    }

    /// The last line before `number` that is neither empty nor a comment.
    fn line_before(&self, number: usize) -> Option<usize> {
        let is_content = |line: &str| !line.trim_start().is_empty() && !line.trim_start().starts_with('#');
        (1..number)
            .rev()
            .take(LINES_BACK_MAX)
            .find(|it| self.line(*it).is_some_and(|(line, _)| is_content(line)))
    }

    /// The trimmed text of a line, as a position.
    fn content(&self, number: usize) -> Option<(&'t str, Position)> {
        let (line, start) = self.line(number)?;
        let content = line.split(" #").next().unwrap_or(line);
        let indent = content.len() - content.trim_start().len();
        let content = content.trim();
        let position = Position {
            line: number,
            column: indent + 1,
            chars: content.chars().count(),
            byte: start + indent,
        };
        Some((content, position))
    }

    /// A line without a colon, or without a space after it.
    fn no_colon(&self, number: usize) -> Option<Problem> {
        let (content, position) = self.content(number)?;
        let content = content.trim_start_matches("- ");
        let message = format!("{} has no value", quoted(content));
        let help = match written_with_colon(content) {
            Some(line) => format!("write {}", quoted(&line)),
            None => "write a colon and a value after a name, or `- ` before an item of a list".to_owned(),
        };
        Some(Problem::new(position, message, help))
    }

    /// A colon where a value continues: the mistake may be in the line above.
    fn second_colon(&self) -> Option<Problem> {
        let (content, position) = self.content(self.at.line)?;
        if self.yaml[position.byte..self.at.byte.max(position.byte)].contains(": ") {
            let help = "write the second name in a new line and indent it, or use braces: `a: { b: 1 }`";
            return Some(Problem::new(self.at, "the line has two names", help));
        }
        let before = self.line_before(self.at.line)?;
        let (above, above_position) = self.content(before)?;
        if !above.contains(": ") && !above.ends_with(':') {
            return self.no_colon(before);
        }
        let name = |line: &'t str| line.trim_start_matches("- ").split(':').next().unwrap_or_default();
        if position.column > above_position.column {
            let message = format!(
                "{} is indented too far: {} has a value already",
                quoted(name(content)),
                quoted(name(above))
            );
            let help = format!("indent it like {}", quoted(name(above)));
            return Some(Problem::new(
                Position { chars: name(content).chars().count(), ..position },
                message,
                help,
            ));
        }
        None
    }

    /// A bracket that is closed by one of the other kind. The parser points at the first and names both.
    fn mismatch(&self, message: &str) -> Option<Problem> {
        let mut named = message.split('\'').skip(1).step_by(2);
        let (open, close) = (named.next()?, named.next()?);
        let help = format!("write `{}`", if open == "[" { ']' } else { '}' });
        Some(Problem::new(self.at, format!("`{open}` is closed by `{close}`"), help))
    }

    /// A missing comma inside of brackets that are closed. The parser points at the next name, or at its colon.
    fn comma(&self) -> Option<Problem> {
        let (byte, _) = self.open_at(self.at.byte).brackets.pop()?;
        if self.open_at(self.yaml.len()).brackets.iter().any(|(open, _)| *open == byte) {
            return None;
        }
        let (before, rest) = self.yaml.split_at(self.at.byte);
        let entry = before.rfind(['{', '[', ',']).map_or(before, |at| &before[at + 1..]);
        let (start, word) = if rest.starts_with(':') && entry.contains(':') {
            let word = entry.split_whitespace().last()?;
            (before.trim_end().len() - word.len(), word)
        } else if before.trim_end().ends_with(['}', ']', '"', '\'']) {
            let end = rest.find(|c: char| c.is_whitespace() || ",:{}[]".contains(c));
            (before.len(), end.map_or(rest, |end| &rest[..end]))
        } else {
            return None;
        };
        let position = Position { chars: word.chars().count(), ..self.position(start) };
        // A word that is not a name may belong to a secret.
        let is_name = self.yaml[start + word.len()..].starts_with(':');
        let message = if is_name {
            format!("missing comma before {}", quoted(word))
        } else {
            "missing comma".to_owned()
        };
        (!word.is_empty()).then(|| Problem::new(position, message, "separate the entries with a comma"))
    }

    /// A bracket that is open where the parser stopped; or, on the same line, a name without a colon.
    fn bracket(&self, is_unclosed: bool) -> Option<Problem> {
        // The parser points at a bracket that is open at the end of the text.
        let here = self.yaml[self.at.byte..].chars().next().filter(|c| matches!(c, '{' | '[') && is_unclosed);
        let here = here.map(|bracket| (self.at.byte, bracket));
        let (byte, bracket) = here.or_else(|| self.open_at(self.at.byte).brackets.pop())?;
        let position = self.position(byte);
        let start = self.yaml[..self.at.byte].rfind(['{', '[', ',']).map_or(0, |at| at + 1);
        let name = &self.yaml[start..self.at.byte];
        if !is_unclosed && position.line == self.at.line && !name.trim().is_empty() && !name.contains(':') {
            let start = start + name.len() - name.trim_start().len();
            let position = Position { chars: name.trim().chars().count(), ..self.position(start) };
            let message = format!("{} has no value", quoted(name.trim()));
            return Some(Problem::new(
                position,
                message,
                format!("write a colon, as in `{}: ...`", name.trim()),
            ));
        }
        let close = if bracket == '{' { '}' } else { ']' };
        let help = format!("close it with `{close}`, or quote the text if the bracket belongs to it");
        Some(Problem::new(position, format!("`{bracket}` is not closed"), help))
    }

    /// A quotation mark that is open where the parser stopped.
    fn quote(&self) -> Option<Problem> {
        let byte = self.open_at(self.at.byte).quote?;
        let mark = self.yaml[byte..].chars().next()?;
        let help = format!("add the closing {mark}");
        Some(Problem::new(self.position(byte), "the quotation mark is not closed", help))
    }

    /// A character that cannot start a value.
    fn unquoted(&self) -> Option<Problem> {
        let rest = self.yaml.get(self.at.byte..)?;
        let word = rest.split([',', '}', ']', '\n', '\r']).next()?.trim();
        let first = word.chars().next()?;
        let help = format!("put it into quotes: '{}'", quoted(word).trim_matches('`'));
        Some(Problem::new(self.at, format!("a value cannot start with `{first}`"), help))
    }

    fn position(&self, byte: usize) -> Position {
        let before = &self.yaml[..byte];
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        let line = before.matches('\n').count() + 1;
        Position { line, column: before[start..].chars().count() + 1, chars: 1, byte }
    }

    /// What is open at a byte: the brackets of flow collections, and a quotation mark.
    fn open_at(&self, end: usize) -> Open {
        let (mut brackets, mut quote): (Vec<(usize, char)>, Option<usize>) = (Vec::new(), None);
        // The last characters before this one, without spaces, and whether a space follows it.
        let (mut before, mut is_spaced) = ('\n', true);
        for (at, c) in self.yaml.char_indices().take_while(|(at, _)| *at < end) {
            if let Some(start) = quote {
                if self.yaml[start..].starts_with(c) && before != '\\' {
                    quote = None;
                }
                before = if before == '\\' { ' ' } else { c };
                continue;
            }
            let starts_value =
                matches!(before, '\n' | '[' | '{' | ',') || (matches!(before, ':' | '-') && is_spaced);
            match c {
                '\'' | '"' if starts_value => quote = Some(at),
                '{' | '[' if starts_value || !brackets.is_empty() => brackets.push((at, c)),
                '}' | ']' => drop(brackets.pop()),
                '#' if is_spaced => before = '#',
                _ => {}
            }
            // A comment ends at the end of its line.
            if before == '#' && c != '\n' {
                continue;
            }
            is_spaced = c.is_whitespace();
            if !is_spaced || c == '\n' {
                before = c;
            }
        }
        Open { brackets, quote }
    }
}

/// What is open at a position.
struct Open {
    /// The innermost is the last.
    brackets: Vec<(usize, char)>,
    quote: Option<usize>,
}

/// How many lines are searched for the line above.
const LINES_BACK_MAX: usize = 100;

/// `name value` or `name:value` as `name: value`.
pub(crate) fn written_with_colon(line: &str) -> Option<String> {
    let (name, value) = line.split_once([':', ' ', '='])?;
    let (name, value) = (name.trim(), value.trim_start_matches([' ', '=', ':']).trim());
    let is_name =
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte));
    (is_name && !value.is_empty()).then(|| format!("{name}: {value}"))
}
