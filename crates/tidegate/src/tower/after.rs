//! What is done for a request after it was let pass: its true cost is paid, its lease ends.
//!
//! It happens whatever becomes of the request. Who holds this drops it when the response is over,
//! when the client has gone, or when the service has failed, and dropping does the rest.

use std::sync::Arc;

use tidegate_core::{Decision, Op, Timestamp, Verdict};

use super::head::ResponseHead;
use super::layer::Setup;
use super::rule::{Meter, Pay};
use super::tell::Tell;
use crate::store::{Charge, Check};

pub(super) struct After {
    pub(super) setup: Arc<Setup>,
    pub(super) check: Check<'static>,
    pub(super) decision: Decision,
    /// Which charges are still to be paid, and how.
    pub(super) pays: Vec<(usize, Pay)>,
    /// Which charges are leases.
    pub(super) leases: Vec<usize>,
    pub(super) started: Timestamp,
    /// Of the response's body, so far.
    pub(super) bytes: u64,
    pub(super) meter: Option<Meter>,
    pub(super) shadow: bool,
    /// There is a response.
    pub(super) begun: bool,
}

impl After {
    /// Whether everything is done.
    pub(super) fn is_done(&self) -> bool {
        self.pays.is_empty() && self.leases.is_empty()
    }

    /// The response has begun: what there is to settle now.
    pub(super) fn begin(&mut self, response: &ResponseHead<'_>) -> Option<Settlement> {
        self.begun = true;
        let costs: Vec<(usize, u64)> = self
            .pays
            .iter()
            .filter_map(|(index, pay)| {
                let actual = match pay {
                    Pay::When(due) => (!due(response)).then_some(0),
                    Pay::Told(cost) => cost(response),
                    _ => None,
                };
                Some((*index, actual?))
            })
            .collect();
        self.pays.retain(|(_, pay)| !matches!(pay, Pay::When(_) | Pay::Told(_)));
        self.settlement(&costs)
    }

    fn settlement(&self, costs: &[(usize, u64)]) -> Option<Settlement> {
        let paid = |(index, actual): &(usize, u64)| {
            let charge = self.check.charges().get(*index)?;
            Some((*index, Charge { reserved: charge.cost, cost: *actual, ..charge.clone() }))
        };
        let (indices, charges): (Vec<usize>, Vec<Charge<'static>>) = costs
            .iter()
            .filter_map(paid)
            .filter(|(_, charge)| charge.reserved != charge.cost)
            .unzip();
        if charges.is_empty() {
            return None;
        }
        Some(Settlement { check: self.check.with_charges(charges).into_op(Op::Settle), indices })
    }

    /// What clients are told, now that something has been settled.
    pub(super) fn settled(&mut self, settlement: &Settlement, decision: &Decision) -> Option<Tell> {
        let mut verdicts: Vec<Verdict> = self.decision.charges().to_vec();
        for (index, verdict) in settlement.indices.iter().zip(decision.charges()) {
            verdicts[*index] = *verdict;
        }
        self.decision =
            Decision::of_many(verdicts, true, decision.at()).with_source(self.decision.source());
        (!self.shadow).then(|| self.setup.tell(self.check.charges(), &self.decision))
    }
}

/// Costs that have become known.
pub(super) struct Settlement {
    pub(super) check: Check<'static>,
    /// Which charge of the whole each of its charges is.
    indices: Vec<usize>,
}

impl Drop for After {
    fn drop(&mut self) {
        let store = Arc::clone(&self.setup.store);
        let elapsed_us = || u128::from(store.clock.now().micros_since(self.started));
        let costs: Vec<(usize, u64)> = self
            .pays
            .iter()
            .filter_map(|(index, pay)| {
                let actual = match pay {
                    // Nobody knows what it would have come to: what was taken stays taken.
                    Pay::Before | Pay::When(_) | Pay::Told(_) => None,
                    Pay::Bytes(unit) => Some(self.bytes.div_ceil(*unit)),
                    Pay::Time(unit) => Some(
                        u64::try_from(elapsed_us().div_ceil(unit.as_micros())).unwrap_or(u64::MAX),
                    ),
                    Pay::Metered => self.meter.as_ref().and_then(Meter::read),
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
