//! Reloads the configuration, Envoy's domains and tokens when their files change or on SIGHUP. A
//! file is applied completely or not at all.
//!
//! The content is compared, not the modification time, so that a rename or the swap of a symbolic
//! link above the file is detected. The file and the running configuration differ if the file is
//! refused or a setting needs a restart. Each difference is logged by name and kept in
//! [`InForce`](crate::observe::InForce) until it ends.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::auth::{Auth, Guard, Secret};
use crate::config::changes::{Change, needing_restart};
use crate::config::{Config, Overlay, TokenFiles};
use crate::engine::Engine;
use crate::findings::Finding;
use crate::listen::{Bounds, SharedBounds};
use crate::observe::metrics::Reloaded;
use crate::rules::Rule;
use crate::rules::envoy::{self, Domains};

/// The period of checks for changes.
const EVERY: Duration = Duration::from_millis(500);

/// What is reloaded.
#[derive(Clone, Debug)]
pub(crate) enum WatchedSource {
    /// The configuration file.
    Configuration(Arc<ConfigFile>),
    /// A folder with the configuration of envoyproxy/ratelimit.
    Domains(PathBuf),
    /// Files with tokens, and the guard that checks tokens.
    Tokens(TokenFiles, Arc<Guard>),
}

/// The configuration file of a running server.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    pub(crate) file: PathBuf,
    /// The options of the command line, which override the file.
    pub(crate) overlay: Overlay,
    /// Rules in addition to those of the file.
    pub(crate) more_rules: Vec<Rule>,
    /// The configuration with which the server started, options included.
    pub(crate) started_with: Config,
    /// The bounds of all listeners.
    pub(crate) bounds: SharedBounds,
    /// The guard, which has the host names of the HTTP listeners.
    pub(crate) guard: Arc<Guard>,
}

/// A file that was read and applied, except for `needs_restart`.
#[derive(Default)]
struct Loaded {
    /// The number of rules, limits or tokens.
    count: usize,
    warnings: Vec<Finding>,
    needs_restart: Vec<Change>,
}

impl ConfigFile {
    /// Reads the file and applies all settings that can change while the server runs.
    fn load(&self, engine: &Engine) -> Result<Loaded, String> {
        let mut config = Config::load(&self.file).map_err(|error| error.to_string())?;
        // An editor that saves in two steps, or a full disk, leaves an empty file for a while,
        // which must not lift all limits.
        if config.outline.is_empty() && !self.started_with.outline.is_empty() {
            let file = self.file.display();
            return Err(format!(
                "{file}: the file is empty: write `rules: []` if no limits are meant"
            ));
        }
        self.overlay.apply(&mut config)?;
        let needs_restart = needing_restart(&self.started_with, &config);
        let (count, warnings) = (config.rules.iter().count(), config.warnings());
        let Bounds { handshake, patience, .. } = self.started_with.bounds;
        self.bounds.set(Bounds { handshake, patience, ..config.bounds });
        engine.observer().set(&config.log);
        let clients = config.clients();
        let ipv6_prefix = clients.prefix();
        engine.settings().set_clients(clients);
        engine.settings().set_envoy_options(config.envoy.options);
        engine.settings().set_response_options(config.http.response_options());
        engine.settings().set_requests(config.requests());
        self.guard.set_hosts(config.http.hosts);
        engine.set_rules(config.rules.and(&self.more_rules).with_ipv6_prefix(ipv6_prefix));
        Ok(Loaded { count, warnings, needs_restart })
    }
}

impl WatchedSource {
    fn path(&self) -> &Path {
        match self {
            WatchedSource::Configuration(config) => &config.file,
            WatchedSource::Domains(path) => path,
            WatchedSource::Tokens(files, _) => {
                files.checks.as_deref().or(files.admin.as_deref()).unwrap_or(Path::new(""))
            }
        }
    }

    /// Its name in the log.
    fn name(&self) -> &'static str {
        match self {
            WatchedSource::Configuration(_) => "configuration",
            WatchedSource::Domains(_) => "domains",
            WatchedSource::Tokens(..) => "tokens",
        }
    }

    /// The name of its items in the log.
    fn items(&self) -> &'static str {
        match self {
            WatchedSource::Configuration(_) => "rules",
            WatchedSource::Domains(_) => "limits",
            WatchedSource::Tokens(..) => "tokens",
        }
    }

    fn counted(&self) -> Reloaded {
        match self {
            WatchedSource::Configuration(_) | WatchedSource::Domains(_) => Reloaded::Rules,
            WatchedSource::Tokens(..) => Reloaded::Tokens,
        }
    }

    /// What changes when the source does: the content of a file, or the identity and times of each
    /// file of a folder.
    fn fingerprint(&self) -> Option<Vec<u8>> {
        match self {
            WatchedSource::Configuration(config) => {
                tidegate_bounded::files::read_file(&config.file, crate::findings::MAX_FILE_BYTES)
                    .ok()
            }
            WatchedSource::Tokens(files, _) => {
                let mut print = Vec::new();
                for file in [&files.checks, &files.admin].into_iter().flatten() {
                    print.extend(
                        tidegate_bounded::files::read_file(
                            file,
                            tidegate_bounded::files::MAX_SECRET_FILE_BYTES,
                        )
                        .ok()?,
                    );
                    print.push(b'\n');
                }
                Some(print)
            }
            WatchedSource::Domains(folder) => {
                let mut print = Vec::new();
                for path in envoy::files(folder).ok()? {
                    let about = std::fs::metadata(&path).ok()?;
                    let times =
                        [about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec()];
                    print.extend_from_slice(path.as_os_str().as_encoded_bytes());
                    print.extend(
                        [about.dev(), about.ino(), about.len()]
                            .into_iter()
                            .flat_map(u64::to_le_bytes),
                    );
                    print.extend(times.into_iter().flat_map(i64::to_le_bytes));
                }
                Some(print)
            }
        }
    }

    /// The fingerprint at the start of the server, if it is known.
    fn at_start(&self) -> Option<Vec<u8>> {
        match self {
            WatchedSource::Configuration(config) => {
                Some(config.started_with.outline.text().as_bytes().into())
            }
            WatchedSource::Domains(_) | WatchedSource::Tokens(..) => None,
        }
    }

    /// Reads and applies it.
    fn load(&self, engine: &Engine) -> Result<Loaded, String> {
        match self {
            WatchedSource::Configuration(config) => config.load(engine),
            WatchedSource::Domains(folder) => {
                let domains = Domains::load(folder).map_err(|error| error.to_string())?;
                let (count, warnings) = (domains.limits(), domains.warnings().to_vec());
                engine.set_domains(domains);
                Ok(Loaded { count, warnings, ..Loaded::default() })
            }
            WatchedSource::Tokens(files, guard) => {
                let read = |file: &Option<PathBuf>| file.as_deref().map(Secret::read).transpose();
                let auth = Auth { checks: read(&files.checks)?, admin: read(&files.admin)? };
                let count = usize::from(auth.checks.is_some()) + usize::from(auth.admin.is_some());
                guard.change(auth)?;
                Ok(Loaded { count, ..Loaded::default() })
            }
        }
    }
}

/// Reloads `source` into `engine` whenever it changes, and on SIGHUP.
pub(crate) async fn watch(source: WatchedSource, engine: Engine) {
    let mut hangup = signal(SignalKind::hangup()).ok();
    let mut known = source.at_start();
    // Without the fingerprint at the start, the source is read once more without a log line,
    // because it may have changed since.
    let mut is_first = known.is_none();
    let mut every = tokio::time::interval(EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let asked = tokio::select! {
            _ = every.tick() => false,
            () = hung_up(&mut hangup) => true,
        };
        let own = source.clone();
        let Ok(now) = tokio::task::spawn_blocking(move || own.fingerprint()).await else {
            continue;
        };
        if now == known && !asked && !is_first {
            continue;
        }
        known = now;
        let (own, into) = (source.clone(), engine.clone());
        let Ok(loaded) = tokio::task::spawn_blocking(move || own.load(&into)).await else {
            continue;
        };
        report(&source, &engine, &loaded, is_first);
        is_first = false;
    }
}

/// Logs and counts the result of a reload, and records how the file and the running configuration
/// differ.
fn report(
    source: &WatchedSource,
    engine: &Engine,
    loaded: &Result<Loaded, String>,
    is_first: bool,
) {
    let (observer, name, file) = (engine.observer(), source.name(), source.path().display());
    let log = observer.log();
    if !is_first {
        observer.metrics().reloaded(source.counted(), loaded.is_ok());
    }
    let difference = match loaded {
        Ok(Loaded { count, warnings, needs_restart }) => {
            if !is_first {
                log.info(&format!("{name} reloaded"), &[("file", &file), (source.items(), count)]);
                log.findings(warnings);
            }
            for Change { setting, running, read } in needs_restart {
                log.warn(
                    "a changed setting needs a restart",
                    &[("setting", setting), ("in_force", running), ("file", read)],
                );
            }
            let settings: Vec<&str> =
                needs_restart.iter().map(|change| change.setting.as_str()).collect();
            (!settings.is_empty())
                .then(|| format!("{file}: changes that need a restart: {}", settings.join(", ")))
        }
        Err(error) => {
            log.error(
                &format!("{name} refused; the last good one stays in force"),
                &[("why", error)],
            );
            let first = error.lines().next().unwrap_or_default();
            Some(format!("{file}: refused, the last good one stays in force: {first}"))
        }
    };
    let is_whole = difference.is_none();
    if observer.metrics().in_force().set(name, difference) && is_whole && !is_first {
        log.info("the file is in force as it is", &[("file", &file)]);
    }
}

/// Waits for SIGHUP, if a handler could be installed.
async fn hung_up(hangup: &mut Option<Signal>) {
    match hangup {
        Some(hangup) => _ = hangup.recv().await,
        None => std::future::pending().await,
    }
}
