//! Names of types that stand for two things in one crate.

use std::collections::BTreeMap;

use super::Finding;
use super::source::SourceText;
use super::tree::Tree;

/// Names that may be shared, because the module is a part of the name wherever they are used.
/// The path is a crate, or a folder of one, and empty for all.
const SHARED: [(&str, &str, &str); 2] = [
    ("", "Error", "`resp::Error`: each module may have its own error type"),
    ("", "Inner", "private: what the `Arc` of the one public type of the file holds"),
];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut test_files = Vec::new();
    for (file, source) in tree.rust() {
        test_files.extend(source.product().1.into_iter().map(|name| file_of(&file.path, &name)));
    }
    let mut places: BTreeMap<(String, String), Vec<(String, usize)>> = BTreeMap::new();
    for (file, source) in tree.rust() {
        let Some((package, _)) = file.path.split_once("/src/") else { continue };
        if test_files.iter().any(|stem| is_of(&file.path, stem)) {
            continue;
        }
        for (name, line) in types(source) {
            let key = (package.to_owned(), name);
            places.entry(key).or_default().push((file.path.clone(), line));
        }
    }
    let mut findings = Vec::new();
    for ((package, name), places) in places {
        if places.len() < 2 || is_shared(&package, &name) {
            continue;
        }
        let (first, line) = &places[0];
        // Two in one file are the same thing on two platforms.
        for (file, own) in places[1..].iter().filter(|(file, _)| file != first) {
            let advice = format!(
                "type {name} is another one than in {first}:{line}: give it a name of its own"
            );
            findings.push(Finding::new(file, *own, advice));
        }
    }
    findings
}

fn is_shared(package: &str, name: &str) -> bool {
    SHARED.iter().any(|(path, shared, _)| *shared == name && package.starts_with(path))
}

/// Where `mod name;` in a file is, without the ending.
pub(super) fn file_of(path: &str, name: &str) -> String {
    let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
    match file {
        "mod.rs" | "lib.rs" | "main.rs" => format!("{folder}/{name}"),
        _ => format!("{folder}/{}/{name}", file.trim_end_matches(".rs")),
    }
}

/// Whether a file is the module at this path or below it.
pub(super) fn is_of(path: &str, stem: &str) -> bool {
    path.strip_prefix(stem).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

/// The types that a file declares in modules, not in functions.
fn types(source: &SourceText) -> Vec<(String, usize)> {
    let (code, _) = source.product();
    let (mut found, mut blocks, mut statement) = (Vec::new(), Vec::new(), String::new());
    let mut line = 1;
    for c in code.chars() {
        match c {
            '{' | ';' | '}' => {
                if blocks.iter().all(|is_module| *is_module) {
                    found.extend(declared(&statement).map(|name| (name.to_owned(), line)));
                }
                let is_module = statement.split_whitespace().any(|word| word == "mod");
                match c {
                    '{' => blocks.push(is_module),
                    '}' => drop(blocks.pop()),
                    _ => {}
                }
                statement.clear();
            }
            '\n' => {
                line += 1;
                statement.push(' ');
            }
            _ => statement.push(c),
        }
    }
    found
}

/// The name in `pub(crate) struct Name<T>`.
fn declared(statement: &str) -> Option<&str> {
    // Attributes may have words of their own: `#[derive(…)]`.
    let words = statement.rsplit(']').next()?;
    let mut words = words.split_whitespace();
    words.find(|word| ["struct", "enum", "trait", "union"].contains(word))?;
    let name = words.next()?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    name.starts_with(char::is_uppercase).then(|| &name[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_types_of_one_name_are_found() {
        let tree = Tree::of(&[
            ("crates/a/src/one.rs", "pub struct Place<T>(T);\npub enum Error {}\n"),
            ("crates/a/src/two.rs", "#[derive(Debug)]\npub(crate) enum Place { A }\nenum Error {}"),
            ("crates/b/src/lib.rs", "struct Place;"),
        ]);
        let findings = check(&tree);
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!((findings[0].file.as_str(), findings[0].line), ("crates/a/src/two.rs", 2));
        assert!(findings[0].message.contains("crates/a/src/one.rs:1"));
    }

    #[test]
    fn types_of_tests_and_of_functions_may_have_any_name() {
        let tree = Tree::of(&[
            ("crates/a/src/lib.rs", "struct Place;\n#[cfg(test)]\nmod laws;\n"),
            ("crates/a/src/laws.rs", "struct Place;"),
            ("crates/a/src/two.rs", "fn f() { struct Place; }"),
            ("crates/a/src/three.rs", "#[cfg(test)]\nmod tests { struct Place; }"),
        ]);
        assert_eq!(check(&tree), []);
    }
}
