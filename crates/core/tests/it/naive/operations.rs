//! A second implementation of the operations, on keys that keep their full history: several charges in one call,
//! all or nothing, with or without an id.

use tidegate_core::{Algorithm, Id, Op, Retry, Verdict};

use super::{Naive, Receipt, When};

/// How many charges with an id a key remembers.
const RECEIPTS: usize = 64;

/// One charge of a call.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) key: &'a mut Naive,
    pub(crate) cost: u64,
    /// For `Settle`: what had been charged before.
    pub(crate) reserved: u64,
}

/// A charge at work.
struct Turn<'a> {
    key: &'a mut Naive,
    cost: u64,
    reserved: u64,
    id: Option<Id>,
    /// Time does not go back.
    now: u64,
    /// Nothing was in use, so what is known of earlier charges is worth nothing.
    idle: bool,
    fits: bool,
    granted: u64,
    booked: u64,
}

/// What a call answers, charge by charge, and whether it is allowed.
pub(crate) fn decide(
    op: Op,
    id: Option<Id>,
    now: u64,
    asked: Vec<Asked<'_>>,
) -> (Vec<Verdict>, bool) {
    let turn = |asked| {
        let Asked { key, cost, reserved } = asked;
        let now = key.clamped(now);
        let idle = key.is_idle(now);
        Turn { key, cost, reserved, id, now, idle, fits: true, granted: 0, booked: 0 }
    };
    let mut turns: Vec<Turn<'_>> = asked.into_iter().map(turn).collect();
    // Only a single bucket can keep a place.
    let acts_as = match (op, &turns[..]) {
        (Op::Book { .. }, [turn]) if matches!(turn.key.limit.algorithm(), Algorithm::Bucket(_)) => {
            op
        }
        (Op::Book { .. }, _) => Op::Check,
        _ => op,
    };
    match acts_as {
        Op::Check | Op::Debit | Op::Peek => {
            for turn in &mut turns {
                turn.fits = turn.held().is_some()
                    || turn.cost == 0
                    || turn.cost <= turn.room(turn.ceiling(acts_as));
            }
            let allowed = turns.iter().all(|turn| turn.fits);
            for turn in turns.iter_mut().filter(|_| acts_as != Op::Peek) {
                match allowed {
                    true => turn.take(turn.cost),
                    false if acts_as == Op::Check => turn.take_rejected(),
                    false => {}
                }
            }
        }
        Op::Take if turns.iter().any(|turn| turn.held().is_some()) => {
            // A retry gets the same units.
            turns.iter_mut().for_each(|turn| turn.granted = turn.held().unwrap_or(0));
        }
        Op::Take => {
            let rooms: Vec<u64> = turns.iter().map(|turn| turn.room(turn.ceiling(op))).collect();
            let grant = turns
                .iter()
                .zip(&rooms)
                .map(|(turn, room)| turn.cost.min(*room))
                .min()
                .unwrap_or(0);
            for (turn, room) in turns.iter_mut().zip(rooms) {
                turn.fits = turn.cost == 0 || room > 0;
                turn.take(grant);
            }
        }
        Op::Refund => turns.iter_mut().for_each(Turn::refund),
        Op::Release => turns.iter_mut().for_each(Turn::release),
        Op::Settle => turns.iter_mut().for_each(Turn::settle),
        Op::Reset => turns.iter_mut().for_each(|turn| {
            turn.key.past.clear();
            turn.key.receipts.clear();
        }),
        Op::Book { max_wait_us } => turns.iter_mut().for_each(|turn| turn.book(max_wait_us)),
        Op::Unbook { idle_at } => {
            turns.iter_mut().for_each(|turn| turn.unbook(idle_at.as_micros()))
        }
        other => unreachable!("{other:?} is not known here"),
    }
    let allowed = turns.iter().all(|turn| turn.fits);
    (turns.iter().map(|turn| turn.verdict(op, allowed)).collect(), allowed)
}

impl Turn<'_> {
    fn ceiling(&self, op: Op) -> u64 {
        let debt = if matches!(op, Op::Debit | Op::Settle) { self.key.limit.debt() } else { 0 };
        self.key.limit.capacity() + debt
    }

    fn room(&self, ceiling: u64) -> u64 {
        self.key.room(self.now, ceiling)
    }

    fn is_lease(&self) -> bool {
        matches!(self.key.limit.algorithm(), Algorithm::Concurrent(_))
    }

    fn receipt(&mut self) -> Option<&mut Receipt> {
        let id = self.id.filter(|_| !self.idle)?;
        self.key.receipts.iter_mut().find(|receipt| receipt.id == id)
    }

    /// What this very charge has taken before and not given back, if it was.
    fn held(&self) -> Option<u64> {
        let id = self.id?;
        if self.is_lease() {
            let lease =
                |past: &&super::Past| past.id == Some(id) && self.key.counts(past, self.now);
            return self.key.past.iter().find(lease).map(|past| past.units as u64);
        }
        let receipts = self.key.receipts.iter().filter(|_| !self.idle);
        receipts.into_iter().find(|receipt| receipt.id == id).map(|receipt| receipt.left)
    }

    /// Something changes: what is worth nothing is forgotten for good.
    fn change(&mut self) {
        if std::mem::take(&mut self.idle) {
            self.key.receipts.clear();
        }
    }

    fn charge(&mut self, units: u64, id: Option<Id>) {
        if units > 0 {
            self.change();
            self.key.charge(self.now, units, id);
        }
    }

    fn take(&mut self, units: u64) {
        self.granted = units;
        if units == 0 || self.held().is_some() {
            return;
        }
        self.charge(units, self.id);
        if let Some(id) = self.id.filter(|_| !self.is_lease()) {
            if self.key.receipts.len() == RECEIPTS {
                self.key.receipts.remove(0);
            }
            let at = self.key.newest;
            self.key.receipts.push(Receipt { id, left: units, at, settled: false });
        }
    }

    /// What was denied counts too, if the limit says so: nothing that never fits, and one
    /// amount beyond the limit at most.
    fn take_rejected(&mut self) {
        let capacity = self.key.limit.capacity();
        if self.key.limit.counts_rejected() && self.cost <= capacity {
            self.charge(
                self.cost.min(self.room(capacity + self.key.limit.algorithm().amount())),
                None,
            );
        }
    }

    fn give_back(&mut self, units: u64, when: When) {
        self.granted = self.key.give_back(self.now, units, when);
        if self.granted > 0 {
            self.change();
        }
    }

    fn refund(&mut self) {
        let cost = self.cost;
        match self.id {
            None => self.give_back(cost, When::Any),
            Some(_) if self.is_lease() => self.release(),
            Some(id) => {
                let Some(receipt) = self.receipt() else { return };
                let units = cost.min(receipt.left);
                receipt.left -= units;
                let (at, all) = (receipt.at, receipt.left == 0 && !receipt.settled);
                self.give_back(units, When::At(at));
                if all && units > 0 {
                    self.key.receipts.retain(|receipt| receipt.id != id); // it was never taken
                }
            }
        }
    }

    fn release(&mut self) {
        if let (Some(id), Some(units), true) = (self.id, self.held(), self.is_lease()) {
            self.granted = units;
            self.change();
            self.key.release(self.now, id);
        }
    }

    fn settle(&mut self) {
        if self.is_lease() {
            return self.release();
        }
        let (left, at) = match self.receipt() {
            Some(Receipt { settled: true, .. }) => return,
            Some(receipt) => {
                receipt.settled = true;
                (std::mem::take(&mut receipt.left), receipt.at)
            }
            None => (0, 0),
        };
        if self.cost <= self.reserved {
            return self.give_back((self.reserved - self.cost).min(left), When::At(at));
        }
        let missing = self.cost - self.reserved;
        self.granted = missing.min(self.room(self.ceiling(Op::Settle)));
        self.charge(self.granted, None);
        self.fits = self.granted == missing;
    }

    fn book(&mut self, max_wait_us: u64) {
        let capacity = self.key.limit.capacity();
        self.fits = self.cost <= capacity;
        if !self.fits || self.cost == 0 {
            return;
        }
        let wait = self.key.wait(self.now, self.cost, capacity);
        self.fits = wait <= max_wait_us;
        if self.fits {
            self.change();
            self.key.book(self.now, wait, self.cost);
            (self.booked, self.granted) = (wait, self.cost);
        }
    }

    fn unbook(&mut self, idle_at: u64) {
        if self.key.bucket_idle_at(self.now) == Some(idle_at) {
            self.give_back(self.cost, When::Any);
        }
    }

    fn verdict(&self, op: Op, allowed: bool) -> Verdict {
        let capacity = self.key.limit.capacity();
        let until = |cost: u64, ceiling: u64| match cost {
            _ if cost > ceiling => Retry::Never,
            _ => match self.key.wait(self.now, cost, ceiling) {
                0 => Retry::Now,
                wait => Retry::After(wait),
            },
        };
        let retry = match op {
            _ if allowed && self.booked > 0 => Retry::After(self.booked),
            _ if allowed => Retry::Now,
            Op::Take => until(1, capacity),
            Op::Settle => until(self.cost.saturating_sub(self.reserved).max(1), self.ceiling(op)),
            _ if self.cost == 0 => Retry::Now,
            _ => until(self.cost, self.ceiling(op)),
        };
        let remaining = self.room(capacity);
        Verdict {
            allowed: self.fits,
            granted: if allowed || op == Op::Settle { self.granted } else { 0 },
            amount: capacity,
            remaining,
            retry,
            reset_after_us: self.key.wait(self.now, capacity, capacity),
            next_after_us: if remaining == capacity {
                0
            } else {
                self.key.wait(self.now, remaining + 1, capacity)
            },
        }
    }
}
