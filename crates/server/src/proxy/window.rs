//! Detects HTTP/2 clients that open no flow-control window for a response. hyper polls such a body
//! no further, and the connection still accepts bytes, so no other timeout applies.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::sleep;

/// The responses of one connection: at most as many as it may have concurrent streams.
#[derive(Debug, Default)]
pub(super) struct WindowWatch {
    round: AtomicU64,
    waiting: Mutex<Vec<Weak<AtomicU64>>>,
}

/// One response. It waits from the piece it returned until the next poll.
#[derive(Debug)]
pub(super) struct WindowWait {
    /// One more than the round in which the wait began; 0 if it does not wait.
    since: Arc<AtomicU64>,
    windows: Arc<WindowWatch>,
}

impl WindowWait {
    pub(super) fn sent(&self) {
        self.since.store(self.windows.round.load(Relaxed) + 1, Relaxed);
    }

    pub(super) fn polled(&self) {
        self.since.store(0, Relaxed);
    }
}

impl WindowWatch {
    pub(super) fn wait(self: &Arc<Self>) -> WindowWait {
        let waiting = WindowWait { since: Arc::default(), windows: Arc::clone(self) };
        waiting.sent();
        let mut all = self.waiting.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&waiting.since));
        waiting
    }

    /// Returns when a response has waited for `most`, or up to half as long again.
    pub(super) async fn stalled(&self, most: Duration) {
        loop {
            sleep(most / 2).await;
            let round = self.round.fetch_add(1, Relaxed) + 1;
            let is_stalled = |since: u64| since > 0 && round - (since - 1) > 2;
            if self
                .waiting
                .lock()
                .iter()
                .filter_map(Weak::upgrade)
                .any(|since| is_stalled(since.load(Relaxed)))
            {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_response_that_waits_for_too_long_is_noticed() {
        let windows = Arc::<WindowWatch>::default();
        let (most, began) = (Duration::from_secs(60), Instant::now());
        let (first, second) = (windows.wait(), windows.wait());
        first.polled();
        drop(second);
        tokio::select! {
            () = windows.stalled(most) => panic!("no response waits"),
            () = sleep(Duration::from_secs(600)) => first.sent(),
        }
        windows.stalled(most).await;
        let waited = (Instant::now() - began).as_secs() - 600;
        assert!((60..=90).contains(&waited), "{waited}");
    }
}
