//! How many calls may be under way: as many as the store answers in time. A state machine without a
//! clock.
//!
//! A store that is asked for more than it can do answers everything too late, if everything is
//! sent. So the bound falls when calls miss their deadline, at most once in the time that a call
//! may take, and rises again, one by one, as calls are answered. What finds no room is decided here
//! at once, and the store goes on doing as much as it can.

use tidegate_core::Timestamp;

/// It never falls below this, or one bad moment would be remembered for long.
const LEAST: usize = 16;
/// So many answers make room for one more.
const ANSWERS: u32 = 8;

#[derive(Debug)]
pub(crate) struct ConcurrencyLimit {
    under_way: usize,
    bound: usize,
    most: usize,
    answers: u32,
    fell: Timestamp,
}

impl ConcurrencyLimit {
    pub(crate) fn new(most: usize) -> Self {
        ConcurrencyLimit { under_way: 0, bound: most, most, answers: 0, fell: Timestamp::EPOCH }
    }

    /// Whether one more may begin; then it has.
    pub(crate) fn begin(&mut self) -> bool {
        let room = self.under_way < self.bound;
        self.under_way += usize::from(room);
        room
    }

    pub(crate) fn end(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
    }

    pub(crate) fn under_way(&self) -> usize {
        self.under_way
    }

    /// A call was answered in time.
    pub(crate) fn answered(&mut self) {
        self.answers += 1;
        if self.answers >= ANSWERS {
            self.answers = 0;
            self.bound = (self.bound + 1).min(self.most);
        }
    }

    /// The store was away and is back: what was learnt meanwhile was about something else.
    pub(crate) fn begin_anew(&mut self) {
        (self.bound, self.answers) = (self.most, 0);
    }

    /// A call, sent at `sent`, was not answered in time. Those that were sent before the bound fell
    /// say nothing about it.
    pub(crate) fn missed(&mut self, sent: Timestamp, now: Timestamp) {
        if sent >= self.fell {
            self.bound = (self.bound.min(self.under_way.max(1)) * 3 / 4).max(LEAST.min(self.most));
            (self.fell, self.answers) = (now, 0);
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
    fn falls_once_for_all_that_were_sent_before_and_rises_with_answers() {
        let mut concurrency_limit = ConcurrencyLimit::new(100);
        assert_eq!((0..150).filter(|_| concurrency_limit.begin()).count(), 100);
        (0..50).for_each(|_| concurrency_limit.missed(at(0), at(5)));
        (0..100).for_each(|_| concurrency_limit.end());
        assert_eq!((0..150).filter(|_| concurrency_limit.begin()).count(), 75);
        (0..8 * 10).for_each(|_| concurrency_limit.answered());
        assert_eq!((0..150).filter(|_| concurrency_limit.begin()).count(), 10);
        (0..10_000).for_each(|_| concurrency_limit.answered());
        assert_eq!((0..150).filter(|_| concurrency_limit.begin()).count(), 15);
        assert_eq!(concurrency_limit.under_way(), 100);
    }

    #[test]
    fn never_falls_to_nothing() {
        let mut concurrency_limit = ConcurrencyLimit::new(100);
        (0..100).for_each(|n| concurrency_limit.missed(at(n * 10), at(n * 10 + 5)));
        assert_eq!((0..150).filter(|_| concurrency_limit.begin()).count(), LEAST);
        let mut few = ConcurrencyLimit::new(3);
        (0..100).for_each(|n| few.missed(at(n * 10), at(n * 10 + 5)));
        assert_eq!((0..150).filter(|_| few.begin()).count(), 3);
    }
}
