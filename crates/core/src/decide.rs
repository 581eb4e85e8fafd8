//! The operations, written once for every algorithm and store.
//!
//! ```
//! use tidegate_core::{Charge, Limit, Op, Record, Timestamp, decide};
//! let limit: Limit = "2/s".parse()?;
//! let mut record = Record::default();
//! let mut check = |at_ms| decide(Op::Check, &mut [Charge::new(&limit, &mut record, 1)], Timestamp::from_millis(at_ms));
//! assert!(check(0).allowed());
//! assert!(check(0).allowed());
//! assert_eq!(check(0).retry().micros(), Some(500_000));
//! assert!(check(500).allowed());
//! # Ok::<(), tidegate_core::ParseError>(())
//! ```

use alloc::vec::Vec;
use core::slice;

use crate::Id;
use crate::decision::Decision;
use crate::limit::Limit;
use crate::meter::{Bench, Gauge, Meter};
use crate::state::Record;
use crate::time::Timestamp;

/// An operation on the charges of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Op {
    /// Charge the cost of every charge if all of them fit; otherwise charge nothing.
    Check,
    /// Return what `Check` would return, and change nothing.
    Peek,
    /// Charge as much of the cost as fits, the same for every charge; allowed if that is at least one
    /// unit.
    Take,
    /// Charge the cost even if it does not fit, down to the limit's debt below empty.
    Debit,
    /// Give units back. With an id: what is left of that charge, once. Without: the newest usage
    /// first, at most all of it.
    Refund,
    /// Remove all usage.
    Reset,
    /// Replace the charge of `reserved` units with this id by a charge of `cost`. Missing units are
    /// charged like a debit, as far as the debt reaches; excess units are given back. Ends a lease.
    Settle,
    /// End the lease of this id; limits without leases are unchanged.
    Release,
    /// Charge the cost now for a time in the future: allowed with the wait in `retry`. Only a single
    /// bucket can book; for other charges it is a `Check`.
    Book {
        /// The longest acceptable wait, in microseconds.
        max_wait_us: u64,
    },
    /// Cancel a booking, unless there is a later one.
    Unbook {
        /// When the bucket would have been idle after the booking: its decision's time plus its
        /// `reset_after`.
        idle_at: Timestamp,
    },
}

impl Op {
    /// The operations that need neither an id nor a parameter: those of traces and the command line.
    pub const PLAIN: [Op; 6] = [Op::Check, Op::Peek, Op::Take, Op::Debit, Op::Refund, Op::Reset];

    /// The [plain](Op::PLAIN) operation with this name, in upper or lower case.
    ///
    /// ```
    /// use tidegate_core::Op;
    /// assert_eq!(Op::from_name("Peek"), Some(Op::Peek));
    /// assert_eq!(Op::from_name("settle"), None);
    /// ```
    pub fn from_name(name: &str) -> Option<Op> {
        Op::PLAIN.into_iter().find(|op| op.name().eq_ignore_ascii_case(name))
    }

    /// The word used in traces, JSON and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Check => "check",
            Op::Peek => "peek",
            Op::Take => "take",
            Op::Debit => "debit",
            Op::Refund => "refund",
            Op::Reset => "reset",
            Op::Settle => "settle",
            Op::Release => "release",
            Op::Book { .. } => "book",
            Op::Unbook { .. } => "unbook",
        }
    }
}

/// One limit on one key, with the record a store holds for them.
///
/// No two charges of one call may share a record: the caller adds up equal pairs first.
#[derive(Debug)]
pub struct Charge<'a> {
    /// The limit.
    pub limit: &'a Limit,
    /// The record of the key under this limit.
    pub record: &'a mut Record,
    /// The units to charge, read or give back.
    pub cost: u64,
    /// The units that were reserved before, for [`Op::Settle`].
    pub reserved: u64,
    /// The id by which it can be settled, refunded or released. A charge with a known id is not made
    /// twice.
    pub id: Option<Id>,
}

impl<'a> Charge<'a> {
    /// A charge without an id.
    pub fn new(limit: &'a Limit, record: &'a mut Record, cost: u64) -> Self {
        Charge { limit, record, cost, reserved: 0, id: None }
    }
}

/// Decides one call: all charges together, all or nothing.
///
/// On a denial, and always on a peek, the records are left as they were, except that limits which
/// `count rejected` are charged.
pub fn decide(op: Op, charges: &mut [Charge<'_>], now: Timestamp) -> Decision {
    match charges {
        [charge] => {
            let id = charge.id;
            let mut bench = Bench::lay(charge, now);
            let mut meter = Meter::new(&mut bench, now);
            let allowed = apply(op, slice::from_mut(&mut meter));
            let verdict = meter.verdict(op, allowed);
            let changed = meter.changed;
            bench.clear(changed);
            Decision::of_one(verdict, allowed, now).with_id(id)
        }
        charges => {
            let id = charges.first().and_then(|charge| charge.id);
            let mut benches: Vec<Bench<'_, '_>> =
                charges.iter_mut().map(|charge| Bench::lay(charge, now)).collect();
            let mut meters: Vec<Meter<'_>> =
                benches.iter_mut().map(|bench| Meter::new(bench, now)).collect();
            let allowed = apply(op, &mut meters);
            let verdicts = meters.iter().map(|meter| meter.verdict(op, allowed)).collect();
            let changed: Vec<bool> = meters.iter().map(|meter| meter.changed).collect();
            for (bench, changed) in benches.into_iter().zip(changed) {
                bench.clear(changed);
            }
            Decision::of_many(verdicts, allowed, now).with_id(id)
        }
    }
}

/// Applies the operation to every meter and returns whether it was allowed.
fn apply(op: Op, meters: &mut [Meter<'_>]) -> bool {
    match op {
        Op::Check | Op::Debit => {
            for meter in &mut *meters {
                meter.fits = meter.is_charged()
                    || meter.cost <= meter.room(meter.ceiling(op))
                    || meter.cost == 0;
            }
            let allowed = meters.iter().all(|meter| meter.fits);
            for meter in meters {
                if allowed {
                    meter.charge(meter.cost);
                } else if meter.limit.counts_rejected() && op == Op::Check {
                    meter.charge_rejected();
                }
            }
            allowed
        }
        Op::Peek => {
            for meter in &mut *meters {
                meter.fits = meter.is_charged()
                    || meter.cost <= meter.room(meter.ceiling(op))
                    || meter.cost == 0;
            }
            meters.iter().all(|meter| meter.fits)
        }
        Op::Take => {
            if meters.iter_mut().any(Meter::is_charged) {
                // A retry with the same id gets the same units.
                return each(meters, |meter| meter.granted = meter.charged_units());
            }
            let grant = meters
                .iter()
                .map(|meter| meter.cost.min(meter.room(meter.ceiling(op))))
                .min()
                .unwrap_or(0);
            for meter in &mut *meters {
                meter.fits = meter.cost == 0 || meter.room(meter.ceiling(op)) > 0;
                meter.charge(grant);
            }
            meters.iter().all(|meter| meter.fits)
        }
        Op::Refund => each(meters, Meter::refund),
        Op::Reset => each(meters, Meter::reset),
        Op::Settle => {
            for meter in &mut *meters {
                meter.fits = meter.settle();
            }
            meters.iter().all(|meter| meter.fits)
        }
        Op::Release => each(meters, Meter::release),
        Op::Book { max_wait_us } => match meters {
            [meter] if matches!(meter.gauge, Gauge::Bucket(..)) => meter.book(max_wait_us),
            meters => apply(Op::Check, meters),
        },
        Op::Unbook { idle_at } => each(meters, |meter| meter.unbook(idle_at)),
    }
}

/// Applies an operation that cannot be denied.
fn each<'a>(meters: &mut [Meter<'a>], act: impl Fn(&mut Meter<'a>)) -> bool {
    for meter in meters {
        meter.fits = true;
        act(meter);
    }
    true
}
