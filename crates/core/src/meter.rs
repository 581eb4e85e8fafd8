//! One charge while it is decided: a limit, the aged state of its key, and the operations on it.

use crate::Id;
use crate::algorithm::bucket::Level;
use crate::algorithm::concurrent::Leases;
use crate::algorithm::estimate::Pair;
use crate::algorithm::log::Entries;
use crate::algorithm::sliding::Steps;
use crate::algorithm::window::Count;
use crate::algorithm::{Algorithm, Bucket, Concurrent, Estimate, Kernel, Log, Sliding, Window};
use crate::decide::{Charge, Op};
use crate::decision::Verdict;
use crate::limit::Limit;
use crate::reading::{self, Done};
use crate::state::{Ended, Receipt, Receipts, Record, State};
use crate::time::Timestamp;

/// The state that a charge is decided on: the record itself if its state is large and in the
/// limit's own scale, otherwise a copy that is stored only if something changed. So a denial leaves
/// no trace, not even a rounded one, and a clock that was briefly ahead removes nothing that still
/// counts.
pub(crate) struct Bench<'c, 'a> {
    charge: &'c mut Charge<'a>,
    copy: Option<State>,
    /// What ageing the record removes, to be restored if nothing changes.
    ended: Ended,
    foreign: bool,
    /// Whether nothing is in use any more, so that the receipts are void.
    idle: bool,
}

impl<'c, 'a> Bench<'c, 'a> {
    pub(crate) fn lay(charge: &'c mut Charge<'a>, now: Timestamp) -> Self {
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

    /// Stores what was changed; otherwise the record is as it was.
    pub(crate) fn clear(self, changed: bool) {
        match self.copy {
            Some(state) if changed => self.charge.record.state = state,
            None if !changed => self.charge.record.state.restore(self.ended),
            _ => {}
        }
    }
}

/// One charge while it is decided: a limit, and the state of its key aged to the time of the
/// decision.
pub(crate) struct Meter<'a> {
    pub(crate) limit: &'a Limit,
    pub(crate) gauge: Gauge<'a>,
    receipts: &'a mut Receipts,
    /// Whether the state was written in another scale, and its receipts with it.
    foreign: bool,
    /// Whether nothing was in use, so that the receipts are void.
    idle: bool,
    now: Timestamp,
    pub(crate) cost: u64,
    reserved: u64,
    id: Option<Id>,
    pub(crate) fits: bool,
    pub(crate) granted: u64,
    /// The wait of a booking, in microseconds.
    booked_us: u64,
    /// Whether something was charged or given back.
    pub(crate) changed: bool,
}

/// An algorithm with a state in its own scale.
pub(crate) enum Gauge<'a> {
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
    pub(crate) fn new(bench: &'a mut Bench<'_, '_>, now: Timestamp) -> Self {
        let Bench { charge, copy, foreign, idle, .. } = bench;
        let limit = charge.limit;
        let Record { state, receipts } = &mut *charge.record;
        let mut gauge = match (limit.algorithm(), copy.as_mut().unwrap_or(state)) {
            (Algorithm::Bucket(kernel), State::Bucket { level, .. }) => {
                Gauge::Bucket(kernel, level)
            }
            (Algorithm::Window(kernel), State::Window { count, .. }) => {
                Gauge::Window(kernel, count)
            }
            (Algorithm::Sliding(kernel), State::Sliding { steps, .. }) => {
                Gauge::Sliding(kernel, steps)
            }
            (Algorithm::Estimate(kernel), State::Estimate { pair, .. }) => {
                Gauge::Estimate(kernel, pair)
            }
            (Algorithm::Log(kernel), State::Log { entries, .. }) => Gauge::Log(kernel, entries),
            (Algorithm::Concurrent(kernel), State::Concurrent { leases }) => {
                Gauge::Concurrent(kernel, leases)
            }
            _ => unreachable!("`carry` made the state fit the algorithm"),
        };
        let now = gauge!(&mut gauge, kernel, state => kernel.age(state, now));
        let (cost, reserved) = (charge.cost, charge.reserved);
        // Leases without an id are kept under this id, so it cannot be one of theirs.
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

    /// The receipt of this charge, if it was made before and is still kept.
    pub(crate) fn receipt(&mut self) -> Option<&mut Receipt> {
        if self.idle { None } else { self.id.and_then(|id| self.receipts.find(id)) }
    }

    /// The most units that may be in use.
    pub(crate) fn ceiling(&self, op: Op) -> u64 {
        self.limit.ceiling(op)
    }

    pub(crate) fn room(&self, ceiling: u64) -> u64 {
        gauge!(&self.gauge, kernel, state => kernel.room(state, self.now, ceiling))
    }

    /// Whether this charge was made before, under the same id.
    pub(crate) fn is_charged(&mut self) -> bool {
        match (self.id, &self.gauge) {
            (Some(id), Gauge::Concurrent(_, leases)) => leases.holds(id),
            _ => self.receipt().is_some(),
        }
    }

    /// The units that this charge took before and has not given back.
    pub(crate) fn charged_units(&mut self) -> u64 {
        match (self.id, &self.gauge) {
            (Some(id), Gauge::Concurrent(_, leases)) => leases.held(id),
            _ => self.receipt().map_or(0, |receipt| receipt.refundable),
        }
    }

    pub(crate) fn charge(&mut self, units: u64) {
        self.granted = units;
        if units == 0 || self.is_charged() {
            return;
        }
        let id = self.id.unwrap_or(Id::NONE);
        self.change();
        let charged_at =
            gauge!(&mut self.gauge, kernel, state => kernel.charge(state, self.now, units, id));
        if let (Some(id), false) = (self.id, matches!(self.gauge, Gauge::Concurrent(..))) {
            self.receipts.keep(Receipt { id, refundable: units, charged_at, settled: false });
        }
    }

    /// Charges what was denied: nothing that can never be allowed, and at most one amount beyond the
    /// capacity.
    pub(crate) fn charge_rejected(&mut self) {
        if self.cost <= self.limit.capacity() {
            let units =
                self.cost.min(self.room(self.limit.capacity() + self.limit.algorithm().amount()));
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

    pub(crate) fn refund(&mut self) {
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

    pub(crate) fn reset(&mut self) {
        self.change();
        gauge!(&mut self.gauge, kernel, state => {
            **state = Default::default();
            kernel.age(state, self.now)
        });
        *self.receipts = Receipts::default();
    }

    pub(crate) fn release(&mut self) {
        if let (Gauge::Concurrent(_, leases), Some(id)) = (&mut self.gauge, self.id) {
            self.granted = leases.release(id);
            if self.granted > 0 {
                self.change();
            }
        }
    }

    /// Charges or returns the difference between reserved and actual cost; says whether it could
    /// in full.
    pub(crate) fn settle(&mut self) -> bool {
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
            // The receipt is gone: too old, or too many since. Nothing is given back, but what is
            // missing is still taken.
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

    pub(crate) fn book(&mut self, max_wait_us: u64) -> bool {
        let Gauge::Bucket(bucket, level) = &mut self.gauge else { return false };
        if self.cost > bucket.capacity {
            return false;
        }
        let booked = if self.cost == 0 {
            Some(0)
        } else {
            bucket.book(level, self.now, self.cost, max_wait_us)
        };
        let Some(wait) = booked else { return false };
        if self.cost > 0 {
            self.change();
        }
        self.booked_us = wait;
        self.granted = self.cost;
        self.fits = true;
        true
    }

    pub(crate) fn unbook(&mut self, idle_at: Timestamp) {
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
    pub(crate) fn verdict(&self, op: Op, allowed: bool) -> Verdict {
        let &Meter { cost, reserved, fits, granted, booked_us, .. } = self;
        let done = Done { op, cost, reserved, fits, granted, booked_us };
        let wait = |cost, ceiling| gauge!(&self.gauge, kernel, state => kernel.wait(state, self.now, cost, ceiling));
        reading::verdict(self.limit, &done, allowed, |ceiling| self.room(ceiling), wait)
    }
}
