//! What one limit did to a trace, in sums.

use tidegate_core::Decision;

use super::Event;
use super::timeline::{Flow, Timeline};

#[derive(Debug, Default)]
pub(super) struct Summary {
    /// Requests that asked for something.
    pub(super) offered: u64,
    pub(super) allowed: u64,
    pub(super) denied: u64,
    /// Looks, refunds and resets.
    pub(super) others: u64,
    /// Units asked for and granted, if anything cost more than one.
    pub(super) units_offered: u128,
    pub(super) units_granted: u128,
    /// When a request was first denied.
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

    /// The share of requests that passed, in tenths of a per cent, rounded down.
    pub(super) fn share_permille(&self) -> Option<u64> {
        let permille = (u128::from(self.allowed) * 1000).checked_div(u128::from(self.offered))?;
        u64::try_from(permille).ok()
    }

    /// The same in words: `55.0%`.
    pub(super) fn share(&self) -> String {
        self.share_permille()
            .map_or("-".into(), |permille| format!("{}.{}%", permille / 10, permille % 10))
    }

    /// Whether requests and units are different things in this trace.
    pub(super) fn has_costs(&self) -> bool {
        self.units_offered != u128::from(self.offered)
    }
}
