//! The memory that all connections together hold for what they have begun: unfinished commands and
//! the queues of transactions.
//!
//! Each connection has [`FREE_BYTES`] of its own, which is enough for every command that decides
//! and for a small transaction. What it holds beyond that is taken from one budget. A connection
//! that finds it used up gets an error and is closed; connections that stay within their own bytes
//! never notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What each connection may hold without taking from the budget.
pub const FREE_BYTES: usize = 32 << 10;

/// What all connections of a listener may hold beyond their own bytes. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most: usize,
    held: AtomicUsize,
}

impl Budget {
    pub(crate) fn new(most: usize) -> Self {
        Budget(Arc::new(Shared { most, held: AtomicUsize::new(0) }))
    }
}

/// The part of one connection; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Pending {
    budget: Budget,
    held: usize,
}

impl Pending {
    pub(crate) fn new(budget: Budget) -> Self {
        Pending { budget, held: 0 }
    }

    /// The connection holds so many bytes now. Returns false, and changes nothing, if that is more
    /// than the budget has left.
    pub(crate) fn hold(&mut self, bytes: usize) -> bool {
        let (before, now) = (self.held, bytes.saturating_sub(FREE_BYTES));
        if now == before {
            return true;
        }
        let Shared { most, held } = &*self.budget.0;
        let changed = held.fetch_update(Relaxed, Relaxed, |all| {
            let all = all - before + now;
            (now < before || all <= *most).then_some(all)
        });
        if changed.is_ok() {
            self.held = now;
        }
        changed.is_ok()
    }

    /// What all connections may hold beyond their own bytes.
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
    fn what_is_beyond_the_own_bytes_of_a_connection_is_shared() {
        let budget = Budget::new(100);
        let held = |budget: &Budget| budget.0.held.load(Relaxed);
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
