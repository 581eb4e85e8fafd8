//! Async mode: decide from the store's last answer, charge afterwards. A state machine without a
//! clock and a store.
//!
//! Units that were allowed here and are not charged yet are *unsynced*. They count as used here,
//! and a key never has more of them than a cap: at the cap, the node charges first and then lets
//! the store decide. So however the nodes are timed and whatever is lost, each other node allows at
//! most its cap beyond the limit.

use tidegate_core::{Algorithm, Id, Limit, Timestamp, Verdict};

use super::last_answer::LastAnswer;
use crate::store::Charge;

/// How long a key without requests is kept.
const IDLE_US: u64 = 10_000_000;

/// One key in async mode.
#[derive(Debug)]
pub(crate) struct UnsyncedKey {
    pub(crate) charge: Charge<'static>,
    limit: u64,
    last_answer: Option<LastAnswer>,
    /// Units allowed and not sent.
    units: u64,
    /// Units sent and not known to be charged, with the id under which they are sent again.
    sent: Option<(Id, u64)>,
    /// Whether a call is in flight.
    is_sending: bool,
    last_request: Timestamp,
}

/// The local answer to a charge in async mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AsyncVerdict {
    /// It is allowed and will be charged.
    Spent(Verdict),
    /// It does not fit, as far as is known.
    Denied(Verdict),
    /// Nothing is known, or the key is at its cap: the store must decide.
    NeedsStore,
}

/// The most units of a key that may be unsynced by default: the other nodes together a part of the
/// limit, a single node all of it.
pub(crate) fn default_cap(limit: &Limit, error_per_mille: u64, nodes: u64) -> u64 {
    if nodes <= 1 {
        return limit.capacity();
    }
    let part =
        u128::from(limit.capacity()) * u128::from(error_per_mille) / 1000 / u128::from(nodes - 1);
    u64::try_from(part).unwrap_or(u64::MAX).max(1)
}

impl UnsyncedKey {
    pub(crate) fn new(charge: Charge<'static>, limit: u64, now: Timestamp) -> Self {
        UnsyncedKey {
            charge,
            limit,
            last_answer: None,
            units: 0,
            sent: None,
            is_sending: false,
            last_request: now,
        }
    }

    /// Sets the limit. A new limit drops the last answer; unsynced units are charged under the new
    /// one.
    pub(crate) fn set_limit(&mut self, charge: &Charge<'_>, limit: u64) {
        if self.limit != limit {
            (self.limit, self.charge.limit, self.last_answer) = (limit, charge.limit, None);
        }
    }

    /// Units that were allowed and are not known to be charged.
    pub(crate) fn unsynced(&self) -> u64 {
        self.units + self.sent.map_or(0, |(_, units)| units)
    }

    pub(crate) fn spend(&mut self, cost: u64, cap: u64, now: Timestamp) -> AsyncVerdict {
        self.last_request = now;
        let Some(answer) = self.last_answer else { return AsyncVerdict::NeedsStore };
        let (limit, unsynced) = (&self.charge.limit, self.unsynced());
        let left = answer.left(limit, now).saturating_sub(unsynced);
        if cost > left {
            // The future of a bucket or a window is known, also with what was spent here.
            let denied = match limit.algorithm() {
                Algorithm::Bucket(_) | Algorithm::Window(_) => {
                    answer.strictest(limit, cost, unsynced, now)
                }
                _ => answer.expected(limit, cost, unsynced, now),
            };
            return denied
                .filter(|verdict| !verdict.allowed)
                .map_or(AsyncVerdict::NeedsStore, AsyncVerdict::Denied);
        }
        if unsynced.saturating_add(cost) > cap {
            return AsyncVerdict::NeedsStore;
        }
        self.units += cost;
        let verdict = answer.verdict(limit, left - cost, unsynced + cost, now);
        AsyncVerdict::Spent(Verdict { granted: cost, ..verdict })
    }

    /// Takes back units of a check that was denied, or that are refunded. Returns how many of them
    /// were not sent yet.
    pub(crate) fn unspend(&mut self, cost: u64) -> u64 {
        let back = cost.min(self.units);
        self.units -= back;
        back
    }

    /// Begins a call: the units to charge and their id. None if a call is in flight already.
    pub(crate) fn send(&mut self, fresh: Id) -> Option<(Id, u64)> {
        if self.is_sending || (self.units == 0 && self.sent.is_none()) {
            return None;
        }
        // Units that may be charged already are sent under the same id, which charges them once.
        let sent = *self.sent.get_or_insert_with(|| (fresh, std::mem::take(&mut self.units)));
        self.is_sending = true;
        Some(sent)
    }

    /// Records that the call charged its units.
    pub(crate) fn synced(&mut self, answer: LastAnswer) {
        (self.sent, self.is_sending) = (None, false);
        self.record(answer);
    }

    /// Records that the call had no answer or that the limit had no room for the debt: its units
    /// are sent again, under the same id if they may have been charged.
    pub(crate) fn not_synced(&mut self, may_be_charged: bool) {
        self.is_sending = false;
        if !may_be_charged && let Some((_, units)) = self.sent.take() {
            self.units += units;
        }
    }

    /// Records an answer of the store, unless a newer one is known.
    pub(crate) fn record(&mut self, answer: LastAnswer) {
        if answer.limit == self.limit
            && self.last_answer.is_none_or(|known| known.sent <= answer.sent)
        {
            self.last_answer = Some(answer);
        }
    }

    /// Drops everything: the key was reset in the store.
    pub(crate) fn reset(&mut self) {
        (self.units, self.last_answer) = (0, None);
    }

    /// Whether the key can be removed.
    pub(crate) fn is_idle(&self, now: Timestamp) -> bool {
        self.unsynced() == 0 && !self.is_sending && now.micros_since(self.last_request) >= IDLE_US
    }
}
