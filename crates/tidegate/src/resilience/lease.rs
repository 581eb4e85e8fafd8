//! Leases: units of a budget that this node takes ahead and spends itself. A state machine without
//! a clock and a store.
//!
//! A key in steady demand gets a lease: a background call takes as many units as the key needs for
//! a short interval, at most what this node may hold. The store charges them immediately, so no
//! other node can spend them; here they can be spent until they expire. A request that finds none
//! left waits for units in flight, if there are any. Without them, or if they are too few, it calls
//! the store like a request without a lease.

use std::collections::VecDeque;
use std::sync::Arc;

use tidegate_core::{Algorithm, Id, Limit, Timestamp, Verdict};
use tokio::sync::Notify;

use super::last_answer::LastAnswer;
use crate::store::Charge;

/// The interval over which demand is measured; units are taken ahead for about as long.
const INTERVAL_US: u64 = 100_000;
/// Less demand than this in an interval is not worth a lease.
const MIN_DEMAND: u64 = 4;
/// A lease smaller than this is renewed only when no units are left.
const SMALL_LEASE: u64 = 100;
/// How long units of a lease can be spent.
pub(crate) const LIFETIME_US: u64 = 1_000_000;
/// How much the end of a window can be off on this machine's clock.
const CLOCK_SLACK_US: u64 = 10_000;
/// Units of a lease that is not spent for this long are returned.
const IDLE_US: u64 = 250_000;
/// Units that expire within this time are returned.
const EXPIRING_US: u64 = 100_000;
/// A single node may hold this many times its part.
const SINGLE_NODE: u128 = 5;
/// The pause after the store granted nothing.
const PAUSE_US: u64 = 20_000;

/// The lease of one key.
#[derive(Debug)]
pub(crate) struct KeyLease {
    pub(crate) charge: Charge<'static>,
    limit: u64,
    grants: VecDeque<Grant>,
    /// Units of calls in flight.
    taking: u64,
    /// When the next call may be made.
    not_before: Timestamp,
    last_answer: Option<LastAnswer>,
    /// The start of the current interval, and the demand in it and in the one before.
    interval: Timestamp,
    demand: u64,
    demand_before: u64,
    last_request: Timestamp,
    last_spent: Timestamp,
    /// Wakes the requests that wait for calls in flight.
    taken: Arc<Notify>,
}

/// Units that one call has taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Grant {
    pub(crate) id: Id,
    pub(crate) left: u64,
    /// The units at the start.
    taken: u64,
    expires: Timestamp,
}

impl Grant {
    /// Units that the store may have charged and that will not be spent.
    pub(crate) fn unused(id: Id, units: u64) -> Self {
        Grant { id, left: units, taken: units, expires: Timestamp::EPOCH }
    }

    pub(crate) fn can_be_returned(&self) -> bool {
        self.id != Id::NONE && self.left > 0
    }

    /// Whether no unit was spent. Only a whole grant can be returned twice without harm: the store
    /// returns at most what an id has charged, so 3 of 5 units returned twice would return all 5.
    pub(crate) fn is_whole(&self) -> bool {
        self.left == self.taken
    }
}

/// The most units one node may hold, so that no more than a part of the limit is allowed too early
/// or denied unnecessarily.
///
/// Where taking ahead moves a charge in time, all nodes together may hold that part. Units of a
/// window are not spent after its end, and a slow bucket drains no more than that part while a
/// lease lives: there only the units of the *other* nodes are denied unnecessarily. A single node
/// denies nothing unnecessarily and may hold a few times as much: what is lost when it crashes.
pub(crate) fn max_held(limit: &Limit, error_per_mille: u64, nodes: u64) -> u64 {
    let part = u128::from(limit.capacity()) * u128::from(error_per_mille) / 1000;
    let moves_in_time = match limit.algorithm() {
        Algorithm::Window(_) => false,
        Algorithm::Bucket(bucket) => {
            u128::from(LIFETIME_US) * u128::from(bucket.amount) > part * u128::from(bucket.period)
        }
        _ => true,
    };
    let part = match nodes {
        0 | 1 if !moves_in_time => part * SINGLE_NODE,
        nodes if !moves_in_time => part / u128::from(nodes - 1),
        nodes => part / u128::from(nodes.max(1)),
    };
    u64::try_from(part).unwrap_or(u64::MAX).min(limit.capacity())
}

/// Whether units of a limit can be taken ahead.
pub(crate) fn can_be_taken_ahead(limit: &Limit) -> bool {
    !limit.counts_rejected() && !matches!(limit.algorithm(), Algorithm::Concurrent(_))
}

impl KeyLease {
    pub(crate) fn new(charge: Charge<'static>, limit: u64, now: Timestamp) -> Self {
        KeyLease {
            charge,
            limit,
            grants: VecDeque::new(),
            taking: 0,
            not_before: now,
            last_answer: None,
            interval: now,
            demand: 0,
            demand_before: 0,
            last_request: now,
            last_spent: now,
            taken: Arc::default(),
        }
    }

    /// Whether this is a lease under that limit.
    pub(crate) fn is_under(&self, limit: u64) -> bool {
        self.limit == limit
    }

    /// The units that can be spent.
    pub(crate) fn held(&self) -> u64 {
        self.grants.iter().map(|grant| grant.left).sum()
    }

    /// Drops expired units and returns their number.
    pub(crate) fn expire(&mut self, now: Timestamp) -> u64 {
        let before = self.held();
        self.grants.retain(|grant| now < grant.expires && grant.left > 0);
        before - self.held()
    }

    /// Spends `cost` if enough units are held, and returns the verdict for the client.
    pub(crate) fn spend(&mut self, cost: u64, now: Timestamp) -> Option<Verdict> {
        self.record_demand(cost, now);
        if self.held() < cost {
            return None;
        }
        let mut due = cost;
        for grant in &mut self.grants {
            let part = due.min(grant.left);
            (grant.left, due) = (grant.left - part, due - part);
        }
        self.grants.retain(|grant| grant.left > 0);
        self.last_spent = now;
        let (limit, held) = (&self.charge.limit, self.held());
        let answer = self.last_answer?;
        let remaining = answer.left(limit, now).saturating_add(held).min(limit.capacity());
        Some(Verdict { granted: cost, ..answer.verdict(limit, remaining, 0, now) })
    }

    /// Puts back units that were spent for a check that was denied. Returns whether they have not
    /// expired at `expires`.
    pub(crate) fn unspend(&mut self, cost: u64, expires: Timestamp, now: Timestamp) -> bool {
        if now >= expires {
            return false;
        }
        match self.grants.iter_mut().find(|grant| grant.expires == expires) {
            Some(grant) => grant.left += cost,
            // Their grant is used up: they can be spent but no longer returned.
            None => {
                self.grants.push_front(Grant { id: Id::NONE, left: cost, taken: cost, expires })
            }
        }
        true
    }

    /// When the units that are spent next expire.
    pub(crate) fn expires(&self) -> Timestamp {
        self.grants.front().map_or(Timestamp::EPOCH, |grant| grant.expires)
    }

    fn record_demand(&mut self, cost: u64, now: Timestamp) {
        self.last_request = now;
        let passed_us = now.micros_since(self.interval);
        if passed_us >= INTERVAL_US {
            self.demand_before = if passed_us < 2 * INTERVAL_US { self.demand } else { 0 };
            (self.interval, self.demand) = (now, 0);
        }
        self.demand = self.demand.saturating_add(cost);
    }

    /// The units to take from the store now, if any; at most `max` may be held.
    pub(crate) fn units_to_take(&mut self, max: u64, now: Timestamp) -> Option<u64> {
        let demand = self.demand.max(self.demand_before);
        if demand < MIN_DEMAND || now < self.not_before {
            return None;
        }
        // Enough for two intervals; taken when half of it is spent, so that it does not run out
        // meanwhile, and again when half of the units in flight would be. A small lease would be
        // spent before more arrives: then each call takes as much as may be held. Units in flight
        // count as held, because the store may have charged them already.
        let wanted = demand.saturating_mul(2).min(max);
        let held = self.held().saturating_add(self.taking);
        let low = if wanted < SMALL_LEASE { 0 } else { wanted / 2 };
        if wanted < 2 || held > low {
            return None;
        }
        let units = wanted - held;
        self.taking += units;
        Some(units)
    }

    /// The notification of the calls in flight, if there are any.
    pub(crate) fn taking(&self) -> Option<Arc<Notify>> {
        (self.taking > 0).then(|| Arc::clone(&self.taken))
    }

    /// Records that the store granted `granted` of the `wanted` units of a call.
    pub(crate) fn granted(&mut self, id: Id, wanted: u64, granted: u64, answer: LastAnswer) {
        self.taking = self.taking.saturating_sub(wanted);
        self.taken.notify_waiters();
        self.last_answer = Some(answer);
        if granted == 0 {
            self.not_before = answer.answered.after_micros(PAUSE_US);
            return;
        }
        // Counted from when the call was sent: the store charged them later than that.
        let mut expires = answer.sent.after_micros(LIFETIME_US);
        if let Algorithm::Window(_) = self.charge.limit.algorithm() {
            // Units of one window are not spent in the next.
            let end = answer.reset_at().as_micros().saturating_sub(CLOCK_SLACK_US);
            expires = expires.min(Timestamp::from_micros(end));
        }
        self.grants.push_back(Grant { id, left: granted, taken: granted, expires });
        self.last_spent = answer.answered;
    }

    /// Records that a call for `wanted` units had no answer.
    pub(crate) fn not_granted(&mut self, wanted: u64, now: Timestamp) {
        self.taking = self.taking.saturating_sub(wanted);
        self.taken.notify_waiters();
        self.not_before = now.after_micros(PAUSE_US);
    }

    /// Removes the grants to return to the store now: unused ones, or all.
    pub(crate) fn take_unused(&mut self, all: bool, now: Timestamp) -> Vec<Grant> {
        let is_unused = all || now.micros_since(self.last_spent) >= IDLE_US;
        let is_due = |grant: &Grant| is_unused || grant.expires.micros_since(now) <= EXPIRING_US;
        let due = self.grants.iter().copied().filter(is_due).collect();
        self.grants.retain(|grant| !is_due(grant));
        due
    }

    /// Whether the lease can be removed.
    pub(crate) fn is_idle(&self, now: Timestamp) -> bool {
        self.grants.is_empty()
            && self.taking == 0
            && now.micros_since(self.last_request) >= 10 * LIFETIME_US
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_units_held_follow_from_the_error_they_can_cause() {
        for (limit, nodes, expected) in [
            ("2000/h window", 1, 100),
            ("2000/h window", 2, 20),
            ("4000/h window", 2, 40),
            ("4000/h window", 5, 10),
            ("2000/h", 1, 100),
            ("4000/h", 2, 40),
            // These limits are so fast that a lease moves more than its part in time.
            ("2000/s", 1, 20),
            ("4000/s", 2, 20),
            ("4000/99s", 2, 20),
            ("4000/100s", 2, 40),
            ("2000/h sliding step 1m", 1, 20),
            ("4000/h log", 2, 20),
            ("10/h window", 1, 0),
        ] {
            assert_eq!(
                max_held(&limit.parse().unwrap(), 10, nodes),
                expected,
                "{limit} over {nodes}"
            );
        }
    }

    /// Units held and in flight together never exceed the maximum, in whatever order answers arrive.
    #[test]
    fn units_in_flight_count_as_held() {
        let limit: Limit = "1000000/h window".parse().unwrap();
        let limits: tidegate_core::Limits = "1000000/h window".parse().unwrap();
        let check = crate::store::Check::new().charge("k", &limits, 1);
        let charge = check.charges()[0].clone().into_owned();
        let max = max_held(&limit, 1, 2);
        assert_eq!(max, 1000);
        let mut now = Timestamp::from_secs(1);
        let mut lease = KeyLease::new(charge, 1, now);
        let (mut in_flight, mut random) = (VecDeque::new(), 1_u64);
        let (mut calls, mut spent, mut most_in_flight) = (0, 0, 0);
        for _ in 0..100_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            now = now.after_micros(random >> 62);
            spent += u64::from(lease.spend(1, now).is_some());
            if let Some(units) = lease.units_to_take(max, now) {
                in_flight.push_back(units);
                calls += 1;
            }
            most_in_flight = most_in_flight.max(in_flight.len());
            assert!(lease.held() + in_flight.iter().sum::<u64>() <= max);
            if (random >> 32).is_multiple_of(100)
                && let Some(units) = in_flight.pop_front()
            {
                let verdict = Verdict {
                    remaining: 1000,
                    reset_after_us: 1_000_000_000,
                    ..Verdict::default()
                };
                lease.granted(Id(calls), units, units, LastAnswer::new(1, &verdict, now, now, now));
            }
        }
        assert!(most_in_flight >= 2, "a call is made while another is in flight");
        assert!(spent > 90_000, "{spent} were spent in {calls} calls");
    }
}
