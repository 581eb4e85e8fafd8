//! Retries the release of leases, when the store did not answer the first time.
//!
//! Only leases under an id of this process are retried: ending a lease twice ends it once, and no
//! other caller takes a lease under that id. One task makes all retries of a limiter, one call at a
//! time, and ends when none is left.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate_core::{Algorithm, Timestamp};
use tokio::runtime::Handle;

use crate::limiter::Shared;
use crate::store::{Check, StoreError};

/// The most releases that wait for a retry. A lease beyond them ends by its ttl.
const MOST: usize = 4096;
/// The first pause before a retry; each failure doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct Retries {
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    /// Each with the moment at which its leases end by themselves.
    releases: VecDeque<(Check<'static>, Timestamp)>,
    is_running: bool,
}

impl Shared {
    /// Keeps a release for later.
    pub(crate) fn retry_later(self: &Arc<Self>, release: Check<'static>) {
        let ttls = release.charges().iter().filter_map(|charge| match charge.limit.algorithm() {
            Algorithm::Concurrent(concurrent) => Some(concurrent.ttl),
            _ => None,
        });
        let until = self.clock.now().after_micros(ttls.max().unwrap_or(0));
        let mut waiting = self.retries.waiting.lock();
        if waiting.releases.len() >= MOST {
            return;
        }
        waiting.releases.push_back((release, until));
        if !waiting.is_running
            && let Ok(runtime) = Handle::try_current()
        {
            waiting.is_running = true;
            runtime.spawn(retry_all(Arc::downgrade(self)));
        }
    }

    /// Retries what waits, until the store does not answer. Returns whether something is left.
    async fn retry(self: &Arc<Self>) -> bool {
        let now = self.clock.now();
        self.retries.waiting.lock().releases.retain(|(_, until)| now < *until);
        loop {
            let next = {
                let mut waiting = self.retries.waiting.lock();
                let next = waiting.releases.pop_front();
                waiting.is_running = next.is_some();
                next
            };
            let Some((release, until)) = next else { return false };
            if let Err(StoreError::Unavailable(_)) = self.backend.decide(&release).await {
                self.retries.waiting.lock().releases.push_front((release, until));
                return true;
            }
            self.wake(&release);
        }
    }
}

async fn retry_all(weak: Weak<Shared>) {
    let mut pause = FIRST_PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        let Some(shared) = weak.upgrade() else { return };
        if !shared.retry().await {
            return;
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
