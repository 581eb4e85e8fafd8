//! Reading the rules again when their file changes: all or nothing, and what was good stays until something better is there.
//!
//! The content is compared, not the time of change: a file that is replaced by a rename, or by the swap of a symbolic link above it, is noticed like any other.

use std::path::PathBuf;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::Config;
use crate::gate::Gate;
use crate::observe::metrics::Reloaded;

/// How often to look.
const EVERY: Duration = Duration::from_millis(500);

/// Puts the rules of `file` into `gate` whenever they change, and on SIGHUP, for ever.
pub(crate) async fn watch(file: PathBuf, gate: Gate) {
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
        let now = tokio::fs::read(&file).await.ok();
        if now == known && !asked {
            continue;
        }
        let first = known.is_none();
        known = now;
        let path = file.clone();
        let Ok(loaded) = tokio::task::spawn_blocking(move || Config::load(&path)).await else { continue };
        let (metrics, log) = (gate.observer().metrics(), gate.observer().log());
        if !first {
            metrics.reloaded(Reloaded::Rules, loaded.is_ok());
        }
        match loaded {
            Ok(config) => {
                let count = config.rules.iter().count();
                gate.set_rules(config.rules);
                if !first {
                    log.info("rules read", &[("file", &file.display()), ("rules", &count)]);
                }
            }
            Err(error) => log.error("rules not read; they stay as they were", &[("why", &error)]),
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
