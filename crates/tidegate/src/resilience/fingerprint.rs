//! Names of states, and the tables that are kept by them: all of them bounded.
//!
//! A name is a keyed hash of what the state of a charge is known by, the same as in the stores:
//! nobody who chooses keys can make two of them meet, and no key is kept as text but where a call
//! must be made for it later.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};

use parking_lot::{Mutex, MutexGuard};
use siphasher::sip128::{Hasher128, SipHasher13};
use tidegate_core::Limit;

use crate::store::{Charge, Scope};

/// The state of a charge, by a hash.
pub(crate) type Fingerprint = u128;

/// Makes names.
#[derive(Debug)]
pub(crate) struct Fingerprints {
    secret: (u64, u64),
}

impl Fingerprints {
    pub(crate) fn new(secret: (u64, u64)) -> Self {
        Fingerprints { secret }
    }

    pub(crate) fn of(&self, charge: &Charge<'_>) -> Fingerprint {
        let mut hasher = SipHasher13::new_with_keys(self.secret.0, self.secret.1);
        match &charge.subject.scope {
            Scope::AdHoc => hasher.write(charge.limit.algorithm().name().as_bytes()),
            Scope::Rule(name) => {
                hasher.write(name.as_bytes());
                hasher.write_u8(0xff);
            }
        }
        hasher.write_u16(charge.position);
        hasher.write(&charge.subject.key);
        hasher.finish128().as_u128()
    }

    /// By which a limit is known to be the same as before.
    pub(crate) fn limit(&self, limit: &Limit) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.secret.1, self.secret.0);
        limit.hash(&mut hasher);
        hasher.finish128().h1
    }
}

const SHARDS: usize = 64;

fn shard_of(name: Fingerprint) -> usize {
    usize::try_from(name >> 64).unwrap_or(usize::MAX) % SHARDS
}

/// What may be forgotten: each name has a few places where it can be, and takes the one that was
/// used longest ago.
///
/// Places are made when somebody needs one of them, a few at a time: a table that is made as a
/// whole takes megabytes from the system while requests wait.
#[derive(Debug)]
pub(crate) struct Recent<T> {
    shards: Box<[Mutex<Vec<Set<T>>>]>,
    sets: usize,
}

const WAYS: usize = 4;

/// The places of some names, once there is something in them.
type Set<T> = Option<Box<[Place<T>; WAYS]>>;
type Place<T> = Option<(Fingerprint, T)>;

impl<T> Recent<T> {
    /// About `most` entries; none at all if that is zero.
    pub(crate) fn new(most: usize) -> Self {
        Recent {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            sets: most.div_ceil(SHARDS * WAYS),
        }
    }

    fn set_of(&self, name: Fingerprint) -> usize {
        usize::try_from(name & u128::from(u32::MAX)).unwrap_or(0) % self.sets.max(1)
    }

    /// The places where this name can be, if there are any.
    fn places<R>(
        &self,
        name: Fingerprint,
        look: impl FnOnce(&mut [Place<T>; WAYS]) -> R,
    ) -> Option<R> {
        let mut shard = self.shards[shard_of(name)].lock();
        shard.get_mut(self.set_of(name))?.as_deref_mut().map(look)
    }

    /// What is known under a name.
    pub(crate) fn with<R>(&self, name: Fingerprint, read: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.places(name, |places| {
            let found = places.iter_mut().flatten().find(|(own, _)| *own == name)?;
            Some(read(&mut found.1))
        })?
    }

    /// Changes what is known under a name, or puts something there; `age` tells which entry is the
    /// oldest.
    pub(crate) fn update(
        &self,
        name: Fingerprint,
        fresh: T,
        merge: impl FnOnce(&mut T),
        age: impl Fn(&T) -> u64,
    ) {
        if self.sets == 0 {
            return;
        }
        let mut shard = self.shards[shard_of(name)].lock();
        if shard.is_empty() {
            shard.resize_with(self.sets, || None);
        }
        let places =
            shard[self.set_of(name)].get_or_insert_with(|| Box::new([const { None }; WAYS]));
        if let Some((_, known)) = places.iter_mut().flatten().find(|(own, _)| *own == name) {
            return merge(known);
        }
        let oldest = places
            .iter_mut()
            .min_by_key(|entry| entry.as_ref().map_or(0, |(_, known)| age(known).max(1)));
        if let Some(place) = oldest {
            *place = Some((name, fresh));
        }
    }

    pub(crate) fn forget(&self, name: Fingerprint) {
        let own = |place: &&mut Place<T>| place.as_ref().is_some_and(|(own, _)| *own == name);
        self.places(name, |places| places.iter_mut().filter(own).for_each(|place| *place = None));
    }
}

/// What must not be forgotten: when all places are taken, there is none for another.
#[derive(Debug)]
pub(crate) struct Kept<T> {
    shards: Box<[Mutex<HashMap<Fingerprint, T, Plain>>]>,
    most_per_shard: usize,
}

pub(crate) type Shard<'a, T> = MutexGuard<'a, HashMap<Fingerprint, T, Plain>>;

impl<T> Kept<T> {
    pub(crate) fn new(most: usize) -> Self {
        Kept {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            most_per_shard: most.div_ceil(SHARDS),
        }
    }

    pub(crate) fn shard(&self, name: Fingerprint) -> Shard<'_, T> {
        self.shards[shard_of(name)].lock()
    }

    /// The entry of a name, made if there is none and there is room.
    pub(crate) fn entry<'a>(
        &self,
        shard: &'a mut Shard<'_, T>,
        name: Fingerprint,
        make: impl FnOnce() -> T,
    ) -> Option<&'a mut T> {
        let full = shard.len() >= self.most_per_shard;
        match shard.entry(name) {
            std::collections::hash_map::Entry::Occupied(entry) => Some(entry.into_mut()),
            std::collections::hash_map::Entry::Vacant(_) if full => None,
            std::collections::hash_map::Entry::Vacant(entry) => Some(entry.insert(make())),
        }
    }

    /// All shards, one after the other.
    pub(crate) fn shards(&self) -> impl Iterator<Item = Shard<'_, T>> {
        self.shards.iter().map(Mutex::lock)
    }
}

/// Names are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Plain(u64);

impl BuildHasher for Plain {
    type Hasher = Plain;

    fn build_hasher(&self) -> Plain {
        Plain(0)
    }
}

impl Hasher for Plain {
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
    fn places_are_made_when_somebody_needs_them() {
        let recent: Recent<u64> = Recent::new(1 << 16);
        let made = |recent: &Recent<u64>| -> usize {
            recent.shards.iter().map(|shard| shard.lock().iter().flatten().count()).sum()
        };
        assert_eq!(recent.with(7, |known| *known), None);
        recent.forget(7);
        assert_eq!(made(&recent), 0);
        for name in [7, 7 + (1 << 64)] {
            recent.update(name, 1, |known| *known += 1, |known| *known);
            recent.update(name, 1, |known| *known += 1, |known| *known);
            assert_eq!(recent.with(name, |known| *known), Some(2));
        }
        assert_eq!(made(&recent), 2);
    }
}
