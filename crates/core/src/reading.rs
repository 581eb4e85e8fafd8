//! The numbers of a verdict, computed from the usage after the decision.
//!
//! A store that decides in a script or in another process applies the operation there and returns a
//! [`Reading`]. The numbers are computed here, as for every other store.

use crate::algorithm::{Algorithm, Kernel};
use crate::decide::Op;
use crate::decision::{Retry, Verdict};
use crate::limit::Limit;
use crate::state::State;
use crate::time::Timestamp;

/// What a call wanted of one limit, and what was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Done {
    /// The operation.
    pub op: Op,
    /// The cost of the charge.
    pub cost: u64,
    /// The units that were reserved before, for [`Op::Settle`].
    pub reserved: u64,
    /// Whether this limit would allow the call by itself.
    pub fits: bool,
    /// The units that were charged or given back.
    pub granted: u64,
    /// The wait of a booking, in microseconds.
    pub booked_us: u64,
}

/// The usage under one limit after a decision.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reading {
    /// The full state, in the scale of the limit; a state in another scale counts as idle.
    State(State),
    /// The numbers of a state that is too large to transfer.
    Counted {
        /// The units in use.
        used: u64,
        /// Microseconds until the same call would be allowed.
        retry_us: u64,
        /// Microseconds until one more unit is available.
        next_us: u64,
        /// Microseconds until no unit is in use.
        reset_us: u64,
    },
}

impl Reading {
    /// The verdict of `limit`, equal to that of [`decide`](crate::decide()) for the same call.
    ///
    /// `allowed` is the answer to the call over all its limits, `now` the time of the decision.
    pub fn verdict(&self, limit: &Limit, done: &Done, allowed: bool, now: Timestamp) -> Verdict {
        match (limit.algorithm(), self) {
            (Algorithm::Bucket(k), Reading::State(State::Bucket { level, .. })) => {
                of(limit, done, allowed, k, level, now)
            }
            (Algorithm::Window(k), Reading::State(State::Window { count, .. })) => {
                of(limit, done, allowed, k, count, now)
            }
            (Algorithm::Estimate(k), Reading::State(State::Estimate { pair, .. })) => {
                of(limit, done, allowed, k, pair, now)
            }
            (Algorithm::Sliding(k), Reading::State(State::Sliding { steps, .. })) => {
                of(limit, done, allowed, k, steps, now)
            }
            (Algorithm::Log(k), Reading::State(State::Log { entries, .. })) => {
                of(limit, done, allowed, k, entries, now)
            }
            (Algorithm::Concurrent(k), Reading::State(State::Concurrent { leases })) => {
                of(limit, done, allowed, k, leases, now)
            }
            (_, Reading::State(_)) => verdict(limit, done, allowed, |ceiling| ceiling, |_, _| 0),
            (_, &Reading::Counted { used, retry_us, next_us, reset_us }) => {
                let capacity = limit.capacity();
                let remaining = capacity.saturating_sub(used);
                // A wait depends on cost and ceiling only.
                let wait = |cost, ceiling| match (cost, ceiling) {
                    same if same == (capacity, capacity) => reset_us,
                    same if same == (remaining + 1, capacity) => next_us,
                    _ => retry_us,
                };
                verdict(limit, done, allowed, |ceiling| ceiling.saturating_sub(used), wait)
            }
        }
    }
}

/// Ages a kept state to `now` and reads it.
fn of<K: Kernel>(
    limit: &Limit,
    done: &Done,
    allowed: bool,
    kernel: &K,
    state: &K::State,
    now: Timestamp,
) -> Verdict {
    let mut state = state.clone();
    let now = kernel.age(&mut state, now);
    let room = |ceiling| kernel.room(&state, now, ceiling);
    verdict(limit, done, allowed, room, |cost, ceiling| kernel.wait(&state, now, cost, ceiling))
}

/// The verdict, from the units that fit below a ceiling and the wait until a cost fits below one.
pub(crate) fn verdict(
    limit: &Limit,
    done: &Done,
    allowed: bool,
    room: impl Fn(u64) -> u64,
    wait: impl Fn(u64, u64) -> u64,
) -> Verdict {
    let capacity = limit.capacity();
    let remaining = room(capacity);
    let until = |cost: u64, ceiling: u64| match (cost > ceiling, cost) {
        (true, _) => Retry::Never,
        (false, cost) => match wait(cost, ceiling) {
            0 => Retry::Now,
            micros => Retry::After(micros),
        },
    };
    let retry = match done.op {
        _ if allowed && done.booked_us > 0 => Retry::After(done.booked_us),
        _ if allowed => Retry::Now,
        Op::Take => until(1, capacity),
        op @ Op::Settle => until(done.cost.saturating_sub(done.reserved).max(1), limit.ceiling(op)),
        _ if done.cost == 0 => Retry::Now,
        op => until(done.cost, limit.ceiling(op)),
    };
    let wait_us = |cost| until(cost, capacity).micros().unwrap_or(0);
    Verdict {
        allowed: done.fits,
        granted: if allowed || done.op == Op::Settle { done.granted } else { 0 },
        amount: capacity,
        remaining,
        retry,
        reset_after_us: wait_us(capacity),
        next_after_us: if remaining < capacity { wait_us(remaining + 1) } else { 0 },
    }
}
