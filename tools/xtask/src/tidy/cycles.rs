//! Cycles between the top-level modules of a crate.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::tree::{Tree, line_at};
use super::types::{file_of, is_of};

/// The core is one rule in several files, which know each other; these have layers.
const CRATES: [&str; 3] = ["crates/redis-client", "crates/server", "crates/tidegate"];

/// One module uses another: the first place where it does.
type Edges = BTreeMap<(String, String), (String, usize)>;

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    CRATES.into_iter().flat_map(|package| check_crate(tree, package)).collect()
}

fn check_crate(tree: &Tree, package: &str) -> Vec<Finding> {
    let edges = edges(tree, package);
    let mut findings = Vec::new();
    for ((from, to), (file, line)) in &edges {
        if let Some(back) = way(&edges, to, from) {
            let ring = [from.as_str()].into_iter().chain(back).collect::<Vec<_>>().join(" -> ");
            let advice = format!("import cycle {ring}: move what both need below them");
            findings.push(Finding::new(file, *line, advice));
        }
    }
    findings
}

/// The shortest way from a module to another one by its uses.
fn way<'a>(edges: &'a Edges, from: &'a str, to: &str) -> Option<Vec<&'a str>> {
    let mut ways = vec![vec![from]];
    let mut seen = BTreeSet::from([from]);
    while !ways.is_empty() {
        let mut next = Vec::new();
        for way in ways {
            let last = *way.last()?;
            if last == to {
                return Some(way);
            }
            for (_, target) in edges.keys().filter(|(source, _)| source == last) {
                if seen.insert(target) {
                    next.push(way.iter().copied().chain([target.as_str()]).collect());
                }
            }
        }
        ways = next;
    }
    None
}

/// What the modules of a crate use of each other outside tests.
fn edges(tree: &Tree, package: &str) -> Edges {
    let source_folder = format!("{package}/src/");
    let files: Vec<_> =
        tree.rust().filter(|(file, _)| file.path.starts_with(&source_folder)).collect();
    let (mut tests, mut texts) = (Vec::new(), Vec::new());
    for (file, source) in files {
        let (code, modules) = source.product();
        tests.extend(modules.iter().map(|name| file_of(&file.path, name)));
        texts.push((file.path.as_str(), code));
    }
    texts.retain(|(path, _)| !tests.iter().any(|stem| is_of(path, stem)));
    let module = |path: &str| {
        let inner = path[source_folder.len()..].trim_end_matches(".rs");
        inner.split('/').next().unwrap_or_default().to_owned()
    };
    let modules: BTreeSet<String> = texts.iter().map(|(path, _)| module(path)).collect();
    let root = texts.iter().find(|(path, _)| module(path) == "lib");
    let exports = root.map(|(_, code)| exports(code)).unwrap_or_default();
    let mut edges = Edges::new();
    for (path, code) in &texts {
        let from = module(path);
        if from == "lib" || from == "main" {
            continue;
        }
        for (name, offset) in uses(code, depth(&path[source_folder.len()..])) {
            let to = exports.get(name.as_str()).unwrap_or(&name);
            if *to != from && modules.contains(to) {
                let place = || ((*path).to_owned(), line_at(code, offset));
                edges.entry((from.clone(), to.clone())).or_insert_with(place);
            }
        }
    }
    edges
}

/// How many modules a file of `src/` is below the root.
fn depth(inner: &str) -> usize {
    inner.split('/').count() - usize::from(inner.ends_with("/mod.rs"))
}

/// The names that follow `crate::`, or as many `super::` as lead to the root.
fn uses(code: &str, depth: usize) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    for root in ["crate::".to_owned(), "super::".repeat(depth)] {
        for (at, _) in code.match_indices(&root) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':' || c == '$') {
                continue;
            }
            let rest = &code[at + root.len()..];
            if !rest.starts_with("super::") {
                found.extend(names(rest).into_iter().map(|name| (name, at)));
            }
        }
    }
    found
}

/// The first names of `a::b`, or of each path in `{a::b, c}`.
fn names(rest: &str) -> Vec<String> {
    let Some(group) = rest.strip_prefix('{') else {
        return vec![identifier(rest).to_owned()];
    };
    let (mut found, mut depth, mut starts) = (Vec::new(), 0, true);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => starts = true,
            c if starts && !c.is_whitespace() => {
                found.push(identifier(&group[at..]).to_owned());
                starts = false;
            }
            _ => {}
        }
    }
    found
}

fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// What the root of a crate re-exports, with the module that it is from.
fn exports(code: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for (at, _) in code.match_indices("use ") {
        let rest = &code[at + 4..];
        let path = &rest[..rest.find(';').unwrap_or(rest.len())];
        let path = path.trim_start_matches("crate::").trim_start_matches("self::");
        let module = identifier(path);
        for name in path.split(|c: char| !c.is_alphanumeric() && c != '_').skip(1) {
            if name.starts_with(char::is_uppercase) || name.contains('_') {
                found.insert(name.to_owned(), module.to_owned());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_is_found_with_its_places() {
        let tree = Tree::of(&[
            (
                "crates/server/src/lib.rs",
                "mod one; mod two; mod three;\npub use three::{Deep, Other};",
            ),
            ("crates/server/src/one.rs", "use crate::{\n    two::{X, Y},\n    other,\n};\n"),
            ("crates/server/src/two/mod.rs", "mod inner;"),
            ("crates/server/src/two/inner.rs", "\nfn f() { super::super::Deep }"),
            ("crates/server/src/three.rs", "use super::one;"),
        ]);
        let findings = check(&tree);
        let places: Vec<_> = findings.iter().map(|f| (f.file.as_str(), f.line)).collect();
        assert_eq!(
            places,
            [
                ("crates/server/src/one.rs", 1),
                ("crates/server/src/three.rs", 1),
                ("crates/server/src/two/inner.rs", 2)
            ]
        );
        assert!(findings[0].message.contains("one -> two -> three -> one"), "{findings:?}");
    }

    #[test]
    fn arrows_one_way_and_tests_are_no_cycle() {
        let tree = Tree::of(&[
            ("crates/server/src/one.rs", "use crate::two;"),
            (
                "crates/server/src/two.rs",
                "// crate::one\n#[cfg(test)]\nmod tests { use crate::one; }",
            ),
        ]);
        assert_eq!(check(&tree), []);
    }
}
