//! Many questions that differ in nothing but their keys.

use tidegate_core::{Limit, Timestamp, Verdict};

#[cfg(feature = "tower")]
use super::gate::Brief;
use super::hash::Named;
use super::interned::Pinned;
use super::shard::Tag;
use super::slots::Hash;
use super::{Expected, Memory, other_of};
use crate::store::Scope;

/// Keys whose memory is fetched while the first of them is decided.
const AHEAD: usize = 16;

/// A memory store under one limit, for keys of one scope: for whoever has many questions at hand
/// that differ in nothing but their keys. What their answers have in common is worked out once.
///
/// ```
/// use tidegate::{Limit, Memory, Scope};
/// let (memory, limit): (Memory, Limit) = (Memory::new(), "10/s".parse()?);
/// let series = memory.series(&Scope::Rule("per-ip".into()), &limit);
/// let mut left = Vec::new();
/// series.check_each(&[b"192.0.2.7", b"192.0.2.7"], 1, memory.clock().now(), |_, verdict| left.push(verdict.remaining));
/// assert_eq!(left, [9, 8]);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Series {
    pinned: Pinned,
    limit: Limit,
    tag: Tag,
    /// What tells a key's state under this limit from its others.
    other: u64,
    /// The rule whose keys they are.
    named: Option<Named>,
}

impl Series {
    pub(super) fn new(memory: &Memory, scope: &Scope<'_>, limit: &Limit) -> Self {
        let named = match scope {
            Scope::AdHoc => None,
            Scope::Rule(name) => Some(memory.inner.hashing.begin_named(name)),
        };
        let pinned = Pinned::new(memory, limit, false);
        let tag = Tag::of(pinned.number());
        Series { pinned, limit: *limit, tag, other: other_of(scope, limit, 0), named }
    }

    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// The store.
    pub fn memory(&self) -> &Memory {
        &self.pinned.memory
    }

    /// Decides a charge of `cost` on each key, one after the other, each by itself, as a
    /// [`Check`](crate::Check) of it would be, at a moment that the store's [clock](Memory::clock)
    /// told. `answer` hears each verdict with its key before the next is decided.
    #[inline]
    pub fn check_each<'k>(
        &self,
        keys: &[&'k [u8]],
        cost: u64,
        now: Timestamp,
        mut answer: impl FnMut(&'k [u8], Verdict),
    ) {
        let inner = &*self.pinned.memory.inner;
        let mut next = [inner.expect_nobody(); AHEAD];
        for keys in keys.chunks(AHEAD) {
            for (next, key) in next.iter_mut().zip(keys) {
                *next = self.expect(key);
            }
            for (expected, key) in next.iter().zip(keys) {
                answer(
                    key,
                    inner.check_arrived(expected, &self.limit, cost, now, |_| Some(self.tag)),
                );
            }
        }
    }

    /// The same for one key.
    #[must_use = "let the request pass only if it is allowed"]
    pub fn check(&self, key: &[u8], cost: u64, now: Timestamp) -> Verdict {
        self.pinned
            .memory
            .inner
            .check(&self.expect(key), &self.limit, cost, now, |_| Some(self.tag))
    }

    /// The same for whoever wants to know no more than that.
    #[cfg(feature = "tower")]
    #[inline]
    pub(crate) fn check_briefly(&self, key: &[u8], cost: u64, now: Timestamp) -> Brief {
        // Nobody has another question at hand, so nothing is gained by more work that lets the next
        // one begin early.
        self.pinned
            .memory
            .inner
            .check_arrived(&self.expect(key), &self.limit, cost, now, |_| Some(self.tag))
    }

    #[inline(always)]
    fn expect(&self, key: &[u8]) -> Expected<'_> {
        let hashing = &self.pinned.memory.inner.hashing;
        let (order, other) = match &self.named {
            None => hashing.hash(key),
            Some(named) => hashing.hash_begun(named, key),
        };
        self.pinned.memory.inner.expect(Hash { order, other: other ^ self.other })
    }
}
