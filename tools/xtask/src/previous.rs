//! The program as an earlier release had it, built from this repository's history: two releases
//! share a store while one replaces the other, and a row of `cargo xtask faults` looks at what
//! comes of that.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::{cargo_path, root, run, say};

/// The oldest state of this program that keeps the same in Redis as this one; once there are
/// releases, the one before.
const COMMIT: &str = "ab111ea6672674125bdc25871fc22c1ce2f8367f";

/// Builds `previous/tidegate` in the target folder, unless it is there.
pub(crate) fn build(target: &Path) -> Result<(), String> {
    let folder = target.join("previous");
    let (program, stamp) = (folder.join("tidegate"), folder.join("commit"));
    if program.is_file() && fs::read_to_string(&stamp).is_ok_and(|built| built == COMMIT) {
        return Ok(());
    }
    say(&format!("-- the program as it was at {COMMIT}: built once, for F63\n"));
    let source = folder.join("source");
    let failed = |error: std::io::Error| format!("{}: {error}", source.display());
    if source.exists() {
        fs::remove_dir_all(&source).map_err(failed)?;
    }
    fs::create_dir_all(&source).map_err(failed)?;
    let mut archive = Command::new("git")
        .args(["archive", "--format=tar", COMMIT])
        .current_dir(root())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("git: {error}; run `apt-get install git`"))?;
    let tar = archive.stdout.take().ok_or("git: nothing to read from")?;
    run(Command::new("tar").arg("-x").current_dir(&source).stdin(tar))?;
    if !archive.wait().is_ok_and(|status| status.success()) {
        return Err(format!(
            "git archive {COMMIT}: expected the whole history; in a shallow clone run `git fetch --unshallow`"
        ));
    }
    let build = ["build", "--quiet", "--release", "--locked", "-p", "tidegate-cli"];
    let own = folder.join("build");
    run(Command::new(cargo_path()).args(build).env("CARGO_TARGET_DIR", &own).current_dir(&source))?;
    fs::copy(own.join("release/tidegate"), &program).map_err(failed)?;
    fs::write(&stamp, COMMIT).map_err(failed)?;
    // Nothing of it is needed any more.
    fs::remove_dir_all(&own).and_then(|()| fs::remove_dir_all(&source)).map_err(failed)
}
