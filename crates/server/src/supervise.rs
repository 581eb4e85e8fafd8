//! Background tasks: one that panics or ends is restarted, counted and logged.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::observe::Observer;
use crate::panics::caught;
use crate::probe::StoreProbe;

/// How long to wait before a task is started again.
const PAUSE: Duration = Duration::from_millis(50);
/// After more ends than this within [`WITHIN`], the server is not ready.
const MANY: usize = 3;
const WITHIN: Duration = Duration::from_secs(60);

/// How the background tasks and the store in memory are doing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Health {
    ends: Arc<Mutex<VecDeque<Instant>>>,
    is_stuck: Arc<AtomicBool>,
    store_probe: StoreProbe,
}

impl Health {
    /// Why the process is not ready: tasks that end too often, or a stalled store.
    pub(crate) fn problem(&self) -> Option<&'static str> {
        if self.is_stuck.load(Ordering::Relaxed) {
            return Some("the store in memory is stalled: the log has since when");
        }
        let mut ends = self.ends.lock();
        while ends.front().is_some_and(|at| at.elapsed() > WITHIN) {
            ends.pop_front();
        }
        (ends.len() > MANY).then_some("background tasks end repeatedly: the log has why")
    }

    /// The probe of the store that all listeners share.
    pub(crate) fn store_probe(&self) -> &StoreProbe {
        &self.store_probe
    }

    /// Whether there is a problem.
    #[cfg(test)]
    pub(crate) fn is_failing(&self) -> bool {
        self.problem().is_some()
    }

    pub(crate) fn set_stuck(&self, is_stuck: bool) {
        self.is_stuck.store(is_stuck, Ordering::Relaxed);
    }

    fn ended(&self) {
        let mut ends = self.ends.lock();
        ends.push_back(Instant::now());
        if ends.len() > MANY + 1 {
            ends.pop_front();
        }
    }
}

/// Runs the task that `task` makes until `stopped`, and restarts it whenever it ends.
pub(crate) async fn keep<T, F>(
    name: &'static str,
    task: T,
    observer: Observer,
    health: Health,
    mut stopped: watch::Receiver<bool>,
) -> io::Result<()>
where
    T: Fn() -> F,
    F: Future<Output = ()>,
{
    loop {
        let ended = tokio::select! {
            ended = caught(task()) => ended,
            _ = stopped.wait_for(|down| *down) => return Ok(()),
        };
        let why = match ended {
            Some(()) => "it ended",
            None => {
                observer.metrics().panicked();
                "it panicked"
            }
        };
        observer.metrics().restarted();
        observer.log().error("a task is started again", &[("task", &name), ("why", &why)]);
        health.ended();
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            _ = stopped.wait_for(|down| *down) => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_is_restarted_and_too_many_ends_are_not_ready() {
        let (runs, health, observer) =
            (Arc::new(AtomicU64::new(0)), Health::default(), Observer::default());
        let (stop, stopped) = watch::channel(false);
        let kept = tokio::spawn({
            let (runs, health, observer) = (Arc::clone(&runs), health.clone(), observer.clone());
            async move {
                let task = || async {
                    match runs.fetch_add(1, Ordering::Relaxed) {
                        0 => panic!("on purpose"),
                        1 | 2 => {}
                        _ => std::future::pending().await,
                    }
                };
                keep("test", task, observer, health, stopped).await
            }
        });
        while runs.load(Ordering::Relaxed) < 4 {
            tokio::time::sleep(PAUSE).await;
        }
        assert!(!health.is_failing());
        health.ended();
        assert!(health.is_failing());
        tokio::time::sleep(WITHIN + PAUSE).await;
        assert!(!health.is_failing(), "a minute later it is forgotten");
        let text =
            observer.metrics().text(&crate::backend::Backend::Memory(tidegate::Memory::new()), 0);
        assert!(
            text.contains("tidegate_panics_total 1\n")
                && text.contains("tidegate_task_restarts_total 3\n"),
            "{text}"
        );
        stop.send(true).unwrap();
        kept.await.unwrap().unwrap();
    }
}
