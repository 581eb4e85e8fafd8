//! The totals of one limit over a trace.

use tidegate_core::Decision;

use super::Event;
use super::timeline::{Flow, Timeline};

#[derive(Debug, Default)]
pub(super) struct Summary {
    /// Requests that requested units.
    pub(super) offered: u64,
    pub(super) allowed: u64,
    pub(super) denied: u64,
    /// Peeks, refunds and resets.
    pub(super) others: u64,
    /// Units requested and granted, if any request cost more than one.
    pub(super) units_offered: u128,
    pub(super) units_granted: u128,
    /// The time of the first denial.
    pub(super) first_denial_us: Option<u64>,
    pub(super) timeline: Timeline,
}

impl Summary {
    pub(super) fn add(&mut self, event: &Event, decision: &Decision) {
        if !event.is_offer() {
            self.others += 1;
            return;
        }
        self.offered += 1;
        if decision.allowed() {
            self.allowed += 1;
        } else {
            self.denied += 1;
            self.first_denial_us.get_or_insert(event.at_us);
        }
        let granted = if decision.allowed() { decision.granted().min(event.cost) } else { 0 };
        self.units_offered += u128::from(event.cost);
        self.units_granted += u128::from(granted);
        self.timeline.add(event.at_us, Flow { allowed: granted, denied: event.cost - granted });
    }

    /// The share of allowed requests, in tenths of a per cent, rounded down.
    pub(super) fn share_permille(&self) -> Option<u64> {
        let permille = (u128::from(self.allowed) * 1000).checked_div(u128::from(self.offered))?;
        u64::try_from(permille).ok()
    }

    /// The share as text: `55.0%`.
    pub(super) fn share(&self) -> String {
        self.share_permille()
            .map_or("-".into(), |permille| format!("{}.{}%", permille / 10, permille % 10))
    }

    /// Whether any request cost more than one unit.
    pub(super) fn has_costs(&self) -> bool {
        self.units_offered != u128::from(self.offered)
    }
}
