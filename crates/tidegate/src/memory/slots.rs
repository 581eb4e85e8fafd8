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
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::raw::{self, FEW, HUGE, Later, Slot};

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
    const fn empty() -> Self {
        let [order, other, low, high] = [const { AtomicU64::new(0) }; 4];
        Slot { order, other, low, high }
    }

    #[inline(always)]
    fn load(&self) -> SlotEntry {
        let hash = Hash {
            order: self.order.load(Ordering::Relaxed),
            other: self.other.load(Ordering::Relaxed),
        };
        let (low, high) = self.words();
        SlotEntry { hash, low, high }
    }

    #[inline(always)]
    fn store(&self, entry: SlotEntry) {
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
    fn is_of(&self, hash: Hash) -> bool {
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
    fn place(&self, hash: Hash) -> Place {
        let own = Hash {
            order: self.order.load(Ordering::Relaxed),
            other: self.other.load(Ordering::Relaxed),
        };
        if own == hash && !self.is_empty() {
            Place::Here
        } else if self.is_empty() || own > hash {
            Place::Behind
        } else {
            Place::Before
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

/// The slot of a key, and the other slot of its cache line, with their words: for a key whose memory
/// is still being fetched.
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
    fn look(first: &'a Slot, second: &'a Slot, hash: Hash) -> Option<Self> {
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
enum Place {
    Before,
    Here,
    Behind,
}

/// The number of slots of the first chunk, per shard. Chunks grow by a quarter of a power of two:
/// four of 8, four of 16, four of 32 and so on.
const SMALLEST: usize = 8;
/// An offset that simplifies the arithmetic: the first chunk starts where four of its length would
/// have ended.
const OFFSET: usize = 4 * SMALLEST;
/// The number of the first chunk, chosen so that [`locate`] needs no subtraction. There are enough
/// chunks for more slots than fit into any machine.
const FIRST_CHUNK: u8 = 24;
const END_OF_CHUNKS: u8 = FIRST_CHUNK + 4 * 36;

/// The memory of all shards' tables: in each chunk a piece of every table, side by side, so that
/// tables that grow together fill one chunk after the other.
#[derive(Debug)]
pub(crate) struct Arena {
    shards: usize,
    /// The bytes that the store has allocated, and its maximum.
    bytes: Arc<AtomicUsize>,
    max_bytes: usize,
    chunks: Later<Slot>,
    /// The number of tables that reach into each chunk.
    users: [Mutex<usize>; END_OF_CHUNKS as usize],
}

impl Arena {
    /// An arena without memory, for a store that counts its bytes in `bytes`, up to `max_bytes`.
    pub(crate) fn new(shards: usize, max_bytes: usize, bytes: Arc<AtomicUsize>) -> Self {
        let users = [const { Mutex::new(0) }; END_OF_CHUNKS as usize];
        Arena { shards, bytes, max_bytes, chunks: Later::default(), users }
    }

    /// The slots of a chunk from the one at `index` of a shard's table on. Those of the next shard
    /// follow after the table's own.
    #[inline(always)]
    fn from(&self, shard: usize, index: usize) -> Option<&[Slot]> {
        let (chunk, position) = locate(shard, index);
        self.chunks.get(chunk)?.get(position..)
    }

    #[inline(always)]
    fn slot(&self, shard: usize, index: usize) -> &Slot {
        self.from(shard, index)
            .and_then(<[Slot]>::first)
            .expect("a table has all the chunks it reaches into")
    }

    /// The slots where `hash` is expected in a table of `lines` cache lines: its home and the next
    /// ones.
    #[inline(always)]
    pub(crate) fn at_home(&self, shard: usize, lines: usize, hash: Hash) -> &AtHome {
        let (chunk, position) = locate(shard, home(hash.order, lines));
        self.chunks.few(chunk, position, &NOWHERE)
    }

    /// The slot of `hash`, if there is one.
    pub(crate) fn get(&self, shard: usize, lines: usize, hash: Hash) -> Option<&Slot> {
        for index in home(hash.order, lines).. {
            let slot = self.from(shard, index)?.first()?;
            match slot.place(hash) {
                Place::Before => {}
                Place::Here => return Some(slot),
                Place::Behind => return None,
            }
        }
        None
    }

    /// The slots of a shard's table, in order. `capacity` is the end of a chunk.
    fn table(&self, shard: usize, capacity: usize) -> impl DoubleEndedIterator<Item = &Slot> {
        let end = chunks().find(|chunk| end_before(*chunk) >= capacity).unwrap_or(END_OF_CHUNKS);
        (FIRST_CHUNK..end).flat_map(move |chunk| {
            let slots = self.chunks.get(chunk).unwrap_or_default();
            let length = length_of(chunk);
            slots.get(shard * length..(shard + 1) * length).unwrap_or_default()
        })
    }

    /// Records that a table now reaches to `to` instead of `from`.
    fn reach(&self, from: usize, to: usize) {
        for chunk in chunks_within(from, to) {
            let mut users = self.users[usize::from(chunk)].lock();
            let (length, small) = (self.shards * length_of(chunk), self.small());
            if small.contains(&chunk) {
                let start = self.shards * end_before(chunk);
                self.chunks.make_part(
                    chunk,
                    start..start + length,
                    self.shards * end_before(small.end),
                );
            } else {
                // A huge page has parts of many tables. If the bound on bytes may prevent some
                // tables from using their part, the pages must be small, because unused parts are
                // not counted.
                let bytes = self.bytes.load(Ordering::Relaxed);
                let has_room = bytes.saturating_add(length * size_of::<Slot>()) <= self.max_bytes;
                self.chunks.make(chunk, length, has_room);
            }
            // All small chunks are in use now. Collapsed page by page, so that no call takes long.
            if chunk == small.end {
                self.chunks.gather(*users);
            }
            *users += 1;
        }
    }

    /// The chunks that are smaller than a huge page.
    fn small(&self) -> std::ops::Range<u8> {
        let is_small = |chunk: &u8| self.shards * length_of(*chunk) * size_of::<Slot>() < HUGE;
        FIRST_CHUNK..chunks().find(|chunk| !is_small(chunk)).unwrap_or(END_OF_CHUNKS)
    }

    /// Records that a table now reaches to `to` instead of `from`, where its slots are empty. Unused
    /// memory is returned to the system.
    fn leave(&self, from: usize, to: usize) {
        for chunk in chunks_within(to, from) {
            let mut users = self.users[usize::from(chunk)].lock();
            *users -= 1;
            if *users == 0 {
                self.chunks.release(chunk);
            }
        }
    }
}

/// Three homes, which are three cache lines.
pub(crate) type AtHome = [Slot; FEW];

/// The slots where keys are expected while the arena has no memory.
pub(crate) static NOWHERE: AtHome = [const { Slot::empty() }; FEW];

/// The slot of `hash` among those where it is [expected](Arena::at_home), as 99 of 100 keys are.
/// [`Arena::get`] finds the others, and the one key in 2^128 with the hash of an empty slot. The
/// fastest look-up once the slots are in the cache.
#[inline(always)]
pub(crate) fn look(
    [first, second, third, fourth, fifth, sixth]: &AtHome,
    hash: Hash,
) -> Option<&Slot> {
    look_at(first, second, hash)
        .or_else(|| look_at(third, fourth, hash))
        .or_else(|| look_at(fifth, sixth, hash))
}

/// Most keys are in the first cache line; the half of the line is unpredictable, so there is no
/// branch on it.
#[inline(always)]
fn look_at<'a>(first: &'a Slot, second: &'a Slot, hash: Hash) -> Option<&'a Slot> {
    let slot =
        select_unpredictable(first.order.load(Ordering::Relaxed) == hash.order, first, second);
    slot.is_of(hash).then_some(slot)
}

/// The slot of `hash` like [`look`], for slots that are still being fetched.
#[inline(always)]
pub(crate) fn look_ahead(
    [first, second, third, fourth, fifth, sixth]: &AtHome,
    hash: Hash,
) -> Option<SlotPair<'_>> {
    SlotPair::look(first, second, hash)
        .or_else(|| SlotPair::look(third, fourth, hash))
        .or_else(|| SlotPair::look(fifth, sixth, hash))
}

/// Starts to fetch the first two cache lines. Few keys are in the third.
#[inline(always)]
pub(crate) fn prefetch([first, _, third, ..]: &AtHome) {
    raw::prefetch(first);
    raw::prefetch(third);
}

/// The home of a hash in a table of `lines` cache lines: the first slot of a line.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the product shifted by 64 is below `lines`")]
fn home(order: u64, lines: usize) -> usize {
    (((u128::from(order) * lines as u128) >> 64) as usize).wrapping_mul(2)
}

/// The chunk of a table's slot, and its index there.
#[inline(always)]
#[allow(
    clippy::cast_possible_truncation,
    reason = "there are fewer chunks than that for any table"
)]
fn locate(shard: usize, index: usize) -> (u8, usize) {
    let number = index.wrapping_add(OFFSET);
    // Homes are even, so the odd number is in the same chunk, and is not zero.
    let odd = number | 1;
    let log_length = raw::log2(odd).wrapping_sub(2);
    let quarter = odd.wrapping_shr(log_length); // 4 to 7
    let chunk = (log_length as usize).wrapping_mul(4).wrapping_add(quarter).wrapping_add(8);
    // The shard's first slot in the chunk, plus the distance from the chunk's first slot.
    (chunk as u8, shard.wrapping_sub(quarter).wrapping_shl(log_length).wrapping_add(number))
}

/// The number of slots of a chunk, per shard.
fn length_of(chunk: u8) -> usize {
    1 << (chunk / 4 - 3)
}

/// The number of slots of all chunks before this one, per shard.
fn end_before(chunk: u8) -> usize {
    (usize::from(4 + chunk % 4) * length_of(chunk)) - OFFSET
}

fn chunks() -> std::ops::Range<u8> {
    FIRST_CHUNK..END_OF_CHUNKS
}

/// The chunks that start at or after `from` and before `to`.
fn chunks_within(from: usize, to: usize) -> impl Iterator<Item = u8> {
    chunks()
        .skip_while(move |chunk| end_before(*chunk) < from)
        .take_while(move |chunk| end_before(*chunk) < to)
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
                Place::Before => index += 1,
                Place::Here => return Ok(index),
                Place::Behind => return Err(index),
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

    /// Rebuilds the table without idle entries, with at least five twelfths of the homes free and at
    /// least `least` slots.
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

/// The number of cache lines that can be a home in a table of `capacity` slots: all but a few at the
/// end, which are for the runs there.
fn lines_of(capacity: usize) -> usize {
    (capacity - (capacity / 8).min(16)) / 2
}

/// The end of the chunk that has the last of `capacity` slots.
fn end_after(capacity: usize) -> usize {
    end_before(locate(0, capacity.max(1) - 1).0 + 1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// A small generator, so that every run of the test is equal.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        }
    }

    /// The second of four tables, so that a write out of bounds shows in the others.
    fn table() -> Slots {
        Slots::new(Arc::new(Arena::new(4, usize::MAX, Arc::default())), 1)
    }

    fn put(slots: &mut Slots, hash: Hash, low: u64) {
        match slots.find(hash) {
            Ok(index) => slots.set(index, low, 1),
            Err(_) => {
                if slots.is_nearly_full() {
                    slots.rebuild(0, |_| false);
                }
                let Err(index) = slots.find(hash) else { panic!("it was not there") };
                slots.insert(index, SlotEntry { hash, low, high: 1 });
            }
        }
    }

    #[test]
    fn every_slot_has_its_own_memory() {
        let (shards, slots) = (4, 1_000);
        let mut places: Vec<_> = (0..shards)
            .flat_map(|shard| (0..slots).map(move |index| locate(shard, index)))
            .collect();
        assert!(places.iter().all(|(chunk, position)| *position < shards * length_of(*chunk)));
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), shards * slots);
        for index in 0..slots {
            let (chunk, position) = locate(3, index);
            assert_eq!(position - 3 * length_of(chunk), index - end_before(chunk));
        }
    }

    #[test]
    fn many_keys_with_the_last_home_are_found() {
        let mut slots = table();
        for step in 0..1_000 {
            put(&mut slots, Hash { order: u64::MAX - step * step % 977, other: step }, step);
        }
        assert_eq!(slots.len(), 1_000);
        for step in 0..1_000 {
            let index =
                slots.find(Hash { order: u64::MAX - step * step % 977, other: step }).unwrap();
            assert_eq!(slots.get(index).low, step);
            slots.remove(index);
        }
        assert_eq!(slots.len(), 0);
    }

    #[test]
    fn an_insertion_replaces_the_next_idle_key() {
        let mut random = Random(77);
        let (mut slots, mut map) = (table(), BTreeMap::new());
        for step in 0..1_000u64 {
            let hash = Hash { order: random.next() & 0xff << 56, other: random.next() };
            put(&mut slots, hash, step);
            map.insert(hash, step);
        }
        let mut replaced = 0;
        for step in 1_000..3_000u64 {
            let hash = Hash { order: random.next() & 0xff << 56, other: random.next() };
            let Err(index) = slots.find(hash) else { panic!("it was not there") };
            let mut taken_out = None;
            let is_in = slots.replace(index, SlotEntry { hash, low: step, high: 1 }, |entry| {
                let idle = entry.low % 3 == 0;
                taken_out = idle.then_some(entry.hash);
                idle
            });
            assert_eq!(is_in, taken_out.is_some());
            if let Some(gone) = taken_out {
                assert!(gone > hash && map.remove(&gone).is_some_and(|low| low % 3 == 0));
                map.insert(hash, step);
                replaced += 1;
            }
            assert_eq!(slots.len(), map.len());
        }
        assert!(replaced > 300, "{replaced}");
        for (hash, low) in &map {
            assert_eq!(slots.find(*hash).map(|index| slots.get(index).low), Ok(*low));
        }
    }

    #[test]
    fn the_table_agrees_with_an_ordered_map() {
        for spread in [u64::MAX, 1 << 40, 255] {
            let mut random = Random(0x1234_5678 ^ spread);
            let (mut slots, mut map) = (table(), BTreeMap::new());
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
            let odd = |entry: &SlotEntry| entry.low % 2 == 1;
            slots.sweep(0, usize::MAX, odd);
            map.retain(|_, low| *low % 2 == 0);
            assert_eq!(slots.len(), map.len());
            slots.rebuild(0, |slot| slot.low % 4 == 2);
            map.retain(|_, low| *low % 4 == 0);
            assert_eq!(slots.len(), map.len());
            assert!(map.keys().all(|hash| slots.find(*hash).is_ok()));
        }
    }
}
