//! Reading rules and tokens again when their files change: all or nothing, and what was good stays until something better is there.
//!
//! The content is compared, not the time of change: a file that is replaced by a rename, or by the swap of a symbolic link above it, is noticed like any other.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::auth::{Auth, Guard, Secret};
use crate::config::{Config, TokenFiles};
use crate::gate::Gate;
use crate::observe::metrics::Reloaded;
use crate::rules::Rule;
use crate::rules::envoy::{self, Domains};

/// How often to look.
const EVERY: Duration = Duration::from_millis(500);

/// What is read again.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// A rules file, and rules beside it.
    Rules(PathBuf, Arc<[Rule]>),
    /// A folder with the configuration of envoyproxy/ratelimit.
    Domains(PathBuf),
    /// Files with tokens, and who compares them.
    Tokens(TokenFiles, Arc<Guard>),
}

impl Source {
    fn path(&self) -> &Path {
        match self {
            Source::Rules(path, _) | Source::Domains(path) => path,
            Source::Tokens(files, _) => files.checks.as_deref().or(files.admin.as_deref()).unwrap_or(Path::new("")),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Source::Rules(..) | Source::Domains(_) => "rules",
            Source::Tokens(..) => "tokens",
        }
    }

    fn counted(&self) -> Reloaded {
        match self {
            Source::Rules(..) | Source::Domains(_) => Reloaded::Rules,
            Source::Tokens(..) => Reloaded::Tokens,
        }
    }

    /// By which a change is noticed: what a file says; or which files a folder has, each with its identity and times.
    fn fingerprint(&self) -> Option<Vec<u8>> {
        match self {
            Source::Rules(file, _) => std::fs::read(file).ok(),
            Source::Tokens(files, _) => {
                let mut print = Vec::new();
                for file in [&files.checks, &files.admin].into_iter().flatten() {
                    print.extend(std::fs::read(file).ok()?);
                    print.push(b'\n');
                }
                Some(print)
            }
            Source::Domains(folder) => {
                let mut print = Vec::new();
                for path in envoy::files(folder).ok()? {
                    let about = std::fs::metadata(&path).ok()?;
                    let times = [about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec()];
                    print.extend_from_slice(path.as_os_str().as_encoded_bytes());
                    print.extend([about.dev(), about.ino(), about.len()].into_iter().flat_map(u64::to_le_bytes));
                    print.extend(times.into_iter().flat_map(i64::to_le_bytes));
                }
                Some(print)
            }
        }
    }

    /// Reads it into `gate`, and says how many rules or tokens there are.
    fn load(&self, gate: &Gate) -> Result<usize, String> {
        match self {
            Source::Rules(file, more) => {
                let config = Config::load(file).map_err(|error| error.to_string())?;
                let count = config.rules.iter().count();
                gate.set_terms(config.envoy.terms);
                gate.set_manners(config.manners);
                gate.set_rules(config.rules.and(more));
                Ok(count)
            }
            Source::Domains(folder) => {
                let domains = Domains::load(folder).map_err(|error| error.to_string())?;
                let count = domains.limits();
                gate.set_domains(domains);
                Ok(count)
            }
            Source::Tokens(files, guard) => {
                let read = |file: &Option<PathBuf>| file.as_deref().map(Secret::read).transpose();
                let auth = Auth { checks: read(&files.checks)?, admin: read(&files.admin)? };
                let count = usize::from(auth.checks.is_some()) + usize::from(auth.admin.is_some());
                guard.change(auth);
                Ok(count)
            }
        }
    }
}

/// Puts what `source` says into `gate` whenever it changes, and on SIGHUP, for ever.
pub(crate) async fn watch(source: Source, gate: Gate) {
    let mut hangup = signal(SignalKind::hangup()).ok();
    // Read once more at the start: it may have changed since it was read first.
    let mut known = None;
    let mut every = tokio::time::interval(EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let asked = tokio::select! {
            _ = every.tick() => false,
            () = hung_up(&mut hangup) => true,
        };
        let own = source.clone();
        let Ok(now) = tokio::task::spawn_blocking(move || own.fingerprint()).await else { continue };
        if now == known && !asked {
            continue;
        }
        let first = known.is_none();
        known = now;
        let (own, into) = (source.clone(), gate.clone());
        let Ok(loaded) = tokio::task::spawn_blocking(move || own.load(&into)).await else { continue };
        let (metrics, log) = (gate.observer().metrics(), gate.observer().log());
        if !first {
            metrics.reloaded(source.counted(), loaded.is_ok());
        }
        match loaded {
            Ok(count) if !first => {
                let (name, file) = (source.name(), source.path().display());
                log.info(&format!("{name} read"), &[("file", &file), (name, &count)]);
            }
            Ok(_) => {}
            Err(error) => {
                log.error(&format!("{} not read; they stay as they were", source.name()), &[("why", &error)]);
            }
        }
    }
}

/// SIGHUP, if it can be heard at all.
async fn hung_up(hangup: &mut Option<Signal>) {
    match hangup {
        Some(hangup) => _ = hangup.recv().await,
        None => std::future::pending().await,
    }
}
