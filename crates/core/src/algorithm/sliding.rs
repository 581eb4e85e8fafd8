//! The sliding window in steps: one counter for each step of the clock, and the sum of those still
//! in the window.
//!
//! A step is a fixed slice of time, counted from the epoch; it need not divide the period. What was
//! taken within a step leaves the window together:
//! - **strict** (the default): when the last hit the step could hold has left. Never more than the
//!   amount in any span of one period;
//! - **lenient**: when the window begins to leave the step, as the published recipes do: up to one
//!   step early.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::cmp::{max, min};

use super::pieces::{take_back, until_ended};
use super::{Kernel, Moved};
use crate::Id;
use crate::exact::exact_sum;
use crate::state::block;
use crate::time::{EXACT, Timestamp};

/// The parameters of a sliding window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Sliding {
    /// The units in any span of one period.
    pub amount: u64,
    /// The period in microseconds.
    pub period: u64,
    /// The length of a step in microseconds.
    pub step: u64,
    /// Whether a step is removed as soon as the window begins to leave it.
    pub lenient: bool,
}

/// The state of a sliding window for one key: the steps with usage, oldest first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Steps {
    steps: VecDeque<Step>,
    total: u64,
    last: Timestamp,
}

/// One step with usage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// The number of the step since the epoch.
    pub index: u64,
    /// The usage of the step.
    pub used: u64,
}

impl Steps {
    pub(crate) fn heap_bytes(&self) -> usize {
        block::<Step>(self.steps.capacity())
    }

    /// Steps that a store has kept, oldest first; `None` if their sum is too large.
    pub(crate) fn from_parts(steps: Vec<Step>, last: Timestamp) -> Option<Self> {
        let total = exact_sum(steps.iter().map(|step| step.used))?;
        Some(Steps { steps: steps.into(), total, last })
    }

    /// The steps with usage, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = Step> + '_ {
        self.steps.iter().copied()
    }

    /// The time of the last charge.
    pub fn last(&self) -> Timestamp {
        self.last
    }

    /// The sum of all steps.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Restores at the front what [`age`](Kernel::age) removed there.
    pub(crate) fn restore(&mut self, ended: &[Step]) {
        for step in ended.iter().rev() {
            self.total += step.used;
            self.steps.push_front(*step);
        }
    }
}

impl Sliding {
    /// The steps that [`age`](Kernel::age) removes.
    pub(crate) fn ended(&self, state: &Steps, now: Timestamp) -> Vec<Step> {
        let now = max(now, self.newest(state));
        state.iter().take_while(|step| self.expiry(step.index) <= now).collect()
    }

    /// The newest time in a state: when its newest step began.
    pub(crate) fn newest(&self, state: &Steps) -> Timestamp {
        Timestamp::from_micros(state.steps.back().map_or(0, |step| step.index * self.step))
    }

    /// The first moment at which step `index` no longer counts.
    fn expiry(&self, index: u64) -> Timestamp {
        Timestamp::from_micros(index.saturating_mul(self.step)).plus(self.life())
    }

    /// How long a step counts, from its start.
    fn life(&self) -> u64 {
        if self.lenient {
            self.period.div_ceil(self.step) * self.step
        } else {
            self.step - 1 + self.period
        }
    }

    /// What was taken in steps later than that of `now`, and counted at the newest, counts as taken
    /// in that of `now`.
    pub(crate) fn rebase(&self, state: &mut Steps, now: Timestamp) -> Moved {
        let newest = self.age(state, now);
        let index = now.as_micros() / self.step;
        let mut used = 0;
        while let Some(later) = state.steps.pop_back_if(|step| step.index >= index) {
            used += later.used;
        }
        if used > 0 {
            state.steps.push_back(Step { index, used });
        }
        state.last = min(state.last, now);
        Moved::to(Timestamp::from_micros(index * self.step), newest, self.life())
    }

    /// Strict is exact. Lenient forgets the first step of a span while its last one is still to
    /// come.
    pub(crate) fn worst_case(&self) -> u64 {
        let forgiven = (self.period.div_ceil(self.step) - 1) * self.step + 2 <= self.period;
        if self.lenient && forgiven { 2 * self.amount } else { self.amount }
    }
}

impl Kernel for Sliding {
    type State = Steps;

    #[inline(always)]
    fn capacity(&self) -> u64 {
        self.amount
    }

    fn age(&self, state: &mut Steps, now: Timestamp) -> Timestamp {
        let now = max(now, self.newest(state));
        while let Some(oldest) = state.steps.front() {
            if now < self.expiry(oldest.index) {
                break;
            }
            state.total -= oldest.used;
            state.steps.pop_front();
        }
        now
    }

    fn room(&self, state: &Steps, _now: Timestamp, ceiling: u64) -> u64 {
        ceiling.saturating_sub(state.total)
    }

    fn charge(&self, state: &mut Steps, now: Timestamp, cost: u64, _id: Id) -> Timestamp {
        let index = now.as_micros() / self.step;
        let cost = cost.min(EXACT - 1 - state.total);
        state.total += cost;
        state.last = now;
        match state.steps.back_mut() {
            Some(newest) if newest.index == index => newest.used += cost,
            _ => state.steps.push_back(Step { index, used: cost }),
        }
        Timestamp::from_micros(index * self.step)
    }

    fn wait(&self, state: &Steps, now: Timestamp, cost: u64, ceiling: u64) -> u64 {
        let over = state.total.saturating_sub(ceiling - cost);
        if over == state.total {
            return self.idle_at(state).micros_since(now); // all of it must go: no need to count
        }
        until_ended(over, state.iter().map(|step| (step.used, self.expiry(step.index))), now)
    }

    fn give_back(
        &self,
        state: &mut Steps,
        _now: Timestamp,
        units: u64,
        charged_at: Option<Timestamp>,
    ) -> u64 {
        let charged_in = charged_at.map(|start| start.as_micros() / self.step);
        let charged = state
            .steps
            .iter_mut()
            .rev()
            .filter(|step| charged_in.is_none_or(|index| index == step.index));
        let back = take_back(units, charged.map(|step| &mut step.used));
        state.steps.retain(|step| step.used > 0);
        state.total -= back;
        back
    }

    fn idle_at(&self, state: &Steps) -> Timestamp {
        state.steps.back().map_or(Timestamp::EPOCH, |newest| self.expiry(newest.index))
    }
}
