//! The rule once more, for one charge without an id and a state that is at hand: what a store in a
//! hurry calls.

use crate::Id;
use crate::algorithm::Kernel;
use crate::decision::{Retry, Verdict};
use crate::limit::Limit;
use crate::time::Timestamp;

/// Decides the simplest and most frequent call, one charge without an id: the same as
/// [`decide`](crate::decide()) with [`Op::Check`](crate::Op::Check), for a store that keeps a state
/// of exactly this algorithm at hand and has no time to lose. The rule on one screen.
///
/// `kept` is changed only if something was charged. Returns whether it was allowed, and the aged
/// state with its moment, from which [`report`] reads the numbers for whoever wants them.
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

/// The numbers of what [`admit`] decided.
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
