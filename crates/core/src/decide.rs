//! The operations: what to do with what the algorithms measure. Written once, the same for every algorithm and store.
//!
//! ```
//! use tidegate_core::{Charge, Limit, Op, Record, Timestamp, decide};
//! let limit: Limit = "2/s".parse()?;
//! let mut record = Record::default();
//! let mut ask = |at_ms| decide(Op::Check, &mut [Charge::new(&limit, &mut record, 1)], Timestamp::from_millis(at_ms));
//! assert!(ask(0).allowed());
//! assert!(ask(0).allowed());
//! assert_eq!(ask(0).retry().micros(), Some(500_000));
//! assert!(ask(500).allowed());
//! # Ok::<(), tidegate_core::ParseError>(())
//! ```

use alloc::vec::Vec;
use core::slice;

use crate::Id;
use crate::algorithm::bucket::Level;
use crate::algorithm::concurrent::Leases;
use crate::algorithm::estimate::Pair;
use crate::algorithm::log::Entries;
use crate::algorithm::sliding::Steps;
use crate::algorithm::window::Count;
use crate::algorithm::{Algorithm, Bucket, Concurrent, Estimate, Kernel, Log, Sliding, Window};
use crate::decision::{Decision, Retry, Verdict};
use crate::limit::Limit;
use crate::state::{Ended, Receipt, Receipts, Record, State};
use crate::time::Timestamp;

/// What to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Op {
    /// Take every charge's cost if all of them fit; otherwise take nothing.
    Check,
    /// Say what `Check` would, and change nothing.
    Peek,
    /// Take as much of the cost as fits, the same from every charge; allowed if that is anything at all.
    Take,
    /// Take the cost even if it does not fit, down to the limit's debt below empty.
    Debit,
    /// Give back. With an id, what that charge still weighs and only once; without, the newest first, down to nothing used.
    Refund,
    /// Forget everything that was used.
    Reset,
    /// Replace a charge of `reserved` units, known by its id, with one of `cost`. What is missing is taken like a debit, as far as
    /// the debt reaches; what is too much is given back. Ends a lease.
    Settle,
    /// End the lease of this id; other limits are left alone.
    Release,
    /// Take the cost now for a moment in the future, at most so many microseconds away: allowed with the wait in `retry`.
    /// Only a single bucket can keep a place; anything else is a `Check`.
    Book {
        /// The longest acceptable wait.
        max_wait_us: u64,
    },
    /// Give a booked place back, if nobody has been placed behind it.
    Unbook {
        /// When the bucket would have been idle after the booking: its decision's time plus its `reset_after`.
        idle_at: Timestamp,
    },
}

impl Op {
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
/// No two charges of one call may share a record: whoever builds the call adds up equal pairs first.
#[derive(Debug)]
pub struct Charge<'a> {
    /// The limit.
    pub limit: &'a Limit,
    /// What the store holds.
    pub record: &'a mut Record,
    /// How much.
    pub cost: u64,
    /// For `Settle`: how much had been charged before.
    pub reserved: u64,
    /// Under which id, if it shall be possible to settle, refund or release it. A charge whose id is known is not taken twice.
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
/// On a denial, and always on a peek, the records are left as they were, except that limits which `count rejected` are
/// charged.
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
            let mut benches: Vec<Bench<'_, '_>> = charges.iter_mut().map(|charge| Bench::lay(charge, now)).collect();
            let mut meters: Vec<Meter<'_>> = benches.iter_mut().map(|bench| Meter::new(bench, now)).collect();
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

/// Does what the operation says to every meter, and tells whether it was allowed.
fn apply(op: Op, meters: &mut [Meter<'_>]) -> bool {
    match op {
        Op::Check | Op::Debit => {
            for meter in &mut *meters {
                meter.fits = meter.is_charged() || meter.cost <= meter.room(meter.ceiling(op)) || meter.cost == 0;
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
                meter.fits = meter.is_charged() || meter.cost <= meter.room(meter.ceiling(op)) || meter.cost == 0;
            }
            meters.iter().all(|meter| meter.fits)
        }
        Op::Take => {
            if meters.iter_mut().any(Meter::is_charged) {
                // Asked again under the same id: the answer is what it got.
                return each(meters, |meter| meter.granted = meter.receipt().map_or(0, |receipt| receipt.refundable));
            }
            let grant = meters.iter().map(|meter| meter.cost.min(meter.room(meter.ceiling(op)))).min().unwrap_or(0);
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

/// For the operations that cannot be denied.
fn each<'a>(meters: &mut [Meter<'a>], act: impl Fn(&mut Meter<'a>)) -> bool {
    for meter in meters {
        meter.fits = true;
        act(meter);
    }
    true
}

/// Decides the simplest and most frequent call, one charge without an id: the same as [`decide`] with [`Op::Check`], for
/// a store that keeps a state of exactly this algorithm at hand and has no time to lose. The rule on one screen.
///
/// `kept` is changed only if something was charged. Returns whether it was allowed, and the aged state with its moment, from
/// which [`report`] reads the numbers for whoever wants them.
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
    let capacity = limit.capacity();
    let mut state = *kept;
    let now = kernel.age(&mut state, now);
    let fits = cost == 0 || kernel.fits(&state, now, cost, capacity);
    if fits && cost > 0 {
        kernel.charge(&mut state, now, cost, Id::NONE);
        *kept = state;
    } else if !fits && limit.counts_rejected() && cost <= capacity {
        let units = cost.min(kernel.room(&state, now, capacity + limit.algorithm().amount()));
        if units > 0 {
            kernel.charge(&mut state, now, units, Id::NONE);
            *kept = state;
        }
    }
    (fits, state, now)
}

/// The numbers of what [`admit`] decided.
#[inline]
pub fn report<K>(limit: &Limit, kernel: &K, (fits, state, now): (bool, K::State, Timestamp), cost: u64) -> Verdict
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
        next_after_us: if remaining < capacity { kernel.wait(&state, now, remaining + 1, capacity) } else { 0 },
    }
}

/// Where the work on one charge is done: on the record itself if its state is large and in the limit's own scale,
/// otherwise on a copy that is put back only if something changed. So a denial leaves no trace, not even a rounded one,
/// and a clock that was ahead for a moment forgets nothing that still counts.
struct Bench<'c, 'a> {
    charge: &'c mut Charge<'a>,
    copy: Option<State>,
    /// What will be forgotten when the record itself is aged, to be put back if nothing changes.
    ended: Ended,
    foreign: bool,
    /// Whether nothing is in use any more: then the receipts are worth nothing either.
    idle: bool,
}

impl<'c, 'a> Bench<'c, 'a> {
    fn lay(charge: &'c mut Charge<'a>, now: Timestamp) -> Self {
        let algorithm = charge.limit.algorithm();
        let state = &charge.record.state;
        let foreign = !state.fits(algorithm);
        let copy = if foreign {
            Some(state.carry(algorithm, now))
        } else if state.is_small() {
            Some(state.clone())
        } else {
            None
        };
        let ended = if copy.is_none() { state.ended(algorithm, now) } else { Ended::Nothing };
        let idle = !charge.record.receipts.is_empty() && now >= state.idle_at();
        Bench { charge, copy, ended, foreign, idle }
    }

    /// Ends the work: what was changed is kept, otherwise the record is as it was.
    fn clear(self, changed: bool) {
        match self.copy {
            Some(state) if changed => self.charge.record.state = state,
            None if !changed => self.charge.record.state.restore(self.ended),
            _ => {}
        }
    }
}

/// One charge at work: a limit, and the state of its key aged to the moment of the decision.
struct Meter<'a> {
    limit: &'a Limit,
    gauge: Gauge<'a>,
    receipts: &'a mut Receipts,
    /// Whether the state was written in another scale, and its receipts with it.
    foreign: bool,
    /// Whether nothing was in use, and the receipts are worth nothing.
    idle: bool,
    now: Timestamp,
    cost: u64,
    reserved: u64,
    id: Option<Id>,
    fits: bool,
    granted: u64,
    /// For a booking: how long until its turn.
    booked_us: u64,
    /// Whether something was taken or given back.
    changed: bool,
}

/// An algorithm with a state in its own scale.
enum Gauge<'a> {
    Bucket(&'a Bucket, &'a mut Level),
    Window(&'a Window, &'a mut Count),
    Sliding(&'a Sliding, &'a mut Steps),
    Estimate(&'a Estimate, &'a mut Pair),
    Log(&'a Log, &'a mut Entries),
    Concurrent(&'a Concurrent, &'a mut Leases),
}

macro_rules! gauge {
    ($gauge:expr, $kernel:ident, $state:ident => $answer:expr) => {
        match $gauge {
            Gauge::Bucket($kernel, $state) => $answer,
            Gauge::Window($kernel, $state) => $answer,
            Gauge::Sliding($kernel, $state) => $answer,
            Gauge::Estimate($kernel, $state) => $answer,
            Gauge::Log($kernel, $state) => $answer,
            Gauge::Concurrent($kernel, $state) => $answer,
        }
    };
}

impl<'a> Meter<'a> {
    fn new(bench: &'a mut Bench<'_, '_>, now: Timestamp) -> Self {
        let Bench { charge, copy, foreign, idle, .. } = bench;
        let limit = charge.limit;
        let Record { state, receipts } = &mut *charge.record;
        let mut gauge = match (limit.algorithm(), copy.as_mut().unwrap_or(state)) {
            (Algorithm::Bucket(kernel), State::Bucket { level, .. }) => Gauge::Bucket(kernel, level),
            (Algorithm::Window(kernel), State::Window { count, .. }) => Gauge::Window(kernel, count),
            (Algorithm::Sliding(kernel), State::Sliding { steps, .. }) => Gauge::Sliding(kernel, steps),
            (Algorithm::Estimate(kernel), State::Estimate { pair, .. }) => Gauge::Estimate(kernel, pair),
            (Algorithm::Log(kernel), State::Log { entries, .. }) => Gauge::Log(kernel, entries),
            (Algorithm::Concurrent(kernel), State::Concurrent { leases }) => Gauge::Concurrent(kernel, leases),
            _ => unreachable!("`carry` made the state fit the algorithm"),
        };
        let now = gauge!(&mut gauge, kernel, state => kernel.age(state, now));
        let (cost, reserved) = (charge.cost, charge.reserved);
        // Leases that nobody named are kept under this id, so it cannot name one.
        let id = charge.id.filter(|id| *id != Id::NONE);
        let (foreign, idle) = (*foreign, *idle);
        Meter {
            limit,
            gauge,
            receipts,
            foreign,
            idle,
            now,
            cost,
            reserved,
            id,
            fits: false,
            granted: 0,
            booked_us: 0,
            changed: false,
        }
    }

    /// From here on the state differs from the one that was kept.
    fn change(&mut self) {
        self.changed = true;
        if core::mem::take(&mut self.idle) {
            *self.receipts = Receipts::default();
        }
        if core::mem::take(&mut self.foreign) {
            self.receipts.forfeit();
        }
    }

    /// The receipt of this charge, if it was taken before and is not forgotten.
    fn receipt(&mut self) -> Option<&mut Receipt> {
        if self.idle { None } else { self.id.and_then(|id| self.receipts.find(id)) }
    }

    /// How much may be used: the capacity, and for a debit the debt below it.
    fn ceiling(&self, op: Op) -> u64 {
        match op {
            Op::Debit | Op::Settle => self.limit.capacity() + self.limit.debt(),
            _ => self.limit.capacity(),
        }
    }

    fn room(&self, ceiling: u64) -> u64 {
        gauge!(&self.gauge, kernel, state => kernel.room(state, self.now, ceiling))
    }

    fn retry(&self, cost: u64, ceiling: u64) -> Retry {
        if cost > ceiling {
            return Retry::Never;
        }
        match gauge!(&self.gauge, kernel, state => kernel.wait(state, self.now, cost, ceiling)) {
            0 => Retry::Now,
            micros => Retry::After(micros),
        }
    }

    /// Whether this very charge was taken before.
    fn is_charged(&mut self) -> bool {
        match (self.id, &self.gauge) {
            (Some(id), Gauge::Concurrent(_, leases)) => leases.holds(id),
            _ => self.receipt().is_some(),
        }
    }

    fn charge(&mut self, units: u64) {
        self.granted = units;
        if units == 0 || self.is_charged() {
            return;
        }
        let id = self.id.unwrap_or(Id::NONE);
        self.change();
        let charged_at = gauge!(&mut self.gauge, kernel, state => kernel.charge(state, self.now, units, id));
        if let (Some(id), false) = (self.id, matches!(self.gauge, Gauge::Concurrent(..))) {
            self.receipts.keep(Receipt { id, refundable: units, charged_at, settled: false });
        }
    }

    /// Charges what was denied: nothing that could never pass, and at most one amount beyond the capacity.
    fn charge_rejected(&mut self) {
        if self.cost <= self.limit.capacity() {
            let units = self.cost.min(self.room(self.limit.capacity() + self.limit.algorithm().amount()));
            if units > 0 {
                self.change();
                gauge!(&mut self.gauge, kernel, state => kernel.charge(state, self.now, units, Id::NONE));
            }
        }
    }

    fn give_back(&mut self, units: u64, charged_at: Option<Timestamp>) -> u64 {
        let back = gauge!(&mut self.gauge, kernel, state => kernel.give_back(state, self.now, units, charged_at));
        if back > 0 {
            self.change();
        }
        back
    }

    fn refund(&mut self) {
        let Some(id) = self.id else {
            self.granted = self.give_back(self.cost, None);
            return;
        };
        if let Gauge::Concurrent(..) = self.gauge {
            return self.release();
        }
        let (foreign, cost) = (self.foreign, self.cost);
        let Some(receipt) = self.receipt().filter(|_| !foreign) else { return };
        let units = cost.min(receipt.refundable);
        receipt.refundable -= units;
        let (charged_at, all) = (receipt.charged_at, receipt.refundable == 0 && !receipt.settled);
        self.granted = self.give_back(units, Some(charged_at));
        if all && units > 0 {
            self.receipts.forget(id);
        }
    }

    fn reset(&mut self) {
        self.change();
        gauge!(&mut self.gauge, kernel, state => {
            **state = Default::default();
            kernel.age(state, self.now)
        });
        *self.receipts = Receipts::default();
    }

    fn release(&mut self) {
        if let (Gauge::Concurrent(_, leases), Some(id)) = (&mut self.gauge, self.id) {
            self.granted = leases.release(id);
            if self.granted > 0 {
                self.change();
            }
        }
    }

    /// Makes up the difference between what was reserved and what it came to; says whether it could in full.
    fn settle(&mut self) -> bool {
        if let Gauge::Concurrent(..) = self.gauge {
            self.release();
            return true;
        }
        let receipt = self.receipt();
        if receipt.as_ref().is_some_and(|receipt| receipt.settled) {
            return true;
        }
        let (refundable, charged_at) = match receipt {
            Some(receipt) => {
                receipt.settled = true;
                (core::mem::take(&mut receipt.refundable), receipt.charged_at)
            }
            // Forgotten: too long ago, or too many since. Nothing is given back, but what is missing is still taken.
            None => (0, self.now),
        };
        if self.cost <= self.reserved {
            let units = if self.foreign { 0 } else { (self.reserved - self.cost).min(refundable) };
            self.granted = self.give_back(units, Some(charged_at));
            return true;
        }
        let missing = self.cost - self.reserved;
        let units = missing.min(self.room(self.ceiling(Op::Settle)));
        if units > 0 {
            self.change();
            gauge!(&mut self.gauge, kernel, state => kernel.charge(state, self.now, units, Id::NONE));
        }
        self.granted = units;
        units == missing
    }

    fn book(&mut self, max_wait_us: u64) -> bool {
        let Gauge::Bucket(bucket, level) = &mut self.gauge else { return false };
        if self.cost > bucket.capacity {
            return false;
        }
        let booked = if self.cost == 0 { Some(0) } else { bucket.book(level, self.now, self.cost, max_wait_us) };
        let Some(wait) = booked else { return false };
        if self.cost > 0 {
            self.change();
        }
        self.booked_us = wait;
        self.granted = self.cost;
        self.fits = true;
        true
    }

    fn unbook(&mut self, idle_at: Timestamp) {
        if let Gauge::Bucket(bucket, level) = &mut self.gauge
            && bucket.idle_at(level) == idle_at
        {
            self.granted = bucket.give_back(level, self.now, self.cost, None);
            if self.granted > 0 {
                self.change();
            }
        }
    }

    /// The numbers, read from the state that is kept.
    fn verdict(&self, op: Op, allowed: bool) -> Verdict {
        let capacity = self.limit.capacity();
        let remaining = self.room(capacity);
        let retry = match op {
            _ if allowed && self.booked_us > 0 => Retry::After(self.booked_us),
            _ if allowed => Retry::Now,
            Op::Take => self.retry(1, capacity),
            Op::Settle => self.retry(self.cost.saturating_sub(self.reserved).max(1), self.ceiling(op)),
            _ if self.cost == 0 => Retry::Now,
            _ => self.retry(self.cost, self.ceiling(op)),
        };
        let until = |cost| self.retry(cost, capacity).micros().unwrap_or(0);
        Verdict {
            allowed: self.fits,
            granted: if allowed || op == Op::Settle { self.granted } else { 0 },
            amount: capacity,
            remaining,
            retry,
            reset_after_us: until(capacity),
            next_after_us: if remaining < capacity { until(remaining + 1) } else { 0 },
        }
    }
}
