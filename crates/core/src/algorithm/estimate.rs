//! The two-window estimate: it assumes that the usage of the previous window was spread evenly.
//!
//! A sliding window that ends now covers all of the current fixed window and a part of the previous
//! one; the previous count is weighted by that part. Two counters per key; nearly a sliding window
//! for steady traffic, but a burst late in one window and another late in the next can together
//! reach almost twice the amount within a period.

use core::cmp::{max, min};

use super::{GRIDS_US, Kernel, Moved};
use crate::Id;
use crate::exact::{mul_div_ceil, mul_div_floor};
use crate::limit::{LimitError, Parameter, Problem};
use crate::time::{EXACT, Period, Timestamp};

/// The parameters of an estimate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Estimate {
    /// The units per period.
    pub amount: u64,
    /// The length of a window in microseconds.
    pub period: u64,
    /// The microseconds of a tick of its clock grid; divides the period.
    pub grid: u64,
}

/// The state of an estimate for one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pair {
    /// The start of the current window: a multiple of the period.
    pub start: Timestamp,
    /// The time of the last charge.
    pub last: Timestamp,
    /// The usage of the previous window.
    pub previous: u64,
    /// The usage of the current window.
    pub current: u64,
}

impl Estimate {
    /// Finds the finest grid on which 3 * amount * period stays below 2^53.
    pub(crate) fn new(amount: u64, period: Period, debt: u64) -> Result<Self, LimitError> {
        let period = period.as_micros();
        let grid = GRIDS_US.into_iter().find(|grid| {
            let ticks = u128::from(period / grid);
            let most = 3 * u128::from(amount) * ticks;
            let most = max(most, (u128::from(amount) + u128::from(debt)) * ticks);
            period.is_multiple_of(*grid) && most < u128::from(EXACT)
        });
        match grid {
            Some(grid) => Ok(Estimate { amount, period, grid }),
            None => Err(LimitError::new(Parameter::Amount, amount, Problem::NoGrid)),
        }
    }

    /// All of it at the end of one window, and as much as fits at the end of the next.
    pub(crate) fn worst_case(&self) -> u64 {
        if self.period == 1 {
            return self.amount;
        }
        let left = self.ticks() - (self.period - 2) / self.grid;
        2 * self.amount - mul_div_ceil(self.amount, left, self.ticks())
    }

    /// How many units were in use when something was last taken. In an earlier window, everything
    /// of that window was.
    pub(crate) fn used_last(pair: &Pair, period: u64) -> u64 {
        let estimate = Estimate { amount: 1, period, grid: 1 };
        EXACT - 1 - estimate.room(pair, max(pair.last, pair.start), EXACT - 1)
    }

    /// What was in use when something was last taken becomes the use of the window of `now`, if
    /// that was in a later one. The weight of the previous window is part of it: it is not counted
    /// twice, and nothing drains faster than one amount in a period.
    pub(crate) fn rebase(pair: &mut Pair, period: u64, now: Timestamp) -> Moved {
        let start = now.floor_to(period);
        let last = min(pair.last, now);
        if pair.start <= now {
            pair.last = last;
            return Moved::NOTHING;
        }
        let moved = Moved {
            oldest: pair.start,
            by_us: pair.start.micros_since(start),
            latest: Timestamp::MAX,
        };
        *pair = Pair { start, last, previous: 0, current: Self::used_last(pair, period) };
        moved
    }

    /// The period in ticks.
    fn ticks(&self) -> u64 {
        self.period / self.grid
    }

    /// How many ticks of the current window have passed.
    fn elapsed(&self, pair: &Pair, now: Timestamp) -> u64 {
        now.micros_since(pair.start) / self.grid
    }
}

impl Kernel for Estimate {
    type State = Pair;

    #[inline(always)]
    fn capacity(&self) -> u64 {
        self.amount
    }

    fn age(&self, pair: &mut Pair, now: Timestamp) -> Timestamp {
        let idle = pair.previous == 0 && pair.current == 0;
        let now = if idle { now } else { max(now, pair.start) };
        let start = now.floor_to(self.period);
        // An idle pair begins anew, also if the clock went back.
        let windows = if idle { u64::MAX } else { start.micros_since(pair.start) / self.period };
        match windows {
            0 => {}
            1 => *pair = Pair { start, previous: pair.current, current: 0, ..*pair },
            _ => *pair = Pair { start, last: start, previous: 0, current: 0 },
        }
        now
    }

    fn room(&self, pair: &Pair, now: Timestamp, ceiling: u64) -> u64 {
        let left = self.ticks() - self.elapsed(pair, now);
        let weighted = mul_div_ceil(pair.previous, left, self.ticks());
        ceiling.saturating_sub(pair.current).saturating_sub(weighted)
    }

    fn charge(&self, pair: &mut Pair, now: Timestamp, cost: u64, _id: Id) -> Timestamp {
        pair.last = now;
        pair.current = pair.current.saturating_add(cost).min(EXACT - 1);
        pair.start
    }

    fn wait(&self, pair: &Pair, now: Timestamp, cost: u64, ceiling: u64) -> u64 {
        if cost <= self.room(pair, now, ceiling) {
            return 0;
        }
        let ticks = self.ticks();
        let free = ceiling - cost;
        // Inside this window, as soon as the weight of the previous one has shrunk enough; or in
        // the next one, where what is current now is the previous one.
        let ticks_from_start = if pair.current <= free {
            ticks - mul_div_floor(free - pair.current, ticks, pair.previous).min(ticks)
        } else {
            ticks + (ticks - mul_div_floor(free, ticks, pair.current).min(ticks))
        };
        pair.start.plus(ticks_from_start * self.grid).micros_since(now)
    }

    fn give_back(
        &self,
        pair: &mut Pair,
        _now: Timestamp,
        units: u64,
        charged_at: Option<Timestamp>,
    ) -> u64 {
        let current = charged_at.is_none_or(|start| start == pair.start);
        let previous = charged_at.is_none_or(|start| start.plus(self.period) == pair.start);
        let from_current = if current { units.min(pair.current) } else { 0 };
        let from_previous = if previous { (units - from_current).min(pair.previous) } else { 0 };
        pair.current -= from_current;
        pair.previous -= from_previous;
        from_current + from_previous
    }

    fn idle_at(&self, pair: &Pair) -> Timestamp {
        match (pair.previous, pair.current) {
            (0, 0) => Timestamp::EPOCH,
            (_, 0) => pair.start.plus(self.period),
            (_, _) => pair.start.plus(2 * self.period),
        }
    }
}
