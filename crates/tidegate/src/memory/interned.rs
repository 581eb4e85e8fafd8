//! Limits by number, so that a slot can say in two bytes which limit wrote it.
//!
//! Only limits whose states fit into a slot have a number: buckets, and windows that are aligned. A
//! number is read without a lock, by whoever holds the lock of a shard and by whoever reads a slot
//! without it; so what it stands for is a few atomic words that may be written over when the number
//! is given to another limit. That happens only when no key refers to it any more, which [`Sweep`]
//! finds out:
//!
//! 1. It visits all shards and notes which numbers their slots have. The others, unless they are
//!    [held](Pinned), are *retired*: no state is written with them from then on, unless their limit
//!    is asked for again.
//! 2. It visits all shards once more. Whoever was about to write a retired number held the lock of
//!    its shard since before, so its slot is seen now. What is still retired and in no slot is
//!    free.
//!
//! A reading without a lock that finds the words of a number's next limit has begun before its slot
//! was emptied, so the version of its shard has changed since, and the reading does not count.
//! `fence(Release)` before the words are written makes sure that it sees that.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use tidegate_core::algorithm::bucket::Rate;
use tidegate_core::{Algorithm, Limit, Period, State, Timestamp};

use super::Memory;
use super::shard::{count_of, level_of};

const CHUNK: usize = 256;
const CHUNKS: usize = 256;

/// The most limits that have a number. States of further ones are kept in full instead.
pub(crate) const MAX_INTERNED: usize = CHUNK * CHUNKS - 1;
/// Limits that nobody [holds](Pinned) get at most one number in so many.
const AD_HOC_PART: usize = 4;
/// And take at most this part of the bytes that a store may have.
const BYTES_PART: usize = 16;
/// At least so many, however few bytes there are.
const LEAST: usize = 64;
/// What one takes, about: its words, its holders, and its place in the map.
const BYTES_EACH: usize = size_of::<LimitEntry>() + 2 * size_of::<(u64, u32)>();

/// A sweep takes a step when so many states in a row would have liked a number.
const REFUSALS_PER_STEP: u32 = 16;
/// A sweep that found all that there was to find is not begun again for so long.
const SWEEP_EVERY_US: u64 = 1_000_000;

/// The number is given to a limit.
const TAKEN: u64 = 1;
/// The limit is an aligned window, not a bucket.
const WINDOW: u64 = 2;
/// It counts what it denies.
const COUNTS_REJECTED: u64 = 4;
/// No state may be written with the number: it is about to be free.
const RETIRED: u64 = 8;

/// One number: the limit as words, and how many hold it.
#[derive(Debug, Default)]
struct LimitEntry {
    head: AtomicU64,
    debt: AtomicU64,
    amount: AtomicU64,
    period: AtomicU64,
    /// The rest is zero for windows.
    capacity: AtomicU64,
    p: AtomicU64,
    q: AtomicU64,
    grid: AtomicU64,
    /// How many hold the number, and how many of those may have one whatever others have.
    holders: AtomicU32,
    reserved: AtomicU32,
}

/// The head of a limit's words; none if its states do not fit into a slot.
#[inline(always)]
fn head_of(limit: &Limit) -> Option<u64> {
    let kind = match limit.algorithm() {
        Algorithm::Bucket(_) => 0,
        Algorithm::Window(window) if !window.from_first_hit => WINDOW,
        _ => return None,
    };
    Some(TAKEN | kind | if limit.counts_rejected() { COUNTS_REJECTED } else { 0 })
}

impl LimitEntry {
    /// Whether it is this limit's; not while it is retired.
    #[inline(always)]
    fn is(&self, limit: &Limit) -> bool {
        head_of(limit).is_some_and(|head| {
            self.head.load(Ordering::Relaxed) == head && self.has_numbers_of(limit)
        })
    }

    #[inline(always)]
    fn has_numbers_of(&self, limit: &Limit) -> bool {
        let differs = |own: &AtomicU64, other: u64| own.load(Ordering::Relaxed) ^ other;
        let rest = match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                differs(&self.amount, bucket.amount)
                    | differs(&self.period, bucket.period)
                    | differs(&self.capacity, bucket.capacity)
                    | differs(&self.p, bucket.rate.p)
                    | differs(&self.q, bucket.rate.q)
                    | differs(&self.grid, bucket.rate.grid)
            }
            Algorithm::Window(window) => {
                differs(&self.amount, window.amount) | differs(&self.period, window.period)
            }
            _ => return false,
        };
        rest | differs(&self.debt, limit.debt()) == 0
    }

    fn write(&self, limit: &Limit, head: u64) {
        let (amount, period, capacity, rate) = match limit.algorithm() {
            Algorithm::Bucket(bucket) => {
                (bucket.amount, bucket.period, bucket.capacity, bucket.rate)
            }
            Algorithm::Window(window) => (window.amount, window.period, 0, Rate::default()),
            _ => return,
        };
        // Whoever sees any of these without a lock also sees that the slot it came from has
        // changed.
        fence(Ordering::Release);
        for (own, word) in [
            (&self.debt, limit.debt()),
            (&self.amount, amount),
            (&self.period, period),
            (&self.capacity, capacity),
            (&self.p, rate.p),
            (&self.q, rate.q),
            (&self.grid, rate.grid),
            (&self.head, head),
        ] {
            own.store(word, Ordering::Relaxed);
        }
    }

    /// The limit; for whoever knows that it does not change meanwhile.
    fn limit(&self) -> Option<Limit> {
        let read = |own: &AtomicU64| own.load(Ordering::Relaxed);
        let (head, debt, period) =
            (read(&self.head), read(&self.debt), Period::micros(read(&self.period)));
        macro_rules! built {
            ($builder:expr) => {{
                let builder = $builder;
                let builder = if debt > 0 { builder.debt(debt) } else { builder };
                if head & COUNTS_REJECTED == 0 {
                    builder.build()
                } else {
                    builder.count_rejected().build()
                }
            }};
        }
        let limit = match head & (TAKEN | WINDOW) {
            TAKEN => built!(Limit::bucket(read(&self.amount), period).burst(read(&self.capacity))),
            0 => return None,
            _ => built!(Limit::window(read(&self.amount), period)),
        };
        limit.ok().filter(|limit| self.has_numbers_of(limit))
    }
}

type Chunk = [LimitEntry; CHUNK];

/// Limits by number, from 1. Reading one takes no lock.
#[derive(Debug)]
pub(crate) struct Interned {
    known: RwLock<KnownLimits>,
    /// Who was asked for last: most programs have few limits, and comparing is cheaper than
    /// hashing.
    last: AtomicU32,
    chunks: [OnceLock<Box<Chunk>>; CHUNKS],
    hasher: RandomState,
    /// How many there may be that nobody holds.
    max_ad_hoc: usize,
    /// What the store has allocated; what this takes is part of it.
    bytes: Arc<AtomicUsize>,
    /// How many states would have liked a number since the last step of a sweep.
    refusals: AtomicU32,
    sweep: Mutex<Sweep>,
}

#[derive(Debug, Default)]
struct KnownLimits {
    /// By a hash that nobody outside can foresee. Of two limits with one hash, the second has no
    /// number.
    numbers: HashMap<u64, u32>,
    free: Vec<u32>,
    /// The highest number ever given.
    highest: u32,
    /// How many bytes of these the store knows of.
    counted: usize,
    /// How many are reserved.
    reserved: usize,
}

impl Interned {
    /// An empty one for a store that may have so many bytes, and counts them here.
    pub(crate) fn new(max_bytes: usize, bytes: Arc<AtomicUsize>) -> Self {
        let most = max_bytes / BYTES_PART / BYTES_EACH;
        Interned {
            known: RwLock::default(),
            last: AtomicU32::new(0),
            chunks: [const { OnceLock::new() }; CHUNKS],
            hasher: RandomState::new(),
            max_ad_hoc: most.clamp(LEAST, MAX_INTERNED / AD_HOC_PART),
            bytes,
            refusals: AtomicU32::new(0),
            sweep: Mutex::default(),
        }
    }

    #[inline(always)]
    fn entry(&self, number: u32) -> Option<&LimitEntry> {
        let number = number as usize;
        Some(&self.chunks.get(number / CHUNK)?.get()?[number % CHUNK])
    }

    /// Whether a slot with this number was written by `limit`. For whoever has no lock, that counts
    /// only if the slot has not changed since it was read.
    #[inline(always)]
    pub(crate) fn is(&self, number: u32, limit: &Limit) -> bool {
        self.entry(number).is_some_and(|entry| entry.is(limit))
    }

    /// The state that the two numbers of a slot are; for whoever holds the lock of its shard.
    pub(crate) fn state(&self, number: u32, numbers: (u64, u64)) -> State {
        let Some(entry) = self.entry(number) else { return State::Idle };
        let read = |own: &AtomicU64| own.load(Ordering::Relaxed);
        match read(&entry.head) & (TAKEN | WINDOW) {
            TAKEN => {
                let rate = Rate { p: read(&entry.p), q: read(&entry.q), grid: read(&entry.grid) };
                State::Bucket { rate, level: level_of(numbers) }
            }
            0 => State::Idle,
            _ => {
                let period = read(&entry.period);
                State::Window { period, from_first_hit: false, count: count_of(numbers, period) }
            }
        }
    }

    /// The limit of a slot's number; for whoever holds the lock of its shard.
    pub(crate) fn limit(&self, number: u32) -> Option<Limit> {
        self.entry(number)?.limit()
    }

    /// The number of a limit, to be written into a slot by whoever holds the lock of its shard;
    /// `None` if its states do not fit into one, or there are too many limits.
    pub(crate) fn number(&self, limit: &Limit) -> Option<u32> {
        let last = self.last.load(Ordering::Relaxed);
        if self.is(last, limit) {
            return Some(last);
        }
        head_of(limit)?;
        let hash = self.hasher.hash_one(limit);
        let number =
            self.known.read().numbers.get(&hash).copied().filter(|number| self.is(*number, limit));
        let number = match number {
            Some(number) => number,
            None => self.known_or_new(&mut self.known.write(), limit, hash, false)?,
        };
        self.last.store(number, Ordering::Relaxed);
        Some(number)
    }

    /// The number that a limit has, or else a free one.
    fn known_or_new(
        &self,
        known: &mut KnownLimits,
        limit: &Limit,
        hash: u64,
        is_reserved: bool,
    ) -> Option<u32> {
        let head = head_of(limit)?;
        if let Some(&number) = known.numbers.get(&hash) {
            let entry = self.entry(number)?;
            if entry.head.load(Ordering::Relaxed) & !RETIRED != head || !entry.has_numbers_of(limit)
            {
                return None;
            }
            entry.head.store(head, Ordering::Relaxed);
            return Some(number);
        }
        if !is_reserved && known.numbers.len() - known.reserved >= self.max_ad_hoc {
            self.refusals.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let number = match known.free.pop() {
            Some(number) => number,
            None if known.highest as usize >= MAX_INTERNED => return None,
            None => {
                known.highest += 1;
                known.highest
            }
        };
        let chunk = &self.chunks[number as usize / CHUNK];
        let entry = &chunk.get_or_init(|| Box::new(std::array::from_fn(|_| LimitEntry::default())))
            [number as usize % CHUNK];
        entry.write(limit, head);
        // What cannot be told from its words would be saved as another.
        if entry.limit().as_ref() != Some(limit) {
            entry.head.store(0, Ordering::Relaxed);
            known.free.push(number);
            return None;
        }
        known.numbers.insert(hash, number);
        self.count(known);
        Some(number)
    }

    /// Tells the store how many bytes there are now.
    fn count(&self, known: &mut KnownLimits) {
        let chunks = (known.highest as usize / CHUNK + 1) * size_of::<Chunk>();
        // A map has a byte for each place, and places for an eighth more than it can hold.
        let map = known.numbers.capacity() * 8 / 7 * (size_of::<(u64, u32)>() + 1);
        let bytes = chunks + map + known.free.capacity() * size_of::<u32>();
        self.bytes.fetch_add(bytes.wrapping_sub(known.counted), Ordering::Relaxed);
        known.counted = bytes;
    }

    /// A number that stays the limit's; [`release`](Interned::release) gives it back. One that is
    /// reserved is not counted among those of callers.
    fn hold(&self, limit: &Limit, is_reserved: bool) -> Option<u32> {
        head_of(limit)?;
        let mut known = self.known.write();
        let number =
            self.known_or_new(&mut known, limit, self.hasher.hash_one(limit), is_reserved)?;
        let entry = self.entry(number)?;
        entry.holders.fetch_add(1, Ordering::Relaxed);
        if is_reserved && entry.reserved.fetch_add(1, Ordering::Relaxed) == 0 {
            known.reserved += 1;
        }
        Some(number)
    }

    fn release(&self, number: u32, is_reserved: bool) {
        let Some(entry) = self.entry(number) else { return };
        let mut known = self.known.write();
        if is_reserved && entry.reserved.fetch_sub(1, Ordering::Relaxed) == 1 {
            known.reserved -= 1;
        }
        entry.holders.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether it is time for the next [step](Interned::sweep) of a sweep: numbers have been
    /// refused.
    #[inline]
    pub(crate) fn wants_sweep(&self) -> bool {
        self.refusals.load(Ordering::Relaxed) >= REFUSALS_PER_STEP
    }

    /// Visits the next of so many shards: `visit` locks it, forgets its idle keys, and shows the
    /// numbers of the others. For whoever holds no lock.
    pub(crate) fn sweep(
        &self,
        shards: usize,
        now: Timestamp,
        visit: impl FnOnce(usize, &mut dyn FnMut(u32)),
    ) {
        let Some(mut sweep) = self.sweep.try_lock() else { return };
        let sweep = &mut *sweep;
        self.refusals.store(0, Ordering::Relaxed);
        let is_early = sweep
            .ended_at
            .is_some_and(|ended| ended <= now && now.micros_since(ended) < SWEEP_EVERY_US);
        if sweep.next == 0 && !sweep.is_second && is_early {
            return;
        }
        let in_use = &mut sweep.in_use;
        visit(sweep.next, &mut |number| {
            let place = number as usize / 64;
            if place >= in_use.len() {
                in_use.resize(place + 1, 0);
            }
            in_use[place] |= 1 << (number % 64);
        });
        sweep.next += 1;
        if sweep.next < shards {
            return;
        }
        let in_use = std::mem::take(&mut sweep.in_use);
        let is_in_use = |number: u32| {
            in_use.get(number as usize / 64).is_some_and(|bits| bits >> (number % 64) & 1 == 1)
        };
        let mut known = self.known.write();
        sweep.next = 0;
        if sweep.is_second {
            self.free(&mut known, is_in_use);
            sweep.is_second = false;
            sweep.ended_at = Some(now);
        } else {
            sweep.is_second = self.retire(&known, is_in_use);
            if !sweep.is_second {
                sweep.ended_at = Some(now);
            }
        }
    }

    /// Retires what nobody holds and no slot has. Says whether there is any.
    fn retire(&self, known: &KnownLimits, is_in_use: impl Fn(u32) -> bool) -> bool {
        let mut is_any = false;
        for &number in known.numbers.values() {
            let Some(entry) = self.entry(number) else { continue };
            if !is_in_use(number) && entry.holders.load(Ordering::Relaxed) == 0 {
                entry.head.fetch_or(RETIRED, Ordering::Relaxed);
                is_any = true;
            }
        }
        is_any
    }

    /// Frees what is retired and in no slot; what came into one meanwhile stays.
    fn free(&self, known: &mut KnownLimits, is_in_use: impl Fn(u32) -> bool) {
        let KnownLimits { numbers, free, .. } = known;
        numbers.retain(|_, &mut number| {
            let Some(entry) = self.entry(number) else { return true };
            if entry.head.load(Ordering::Relaxed) & RETIRED == 0 {
                return true;
            }
            let is_needed = is_in_use(number) || entry.holders.load(Ordering::Relaxed) > 0;
            if is_needed {
                entry.head.fetch_and(!RETIRED, Ordering::Relaxed);
            } else {
                entry.head.store(0, Ordering::Relaxed);
                free.push(number);
            }
            is_needed
        });
        if numbers.len() * 4 < numbers.capacity() {
            numbers.shrink_to(numbers.len() * 2);
        }
        self.count(known);
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.known.read().numbers.len()
    }
}

/// Which numbers are in use, found out a shard at a time.
#[derive(Debug, Default)]
struct Sweep {
    /// The next shard to visit.
    next: usize,
    /// Whether it visits them for the second time.
    is_second: bool,
    /// The numbers that were seen this time, a bit each.
    in_use: Vec<u64>,
    /// When the last one was done.
    ended_at: Option<Timestamp>,
}

/// A number that stays its limit's, whether a key refers to it or not.
#[derive(Debug)]
pub(super) struct Pinned {
    pub(super) memory: Memory,
    number: Option<u32>,
    is_reserved: bool,
}

impl Pinned {
    /// For as long as it lives, if there is one; whatever others have, if it `is_reserved`.
    pub(super) fn new(memory: &Memory, limit: &Limit, is_reserved: bool) -> Self {
        Pinned {
            memory: memory.clone(),
            number: memory.inner.limits.hold(limit, is_reserved),
            is_reserved,
        }
    }

    pub(super) fn number(&self) -> Option<u32> {
        self.number
    }
}

impl Clone for Pinned {
    fn clone(&self) -> Self {
        // There is a holder, so nobody takes it away meanwhile.
        if let Some(entry) = self.number.and_then(|number| self.memory.inner.limits.entry(number)) {
            entry.holders.fetch_add(1, Ordering::Relaxed);
            entry.reserved.fetch_add(u32::from(self.is_reserved), Ordering::Relaxed);
        }
        Pinned { memory: self.memory.clone(), ..*self }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.memory.inner.limits.release(number, self.is_reserved);
        }
    }
}

/// Limits that a memory store keeps in the least room for as long as this lives, whatever other
/// limits its callers bring: see [`Memory::reserve_limits`].
#[derive(Clone, Debug)]
#[must_use = "the limits are reserved for as long as it lives"]
pub struct ReservedLimits {
    _pinned: Vec<Pinned>,
}

impl ReservedLimits {
    pub(super) fn new<'a>(memory: &Memory, limits: impl IntoIterator<Item = &'a Limit>) -> Self {
        ReservedLimits {
            _pinned: limits.into_iter().map(|limit| Pinned::new(memory, limit, true)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn interned(max_bytes: usize) -> Interned {
        Interned::new(max_bytes, Arc::default())
    }

    fn window(amount: usize) -> Limit {
        Limit::window(amount as u64, Period::SECOND).build().unwrap()
    }

    /// A whole sweep over one shard, whose slots have these numbers.
    fn sweep(interned: &Interned, seconds: u64, in_use: &[u32]) {
        for _ in 0..2 {
            interned.sweep(1, Timestamp::from_secs(seconds), |_, show| {
                in_use.iter().for_each(|number| show(*number))
            });
        }
    }

    #[test]
    fn numbers_are_stable_and_bounded() {
        let interned = interned(usize::MAX);
        let most = MAX_INTERNED / AD_HOC_PART;
        for amount in 1..=most {
            let number = interned.number(&window(amount)).unwrap();
            assert_eq!(interned.number(&window(amount)), Some(number));
            assert!(
                interned.is(number, &window(amount)) && !interned.is(number, &window(amount + 1))
            );
            assert_eq!(interned.limit(number), Some(window(amount)));
        }
        assert_eq!(interned.number(&window(most + 1)), None);
        assert_eq!(interned.limit(0), None);
        // Those that are reserved are not counted among them, up to all that there are.
        let reserved: Vec<_> =
            (most + 1..=MAX_INTERNED).map(|amount| interned.hold(&window(amount), true)).collect();
        assert!(reserved.iter().all(Option::is_some));
        assert_eq!(interned.hold(&window(MAX_INTERNED + 1), true), None);
        let bytes = interned.bytes.load(Ordering::Relaxed);
        assert!(bytes < MAX_INTERNED * 110 && bytes > MAX_INTERNED * 72, "{bytes}");
    }

    #[test]
    fn every_limit_that_has_a_number_is_told_from_it() {
        let interned = interned(usize::MAX);
        for text in [
            "10/s",
            "7/min",
            "10/s burst 3",
            "10/s burst 3 debt 5",
            "1000000/d burst 5000000",
            "10/s count rejected",
            "10/min window",
            "10/min window debt 4",
            "10/min window count rejected",
            "1/1000h",
        ] {
            let limit: Limit = text.parse().unwrap();
            let number = interned.number(&limit).unwrap_or_else(|| panic!("{text} has no number"));
            assert_eq!(interned.limit(number), Some(limit), "{text}");
        }
        for text in
            ["10/min window from first hit", "10/min sliding", "10/min log", "5 concurrent ttl 1m"]
        {
            assert_eq!(interned.number(&text.parse().unwrap()), None, "{text}");
        }
    }

    #[test]
    fn a_small_store_has_few_numbers_for_callers() {
        let interned = interned(1 << 20);
        let found =
            (1..10_000).filter(|amount| interned.number(&window(*amount)).is_some()).count();
        assert!((200..1000).contains(&found), "{found}");
        assert!(interned.bytes.load(Ordering::Relaxed) <= (1 << 20) / BYTES_PART * 3 / 2);
    }

    #[test]
    fn numbers_that_no_key_has_are_given_again() {
        let interned = interned(1 << 20);
        let most = interned.max_ad_hoc;
        let numbers: Vec<u32> =
            (1..=most).map(|amount| interned.number(&window(amount)).unwrap()).collect();
        assert!(!interned.wants_sweep());
        for _ in 0..REFUSALS_PER_STEP {
            assert_eq!(interned.number(&window(most + 1)), None);
        }
        assert!(interned.wants_sweep());
        let held = interned.hold(&window(5), false).unwrap();
        sweep(&interned, 10, &numbers[..2]);
        assert_eq!(interned.len(), 3, "two that are in slots, and one that is held");
        assert!(
            interned.is(numbers[0], &window(1))
                && interned.is(numbers[1], &window(2))
                && interned.is(held, &window(5))
        );
        assert!(!interned.is(numbers[2], &window(3)));
        let bytes = interned.bytes.load(Ordering::Relaxed);
        for amount in most + 1..=2 * most - 3 {
            assert!(interned.number(&window(amount)).is_some(), "{amount}");
        }
        assert_eq!(interned.number(&window(2 * most)), None);
        assert!(
            interned.bytes.load(Ordering::Relaxed) <= bytes + bytes / 2,
            "they are the same ones"
        );
    }

    #[test]
    fn a_number_that_comes_into_a_slot_during_a_sweep_stays() {
        let interned = interned(usize::MAX);
        let [one, two, three] = [1, 2, 3].map(|amount| interned.number(&window(amount)).unwrap());
        let now = Timestamp::from_secs(1);
        interned.sweep(1, now, |_, _| {});
        assert!(
            ![one, two, three].iter().any(|number| interned.limit(*number).is_none()),
            "slots can still be read"
        );
        assert!(!interned.is(one, &window(1)), "but nothing is written with them");
        // The first is asked for, the second was about to be written, the third is not needed.
        assert_eq!(interned.number(&window(1)), Some(one));
        interned.sweep(1, now, |_, show| show(two));
        assert!(
            interned.is(one, &window(1))
                && interned.is(two, &window(2))
                && !interned.is(three, &window(3))
        );
        assert_eq!((interned.len(), interned.number(&window(4))), (2, Some(three)));
    }

    #[test]
    fn a_sweep_is_not_begun_again_at_once() {
        let interned = interned(usize::MAX);
        sweep(&interned, 10, &[]);
        let visited = AtomicBool::new(false);
        let visit = |now: u64| {
            interned
                .sweep(1, Timestamp::from_secs(now), |_, _| visited.store(true, Ordering::Relaxed));
            visited.swap(false, Ordering::Relaxed)
        };
        assert!(!visit(10) && visit(11));
    }
}
