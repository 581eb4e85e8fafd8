//! A state that is ahead of the clock of its store: the clock has gone back, or another host with
//! an earlier clock has taken over.
//!
//! Times that callers bring never go back: an earlier one counts as the newest time in the state.
//! The same holds for a store's own clock that goes back by at most [`CLOCK_TOLERANCE_US`]. After a
//! larger step a state would stand still until the clock has caught up, so it is *rebased*: its
//! usage in units stays, and its times that are later than now become now. Then usage drains from
//! now on; nothing is admitted that real time does not allow, and nothing is denied for longer than
//! the step was, or than the limit takes to drain.
//!
//! ```
//! use tidegate_core::{Charge, Limit, Op, Record, Timestamp, decide_on_store_clock};
//! let limit: Limit = "2/s".parse()?;
//! let mut record = Record::default();
//! let mut check = |at_ms| {
//!     decide_on_store_clock(Op::Check, &mut [Charge::new(&limit, &mut record, 2)], Timestamp::from_millis(at_ms))
//! };
//! assert!(check(3_600_000).0.allowed());
//! // The clock goes back by an hour. The bucket is full, and drains from now on.
//! let (decision, rebased) = check(0);
//! assert_eq!((decision.retry().micros(), rebased), (Some(1_000_000), 1));
//! assert!(check(1_000).0.allowed());
//! # Ok::<(), tidegate_core::ParseError>(())
//! ```

use alloc::vec::Vec;
use core::cmp::max;

use crate::algorithm::{Algorithm, Estimate, Log, Moved, Sliding, Window};
use crate::decide::{Charge, Op, decide};
use crate::decision::Decision;
use crate::state::{Receipts, Record, State};
use crate::time::{CLOCK_TOLERANCE_US, Timestamp};

/// Decides one call as [`decide`] does, at a time that the store's own clock says. Returns with the
/// decision how many records were rebased.
///
/// Every call sees rebased states. A peek, and a check, take, debit or booking of nothing, leaves
/// the records as they were; every other call keeps what it rebased, also if it is denied:
/// otherwise usage would not drain from one denial to the next.
pub fn decide_on_store_clock(
    op: Op,
    charges: &mut [Charge<'_>],
    now: Timestamp,
) -> (Decision, usize) {
    let rebase = |charge: &mut Charge<'_>| {
        let is_ahead = charge.record.is_ahead_of(Some(charge.limit.algorithm()), now);
        let before = is_ahead.then(|| charge.record.clone());
        if is_ahead {
            charge.record.rebase(now);
        }
        before
    };
    let before: Vec<Option<Record>> = charges.iter_mut().map(rebase).collect();
    let decision = decide(op, charges, now);
    let mut rebased = 0;
    for (charge, before) in charges.iter_mut().zip(before) {
        let Some(before) = before else { continue };
        if op.keeps_rebased(charge.cost) {
            rebased += 1;
        } else {
            *charge.record = before;
        }
    }
    (decision, rebased)
}

impl Op {
    /// Whether a call of this cost keeps the states that it found ahead of the clock as rebased.
    fn keeps_rebased(self, cost: u64) -> bool {
        match self {
            Op::Peek => false,
            Op::Check | Op::Take | Op::Debit | Op::Book { .. } => cost > 0,
            Op::Refund | Op::Reset | Op::Settle | Op::Release | Op::Unbook { .. } => true,
        }
    }
}

impl Record {
    /// Whether `now` is so far behind this record that a store rebases it before a limit of this
    /// algorithm decides, or before any does.
    pub fn is_ahead_of(&self, algorithm: Option<&Algorithm>, now: Timestamp) -> bool {
        let newest = match algorithm {
            Some(own) if self.state.fits(own) => self.state.newest(),
            // Another scale takes usage over at the moment something was last taken.
            _ => max(self.state.newest(), self.state.last_taken()),
        };
        // A state in which nothing is in use has no time that matters.
        newest > now.plus(CLOCK_TOLERANCE_US) && self.state.idle_at() > now
    }

    /// Moves every time that is later than `now` to `now`. Usage in units stays, and so does what
    /// can be given back by an id, except of charges that had ended at the newest time.
    pub fn rebase(&mut self, now: Timestamp) {
        let moved = self.state.rebase(now);
        self.receipts.rebase(&moved);
    }
}

impl State {
    /// The newest time in it: the earliest moment at which it can be decided on, if anything is in use.
    fn newest(&self) -> Timestamp {
        match self {
            State::Bucket { level, .. } if level.is_countable() => level.at,
            State::Idle | State::Bucket { .. } => Timestamp::EPOCH,
            State::Window { count, .. } => count.start,
            State::Sliding { period, step, lenient, steps } => {
                sliding(*period, *step, *lenient).newest(steps)
            }
            State::Estimate { pair, .. } => pair.start,
            State::Log { entries, .. } => {
                entries.iter().next_back().map_or(Timestamp::EPOCH, |entry| entry.at)
            }
            State::Concurrent { leases } => leases.newest(),
        }
    }

    /// When something was last taken, where that is not the newest time.
    fn last_taken(&self) -> Timestamp {
        match self {
            State::Window { count, .. } => count.last,
            State::Sliding { steps, .. } => steps.last(),
            State::Estimate { pair, .. } => pair.last,
            _ => Timestamp::EPOCH,
        }
    }

    fn rebase(&mut self, now: Timestamp) -> Moved {
        match self {
            State::Idle => Moved::NOTHING,
            State::Bucket { level, .. } => level.rebase(now),
            State::Window { period, from_first_hit, count } => {
                Window { amount: 1, period: *period, from_first_hit: *from_first_hit }
                    .rebase(count, now)
            }
            State::Sliding { period, step, lenient, steps } => {
                sliding(*period, *step, *lenient).rebase(steps, now)
            }
            State::Estimate { period, pair } => Estimate::rebase(pair, *period, now),
            State::Log { period, entries } => {
                Log { amount: 1, period: *period }.rebase(entries, now)
            }
            State::Concurrent { leases } => {
                leases.rebase(now);
                Moved::NOTHING
            }
        }
    }
}

fn sliding(period: u64, step: u64, lenient: bool) -> Sliding {
    Sliding { amount: 1, period, step, lenient }
}

impl Receipts {
    fn rebase(&mut self, moved: &Moved) {
        for receipt in self.iter_mut() {
            match moved.apply(receipt.charged_at) {
                Some(charged_at) => receipt.charged_at = charged_at,
                None => receipt.refundable = 0,
            }
        }
    }
}
