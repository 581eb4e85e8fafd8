//! Numbers for limits, so that a slot refers to its limit in two bytes.
//!
//! Only limits whose state fits into a slot have a number: buckets and aligned windows. Numbers are
//! read without a lock on this table, with and without the lock of a shard. So the limit of a
//! number is a few atomic words, which are overwritten when the number is given to another limit.
//! That happens only if no key refers to the number, as [`Sweep`] finds out:
//!
//! 1. It visits all shards and collects the numbers in their slots. The other numbers, unless they
//!    are [held](super::pinned::Pinned), are *retired*: no state is written with them, unless their
//!    limit is used again.
//! 2. It visits all shards again. A thread that was about to write a retired number held the lock
//!    of its shard since before, so its slot is found now. Numbers that are still retired and in no
//!    slot are free.
//!
//! A read without a lock that finds the words of a number's next limit started before its slot was
//! emptied. The version of its shard has changed since, so the read is not valid. The
//! `fence(Release)` before the words are written makes the new version visible to it.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use tidegate_core::algorithm::bucket::Rate;
use tidegate_core::{Algorithm, Limit, Period, State, Timestamp};

use super::packed::{count_of, level_of};

const CHUNK: usize = 256;
const CHUNKS: usize = 256;

/// The maximum number of limits with a number. States of other limits are kept as records.
pub(crate) const MAX_INTERNED: usize = CHUNK * CHUNKS - 1;
/// Limits that are not reserved get at most one of this many numbers.
const AD_HOC_PART: usize = 4;
/// The table takes at most this part of the store's maximum bytes.
const BYTES_PART: usize = 16;
/// The minimum for limits that are not reserved.
const LEAST: usize = 64;
/// The approximate bytes of one: its words, its holders, and its entry in the map.
const BYTES_EACH: usize = size_of::<LimitEntry>() + 2 * size_of::<(u64, u32)>();

/// A sweep takes a step after this many states could not get a number.
const REFUSALS_PER_STEP: u32 = 16;
/// The interval between sweeps.
const SWEEP_EVERY_US: u64 = 1_000_000;

/// The number has a limit.
const TAKEN: u64 = 1;
/// The limit is an aligned window, not a bucket.
const WINDOW: u64 = 2;
/// The limit counts denied requests.
const COUNTS_REJECTED: u64 = 4;
/// No state may be written with the number, which is about to be free.
const RETIRED: u64 = 8;

/// One number: the limit as words, and the number of its holders.
#[derive(Debug, Default)]
pub(super) struct LimitEntry {
    head: AtomicU64,
    debt: AtomicU64,
    amount: AtomicU64,
    period: AtomicU64,
    /// This word and the next ones are zero for windows.
    capacity: AtomicU64,
    p: AtomicU64,
    q: AtomicU64,
    grid: AtomicU64,
    /// The number of holders, and of those that reserve it.
    pub(super) holders: AtomicU32,
    pub(super) reserved: AtomicU32,
}

/// The head word of a limit; none if its states do not fit into a slot.
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
    /// Whether it is the number of this limit and not retired.
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
        // A read without a lock that sees one of these words also sees that its slot has changed.
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

    /// The limit. The caller must know that it does not change meanwhile.
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

/// Limits by number, from 1. Reads take no lock.
#[derive(Debug)]
pub(crate) struct Interned {
    known: RwLock<KnownLimits>,
    /// The number that was looked up last: most programs have few limits, and a comparison is
    /// cheaper than a hash.
    last: AtomicU32,
    chunks: [OnceLock<Box<Chunk>>; CHUNKS],
    hasher: RandomState,
    /// The maximum number of limits that are not reserved.
    max_ad_hoc: usize,
    /// The bytes that the store has allocated, including those of this table.
    bytes: Arc<AtomicUsize>,
    /// The number of states that could not get a number since the last step of a sweep.
    refusals: AtomicU32,
    sweep: Mutex<Sweep>,
}

#[derive(Debug, Default)]
struct KnownLimits {
    /// By a keyed hash. Of two limits with the same hash, the second gets no number.
    numbers: HashMap<u64, u32>,
    free: Vec<u32>,
    /// The highest number so far.
    highest: u32,
    /// The bytes of this table that are included in the store's counter.
    counted: usize,
    /// The number of reserved limits.
    reserved: usize,
}

impl Interned {
    /// An empty table for a store that counts its bytes in `bytes`, up to `max_bytes`.
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
    pub(super) fn entry(&self, number: u32) -> Option<&LimitEntry> {
        let number = number as usize;
        Some(&self.chunks.get(number / CHUNK)?.get()?[number % CHUNK])
    }

    /// Whether a slot with this number was written by `limit`. Without the lock of the shard, the
    /// result is valid only if the slot has not changed since it was read.
    #[inline(always)]
    pub(crate) fn is(&self, number: u32, limit: &Limit) -> bool {
        self.entry(number).is_some_and(|entry| entry.is(limit))
    }

    /// The state in the two numbers of a slot. The caller must hold the lock of its shard.
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

    /// The limit of a slot's number. The caller must hold the lock of its shard.
    pub(crate) fn limit(&self, number: u32) -> Option<Limit> {
        self.entry(number)?.limit()
    }

    /// The number of a limit, to be written into a slot under the lock of its shard. `None` if its
    /// states do not fit into a slot, or there are too many limits.
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

    /// The number of a limit, or a new one.
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
        // A limit that its words do not determine would be saved as another one.
        if entry.limit().as_ref() != Some(limit) {
            entry.head.store(0, Ordering::Relaxed);
            known.free.push(number);
            return None;
        }
        known.numbers.insert(hash, number);
        self.count(known);
        Some(number)
    }

    /// Updates the store's counter of bytes.
    fn count(&self, known: &mut KnownLimits) {
        let chunks = (known.highest as usize / CHUNK + 1) * size_of::<Chunk>();
        // A map has a control byte per bucket, and an eighth more buckets than its capacity.
        let map = known.numbers.capacity() * 8 / 7 * (size_of::<(u64, u32)>() + 1);
        let bytes = chunks + map + known.free.capacity() * size_of::<u32>();
        self.bytes.fetch_add(bytes.wrapping_sub(known.counted), Ordering::Relaxed);
        known.counted = bytes;
    }

    /// Holds the number of a limit until [`release`](Interned::release). A reserved one does not
    /// count towards the maximum.
    pub(super) fn hold(&self, limit: &Limit, is_reserved: bool) -> Option<u32> {
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

    pub(super) fn release(&self, number: u32, is_reserved: bool) {
        let Some(entry) = self.entry(number) else { return };
        let mut known = self.known.write();
        if is_reserved && entry.reserved.fetch_sub(1, Ordering::Relaxed) == 1 {
            known.reserved -= 1;
        }
        entry.holders.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether the next [step](Interned::sweep) of a sweep is due, because numbers were refused.
    #[inline]
    pub(crate) fn wants_sweep(&self) -> bool {
        self.refusals.load(Ordering::Relaxed) >= REFUSALS_PER_STEP
    }

    /// Visits the next of `shards` shards: `visit` locks it, removes its idle keys, and calls its
    /// argument with the numbers of the others. The caller must hold no lock.
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

    /// Retires the numbers that are not held and in no slot. Returns whether there are any.
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

    /// Frees the retired numbers that are in no slot, and keeps those that are in use again.
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

/// The search for unused numbers, one shard at a time.
#[derive(Debug, Default)]
struct Sweep {
    /// The next shard to visit.
    next: usize,
    /// Whether this is the second round.
    is_second: bool,
    /// The numbers that were found in this round, one bit each.
    in_use: Vec<u64>,
    /// The end of the last sweep.
    ended_at: Option<Timestamp>,
}

#[cfg(test)]
mod tests;
