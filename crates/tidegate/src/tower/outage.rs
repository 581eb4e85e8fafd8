//! Whether the store of a layer answers: reports when it stops and when it answers again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::events;
use crate::resilience::OnFailure;
use crate::store::StoreError;

/// An outage is over when calls are answered and none has failed for this long: single failures in
/// a row are one outage.
const QUIET: Duration = Duration::from_secs(1);

/// The outage of a store that stands behind a layer without [`Resilient`](crate::resilience::Resilient), which
/// reports its own.
#[derive(Debug)]
pub(super) struct Outage {
    origin: Instant,
    is_open: AtomicBool,
    /// When a call failed last, in microseconds after `origin`.
    failed_us: AtomicU64,
}

impl Default for Outage {
    fn default() -> Self {
        Outage {
            origin: Instant::now(),
            is_open: AtomicBool::new(false),
            failed_us: AtomicU64::new(0),
        }
    }
}

impl Outage {
    /// A call had no answer.
    pub(super) fn failed(&self, why: &StoreError, on_failure: Option<OnFailure>) {
        self.failed_us.store(self.now_us(), Ordering::Relaxed);
        if !self.is_open.swap(true, Ordering::Relaxed) {
            events::layer_without_store(why, enforced(on_failure));
        }
    }

    /// A call was answered.
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

/// What happens to requests meanwhile.
fn enforced(on_failure: Option<OnFailure>) -> &'static str {
    match on_failure {
        Some(OnFailure::Closed) => "every request is answered with 503 (on_failure: Closed)",
        _ => "no limit is enforced, every request passes (on_failure: Open)",
    }
}
