//! How many nodes share the store. Each holds and renews an entry there, a lease of a `concurrent`
//! limit; the live entries are the nodes.
//!
//! A node that renews has two entries for a short time. So nodes count some time after renewing, at
//! times that differ, and use a count when two answers in a row agree on it. When the store does
//! not answer, or does not take this node's own entry, the last count stays: the entries of the
//! others expire then, too, although they run. Until it has reached the store, a node assumes that
//! it is the only one when it decides without the store, and one of many when it takes units ahead.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tidegate_core::{Id, Limit, Op, Period};

use super::Policy;
use crate::store::{Charge, Check, Scope, Subject};

/// The number of nodes to assume for taking ahead before they are counted.
const ASSUMED_NODES: u64 = 10;
/// The most nodes that can be counted.
const MAX_NODES: u64 = 10_000;
/// How long a node that has stopped is still counted.
const LIFETIME: Period = Period::seconds(5);
/// The most entries of this node to remember: older ones have expired.
const MAX_IDS: usize = 8;
/// A scope that no rule can have: the names of rules have no spaces.
const SCOPE: &str = "tidegate nodes";

/// The source of the number of nodes that divides limits without the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum NodesFrom {
    /// It is configured.
    Configured,
    /// The nodes were counted in the store when it last answered.
    Counted,
    /// This node has not reached the store since it started, and assumes that it is the only one.
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

/// For log lines and messages.
impl fmt::Display for NodesFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodesFrom::Assumed => f.write_str("assumed: the store was never reached"),
            from => f.write_str(from.name()),
        }
    }
}

/// The number of nodes, and the entries of this one.
#[derive(Debug)]
pub(crate) struct Nodes {
    /// The number by configuration; without it the nodes are counted.
    configured: Option<u64>,
    /// The number that two answers in a row agreed on; zero before.
    agreed: AtomicU64,
    /// The number in the last answer; zero before.
    last: AtomicU64,
    /// The ids of the entries that the store may have of this node: the last one that it took, and
    /// those of later calls without an answer.
    ids: Mutex<Vec<Id>>,
}

impl Nodes {
    pub(crate) fn new(configured: Option<u64>) -> Self {
        let number = || AtomicU64::new(0);
        Nodes {
            configured: configured.map(|nodes| nodes.max(1)),
            agreed: number(),
            last: number(),
            ids: Mutex::default(),
        }
    }

    /// The number that divides limits without the store, and its source.
    pub(crate) fn known(&self) -> (u64, NodesFrom) {
        // One answer is better than none until two agree.
        let counted = match self.agreed.load(Ordering::Relaxed) {
            0 => self.last.load(Ordering::Relaxed),
            counted => counted,
        };
        match (self.configured, counted) {
            (Some(nodes), _) => (nodes, NodesFrom::Configured),
            (None, 0) => (1, NodesFrom::Assumed),
            (None, counted) => (counted, NodesFrom::Counted),
        }
    }

    /// The number that divides limits without the store.
    pub(crate) fn number(&self) -> u64 {
        self.known().0
    }

    /// The number that divides what may be taken ahead. Until two answers agree it is a careful
    /// assumption, never less than the last answer.
    pub(crate) fn for_taking_ahead(&self) -> u64 {
        match (self.configured, self.agreed.load(Ordering::Relaxed)) {
            (Some(nodes), _) => nodes,
            (None, 0) => ASSUMED_NODES.max(self.last.load(Ordering::Relaxed)),
            (None, counted) => counted,
        }
    }

    pub(crate) fn are_counted(&self) -> bool {
        self.configured.is_none()
    }

    /// The call that takes the next entry, under a fresh id.
    pub(crate) fn renewal(fresh: Id) -> Check<'static> {
        entry(Op::Check, fresh)
    }

    /// Records that the store took the entry of this id. Returns the calls that release those before
    /// it.
    pub(crate) fn renewed(&self, fresh: Id) -> Vec<Check<'static>> {
        let before = std::mem::replace(&mut *self.ids.lock(), vec![fresh]);
        before.into_iter().map(|id| entry(Op::Release, id)).collect()
    }

    /// Records that the store may have taken the entry of this id, to release it with the others.
    pub(crate) fn may_be_renewed(&self, fresh: Id) {
        let mut ids = self.ids.lock();
        if ids.len() >= MAX_IDS {
            ids.remove(0);
        }
        ids.push(fresh);
    }

    /// The call that counts the entries.
    pub(crate) fn count() -> Check<'static> {
        entry(Op::Peek, Id::NONE).without_id()
    }

    /// The calls that release all entries of this node when it stops.
    pub(crate) fn leave(&self) -> Vec<Check<'static>> {
        std::mem::take(&mut *self.ids.lock()).into_iter().map(|id| entry(Op::Release, id)).collect()
    }

    /// Records an answer to [`count`](Nodes::count): the entries that are left.
    pub(crate) fn counted(&self, remaining: u64) {
        let nodes = MAX_NODES.saturating_sub(remaining).max(1);
        if self.last.swap(nodes, Ordering::Relaxed) == nodes {
            self.agreed.store(nodes, Ordering::Relaxed);
        }
    }
}

fn entry(op: Op, id: Id) -> Check<'static> {
    let limit = Limit::concurrent(MAX_NODES, LIFETIME)
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
    fn units_taken_ahead_are_divided_by_at_least_the_known_nodes() {
        let nodes = Nodes::new(None);
        assert_eq!(
            (nodes.known(), nodes.for_taking_ahead()),
            ((1, NodesFrom::Assumed), ASSUMED_NODES)
        );
        // One answer may count nodes twice that are renewing: it is used only where that is
        // careful.
        for (counted, for_taking_ahead) in [(3, ASSUMED_NODES), (11, 11)] {
            let nodes = Nodes::new(None);
            nodes.counted(MAX_NODES - counted);
            assert_eq!((nodes.number(), nodes.for_taking_ahead()), (counted, for_taking_ahead));
            nodes.counted(MAX_NODES - counted);
            assert_eq!((nodes.number(), nodes.for_taking_ahead()), (counted, counted));
        }
    }
}
