//! How many nodes share the store: each takes a lease of a `concurrent` limit there and renews it; the leases that live are the nodes.
//!
//! A node that renews is there twice for a moment, so they are counted some time after renewing, never at the same time as others, and a
//! number is believed when two answers in a row agree on it. When the store is silent
//! the last number stays. A node that has never heard one assumes many, so that newcomers in an outage take little.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::{Id, Limit, Op, Period};

use super::Terms;
use crate::store::{Charge, Check, Scope, Subject};

/// What a node that knows nothing assumes.
pub(crate) const UNKNOWN: u64 = 10;
/// The most nodes that are counted.
const MOST: u64 = 10_000;
/// How long a node that has gone is still counted.
const LIFE: Period = Period::seconds(5);
/// A scope that no rule can have: the names of rules have no spaces.
const SCOPE: &str = "tidegate nodes";

/// How many nodes there are.
#[derive(Debug)]
pub(crate) struct Nodes {
    /// As somebody said; otherwise counted.
    told: Option<u64>,
    /// Zero as long as nothing is known.
    counted: AtomicU64,
    /// What the last answer said.
    last: AtomicU64,
    /// The id of the lease that is held.
    id: AtomicU64,
}

impl Nodes {
    pub(crate) fn new(told: Option<u64>) -> Self {
        let number = || AtomicU64::new(0);
        Nodes { told: told.map(|nodes| nodes.max(1)), counted: number(), last: number(), id: number() }
    }

    /// By how many limits are divided.
    pub(crate) fn number(&self) -> u64 {
        match (self.told, self.counted.load(Ordering::Relaxed)) {
            (Some(told), _) => told,
            (None, 0) => UNKNOWN,
            (None, counted) => counted,
        }
    }

    pub(crate) fn are_counted(&self) -> bool {
        self.told.is_none()
    }

    /// Takes the next lease, under a fresh id; and then ends the one before, if there is one.
    pub(crate) fn beat(&self, fresh: Id) -> (Check<'static>, Option<Check<'static>>) {
        let before = self.id.swap(fresh.0, Ordering::Relaxed);
        let before = (before != 0).then(|| lease(Op::Release, Id(before)));
        (lease(Op::Check, fresh), before)
    }

    /// Looks how many leases there are.
    pub(crate) fn count() -> Check<'static> {
        lease(Op::Peek, Id::NONE).without_id()
    }

    /// Ends the lease that is held: this node goes away.
    pub(crate) fn leave(&self) -> Option<Check<'static>> {
        let held = self.id.swap(0, Ordering::Relaxed);
        (held != 0).then(|| lease(Op::Release, Id(held)))
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
    let limit = Limit::concurrent(MOST, LIFE).build().expect("ten thousand leases of five seconds are a limit");
    let subject = Subject { scope: Scope::Rule(Cow::Borrowed(SCOPE)), key: Cow::Borrowed(b"") };
    let charge = Charge { subject, limit, position: 0, cost: 1, reserved: 0, terms: Terms::default() };
    Check::of(op).with_charges(vec![charge]).with_id(id)
}
