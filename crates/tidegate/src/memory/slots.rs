//! A table of fixed-size slots, sorted by hash, that is looked up in about one cache line.
//!
//! A key's home is its hash scaled to the table's length, so that keys in order of hash are also in order of home. The
//! table keeps them sorted: a look-up starts at home and stops at the first greater hash, found or not; a rebuild for more
//! room, or to drop what is idle, is one pass from front to back that never jumps. A few spare slots at the end spare the
//! wrap-around. There are no tombstones.

/// What a key is known by: a keyed 128-bit hash. The bytes of the key are not kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Hash {
    /// Orders the table and chooses the shard: the same for all limits of a key.
    pub(crate) order: u64,
    /// The other half, with the algorithm and position of the limit mixed in.
    pub(crate) other: u64,
}

/// One key: half a cache line. `low` and `high` are the store's; a slot whose `high` is zero is empty.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(32))]
pub(crate) struct Slot {
    pub(crate) hash: Hash,
    pub(crate) low: u64,
    pub(crate) high: u64,
}

impl Slot {
    fn is_empty(&self) -> bool {
        self.high == 0
    }

    /// Where this slot stands if one looks for `hash`. Keys with equal order are the limits of one key.
    #[inline]
    fn place(&self, hash: Hash) -> Place {
        if self.hash == hash && !self.is_empty() {
            Place::Here
        } else if self.is_empty() || self.hash > hash {
            Place::Behind
        } else {
            Place::Before
        }
    }
}

/// Where a slot stands, seen from a key.
enum Place {
    Before,
    Here,
    Behind,
}

/// Slots beyond the last home, so that a run at the end has somewhere to go. More, should that ever not be enough.
const SPARE: usize = 16;
const SMALLEST: usize = 16;

#[derive(Debug, Default)]
pub(crate) struct Slots {
    slots: Box<[Slot]>,
    used: usize,
    spare: usize,
}

impl Slots {
    /// How many keys there are.
    pub(crate) fn len(&self) -> usize {
        self.used
    }

    /// How many slots there are.
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// How many bytes the table has allocated.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }

    /// Homes, without the spare slots.
    fn homes(&self) -> usize {
        self.slots.len() - self.spare
    }

    /// For a hint to the processor: where the slots are, and how many homes there are.
    pub(crate) fn location(&self) -> (*const Slot, usize) {
        (self.slots.as_ptr(), self.homes())
    }

    /// The home of a hash in a table of so many homes.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "the product shifted by 64 is below `homes`")]
    pub(crate) fn home(order: u64, homes: usize) -> usize {
        ((u128::from(order) * homes as u128) >> 64) as usize
    }

    /// Where `hash` is, or where it belongs.
    #[inline]
    pub(crate) fn find(&self, hash: Hash) -> Result<usize, usize> {
        let mut index = Self::home(hash.order, self.homes());
        while let Some(slot) = self.slots.get(index) {
            match slot.place(hash) {
                Place::Before => index += 1,
                Place::Here => return Ok(index),
                Place::Behind => return Err(index),
            }
        }
        Err(index)
    }

    /// The slot of `hash`, if there is one: what [`find`](Slots::find) does, for those in a hurry.
    #[inline]
    pub(crate) fn get_mut(&mut self, hash: Hash) -> Option<&mut Slot> {
        let start = Self::home(hash.order, self.homes());
        for slot in self.slots.get_mut(start..)? {
            match slot.place(hash) {
                Place::Before => {}
                Place::Here => return Some(slot),
                Place::Behind => return None,
            }
        }
        None
    }

    #[inline]
    pub(crate) fn get(&self, index: usize) -> Slot {
        self.slots[index]
    }

    #[inline]
    pub(crate) fn set(&mut self, index: usize, low: u64, high: u64) {
        let slot = &mut self.slots[index];
        (slot.low, slot.high) = (low, high);
    }

    /// Whether another key would make the runs long: four fifths of the homes are taken.
    pub(crate) fn is_crowded(&self) -> bool {
        self.used >= self.homes() / 5 * 4
    }

    /// Puts a slot at `index`, where [`find`](Slots::find) said it belongs.
    pub(crate) fn insert(&mut self, index: usize, slot: Slot) {
        let gap = match self.slots.iter().skip(index).position(Slot::is_empty) {
            Some(gap) => gap,
            None => {
                // The run at the end has used up the spare slots: twice as many, and nothing else moves.
                let gap = self.slots.len() - index;
                let more = self.spare.max(SPARE);
                self.spare += more;
                let mut slots = std::mem::take(&mut self.slots).into_vec();
                slots.resize(slots.len() + more, Slot::default());
                self.slots = slots.into_boxed_slice();
                gap
            }
        };
        self.slots.copy_within(index..index + gap, index + 1);
        self.slots[index] = slot;
        self.used += 1;
    }

    /// Takes out the slot at `index`, and lets the ones behind it move up.
    pub(crate) fn remove(&mut self, index: usize) {
        let homes = self.homes();
        let behind = self.slots[index + 1..]
            .iter()
            .enumerate()
            .position(|(offset, slot)| slot.is_empty() || Self::home(slot.hash.order, homes) == index + 1 + offset);
        let end = behind.map_or(self.slots.len(), |offset| index + 1 + offset);
        self.slots.copy_within(index + 1..end, index);
        self.slots[end - 1] = Slot::default();
        self.used -= 1;
    }

    /// Walks over up to `count` slots from `from` and takes out those for which `idle` says so. Returns where to go on, and
    /// how many it took out.
    pub(crate) fn sweep(&mut self, from: usize, count: usize, mut idle: impl FnMut(&Slot) -> bool) -> (usize, usize) {
        let mut index = if from < self.slots.len() { from } else { 0 };
        let before = self.used;
        let mut left = count.min(self.slots.len());
        while left > 0 {
            if index >= self.slots.len() {
                index = 0;
            }
            let slot = &self.slots[index];
            if !slot.is_empty() && idle(slot) {
                self.remove(index); // what moved up stands at this index now
            } else {
                index += 1;
                left -= 1;
            }
        }
        (index, before - self.used)
    }

    /// Rebuilds the table without the slots for which `idle` says so, with three eighths of the homes free.
    pub(crate) fn rebuild(&mut self, mut idle: impl FnMut(&Slot) -> bool) {
        let kept: usize = self
            .slots
            .iter_mut()
            .map(|slot| {
                if !slot.is_empty() && idle(slot) {
                    *slot = Slot::default();
                }
                usize::from(!slot.is_empty())
            })
            .sum();
        let homes = (kept * 8 / 5).max(SMALLEST);
        let mut slots = vec![Slot::default(); homes + SPARE];
        let mut next = 0;
        for slot in self.slots.iter().filter(|slot| !slot.is_empty()) {
            next = next.max(Self::home(slot.hash.order, homes));
            if next == slots.len() {
                slots.push(Slot::default());
            }
            slots[next] = *slot;
            next += 1;
        }
        self.spare = slots.len() - homes;
        self.slots = slots.into_boxed_slice();
        self.used = kept;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// A small generator, so that every run is the same.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        }
    }

    fn put(slots: &mut Slots, hash: Hash, low: u64) {
        match slots.find(hash) {
            Ok(index) => slots.set(index, low, 1),
            Err(_) => {
                if slots.is_crowded() {
                    slots.rebuild(|_| false);
                }
                let Err(index) = slots.find(hash) else { panic!("it was not there") };
                slots.insert(index, Slot { hash, low, high: 1 });
            }
        }
    }

    #[test]
    fn keys_that_are_all_at_home_at_the_end_find_room_there() {
        let mut slots = Slots::default();
        for step in 0..1_000 {
            put(&mut slots, Hash { order: u64::MAX - step * step % 977, other: step }, step);
        }
        assert_eq!(slots.len(), 1_000);
        for step in 0..1_000 {
            let index = slots.find(Hash { order: u64::MAX - step * step % 977, other: step }).unwrap();
            assert_eq!(slots.get(index).low, step);
            slots.remove(index);
        }
        assert_eq!(slots.len(), 0);
    }

    #[test]
    fn agrees_with_an_ordered_map_whatever_is_put_in_and_taken_out() {
        for spread in [u64::MAX, 1 << 40, 255] {
            let mut random = Random(0x1234_5678 ^ spread);
            let (mut slots, mut map) = (Slots::default(), BTreeMap::new());
            for step in 0..20_000u64 {
                // Few distinct hashes, some of them with equal order: long runs.
                let hash = Hash { order: random.next() & spread, other: random.next() & 3 };
                if random.next().is_multiple_of(3) {
                    if let Ok(index) = slots.find(hash) {
                        slots.remove(index);
                    }
                    map.remove(&hash);
                } else {
                    put(&mut slots, hash, step);
                    map.insert(hash, step);
                }
                assert_eq!(slots.len(), map.len());
                if step % 997 == 0 {
                    for (hash, low) in &map {
                        assert_eq!(slots.find(*hash).map(|index| slots.get(index).low), Ok(*low));
                    }
                }
            }
            let odd = |slot: &Slot| slot.low % 2 == 1;
            slots.sweep(0, usize::MAX, odd);
            map.retain(|_, low| *low % 2 == 0);
            assert_eq!(slots.len(), map.len());
            slots.rebuild(|slot| slot.low % 4 == 2);
            map.retain(|_, low| *low % 4 == 0);
            assert_eq!(slots.len(), map.len());
            assert!(map.keys().all(|hash| slots.find(*hash).is_ok()));
        }
    }
}
