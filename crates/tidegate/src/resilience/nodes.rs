//! How many nodes share the store: each takes a lease of a `concurrent` limit there and renews it;
//! the leases that live are the nodes.
//!
//! A node that renews is there twice for a moment, so they are counted some time after renewing,
//! never at the same time as others, and a number is believed when two answers in a row agree on
//! it. When the store does not answer, or does not take this node's own lease, the last number
//! stays: the leases of the others end then, too, although they are there. A node that has never
//! reached the store assumes that it is alone when it decides without it; and that it is one of
//! many when it takes something ahead, until it knows.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tidegate_core::{Id, Limit, Op, Period};

use super::Policy;
use crate::store::{Charge, Check, Scope, Subject};

/// How many nodes a node that knows nothing reckons with when it takes something ahead.
const MANY: u64 = 10;
/// The most nodes that are counted.
const MOST: u64 = 10_000;
/// How long a node that has gone is still counted.
const LIFE: Period = Period::seconds(5);
/// The most leases of this node that are remembered: older ones have ended by themselves.
const MOST_IDS: usize = 8;
/// A scope that no rule can have: the names of rules have no spaces.
const SCOPE: &str = "tidegate nodes";

/// How the number of nodes is known by which limits are divided without the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum NodesFrom {
    /// The configuration says it.
    Configured,
    /// They were counted in the store, when it last answered.
    Counted,
    /// This node has never reached the store since it started, and assumes that it is alone.
    #[default]
    Assumed,
}

impl NodesFrom {
    /// The word used in logs.
    pub const fn name(self) -> &'static str {
        match self {
            NodesFrom::Configured => "configured",
            NodesFrom::Counted => "counted",
            NodesFrom::Assumed => "assumed",
        }
    }
}

/// For people.
impl fmt::Display for NodesFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodesFrom::Assumed => f.write_str("assumed: the store was never reached"),
            from => f.write_str(from.name()),
        }
    }
}

/// How many nodes there are.
#[derive(Debug)]
pub(crate) struct Nodes {
    /// As somebody said; otherwise counted.
    told: Option<u64>,
    /// Zero as long as nothing is known.
    counted: AtomicU64,
    /// What the last answer said.
    last: AtomicU64,
    /// The ids of the leases that the store may have of this node: the last one that it took, and
    /// those of later calls whose answer did not arrive.
    ids: Mutex<Vec<Id>>,
}

impl Nodes {
    pub(crate) fn new(told: Option<u64>) -> Self {
        let number = || AtomicU64::new(0);
        Nodes {
            told: told.map(|nodes| nodes.max(1)),
            counted: number(),
            last: number(),
            ids: Mutex::default(),
        }
    }

    /// By how many limits are divided without the store, and how that is known.
    pub(crate) fn known(&self) -> (u64, NodesFrom) {
        // Before two answers agree, one is better than none.
        let counted = match self.counted.load(Ordering::Relaxed) {
            0 => self.last.load(Ordering::Relaxed),
            counted => counted,
        };
        match (self.told, counted) {
            (Some(told), _) => (told, NodesFrom::Configured),
            (None, 0) => (1, NodesFrom::Assumed),
            (None, counted) => (counted, NodesFrom::Counted),
        }
    }

    /// By how many limits are divided without the store.
    pub(crate) fn number(&self) -> u64 {
        self.known().0
    }

    /// By how many is divided what may be taken ahead of a store that answers. Until they are
    /// counted there may be others: never fewer than the last answer said.
    pub(crate) fn taking_ahead(&self) -> u64 {
        match (self.told, self.counted.load(Ordering::Relaxed)) {
            (Some(told), _) => told,
            (None, 0) => MANY.max(self.last.load(Ordering::Relaxed)),
            (None, counted) => counted,
        }
    }

    pub(crate) fn are_counted(&self) -> bool {
        self.told.is_none()
    }

    /// Takes the next lease, under a fresh id.
    pub(crate) fn beat(fresh: Id) -> Check<'static> {
        lease(Op::Check, fresh)
    }

    /// The store has taken the lease of this id. Ends those before it.
    pub(crate) fn took(&self, fresh: Id) -> Vec<Check<'static>> {
        let before = std::mem::replace(&mut *self.ids.lock(), vec![fresh]);
        before.into_iter().map(|id| lease(Op::Release, id)).collect()
    }

    /// The store may have taken the lease of this id. It is ended with the others, unless that is
    /// too long ago to matter.
    pub(crate) fn may_have_taken(&self, fresh: Id) {
        let mut ids = self.ids.lock();
        if ids.len() >= MOST_IDS {
            ids.remove(0);
        }
        ids.push(fresh);
    }

    /// Looks how many leases there are.
    pub(crate) fn count() -> Check<'static> {
        lease(Op::Peek, Id::NONE).without_id()
    }

    /// Ends what the store may have of this node: it goes away.
    pub(crate) fn leave(&self) -> Vec<Check<'static>> {
        std::mem::take(&mut *self.ids.lock()).into_iter().map(|id| lease(Op::Release, id)).collect()
    }

    /// So many leases are left.
    pub(crate) fn heard(&self, remaining: u64) {
        let nodes = MOST.saturating_sub(remaining).max(1);
        if self.last.swap(nodes, Ordering::Relaxed) == nodes {
            self.counted.store(nodes, Ordering::Relaxed);
        }
    }
}

fn lease(op: Op, id: Id) -> Check<'static> {
    let limit = Limit::concurrent(MOST, LIFE)
        .build()
        .expect("ten thousand leases of five seconds are a limit");
    let subject = Subject { scope: Scope::Rule(Cow::Borrowed(SCOPE)), key: Cow::Borrowed(b"") };
    let charge =
        Charge { subject, limit, position: 0, cost: 1, reserved: 0, policy: Policy::default() };
    Check::of(op).with_charges(vec![charge]).with_id(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_ahead_is_divided_by_no_fewer_than_are_known() {
        let nodes = Nodes::new(None);
        assert_eq!((nodes.known(), nodes.taking_ahead()), ((1, NodesFrom::Assumed), MANY));
        // One answer alone may count nodes twice that renew their lease just then: it is believed
        // only where that is careful.
        for (heard, taking_ahead) in [(3, MANY), (11, 11)] {
            let nodes = Nodes::new(None);
            nodes.heard(MOST - heard);
            assert_eq!((nodes.number(), nodes.taking_ahead()), (heard, taking_ahead));
            nodes.heard(MOST - heard);
            assert_eq!((nodes.number(), nodes.taking_ahead()), (heard, heard));
        }
    }
}
