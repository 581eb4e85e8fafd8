//! What a caller holds after a decision: a reservation to settle, a lease to release, a booked
//! place to use.

use std::sync::Arc;

use tidegate_core::{Decision, Id, Op};

use super::Limiter;
use super::handle::StoreHandle;
use crate::store::{Check, StoreError};

/// An estimate that was charged or denied, to be settled when the true cost is known.
///
/// A reservation that is dropped without being settled stays charged at its estimate.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = tidegate::Limiter::new("1000/min".parse()?);
/// let reservation = limiter.reserve("user:7", 400).await?;
/// if reservation.allowed() {
///     let tokens_used = 120;
///     let decision = reservation.settle(tokens_used).await?;
///     assert_eq!(decision.remaining(), 880);
/// }
/// # Ok(()) }
/// ```
#[must_use = "an allowed reservation should be settled when the true cost is known"]
pub struct Reservation {
    store: Arc<StoreHandle>,
    check: Check<'static>,
    decision: Decision,
}

impl Reservation {
    pub(super) fn new(store: Arc<StoreHandle>, check: Check<'static>, decision: Decision) -> Self {
        Reservation { store, check, decision }
    }

    /// The decision on the estimate.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Whether the estimate was allowed.
    pub fn allowed(&self) -> bool {
        self.decision.allowed()
    }

    /// The id by which another process can settle the reservation.
    pub fn id(&self) -> Id {
        self.check.id().unwrap_or(Id::NONE)
    }

    /// Replaces the estimate with the true cost.
    ///
    /// If the true cost is higher, the difference is taken like a debit, down to the limit's debt;
    /// beyond that the decision is a denial. If it is lower, the difference is given back, except
    /// for units that have regrown meanwhile. Settling a denied reservation does nothing.
    ///
    /// # Errors
    /// If the store does not answer.
    pub async fn settle(self, actual: u64) -> Result<Decision, StoreError> {
        let actual = vec![actual; self.check.charges().len()];
        self.settle_each(&actual).await
    }

    /// Replaces the estimate of each charge with its true cost, in the order of the check. A charge
    /// without an entry keeps its estimate.
    ///
    /// # Errors
    /// If the store does not answer.
    pub async fn settle_each(self, actual: &[u64]) -> Result<Decision, StoreError> {
        if !self.allowed() {
            return Ok(self.decision);
        }
        let mut check = self.check.into_op(Op::Settle);
        for (index, charge) in check.charges_mut().iter_mut().enumerate() {
            charge.reserved = charge.cost;
            charge.cost = actual.get(index).copied().unwrap_or(charge.cost);
        }
        self.store.decide(check).await
    }

    /// Settles at a true cost of zero.
    ///
    /// # Errors
    /// If the store does not answer.
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

/// A lease under a `concurrent` limit, or the denial of one. Dropping it ends the lease.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = tidegate::Limiter::new("1 concurrent ttl 30s".parse()?);
/// let first = limiter.lease("user:7").await?;
/// assert!(first.allowed() && !limiter.lease("user:7").await?.allowed());
/// drop(first);
/// assert!(limiter.lease("user:7").await?.allowed());
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "a lease ends when it is dropped"]
pub struct Lease {
    limiter: Limiter,
    key: Vec<u8>,
    id: Id,
    decision: Decision,
    is_held: bool,
}

impl Lease {
    pub(super) fn new(limiter: Limiter, key: Vec<u8>, id: Id, decision: Decision) -> Self {
        let is_held = decision.allowed();
        Lease { limiter, key, id, decision, is_held }
    }

    /// The decision on the lease.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Whether the lease was granted.
    pub fn allowed(&self) -> bool {
        self.decision.allowed()
    }

    /// The id by which another process can release the lease.
    pub fn id(&self) -> Id {
        self.id
    }

    /// Ends the lease like dropping it, but waits for the store and returns its decision.
    ///
    /// # Errors
    /// If the store does not answer; the lease then ends by its ttl.
    pub async fn release(mut self) -> Result<Decision, StoreError> {
        if !self.is_held {
            return Ok(self.decision.clone());
        }
        let check = self.limiter.check_of(Op::Release, &self.key, 1).with_id(self.id);
        let released = self.limiter.store().decide(check).await;
        // Cleared only now: if this future is dropped while it waits, dropping the lease ends it. A
        // second release has no effect.
        self.is_held = false;
        released
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.is_held {
            let check =
                self.limiter.check_of(Op::Release, &self.key, 1).with_id(self.id).into_owned();
            self.limiter.store().release(check, self.decision.source());
        }
    }
}

/// Refunds the units that a call may have taken, unless its decision arrives.
pub(super) struct UndoGuard<'a> {
    store: &'a Arc<StoreHandle>,
    refund: Option<Check<'static>>,
}

impl<'a> UndoGuard<'a> {
    pub(super) fn arm(store: &'a Arc<StoreHandle>, refund: Check<'static>) -> Self {
        UndoGuard { store, refund: Some(refund) }
    }

    /// The decision has arrived.
    pub(super) fn disarm(mut self) {
        self.refund = None;
    }
}

impl Drop for UndoGuard<'_> {
    fn drop(&mut self) {
        if let Some(refund) = self.refund.take() {
            self.store.call_in_background(refund);
        }
    }
}

/// A booked place, given back if the call that waits for it is dropped.
pub(super) struct BookedPlace<'a> {
    limiter: &'a Limiter,
    key: &'a [u8],
    cost: u64,
    booked: Option<Decision>,
}

impl<'a> BookedPlace<'a> {
    pub(super) fn new(limiter: &'a Limiter, key: &'a [u8], cost: u64, booked: Decision) -> Self {
        BookedPlace { limiter, key, cost, booked: Some(booked) }
    }

    /// The wait is over: the place is used and is not given back.
    pub(super) fn into_used(mut self) -> Option<Decision> {
        self.booked.take()
    }
}

impl Drop for BookedPlace<'_> {
    fn drop(&mut self) {
        if let Some(booked) = self.booked.take() {
            let idle_at = booked.at().after_micros(booked.binding().reset_after_us);
            let check =
                self.limiter.check_of(Op::Unbook { idle_at }, self.key, self.cost).into_owned();
            self.limiter.store().leave_place(check);
        }
    }
}
