//! Facts that pages state about the source, held to it by tests.

use std::collections::BTreeSet;
use std::fs;

use crate::root;

/// All files of the repository that end like this, by their path from its root.
fn files(ending: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if name.ends_with(ending) {
                found.push(path.strip_prefix(root()).unwrap().to_string_lossy().into_owned());
            }
        }
    }
    found
}

fn text(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap()
}

/// Whether a line of Rust has `unsafe` code, or allows it.
fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let starts = |rest: &str| {
        ["{", "fn", "impl", "trait", "extern"]
            .iter()
            .any(|word| rest.trim_start().starts_with(word))
    };
    // Put together, so that this file does not find itself.
    code.split(concat!("uns", "afe")).skip(1).any(starts)
        || code.contains(concat!("allow(uns", "afe_code"))
}

#[test]
fn pages_list_every_file_with_unsafe_code() {
    let has = |file: &String| text(file).lines().any(is_unsafe);
    let tree: BTreeSet<String> = files(".rs").into_iter().filter(has).collect();
    let page = text("SECURITY.md");
    let section = page.split("## Where `unsafe` is").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| [")?.split_once(']'));
    let listed: BTreeSet<String> = rows.map(|(file, _)| file.to_owned()).collect();
    assert_eq!(listed, tree, "SECURITY.md lists the files with unsafe code");
    for page in ["CONTRIBUTING.md", "ARCHITECTURE.md"] {
        assert!(text(page).contains("SECURITY.md#where-unsafe-is"), "{page} points to the list");
    }
}

/// `tools/bench/README.md` has what was measured; other pages say the bound that
/// `a_live_key_takes_at_most_64_bytes` tests. Decisions tell history.
#[test]
fn bytes_per_key_are_one_number() {
    for file in files(".md")
        .iter()
        .filter(|file| !file.starts_with("docs/decisions/") && *file != "tools/bench/README.md")
    {
        for line in text(file).lines() {
            for phrase in [
                " bytes per key",
                " bytes a key",
                " bytes per bucket",
                " bytes each",
                " bytes of table",
            ] {
                for (before, _) in line.match_indices(phrase).map(|(at, _)| line.split_at(at)) {
                    let number = before.rsplit(|c: char| !c.is_ascii_digit() && c != '.').next();
                    assert_eq!(number, Some("64"), "{file}: {line}");
                }
            }
        }
    }
    assert!(text("tools/bench/README.md").contains("$ cargo xtask bench bytes tidegate 1e6\n"));
    assert!(text("crates/tidegate/tests/it/memory.rs").contains("assert!(bytes <= 64"));
}
