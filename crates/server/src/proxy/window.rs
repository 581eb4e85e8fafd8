//! Responses over HTTP/2 whose client opens no window. hyper does not ask for more of them, so
//! somebody else has to notice: the connection takes every byte that is sent on it, and still
//! nothing moves.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::sleep;

/// Those of one connection: at most as many as it may have requests at once.
#[derive(Debug, Default)]
pub(super) struct Windows {
    round: AtomicU64,
    waiting: Mutex<Vec<Weak<AtomicU64>>>,
}

/// One response. It waits from when it gave a piece until it is asked for the next.
#[derive(Debug)]
pub(super) struct Waiting {
    /// One more than the round since which it waits; nothing if it does not.
    since: Arc<AtomicU64>,
    windows: Arc<Windows>,
}

impl Waiting {
    pub(super) fn gave(&self) {
        self.since.store(self.windows.round.load(Relaxed) + 1, Relaxed);
    }

    pub(super) fn was_asked(&self) {
        self.since.store(0, Relaxed);
    }
}

impl Windows {
    pub(super) fn wait(self: &Arc<Self>) -> Waiting {
        let waiting = Waiting { since: Arc::default(), windows: Arc::clone(self) };
        waiting.gave();
        let mut all = self.waiting.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&waiting.since));
        waiting
    }

    /// Returns when one of them has waited for so long, or a little longer.
    pub(super) async fn starve(&self, most: Duration) {
        loop {
            sleep(most / 2).await;
            let round = self.round.fetch_add(1, Relaxed) + 1;
            let starved = |since: u64| since > 0 && round - (since - 1) > 2;
            if self
                .waiting
                .lock()
                .iter()
                .filter_map(Weak::upgrade)
                .any(|since| starved(since.load(Relaxed)))
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
    async fn who_waits_for_too_long_is_noticed() {
        let windows = Arc::<Windows>::default();
        let (most, began) = (Duration::from_secs(60), Instant::now());
        let (first, second) = (windows.wait(), windows.wait());
        first.was_asked();
        drop(second);
        tokio::select! {
            () = windows.starve(most) => panic!("nobody waits"),
            () = sleep(Duration::from_secs(600)) => first.gave(),
        }
        windows.starve(most).await;
        let waited = (Instant::now() - began).as_secs() - 600;
        assert!((60..=90).contains(&waited), "{waited}");
    }
}
