//! What follows an allowed request: its true cost is settled, and its leases end.
//!
//! Dropping a [`Completion`] does what is left. It is dropped when the response is over, when the
//! client disconnects, and when the service fails.

use std::sync::Arc;

use tidegate_core::{Decision, Op, Timestamp, Verdict};

use super::budget_headers::BudgetHeaders;
use super::head::ResponseHead;
use super::layer::Setup;
use super::rule::{Meter, Payment};
use crate::store::{Charge, Check};

pub(super) struct Completion {
    pub(super) setup: Arc<Setup>,
    pub(super) check: Check<'static>,
    pub(super) decision: Decision,
    /// The charges that are still to be settled, and how.
    pub(super) payments: Vec<(usize, Payment)>,
    /// The charges that are leases.
    pub(super) leases: Vec<usize>,
    pub(super) started: Timestamp,
    /// The bytes of the response's body so far.
    pub(super) bytes: u64,
    pub(super) meter: Option<Meter>,
    pub(super) is_shadow: bool,
}

impl Completion {
    /// Whether there is nothing left to do.
    pub(super) fn is_done(&self) -> bool {
        self.payments.is_empty() && self.leases.is_empty()
    }

    /// Returns what the head of the response settles.
    pub(super) fn begin(&mut self, response: &ResponseHead<'_>) -> Option<Settlement> {
        let costs: Vec<(usize, u64)> = self
            .payments
            .iter()
            .filter_map(|(index, payment)| {
                let actual = match payment {
                    Payment::IfDue(is_due) => (!is_due(response)).then_some(0),
                    Payment::FromHead(cost) => cost(response),
                    _ => None,
                };
                Some((*index, actual?))
            })
            .collect();
        self.payments
            .retain(|(_, payment)| !matches!(payment, Payment::IfDue(_) | Payment::FromHead(_)));
        self.settlement(&costs)
    }

    fn settlement(&self, costs: &[(usize, u64)]) -> Option<Settlement> {
        let settled = |(index, actual): &(usize, u64)| {
            let charge = self.check.charges().get(*index)?;
            Some((*index, Charge { reserved: charge.cost, cost: *actual, ..charge.clone() }))
        };
        let (indices, charges): (Vec<usize>, Vec<Charge<'static>>) = costs
            .iter()
            .filter_map(settled)
            .filter(|(_, charge)| charge.reserved != charge.cost)
            .unzip();
        if charges.is_empty() {
            return None;
        }
        Some(Settlement { check: self.check.with_charges(charges).into_op(Op::Settle), indices })
    }

    /// Records the decision on a settlement, and returns the headers that follow from it.
    pub(super) fn settled(
        &mut self,
        settlement: &Settlement,
        decision: &Decision,
    ) -> Option<BudgetHeaders> {
        let mut verdicts: Vec<Verdict> = self.decision.verdicts().to_vec();
        for (index, verdict) in settlement.indices.iter().zip(decision.verdicts()) {
            verdicts[*index] = *verdict;
        }
        self.decision =
            Decision::of_many(verdicts, true, decision.at()).with_source(self.decision.source());
        (!self.is_shadow).then(|| self.setup.budget_headers(self.check.charges(), &self.decision))
    }
}

/// Charges whose true cost is known.
pub(super) struct Settlement {
    pub(super) check: Check<'static>,
    /// The index of each charge in the check of the request.
    indices: Vec<usize>,
}

impl Drop for Completion {
    fn drop(&mut self) {
        let store = Arc::clone(&self.setup.store);
        let elapsed_us = || u128::from(store.clock.now().micros_since(self.started));
        let costs: Vec<(usize, u64)> = self
            .payments
            .iter()
            .filter_map(|(index, payment)| {
                let actual = match payment {
                    // There was no response, so the true cost is unknown: the estimate stays.
                    Payment::Before | Payment::IfDue(_) | Payment::FromHead(_) => None,
                    Payment::Bytes(unit) => Some(self.bytes.div_ceil(*unit)),
                    Payment::Time(unit) => Some(
                        u64::try_from(elapsed_us().div_ceil(unit.as_micros())).unwrap_or(u64::MAX),
                    ),
                    Payment::Metered => self.meter.as_ref().and_then(Meter::read),
                };
                Some((*index, actual?))
            })
            .collect();
        if let Some(settlement) = self.settlement(&costs) {
            store.call_in_background(settlement.check);
        }
        if !self.leases.is_empty() {
            let leases = self
                .leases
                .iter()
                .filter_map(|index| self.check.charges().get(*index).cloned())
                .collect();
            store.release(self.check.with_charges(leases), self.decision.source());
        }
    }
}
