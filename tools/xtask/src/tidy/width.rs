//! Lines of at most 100 columns, in code, comments and the code of pages.

use super::Finding;
use super::source::SourceText;
use super::tree::{File, Tree, page_lines};

const COLUMNS: usize = 100;

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.files.iter().flat_map(check_file).collect()
}

fn check_file(file: &File) -> Vec<Finding> {
    match &file.source {
        Some(source) => check_source(file, source),
        None => check_page(file),
    }
}

fn check_source(file: &File, source: &SourceText) -> Vec<Finding> {
    let lines = file.text.lines().zip(source.strings.lines()).enumerate();
    let long = lines.filter(|(_, (line, strings))| {
        // What stands in a literal is the author's to break.
        let is_text = strings.chars().skip(COLUMNS - 30).any(|c| c != ' ');
        is_long(line) && !is_text && !cannot_be_broken(line)
    });
    long.map(|(index, (line, _))| finding(file, index + 1, line)).collect()
}

/// Prose of pages wraps in the editor; what stands in a block is copied.
fn check_page(file: &File) -> Vec<Finding> {
    // What a command prints is as wide as it is.
    let (mut printed, mut inside) = (false, false);
    let mut findings = Vec::new();
    for (number, line, fenced) in page_lines(&file.text) {
        if fenced && !inside {
            let language = line.trim_start().trim_start_matches(['`', '~']).trim();
            printed = ["", "text", "console", "http", "json"].contains(&language);
        }
        inside = fenced && !(inside && line.trim_start().starts_with("```"));
        let typed = !printed || line.trim_start().starts_with("$ ");
        if fenced && typed && is_long(line) && !cannot_be_broken(line) {
            findings.push(finding(file, number, line));
        }
    }
    findings
}

fn is_long(line: &str) -> bool {
    line.chars().count() > COLUMNS
}

/// Whether the line is one word after its indentation, a URL, or a row of a table.
fn cannot_be_broken(line: &str) -> bool {
    let text = line.trim_start().trim_start_matches(['/', '!', '-', '#']).trim_start();
    let words = text.split_whitespace();
    let is_link = |word: &str| word.contains("://") || word.contains("](");
    text.starts_with('|')
        || words.clone().count() <= 1
        || words.into_iter().any(|word| is_link(word) && word.chars().count() > COLUMNS / 2)
}

fn finding(file: &File, line: usize, text: &str) -> Finding {
    let columns = text.chars().count();
    Finding::new(&file.path, line, format!("{columns} columns: break it at {COLUMNS}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        check_file(&File::new(path, text)).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn long_code_and_comments_are_found() {
        let code = format!("fn a() {{}}\nlet b = {};\n", "c + ".repeat(30));
        assert_eq!(lines("a.rs", &code), [2]);
        assert_eq!(lines("a.rs", &format!("// {}\n", "word ".repeat(25))), [1]);
        assert_eq!(lines("a.lua", &format!("-- {}\n", "word ".repeat(25))), [1]);
    }

    #[test]
    fn what_cannot_be_broken_may_be_long() {
        assert!(lines("a.rs", &format!("    \"{}\",\n", "word ".repeat(25))).is_empty());
        assert!(lines("a.rs", &format!("//! | {} |\n", "word ".repeat(25))).is_empty());
        assert!(lines("a.rs", &format!("// see https://{}\n", "x".repeat(100))).is_empty());
    }

    #[test]
    fn prose_and_output_of_pages_may_be_long_and_code_may_not() {
        let long = "word ".repeat(25);
        let page = format!("{long}\n```rust\n{long}\n```\n```console\n$ {long}\n{long}\n```\n");
        assert_eq!(lines("a.md", &page), [3, 6]);
    }
}
