//! The shortest list of faults that still fails: parts of the list are left out, and it is run
//! again.

use crate::Failure;
use crate::plan::Plan;
use crate::redis::Redis;
use crate::sabotage::Sabotage;
use crate::world::run;

/// The most runs that are made.
const MOST_RUNS: usize = 400;

/// A plan with as few faults as were found to break the same law.
pub fn shrink(
    plan: &Plan,
    failure: &Failure,
    redis: &mut Redis,
    sabotage: Option<Sabotage>,
) -> Plan {
    let mut best = plan.clone();
    let mut runs = 0;
    let mut part = best.faults.len().div_ceil(2);
    while part > 0 && !best.faults.is_empty() && runs < MOST_RUNS {
        let mut from = 0;
        while from < best.faults.len() && runs < MOST_RUNS {
            let mut shorter = best.clone();
            let end = (from + part).min(shorter.faults.len());
            shorter.faults.drain(from..end);
            runs += 1;
            if run(&shorter, redis, sabotage, false)
                .failure
                .is_some_and(|other| other.law == failure.law)
            {
                best = shorter;
            } else {
                from += part;
            }
        }
        part = if part == 1 { 0 } else { part.div_ceil(2) };
    }
    best
}
