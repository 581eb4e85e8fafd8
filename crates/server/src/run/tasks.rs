//! The tasks of a server that run until it stops.

use std::future::Future;
use std::io;

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::observe::Observer;
use crate::supervise::{self, Health};

/// Listeners and background tasks, and what all of them get.
pub(super) struct Tasks {
    pub(super) set: JoinSet<io::Result<()>>,
    pub(super) observer: Observer,
    pub(super) health: Health,
    pub(super) stopped: watch::Receiver<bool>,
}

impl Tasks {
    /// Runs a background task, and restarts it if it ends.
    pub(super) fn keep<T, F>(&mut self, name: &'static str, task: T)
    where
        T: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let (observer, health) = (self.observer.clone(), self.health.clone());
        self.set.spawn(supervise::keep(name, task, observer, health, self.stopped.clone()));
    }
}
