//! `cargo xtask mutants`: changes to the code that decides and judges, of which each must make a test fail.

use std::path::Path;
use std::process::Command;

/// Code whose every line decides whether a request passes, by package, and the tests that hold it.
const AREAS: [(&str, &str, &[&str], &[&str]); 4] = [
    (
        "core",
        "tidegate-core",
        &[
            "crates/core/src/algorithm/*.rs",
            "crates/core/src/decide.rs",
            "crates/core/src/meter.rs",
            "crates/core/src/admit.rs",
            "crates/core/src/rebase.rs",
        ],
        &["--test", "it"],
    ),
    ("client", "tidegate", &["crates/tidegate/src/http/*.rs"], &["--lib", "--test", "it", "--", "http", "readings"]),
    (
        "rules",
        "tidegate-server",
        &["crates/server/src/rules/*.rs"],
        &["--lib", "--test", "it", "--", "rules::", "forward::", "judged", "missing::", "exempt::", "reset::"],
    ),
    (
        "paths",
        "tidegate",
        &["crates/tidegate/src/http/path.rs", "crates/tidegate/src/http/target.rs"],
        &["--lib", "--test", "it", "--", "http", "readings"],
    ),
];

/// Runs cargo-mutants over one area or all of them; installs it if it is missing.
pub(crate) fn run(
    args: &[&str],
    target: &Path,
    cargo: &str,
    run: impl Fn(&mut Command) -> Result<(), String>,
) -> Result<(), String> {
    let areas: Vec<_> = match args {
        [] => AREAS.iter().collect(),
        [name, ..] => AREAS.iter().filter(|(own, ..)| own == name).collect(),
    };
    if areas.is_empty() {
        let names: Vec<&str> = AREAS.iter().map(|(name, ..)| *name).collect();
        return Err(format!("mutants {}: expected one of {}", args.join(" "), names.join(", ")));
    }
    if !Command::new(cargo).args(["mutants", "--version"]).output().is_ok_and(|output| output.status.success()) {
        run(Command::new(cargo).args(["install", "cargo-mutants", "--locked"]))?;
    }
    for (name, package, files, tests) in areas {
        let mut command = Command::new(cargo);
        command.args(["mutants", "--package", package, "--all-features", "--test-package", package]);
        files.iter().for_each(|file| _ = command.args(["--file", file]));
        command.arg("--output").arg(target.join("mutants").join(name)).args(args.iter().skip(1));
        command.arg("--").args(*tests);
        run(&mut command)?;
    }
    Ok(())
}
