//! SourceText text taken apart: code, comments and string literals, each at its place.

/// Three texts with the lines and columns of the source; what belongs to another is a space.
pub(super) struct SourceText {
    pub(super) code: String,
    pub(super) comments: String,
    pub(super) strings: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Code,
    Comment,
    Text,
}

/// Reads a source once, from its start to its end.
struct Reader<'a> {
    rest: &'a str,
    out: SourceText,
}

impl Reader<'_> {
    /// Takes so many bytes as one kind.
    fn take(&mut self, bytes: usize, kind: Kind) {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        let SourceText { code, comments, strings } = &mut self.out;
        for (text, own) in [(code, Kind::Code), (comments, Kind::Comment), (strings, Kind::Text)] {
            text.extend(taken.chars().map(|c| if own == kind || c == '\n' { c } else { ' ' }));
        }
    }

    /// Takes everything through the first `end`, or all that is left.
    fn take_through(&mut self, from: usize, end: &str, kind: Kind) {
        let bytes = self.rest[from..].find(end).map_or(self.rest.len(), |at| from + at + end.len());
        self.take(bytes, kind);
    }

    fn take_line(&mut self) {
        self.take(self.rest.find('\n').unwrap_or(self.rest.len()), Kind::Comment);
    }

    /// Takes a literal with escapes, of which the quote is the first byte of the rest.
    fn take_quoted(&mut self, quote: char) {
        self.take(1, Kind::Code);
        while let Some(next) = self.rest.chars().next() {
            let escaped = self.rest.chars().nth(1).filter(|_| next == '\\');
            if let Some(escaped) = escaped {
                // Not part of the text: `\n` before a word must not become a part of it.
                self.take(1 + escaped.len_utf8(), Kind::Code);
                continue;
            }
            if next == quote {
                return self.take(1, Kind::Code);
            }
            self.take(next.len_utf8(), Kind::Text);
        }
    }

    fn take_block_comment(&mut self) {
        let mut depth = 0;
        loop {
            if self.rest.starts_with("/*") {
                depth += 1;
                self.take(2, Kind::Comment);
            } else if self.rest.starts_with("*/") {
                depth -= 1;
                self.take(2, Kind::Comment);
                if depth == 0 {
                    return;
                }
            } else if let Some(next) = self.rest.chars().next() {
                self.take(next.len_utf8(), Kind::Comment);
            } else {
                return;
            }
        }
    }

    /// Takes an identifier, a number, or the quotes of a raw literal that look like one.
    fn take_word(&mut self) {
        let end = self.rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        let word = &self.rest[..end.unwrap_or(self.rest.len())];
        let hashes = self.rest[word.len()..].bytes().take_while(|byte| *byte == b'#').count();
        let opened = self.rest[word.len() + hashes..].starts_with('"');
        if ["r", "br", "cr"].contains(&word) && opened {
            let end = format!("\"{}", "#".repeat(hashes));
            self.take(word.len() + hashes + 1, Kind::Code);
            let text = self.rest.find(&end).unwrap_or(self.rest.len());
            self.take(text, Kind::Text);
            self.take(end.len().min(self.rest.len()), Kind::Code);
        } else {
            self.take(word.len(), Kind::Code);
        }
    }
}

impl SourceText {
    pub(super) fn rust(text: &str) -> Self {
        let mut reader = Reader::new(text);
        while let Some(next) = reader.rest.chars().next() {
            let rest = reader.rest;
            if rest.starts_with("//") {
                reader.take_line();
            } else if rest.starts_with("/*") {
                reader.take_block_comment();
            } else if next == '"' {
                reader.take_quoted('"');
            } else if next == '\'' {
                let mut after = rest.chars().skip(1);
                match (after.next(), after.next()) {
                    (Some('\\'), _) => reader.take_quoted('\''),
                    (Some(_), Some('\'')) => reader.take_quoted('\''),
                    _ => reader.take(1, Kind::Code), // a lifetime
                }
            } else if next.is_alphanumeric() || next == '_' {
                reader.take_word();
            } else {
                reader.take(next.len_utf8(), Kind::Code);
            }
        }
        reader.out
    }

    pub(super) fn lua(text: &str) -> Self {
        let mut reader = Reader::new(text);
        while let Some(next) = reader.rest.chars().next() {
            if reader.rest.starts_with("--[[") {
                reader.take_through(4, "]]", Kind::Comment);
            } else if reader.rest.starts_with("--") {
                reader.take_line();
            } else if reader.rest.starts_with("[[") {
                reader.take_through(2, "]]", Kind::Text);
            } else if next == '"' || next == '\'' {
                reader.take_quoted(next);
            } else {
                reader.take(next.len_utf8(), Kind::Code);
            }
        }
        reader.out
    }

    /// The code without what only tests see, and the modules of tests that have their own file.
    pub(super) fn product(&self) -> (String, Vec<String>) {
        let (mut kept, mut modules) = (String::new(), Vec::new());
        let mut rest = self.code.as_str();
        while let Some(at) =
            ["#[cfg(test)]", "#[cfg(all(test"].iter().filter_map(|s| rest.find(s)).min()
        {
            kept.push_str(&rest[..at]);
            let (end, module) = item_end(&rest[at..]);
            modules.extend(module);
            kept.extend(rest[at..at + end].chars().map(|c| if c == '\n' { c } else { ' ' }));
            rest = &rest[at + end..];
        }
        kept.push_str(rest);
        (kept, modules)
    }
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        let out =
            SourceText { code: String::new(), comments: String::new(), strings: String::new() };
        Self { rest: text, out }
    }
}

/// Where an item with its attributes ends, and its name if it is `mod name;`.
fn item_end(code: &str) -> (usize, Option<String>) {
    let mut depth = 0_usize;
    for (at, c) in code.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            '}' => {
                depth = depth.saturating_sub(1);
                // The end of a body; of a group of imports the semicolon follows.
                if depth == 0 && !code[at + 1..].starts_with(';') {
                    return (at + 1, None);
                }
            }
            ';' if depth == 0 => {
                let mut words = code[..at].rsplit(|c: char| !c.is_alphanumeric() && c != '_');
                let name = words.next().map(str::to_owned);
                let is_module = words.next() == Some("mod");
                return (at + 1, name.filter(|_| is_module));
            }
            // A field or a variant of something larger.
            ',' if depth == 0 => return (at + 1, None),
            _ => {}
        }
    }
    (code.len(), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_is_taken_apart() {
        let source = SourceText::rust(
            "let a = \"b // c\"; // d \"e\"\nlet f = 'g'; let h: &'i str = r#\"j\"k\"#; /* l\nm */ n",
        );
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&source.strings), ["b", "//", "c", "g", "j\"k"]);
        assert_eq!(words(&source.comments), ["//", "d", "\"e\"", "/*", "l", "m", "*/"]);
        assert!(source.code.contains("&'i str") && source.code.ends_with(" n"));
        assert_eq!(source.code.lines().count(), 3);
    }

    #[test]
    fn an_escape_is_no_part_of_a_word() {
        let source = SourceText::rust(r#"print("one\ntwo \"three\"")"#);
        assert_eq!(source.strings.split_whitespace().collect::<Vec<_>>(), ["one", "two", "three"]);
    }

    #[test]
    fn lua_is_taken_apart() {
        let source = SourceText::lua("local a = 'b' -- c\n--[[ d\ne ]] f");
        assert_eq!(
            source.comments.split_whitespace().collect::<Vec<_>>(),
            ["--", "c", "--[[", "d", "e", "]]"]
        );
        assert_eq!(source.strings.trim(), "b");
    }

    #[test]
    fn what_only_tests_see_is_no_product() {
        let text = "struct A;\n#[cfg(test)]\nuse x::{B, C};\n#[cfg(test)]\nmod laws;\n\
            #[cfg(test)]\nmod tests {\n    struct D;\n}\nstruct E;\n";
        let (code, modules) = SourceText::rust(text).product();
        assert_eq!(modules, ["laws"]);
        assert_eq!(code.split_whitespace().collect::<Vec<_>>(), ["struct", "A;", "struct", "E;"]);
        assert_eq!(code.lines().count(), text.lines().count());
    }
}
