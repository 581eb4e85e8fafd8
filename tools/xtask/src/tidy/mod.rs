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

/// What the first clean-up has left, by check. These numbers only go down; at zero, a check is
/// strict.
const LEFT: [(&str, usize); 6] = [
    ("width", 141),
    ("words", 80),
    ("names", 11),
    ("types", 5),
    ("length", 9),
    ("path attributes", 2),
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
    report(&findings(root, only)?, |_| 0, say)
}

/// Fails if a check finds more than is left of the first clean-up.
pub(crate) fn gate(root: &Path, say: fn(&str)) -> Result<(), String> {
    let left = |check: &str| LEFT.iter().find(|(name, _)| *name == check).map_or(0, |left| left.1);
    report(&findings(root, &[])?, left, say)
}

type Findings = Vec<(&'static str, Vec<Finding>)>;

fn findings(root: &Path, only: &[&str]) -> Result<Findings, String> {
    let tree = Tree::read(root)?;
    let under = |check: Check| {
        let mut found = check(&tree);
        found.retain(|finding| is_under(&finding.file, only));
        found.sort();
        found
    };
    Ok(CHECKS.into_iter().map(|(name, check)| (name, under(check))).collect())
}

/// Prints the findings of each check that has more than it may, and all counts.
fn report(all: &Findings, may: impl Fn(&str) -> usize, say: fn(&str)) -> Result<(), String> {
    let (mut total, mut files) = (0, BTreeSet::new());
    for (_, findings) in all.iter().filter(|(name, findings)| findings.len() > may(name)) {
        total += findings.len();
        for Finding { file, line, message } in findings {
            say(&format!("{file}:{line}: {message}\n"));
            files.insert(file);
        }
    }
    let counts = all.iter().map(|(name, findings)| format!("{name} {}", findings.len()));
    say(&format!("tidy: {}\n", counts.collect::<Vec<_>>().join(", ")));
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
    fn a_check_fails_if_it_finds_more_than_is_left() {
        let all = vec![("words", vec![Finding::new("a.rs", 1, "x"), Finding::new("b.rs", 1, "x")])];
        assert_eq!(report(&all, |_| 2, |_| {}), Ok(()));
        assert_eq!(report(&all, |_| 1, |_| {}), Err("2 findings in 2 files".into()));
    }

    #[test]
    fn findings_can_be_limited_to_paths() {
        assert!(is_under("docs/http.md", &[]));
        assert!(is_under("docs/http.md", &["docs/"]));
        assert!(is_under("docs/http.md", &["README.md", "./docs/http.md"]));
        assert!(!is_under("docs/http.md", &["doc"]));
    }
}
