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

use super::handle::StoreHandle;
use crate::store::{Check, StoreError};

/// The most releases that are kept for a retry. A lease beyond them ends by its ttl.
const MAX_PENDING: usize = 4096;
/// The first pause before a retry; each failure doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Retries {
    pending: Mutex<PendingReleases>,
}

#[derive(Default)]
struct PendingReleases {
    /// Each with the time at which its leases end by their ttl.
    releases: VecDeque<(Check<'static>, Timestamp)>,
    is_running: bool,
}

impl StoreHandle {
    /// Retries a release later.
    pub(super) fn retry_later(self: &Arc<Self>, release: Check<'static>) {
        let ttls = release.charges().iter().filter_map(|charge| match charge.limit.algorithm() {
            Algorithm::Concurrent(concurrent) => Some(concurrent.ttl),
            _ => None,
        });
        let until = self.clock.now().after_micros(ttls.max().unwrap_or(0));
        let mut pending = self.retries.pending.lock();
        if pending.releases.len() >= MAX_PENDING {
            return;
        }
        pending.releases.push_back((release, until));
        if !pending.is_running
            && let Ok(runtime) = Handle::try_current()
        {
            pending.is_running = true;
            runtime.spawn(retry_all(Arc::downgrade(self)));
        }
    }

    /// Retries the pending releases until the store does not answer. Returns whether some are left.
    async fn retry(self: &Arc<Self>) -> bool {
        let now = self.clock.now();
        self.retries.pending.lock().releases.retain(|(_, until)| now < *until);
        loop {
            let next = {
                let mut pending = self.retries.pending.lock();
                let next = pending.releases.pop_front();
                pending.is_running = next.is_some();
                next
            };
            let Some((release, until)) = next else { return false };
            if let Err(StoreError::Unavailable(_)) = self.backend.decide(&release).await {
                self.retries.pending.lock().releases.push_front((release, until));
                return true;
            }
            self.wake(&release);
        }
    }
}

async fn retry_all(weak: Weak<StoreHandle>) {
    let mut pause = FIRST_PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        let Some(store) = weak.upgrade() else { return };
        if !store.retry().await {
            return;
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
