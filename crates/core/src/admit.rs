//! The fast path of the rule: one charge without an id, on a state in memory.

use crate::Id;
use crate::algorithm::Kernel;
use crate::decision::{Retry, Verdict};
use crate::limit::Limit;
use crate::time::Timestamp;

/// Decides one charge without an id, the most frequent call: equal to [`decide`](crate::decide())
/// with [`Op::Check`](crate::Op::Check), for a store that holds the state of the algorithm itself.
///
/// `kept` changes only if something is charged. Returns whether it is allowed, and the aged state
/// with its time, from which [`report`] computes the numbers.
#[inline(always)]
pub fn admit<K>(
    limit: &Limit,
    kernel: &K,
    kept: &mut K::State,
    now: Timestamp,
    cost: u64,
) -> (bool, K::State, Timestamp)
where
    K: Kernel<State: Copy>,
{
    let mut state = *kept;
    let now = kernel.age(&mut state, now);
    let fits = cost == 0 || kernel.charge_if_it_fits(&mut state, now, cost);
    if fits && cost > 0 {
        *kept = state;
    } else if !fits && limit.counts_rejected() && cost <= kernel.capacity() {
        let units =
            cost.min(kernel.room(&state, now, kernel.capacity() + limit.algorithm().amount()));
        if units > 0 {
            kernel.charge(&mut state, now, units, Id::NONE);
            *kept = state;
        }
    }
    (fits, state, now)
}

/// The verdict on what [`admit`] decided.
#[inline]
pub fn report<K>(
    limit: &Limit,
    kernel: &K,
    (fits, state, now): (bool, K::State, Timestamp),
    cost: u64,
) -> Verdict
where
    K: Kernel<State: Copy>,
{
    let capacity = limit.capacity();
    let retry = match fits {
        true => Retry::Now,
        false if cost > capacity => Retry::Never,
        false => Retry::After(kernel.wait(&state, now, cost, capacity)),
    };
    let remaining = kernel.room(&state, now, capacity);
    Verdict {
        allowed: fits,
        granted: if fits { cost } else { 0 },
        amount: capacity,
        remaining,
        retry,
        reset_after_us: kernel.wait(&state, now, capacity, capacity),
        next_after_us: if remaining < capacity {
            kernel.wait(&state, now, remaining + 1, capacity)
        } else {
            0
        },
    }
}
