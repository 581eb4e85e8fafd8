//! The tables of a memory store, and how a check is decided on them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tidegate_core::algorithm::bucket::Level;
use tidegate_core::{Algorithm, Decision, Limit, Op, Timestamp, Verdict};

use super::arena::{self, Arena, AtHome};
use super::hash::Hashing;
use super::interned::Interned;
use super::overflow::{HeldRecord, MemoryCharge, Overflows, Placement};
use super::packed::{LimitTag, Packed};
use super::prepared::CheckResult;
use super::room::RoomFor;
use super::shard::Shard;
use super::shard_line::ShardLine;
use super::slots::Hash;
use crate::clock::Clock;
use crate::raw;
use crate::store::{Charge, Check, Overflow, Scope};

/// The maximum number of shards: as many as a byte can select.
pub(super) const MAX_SHARDS: usize = 256;
/// The number of attempts without the lock before the lock is taken. Other threads have then
/// written once or twice.
const ATTEMPTS: usize = 3;

pub(super) struct MemoryInner {
    /// The shards in use, and empty ones up to the number that a byte can select, so that the index
    /// needs no check.
    shards: Box<[ShardLine; MAX_SHARDS]>,
    /// The bits of a hash that select a shard in use.
    last_shard: u8,
    /// The length of each shard's table in cache lines, for reads without the lock. It changes only
    /// when keys are added or removed; kept apart from the locks, it stays in the cache of every
    /// processor.
    lines: [AtomicUsize; MAX_SHARDS],
    arena: Arc<Arena>,
    pub(super) hashing: Hashing,
    /// The seeds of `hashing`.
    pub(super) seeds: (u64, u64),
    pub(super) limits: Interned,
    pub(super) clock: Clock,
    pub(super) max_keys_per_shard: usize,
    pub(super) max_bytes: usize,
    /// The bytes allocated by all shards and the table of limits.
    pub(super) bytes: Arc<AtomicUsize>,
    pub(super) overflow: Overflow,
    overflows: Mutex<Overflows>,
    /// The number of charges that found no room.
    pub(super) without_room: AtomicU64,
}

/// A key, and where its slot is expected.
#[derive(Clone, Copy)]
pub(super) struct ExpectedKey<'a> {
    hash: Hash,
    line: &'a ShardLine,
    at_home: &'a AtHome,
}

type ShardGuard<'a> = raw::Guard<'a, Box<Shard>>;

impl MemoryInner {
    pub(super) fn new(
        shards: usize,
        seeds: (u64, u64),
        clock: Clock,
        max_keys_per_shard: usize,
        max_bytes: usize,
        overflow: Overflow,
    ) -> Self {
        let bytes = Arc::new(AtomicUsize::new(0));
        let arena = Arc::new(Arena::new(shards, max_bytes, Arc::clone(&bytes)));
        let line = |number| ShardLine::new(Shard::new(Arc::clone(&arena), number));
        MemoryInner {
            shards: Box::new(std::array::from_fn(line)),
            last_shard: u8::try_from(shards - 1).expect("there are at most 256 shards"),
            lines: [const { AtomicUsize::new(0) }; MAX_SHARDS],
            arena,
            hashing: Hashing::new(seeds.0, seeds.1),
            seeds,
            limits: Interned::new(max_bytes, Arc::clone(&bytes)),
            clock,
            max_keys_per_shard,
            max_bytes,
            bytes,
            overflow,
            overflows: Mutex::default(),
            without_room: AtomicU64::new(0),
        }
    }

    pub(super) fn max_keys(&self) -> usize {
        self.max_keys_per_shard * self.in_use().len()
    }

    /// Removes all idle keys.
    pub(super) fn reclaim(&self) {
        let now = self.clock.now();
        for (line, lines) in self.in_use().iter().zip(&self.lines) {
            let mut shard = line.shard.lock();
            shard.rebuild(&self.limits, now);
            shard.count(&self.bytes);
            lines.store(shard.lines(), Ordering::Relaxed);
        }
    }

    pub(super) fn in_use(&self) -> &[ShardLine] {
        &self.shards[..=usize::from(self.last_shard)]
    }

    /// Checks one key without a scope now.
    #[inline(always)]
    pub(super) fn check_key<R: CheckResult>(&self, key: &[u8], limit: &Limit, cost: u64) -> R {
        let hash = self.hash(&Scope::AdHoc, key, limit, 0);
        self.check(&self.expect(hash), limit, cost, self.clock.now(), self.tag_of(limit))
    }

    /// Decides a plain check of one charge, without the shard's lock where possible.
    pub(super) fn check_charge(&self, charge: &Charge<'_>, now: Timestamp) -> Decision {
        let Charge { subject, limit, position, cost, .. } = charge;
        let hash = self.hash(&subject.scope, &subject.key, limit, *position);
        let verdict: Verdict =
            self.check(&self.expect(hash), limit, *cost, now, self.tag_of(limit));
        Decision::of_one(verdict, verdict.allowed, now)
    }

    /// Decides one charge. `tag_of` returns the tag of a slot, from its words, if this limit wrote
    /// it.
    #[inline(always)]
    pub(super) fn check<R: CheckResult>(
        &self,
        expected: &ExpectedKey<'_>,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        tag_of: impl Fn((u64, u64)) -> Option<LimitTag>,
    ) -> R {
        let look = || arena::look_ahead(expected.at_home, expected.hash);
        match expected.line.try_check(limit, cost, now, &tag_of, look) {
            Some(result) => result,
            None => self.check_again(expected.hash, limit, cost, now, tag_of),
        }
    }

    /// Decides one charge on a key whose memory was fetched some time ago.
    #[inline(always)]
    pub(super) fn check_prefetched<R: CheckResult>(
        &self,
        expected: &ExpectedKey<'_>,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        tag_of: impl Fn((u64, u64)) -> Option<LimitTag>,
    ) -> R {
        let look = || arena::look(expected.at_home, expected.hash);
        match expected.line.try_check(limit, cost, now, &tag_of, look) {
            Some(result) => result,
            None => self.check_again(expected.hash, limit, cost, now, tag_of),
        }
    }

    /// Decides one charge under the lock: another thread was writing, the key is new, or its state
    /// is not packed or was written by another limit.
    #[cold]
    #[inline(never)]
    fn check_again<R: CheckResult>(
        &self,
        hash: Hash,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        tag_of: impl Fn((u64, u64)) -> Option<LimitTag>,
    ) -> R {
        let number = self.shard_number(hash);
        let look = || self.arena.get(number, self.lines[number].load(Ordering::Relaxed), hash);
        for _ in 0..ATTEMPTS {
            // A look-up without the lock can miss a key; only one with the lock is certain.
            if look().is_none() {
                break;
            }
            if let Some(result) = self.shards[number].try_check(limit, cost, now, &tag_of, look) {
                return result;
            }
        }
        self.sweep_limits(now);
        let input = MemoryCharge { limit, ordinal: 0, cost, reserved: 0, id: None, overflow: None };
        let mut shard = self.line(hash).shard.lock();
        if let Some(result) = self.check_new(&mut shard, hash, limit, cost, now) {
            return result;
        }
        R::from_verdict(*self.decide_one(&mut shard, hash, Op::Check, input, now).binding())
    }

    /// Decides the first charge on a new key, if it has a bucket and the store has room.
    #[inline(always)]
    fn check_new<R: CheckResult>(
        &self,
        shard: &mut Shard,
        hash: Hash,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
    ) -> Option<R> {
        let (Algorithm::Bucket(bucket), Err(index)) = (limit.algorithm(), shard.find(hash)) else {
            return None;
        };
        if !self.has_room(shard, RoomFor::Key { most: self.max_keys_per_shard, is_listed: false }) {
            return None;
        }
        let mut level = Level::default();
        let outcome = tidegate_core::admit(limit, bucket, &mut level, now, cost);
        if level.units > 0 {
            if !shard.add_level(hash, index, &level, limit, &self.limits, now) {
                return None;
            }
            shard.count(&self.bytes);
            self.publish_lines(hash, shard);
        }
        Some(R::from_outcome(limit, bucket, outcome, cost))
    }

    /// Frees the numbers of limits that no key uses, one shard per call, if numbers have run out.
    /// The caller must hold no lock.
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

    pub(super) fn decide(&self, check: &Check<'_>, now: Timestamp) -> Decision {
        self.sweep_limits(now);
        let inputs: Vec<(Hash, MemoryCharge<'_>)> = check
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
                    MemoryCharge {
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
        if let [(hash, input)] = &inputs[..] {
            let mut shard = self.line(*hash).shard.lock();
            return self.decide_one(&mut shard, *hash, check.op(), *input, now);
        }
        // Locked in ascending order, so that two checks over the same shards cannot deadlock.
        let mut numbers: Vec<usize> =
            inputs.iter().map(|(hash, _)| self.shard_number(*hash)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut guards: Vec<ShardGuard<'_>> =
            numbers.iter().map(|number| self.shards[*number].shard.lock()).collect();
        let place =
            |hash: Hash| numbers.partition_point(|number| *number < self.shard_number(hash));

        let mut held: Vec<HeldRecord> = Vec::with_capacity(inputs.len());
        let mut added = vec![0; guards.len()];
        for (hash, input) in &inputs {
            let place = place(*hash);
            let mut loaded =
                self.load(&mut guards[place], *hash, (check.op(), input), added[place], now);
            loaded.spare_others(check.op());
            added[place] += usize::from(matches!(loaded.placement, Placement::Slot));
            held.push(loaded);
        }
        let mut overflows = held
            .iter()
            .any(|held| matches!(held.placement, Placement::Shared))
            .then(|| self.overflows.lock());
        if let Some(overflows) = &mut overflows {
            for (held, (_, input)) in held
                .iter_mut()
                .zip(&inputs)
                .filter(|(held, _)| matches!(held.placement, Placement::Shared))
            {
                *held = overflows.load(input, now);
            }
        }
        let mut charges: Vec<_> = held
            .iter_mut()
            .zip(&inputs)
            .map(|(held, (_, input))| input.charge(&mut held.record))
            .collect();
        let decision = tidegate_core::decide(check.op(), &mut charges, now);
        for (held, (hash, input)) in held.into_iter().zip(&inputs) {
            match (&held.placement, &mut overflows) {
                (Placement::Shared, Some(overflows)) => {
                    overflows.store(input, held.record, &self.bytes)
                }
                _ => self.store(&mut guards[place(*hash)], *hash, input, held, now),
            }
        }
        decision
    }

    fn decide_one(
        &self,
        shard: &mut Shard,
        hash: Hash,
        op: Op,
        input: MemoryCharge<'_>,
        now: Timestamp,
    ) -> Decision {
        let mut held = self.load(shard, hash, (op, &input), 0, now);
        held.spare_others(op);
        let mut overflows =
            matches!(held.placement, Placement::Shared).then(|| self.overflows.lock());
        if let Some(overflows) = &mut overflows {
            held = overflows.load(&input, now);
        }
        let op = match (op, &held.placement) {
            (Op::Book { .. }, Placement::Nowhere) => Op::Check, // no record would keep the place
            (op, _) => op,
        };
        let decision = tidegate_core::decide(op, &mut [input.charge(&mut held.record)], now);
        match (&held.placement, &mut overflows) {
            (Placement::Shared, Some(overflows)) => {
                overflows.store(&input, held.record, &self.bytes)
            }
            _ => self.store(shard, hash, &input, held, now),
        }
        decision
    }

    /// Shows the length of the table of a hash's shard to reads without the lock.
    #[inline(always)]
    pub(super) fn publish_lines(&self, hash: Hash, shard: &Shard) {
        self.lines[self.shard_number(hash)].store(shard.lines(), Ordering::Relaxed);
    }

    /// The hash that identifies a state: the hash of its key, with position and algorithm mixed
    /// in.
    #[inline(always)]
    pub(super) fn hash(&self, scope: &Scope<'_>, key: &[u8], limit: &Limit, position: u16) -> Hash {
        let (order, other) = match scope {
            Scope::AdHoc => self.hashing.hash(key),
            Scope::Rule(name) => self.hashing.hash_named(name, key),
        };
        Hash { order, other: other ^ other_of(scope, limit, position) }
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "only the low bits choose")]
    pub(super) fn shard_number(&self, hash: Hash) -> usize {
        // The high bits select the home slot within the shard. All limits of one key are neighbours
        // in one shard, and the processor can load the slot before the other half of the hash is
        // computed.
        usize::from(hash.order as u8 & self.last_shard)
    }

    /// Where a key is expected. Starts to fetch its slots.
    #[inline(always)]
    pub(super) fn expect(&self, hash: Hash) -> ExpectedKey<'_> {
        let expected = self.expected_at(hash);
        arena::prefetch(expected.at_home);
        raw::prefetch_to_write(expected.line);
        expected
    }

    /// Where a key is expected, without fetching it.
    #[inline(always)]
    fn expected_at(&self, hash: Hash) -> ExpectedKey<'_> {
        let number = self.shard_number(hash);
        let at_home = self.arena.at_home(number, self.lines[number].load(Ordering::Relaxed), hash);
        ExpectedKey { hash, line: &self.shards[number], at_home }
    }

    /// A placeholder that is overwritten before it is used.
    pub(super) fn expect_none(&self) -> ExpectedKey<'_> {
        ExpectedKey { hash: Hash::default(), line: &self.shards[0], at_home: &arena::NOWHERE }
    }

    /// A function that returns the tag of a slot from its words, if `limit` wrote it.
    #[inline(always)]
    fn tag_of(&self, limit: &Limit) -> impl Fn((u64, u64)) -> Option<LimitTag> {
        move |words| {
            let packed = Packed::of(words);
            packed.is_of(limit, &self.limits).then(|| packed.tag())
        }
    }

    #[inline(always)]
    pub(super) fn line(&self, hash: Hash) -> &ShardLine {
        &self.shards[self.shard_number(hash)]
    }
}

/// State of a rule belongs to name and position only, so a rule that changes its algorithm keeps
/// its usage.
const RULE: u64 = 0x80;

/// The number that is mixed into the hash of a key, so that each of its limits has its own state.
#[inline]
pub(super) fn other_of(scope: &Scope<'_>, limit: &Limit, position: u16) -> u64 {
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
