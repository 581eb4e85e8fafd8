//! The fields that the store would return for a check now, derived from its last answer.
//!
//! An answer does not contain the state, but it contains times: when one more unit is left, when
//! the denied cost fits, when nothing is in use. For a bucket these times leave a range of levels
//! less than one tick wide. A field on which the whole range agrees is exact; otherwise the store
//! must decide. All times are the store's: its time of the decision, plus what has passed here
//! since the answer arrived.

use tidegate_core::algorithm::bucket::{Level, Rate};
use tidegate_core::algorithm::window::Count;
use tidegate_core::algorithm::{Bucket, Kernel, Window};
use tidegate_core::{Algorithm, Id, Limit, MAX_WAIT_US, Retry, Timestamp, Verdict, report};

use super::last_answer::LastAnswer;

impl LastAnswer {
    /// The verdict of the store on `cost` in a check that is denied, if only `spent` units were
    /// charged since its last answer; `None` if that answer does not determine every field.
    pub(crate) fn expected(
        &self,
        limit: &Limit,
        cost: u64,
        spent: u64,
        now: Timestamp,
    ) -> Option<Verdict> {
        let [least, most] = self.range(limit, cost, spent, now)?;
        (least == most).then_some(least)
    }

    /// The same with the strictest possible fields where the exact ones are unknown: off by less
    /// than a tick of the limit.
    pub(crate) fn strictest(
        &self,
        limit: &Limit,
        cost: u64,
        spent: u64,
        now: Timestamp,
    ) -> Option<Verdict> {
        self.range(limit, cost, spent, now).map(|[_, most]| most)
    }

    /// The verdicts at the least and at the most usage that the last answer leaves possible.
    fn range(&self, limit: &Limit, cost: u64, spent: u64, now: Timestamp) -> Option<[Verdict; 2]> {
        if self.is_converted || self.reset_us >= MAX_WAIT_US {
            return None;
        }
        let passed_us = now.micros_since(self.answered);
        let store_now = self.at.after_micros(passed_us);
        match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                let levels = self.levels(bucket)?;
                Some(levels.map(|level| fields(limit, bucket, level, store_now, spent, cost)))
            }
            Algorithm::Window(window) => {
                let count = self.count(window)?;
                Some([fields(limit, window, count, store_now, spent, cost); 2])
            }
            _ if spent == 0 => self.until_next(limit, cost, passed_us).map(|fields| [fields; 2]),
            _ => None,
        }
    }

    /// The lowest and the highest level of a bucket that agree with this answer.
    fn levels(&self, bucket: &Bucket) -> Option<[Level; 2]> {
        let Rate { p, q, grid } = bucket.rate;
        let mut low = Level { units: 0, at: self.at };
        if self.reset_us == 0 {
            return Some([low; 2]);
        }
        // It is empty after this many ticks and not one earlier.
        let ticks = self.reset_us.div_ceil(grid);
        let at_us = (self.at.as_micros() + self.reset_us).checked_sub(ticks * grid)?;
        low = Level { units: (ticks - 1) * p + 1, at: Timestamp::from_micros(at_us) };
        let mut high = Level { units: ticks * p, ..low };
        // A cost fits after this many ticks and not one earlier.
        for (cost, wait_us) in
            [Some((self.remaining + 1, self.next_us)), self.wait].into_iter().flatten()
        {
            if wait_us > 0 && cost <= bucket.capacity {
                let ticks = (self.at.as_micros() + wait_us - at_us) / grid;
                let free = (bucket.capacity - cost) * q;
                low.units = low.units.max(free + ticks.checked_sub(1)? * p + 1);
                high.units = high.units.min(free + ticks * p);
            }
        }
        if self.remaining > 0 {
            high.units = high.units.min((bucket.capacity - self.remaining) * q);
        }
        (low.units <= high.units).then_some([low, high])
    }

    /// The count of a window after this answer. Debt beyond the amount makes no difference to a
    /// check.
    fn count(&self, window: &Window) -> Option<Count> {
        let used = window.amount.saturating_sub(self.remaining);
        if used == 0 {
            return Some(Count::default());
        }
        let start = (self.at.as_micros() + self.reset_us).checked_sub(window.period)?;
        let start = Timestamp::from_micros(start);
        Some(Count { start, last: start, used })
    }

    /// The verdict of any algorithm, as long as no more is left than at the answer: its waits,
    /// shortened by the time that has passed.
    fn until_next(&self, limit: &Limit, cost: u64, passed_us: u64) -> Option<Verdict> {
        let (capacity, remaining) = (limit.capacity(), self.remaining);
        if remaining < capacity && passed_us >= self.next_us {
            return None;
        }
        let wait_us = match self.wait {
            _ if cost <= remaining || cost > capacity => 0,
            Some((denied, wait_us)) if denied == cost => wait_us,
            _ if cost == remaining + 1 => self.next_us,
            _ if cost == capacity => self.reset_us,
            _ => return None,
        };
        let retry = match wait_us.saturating_sub(passed_us) {
            _ if cost > capacity => Retry::Never,
            _ if cost <= remaining => Retry::Now,
            wait_us => Retry::After(wait_us),
        };
        Some(Verdict {
            allowed: cost <= remaining,
            granted: 0,
            amount: capacity,
            remaining,
            retry,
            reset_after_us: self.reset_us.saturating_sub(passed_us),
            next_after_us: self.next_us.saturating_sub(passed_us),
        })
    }
}

/// The verdict on `cost` from this state after `spent` more units, in a check that is denied.
fn fields<K>(
    limit: &Limit,
    kernel: &K,
    mut state: K::State,
    now: Timestamp,
    spent: u64,
    cost: u64,
) -> Verdict
where
    K: Kernel<State: Copy>,
{
    let now = kernel.age(&mut state, now);
    if spent > 0 {
        kernel.charge(&mut state, now, spent, Id::NONE);
    }
    let fits = cost <= kernel.room(&state, now, kernel.capacity());
    Verdict { granted: 0, ..report(limit, kernel, (fits, state, now), cost) }
}
