//! What others wrote, for the tests of the listeners: redis-py, ioredis, node-redis, curl, and a
//! validator of OpenAPI.
//!
//! They go into folders of their own beside the servers, each known by its version; a second run
//! only looks.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use super::fetch::{bounded, need_pip, quiet};
use super::{TEMPORARY, replace};
use crate::say;

/// A package of the Python index, and the folder it goes into.
const PYTHON: (&str, &str) = ("redis==8.1.0", "python-clients");
/// What checks the description of the HTTP listener, and the folder it goes into. The rest is what
/// it depends on.
const OPENAPI: (&str, &str) = ("openapi-spec-validator==0.7.1", "openapi-validator");
/// Packages for Node, and the folder they go into.
const NODE: (&[&str], &str) = (&["ioredis@6.0.0", "redis@6.3.1"], "node-clients");

pub(super) fn install(folder: &Path) -> Result<(), String> {
    let (requirement, name) = PYTHON;
    once(folder, name, requirement, |place| {
        need_pip()?;
        let mut pip = bounded("python3");
        // Pure Python, and what it depends on is only for versions of Python that are older than
        // any we run on.
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--target",
        ])
        .arg(place)
        .arg(requirement);
        quiet(&mut pip).map(drop)
    })?;
    let (requirement, name) = OPENAPI;
    once(folder, name, requirement, |place| {
        need_pip()?;
        let mut pip = bounded("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target"])
            .arg(place)
            .arg(requirement);
        quiet(&mut pip).map(drop)
    })?;
    let (packages, name) = NODE;
    once(folder, name, &packages.join(" "), |place| {
        need("npm", "npm")?;
        let mut npm = bounded("npm");
        npm.args([
            "install",
            "--silent",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "--prefix",
        ])
        .arg(place)
        .args(packages);
        quiet(&mut npm).map(drop)
    })?;
    need("curl", "curl")
}

/// Installs into a folder that is renamed when it is complete, unless its stamp says that it is
/// there.
pub(super) fn once(
    folder: &Path,
    name: &str,
    words: &str,
    install: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<(), String> {
    let (place, stamp) = (folder.join(name), folder.join("stamps").join(name));
    if fs::read_to_string(&stamp).is_ok_and(|found| found == words) && place.exists() {
        return Ok(());
    }
    let start = Instant::now();
    let temporary = folder.join(format!("{TEMPORARY}{name}"));
    let _ = fs::remove_dir_all(&temporary);
    fs::create_dir_all(&temporary).map_err(|error| format!("{}: {error}", temporary.display()))?;
    install(&temporary).map_err(|problem| format!("{name}: {problem}"))?;
    let _ = fs::remove_dir_all(&place);
    fs::rename(&temporary, &place)
        .and_then(|()| replace(&stamp, words, 0o644))
        .map_err(|error| format!("{}: {error}", place.display()))?;
    let first = words.lines().next().unwrap_or_default();
    say(&format!("{name}: {first} ({:.1} s)\n", start.elapsed().as_secs_f64()));
    Ok(())
}

/// A program of the system: installed if it can be, otherwise named with the command that would.
pub(super) fn need(program: &str, package: &str) -> Result<(), String> {
    let works = || {
        Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    if works() {
        return Ok(());
    }
    let line = format!("apt-get update && apt-get install -y --no-install-recommends {package}");
    let _ = quiet(bounded("sh").args(["-c", &line]).env("DEBIAN_FRONTEND", "noninteractive"));
    if works() { Ok(()) } else { Err(format!("{program} is missing: run `{line}` as root")) }
}
