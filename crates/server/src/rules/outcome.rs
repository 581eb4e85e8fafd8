//! Costs that are known only when there is a response: whether it counts at all, and how much it
//! was.
//!
//! A rule takes its cost before a request goes on, as every rule does. Who sees the response, which
//! is the proxy, then settles what it came to: nothing if it is not among those that count, or what
//! was measured.

use std::sync::Arc;

use tidegate::{Algorithm, Limit};

use super::{Attributes, Budget, Match, Rule, holds};

/// By what a response is measured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Measure {
    /// The bytes of its body.
    Bytes,
    /// The milliseconds from the request to the end of its body.
    Millis,
    /// A number that a header has; what was taken stays taken if it has none.
    Header(Arc<str>),
}

/// What a response costs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settle {
    /// By what it is measured.
    pub by: Measure,
    /// So many of these are one unit of cost, rounded up.
    pub per: u64,
}

impl Settle {
    /// The cost of so many.
    pub fn cost(&self, measured: u64) -> u64 {
        measured.div_ceil(self.per)
    }
}

impl Rule {
    /// Whether its cost is known only when there is a response.
    pub fn is_settled_later(&self) -> bool {
        self.settle.is_some() || !self.charge_when.is_empty()
    }

    /// Whether a response counts.
    pub(crate) fn counts(&self, response: &impl Attributes) -> bool {
        holds(&self.charge_when, response)
    }
}

impl Match {
    /// Whether something is done about it when there is a response: its cost is settled, or its
    /// lease ends.
    pub(crate) fn has_outcome(&self) -> bool {
        self.rule.is_settled_later() || self.is_lease()
    }

    /// Whether a request holds a lease of it: one of its limits is `concurrent`.
    pub(crate) fn is_lease(&self) -> bool {
        matches!(&self.budget, Budget::Limits(limits) if limits.iter().any(is_concurrent))
    }
}

/// Whether a limit counts what is held, not what happens.
pub(crate) fn is_concurrent(limit: &Limit) -> bool {
    matches!(limit.algorithm(), Algorithm::Concurrent(_))
}
