//! A shard: a part of the keys behind one lock, and the packing of states into its slots.
//!
//! Most states are two numbers: a bucket's level and time, a window's count and time. They are
//! packed into a slot together with the number of the limit that wrote them. Other states are in a
//! list beside the table, and the slot has their index.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_core::algorithm::Kernel;
use tidegate_core::algorithm::bucket::Level;
use tidegate_core::algorithm::window::Count;
use tidegate_core::{Algorithm, EXACT, Limit, Record, State, Timestamp};

use super::interned::Interned;
use super::slots::{Arena, Hash, SlotEntry, Slots};

/// Bits of a slot's word that hold a number below 2^53; the other eleven hold half of the tag.
const NUMBER_BITS: u32 = 53;
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;
const TAG_BITS: u32 = 64 - NUMBER_BITS;
const TAG: u32 = (1 << TAG_BITS) - 1;
/// The tag of a slot whose record is in the list. Others are numbers of limits.
const LISTED: u32 = (1 << (2 * TAG_BITS)) - 1;
/// A tag that no slot has.
const NO_TAG: u32 = 0;

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

/// The tag of a limit's states, as in the two words of a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LimitTag {
    low: u64,
    high: u64,
}

impl LimitTag {
    fn new(tag: u32) -> Self {
        LimitTag {
            low: u64::from(tag & TAG) << NUMBER_BITS,
            high: u64::from(tag >> TAG_BITS) << NUMBER_BITS,
        }
    }

    /// The tag of a limit's number. Without a number, a tag that no slot has.
    pub(crate) fn of(number: Option<u32>) -> Self {
        LimitTag::new(number.map_or(NO_TAG, |number| number + FIRST_TAG))
    }

    /// The numbers of a slot with this tag.
    #[inline(always)]
    pub(crate) fn unpack(self, (low, high): (u64, u64)) -> Option<(u64, u64)> {
        let (first, second) = (low ^ self.low, high ^ self.high);
        ((first | second) >> NUMBER_BITS == 0).then_some((first, second))
    }

    /// The words of a slot with this tag. Numbers of states are below 2^53.
    #[inline(always)]
    pub(crate) fn pack(self, (first, second): (u64, u64)) -> (u64, u64) {
        debug_assert!((first | second) >> NUMBER_BITS == 0, "{first} {second}");
        (first | self.low, second | self.high)
    }
}

/// Two numbers and a tag.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    tag: u32,
    first: u64,
    second: u64,
}

impl Packed {
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "eleven bits remain after the shift")]
    pub(crate) fn of((low, high): (u64, u64)) -> Self {
        let tag = ((high >> NUMBER_BITS) as u32) << TAG_BITS | (low >> NUMBER_BITS) as u32;
        Packed { tag, first: low & NUMBER, second: high & NUMBER }
    }

    /// Whether `limit` wrote it. False if the state is in the list, or was read during a write.
    #[inline]
    pub(crate) fn is_of(self, limit: &Limit, limits: &Interned) -> bool {
        limits.is(self.tag.wrapping_sub(FIRST_TAG), limit)
    }

    /// The state that it is, if it is not in the list.
    fn state(self, limits: &Interned) -> State {
        limits.state(self.tag.wrapping_sub(FIRST_TAG), (self.first, self.second))
    }

    #[inline]
    pub(crate) fn tag(self) -> LimitTag {
        LimitTag::new(self.tag)
    }

    /// The words of a slot. The upper half of the tag is never zero, because a zero word marks an
    /// empty slot.
    fn words(self) -> (u64, u64) {
        self.tag().pack((self.first & NUMBER, self.second & NUMBER))
    }
}

/// The first tag, so that the upper half of tags is never zero.
const FIRST_TAG: u32 = TAG + 1;

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

    /// Adds a key from a snapshot; `limit` wrote it, if it was packed. Returns whether it was added.
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

/// The record of two numbers that `limit` wrote, if the limit packs its states and the numbers are
/// valid.
pub(crate) fn record_of(limit: &Limit, [first, second]: [u64; 2]) -> Option<Record> {
    let packs = match limit.algorithm() {
        Algorithm::Bucket(_) => second < EXACT,
        Algorithm::Window(window) => !window.from_first_hit && second <= Timestamp::MAX.as_micros(),
        _ => false,
    };
    (packs && first < EXACT)
        .then(|| Record { state: unpack((first, second), limit), ..Record::default() })
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

/// A state as two numbers, if it can be packed and its limit has a number.
fn pack(record: &Record, limit: &Limit, limits: &Interned) -> Option<Packed> {
    if !record.receipts.is_empty() || !record.state.fits(limit.algorithm()) {
        return None;
    }
    let (first, second) = match record.state {
        State::Bucket { level, .. } => (level.units, level.at),
        // An aligned window's start follows from any moment in it.
        State::Window { count, from_first_hit: false, .. } => (count.used, count.last),
        _ => return None,
    };
    let tag = tag_of(limit, limits)?;
    Some(Packed { tag, first, second: second.as_micros() })
}

/// The tag of states that `limit` wrote, if it has a number.
fn tag_of(limit: &Limit, limits: &Interned) -> Option<u32> {
    limits.number(limit).map(|number| number + FIRST_TAG)
}

/// The state that [`pack`] packed.
fn unpack(numbers: (u64, u64), limit: &Limit) -> State {
    match limit.algorithm() {
        Algorithm::Bucket(bucket) => State::Bucket { rate: bucket.rate, level: level_of(numbers) },
        Algorithm::Window(window) => {
            let count = count_of(numbers, window.period);
            State::Window { period: window.period, from_first_hit: window.from_first_hit, count }
        }
        _ => State::Idle,
    }
}

/// A bucket's level from its two numbers.
#[inline(always)]
pub(crate) fn level_of((units, at): (u64, u64)) -> Level {
    Level { units, at: Timestamp::from_kept_micros(at) }
}

/// A window's count from its two numbers.
#[inline(always)]
pub(crate) fn count_of((used, last): (u64, u64), period: u64) -> Count {
    let start = Timestamp::from_micros(last - last % period);
    Count { start, last: Timestamp::from_micros(last), used }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_added_behind_the_search_is_found_when_idle() {
        const MOST: usize = 2 * SEARCH;
        // Among the last that the first piece of a search looks at.
        const PASSED: u64 = SEARCH as u64 - 8;
        let limits = Interned::new(usize::MAX, Arc::default());
        let (day, second): (Limit, Limit) = ("1/d".parse().unwrap(), "1/s".parse().unwrap());
        let mut shard = Shard::new(Arc::new(Arena::new(1, usize::MAX, Arc::default())), 0);
        let add = |shard: &mut Shard, place: u64, limit: &Limit, now: Timestamp| {
            let hash = Hash { order: place << 50, other: place };
            let mut record = Record::default();
            let charge = tidegate_core::Charge::new(limit, &mut record, 1);
            assert!(tidegate_core::decide(tidegate_core::Op::Check, &mut [charge], now).allowed());
            let Err(index) = shard.find(hash) else { panic!("it was not there") };
            shard.add(hash, index, record, limit, &limits, now);
        };
        let has_room = |shard: &mut Shard, now: Timestamp| {
            if shard.len() >= MOST {
                shard.look_for_idle(&limits, now);
            }
            shard.len() < MOST
        };
        for place in 1..=MOST as u64 {
            add(&mut shard, place, &day, Timestamp::EPOCH);
        }
        // After the first step of a search, a key that it has passed is replaced by another one that
        // is soon idle.
        assert!(!has_room(&mut shard, Timestamp::EPOCH));
        let index = shard.find(Hash { order: PASSED << 50, other: PASSED }).unwrap();
        let _ = shard.take(index, &limits);
        shard.put(index, Record::default(), &day, &limits, Timestamp::EPOCH);
        assert!(has_room(&mut shard, Timestamp::EPOCH));
        add(&mut shard, PASSED, &second, Timestamp::EPOCH);
        for _ in 0..10 {
            assert!(!has_room(&mut shard, Timestamp::EPOCH));
        }
        let later = Timestamp::from_secs(2);
        assert!((0..10).any(|_| has_room(&mut shard, later)));
    }
}
