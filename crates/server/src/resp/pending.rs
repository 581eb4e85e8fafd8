//! The memory that all connections together hold for unfinished commands and the queues of
//! transactions.
//!
//! Each connection has [`FREE_BYTES`] of its own, which is enough for every command that decides
//! and for a small transaction. Memory beyond that is taken from one budget. A connection that needs
//! more than the budget has left gets an error and is closed; connections within their own bytes
//! are not affected.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The bytes that each connection may hold without taking from the budget.
pub const FREE_BYTES: usize = 32 << 10;

/// The bytes that all connections of a listener may hold beyond their own. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct PendingBudget(Arc<PendingState>);

#[derive(Debug)]
struct PendingState {
    most: usize,
    held: AtomicUsize,
}

impl PendingBudget {
    pub(crate) fn new(most: usize) -> Self {
        PendingBudget(Arc::new(PendingState { most, held: AtomicUsize::new(0) }))
    }
}

/// The part of one connection, returned when dropped.
#[derive(Debug)]
pub(crate) struct Pending {
    budget: PendingBudget,
    held: usize,
}

impl Pending {
    pub(crate) fn new(budget: PendingBudget) -> Self {
        Pending { budget, held: 0 }
    }

    /// Sets how many bytes the connection holds. Returns false, and changes nothing, if the budget
    /// does not allow it.
    pub(crate) fn hold(&mut self, bytes: usize) -> bool {
        let (before, now) = (self.held, bytes.saturating_sub(FREE_BYTES));
        if now == before {
            return true;
        }
        let PendingState { most, held } = &*self.budget.0;
        let changed = held.fetch_update(Relaxed, Relaxed, |all| {
            let all = all - before + now;
            (now < before || all <= *most).then_some(all)
        });
        if changed.is_ok() {
            self.held = now;
        }
        changed.is_ok()
    }

    /// The size of the budget, in bytes.
    pub(crate) fn most(&self) -> usize {
        self.budget.0.most
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.budget.0.held.fetch_sub(self.held, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_share_the_budget_beyond_their_own_bytes() {
        let budget = PendingBudget::new(100);
        let held = |budget: &PendingBudget| budget.0.held.load(Relaxed);
        let [mut one, mut other, mut third] = [(); 3].map(|()| Pending::new(budget.clone()));
        assert!(one.hold(FREE_BYTES) && other.hold(FREE_BYTES + 60) && one.hold(FREE_BYTES + 40));
        assert_eq!(held(&budget), 100);
        assert!(!third.hold(FREE_BYTES + 1) && !other.hold(FREE_BYTES + 61), "all of it is used");
        assert!(third.hold(FREE_BYTES) && other.hold(FREE_BYTES + 60), "nothing has changed");
        assert!(other.hold(FREE_BYTES + 10));
        assert!(third.hold(FREE_BYTES + 50));
        assert_eq!(held(&budget), 100);
        drop((one, other, third));
        assert_eq!(held(&budget), 0);
    }
}
