//! What the project may be made of: licences, bans, and a core that depends on nothing.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Licences that may be combined with ours. `deny.toml` has the same list for cargo-deny.
const LICENCES: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Packages that must not come in, not even through others, and why.
const BANNED: &[(&str, &str)] = &[
    ("openssl", "TLS is rustls with ring"),
    ("openssl-sys", "TLS is rustls with ring"),
    ("native-tls", "TLS is rustls with ring"),
    ("aws-lc-rs", "needs cmake and builds for minutes; rustls uses ring"),
    ("aws-lc-sys", "needs cmake and builds for minutes; rustls uses ring"),
    ("rustls-pemfile", "unmaintained (RUSTSEC-2025-0134)"),
    ("serde_yaml", "deprecated"),
    ("serde_yml", "unsound (RUSTSEC-2025-0068)"),
    ("bincode", "unmaintained (RUSTSEC-2025-0141)"),
    ("dashmap", "its guards deadlock; the memory store has its own table"),
    ("prost-build", "generated code is committed, so that builds need no protoc"),
    ("libloading", "nothing is loaded at run time"),
];

pub(crate) fn check(root: &Path) -> Result<(), String> {
    let cargo = crate::cargo_path();
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked", "--all-features"])
        .current_dir(root)
        .output()
        .map_err(|error| format!("`cargo metadata` could not be started: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "`cargo metadata` failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("`cargo metadata`: {error}"))?;
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let problems: Vec<String> = packages.iter().flat_map(problems_of).collect();
    if problems.is_empty() {
        crate::say(&format!(
            "{} packages, all with an allowed licence, none banned\n",
            packages.len()
        ));
        return Ok(());
    }
    Err(format!("{} problem(s)\n  {}", problems.len(), problems.join("\n  ")))
}

fn problems_of(package: &Value) -> Vec<String> {
    let (name, version) = (
        package["name"].as_str().unwrap_or_default(),
        package["version"].as_str().unwrap_or_default(),
    );
    let mut problems = Vec::new();
    if let Some((_, why)) = BANNED.iter().find(|(banned, _)| *banned == name) {
        problems.push(format!("{name} {version} is banned: {why}"));
    }
    let licence = package["license"].as_str().unwrap_or_default();
    if !is_allowed(licence) {
        problems.push(format!(
            "{name} {version} has the licence {licence:?}: expected one of {}",
            LICENCES.join(", ")
        ));
    }
    if name == "tidegate-core" {
        let needs = package["dependencies"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
            .iter()
            .filter(|dependency| dependency["kind"].as_str().unwrap_or_default() != "dev");
        problems.extend(needs.map(|dependency| {
            format!(
                "tidegate-core depends on {}: expected no dependencies",
                dependency["name"].as_str().unwrap_or_default()
            )
        }));
    }
    problems
}

/// Whether an SPDX expression can be satisfied with allowed licences: one side of every `OR`, both
/// of every `AND`.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.trim();
    // `/` is how `OR` used to be written.
    if let Some(parts) = split(expression, &[" OR ", "/"]) {
        return parts.iter().any(|part| is_allowed(part));
    }
    if let Some(parts) = split(expression, &[" AND "]) {
        return parts.iter().all(|part| is_allowed(part));
    }
    match expression.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
        Some(inner) => is_allowed(inner),
        None => LICENCES.contains(&expression),
    }
}

/// The parts between `separators` outside of parentheses, if there is more than one.
fn split<'e>(expression: &'e str, separators: &[&str]) -> Option<Vec<&'e str>> {
    let (mut parts, mut depth, mut start, mut at) = (Vec::new(), 0, 0, 0);
    while at < expression.len() {
        let rest = &expression[at..];
        match rest.as_bytes()[0] {
            b'(' => depth += 1,
            b')' => depth -= 1,
            _ => {}
        }
        match separators.iter().find(|separator| depth == 0 && rest.starts_with(**separator)) {
            Some(separator) => {
                parts.push(&expression[start..at]);
                at += separator.len();
                start = at;
            }
            None => at += rest.chars().next().map_or(1, char::len_utf8),
        }
    }
    parts.push(&expression[start..]);
    (parts.len() > 1).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_are_read_as_expressions() {
        for (expression, allowed) in [
            ("MIT", true),
            ("MIT OR Apache-2.0", true),
            ("MIT/Apache-2.0", true),
            ("GPL-3.0 OR MIT", true),
            ("GPL-3.0", false),
            ("MIT AND GPL-3.0", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("(MIT OR GPL-3.0) AND (GPL-2.0 OR BSD-3-Clause)", true),
            ("(MIT AND GPL-3.0) OR (GPL-2.0)", false),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("", false),
        ] {
            assert_eq!(is_allowed(expression), allowed, "{expression}");
        }
    }

    #[test]
    fn a_banned_package_a_strange_licence_and_a_core_with_needs_are_found() {
        let package = |text: &str| problems_of(&serde_json::from_str(text).unwrap());
        assert!(
            package(r#"{"name":"serde","version":"1.0.0","license":"MIT OR Apache-2.0"}"#)
                .is_empty()
        );
        assert_eq!(package(r#"{"name":"bincode","version":"3.0.0","license":"MIT"}"#).len(), 1);
        assert_eq!(package(r#"{"name":"x","version":"1.0.0","license":null}"#).len(), 1);
        let core = r#"{"name":"tidegate-core","version":"1.0.0","license":"MIT",
            "dependencies":[{"name":"proptest","kind":"dev"},{"name":"libm","kind":null}]}"#;
        assert_eq!(package(core), ["tidegate-core depends on libm: expected no dependencies"]);
    }
}
