//! Lists of names that stand in the code twice.

use std::collections::BTreeMap;

use super::Finding;
use super::tree::{Tree, line_at};
use super::types::{file_of, is_of};

/// So many equal names are no accident.
const LEAST: usize = 5;

/// `["a", "b", …]` of the product that has the same members as another one.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut lists: BTreeMap<Vec<String>, Vec<(String, usize)>> = BTreeMap::new();
    let mut tests = Vec::new();
    for (file, source) in tree.rust() {
        tests.extend(source.product().1.into_iter().map(|name| file_of(&file.path, &name)));
    }
    for (file, source) in tree.rust() {
        let is_product = file.path.starts_with("crates/") && file.path.contains("/src/");
        if !is_product || tests.iter().any(|stem| is_of(&file.path, stem)) {
            continue;
        }
        let (code, _) = source.product();
        for (at, members) in arrays(&code, &file.text) {
            let line = line_at(&code, at);
            lists.entry(members).or_default().push((file.path.clone(), line));
        }
    }
    let mut findings = Vec::new();
    for (members, places) in lists {
        let (first, line) = &places[0];
        for (file, own) in &places[1..] {
            let advice = format!(
                "the list of {} names ({}, …) is in {first}:{line}, too: keep one of them",
                members.len(),
                members[0]
            );
            findings.push(Finding::new(file, *own, advice));
        }
    }
    findings
}

/// The arrays of nothing but string literals, sorted, with their offsets.
fn arrays(code: &str, text: &str) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    // Blanked characters of several bytes are one space: offsets agree only in plain text.
    if code.len() != text.len() {
        return found;
    }
    for (at, _) in code.match_indices('[') {
        let Some(length) = code[at..].find(']') else { continue };
        let inside = &code[at + 1..at + length];
        if !inside.chars().all(|c| c.is_whitespace() || c == '"' || c == ',') {
            continue;
        }
        let quoted = text[at + 1..at + length].split('"').skip(1).step_by(2);
        let mut members: Vec<String> = quoted.map(str::to_owned).collect();
        members.sort();
        if members.len() >= LEAST {
            found.push((at, members));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_stands_twice_is_found() {
        let list = r#"const A: [&str; 5] = ["a", "b", "c", "d", "e"];"#;
        let same = r#"fn f() { for x in ["e", "d", "c", "b", "a"] {} }"#;
        let other = r#"const A: [&str; 5] = ["a", "b", "c", "d", "f"];"#;
        let tree = Tree::of(&[
            ("crates/a/src/one.rs", list),
            ("crates/a/src/two.rs", other),
            ("crates/b/src/lib.rs", same),
        ]);
        let findings = check(&tree);
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].file, "crates/b/src/lib.rs");
    }
}
