//! Bounded tables by fingerprint: one that replaces the oldest entries, and one that refuses new
//! entries when it is full.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, Hasher};

use parking_lot::{Mutex, MutexGuard};

use super::fingerprint::Fingerprint;

const SHARDS: usize = 64;

fn shard_of(name: Fingerprint) -> usize {
    usize::try_from(name >> 64).unwrap_or(usize::MAX) % SHARDS
}

/// A set-associative table: a new entry replaces the oldest of the few in its set.
///
/// A set is allocated when its first entry arrives. Allocating the whole table would take megabytes
/// from the system while requests wait.
#[derive(Debug)]
pub(crate) struct RecentTable<T> {
    shards: Box<[Mutex<Vec<EntrySet<T>>>]>,
    sets: usize,
}

const WAYS: usize = 4;

/// The entries of one set, once it has had one.
type EntrySet<T> = Option<Box<[SetEntry<T>; WAYS]>>;
type SetEntry<T> = Option<(Fingerprint, T)>;

impl<T> RecentTable<T> {
    /// A table of about `max` entries.
    pub(crate) fn new(max: usize) -> Self {
        RecentTable {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            sets: max.div_ceil(SHARDS * WAYS),
        }
    }

    fn set_of(&self, name: Fingerprint) -> usize {
        usize::try_from(name & u128::from(u32::MAX)).unwrap_or(0) % self.sets.max(1)
    }

    /// Reads the set of a name, if it has had an entry.
    fn with_set<R>(
        &self,
        name: Fingerprint,
        read: impl FnOnce(&mut [SetEntry<T>; WAYS]) -> R,
    ) -> Option<R> {
        let mut shard = self.shards[shard_of(name)].lock();
        shard.get_mut(self.set_of(name))?.as_deref_mut().map(read)
    }

    /// Reads or changes the entry of a name.
    pub(crate) fn with<R>(&self, name: Fingerprint, read: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.with_set(name, |set| {
            let entry = set.iter_mut().flatten().find(|(own, _)| *own == name)?;
            Some(read(&mut entry.1))
        })?
    }

    /// Changes the entry of a name with `merge`, or inserts `fresh`; the entry with the smallest
    /// `age` is the oldest.
    pub(crate) fn update(
        &self,
        name: Fingerprint,
        fresh: T,
        merge: impl FnOnce(&mut T),
        age: impl Fn(&T) -> u64,
    ) {
        let mut shard = self.shards[shard_of(name)].lock();
        if shard.is_empty() {
            shard.resize_with(self.sets, || None);
        }
        let set = shard[self.set_of(name)].get_or_insert_with(|| Box::new([const { None }; WAYS]));
        if let Some((_, known)) = set.iter_mut().flatten().find(|(own, _)| *own == name) {
            return merge(known);
        }
        let oldest = set
            .iter_mut()
            .min_by_key(|entry| entry.as_ref().map_or(0, |(_, known)| age(known).max(1)));
        if let Some(entry) = oldest {
            *entry = Some((name, fresh));
        }
    }

    pub(crate) fn forget(&self, name: Fingerprint) {
        let is_own = |entry: &&mut SetEntry<T>| entry.as_ref().is_some_and(|(own, _)| *own == name);
        self.with_set(name, |set| set.iter_mut().filter(is_own).for_each(|entry| *entry = None));
    }
}

/// A table whose entries stay until they are removed: when it is full, it takes no new ones.
#[derive(Debug)]
pub(crate) struct FixedTable<T> {
    shards: Box<[Mutex<HashMap<Fingerprint, T, NoHash>>]>,
    max_per_shard: usize,
}

pub(crate) type TableShard<'a, T> = MutexGuard<'a, HashMap<Fingerprint, T, NoHash>>;

impl<T> FixedTable<T> {
    pub(crate) fn new(max: usize) -> Self {
        FixedTable {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            max_per_shard: max.div_ceil(SHARDS),
        }
    }

    pub(crate) fn shard(&self, name: Fingerprint) -> TableShard<'_, T> {
        self.shards[shard_of(name)].lock()
    }

    /// The entry of a name, which `new` makes if there is none; nothing if the table is full.
    pub(crate) fn entry<'a>(
        &self,
        shard: &'a mut TableShard<'_, T>,
        name: Fingerprint,
        new: impl FnOnce() -> T,
    ) -> Option<&'a mut T> {
        let is_full = shard.len() >= self.max_per_shard;
        match shard.entry(name) {
            Entry::Occupied(entry) => Some(entry.into_mut()),
            Entry::Vacant(_) if is_full => None,
            Entry::Vacant(entry) => Some(entry.insert(new())),
        }
    }

    /// All shards, one after the other.
    pub(crate) fn shards(&self) -> impl Iterator<Item = TableShard<'_, T>> {
        self.shards.iter().map(Mutex::lock)
    }
}

/// A hasher for fingerprints, which are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NoHash(u64);

impl BuildHasher for NoHash {
    type Hasher = NoHash;

    fn build_hasher(&self) -> NoHash {
        NoHash(0)
    }
}

impl Hasher for NoHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u128(&mut self, name: u128) {
        self.0 = u64::try_from(name & u128::from(u64::MAX)).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_allocated_with_their_first_entry() {
        let recent: RecentTable<u64> = RecentTable::new(1 << 16);
        let allocated = |recent: &RecentTable<u64>| -> usize {
            recent.shards.iter().map(|shard| shard.lock().iter().flatten().count()).sum()
        };
        assert_eq!(recent.with(7, |known| *known), None);
        recent.forget(7);
        assert_eq!(allocated(&recent), 0);
        for name in [7, 7 + (1 << 64)] {
            recent.update(name, 1, |known| *known += 1, |known| *known);
            recent.update(name, 1, |known| *known += 1, |known| *known);
            assert_eq!(recent.with(name, |known| *known), Some(2));
        }
        assert_eq!(allocated(&recent), 2);
    }
}
