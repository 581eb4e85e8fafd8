//! Paths of the repository that pages and attributes name.

use super::Finding;
use super::links::join;
use super::tree::{File, Tree, page_lines};

/// Folders at the root: a name in backticks that begins with one of them is a path.
const ROOTS: [&str; 8] =
    ["crates/", "tools/", "docs/", "testdata/", "examples/", "deploy/", "clients/", ".cargo/"];

/// Crates that may compile a file of another one, with the reason.
const MAY_INCLUDE: [(&str, &str); 1] =
    [("tools/loom/", "it compiles product code with the atomics of loom, which a crate cannot")];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.pages().flat_map(|page| check_page(tree, page)).collect()
}

/// The code map of `ARCHITECTURE.md` names files relative to the crate of their section.
fn check_page(tree: &Tree, page: &File) -> Vec<Finding> {
    let is_map = page.path == "ARCHITECTURE.md";
    let mut base = String::new();
    let mut findings = Vec::new();
    for (number, line, fenced) in page_lines(&page.text) {
        if fenced {
            continue;
        }
        for (index, span) in line.split('`').enumerate() {
            if index % 2 == 0 || !is_path(span) {
                continue;
            }
            let from_root = ROOTS.iter().any(|root| span.starts_with(root));
            if from_root && is_map && line.starts_with('#') {
                base = span.trim_end_matches('/').to_owned();
            }
            let named = from_root || is_map && (span.ends_with(".rs") || span.ends_with('/'));
            let places = [
                span.to_owned(),
                join(&page.path, span),
                format!("{base}/{span}"),
                format!("{base}/src/{span}"),
            ];
            let places = if is_map { &places[..] } else { &places[..2] };
            if named && !places.iter().any(|place| tree.has(place)) {
                findings.push(Finding::new(
                    &page.path,
                    number,
                    format!("`{span}` does not exist: name the file that has it now"),
                ));
            }
        }
    }
    findings
}

/// Whether this can be a path, and not a pattern of several or a command.
fn is_path(span: &str) -> bool {
    let plain = |c: char| c.is_alphanumeric() || "/._-".contains(c);
    !span.is_empty() && span.chars().all(plain) && !span.contains("...") && !span.starts_with('/')
}

/// `#[path]` into another crate.
pub(super) fn check_attributes(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (file, source) in tree.rust() {
        let lines = source.code.lines().zip(file.text.lines()).enumerate();
        for (index, (code, line)) in lines {
            if !code.trim_start().starts_with("#[path =") {
                continue;
            }
            let target = join(&file.path, line.split('"').nth(1).unwrap_or_default());
            let own = package(&file.path);
            let may = MAY_INCLUDE.iter().any(|(path, _)| file.path.starts_with(path));
            if package(&target) != own && !may {
                let advice = format!("{target} is of another crate: make it a crate that both use");
                findings.push(Finding::new(&file.path, index + 1, advice));
            }
        }
    }
    findings
}

/// `crates/core` of `crates/core/src/lib.rs`.
fn package(path: &str) -> &str {
    path.match_indices('/').nth(1).map_or(path, |(at, _)| &path[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_do_not_exist_are_found() {
        let tree = Tree::of(&[
            ("crates/core/src/limit/mod.rs", ""),
            (
                "ARCHITECTURE.md",
                "`crates/core` `crates/gone`\n## `crates/core`\n`limit/` `limit/mod.rs` `gone.rs`\n",
            ),
            ("docs/a.md", "`tools/gone/` `tools/*/x` `gone.rs`\n```\n`tools/gone`\n```\n"),
        ]);
        let found: Vec<(String, usize)> =
            check(&tree).into_iter().map(|one| (one.file, one.line)).collect();
        let expected = [("ARCHITECTURE.md", 1), ("ARCHITECTURE.md", 3), ("docs/a.md", 1)]
            .map(|(file, line)| (file.to_owned(), line));
        assert_eq!(found, expected);
    }

    #[test]
    fn attributes_stay_in_their_crate() {
        let tree = Tree::of(&[
            ("crates/a/tests/it/main.rs", "#[path = \"proxy/mod.rs\"]\nmod x;\n"),
            ("crates/a/tests/it/model.rs", "\n#[path = \"../../../core/tests/draw.rs\"]\nmod y;\n"),
            ("tools/loom/src/main.rs", "#[path = \"../../../crates/a/src/b.rs\"]\nmod z;\n"),
        ]);
        let findings = check_attributes(&tree);
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(
            (findings[0].file.as_str(), findings[0].line),
            ("crates/a/tests/it/model.rs", 2)
        );
    }
}
