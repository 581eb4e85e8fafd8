//! The fixed window: a counter and when it started.
//!
//! Windows start at multiples of the period, or with the first hit after the last one ended. Either
//! way a burst on both sides of an edge is allowed: up to twice the amount within one period.
//! `sliding`, `log` and `bucket` do not allow that.

use core::cmp::{max, min};

use super::{Kernel, Moved};
use crate::Id;
use crate::time::{EXACT, Timestamp};

/// The parameters of a fixed window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Window {
    /// The units in one window.
    pub amount: u64,
    /// The length of a window in microseconds.
    pub period: u64,
    /// Whether a window starts with its first hit rather than at a multiple of the period.
    pub from_first_hit: bool,
}

/// The state of a window for one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Count {
    /// The start of the window.
    pub start: Timestamp,
    /// The time of the last charge in it.
    pub last: Timestamp,
    /// The usage of the window; zero is idle.
    pub used: u64,
}

impl Window {
    /// Both sides of an edge. A first-hit window has spent at least one unit at its start.
    pub(crate) fn worst_case(&self) -> u64 {
        match (self.period, self.from_first_hit) {
            (1, _) => self.amount,
            (_, false) => 2 * self.amount,
            (_, true) => 2 * self.amount - 1,
        }
    }

    /// The same use in the window of `now`, if it was in a later one.
    pub(crate) fn rebase(&self, count: &mut Count, now: Timestamp) -> Moved {
        let start =
            min(count.start, if self.from_first_hit { now } else { now.floor_to(self.period) });
        // A charge of an earlier window has ended with it, and may not be found in this one.
        let moved = Moved {
            oldest: count.start,
            by_us: count.start.micros_since(start),
            latest: Timestamp::MAX,
        };
        (count.start, count.last) = (start, min(count.last, now));
        moved
    }
}

impl Kernel for Window {
    type State = Count;

    #[inline(always)]
    fn capacity(&self) -> u64 {
        self.amount
    }

    #[inline(always)]
    fn age(&self, count: &mut Count, now: Timestamp) -> Timestamp {
        let now = if count.used == 0 { now } else { max(now, count.start) };
        if count.used == 0 || now.micros_since(count.start) >= self.period {
            let start = if self.from_first_hit { now } else { now.floor_to(self.period) };
            *count = Count { start, last: start, used: 0 };
        }
        now
    }

    #[inline(always)]
    fn room(&self, count: &Count, _now: Timestamp, ceiling: u64) -> u64 {
        ceiling.saturating_sub(count.used)
    }

    #[inline(always)]
    fn charge(&self, count: &mut Count, now: Timestamp, cost: u64, _id: Id) -> Timestamp {
        count.last = now;
        count.used = count.used.saturating_add(cost).min(EXACT - 1);
        count.start
    }

    #[inline(always)]
    fn wait(&self, count: &Count, now: Timestamp, cost: u64, ceiling: u64) -> u64 {
        if count.used <= ceiling - cost {
            0
        } else {
            count.start.plus(self.period).micros_since(now)
        }
    }

    fn give_back(
        &self,
        count: &mut Count,
        _now: Timestamp,
        units: u64,
        charged_at: Option<Timestamp>,
    ) -> u64 {
        if charged_at.is_some_and(|start| start != count.start) {
            return 0;
        }
        let back = units.min(count.used);
        count.used -= back;
        back
    }

    fn idle_at(&self, count: &Count) -> Timestamp {
        if count.used == 0 { Timestamp::EPOCH } else { count.start.plus(self.period) }
    }
}
