//! Which servers there are, and where their programs lie.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// A server that Tidegate is tested with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flavor {
    /// Redis 6.2: the oldest that is supported. No TLS in this build, no functions.
    Redis62,
    /// Redis 7.0, as in Debian 12.
    Redis7,
    /// Redis 8.0, as in Debian 13.
    Redis8,
    /// Valkey 8.1, as in Debian 13. It is not in [`Flavor::ALL`], where Valkey 9 stands for Valkey:
    /// it is here because it can speak TLS.
    Valkey8,
    /// Valkey 9.1. No TLS in this build.
    Valkey9,
}

impl Flavor {
    /// What a test of the script or the protocol should run through.
    pub const ALL: [Flavor; 4] = [Flavor::Redis62, Flavor::Redis7, Flavor::Redis8, Flavor::Valkey9];

    /// Runs a test with each of [`Flavor::ALL`], side by side.
    ///
    /// # Panics
    /// If the test does, after all have ended; with the names of the flavors that it failed with.
    #[track_caller]
    pub fn on_all(test: impl Fn(Flavor) + Sync) {
        let test = &test;
        let failed: Vec<String> = thread::scope(|scope| {
            let runs = Flavor::ALL.map(|flavor| {
                let thread = thread::Builder::new().name(format!("on {flavor}"));
                (
                    flavor,
                    thread
                        .spawn_scoped(scope, move || test(flavor))
                        .expect("a thread can be started"),
                )
            });
            runs.into_iter()
                .filter_map(|(flavor, run)| run.join().is_err().then(|| flavor.to_string()))
                .collect()
        });
        assert!(failed.is_empty(), "failed on {}; the reasons are above", failed.join(", "));
    }

    /// The program, ready to run.
    ///
    /// # Panics
    /// If it is not installed, with the command that installs it.
    pub fn program(self) -> PathBuf {
        installed(self.file_name())
    }

    /// Whether this build can listen with TLS.
    pub fn has_tls(self) -> bool {
        matches!(self, Flavor::Redis7 | Flavor::Redis8 | Flavor::Valkey8)
    }

    fn file_name(self) -> &'static str {
        match self {
            Flavor::Redis62 => "redis62-server",
            Flavor::Redis7 => "redis7-server",
            Flavor::Redis8 => "redis8-server",
            Flavor::Valkey8 => "valkey8-server",
            Flavor::Valkey9 => "valkey9-server",
        }
    }
}

/// `redis 7.0` and the like, for messages.
impl fmt::Display for Flavor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Flavor::Redis62 => "redis 6.2",
            Flavor::Redis7 => "redis 7.0",
            Flavor::Redis8 => "redis 8.0",
            Flavor::Valkey8 => "valkey 8.1",
            Flavor::Valkey9 => "valkey 9.1",
        })
    }
}

/// `redis-cli` of Redis 7.0, which can speak TLS; the kit's own client cannot.
///
/// # Panics
/// If it is not installed, with the command that installs it.
pub fn redis_cli() -> Command {
    Command::new(installed("redis7-cli"))
}

/// Envoy, the proxy that asks for decisions over gRPC. Panics if it is not installed, with the
/// command that installs it.
pub(crate) fn envoy() -> PathBuf {
    installed("envoy")
}

/// `redis-benchmark` of Redis 7.0.
///
/// # Panics
/// If it is not installed, with the command that installs it.
pub fn redis_benchmark() -> Command {
    Command::new(installed("redis7-benchmark"))
}

/// Python that finds redis-py.
///
/// # Panics
/// If it is not installed, with the command that installs it.
pub fn python_client() -> Command {
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", installed("python-clients")).env("PYTHONDONTWRITEBYTECODE", "1");
    python
}

/// Python that finds openapi-spec-validator.
///
/// # Panics
/// If it is not installed, with the command that installs it.
pub fn openapi_validator() -> Command {
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", installed("openapi-validator")).env("PYTHONDONTWRITEBYTECODE", "1");
    python
}

/// Node that finds ioredis and node-redis.
///
/// # Panics
/// If they are not installed, with the command that installs them.
pub fn node_client() -> Command {
    let mut node = Command::new("node");
    let folder = installed("node-clients");
    // `require` looks into NODE_PATH, `import` into the folder it runs in.
    node.env("NODE_PATH", folder.join("node_modules")).current_dir(folder);
    node
}

/// The module redis-cell, for measurements and comparisons: `.arg("--loadmodule", path)` adds
/// `CL.THROTTLE` to a server.
///
/// # Panics
/// If it is not there, with the command that builds it.
pub fn redis_cell() -> PathBuf {
    let module = folder().join("libredis_cell.so");
    assert!(module.exists(), "{} is missing: run `cargo xtask servers --bench`", module.display());
    module
}

pub(crate) fn installed(name: &str) -> PathBuf {
    let program = folder().join(name);
    assert!(program.exists(), "{} is missing: run `cargo xtask servers`", program.display());
    program
}

/// `target/servers` of the repository, or what `TIDEGATE_SERVERS` says, as in `cargo xtask
/// servers`.
fn folder() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("the kit is in tools/ of the repository");
    let chosen = env::var_os("TIDEGATE_SERVERS").filter(|folder| !folder.is_empty());
    chosen.map_or_else(|| root.join("target/servers"), |chosen| root.join(chosen))
}
