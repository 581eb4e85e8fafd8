//! What a caller holds after a decision: a reservation to settle, a lease to release, a place to
//! use.

use std::sync::Arc;

use tidegate_core::{Decision, Id, Op};

use crate::limiter::{Limiter, Shared};
use crate::store::{Check, StoreError};

/// An estimate that was taken, or was not: see [`decision`](Reservation::decision).
///
/// Dropped without being settled, it stays what it is: the estimate is spent.
#[must_use = "an allowed reservation should be settled when the true cost is known"]
pub struct Reservation {
    shared: Arc<Shared>,
    check: Check<'static>,
    decision: Decision,
}

impl Reservation {
    pub(crate) fn new(shared: Arc<Shared>, check: Check<'static>, decision: Decision) -> Self {
        Reservation { shared, check, decision }
    }

    /// What was decided when it was made.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Whether it was allowed.
    pub fn allowed(&self) -> bool {
        self.decision.allowed()
    }

    /// The id, for settling it from elsewhere.
    pub fn id(&self) -> Id {
        self.check.id().unwrap_or(Id::NONE)
    }

    /// Replaces the estimate with what it came to. What is missing is taken like a debit, down to
    /// the limit's debt (the decision is denied if that is not enough); what was too much is given
    /// back, as far as it cannot have regrown meanwhile. Settling a reservation that was denied
    /// does nothing.
    ///
    /// # Errors
    /// If the store has no answer.
    pub async fn settle(self, actual: u64) -> Result<Decision, StoreError> {
        let actual = vec![actual; self.check.charges().len()];
        self.settle_each(&actual).await
    }

    /// The same with what each charge came to, in the order of the check; a charge that is not
    /// listed stays as it was reserved.
    ///
    /// # Errors
    /// If the store has no answer.
    pub async fn settle_each(self, actual: &[u64]) -> Result<Decision, StoreError> {
        if !self.allowed() {
            return Ok(self.decision);
        }
        let mut check = self.check.into_op(Op::Settle);
        for (index, charge) in check.charges_mut().iter_mut().enumerate() {
            charge.reserved = charge.cost;
            charge.cost = actual.get(index).copied().unwrap_or(charge.cost);
        }
        self.shared.decide(check).await
    }

    /// Settles at nothing: the work was not done after all.
    ///
    /// # Errors
    /// If the store has no answer.
    pub async fn cancel(self) -> Result<Decision, StoreError> {
        self.settle(0).await
    }
}

impl std::fmt::Debug for Reservation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reservation")
            .field("id", &self.id())
            .field("decision", &self.decision)
            .finish_non_exhaustive()
    }
}

/// A lease under a `concurrent` limit, or the answer that there is none: see
/// [`decision`](Lease::decision).
#[derive(Debug)]
#[must_use = "a lease ends when it is dropped"]
pub struct Lease {
    limiter: Limiter,
    key: Vec<u8>,
    id: Id,
    decision: Decision,
    held: bool,
}

impl Lease {
    pub(crate) fn new(limiter: Limiter, key: Vec<u8>, id: Id, decision: Decision) -> Self {
        let held = decision.allowed();
        Lease { limiter, key, id, decision, held }
    }

    /// What was decided.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Whether there is a lease.
    pub fn allowed(&self) -> bool {
        self.decision.allowed()
    }

    /// The id, for releasing it from elsewhere.
    pub fn id(&self) -> Id {
        self.id
    }

    /// Ends the lease. The same as dropping it, but it waits for the store and says what it
    /// answered.
    ///
    /// # Errors
    /// If the store has no answer; the lease then ends when its ttl is over.
    pub async fn release(mut self) -> Result<Decision, StoreError> {
        if !self.held {
            return Ok(self.decision.clone());
        }
        let check = self.limiter.check_of(Op::Release, &self.key, 1).with_id(self.id);
        let released = self.limiter.shared().decide(check).await;
        // Not before: whoever goes away meanwhile has dropped the lease, which ends it as well. To
        // end it twice is to end it once.
        self.held = false;
        released
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.held {
            let check =
                self.limiter.check_of(Op::Release, &self.key, 1).with_id(self.id).into_owned();
            self.limiter.shared().release(check, self.decision.source());
        }
    }
}

/// Gives back what a call may have taken, if its answer never arrives.
pub(crate) struct Undo<'a> {
    shared: &'a Arc<Shared>,
    refund: Option<Check<'static>>,
}

impl<'a> Undo<'a> {
    pub(crate) fn arm(shared: &'a Arc<Shared>, refund: Check<'static>) -> Self {
        Undo { shared, refund: Some(refund) }
    }

    /// The answer has arrived.
    pub(crate) fn disarm(mut self) {
        self.refund = None;
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if let Some(refund) = self.refund.take() {
            self.shared.give_up(refund);
        }
    }
}

/// Gives a booked place back when the one who waited for it has gone.
pub(crate) struct Place<'a> {
    limiter: &'a Limiter,
    key: &'a [u8],
    cost: u64,
    booked: Option<Decision>,
}

impl<'a> Place<'a> {
    pub(crate) fn new(limiter: &'a Limiter, key: &'a [u8], cost: u64, booked: Decision) -> Self {
        Place { limiter, key, cost, booked: Some(booked) }
    }

    /// Its turn has come: it is used and not given back.
    pub(crate) fn used(mut self) -> Option<Decision> {
        self.booked.take()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(booked) = self.booked.take() {
            let idle_at = booked.at().after_micros(booked.binding().reset_after_us);
            let check =
                self.limiter.check_of(Op::Unbook { idle_at }, self.key, self.cost).into_owned();
            self.limiter.shared().leave_place(check);
        }
    }
}
