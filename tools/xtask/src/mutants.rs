//! `cargo xtask mutants`: changes to the code that decides and judges, of which each must make a
//! test fail.
//!
//! A change that no test can notice is listed in `.cargo/mutants.toml`, with the reason.

use std::path::Path;
use std::process::Command;

/// Code whose every line decides whether a request passes.
struct Area {
    name: &'static str,
    package: &'static str,
    features: &'static [&'static str],
    files: &'static [&'static str],
    /// The tests that hold it, as arguments of `cargo test`: only they are built. None of them
    /// needs a server.
    targets: &'static [&'static str],
    /// What stands in the names of those that run; all of them, if nothing.
    tests: &'static [&'static str],
}

const AREAS: [Area; 4] = [
    Area {
        name: "core",
        package: "tidegate-core",
        features: &[],
        files: &[
            "crates/core/src/algorithm/*.rs",
            "crates/core/src/decide.rs",
            "crates/core/src/meter.rs",
            "crates/core/src/admit.rs",
            "crates/core/src/rebase.rs",
        ],
        targets: &["--test", "it"],
        tests: &[],
    },
    Area {
        name: "client",
        package: "tidegate",
        features: &["--features", "http"],
        files: &[
            "crates/tidegate/src/http/client.rs",
            "crates/tidegate/src/http/forwarded.rs",
            "crates/tidegate/src/http/network.rs",
        ],
        targets: &["--lib", "--test", "it"],
        tests: &["http::"],
    },
    Area {
        name: "paths",
        package: "tidegate",
        features: &["--features", "http"],
        files: &["crates/tidegate/src/http/path.rs", "crates/tidegate/src/http/target.rs"],
        targets: &["--lib", "--test", "it"],
        tests: &["http::"],
    },
    Area {
        name: "rules",
        package: "tidegate-server",
        features: &[],
        files: &["crates/server/src/rules/**/*.rs"],
        targets: &["--lib"],
        tests: &["rules::"],
    },
];

/// Runs cargo-mutants over one area or all of them; installs it if it is missing. Further arguments
/// are its own: `--shard 1/8`, `--jobs 2`.
pub(crate) fn run(
    args: &[&str],
    target: &Path,
    cargo: &str,
    run: impl Fn(&mut Command) -> Result<(), String>,
) -> Result<(), String> {
    let areas: Vec<&Area> = match args {
        [] => AREAS.iter().collect(),
        [name, ..] => AREAS.iter().filter(|area| area.name == *name).collect(),
    };
    if areas.is_empty() {
        let names: Vec<&str> = AREAS.iter().map(|area| area.name).collect();
        return Err(format!("mutants {}: expected one of {}", args.join(" "), names.join(", ")));
    }
    if !Command::new(cargo)
        .args(["mutants", "--version"])
        .output()
        .is_ok_and(|output| output.status.success())
    {
        run(Command::new(cargo).args(["install", "cargo-mutants", "--locked"]))?;
    }
    for area in areas {
        let mut command = Command::new(cargo);
        command
            .args(["mutants", "--package", area.package, "--test-package", area.package])
            .args(area.features);
        area.files.iter().for_each(|file| _ = command.args(["--file", file]));
        area.targets.iter().for_each(|target| _ = command.arg(format!("--cargo-arg={target}")));
        let output = target.join("mutants").join(area.name);
        std::fs::create_dir_all(&output)
            .map_err(|error| format!("{}: {error}", output.display()))?;
        command.arg("--output").arg(output).args(args.iter().skip(1));
        command.args(["--", "--"]).args(area.tests);
        // A target folder that others use would keep what was built of the last change.
        command.env_remove("CARGO_TARGET_DIR");
        // Shrinking a case that fails shows nothing here, and debug information is not read.
        command.env("PROPTEST_MAX_SHRINK_ITERS", "0").env("CARGO_PROFILE_TEST_DEBUG", "0");
        run(&mut command)?;
    }
    Ok(())
}
