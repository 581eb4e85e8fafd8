//! `cargo xtask test --quick`: what is worth running after each change, in three minutes.

use std::process::{Command, Stdio};

/// One test of each protocol and store: a package with one of its test targets, and the tests or
/// the modules of tests in it.
const TESTS: [(&str, &str, &[&str]); 5] = [
    ("tidegate-core", "it", &["transcripts::"]),
    ("tidegate", "it", &["transcripts::every", "memory_conforms"]),
    ("tidegate", "tower", &["requests_pass_until_the_limit"]),
    (
        "tidegate-server",
        "it",
        &[
            // HTTP, gRPC and RESP over memory, Redis and Valkey.
            "every_transcript_holds_through_every_protocol",
            "exchanges::clients_of_the_proxy_and_of_gateways",
        ],
    ),
    ("tidegate-cli", "it", &["check::"]),
];

/// The unit tests of all crates, then [`TESTS`].
pub(crate) fn tests(
    cargo: &str,
    run: impl Fn(&mut Command) -> Result<(), String>,
) -> Result<(), String> {
    // Those that take longest are about every path that a request may have.
    let unit = ["test", "--workspace", "--all-features", "--lib", "--bins", "--quiet"];
    run(Command::new(cargo).args(unit))?;
    TESTS.iter().try_for_each(|(package, target, names)| some(cargo, package, target, names))
}

/// Runs the tests with one of these names, and fails if a name has none.
fn some(cargo: &str, package: &str, target: &str, names: &[&str]) -> Result<(), String> {
    let mut command = Command::new(cargo);
    command.args(["test", "-p", package, "--all-features", "--test", target, "--"]);
    let output = command
        .args(names)
        .current_dir(crate::root())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cargo test could not be started: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    crate::say(&text);
    if !output.status.success() {
        return Err(format!("tests of {package} failed"));
    }
    match without_test(&text, names) {
        Some(name) => Err(format!("{package}: no test has the name {name}: change quick.rs")),
        None => Ok(()),
    }
}

/// A name of which no test was run.
fn without_test<'a>(output: &str, names: &[&'a str]) -> Option<&'a str> {
    let passed = |name: &str| {
        output.lines().any(|line| {
            let test = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... ok"));
            test.is_some_and(|test| test.contains(name))
        })
    };
    names.iter().copied().find(|name| !passed(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_test_is_found() {
        let output = "running 1 test\ntest transcripts::every ... ok\n\ntest result: ok.\n";
        assert_eq!(without_test(output, &["transcripts::"]), None);
        assert_eq!(without_test(output, &["transcripts::", "gone"]), Some("gone"));
    }
}
