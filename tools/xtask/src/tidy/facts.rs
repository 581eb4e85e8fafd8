//! Facts that pages state about the source, held to it.

use std::collections::BTreeSet;

use super::Finding;
use super::source::SourceText;
use super::tree::Tree;

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = unsafe_files(tree);
    findings.extend(bytes_per_key(tree));
    findings
}

/// Whether there is `unsafe` code in a file, or it is allowed there.
fn has_unsafe(source: &SourceText) -> bool {
    let starts = |rest: &str| {
        let rest = rest.trim_start();
        ["{", "fn", "impl", "trait", "extern"].iter().any(|word| rest.starts_with(word))
    };
    source.code.split("unsafe").skip(1).any(starts) || source.code.contains("allow(unsafe_code")
}

/// `SECURITY.md` lists the files with `unsafe` code, and other pages point to the list.
fn unsafe_files(tree: &Tree) -> Vec<Finding> {
    const PAGE: &str = "SECURITY.md";
    const TITLE: &str = "## Where `unsafe` is";
    let Some(page) = tree.file(PAGE) else { return Vec::new() };
    let section = page.text.split(TITLE).nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| [")?.split_once(']'));
    let listed: BTreeSet<&str> = rows.map(|(file, _)| file).collect();
    let has: BTreeSet<&str> = tree
        .rust()
        .filter(|(_, source)| has_unsafe(source))
        .map(|(file, _)| file.path.as_str())
        .collect();
    let at = page.text.lines().position(|line| line == TITLE).map_or(1, |index| index + 1);
    let mut findings = Vec::new();
    for file in has.difference(&listed) {
        let advice = format!("{file} has unsafe code: list it, with its reason");
        findings.push(Finding::new(PAGE, at, advice));
    }
    for file in listed.difference(&has) {
        let advice = format!("{file} has no unsafe code: remove it from the list");
        findings.push(Finding::new(PAGE, at, advice));
    }
    for file in ["CONTRIBUTING.md", "ARCHITECTURE.md"] {
        let points = |page: &super::tree::File| page.text.contains("SECURITY.md#where-unsafe-is");
        if !tree.file(file).is_some_and(points) {
            findings.push(Finding::new(file, 1, "point to SECURITY.md#where-unsafe-is"));
        }
    }
    findings
}

/// `tools/bench/README.md` has what was measured; other pages say the bound that
/// `a_live_key_takes_at_most_64_bytes` tests. Decision records tell history.
fn bytes_per_key(tree: &Tree) -> Vec<Finding> {
    const MEASURED: &str = "tools/bench/README.md";
    const PHRASES: [&str; 5] =
        [" bytes per key", " bytes a key", " bytes per bucket", " bytes each", " bytes of table"];
    let mut findings = Vec::new();
    for page in tree.pages() {
        if page.path.starts_with("docs/decisions/") || page.path == MEASURED {
            continue;
        }
        for (index, line) in page.text.lines().enumerate() {
            for phrase in PHRASES {
                for (at, _) in line.match_indices(phrase) {
                    let number = |c: char| !c.is_ascii_digit() && c != '.';
                    if line[..at].rsplit(number).next() != Some("64") {
                        let advice = format!("a key takes 64 bytes at most; {MEASURED} has more");
                        findings.push(Finding::new(&page.path, index + 1, advice));
                    }
                }
            }
        }
    }
    for (file, needed) in [
        (MEASURED, "$ cargo xtask bench bytes tidegate 1e6\n"),
        ("crates/tidegate/tests/it/memory.rs", "assert!(bytes <= 64"),
    ] {
        if tree.file(file).is_some_and(|page| !page.text.contains(needed)) {
            let advice = format!("expected `{}`, which shows 64 bytes per key", needed.trim());
            findings.push(Finding::new(file, 1, advice));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_unsafe_files_is_held_to_the_code() {
        let pointer = "SECURITY.md#where-unsafe-is";
        let tree = |code: &str| {
            let page =
                "# A\n## Where `unsafe` is\n\n| [a.rs](a.rs) | why |\n\n## B\n| [b.rs](b.rs) |\n";
            Tree::of(&[
                ("SECURITY.md", page),
                ("CONTRIBUTING.md", pointer),
                ("ARCHITECTURE.md", pointer),
                ("a.rs", "// unsafe {}\nfn a() { unsafe { b() } }"),
                ("c.rs", code),
            ])
        };
        assert_eq!(unsafe_files(&tree("// unsafe {}\nlet a = \"unsafe {}\";")), []);
        let found = unsafe_files(&tree("unsafe impl A for B {}"));
        assert_eq!(
            found,
            [Finding::new("SECURITY.md", 2, "c.rs has unsafe code: list it, with its reason")]
        );
    }

    #[test]
    fn another_number_of_bytes_per_key_is_found() {
        let page = "It takes 64 bytes per key.\nIt takes 48 bytes a key.\n";
        let tree = Tree::of(&[("docs/a.md", page), ("docs/decisions/0001-b.md", page)]);
        let lines: Vec<usize> = bytes_per_key(&tree).iter().map(|one| one.line).collect();
        assert_eq!(lines, [2]);
    }
}
