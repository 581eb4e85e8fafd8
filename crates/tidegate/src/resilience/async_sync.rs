//! Deciding from what the store said last, and charging afterwards. A state machine without a clock
//! or a store.
//!
//! What was let pass here and is not yet charged there is *unsynced*. It counts as used here, and
//! there is never more of it than a cap: a node at its cap charges first and asks then. So however
//! the nodes are timed and whatever is lost, no more than the cap of each other node is let pass
//! beyond the limit.

use tidegate_core::{Algorithm, Id, Limit, Timestamp, Verdict};

use super::last_answer::LastAnswer;
use crate::store::Charge;

/// How long a key that nobody asks about is remembered.
const IDLE_US: u64 = 10_000_000;

/// One key that is charged afterwards.
#[derive(Debug)]
pub(crate) struct Unsynced {
    pub(crate) charge: Charge<'static>,
    limit: u64,
    seen: Option<LastAnswer>,
    /// Let pass and not yet sent.
    units: u64,
    /// Sent and not yet answered, with the id under which it is sent again.
    sent: Option<(Id, u64)>,
    /// Somebody is waiting for that answer.
    sending: bool,
    last_asked: Timestamp,
}

/// What is decided here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Here {
    /// It may pass, and will be charged.
    Spent(Verdict),
    /// There is no room, as far as is known.
    Denied(Verdict),
    /// Nothing is known, or too much is not yet charged: the store must be asked.
    Ask,
}

/// The most that may be unsynced, unless told otherwise: together with the other nodes a part of
/// the limit; for one node all of it.
pub(crate) fn cap(limit: &Limit, error_per_mille: u64, nodes: u64) -> u64 {
    if nodes <= 1 {
        return limit.capacity();
    }
    let part =
        u128::from(limit.capacity()) * u128::from(error_per_mille) / 1000 / u128::from(nodes - 1);
    u64::try_from(part).unwrap_or(u64::MAX).max(1)
}

impl Unsynced {
    pub(crate) fn new(charge: Charge<'static>, limit: u64, now: Timestamp) -> Self {
        Unsynced {
            charge,
            limit,
            seen: None,
            units: 0,
            sent: None,
            sending: false,
            last_asked: now,
        }
    }

    /// Whether it is about the same limit. If not, what was seen is worth nothing; what is not yet
    /// charged is charged under the new one.
    pub(crate) fn is_under(&mut self, charge: &Charge<'_>, limit: u64) {
        if self.limit != limit {
            (self.limit, self.charge.limit, self.seen) = (limit, charge.limit, None);
        }
    }

    /// Units that were let pass and are not known to be charged.
    pub(crate) fn unsynced(&self) -> u64 {
        self.units + self.sent.map_or(0, |(_, units)| units)
    }

    pub(crate) fn spend(&mut self, cost: u64, cap: u64, now: Timestamp) -> Here {
        self.last_asked = now;
        let Some(seen) = self.seen else { return Here::Ask };
        let (limit, unsynced) = (&self.charge.limit, self.unsynced());
        let left = seen.left(limit, now).saturating_sub(unsynced);
        if cost > left {
            // Of a bucket or a window is known how it goes on by itself, with what was spent here.
            let denied = match limit.algorithm() {
                Algorithm::Bucket(_) | Algorithm::Window(_) => {
                    seen.strictest(limit, cost, unsynced, now)
                }
                _ => seen.expected(limit, cost, unsynced, now),
            };
            return denied.filter(|verdict| !verdict.allowed).map_or(Here::Ask, Here::Denied);
        }
        if unsynced.saturating_add(cost) > cap {
            return Here::Ask;
        }
        self.units += cost;
        let verdict = seen.verdict(limit, left - cost, unsynced + cost, now);
        Here::Spent(Verdict { granted: cost, ..verdict })
    }

    /// Takes back what was spent a moment ago, because the request was denied elsewhere, or because
    /// it is given back. Says how much of it was not charged yet.
    pub(crate) fn unspend(&mut self, cost: u64) -> u64 {
        let back = cost.min(self.units);
        self.units -= back;
        back
    }

    /// What is to be charged now, and under which id. Nothing, if somebody is doing that already.
    pub(crate) fn send(&mut self, fresh: Id) -> Option<(Id, u64)> {
        if self.sending || (self.units == 0 && self.sent.is_none()) {
            return None;
        }
        // What may have been charged already is sent under the same id, which is not charged twice.
        let sent = *self.sent.get_or_insert_with(|| (fresh, std::mem::take(&mut self.units)));
        self.sending = true;
        Some(sent)
    }

    /// It was charged.
    pub(crate) fn synced(&mut self, seen: LastAnswer) {
        (self.sent, self.sending) = (None, false);
        self.saw(seen);
    }

    /// The store had no answer, or no room for more debt: it is kept and sent again.
    pub(crate) fn not_synced(&mut self, charged: bool) {
        self.sending = false;
        if !charged && let Some((_, units)) = self.sent.take() {
            self.units += units;
        }
    }

    /// The store has said how things stand.
    pub(crate) fn saw(&mut self, seen: LastAnswer) {
        if seen.limit == self.limit && self.seen.is_none_or(|known| known.sent <= seen.sent) {
            self.seen = Some(seen);
        }
    }

    /// Everything was forgotten there.
    pub(crate) fn reset(&mut self) {
        (self.units, self.seen) = (0, None);
    }

    /// Whether nobody would miss it.
    pub(crate) fn is_idle(&self, now: Timestamp) -> bool {
        self.unsynced() == 0 && !self.sending && now.micros_since(self.last_asked) >= IDLE_US
    }
}
