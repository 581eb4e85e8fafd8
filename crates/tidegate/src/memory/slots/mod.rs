//! Tables of fixed-size slots, sorted by hash, that are looked up in about one cache line.
//!
//! A key's home is its hash scaled to the table's length, so that keys in order of hash are also in
//! order of home. The table keeps them sorted: a look-up starts at home and stops at the first
//! greater hash, found or not. A rebuild, to grow or to drop idle keys, is a few sequential passes.
//! A few spare slots at the end make a wrap-around unnecessary.
//! There are no tombstones.
//!
//! All shards have their tables in one [`Arena`], which grows with them and never moves. A look-up
//! without the shard's lock may read inconsistent slots during a write, which the version of the
//! lock shows, but it never reads freed memory.

use std::hint::select_unpredictable;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::arena::{Arena, chunks, end_before, home, locate};
use crate::raw::Slot;

/// The identity of a state: a keyed 128-bit hash. The bytes of the key are not kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Hash {
    /// Orders the table and selects the shard: equal for all limits of a key.
    pub(crate) order: u64,
    /// The other half, with the algorithm and position of the limit mixed in.
    pub(crate) other: u64,
}

/// The content of a slot. `low` and `high` belong to the store; a slot with `high` of zero is
/// empty.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SlotEntry {
    pub(crate) hash: Hash,
    pub(crate) low: u64,
    pub(crate) high: u64,
}

impl SlotEntry {
    fn is_empty(&self) -> bool {
        self.high == 0
    }
}

impl Slot {
    pub(super) const fn empty() -> Self {
        let [order, other, low, high] = [const { AtomicU64::new(0) }; 4];
        Slot { order, other, low, high }
    }

    #[inline(always)]
    pub(super) fn load(&self) -> SlotEntry {
        let hash = Hash {
            order: self.order.load(Ordering::Relaxed),
            other: self.other.load(Ordering::Relaxed),
        };
        let (low, high) = self.words();
        SlotEntry { hash, low, high }
    }

    #[inline(always)]
    pub(super) fn store(&self, entry: SlotEntry) {
        self.order.store(entry.hash.order, Ordering::Relaxed);
        self.other.store(entry.hash.other, Ordering::Relaxed);
        self.set_words((entry.low, entry.high));
    }

    /// `low` and `high`.
    #[inline(always)]
    pub(crate) fn words(&self) -> (u64, u64) {
        (self.low.load(Ordering::Relaxed), self.high.load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub(crate) fn set_words(&self, (low, high): (u64, u64)) {
        self.low.store(low, Ordering::Relaxed);
        self.high.store(high, Ordering::Relaxed);
    }

    /// Whether the slot has this hash. An empty slot has the hash zero.
    #[inline(always)]
    pub(super) fn is_of(&self, hash: Hash) -> bool {
        let (order, other) =
            (self.order.load(Ordering::Relaxed), self.other.load(Ordering::Relaxed));
        (order ^ hash.order) | (other ^ hash.other) == 0
    }

    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.high.load(Ordering::Relaxed) == 0
    }

    /// The position of this slot relative to `hash`. The limits of one key have equal order.
    #[inline(always)]
    pub(super) fn place(&self, hash: Hash) -> SlotPosition {
        let own = Hash {
            order: self.order.load(Ordering::Relaxed),
            other: self.other.load(Ordering::Relaxed),
        };
        if own == hash && !self.is_empty() {
            SlotPosition::Here
        } else if self.is_empty() || own > hash {
            SlotPosition::Behind
        } else {
            SlotPosition::Before
        }
    }
}

/// The two words of a key's slot.
pub(crate) trait Words {
    /// `low` and `high`.
    fn words(&self) -> (u64, u64);
    /// The caller must hold the lock, and no write may have happened since the words were read.
    fn set_words(&self, words: (u64, u64));
}

impl Words for &Slot {
    #[inline(always)]
    fn words(&self) -> (u64, u64) {
        (**self).words()
    }

    #[inline(always)]
    fn set_words(&self, words: (u64, u64)) {
        (**self).set_words(words);
    }
}

/// The slot of a key, and the other slot of its cache line, with their words: for a key whose
/// memory is still being fetched.
///
/// Only the memory itself shows which of the two slots it is. A store to an address that depends on
/// a load blocks later loads, among them those for the next key. So both slots are written, one of
/// them with its old words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotPair<'a> {
    first: &'a Slot,
    second: &'a Slot,
    /// The slot of the key.
    slot: &'a Slot,
    words: (u64, u64),
}

impl<'a> SlotPair<'a> {
    /// Looks for `hash` in one cache line.
    #[inline(always)]
    pub(super) fn look(first: &'a Slot, second: &'a Slot, hash: Hash) -> Option<Self> {
        let is_first = first.order.load(Ordering::Relaxed) == hash.order;
        // The half is unpredictable, so there is no branch; a load from an address that depends on
        // a load blocks nothing.
        let slot = select_unpredictable(is_first, first, second);
        slot.is_of(hash).then(|| SlotPair { first, second, slot, words: slot.words() })
    }
}

impl Words for SlotPair<'_> {
    #[inline(always)]
    fn words(&self) -> (u64, u64) {
        self.words
    }

    #[inline(always)]
    fn set_words(&self, (low, high): (u64, u64)) {
        let is_first = std::ptr::eq(self.slot, self.first);
        let (other_low, other_high) =
            select_unpredictable(is_first, self.second, self.first).words();
        let in_order = |own, other| {
            (select_unpredictable(is_first, own, other), select_unpredictable(is_first, other, own))
        };
        let ((first_low, second_low), (first_high, second_high)) =
            (in_order(low, other_low), in_order(high, other_high));
        self.first.set_words((first_low, first_high));
        self.second.set_words((second_low, second_high));
    }
}

/// The position of a slot relative to a key.
pub(super) enum SlotPosition {
    Before,
    Here,
    Behind,
}

/// The table of one shard, used under its lock. It always ends at the end of a chunk.
#[derive(Debug)]
pub(crate) struct Slots {
    arena: Arc<Arena>,
    shard: usize,
    lines: usize,
    capacity: usize,
    used: usize,
}

impl Slots {
    /// Creates the empty table of a shard.
    pub(crate) fn new(arena: Arc<Arena>, shard: usize) -> Self {
        Slots { arena, shard, lines: 0, capacity: 0, used: 0 }
    }

    /// The number of keys.
    pub(crate) fn len(&self) -> usize {
        self.used
    }

    /// The number of slots.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The size of the table in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.capacity * size_of::<Slot>()
    }

    /// The number of cache lines that can be a home, without the spare ones at the end.
    pub(crate) fn lines(&self) -> usize {
        self.lines
    }

    fn slot(&self, index: usize) -> &Slot {
        self.arena.slot(self.shard, index)
    }

    /// The index of `hash`, or the index where to insert it.
    pub(crate) fn find(&self, hash: Hash) -> Result<usize, usize> {
        let mut index = home(hash.order, self.lines);
        while index < self.capacity {
            match self.slot(index).place(hash) {
                SlotPosition::Before => index += 1,
                SlotPosition::Here => return Ok(index),
                SlotPosition::Behind => return Err(index),
            }
        }
        Err(index)
    }

    pub(crate) fn get(&self, index: usize) -> SlotEntry {
        self.slot(index).load()
    }

    pub(crate) fn set(&mut self, index: usize, low: u64, high: u64) {
        self.slot(index).set_words((low, high));
    }

    /// Calls `show` with all entries, in order.
    pub(crate) fn for_each(&self, mut show: impl FnMut(SlotEntry)) {
        let entries = self.arena.table(self.shard, self.capacity).map(Slot::load);
        entries.filter(|entry| !entry.is_empty()).for_each(&mut show);
    }

    /// Whether another key would make runs long: five eighths of the slots are taken.
    pub(crate) fn is_nearly_full(&self) -> bool {
        self.used * 8 >= 2 * self.lines * 5
    }

    /// Inserts an entry at `index`, from [`find`](Slots::find), in place of the next idle entry, if
    /// there is one before the next gap. Then few entries move, and the table gets no fuller.
    /// Returns whether there was one.
    pub(crate) fn replace(
        &mut self,
        index: usize,
        entry: SlotEntry,
        mut idle: impl FnMut(&SlotEntry) -> bool,
    ) -> bool {
        for place in index..self.capacity {
            let own = self.get(place);
            if own.is_empty() {
                return false;
            }
            if idle(&own) {
                self.shift(index, place);
                self.slot(index).store(entry);
                return true;
            }
        }
        false
    }

    /// Moves the entries from `index` on by one, up to `gap`, which is overwritten.
    fn shift(&mut self, index: usize, gap: usize) {
        for index in (index..gap).rev() {
            self.slot(index + 1).store(self.get(index));
        }
    }

    /// Inserts an entry at `index`, from [`find`](Slots::find).
    pub(crate) fn insert(&mut self, index: usize, entry: SlotEntry) {
        let gap = (index..self.capacity).find(|index| self.slot(*index).is_empty()).unwrap_or_else(
            || {
                // The run at the end has used all spare slots: add a chunk of them.
                let gap = self.capacity;
                self.capacity = end_after(gap + 1);
                self.arena.reach(gap, self.capacity);
                gap
            },
        );
        self.shift(index, gap);
        self.slot(index).store(entry);
        self.used += 1;
    }

    /// Removes the entry at `index` and closes the gap.
    pub(crate) fn remove(&mut self, index: usize) {
        let lines = self.lines;
        let mut index = index;
        while index + 1 < self.capacity {
            let next = self.get(index + 1);
            if next.is_empty() || home(next.hash.order, lines) > index {
                break;
            }
            self.slot(index).store(next);
            index += 1;
        }
        self.slot(index).store(SlotEntry::default());
        self.used -= 1;
    }

    /// Removes the idle entries among up to `count` slots from `from` on. Returns the index to
    /// continue at, and the number of removed entries.
    pub(crate) fn sweep(
        &mut self,
        from: usize,
        count: usize,
        mut idle: impl FnMut(&SlotEntry) -> bool,
    ) -> (usize, usize) {
        let mut index = if from < self.capacity { from } else { 0 };
        let before = self.used;
        let mut left = count.min(self.capacity);
        while left > 0 {
            if index >= self.capacity {
                index = 0;
            }
            let entry = self.get(index);
            if !entry.is_empty() && idle(&entry) {
                self.remove(index); // the next entry is at this index now
            } else {
                index += 1;
                left -= 1;
            }
        }
        (index, before - self.used)
    }

    /// Rebuilds the table without idle entries, with at least five twelfths of the homes free and
    /// at least `least` slots.
    pub(crate) fn rebuild(&mut self, least: usize, mut idle: impl FnMut(&SlotEntry) -> bool) {
        let mut kept = 0;
        self.arena.table(self.shard, self.capacity).for_each(|slot| {
            let entry = slot.load();
            if !entry.is_empty() && idle(&entry) {
                slot.store(SlotEntry::default());
            } else if !entry.is_empty() {
                kept += 1;
            }
        });
        let fits =
            |capacity: &usize| *capacity >= least && (kept + 1) * 12 <= 2 * lines_of(*capacity) * 7;
        let capacity = chunks()
            .map(|chunk| end_before(chunk + 1))
            .find(fits)
            .expect("there are chunks for all memory");
        let lines = lines_of(capacity);
        // The run at the end may need more spare slots than usual.
        let taken = self.arena.table(self.shard, self.capacity).filter(|slot| !slot.is_empty());
        let end = taken
            .fold(0, |next, slot| home(slot.order.load(Ordering::Relaxed), lines).max(next) + 1);
        let capacity = end_after(end.max(capacity));

        // All entries move to the end, in order; then each to its new index, which is never after
        // its current one.
        let (before, most) = (self.capacity, self.capacity.max(capacity));
        self.arena.reach(before, capacity);
        let from = self.arena.table(self.shard, before).rev().filter(|slot| !slot.is_empty());
        for (from, to) in from.zip(self.arena.table(self.shard, most).rev()) {
            relocate(from, to);
        }
        let mut next = 0;
        for from in self.arena.table(self.shard, most).skip(most - kept) {
            next = home(from.order.load(Ordering::Relaxed), lines).max(next);
            relocate(from, self.slot(next));
            next += 1;
        }
        self.arena.leave(before, capacity);
        (self.lines, self.capacity, self.used) = (lines, capacity, kept);
    }
}

fn relocate(from: &Slot, to: &Slot) {
    if !std::ptr::eq(from, to) {
        to.store(from.load());
        from.store(SlotEntry::default());
    }
}

/// The number of cache lines that can be a home in a table of `capacity` slots: all but a few at
/// the end, which are for the runs there.
fn lines_of(capacity: usize) -> usize {
    (capacity - (capacity / 8).min(16)) / 2
}

/// The end of the chunk that has the last of `capacity` slots.
fn end_after(capacity: usize) -> usize {
    end_before(locate(0, capacity.max(1) - 1).0 + 1)
}

#[cfg(test)]
mod tests;
