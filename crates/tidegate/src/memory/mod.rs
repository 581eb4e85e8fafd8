//! The memory store: exact, bounded, fast, and inside the process.
//!
//! Keys are spread over shards, each behind its own lock, and known by a keyed hash in 128 bits
//! ([`hash`]): their bytes are not kept, and nobody who does not know the key of this store can
//! make them collide. Nothing runs in the background: a key that has become the same as one never
//! seen is forgotten when its room is needed, or when it is touched.

mod gate;
mod hash;
mod interned;
mod line;
mod overflow;
mod series;
mod shard;
mod slots;
mod snapshot;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tidegate_core::algorithm::bucket::Level;
use tidegate_core::{Algorithm, Decision, Limit, Op, Record, Timestamp, Verdict};

use crate::clock::Clock;
use crate::raw;
pub use crate::store::Overflow;
use crate::store::{Charge, Check, Deciding, InvalidCheck, Scope, Store};
#[cfg(feature = "tower")]
pub(crate) use gate::Brief;
pub use gate::Gate;
use gate::{Allowed, Answer};
use hash::Hashing;
pub use interned::ReservedLimits;
use interned::{Interned, Pinned};
use line::Line;
use overflow::{Ask, Held, Home, Overflows};
pub use series::Series;
use shard::{Packed, Shard, Tag};
use slots::{Arena, AtHome, Hash};
pub use snapshot::{LoadError, Loaded, Saved};

/// How many keys are kept unless told otherwise.
pub const DEFAULT_MAX_KEYS: usize = 10_000_000;
const MAX_SHARDS: usize = 256;
/// How often to try without the lock, before waiting for it: enough for somebody else to have
/// written once or twice.
const ATTEMPTS: usize = 3;
/// A shard is worth having from this many keys on.
const KEYS_PER_SHARD: usize = 1024;
/// And if there may be this many bytes for it.
const BYTES_PER_SHARD: usize = 256 << 10;

/// Keeps state in this process. Clones share it.
///
/// It answers at once and cannot fail, so besides being a [`Store`] it can be called directly,
/// without a runtime:
/// ```
/// use tidegate::{Limit, Memory};
/// let memory = Memory::new();
/// let limit: Limit = "10/s".parse()?;
/// let verdict = memory.check("user:7", &limit, 1);
/// assert!(verdict.allowed);
/// assert_eq!(verdict.remaining, 9);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone)]
pub struct Memory {
    inner: Arc<Inner>,
}

struct Inner {
    /// As many as are in use, and for the rest of what a byte can choose among, nothing: so nobody
    /// has to ask whether there is such a shard.
    shards: Box<[Line; MAX_SHARDS]>,
    /// All bits set that choose a shard in use.
    last_shard: u8,
    /// How many cache lines each shard's table has where keys are at home, for those who read
    /// without the lock. They change only when keys come and go; apart from the locks they stay in
    /// every processor's cache.
    lines: [AtomicUsize; MAX_SHARDS],
    arena: Arc<Arena>,
    hashing: Hashing,
    /// What `hashing` was drawn by.
    seeds: (u64, u64),
    limits: Interned,
    clock: Clock,
    max_keys_per_shard: usize,
    max_bytes: usize,
    /// What all shards, and the table of limits, have allocated.
    bytes: Arc<AtomicUsize>,
    overflow: Overflow,
    overflows: Mutex<Overflows>,
    /// How many charges found no room.
    without_room: AtomicU64,
}

/// What there is to be room for.
#[derive(Clone, Copy)]
enum More {
    /// Another key, of at most so many in its shard, in a slot or in the list.
    Key { most: usize, is_listed: bool },
    /// More of a key that is there.
    Growth,
}

/// A key, and where it is expected.
#[derive(Clone, Copy)]
struct Expected<'a> {
    hash: Hash,
    line: &'a Line,
    at_home: &'a AtHome,
}

type Guard<'a> = raw::Guard<'a, Box<Shard>>;

/// Settings of a [`Memory`].
#[derive(Clone, Debug)]
#[must_use = "there is no store until `build` is called"]
pub struct MemoryBuilder {
    clock: Clock,
    max_keys: usize,
    max_bytes: usize,
    overflow: Overflow,
}

impl MemoryBuilder {
    /// The clock that judges; the machine's unless told otherwise.
    pub fn clock(mut self, clock: impl Into<Clock>) -> Self {
        self.clock = clock.into();
        self
    }

    /// The most keys to keep, at least 1; ten million unless told otherwise. A key with several
    /// limits counts once for each.
    ///
    /// The bound is hard. It is kept shard by shard, so a few per cent may stay free when new keys
    /// overflow. It bounds keys, not bytes: a key under `log` or `concurrent` holds an entry for
    /// each hit or lease that still counts, at most 200 000; see [`max_bytes`](Self::max_bytes).
    pub fn max_keys(mut self, keys: usize) -> Self {
        self.max_keys = keys.max(1);
        self
    }

    /// The most bytes to use for keys and what is kept of them; no bound unless told otherwise.
    ///
    /// When they are used up, idle keys are forgotten; then new keys [overflow](Self::overflow),
    /// and so does whatever would have to grow: a hit under `log`, a lease under `concurrent`,
    /// another step of a `sliding`, a charge with an id. Where new keys share a bucket, those are
    /// denied: a hit cannot be kept elsewhere. Other keys that are there stay exact. What is
    /// counted is what is allocated. At most 4 MiB more is used, and while a list of many thousand
    /// hits or leases grows, as much as that list takes.
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// What happens to new keys when all places are taken by keys in use. A charge may have
    /// [policy](crate::resilience::Policy) of its own.
    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.overflow = overflow;
        self
    }

    /// The store, empty.
    pub fn build(self) -> Memory {
        let seed = || RandomState::new().build_hasher().finish();
        self.build_with((seed(), seed()))
    }

    fn build_with(self, seeds: (u64, u64)) -> Memory {
        let shards = (self.max_keys / KEYS_PER_SHARD)
            .min(self.max_bytes / BYTES_PER_SHARD)
            .clamp(1, MAX_SHARDS);
        let shards = 1 << shards.ilog2();
        let bytes = Arc::new(AtomicUsize::new(0));
        let arena = Arc::new(Arena::new(shards, self.max_bytes, Arc::clone(&bytes)));
        let line = |number| Line::new(Shard::new(Arc::clone(&arena), number));
        Memory {
            inner: Arc::new(Inner {
                shards: Box::new(std::array::from_fn(line)),
                last_shard: u8::try_from(shards - 1).expect("a byte chooses among them"),
                lines: [const { AtomicUsize::new(0) }; MAX_SHARDS],
                arena,
                hashing: Hashing::new(seeds.0, seeds.1),
                seeds,
                limits: Interned::new(self.max_bytes, Arc::clone(&bytes)),
                clock: self.clock,
                max_keys_per_shard: self.max_keys / shards,
                max_bytes: self.max_bytes,
                bytes,
                overflow: self.overflow,
                overflows: Mutex::default(),
                without_room: AtomicU64::new(0),
            }),
        }
    }
}

/// Its settings; never its keys, of which there may be millions.
impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Inner { clock, max_keys_per_shard, max_bytes, overflow, last_shard, .. } = &*self.inner;
        let max_keys = max_keys_per_shard * (usize::from(*last_shard) + 1);
        f.debug_struct("Memory")
            .field("clock", clock)
            .field("max_keys", &max_keys)
            .field("max_bytes", max_bytes)
            .field("overflow", overflow)
            .finish_non_exhaustive()
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl Memory {
    /// A store of up to ten million keys on the machine's clock.
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// For other settings.
    pub fn builder() -> MemoryBuilder {
        let (clock, overflow) = (Clock::default(), Overflow::default());
        MemoryBuilder { clock, max_keys: DEFAULT_MAX_KEYS, max_bytes: usize::MAX, overflow }
    }

    /// The clock that judges.
    pub fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    /// How many keys are kept, those included that are idle and not yet forgotten.
    pub fn len(&self) -> usize {
        self.inner.in_use().iter().map(|line| line.shard.lock().len()).sum()
    }

    /// Whether no key is kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many bytes are allocated for keys and what is kept of them.
    pub fn allocated_bytes(&self) -> usize {
        let shards = self.inner.in_use().len() * (size_of::<Line>() + size_of::<Shard>());
        shards + self.inner.bytes.load(Ordering::Relaxed)
    }

    /// How many bytes it may allocate for keys and what is kept of them.
    pub fn max_bytes(&self) -> usize {
        self.inner.max_bytes
    }

    /// How many charges found no room, and were decided as [`Overflow`] says.
    pub fn without_room(&self) -> u64 {
        self.inner.without_room.load(Ordering::Relaxed)
    }

    /// Forgets every key that has become the same as one never seen. Never needed; for those who
    /// want their memory back now.
    pub fn reclaim(&self) {
        let now = self.inner.clock.now();
        for (line, lines) in self.inner.in_use().iter().zip(&self.inner.lines) {
            let mut shard = line.shard.lock();
            shard.rebuild(&self.inner.limits, now);
            shard.count(&self.inner.bytes);
            lines.store(shard.lines(), Ordering::Relaxed);
        }
    }

    /// This store under one limit: the fastest way to many decisions.
    pub fn gate(&self, limit: &Limit) -> Gate {
        let pinned = Pinned::new(self, limit, true);
        let tag = Tag::of(pinned.number());
        Gate { pinned, limit: *limit, tag, other: other_of(&Scope::AdHoc, limit, 0) }
    }

    /// Keeps keys under these limits in the least room, for as long as what is returned lives and
    /// whatever other limits callers bring.
    ///
    /// A bucket or a window takes a slot of 32 bytes that has a number for its limit. Limits get
    /// numbers as they come; up to 16 383 that nobody reserved have one at a time, fewer with small
    /// [`max_bytes`](MemoryBuilder::max_bytes). Keys under further ones take about five times as
    /// much. So a program whose callers bring limits of their own reserves those of its
    /// configuration. A [`Gate`] has its limit reserved.
    ///
    /// ```
    /// use tidegate::{Limits, Memory};
    /// let memory = Memory::new();
    /// let configured: Limits = "10/s; 500/h".parse()?;
    /// let _reserved = memory.reserve_limits(configured.as_slice());
    /// # Ok::<(), tidegate::ParseError>(())
    /// ```
    pub fn reserve_limits<'a>(
        &self,
        limits: impl IntoIterator<Item = &'a Limit>,
    ) -> ReservedLimits {
        ReservedLimits::new(self, limits)
    }

    /// The same for keys of any scope, for whoever has several at hand.
    pub fn series(&self, scope: &Scope<'_>, limit: &Limit) -> Series {
        Series::new(self, scope, limit)
    }

    /// Checks one key against one limit: the same as a [`Check`] of one charge. A cost of zero only
    /// looks.
    ///
    /// Under a `concurrent` limit this takes a lease without a name, which ends with its ttl. To
    /// release one, ask with a [`Check`] that has an [id](Check::with_id), or through
    /// [`Limiter::lease`](crate::Limiter::lease).
    #[must_use = "let the request pass only if it is allowed"]
    #[inline]
    pub fn check<K: AsRef<[u8]> + ?Sized>(&self, key: &K, limit: &Limit, cost: u64) -> Verdict {
        self.inner.check_key(key.as_ref(), limit, cost)
    }

    /// The same as [`check`](Memory::check) for those who only want to know whether the request may
    /// pass; a little faster.
    #[must_use = "let the request pass only if it is allowed"]
    #[inline]
    pub fn allows<K: AsRef<[u8]> + ?Sized>(&self, key: &K, limit: &Limit, cost: u64) -> bool {
        let Allowed(allowed) = self.inner.check_key(key.as_ref(), limit, cost);
        allowed
    }

    /// Checks several keys against one limit, one after the other, each by itself. Reads the clock
    /// once.
    ///
    /// Much faster than one call each when there are many keys: the memory of the next ones is
    /// fetched while one is decided.
    #[must_use = "let the requests pass only if they are allowed"]
    pub fn check_many<K: AsRef<[u8]>>(&self, asks: &[(K, u64)], limit: &Limit) -> Vec<Verdict> {
        self.gate(limit).check_many(asks)
    }

    /// Decides a check of any kind.
    ///
    /// # Errors
    /// If no store could decide it: it charges nothing, too much at once, or a key that is too
    /// long.
    pub fn decide(&self, check: &Check<'_>) -> Result<Decision, InvalidCheck> {
        check.validate()?;
        let now = self.inner.clock.now();
        Ok(match check.plain_charge() {
            Some(charge) => self.inner.check_charge(charge, now),
            None => self.inner.decide(check, now),
        })
    }
}

impl Store for Memory {
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        Box::pin(async move { Ok(Memory::decide(self, check)?) })
    }
}

impl Inner {
    fn in_use(&self) -> &[Line] {
        &self.shards[..=usize::from(self.last_shard)]
    }

    /// Decides one charge now on a key by itself.
    #[inline(always)]
    fn check_key<A: Answer>(&self, key: &[u8], limit: &Limit, cost: u64) -> A {
        let hash = self.hash(&Scope::AdHoc, key, limit, 0);
        self.check(&self.expect(hash), limit, cost, self.clock.now(), self.tag_of(limit))
    }

    /// Decides a plain check of one charge, without the shard's lock where that is possible.
    fn check_charge(&self, charge: &Charge<'_>, now: Timestamp) -> Decision {
        let Charge { subject, limit, position, cost, .. } = charge;
        let hash = self.hash(&subject.scope, &subject.key, limit, *position);
        let verdict: Verdict =
            self.check(&self.expect(hash), limit, *cost, now, self.tag_of(limit));
        Decision::of_one(verdict, verdict.allowed, now)
    }

    /// Decides one charge, and makes of the answer what the caller wants: a yes or no, or all the
    /// numbers. `tag_of` says which tag a slot has to have to be this limit's.
    #[inline(always)]
    fn check<A: Answer>(
        &self,
        expected: &Expected<'_>,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        tag_of: impl Fn((u64, u64)) -> Option<Tag>,
    ) -> A {
        let look = || slots::look_ahead(expected.at_home, expected.hash);
        match expected.line.try_check(limit, cost, now, &tag_of, look) {
            Some(answer) => answer,
            None => self.check_again(expected.hash, limit, cost, now, tag_of),
        }
    }

    /// The same for a key whose memory has been on its way for a while.
    #[inline(always)]
    fn check_arrived<A: Answer>(
        &self,
        expected: &Expected<'_>,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        tag_of: impl Fn((u64, u64)) -> Option<Tag>,
    ) -> A {
        let look = || slots::look(expected.at_home, expected.hash);
        match expected.line.try_check(limit, cost, now, &tag_of, look) {
            Some(answer) => answer,
            None => self.check_again(expected.hash, limit, cost, now, tag_of),
        }
    }

    /// Somebody else was writing, or it is a key that is new, or whose state another limit wrote,
    /// or is not packed.
    #[cold]
    #[inline(never)]
    fn check_again<A: Answer>(
        &self,
        hash: Hash,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        tag_of: impl Fn((u64, u64)) -> Option<Tag>,
    ) -> A {
        let number = self.shard_number(hash);
        let look = || self.arena.get(number, self.lines[number].load(Ordering::Relaxed), hash);
        for _ in 0..ATTEMPTS {
            // Whoever finds nothing without the lock may be wrong, but need not try again without
            // it.
            if look().is_none() {
                break;
            }
            if let Some(answer) = self.shards[number].try_check(limit, cost, now, &tag_of, look) {
                return answer;
            }
        }
        self.sweep_limits(now);
        let ask = Ask { limit, ordinal: 0, cost, reserved: 0, id: None, overflow: None };
        let mut shard = self.line(hash).shard.lock();
        if let Some(answer) = self.check_new(&mut shard, hash, limit, cost, now) {
            return answer;
        }
        A::from(*self.decide_one(&mut shard, hash, Op::Check, ask, now).binding())
    }

    /// Decides the first charge on a key that is new, if there is room for it and it has a bucket.
    #[inline(always)]
    fn check_new<A: Answer>(
        &self,
        shard: &mut Shard,
        hash: Hash,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
    ) -> Option<A> {
        let (Algorithm::Bucket(bucket), Err(index)) = (limit.algorithm(), shard.find(hash)) else {
            return None;
        };
        if !self.has_room(shard, More::Key { most: self.max_keys_per_shard, is_listed: false }) {
            return None;
        }
        let mut level = Level::default();
        let outcome = tidegate_core::admit(limit, bucket, &mut level, now, cost);
        if level.units > 0 {
            if !shard.add_level(hash, index, &level, limit, &self.limits, now) {
                return None;
            }
            shard.count(&self.bytes);
            self.lines[self.shard_number(hash)].store(shard.lines(), Ordering::Relaxed);
        }
        Some(A::of(limit, bucket, outcome, cost))
    }

    /// Looks for limits that no key refers to any more, a shard at a time, if there have been too
    /// many. For whoever holds no lock.
    #[inline]
    fn sweep_limits(&self, now: Timestamp) {
        if self.limits.wants_sweep() {
            self.limits.sweep(self.in_use().len(), now, |number, show| {
                let mut shard = self.shards[number].shard.lock();
                shard.show_limits(&self.limits, now, show);
                shard.count(&self.bytes);
            });
        }
    }

    fn decide(&self, check: &Check<'_>, now: Timestamp) -> Decision {
        self.sweep_limits(now);
        let asks: Vec<(Hash, Ask<'_>)> = check
            .charges()
            .iter()
            .enumerate()
            .map(|(ordinal, charge)| {
                let hash = self.hash(
                    &charge.subject.scope,
                    &charge.subject.key,
                    &charge.limit,
                    charge.position,
                );
                let (limit, cost, reserved) = (&charge.limit, charge.cost, charge.reserved);
                (
                    hash,
                    Ask {
                        limit,
                        ordinal,
                        cost,
                        reserved,
                        id: check.id(),
                        overflow: charge.policy.overflow,
                    },
                )
            })
            .collect();
        if let [(hash, ask)] = &asks[..] {
            let mut shard = self.line(*hash).shard.lock();
            return self.decide_one(&mut shard, *hash, check.op(), *ask, now);
        }
        // Always in the same order, so that two checks over the same shards cannot wait for each
        // other.
        let mut numbers: Vec<usize> =
            asks.iter().map(|(hash, _)| self.shard_number(*hash)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut guards: Vec<Guard<'_>> =
            numbers.iter().map(|number| self.shards[*number].shard.lock()).collect();
        let place =
            |hash: Hash| numbers.partition_point(|number| *number < self.shard_number(hash));

        let mut held: Vec<Held> = Vec::with_capacity(asks.len());
        let mut added = vec![0; guards.len()];
        for (hash, ask) in &asks {
            let place = place(*hash);
            let mut loaded =
                self.load(&mut guards[place], *hash, (check.op(), ask), added[place], now);
            loaded.spare_others(check.op());
            added[place] += usize::from(matches!(loaded.home, Home::Slot));
            held.push(loaded);
        }
        let mut overflows = held
            .iter()
            .any(|held| matches!(held.home, Home::Shared))
            .then(|| self.overflows.lock());
        if let Some(overflows) = &mut overflows {
            for (held, (_, ask)) in
                held.iter_mut().zip(&asks).filter(|(held, _)| matches!(held.home, Home::Shared))
            {
                *held = overflows.load(ask, now);
            }
        }
        let mut charges: Vec<_> = held
            .iter_mut()
            .zip(&asks)
            .map(|(held, (_, ask))| ask.charge(&mut held.record))
            .collect();
        let decision = tidegate_core::decide(check.op(), &mut charges, now);
        for (held, (hash, ask)) in held.into_iter().zip(&asks) {
            match (&held.home, &mut overflows) {
                (Home::Shared, Some(overflows)) => overflows.store(ask, held.record, &self.bytes),
                _ => self.store(&mut guards[place(*hash)], *hash, ask, held, now),
            }
        }
        decision
    }

    fn decide_one(
        &self,
        shard: &mut Shard,
        hash: Hash,
        op: Op,
        ask: Ask<'_>,
        now: Timestamp,
    ) -> Decision {
        let mut held = self.load(shard, hash, (op, &ask), 0, now);
        held.spare_others(op);
        let mut overflows = matches!(held.home, Home::Shared).then(|| self.overflows.lock());
        if let Some(overflows) = &mut overflows {
            held = overflows.load(&ask, now);
        }
        let op = match (op, &held.home) {
            (Op::Book { .. }, Home::Nowhere) => Op::Check, // nobody would keep the place
            (op, _) => op,
        };
        let decision = tidegate_core::decide(op, &mut [ask.charge(&mut held.record)], now);
        match (&held.home, &mut overflows) {
            (Home::Shared, Some(overflows)) => overflows.store(&ask, held.record, &self.bytes),
            _ => self.store(shard, hash, &ask, held, now),
        }
        decision
    }

    /// The record of a key, and where it is to be kept afterwards; `added` places are promised to
    /// others already.
    fn load(
        &self,
        shard: &mut Shard,
        hash: Hash,
        (op, ask): (Op, &Ask<'_>),
        added: usize,
        now: Timestamp,
    ) -> Held {
        let may_grow = ask.may_grow(op);
        let mut is_there = shard.find(hash).is_ok();
        if is_there {
            let has_room = !may_grow || self.make_room(shard, hash, More::Growth, now);
            match shard.find(hash) {
                Ok(index) if has_room => {
                    return Held { record: shard.take(index, &self.limits), home: Home::Slot };
                }
                Ok(_) => {}
                // It was idle, and forgotten to make room.
                Err(_) => is_there = false,
            }
        }
        let most = self.max_keys_per_shard.saturating_sub(added);
        if !is_there
            && self.make_room(shard, hash, More::Key { most, is_listed: ask.is_listed() }, now)
        {
            return Held { record: Record::default(), home: Home::Slot };
        }
        self.without_room.fetch_add(1, Ordering::Relaxed);
        // What is shared would have to grow, too; and what a key has used is not forgotten because
        // it used more.
        let is_stuck = is_there || may_grow && self.bytes.load(Ordering::Relaxed) >= self.max_bytes;
        match ask.overflow.unwrap_or(self.overflow) {
            Overflow::SharedBucket if is_stuck => Held::exhausted(ask, now),
            Overflow::SharedBucket => Held { record: Record::default(), home: Home::Shared },
            Overflow::AllowNew => Held { record: Record::default(), home: Home::Nowhere },
            Overflow::DenyNew => Held::exhausted(ask, now),
        }
    }

    /// Whether there is room for that in a shard.
    #[inline]
    fn has_room(&self, shard: &Shard, more: More) -> bool {
        let bytes = self.bytes.load(Ordering::Relaxed);
        match more {
            More::Key { most, is_listed } => {
                let more = shard.bytes_for_one_more(is_listed);
                shard.len() < most && bytes.saturating_add(more) <= self.max_bytes
            }
            More::Growth => bytes < self.max_bytes,
        }
    }

    /// The same, once idle keys were looked for.
    fn make_room(&self, shard: &mut Shard, hash: Hash, more: More, now: Timestamp) -> bool {
        if self.has_room(shard, more) {
            return true;
        }
        shard.look_for_idle(&self.limits, now);
        if shard.is_spacious() {
            shard.rebuild(&self.limits, now);
            self.lines[self.shard_number(hash)].store(shard.lines(), Ordering::Relaxed);
        }
        shard.count(&self.bytes);
        self.has_room(shard, more)
    }

    fn store(&self, shard: &mut Shard, hash: Hash, ask: &Ask<'_>, held: Held, now: Timestamp) {
        match (held.home, shard.find(hash)) {
            (Home::Slot, Ok(index)) => shard.put(index, held.record, ask.limit, &self.limits, now),
            (Home::Slot, Err(index)) => {
                shard.add(hash, index, held.record, ask.limit, &self.limits, now);
                self.lines[self.shard_number(hash)].store(shard.lines(), Ordering::Relaxed);
            }
            _ => {}
        }
        shard.count(&self.bytes);
    }

    /// What a state is known by. The key is hashed once; position and algorithm are mixed into the
    /// hash.
    #[inline(always)]
    fn hash(&self, scope: &Scope<'_>, key: &[u8], limit: &Limit, position: u16) -> Hash {
        let (order, other) = match scope {
            Scope::AdHoc => self.hashing.hash(key),
            Scope::Rule(name) => self.hashing.hash_named(name, key),
        };
        Hash { order, other: other ^ other_of(scope, limit, position) }
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "only the low bits choose")]
    fn shard_number(&self, hash: Hash) -> usize {
        // The high bits choose the home within the shard. All limits of one key are neighbours in
        // one shard; and the processor can go there while it still computes the other half of the
        // hash.
        usize::from(hash.order as u8 & self.last_shard)
    }

    /// Where a key is expected; its slots are on their way while the caller goes on.
    #[inline(always)]
    fn expect(&self, hash: Hash) -> Expected<'_> {
        let expected = self.at(hash);
        slots::prefetch(expected.at_home);
        raw::prefetch_to_write(expected.line);
        expected
    }

    /// The same, of which nothing need be fetched.
    #[inline(always)]
    fn at(&self, hash: Hash) -> Expected<'_> {
        let number = self.shard_number(hash);
        let at_home = self.arena.at_home(number, self.lines[number].load(Ordering::Relaxed), hash);
        Expected { hash, line: &self.shards[number], at_home }
    }

    /// To be replaced by somebody.
    fn expect_nobody(&self) -> Expected<'_> {
        Expected { hash: Hash::default(), line: &self.shards[0], at_home: &slots::NOWHERE }
    }

    /// The tag of a slot, if `limit` wrote it.
    #[inline(always)]
    fn tag_of(&self, limit: &Limit) -> impl Fn((u64, u64)) -> Option<Tag> {
        move |words| {
            let packed = Packed::of(words);
            packed.is_of(limit, &self.limits).then(|| packed.tag())
        }
    }

    #[inline(always)]
    fn line(&self, hash: Hash) -> &Line {
        &self.shards[self.shard_number(hash)]
    }
}

/// Rules know their states by name and position alone, so that one that changes its algorithm keeps
/// what was used.
const RULE: u64 = 0x80;

/// What is mixed into the hash of a key, so that each of its limits has a state of its own.
#[inline]
fn other_of(scope: &Scope<'_>, limit: &Limit, position: u16) -> u64 {
    let kind = match scope {
        Scope::AdHoc => algorithm_number(limit.algorithm()),
        Scope::Rule(_) => RULE,
    };
    mixed_in(kind, position)
}

#[inline]
fn mixed_in(kind: u64, position: u16) -> u64 {
    kind << 16 | u64::from(position)
}

#[inline]
fn algorithm_number(algorithm: &Algorithm) -> u64 {
    match algorithm {
        Algorithm::Bucket(_) => 0,
        Algorithm::Window(_) => 1,
        Algorithm::Sliding(_) => 2,
        Algorithm::Estimate(_) => 3,
        Algorithm::Log(_) => 4,
        Algorithm::Concurrent(_) => 5,
    }
}
