//! Steps back of the servers' clocks: tells a new step from the other keys that the last one left
//! ahead of the clock.

use std::sync::atomic::{AtomicI64, Ordering};

use parking_lot::Mutex;
use tidegate_core::Timestamp;

/// Servers that are told apart.
const SERVERS: usize = 64;
/// How much less a server's clock must be ahead of the time that has passed here to count as
/// stepped back.
const STEP_US: i64 = 1_000_000;

/// The clocks of the servers, each as its time less the time that has passed in this process.
#[derive(Debug)]
pub(super) struct Steps {
    /// The highest since the last step that was reported.
    highest_us: [AtomicI64; SERVERS],
    /// When no key can be ahead any more because of the steps that were reported, in the time that
    /// has passed here.
    until_us: Mutex<[u64; SERVERS]>,
}

impl Steps {
    pub(super) fn new() -> Self {
        Steps {
            highest_us: std::array::from_fn(|_| AtomicI64::new(i64::MIN)),
            until_us: Mutex::new([0; SERVERS]),
        }
    }

    /// An answer of a server: its time, and the time that has passed here.
    pub(super) fn saw(&self, place: u16, server: Timestamp, passed_us: u64) {
        let offset_us = offset(server, passed_us);
        let highest_us = &self.highest_us[usize::from(place) % SERVERS];
        if highest_us.load(Ordering::Relaxed) < offset_us {
            highest_us.fetch_max(offset_us, Ordering::Relaxed);
        }
    }

    /// A state was ahead of a server's clock by so much. Says whether that is a step that was not
    /// reported: the clock has gone back since the last report, or no key can be ahead any more
    /// because of that one.
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
