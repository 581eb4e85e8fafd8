//! Concurrency: leases in flight, each of which ends when it is released or when its time is up.
//!
//! Nobody has to clean up after a crash: a lease that is never released stops counting after its ttl.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::cmp::max;

use super::Kernel;
use super::pieces::{take_back, until_ended};
use crate::Id;
use crate::exact::exact_sum;
use crate::time::Timestamp;

/// The parameters of a concurrency limit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Concurrent {
    /// How much at once.
    pub amount: u64,
    /// How long a lease lives that nobody releases, in microseconds.
    pub ttl: u64,
}

/// What a concurrency limit keeps for a key: the leases that live, in the order in which they end.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Leases {
    leases: BTreeMap<Place, Lease>,
    /// Where the lease of an id is; those that nobody named are not in it.
    places: BTreeMap<Id, Place>,
    total: u64,
    newest: Timestamp,
    granted: u64,
}

/// When a lease ends, and how many were granted before it.
pub(crate) type Place = (Timestamp, u64);

/// One lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lease {
    /// Whose it is.
    pub id: Id,
    /// How much it holds.
    pub cost: u64,
    /// The first moment at which it no longer counts.
    pub deadline: Timestamp,
}

impl Leases {
    /// The nodes of a tree are half full at least.
    pub(crate) fn heap_bytes(&self) -> usize {
        let (leases, places) = (size_of::<(Place, Lease)>(), size_of::<(Id, Place)>());
        2 * (self.leases.len() * leases + self.places.len() * places)
    }

    /// How many were granted so far, and with each lease how many were before it.
    pub(crate) fn parts(&self) -> (u64, impl Iterator<Item = (u64, Lease)> + '_) {
        (self.granted, self.leases.iter().map(|((_, number), lease)| (*number, *lease)))
    }

    /// Those of somebody who kept them elsewhere; `None` if they come to too much, or two are one.
    pub(crate) fn from_parts(leases: &[(u64, Lease)], newest: Timestamp, granted: u64) -> Option<Self> {
        exact_sum(leases.iter().map(|(_, lease)| lease.cost))?;
        let mut own = Leases { newest, granted, ..Leases::default() };
        for (number, lease) in leases {
            let place = (lease.deadline, *number);
            let is_another = *number < granted && !own.leases.contains_key(&place);
            if !is_another || (lease.id != Id::NONE && own.holds(lease.id)) {
                return None;
            }
            own.put(place, *lease);
        }
        Some(own)
    }

    /// The leases, the one that ends first at the front.
    pub fn iter(&self) -> impl Iterator<Item = Lease> + '_ {
        self.leases.values().copied()
    }

    /// What they hold together.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// When the newest of them was granted.
    pub fn newest(&self) -> Timestamp {
        self.newest
    }

    /// Whether `id` holds a lease.
    pub(crate) fn holds(&self, id: Id) -> bool {
        self.places.contains_key(&id)
    }

    /// What the lease of `id` holds.
    pub(crate) fn held(&self, id: Id) -> u64 {
        self.places.get(&id).and_then(|place| self.leases.get(place)).map_or(0, |lease| lease.cost)
    }

    /// Ends the lease of `id` and returns what it held: nothing, if it has ended already.
    pub(crate) fn release(&mut self, id: Id) -> u64 {
        let lease = self.places.remove(&id).and_then(|place| self.leases.remove(&place));
        let held = lease.map_or(0, |lease| lease.cost);
        self.total -= held;
        held
    }

    pub(crate) fn idle_at(&self) -> Timestamp {
        self.leases.last_key_value().map_or(Timestamp::EPOCH, |((end, _), _)| *end)
    }

    /// The leases that [`age`](Leases::age) will forget, and where they were.
    pub(crate) fn ended(&self, now: Timestamp) -> Vec<(Place, Lease)> {
        let now = max(now, self.newest);
        let ended = self.leases.iter().take_while(|(_, lease)| lease.deadline <= now);
        ended.map(|(place, lease)| (*place, *lease)).collect()
    }

    /// Forgets the leases whose time is up; needs no parameters, because each lease knows its own deadline.
    pub(crate) fn age(&mut self, now: Timestamp) -> Timestamp {
        let now = if self.leases.is_empty() { now } else { max(now, self.newest) };
        while let Some(first) = self.leases.first_entry().filter(|first| first.get().deadline <= now) {
            let lease = first.remove();
            self.places.remove(&lease.id);
            self.total -= lease.cost;
        }
        now
    }

    /// The newest lease was granted at `now`, and every lease lives on for as long as it would have from then.
    pub(crate) fn rebase(&mut self, now: Timestamp) {
        let by_us = self.newest.micros_since(now);
        let Leases { leases, granted, newest, .. } = core::mem::take(self);
        (self.granted, self.newest) = (granted, newest.minus(by_us));
        for ((_, number), lease) in leases {
            let deadline = lease.deadline.minus(by_us);
            self.put((deadline, number), Lease { deadline, ..lease });
        }
    }

    /// Puts back what [`age`](Kernel::age) took.
    pub(crate) fn restore(&mut self, ended: Vec<(Place, Lease)>) {
        for (place, lease) in ended {
            self.put(place, lease);
        }
    }

    fn put(&mut self, place: Place, lease: Lease) {
        self.total += lease.cost;
        self.leases.insert(place, lease);
        if lease.id != Id::NONE {
            self.places.insert(lease.id, place);
        }
    }
}

impl Kernel for Concurrent {
    type State = Leases;

    #[inline(always)]
    fn capacity(&self) -> u64 {
        self.amount
    }

    fn age(&self, state: &mut Leases, now: Timestamp) -> Timestamp {
        state.age(now)
    }

    fn room(&self, state: &Leases, _now: Timestamp, ceiling: u64) -> u64 {
        ceiling.saturating_sub(state.total)
    }

    fn charge(&self, state: &mut Leases, now: Timestamp, cost: u64, id: Id) -> Timestamp {
        let cost = cost.min(crate::time::EXACT - 1 - state.total);
        let deadline = now.plus(self.ttl);
        // In order of their ends: after a change of ttl an older lease may outlive a newer one.
        state.put((deadline, state.granted), Lease { id, cost, deadline });
        state.granted += 1;
        state.newest = now;
        now
    }

    fn wait(&self, state: &Leases, now: Timestamp, cost: u64, ceiling: u64) -> u64 {
        let over = state.total.saturating_sub(ceiling - cost);
        if over == state.total {
            return state.idle_at().micros_since(now); // all of it must go: no need to count
        }
        until_ended(over, state.iter().map(|lease| (lease.cost, lease.deadline)), now)
    }

    fn give_back(&self, state: &mut Leases, _now: Timestamp, units: u64, _charged_at: Option<Timestamp>) -> u64 {
        let back = take_back(units, state.leases.values_mut().rev().map(|lease| &mut lease.cost));
        let Leases { leases, places, total, .. } = state;
        leases.retain(|_, lease| {
            if lease.cost == 0 {
                places.remove(&lease.id);
            }
            lease.cost > 0
        });
        *total -= back;
        back
    }

    fn idle_at(&self, state: &Leases) -> Timestamp {
        state.idle_at()
    }
}
