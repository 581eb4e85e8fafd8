//! Costs that depend on the response: whether it is charged at all, and how much.
//!
//! The rule charges its cost before the request, like every rule. The proxy, which sees the
//! response, then settles the final cost: 0 if the response is not charged, or the measured amount.

use std::sync::Arc;

use tidegate::{Algorithm, Limit};

use super::{Attributes, Budget, Match, Rule, holds};

/// The measure of a response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Measure {
    /// The bytes of its body.
    Bytes,
    /// The milliseconds from the request to the end of its body.
    Millis,
    /// The number in a header; without one, the cost is not changed.
    Header(Arc<str>),
}

/// The cost of a response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settle {
    /// The measure.
    pub by: Measure,
    /// The amount of the measure that costs one unit, rounded up.
    pub per: u64,
}

impl Settle {
    /// The cost of a measured amount.
    pub fn cost(&self, measured: u64) -> u64 {
        measured.div_ceil(self.per)
    }
}

impl Rule {
    /// Whether its cost depends on the response.
    pub fn is_settled_later(&self) -> bool {
        self.settle.is_some() || !self.charge_when.is_empty()
    }

    /// Whether a response is charged.
    pub(crate) fn counts(&self, response: &impl Attributes) -> bool {
        holds(&self.charge_when, response)
    }
}

impl Match {
    /// Whether a response changes the charge: it settles the cost or ends a lease.
    pub(crate) fn has_outcome(&self) -> bool {
        self.rule.is_settled_later() || self.is_lease()
    }

    /// Whether a request holds a lease: one of the limits is `concurrent`.
    pub(crate) fn is_lease(&self) -> bool {
        matches!(&self.budget, Budget::Limits(limits) if limits.iter().any(is_concurrent))
    }
}

/// Whether a limit counts leases, not events.
pub(crate) fn is_concurrent(limit: &Limit) -> bool {
    matches!(limit.algorithm(), Algorithm::Concurrent(_))
}
