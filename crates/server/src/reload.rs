//! Reading the rules again when their file changes: all or nothing, and what was good stays until something better is there.
//!
//! The content is compared, not the time of change: a file that is replaced by a rename, or by the swap of a symbolic link above it, is noticed like any other.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::config::{Config, ConfigError};
use crate::gate::Gate;

/// How often to look.
const EVERY: Duration = Duration::from_millis(500);

/// Puts the rules of `file` into `gate` whenever they change, and on SIGHUP, until `stopped` says so.
pub(crate) async fn watch(file: PathBuf, gate: Gate, mut stopped: watch::Receiver<bool>) -> io::Result<()> {
    let mut hangup = signal(SignalKind::hangup())?;
    // Read once more at the start: it may have changed since it was read first.
    let mut known = None;
    let mut every = tokio::time::interval(EVERY);
    loop {
        let asked = tokio::select! {
            _ = every.tick() => false,
            _ = hangup.recv() => true,
            _ = stopped.wait_for(|down| *down) => return Ok(()),
        };
        let now = content(&file).await;
        if now == known && !asked {
            continue;
        }
        let first = known.is_none();
        known = now;
        let path = file.clone();
        match tokio::task::spawn_blocking(move || Config::load(&path)).await {
            Ok(Ok(config)) => {
                let count = config.rules.iter().count();
                gate.set_rules(config.rules);
                if !first {
                    say(&format!("{}: {count} rules read", file.display()));
                }
            }
            Ok(Err(error)) => refused(&error),
            Err(_) => {}
        }
    }
}

async fn content(file: &std::path::Path) -> Option<Vec<u8>> {
    tokio::fs::read(file).await.ok()
}

fn refused(error: &ConfigError) {
    say(&format!("{error}\nthe rules stay as they were"));
}

#[allow(clippy::print_stderr, reason = "the log comes with the metrics")]
fn say(text: &str) {
    eprintln!("tidegate: {text}");
}
