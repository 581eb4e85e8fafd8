//! `cargo xtask tidy`: the rules of style that neither rustfmt nor clippy can check.
//!
//! Each check is a function from a [`Tree`] (paths and texts) to findings, in a file of its own.

mod cycles;
mod facts;
mod length;
mod links;
mod lists;
mod paths;
mod source;
mod tree;
mod types;
mod width;
mod words;

use std::collections::BTreeSet;
use std::path::Path;

use tree::Tree;

/// A place that breaks a rule, and what to write instead.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    file: String,
    line: usize,
    message: String,
}

impl Finding {
    fn new(file: &str, line: usize, message: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line, message: message.into() }
    }
}

type Check = fn(&Tree) -> Vec<Finding>;

/// All checks, by the name that the summary prints.
const CHECKS: [(&str, Check); 11] = [
    ("width", width::check),
    ("words", words::check),
    ("names", words::check_identifiers),
    ("types", types::check),
    ("length", length::check),
    ("cycles", cycles::check),
    ("path attributes", paths::check_attributes),
    ("links", links::check),
    ("paths", paths::check),
    ("facts", facts::check),
    ("lists", lists::check),
];

/// Prints all findings under `only` (everywhere, if it is empty), then the counts.
pub(crate) fn run(root: &Path, only: &[&str], say: fn(&str)) -> Result<(), String> {
    if let Some(option) = only.iter().find(|path| path.starts_with('-')) {
        return Err(format!(
            "{option}: expected paths below the repository: cargo xtask tidy docs"
        ));
    }
    if let Some(missing) = only.iter().find(|path| !root.join(path).exists()) {
        return Err(format!("{missing}: no such file or folder in the repository"));
    }
    let tree = Tree::read(root)?;
    let (mut total, mut counts, mut files) = (0, Vec::new(), BTreeSet::new());
    for (name, check) in CHECKS {
        let mut findings: Vec<Finding> =
            check(&tree).into_iter().filter(|finding| is_under(&finding.file, only)).collect();
        findings.sort();
        for Finding { file, line, message } in &findings {
            say(&format!("{file}:{line}: {message}\n"));
            files.insert(file.clone());
        }
        total += findings.len();
        counts.push(format!("{name} {}", findings.len()));
    }
    say(&format!("tidy: {}\n", counts.join(", ")));
    match total {
        0 => Ok(()),
        _ => Err(format!("{total} findings in {} files", files.len())),
    }
}

/// Whether a file is one of the paths, or below one of them.
fn is_under(file: &str, only: &[&str]) -> bool {
    let below = |path: &&str| {
        let path = path.trim_start_matches("./").trim_end_matches('/');
        file == path || file.strip_prefix(path).is_some_and(|rest| rest.starts_with('/'))
    };
    only.is_empty() || only.iter().any(below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_can_be_limited_to_paths() {
        assert!(is_under("docs/http.md", &[]));
        assert!(is_under("docs/http.md", &["docs/"]));
        assert!(is_under("docs/http.md", &["README.md", "./docs/http.md"]));
        assert!(!is_under("docs/http.md", &["doc"]));
    }
}
