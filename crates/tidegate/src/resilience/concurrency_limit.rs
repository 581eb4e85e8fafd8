//! The concurrency limit: how many calls may be in flight. A state machine without a clock.
//!
//! An overloaded store that receives every call answers all of them too late. So the bound falls
//! when calls miss their deadline, at most once per deadline, and rises one by one as calls are
//! answered. Checks beyond the bound are decided locally, and the store works at its capacity.

use tidegate_core::Timestamp;

/// The bound never falls below this, so that it recovers soon from one stall.
const MIN_BOUND: usize = 16;
/// The number of answers that raise the bound by one.
const ANSWERS_PER_STEP: u32 = 8;

#[derive(Debug)]
pub(crate) struct ConcurrencyLimit {
    in_flight: usize,
    bound: usize,
    max: usize,
    /// Answers since the bound last rose.
    answers: u32,
    fell_at: Timestamp,
}

impl ConcurrencyLimit {
    pub(crate) fn new(max: usize) -> Self {
        ConcurrencyLimit { in_flight: 0, bound: max, max, answers: 0, fell_at: Timestamp::EPOCH }
    }

    /// Begins a call, if the bound allows it.
    pub(crate) fn begin(&mut self) -> bool {
        let fits = self.in_flight < self.bound;
        self.in_flight += usize::from(fits);
        fits
    }

    pub(crate) fn end(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Records an answer in time.
    pub(crate) fn answered(&mut self) {
        self.answers += 1;
        if self.answers >= ANSWERS_PER_STEP {
            self.answers = 0;
            self.bound = (self.bound + 1).min(self.max);
        }
    }

    /// Resets the bound after an outage: misses during an outage are not overload.
    pub(crate) fn restart(&mut self) {
        (self.bound, self.answers) = (self.max, 0);
    }

    /// Records a miss of a call sent at `sent`. A call sent before the bound last fell says nothing
    /// about the new bound.
    pub(crate) fn missed(&mut self, sent: Timestamp, now: Timestamp) {
        if sent >= self.fell_at {
            self.bound =
                (self.bound.min(self.in_flight.max(1)) * 3 / 4).max(MIN_BOUND.min(self.max));
            (self.fell_at, self.answers) = (now, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_millis(1000 + ms)
    }

    #[test]
    fn falls_once_for_all_calls_sent_before_and_rises_with_answers() {
        let mut concurrency_limit = ConcurrencyLimit::new(100);
        assert_eq!((0..150).filter(|_| concurrency_limit.begin()).count(), 100);
        (0..50).for_each(|_| concurrency_limit.missed(at(0), at(5)));
        (0..100).for_each(|_| concurrency_limit.end());
        assert_eq!((0..150).filter(|_| concurrency_limit.begin()).count(), 75);
        (0..8 * 10).for_each(|_| concurrency_limit.answered());
        assert_eq!((0..150).filter(|_| concurrency_limit.begin()).count(), 10);
        (0..10_000).for_each(|_| concurrency_limit.answered());
        assert_eq!((0..150).filter(|_| concurrency_limit.begin()).count(), 15);
        assert_eq!(concurrency_limit.in_flight(), 100);
    }

    #[test]
    fn never_falls_below_the_minimum() {
        let mut concurrency_limit = ConcurrencyLimit::new(100);
        (0..100).for_each(|n| concurrency_limit.missed(at(n * 10), at(n * 10 + 5)));
        assert_eq!((0..150).filter(|_| concurrency_limit.begin()).count(), MIN_BOUND);
        let mut few = ConcurrencyLimit::new(3);
        (0..100).for_each(|n| few.missed(at(n * 10), at(n * 10 + 5)));
        assert_eq!((0..150).filter(|_| few.begin()).count(), 3);
    }
}
