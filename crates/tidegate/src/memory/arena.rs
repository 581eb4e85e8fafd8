//! The memory of all shards' tables, in chunks that never move.

use std::hint::select_unpredictable;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::slots::{Hash, SlotPair, SlotPosition};
use crate::raw::{self, FEW, HUGE, Later, Slot};

/// The number of slots of the first chunk, per shard. Chunks grow by a quarter of a power of two:
/// four of 8, four of 16, four of 32 and so on.
pub(super) const SMALLEST: usize = 8;
/// An offset that simplifies the arithmetic: the first chunk starts where four of its length would
/// have ended.
pub(super) const OFFSET: usize = 4 * SMALLEST;
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
    pub(super) fn from(&self, shard: usize, index: usize) -> Option<&[Slot]> {
        let (chunk, position) = locate(shard, index);
        self.chunks.get(chunk)?.get(position..)
    }

    #[inline(always)]
    pub(super) fn slot(&self, shard: usize, index: usize) -> &Slot {
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
                SlotPosition::Before => {}
                SlotPosition::Here => return Some(slot),
                SlotPosition::Behind => return None,
            }
        }
        None
    }

    /// The slots of a shard's table, in order. `capacity` is the end of a chunk.
    pub(super) fn table(
        &self,
        shard: usize,
        capacity: usize,
    ) -> impl DoubleEndedIterator<Item = &Slot> {
        let end = chunks().find(|chunk| end_before(*chunk) >= capacity).unwrap_or(END_OF_CHUNKS);
        (FIRST_CHUNK..end).flat_map(move |chunk| {
            let slots = self.chunks.get(chunk).unwrap_or_default();
            let length = length_of(chunk);
            slots.get(shard * length..(shard + 1) * length).unwrap_or_default()
        })
    }

    /// Records that a table now reaches to `to` instead of `from`.
    pub(super) fn reach(&self, from: usize, to: usize) {
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
    pub(super) fn small(&self) -> std::ops::Range<u8> {
        let is_small = |chunk: &u8| self.shards * length_of(*chunk) * size_of::<Slot>() < HUGE;
        FIRST_CHUNK..chunks().find(|chunk| !is_small(chunk)).unwrap_or(END_OF_CHUNKS)
    }

    /// Records that a table now reaches to `to` instead of `from`, where its slots are empty.
    /// Unused memory is returned to the system.
    pub(super) fn leave(&self, from: usize, to: usize) {
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
pub(super) fn look_at<'a>(first: &'a Slot, second: &'a Slot, hash: Hash) -> Option<&'a Slot> {
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
pub(super) fn home(order: u64, lines: usize) -> usize {
    (((u128::from(order) * lines as u128) >> 64) as usize).wrapping_mul(2)
}

/// The chunk of a table's slot, and its index there.
#[inline(always)]
#[allow(
    clippy::cast_possible_truncation,
    reason = "there are fewer chunks than that for any table"
)]
pub(super) fn locate(shard: usize, index: usize) -> (u8, usize) {
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
pub(super) fn length_of(chunk: u8) -> usize {
    1 << (chunk / 4 - 3)
}

/// The number of slots of all chunks before this one, per shard.
pub(super) fn end_before(chunk: u8) -> usize {
    (usize::from(4 + chunk % 4) * length_of(chunk)) - OFFSET
}

pub(super) fn chunks() -> std::ops::Range<u8> {
    FIRST_CHUNK..END_OF_CHUNKS
}

/// The chunks that start at or after `from` and before `to`.
pub(super) fn chunks_within(from: usize, to: usize) -> impl Iterator<Item = u8> {
    chunks()
        .skip_while(move |chunk| end_before(*chunk) < from)
        .take_while(move |chunk| end_before(*chunk) < to)
}
