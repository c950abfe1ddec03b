//! Rust source without what is not code, and its words.

/// Returns the text with comments and the contents of string and character literals replaced by spaces, line for
/// line.
pub(super) fn code_only(text: &str) -> String {
    let mut scanner = Scanner { source: text.chars().collect(), position: 0, code: String::new() };
    while let Some(character) = scanner.peek(0) {
        match (character, scanner.peek(1)) {
            ('/', Some('/')) => scanner.line_comment(),
            ('/', Some('*')) => scanner.block_comment(),
            ('"', _) => scanner.quoted('"'),
            ('\'', _) if scanner.is_character() => scanner.quoted('\''),
            (character, _) if character.is_alphanumeric() || character == '_' => scanner.word(),
            _ => scanner.keep(),
        }
    }
    scanner.code
}

struct Scanner {
    source: Vec<char>,
    position: usize,
    code: String,
}

impl Scanner {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.source.get(self.position + ahead).copied()
    }

    fn keep(&mut self) {
        self.code.extend(self.peek(0));
        self.position += 1;
    }

    fn blank(&mut self) {
        self.code.extend(self.peek(0).map(|character| if character == '\n' { '\n' } else { ' ' }));
        self.position += 1;
    }

    fn line_comment(&mut self) {
        while self.peek(0).is_some_and(|character| character != '\n') {
            self.blank();
        }
    }

    fn block_comment(&mut self) {
        let mut depth = 0_usize;
        loop {
            match (self.peek(0), self.peek(1)) {
                (Some('/'), Some('*')) => depth += 1,
                (Some('*'), Some('/')) => depth -= 1,
                (Some(_), _) => {
                    self.blank();
                    continue;
                }
                (None, _) => return,
            }
            self.blank();
            self.blank();
            if depth == 0 {
                return;
            }
        }
    }

    /// Blanks a string or character literal, from quote to quote.
    fn quoted(&mut self, quote: char) {
        self.keep();
        while let Some(character) = self.peek(0).filter(|character| *character != quote) {
            self.blank();
            if character == '\\' {
                self.blank();
            }
        }
        self.keep();
    }

    /// Distinguishes the literal `'a'` from the lifetime `'a`.
    fn is_character(&self) -> bool {
        self.peek(1) == Some('\\') || self.peek(2) == Some('\'')
    }

    /// Copies a name, a keyword or a number; after the prefix of a raw string, also handles the string.
    fn word(&mut self) {
        let start = self.position;
        while self.peek(0).is_some_and(|character| character.is_alphanumeric() || character == '_') {
            self.keep();
        }
        let is_prefix = matches!(self.source[start..self.position], ['r'] | ['b' | 'c', 'r']);
        let hashes = self.source[self.position..].iter().take_while(|character| **character == '#').count();
        if is_prefix && self.peek(hashes) == Some('"') {
            self.raw_string(hashes);
        }
    }

    fn raw_string(&mut self, hashes: usize) {
        for _ in 0..=hashes {
            self.keep();
        }
        while self.peek(0).is_some() {
            let closes = self.peek(0) == Some('"') && (1..=hashes).all(|ahead| self.peek(ahead) == Some('#'));
            if closes {
                for _ in 0..=hashes {
                    self.keep();
                }
                return;
            }
            self.blank();
        }
    }
}

/// A word or a punctuation character, and its line.
pub(super) struct Token<'a> {
    pub(super) text: &'a str,
    /// Counted from 1.
    pub(super) line: usize,
}

/// The words and punctuation characters of code.
pub(super) fn tokens(code: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    for (index, line) in code.lines().enumerate() {
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let end = match first {
                first if is_word(first) => rest.find(|character| !is_word(character)).unwrap_or(rest.len()),
                first => first.len_utf8(),
            };
            tokens.push(Token { text: &rest[..end], line: index + 1 });
            rest = rest[end..].trim_start();
        }
    }
    tokens
}

/// Whether it can be part of a name, a keyword or a number.
pub(super) fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_blanked_and_code_stays() {
        for (source, code) in [
            ("a // b\nc", "a     \nc"),
            ("a /* b /* c */ d */ e", "a                   e"),
            (r#"f("a \" b", g)"#, r#"f("      ", g)"#),
            (r##"f(r#"a " b"#, g)"##, r##"f(r#"     "#, g)"##),
            (r#"f(b"a", br"\", c)"#, r#"f(b" ", br" ", c)"#),
            ("'a' + '\\'' + '\"' + x", "' ' + '  ' + ' ' + x"),
            ("&'a str, 'b: loop", "&'a str, 'b: loop"),
            ("r#type + number", "r#type + number"),
            ("\"// no comment\" a", "\"             \" a"),
        ] {
            assert_eq!(code_only(source), code, "{source}");
        }
    }

    #[test]
    fn line_numbers_are_preserved() {
        let source = "/* a\n b */\nlet x = \"c\nd\\\n e\";\nf();\n";
        assert_eq!(code_only(source).lines().count(), source.lines().count());
        assert_eq!(code_only(source).lines().last(), Some("f();"));
    }

    #[test]
    fn unclosed_literal_or_comment_ends_with_the_file() {
        for source in ["/* a", "\"a", "r#\"a", "'\\", "\"\\"] {
            assert!(!code_only(source).contains('a'), "{source}");
        }
    }
}
