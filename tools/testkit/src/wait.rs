//! Waiting for something to become true, instead of sleeping and hoping.

use std::thread;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(5);

/// Asks `condition` every few milliseconds until it is true.
///
/// # Panics
/// If that takes longer than `bound`, with `what` was waited for.
#[track_caller]
pub fn wait_until(what: &str, bound: Duration, mut condition: impl FnMut() -> bool) {
    assert!(
        becomes_true(bound, &mut condition),
        "waited {bound:?} and it did not become true: {what}"
    );
}

/// The same as a question.
pub(crate) fn becomes_true(bound: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + bound;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(POLL);
    }
}
