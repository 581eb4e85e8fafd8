//! Concurrency: leases in flight, each of which ends when it is released or when its time is up.
//!
//! A crash needs no cleanup: a lease that is never released stops counting after its ttl.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::cmp::max;

use super::Kernel;
use super::pieces::{take_back, until_ended};
use crate::Id;
use crate::exact::exact_sum;
use crate::state::block;
use crate::time::Timestamp;

/// The parameters of a concurrency limit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Concurrent {
    /// The most units in use at the same time.
    pub amount: u64,
    /// The microseconds after which a lease ends that is not released.
    pub ttl: u64,
}

/// The state of a concurrency limit for one key: the live leases, in the order in which they end.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Leases {
    leases: Kept,
    total: u64,
    newest: Timestamp,
    granted: u64,
}

/// When a lease ends, and how many were granted before it.
pub(crate) type Place = (Timestamp, u64);

/// One lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lease {
    /// The id of the lease.
    pub id: Id,
    /// The units that it holds.
    pub cost: u64,
    /// The first time at which it no longer counts.
    pub deadline: Timestamp,
}

impl Leases {
    pub(crate) fn heap_bytes(&self) -> usize {
        self.leases.heap_bytes()
    }

    /// How many were granted so far, and with each lease how many were before it.
    pub(crate) fn parts(&self) -> (u64, impl Iterator<Item = (u64, Lease)> + '_) {
        (self.granted, self.leases.iter().map(|((_, number), lease)| (number, lease)))
    }

    /// Leases that a store has kept; `None` if their sum is too large or two have the same id.
    pub(crate) fn from_parts(
        leases: &[(u64, Lease)],
        newest: Timestamp,
        granted: u64,
    ) -> Option<Self> {
        exact_sum(leases.iter().map(|(_, lease)| lease.cost))?;
        let mut own = Leases { newest, granted, ..Leases::default() };
        for (number, lease) in leases {
            let place = (lease.deadline, *number);
            let is_another = *number < granted && !own.leases.has(place);
            if !is_another || (lease.id != Id::NONE && own.holds(lease.id)) {
                return None;
            }
            own.put(place, *lease);
        }
        Some(own)
    }

    /// The leases, the one that ends first at the front.
    pub fn iter(&self) -> impl Iterator<Item = Lease> + '_ {
        self.leases.iter().map(|(_, lease)| lease)
    }

    /// The units that all leases hold.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The time at which the newest lease was granted.
    pub fn newest(&self) -> Timestamp {
        self.newest
    }

    /// Whether `id` holds a lease.
    pub(crate) fn holds(&self, id: Id) -> bool {
        self.leases.place_of(id).is_some()
    }

    /// The units that the lease of `id` holds.
    pub(crate) fn held(&self, id: Id) -> u64 {
        self.leases
            .place_of(id)
            .and_then(|place| self.leases.get(place))
            .map_or(0, |lease| lease.cost)
    }

    /// Ends the lease of `id` and returns what it held: nothing, if it has ended already.
    pub(crate) fn release(&mut self, id: Id) -> u64 {
        let lease = self.leases.place_of(id).and_then(|place| self.leases.remove(place));
        let held = lease.map_or(0, |lease| lease.cost);
        self.total -= held;
        held
    }

    pub(crate) fn idle_at(&self) -> Timestamp {
        self.leases.last().map_or(Timestamp::EPOCH, |(end, _)| end)
    }

    /// The leases that [`age`](Leases::age) removes, and their places.
    pub(crate) fn ended(&self, now: Timestamp) -> Vec<(Place, Lease)> {
        let now = max(now, self.newest);
        self.leases.iter().take_while(|(_, lease)| lease.deadline <= now).collect()
    }

    /// Removes expired leases; it needs no parameters, because each lease has its own deadline.
    pub(crate) fn age(&mut self, now: Timestamp) -> Timestamp {
        let now = if self.leases.is_empty() { now } else { max(now, self.newest) };
        self.total -= self.leases.remove_ended(now);
        now
    }

    /// The newest lease was granted at `now`, and every lease lives on for as long as it would have
    /// from then.
    pub(crate) fn rebase(&mut self, now: Timestamp) {
        let by_us = self.newest.micros_since(now);
        let Leases { leases, granted, newest, .. } = core::mem::take(self);
        (self.granted, self.newest) = (granted, newest.minus(by_us));
        for ((_, number), lease) in leases.iter() {
            let deadline = lease.deadline.minus(by_us);
            self.put((deadline, number), Lease { deadline, ..lease });
        }
    }

    /// Restores what [`age`](Kernel::age) removed.
    pub(crate) fn restore(&mut self, ended: Vec<(Place, Lease)>) {
        for (place, lease) in ended {
            self.put(place, lease);
        }
    }

    fn put(&mut self, place: Place, lease: Lease) {
        self.total += lease.cost;
        self.leases.insert(place, lease);
    }
}

/// The most leases in a list. A key usually has one or two, and a tree of one takes as much memory
/// as a tree of eleven.
const FEW: usize = 32;

/// Leases in the order of their places: a list of few, two trees of many.
#[derive(Clone, Debug)]
enum Kept {
    Few(Vec<(u64, Lease)>),
    Many(Box<Many>),
}

/// Leases by place, and the place of each id; leases without an id are not in it.
#[derive(Clone, Debug, Default)]
struct Many {
    leases: BTreeMap<Place, Lease>,
    places: BTreeMap<Id, Place>,
}

impl Default for Kept {
    fn default() -> Self {
        Kept::Few(Vec::new())
    }
}

impl PartialEq for Kept {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Kept {}

impl Kept {
    fn heap_bytes(&self) -> usize {
        match self {
            Kept::Few(few) => block::<(u64, Lease)>(few.capacity()),
            Kept::Many(many) => {
                block::<Many>(1)
                    + tree_bytes::<Place, Lease>(&many.leases)
                    + tree_bytes::<Id, Place>(&many.places)
            }
        }
    }

    fn len(&self) -> usize {
        match self {
            Kept::Few(few) => few.len(),
            Kept::Many(many) => many.leases.len(),
        }
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn iter(&self) -> impl Iterator<Item = (Place, Lease)> + '_ {
        let (few, many) = match self {
            Kept::Few(few) => (Some(few), None),
            Kept::Many(many) => (None, Some(many)),
        };
        let few =
            few.into_iter().flatten().map(|(number, lease)| ((lease.deadline, *number), *lease));
        let many =
            many.into_iter().flat_map(|many| &many.leases).map(|(place, lease)| (*place, *lease));
        few.chain(many)
    }

    fn last(&self) -> Option<Place> {
        match self {
            Kept::Few(few) => few.last().map(place_in_list),
            Kept::Many(many) => many.leases.last_key_value().map(|(place, _)| *place),
        }
    }

    fn has(&self, place: Place) -> bool {
        self.get(place).is_some()
    }

    fn get(&self, place: Place) -> Option<Lease> {
        match self {
            Kept::Few(few) => {
                few.binary_search_by_key(&place, place_in_list).ok().map(|index| few[index].1)
            }
            Kept::Many(many) => many.leases.get(&place).copied(),
        }
    }

    /// The place of the lease of `id`, which must not be that of leases without an id.
    fn place_of(&self, id: Id) -> Option<Place> {
        match self {
            Kept::Few(few) => few.iter().find(|(_, lease)| lease.id == id).map(place_in_list),
            Kept::Many(many) => many.places.get(&id).copied(),
        }
    }

    fn insert(&mut self, place: Place, lease: Lease) {
        match self {
            Kept::Few(few) if few.len() < FEW => {
                if let Err(index) = few.binary_search_by_key(&place, place_in_list) {
                    if few.len() == few.capacity() {
                        // As much again, and one to begin with.
                        few.reserve_exact(few.len().max(1));
                    }
                    few.insert(index, (place.1, lease));
                }
            }
            Kept::Few(_) => {
                let mut many = Box::<Many>::default();
                self.iter().for_each(|(place, lease)| many.insert(place, lease));
                many.insert(place, lease);
                *self = Kept::Many(many);
            }
            Kept::Many(many) => many.insert(place, lease),
        }
    }

    fn remove(&mut self, place: Place) -> Option<Lease> {
        match self {
            Kept::Few(few) => {
                let index = few.binary_search_by_key(&place, place_in_list).ok()?;
                Some(few.remove(index).1)
            }
            Kept::Many(many) => {
                let lease = many.leases.remove(&place)?;
                many.places.remove(&lease.id);
                self.make_small();
                Some(lease)
            }
        }
    }

    /// Removes the leases that have expired at `now`, and returns the units they held.
    fn remove_ended(&mut self, now: Timestamp) -> u64 {
        let mut held = 0;
        match self {
            Kept::Few(few) => {
                let ended = few.partition_point(|(_, lease)| lease.deadline <= now);
                held = few.drain(..ended).map(|(_, lease)| lease.cost).sum();
            }
            Kept::Many(many) => {
                while let Some(first) =
                    many.leases.first_entry().filter(|first| first.get().deadline <= now)
                {
                    let lease = first.remove();
                    many.places.remove(&lease.id);
                    held += lease.cost;
                }
                self.make_small();
            }
        }
        held
    }

    /// Takes up to this many units from the leases that end last, and removes empty leases.
    fn take_back(&mut self, units: u64) -> u64 {
        match self {
            Kept::Few(few) => {
                let back = take_back(units, few.iter_mut().rev().map(|(_, lease)| &mut lease.cost));
                few.retain(|(_, lease)| lease.cost > 0);
                back
            }
            Kept::Many(many) => {
                let Many { leases, places } = &mut **many;
                let back = take_back(units, leases.values_mut().rev().map(|lease| &mut lease.cost));
                leases.retain(|_, lease| {
                    if lease.cost == 0 {
                        places.remove(&lease.id);
                    }
                    lease.cost > 0
                });
                self.make_small();
                back
            }
        }
    }

    /// Returns to a list when it is short enough not to become a tree again immediately.
    fn make_small(&mut self) {
        if self.len() <= FEW / 4 {
            *self = Kept::Few(self.iter().map(|((_, number), lease)| (number, lease)).collect());
        }
    }
}

impl Many {
    fn insert(&mut self, place: Place, lease: Lease) {
        self.leases.insert(place, lease);
        if lease.id != Id::NONE {
            self.places.insert(lease.id, place);
        }
    }
}

fn place_in_list((number, lease): &(u64, Lease)) -> Place {
    (lease.deadline, *number)
}

/// What a tree takes at the most: nodes have places for eleven pairs and hold five at least, but for
/// the root; those with children have six at least.
fn tree_bytes<K, V>(tree: &BTreeMap<K, V>) -> usize {
    const ROOM: usize = 11;
    const LEAST: usize = 5;
    if tree.is_empty() {
        return 0;
    }
    // With a node's parent, its place there and its length.
    let node = block::<u8>(ROOM * (size_of::<K>() + size_of::<V>()) + size_of::<[usize; 2]>());
    let nodes = 1 + (tree.len() - 1) / LEAST;
    nodes * node + (1 + nodes / (LEAST + 1)) * block::<usize>(ROOM + 1)
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

    fn give_back(
        &self,
        state: &mut Leases,
        _now: Timestamp,
        units: u64,
        _charged_at: Option<Timestamp>,
    ) -> u64 {
        let back = state.leases.take_back(units);
        state.total -= back;
        back
    }

    fn idle_at(&self, state: &Leases) -> Timestamp {
        state.idle_at()
    }
}
