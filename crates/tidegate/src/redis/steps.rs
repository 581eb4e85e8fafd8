//! Steps back of the servers' clocks: tells a new step from further keys that the last step left
//! ahead of the clock.

use std::sync::atomic::{AtomicI64, Ordering};

use parking_lot::Mutex;
use tidegate_core::Timestamp;

/// The number of servers to distinguish.
const SERVERS: usize = 64;
/// A server's clock stepped back if its offset to this process's clock fell by more than this.
const STEP_US: i64 = 1_000_000;

/// The offsets of the servers' clocks to the time that has passed in this process.
#[derive(Debug)]
pub(super) struct Steps {
    /// The highest offset since the last reported step.
    highest_us: [AtomicI64; SERVERS],
    /// When the last key that a reported step left ahead has been caught up, in the time of this
    /// process.
    until_us: Mutex<[u64; SERVERS]>,
}

impl Steps {
    pub(super) fn new() -> Self {
        Steps {
            highest_us: std::array::from_fn(|_| AtomicI64::new(i64::MIN)),
            until_us: Mutex::new([0; SERVERS]),
        }
    }

    /// Records the time of an answer, and the time that has passed in this process.
    pub(super) fn saw(&self, place: u16, server: Timestamp, passed_us: u64) {
        let offset_us = offset(server, passed_us);
        let highest_us = &self.highest_us[usize::from(place) % SERVERS];
        if highest_us.load(Ordering::Relaxed) < offset_us {
            highest_us.fetch_max(offset_us, Ordering::Relaxed);
        }
    }

    /// Whether a state that was `by_us` ahead of a server's clock shows a step not yet reported:
    /// the clock has gone back since the last report, or no key can be ahead because of that one.
    pub(super) fn is_new(&self, place: u16, by_us: u64, server: Timestamp, passed_us: u64) -> bool {
        let (place, offset_us) = (usize::from(place) % SERVERS, offset(server, passed_us));
        let mut until_us = self.until_us.lock();
        let highest_us = &self.highest_us[place];
        let has_stepped = highest_us.load(Ordering::Relaxed).saturating_sub(offset_us) > STEP_US;
        let is_new = has_stepped || until_us[place] <= passed_us;
        if is_new {
            highest_us.store(offset_us, Ordering::Relaxed);
        }
        until_us[place] = until_us[place].max(passed_us.saturating_add(by_us));
        is_new
    }
}

fn offset(server: Timestamp, passed_us: u64) -> i64 {
    i64::try_from(server.as_micros()).unwrap_or(i64::MAX).saturating_sub_unsigned(passed_us)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    #[test]
    fn each_step_of_each_server_is_new_once() {
        let steps = Steps::new();
        let at = |seconds: u64| Timestamp::from_micros(seconds * SECOND);
        let ahead = |place, server, by, passed| {
            steps.is_new(place, by * SECOND, at(server), passed * SECOND)
        };
        steps.saw(0, at(100_000), 0);
        assert!(ahead(0, 98_210, 1_790, 10), "back by 1800 seconds");
        assert!(!ahead(0, 98_211, 1_700, 11), "another key, the same step");
        assert!(ahead(0, 11_820, 86_390, 20), "back by a day, ten seconds later");
        assert!(!ahead(0, 11_821, 86_000, 21));
        assert!(ahead(1, 99_000, 1_000, 22), "another server");
        steps.saw(0, at(100_030), 30);
        assert!(ahead(0, 11_840, 88_190, 40), "forward, and back again");
        assert!(ahead(2, 500, 60, 500), "a step before this process started");
        assert!(!ahead(2, 530, 30, 530) && ahead(2, 560, 2, 560), "and another one after that");
    }
}
