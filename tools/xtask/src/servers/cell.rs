//! redis-cell, the module that Tidegate is measured beside (`CL.THROTTLE`), built from the crate
//! registry.
//!
//! The registry has it as source only, and as a library that Cargo would not leave in a file of a
//! known name; so the source is copied and built by itself. 0.2.2 is the newest there.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use super::fetch::{bounded, quiet};
use super::{TEMPORARY, replace};
use crate::{cargo_path, say};
use serde_json::Value;

const VERSION: &str = "0.2.2";
const FILE: &str = "libredis_cell.so";

pub(super) fn install(folder: &Path) -> Result<(), String> {
    let stamp = folder.join("stamps").join(FILE);
    let words = format!("redis-cell {VERSION}\n");
    if fs::read_to_string(&stamp).is_ok_and(|found| found == words) && folder.join(FILE).exists() {
        return Ok(());
    }
    let start = Instant::now();
    say(&format!("redis-cell {VERSION} of the crate registry: building\n"));
    let temporary = folder.join(format!("{TEMPORARY}cell"));
    let _ = fs::remove_dir_all(&temporary);
    let source = temporary.join("redis-cell");
    let put = |from: PathBuf| -> io::Result<()> {
        fs::rename(from, folder.join(FILE))?;
        replace(&stamp, &words, 0o644)
    };
    fetch(&temporary, &source)
        .and_then(|()| build(&temporary, &source))
        .and_then(|module| loads(folder, &module).map(|()| module))
        .and_then(|module| put(module).map_err(|error| format!("{}: {error}", folder.display())))
        .map_err(|problem| format!("redis-cell: {problem}"))?;
    let _ = fs::remove_dir_all(&temporary);
    say(&format!("{FILE}: redis-cell {VERSION} ({:.1} s)\n", start.elapsed().as_secs_f64()));
    Ok(())
}

/// Cargo fetches what something depends on, so there has to be something.
fn fetch(temporary: &Path, source: &Path) -> Result<(), String> {
    let wants = temporary.join("wants");
    let manifest = format!(
        "[package]\nname = \"wants\"\nversion = \"0.0.0\"\n[workspace]\n[dependencies]\nredis-cell = \"={VERSION}\"\n"
    );
    fs::create_dir_all(wants.join("src"))
        .and_then(|()| fs::write(wants.join("src/lib.rs"), ""))
        .and_then(|()| fs::write(wants.join("Cargo.toml"), manifest))
        .map_err(|error| format!("{}: {error}", wants.display()))?;
    let mut cargo = bounded(&cargo_path());
    cargo
        .args(["metadata", "--format-version", "1", "--manifest-path"])
        .arg(wants.join("Cargo.toml"));
    let metadata: Value = serde_json::from_slice(&quiet(&mut cargo)?.stdout)
        .map_err(|error| format!("`cargo metadata`: {error}"))?;
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let package = packages
        .iter()
        .find(|package| package["name"].as_str().unwrap_or_default() == "redis-cell");
    let manifest = package
        .map(|package| package["manifest_path"].as_str().unwrap_or_default())
        .unwrap_or_default();
    let fetched = Path::new(manifest).parent().ok_or("`cargo metadata` names no redis-cell")?;
    copy(fetched, source).map_err(|error| format!("{}: {error}", fetched.display()))?;
    // Otherwise Cargo would look for a workspace further up, and find ours.
    let manifest = source.join("Cargo.toml");
    fs::read_to_string(&manifest)
        .and_then(|text| fs::write(&manifest, format!("{text}\n[workspace]\n")))
        .map_err(|error| format!("{}: {error}", manifest.display()))
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let there = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &there)?;
        } else {
            fs::copy(entry.path(), there)?;
        }
    }
    Ok(())
}

fn build(temporary: &Path, source: &Path) -> Result<PathBuf, String> {
    let target = temporary.join("target");
    let mut cargo = bounded(&cargo_path());
    cargo.args(["rustc", "--release", "--lib", "--crate-type", "cdylib", "--manifest-path"]);
    cargo.arg(source.join("Cargo.toml")).arg("--target-dir").arg(&target).args([
        "--",
        "--cap-lints",
        "allow",
    ]);
    quiet(&mut cargo)?;
    Ok(target.join("release").join(FILE))
}

/// Whether a server takes it, which it says in its log.
fn loads(folder: &Path, module: &Path) -> Result<(), String> {
    let mut server = Command::new(folder.join("redis7-server"));
    server.args(["--port", "0", "--save", "", "--unixsocket"]).arg(module.with_extension("socket"));
    server.arg("--loadmodule").arg(module).stdout(Stdio::piped());
    let mut server =
        server.spawn().map_err(|error| format!("redis7-server could not be started: {error}"))?;
    let log = server.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines);
    let mut seen = Vec::new();
    for line in log.map_while(Result::ok) {
        seen.push(line);
        if seen
            .last()
            .is_some_and(|line| line.contains("loaded from") || line.contains("Ready to accept"))
        {
            break;
        }
    }
    let loaded = seen.last().is_some_and(|line| line.contains("Module 'redis-cell' loaded"));
    let _ = server.kill();
    let _ = server.wait();
    if loaded {
        Ok(())
    } else {
        Err(format!("redis7-server did not load it:\n{}", seen.join("\n")))
    }
}
