//! A shard: a part of the keys behind one lock, and the packing of states into its slots.
//!
//! Most states are two numbers: a bucket's level and time, a window's count and time. They are
//! packed into a slot together with the number of the limit that wrote them. Other states are in a
//! list beside the table, and the slot has their index.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_core::algorithm::Kernel;
use tidegate_core::algorithm::bucket::Level;
use tidegate_core::{Algorithm, Limit, Record, Timestamp};

use super::arena::Arena;
use super::interned::Interned;
use super::packed::{FIRST_TAG, LISTED, Packed, pack, tag_of};
use super::slots::{Hash, SlotEntry, Slots};

/// The size of a table or list below which it is not made smaller.
const SMALL_TABLE: usize = 4096;

/// The number of slots that one insertion into a full shard searches for idle keys.
const SEARCH: usize = 2048;

#[derive(Debug)]
pub(crate) struct Shard {
    slots: Slots,
    list: Option<Box<RecordList>>,
    search: Search,
    /// The [bytes](Shard::bytes) that are included in the store's counter.
    counted: usize,
}

/// A search for idle keys in steps, which does not start again before a key can be idle.
#[derive(Debug, Default)]
struct Search {
    /// The next slot.
    hand: usize,
    /// The number of slots since the last idle key.
    passed: usize,
    /// The earliest time at which one of those keys is idle.
    first_idle_at: Option<Timestamp>,
    /// After a complete round, the earliest time at which a key is idle.
    nothing_before: Timestamp,
}

impl Search {
    /// Records a key that may be in slots the search has passed.
    fn expect(&mut self, idle_at: Timestamp) {
        self.nothing_before = self.nothing_before.min(idle_at);
        self.first_idle_at = self.first_idle_at.map(|first| first.min(idle_at));
    }
}

/// Records that do not fit into a slot.
#[derive(Debug, Default)]
struct RecordList {
    records: Vec<Option<Record>>,
    free: Vec<usize>,
    /// The heap memory of the records.
    heap: usize,
}

impl RecordList {
    fn get(&self, place: usize) -> Option<&Record> {
        self.records.get(place)?.as_ref()
    }

    fn take(&mut self, place: usize) -> Option<Record> {
        let record = self.records.get_mut(place)?.take()?;
        self.heap -= record.heap_bytes();
        Some(record)
    }

    fn set(&mut self, place: usize, record: Record) {
        self.take(place);
        if let Some(own) = self.records.get_mut(place) {
            self.heap += record.heap_bytes();
            *own = Some(record);
        }
    }

    fn free(&mut self, place: usize) {
        self.take(place);
        if place < self.records.len() {
            self.free.push(place);
        }
    }

    fn bytes(&self) -> usize {
        size_of::<RecordList>()
            + self.records.capacity() * size_of::<Option<Record>>()
            + self.free.capacity() * size_of::<usize>()
            + self.heap
    }
}

impl Shard {
    /// Creates an empty shard with its table in `arena`.
    pub(crate) fn new(arena: Arc<Arena>, number: usize) -> Self {
        Shard {
            slots: Slots::new(arena, number),
            list: None,
            search: Search::default(),
            counted: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The number of cache lines that can be a home.
    pub(crate) fn lines(&self) -> usize {
        self.slots.lines()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.slots.bytes() + self.list.as_ref().map_or(0, |list| list.bytes())
    }

    /// Updates the store's counter of bytes.
    #[inline]
    pub(crate) fn count(&mut self, all: &AtomicUsize) {
        let bytes = self.bytes();
        if bytes != self.counted {
            all.fetch_add(bytes.wrapping_sub(self.counted), Ordering::Relaxed);
            self.counted = bytes;
        }
    }

    /// The maximum number of bytes that another key takes, in a slot or in the list.
    pub(crate) fn bytes_for_one_more(&self, is_listed: bool) -> usize {
        let table =
            if self.slots.is_nearly_full() { self.slots.bytes() / 4 + SMALL_TABLE } else { 0 };
        let list = match &self.list {
            _ if !is_listed => 0,
            Some(list) if !list.free.is_empty() || list.records.len() < list.records.capacity() => {
                0
            }
            list => list.as_ref().map_or(0, |list| list.bytes() - list.heap) + SMALL_TABLE,
        };
        table + list
    }

    /// Whether its table is much larger than it needs.
    pub(crate) fn is_spacious(&self) -> bool {
        self.slots.bytes() > SMALL_TABLE && self.slots.len() * 4 < self.slots.capacity()
    }

    #[inline]
    pub(crate) fn find(&self, hash: Hash) -> Result<usize, usize> {
        self.slots.find(hash)
    }

    fn packed(&self, index: usize) -> Packed {
        let entry = self.slots.get(index);
        Packed::of((entry.low, entry.high))
    }

    fn set_packed(&mut self, index: usize, packed: Packed) {
        let (low, high) = packed.words();
        self.slots.set(index, low, high);
    }

    /// Takes the record at `index` until [`put`](Shard::put) puts it back.
    pub(crate) fn take(&mut self, index: usize, limits: &Interned) -> Record {
        let packed = self.packed(index);
        if packed.tag == LISTED {
            let list = self.list.get_or_insert_default();
            return list.take(list_place(packed.first)).unwrap_or_default();
        }
        Record { state: packed.state(limits), ..Record::default() }
    }

    /// Puts back a record that was taken at `index`, or removes the key if it is idle.
    pub(crate) fn put(
        &mut self,
        index: usize,
        record: Record,
        limit: &Limit,
        limits: &Interned,
        now: Timestamp,
    ) {
        let was = self.packed(index);
        let idle_at = record.idle_at();
        self.search.expect(idle_at);
        if now >= idle_at {
            self.free(was);
            self.slots.remove(index);
            return;
        }
        if was.tag != LISTED && !record.state.fits(limit.algorithm()) {
            return; // unchanged state of another limit: it stays as that one wrote it
        }
        if let Some(packed) = pack(&record, limit, limits) {
            self.free(was);
            self.set_packed(index, packed);
        } else if was.tag == LISTED {
            self.list.get_or_insert_default().set(list_place(was.first), record);
        } else {
            let packed = self.enlist(record);
            self.set_packed(index, packed);
        }
    }

    /// Adds a new key at `index`, from [`find`](Shard::find).
    pub(crate) fn add(
        &mut self,
        hash: Hash,
        index: usize,
        record: Record,
        limit: &Limit,
        limits: &Interned,
        now: Timestamp,
    ) {
        let idle_at = record.idle_at();
        if now >= idle_at {
            return;
        }
        self.search.expect(idle_at);
        let packed = pack(&record, limit, limits).unwrap_or_else(|| self.enlist(record));
        self.add_packed(hash, index, packed, limits, now);
    }

    /// Adds a new key with the level of a bucket. Returns false if the limit has no number.
    pub(crate) fn add_level(
        &mut self,
        hash: Hash,
        index: usize,
        level: &Level,
        limit: &Limit,
        limits: &Interned,
        now: Timestamp,
    ) -> bool {
        let (Algorithm::Bucket(bucket), Some(tag)) = (limit.algorithm(), tag_of(limit, limits))
        else {
            return false;
        };
        let idle_at = bucket.idle_at(level);
        if now < idle_at {
            self.search.expect(idle_at);
            let packed = Packed { tag, first: level.units, second: level.at.as_micros() };
            self.add_packed(hash, index, packed, limits, now);
        }
        true
    }

    fn add_packed(
        &mut self,
        hash: Hash,
        index: usize,
        packed: Packed,
        limits: &Interned,
        now: Timestamp,
    ) {
        let (low, high) = packed.words();
        let entry = SlotEntry { hash, low, high };
        let mut index = index;
        if self.slots.is_nearly_full() {
            let Shard { slots, list, .. } = self;
            if slots.replace(index, entry, |other| {
                now >= idle_at(other, list, limits) && forget(other, list)
            }) {
                return;
            }
            // The table shrinks by half at most, because removed keys are likely to be used again.
            self.rebuild_for(self.slots.capacity() / 2, limits, now);
            index = self.slots.find(hash).unwrap_or_else(|place| place);
        }
        self.slots.insert(index, entry);
    }

    /// Calls `show` with every key and its state.
    pub(crate) fn for_each(&self, show: &mut impl FnMut(Hash, KeptState<'_>)) {
        self.slots.for_each(|entry| {
            let Packed { tag, first, second } = Packed::of((entry.low, entry.high));
            if tag != LISTED {
                show(
                    entry.hash,
                    KeptState::Packed { number: tag.wrapping_sub(FIRST_TAG), first, second },
                );
            } else if let Some(record) =
                self.list.as_ref().and_then(|list| list.get(list_place(first)))
            {
                show(entry.hash, KeptState::Record(record));
            }
        });
    }

    /// Adds a key from a snapshot; `limit` wrote it, if it was packed. Returns whether it was
    /// added.
    pub(crate) fn restore(
        &mut self,
        hash: Hash,
        record: Record,
        limit: Option<&Limit>,
        limits: &Interned,
        now: Timestamp,
    ) -> bool {
        let Err(index) = self.find(hash) else { return false };
        self.search.expect(record.idle_at());
        let packed = limit
            .and_then(|limit| pack(&record, limit, limits))
            .unwrap_or_else(|| self.enlist(record));
        self.add_packed(hash, index, packed, limits, now);
        true
    }

    /// Searches a part of a full shard for idle keys and removes them.
    pub(crate) fn look_for_idle(&mut self, limits: &Interned, now: Timestamp) {
        if now < self.search.nothing_before {
            return;
        }
        let Shard { slots, list, search, .. } = self;
        let (next, forgotten) = slots.sweep(search.hand, SEARCH, |entry| {
            let idle_at = idle_at(entry, list, limits);
            search.first_idle_at =
                Some(search.first_idle_at.map_or(idle_at, |first| first.min(idle_at)));
            now >= idle_at && forget(entry, list)
        });
        search.hand = next;
        search.passed += SEARCH;
        if forgotten > 0 {
            (search.passed, search.first_idle_at) = (0, None);
        } else if search.passed >= slots.capacity() {
            search.nothing_before = search.first_idle_at.take().unwrap_or(Timestamp::EPOCH);
            search.passed = 0;
        }
    }

    /// Removes all idle keys, and calls `show` with the limits' numbers of the others.
    pub(crate) fn show_limits(
        &mut self,
        limits: &Interned,
        now: Timestamp,
        show: &mut dyn FnMut(u32),
    ) {
        let Shard { slots, list, .. } = self;
        slots.sweep(0, usize::MAX, |entry| {
            if now >= idle_at(entry, list, limits) {
                return forget(entry, list);
            }
            let packed = Packed::of((entry.low, entry.high));
            if packed.tag != LISTED {
                show(packed.tag.wrapping_sub(FIRST_TAG));
            }
            false
        });
    }

    /// Removes all idle keys, and returns memory if there is much more than needed.
    pub(crate) fn rebuild(&mut self, limits: &Interned, now: Timestamp) {
        self.rebuild_for(0, limits, now);
    }

    fn rebuild_for(&mut self, least: usize, limits: &Interned, now: Timestamp) {
        let Shard { slots, list, .. } = self;
        slots.rebuild(least, |entry| now >= idle_at(entry, list, limits) && forget(entry, list));
        if let Some(list) = &mut self.list
            && list.free.len() == list.records.len()
        {
            self.list = None;
        }
    }

    fn enlist(&mut self, record: Record) -> Packed {
        let list = self.list.get_or_insert_default();
        let place = list.free.pop().unwrap_or_else(|| {
            list.records.push(None);
            list.records.len() - 1
        });
        list.set(place, record);
        Packed { tag: LISTED, first: place as u64, second: 0 }
    }

    fn free(&mut self, packed: Packed) {
        if packed.tag == LISTED {
            self.list.get_or_insert_default().free(list_place(packed.first));
        }
    }
}

/// The state of a key.
pub(crate) enum KeptState<'a> {
    /// Two numbers that the limit of this number wrote.
    Packed { number: u32, first: u64, second: u64 },
    /// Any other state.
    Record(&'a Record),
}

/// The time from which on the state in a slot is idle.
fn idle_at(entry: &SlotEntry, list: &Option<Box<RecordList>>, limits: &Interned) -> Timestamp {
    let packed = Packed::of((entry.low, entry.high));
    if packed.tag != LISTED {
        return packed.state(limits).idle_at();
    }
    match list.as_ref().and_then(|list| list.records.get(list_place(packed.first))) {
        Some(Some(record)) => record.idle_at(),
        Some(None) => Timestamp::MAX, // taken for a decision
        None => Timestamp::EPOCH,
    }
}

/// Frees the record in the list of a slot that is to be removed.
fn forget(entry: &SlotEntry, list: &mut Option<Box<RecordList>>) -> bool {
    let packed = Packed::of((entry.low, entry.high));
    if let (LISTED, Some(list)) = (packed.tag, list) {
        list.free(list_place(packed.first));
    }
    true
}

#[allow(clippy::cast_possible_truncation, reason = "it was an index of this process")]
fn list_place(number: u64) -> usize {
    number as usize
}

#[cfg(test)]
mod tests;
