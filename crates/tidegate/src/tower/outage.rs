//! The outage of a layer's store: one event when it begins, one when it ends.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::events;
use crate::store::{OnFailure, StoreError};

/// An outage ends when calls are answered and none has failed for this long.
const QUIET: Duration = Duration::from_secs(1);

/// The state of a store without [`Resilient`](crate::resilience::Resilient), which reports its own
/// outages.
#[derive(Debug)]
pub(super) struct LayerOutage {
    origin: Instant,
    is_open: AtomicBool,
    /// The time of the last failure, in microseconds after `origin`.
    failed_us: AtomicU64,
}

impl Default for LayerOutage {
    fn default() -> Self {
        LayerOutage {
            origin: Instant::now(),
            is_open: AtomicBool::new(false),
            failed_us: AtomicU64::new(0),
        }
    }
}

impl LayerOutage {
    /// Records a call without an answer.
    pub(super) fn failed(&self, why: &StoreError, on_failure: Option<OnFailure>) {
        self.failed_us.store(self.now_us(), Ordering::Relaxed);
        if !self.is_open.swap(true, Ordering::Relaxed) {
            events::layer_without_store(why, enforced(on_failure));
        }
    }

    /// Records a call with an answer.
    pub(super) fn answered(&self) {
        if !self.is_open.load(Ordering::Relaxed) {
            return;
        }
        let quiet_us = self.now_us().saturating_sub(self.failed_us.load(Ordering::Relaxed));
        let is_over = Duration::from_micros(quiet_us) >= QUIET;
        if is_over && self.is_open.swap(false, Ordering::Relaxed) {
            events::layer_with_store();
        }
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}

/// How limits are enforced during the outage.
fn enforced(on_failure: Option<OnFailure>) -> &'static str {
    match on_failure {
        Some(OnFailure::Closed) => "every request is answered with 503 (on_failure: Closed)",
        _ => "no limit is enforced, every request passes (on_failure: Open)",
    }
}
