//! Tables of fixed-size slots, sorted by hash, that are looked up in about one cache line.
//!
//! A key's home is its hash scaled to the table's length, so that keys in order of hash are also in
//! order of home. The table keeps them sorted: a look-up starts at home and stops at the first
//! greater hash, found or not; a rebuild for more room, or to drop what is idle, is a few passes
//! from one end to the other that never jump. A few spare slots at the end spare the wrap-around.
//! There are no tombstones.
//!
//! All shards have their tables in one [`Arena`], which grows with them and never moves: whoever
//! looks something up without holding the shard's lock may find nonsense while somebody else
//! writes, and has to ask the lock's version whether that was so, but it never finds memory that is
//! no longer there.

use std::hint::select_unpredictable;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::raw::{self, FEW, HUGE, Later, Slot};

/// What a key is known by: a keyed hash in 128 bits. The bytes of the key are not kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Hash {
    /// Orders the table and chooses the shard: the same for all limits of a key.
    pub(crate) order: u64,
    /// The other half, with the algorithm and position of the limit mixed in.
    pub(crate) other: u64,
}

/// What is in a slot. `low` and `high` are the store's; a slot whose `high` is zero is empty.
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

    /// Whether it is that of `hash`, or empty and `hash` is zero.
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

    /// Where this slot stands if one looks for `hash`. Keys with equal order are the limits of one
    /// key.
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

/// The two words of a key, wherever they were found.
pub(crate) trait Words {
    /// `low` and `high`.
    fn words(&self) -> (u64, u64);
    /// Only for who holds the lock since they were read, or knows that nobody has written since.
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

/// The slot of a key, and the other one of its cache line, with what was in them: for a key whose
/// memory is still on its way.
///
/// Which of the two it is, only their memory tells. A processor that has to write to an address
/// which it learns from memory lets nothing behind that overtake it, not even the next key on its
/// way; so both are written, one of them with what was there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotPair<'a> {
    first: &'a Slot,
    second: &'a Slot,
    /// The one of them that it is.
    slot: &'a Slot,
    words: (u64, u64),
}

impl<'a> SlotPair<'a> {
    /// Looks for `hash` in one cache line.
    #[inline(always)]
    fn look(first: &'a Slot, second: &'a Slot, hash: Hash) -> Option<Self> {
        let is_first = first.order.load(Ordering::Relaxed) == hash.order;
        // Nobody can guess in which half it is, so there is no branch; and reading at an address
        // that is learned from memory holds nobody up.
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

/// Where a slot stands, seen from a key.
enum Place {
    Before,
    Here,
    Behind,
}

/// The first chunk has so many slots for each shard. Chunks get longer by a quarter of a power of
/// two: four of 8, four of 16, four of 32 and so on.
const SMALLEST: usize = 8;
/// What makes the arithmetic of chunks easy: the first chunk begins where four of its length would
/// have ended.
const OFFSET: usize = 4 * SMALLEST;
/// Chunks are numbered from here on: what [`locate`] computes needs nothing taken away. There are
/// enough for more slots than any machine has.
const FIRST_CHUNK: u8 = 24;
const END_OF_CHUNKS: u8 = FIRST_CHUNK + 4 * 36;

/// The memory of all shards' tables: in each chunk a piece of every table, side by side, so that
/// tables that grow together fill one chunk after the other.
#[derive(Debug)]
pub(crate) struct Arena {
    shards: usize,
    /// What the store has allocated, and may.
    bytes: Arc<AtomicUsize>,
    max_bytes: usize,
    chunks: Later<Slot>,
    /// How many shards' tables reach into each chunk.
    users: [Mutex<usize>; END_OF_CHUNKS as usize],
}

impl Arena {
    /// Without memory yet, for a store that may have so many bytes, and counts them here.
    pub(crate) fn new(shards: usize, max_bytes: usize, bytes: Arc<AtomicUsize>) -> Self {
        let users = [const { Mutex::new(0) }; END_OF_CHUNKS as usize];
        Arena { shards, bytes, max_bytes, chunks: Later::default(), users }
    }

    /// The slots of a chunk from that one on which a shard's table has at `index`. Those of the
    /// next shard follow behind the table's own.
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

    /// The slots where `hash` is expected in a table of so many cache lines: its home, and the
    /// next.
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

    /// The slots of a shard's table, in order. `capacity` is where a chunk ends.
    fn table(&self, shard: usize, capacity: usize) -> impl DoubleEndedIterator<Item = &Slot> {
        let end = chunks().find(|chunk| end_before(*chunk) >= capacity).unwrap_or(END_OF_CHUNKS);
        (FIRST_CHUNK..end).flat_map(move |chunk| {
            let slots = self.chunks.get(chunk).unwrap_or_default();
            let length = length_of(chunk);
            slots.get(shard * length..(shard + 1) * length).unwrap_or_default()
        })
    }

    /// One more table reaches as far as `to` instead of `from`.
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
                // A huge page has pieces of many tables. If not all of them may come to use theirs,
                // pages have to be small, or they would take memory that is counted nowhere.
                let bytes = self.bytes.load(Ordering::Relaxed);
                let has_room = bytes.saturating_add(length * size_of::<Slot>()) <= self.max_bytes;
                self.chunks.make(chunk, length, has_room);
            }
            // The small ones are all in use now. A page at a time, so that nobody waits for all of
            // them.
            if chunk == small.end {
                self.chunks.gather(*users);
            }
            *users += 1;
        }
    }

    /// The chunks that have less than a huge page.
    fn small(&self) -> std::ops::Range<u8> {
        let is_small = |chunk: &u8| self.shards * length_of(*chunk) * size_of::<Slot>() < HUGE;
        FIRST_CHUNK..chunks().find(|chunk| !is_small(chunk)).unwrap_or(END_OF_CHUNKS)
    }

    /// One table reaches as far as `to` only, not `from`, and has left nothing behind. What nobody
    /// uses is given back.
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

/// Where keys are expected as long as there is no memory for them.
pub(crate) static NOWHERE: AtHome = [const { Slot::empty() }; FEW];

/// The slot of `hash` among those where it is [expected](Arena::at_home): all but one key in a
/// hundred are there. [`Arena::get`] is for the others, and for the one key in 2^128 whose hash
/// looks like an empty slot's. As quick as can be once they are in the cache.
#[inline(always)]
pub(crate) fn look(
    [first, second, third, fourth, fifth, sixth]: &AtHome,
    hash: Hash,
) -> Option<&Slot> {
    look_at(first, second, hash)
        .or_else(|| look_at(third, fourth, hash))
        .or_else(|| look_at(fifth, sixth, hash))
}

/// Most are in the first cache line, but nobody can guess in which half of a line: choose without a
/// branch.
#[inline(always)]
fn look_at<'a>(first: &'a Slot, second: &'a Slot, hash: Hash) -> Option<&'a Slot> {
    let slot =
        select_unpredictable(first.order.load(Ordering::Relaxed) == hash.order, first, second);
    slot.is_of(hash).then_some(slot)
}

/// The same for slots that are still on their way.
#[inline(always)]
pub(crate) fn look_ahead(
    [first, second, third, fourth, fifth, sixth]: &AtHome,
    hash: Hash,
) -> Option<SlotPair<'_>> {
    SlotPair::look(first, second, hash)
        .or_else(|| SlotPair::look(third, fourth, hash))
        .or_else(|| SlotPair::look(fifth, sixth, hash))
}

/// Fetches the first two cache lines. Few keys are in the third.
#[inline(always)]
pub(crate) fn prefetch([first, _, third, ..]: &AtHome) {
    raw::prefetch(first);
    raw::prefetch(third);
}

/// The home of a hash in a table of so many cache lines: the first slot of one.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the product shifted by 64 is below `lines`")]
fn home(order: u64, lines: usize) -> usize {
    (((u128::from(order) * lines as u128) >> 64) as usize).wrapping_mul(2)
}

/// In which chunk a slot of a table is, and where there.
#[inline(always)]
#[allow(
    clippy::cast_possible_truncation,
    reason = "there are fewer chunks than that for any table"
)]
fn locate(shard: usize, index: usize) -> (u8, usize) {
    let number = index.wrapping_add(OFFSET);
    // Homes are even, so an odd number is one step further, and in the same chunk; and it has a
    // logarithm.
    let odd = number | 1;
    let log_length = raw::log2(odd).wrapping_sub(2);
    let quarter = odd.wrapping_shr(log_length); // 4 to 7
    let chunk = (log_length as usize).wrapping_mul(4).wrapping_add(quarter).wrapping_add(8);
    // The shard's first slot in the chunk, and what is left of the number when that of the chunk's
    // first slot is taken away.
    (chunk as u8, shard.wrapping_sub(quarter).wrapping_shl(log_length).wrapping_add(number))
}

/// How many slots a chunk has for each shard.
fn length_of(chunk: u8) -> usize {
    1 << (chunk / 4 - 3)
}

/// How many slots the chunks before this one have for each shard.
fn end_before(chunk: u8) -> usize {
    (usize::from(4 + chunk % 4) * length_of(chunk)) - OFFSET
}

fn chunks() -> std::ops::Range<u8> {
    FIRST_CHUNK..END_OF_CHUNKS
}

/// The chunks that begin at or behind `from` and before `to`.
fn chunks_within(from: usize, to: usize) -> impl Iterator<Item = u8> {
    chunks()
        .skip_while(move |chunk| end_before(*chunk) < from)
        .take_while(move |chunk| end_before(*chunk) < to)
}

/// The table of one shard, in the hands of who holds its lock. It always reaches to the end of a
/// chunk.
#[derive(Debug)]
pub(crate) struct Slots {
    arena: Arc<Arena>,
    shard: usize,
    lines: usize,
    capacity: usize,
    used: usize,
}

impl Slots {
    /// The table of a shard, empty.
    pub(crate) fn new(arena: Arc<Arena>, shard: usize) -> Self {
        Slots { arena, shard, lines: 0, capacity: 0, used: 0 }
    }

    /// How many keys there are.
    pub(crate) fn len(&self) -> usize {
        self.used
    }

    /// How many slots there are.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// How many bytes the table takes.
    pub(crate) fn bytes(&self) -> usize {
        self.capacity * size_of::<Slot>()
    }

    /// Cache lines where keys are at home, without the spare ones at the end.
    pub(crate) fn lines(&self) -> usize {
        self.lines
    }

    fn slot(&self, index: usize) -> &Slot {
        self.arena.slot(self.shard, index)
    }

    /// Where `hash` is, or where it belongs.
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

    /// Shows all entries, in order.
    pub(crate) fn for_each(&self, mut show: impl FnMut(SlotEntry)) {
        let entries = self.arena.table(self.shard, self.capacity).map(Slot::load);
        entries.filter(|entry| !entry.is_empty()).for_each(&mut show);
    }

    /// Whether another key would make the runs long: five eighths of the slots are taken.
    pub(crate) fn is_nearly_full(&self) -> bool {
        self.used * 8 >= 2 * self.lines * 5
    }

    /// Puts an entry at `index`, where [`find`](Slots::find) said it belongs, and takes out the
    /// next one behind it for which `idle` says so, if there is one before the next gap: nothing
    /// has to be moved beyond it, and the table gets no fuller. Says whether there was.
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

    /// Moves those from `index` on one further, up to `gap`, which nobody needs.
    fn shift(&mut self, index: usize, gap: usize) {
        for index in (index..gap).rev() {
            self.slot(index + 1).store(self.get(index));
        }
    }

    /// Puts an entry at `index`, where [`find`](Slots::find) said it belongs.
    pub(crate) fn insert(&mut self, index: usize, entry: SlotEntry) {
        let gap = (index..self.capacity).find(|index| self.slot(*index).is_empty()).unwrap_or_else(
            || {
                // The run at the end has used up the spare slots: one more chunk of them, and
                // nothing else moves.
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

    /// Takes out the entry at `index`, and lets the ones behind it move up.
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

    /// Walks over up to `count` slots from `from` and takes out those for which `idle` says so.
    /// Returns where to go on, and how many it took out.
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
                self.remove(index); // what moved up stands at this index now
            } else {
                index += 1;
                left -= 1;
            }
        }
        (index, before - self.used)
    }

    /// Rebuilds the table without the entries for which `idle` says so, with five twelfths of the
    /// homes free, or a few more, and with at least so many slots.
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

        // All to the far end, in order; then each to its new place, which is never behind where it
        // is.
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

/// Cache lines of a table of so many slots where keys are at home: all but a few at the end, so
/// that a run there has somewhere to go.
fn lines_of(capacity: usize) -> usize {
    (capacity - (capacity / 8).min(16)) / 2
}

/// The end of the chunk in which the last of so many slots is.
fn end_after(capacity: usize) -> usize {
    end_before(locate(0, capacity.max(1) - 1).0 + 1)
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

    /// The second of four, so that a mistake shows in the others.
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
    fn every_slot_has_a_place_of_its_own() {
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
    fn keys_that_are_all_at_home_at_the_end_find_room_there() {
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
    fn the_next_one_that_is_idle_gives_its_room() {
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
    fn agrees_with_an_ordered_map_whatever_is_put_in_and_taken_out() {
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
