//! A memory store under one limit, and what its callers want to know.

use tidegate_core::algorithm::Kernel;
use tidegate_core::{Limit, Timestamp, Verdict};

use super::shard::Tag;
use super::slots::Hash;
use super::{Expected, Memory};

/// A memory store under one limit: for a program that asks the same question about many keys, in nanoseconds.
///
/// ```
/// use tidegate::{Limit, Memory};
/// let limit: Limit = "10/s".parse()?;
/// let gate = Memory::new().gate(&limit);
/// assert!(gate.allows("user:7", 1));
/// assert_eq!(gate.check("user:7", 1).remaining, 8);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Gate {
    pub(super) memory: Memory,
    pub(super) limit: Limit,
    pub(super) tag: Tag,
    /// What tells a key's state under this limit from its others.
    pub(super) other: u64,
}

impl Gate {
    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// The store.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// See [`Memory::check`].
    #[must_use = "let the request pass only if it is allowed"]
    #[inline(always)] // a call of its own would be a tenth more instructions
    pub fn check<K: AsRef<[u8]> + ?Sized>(&self, key: &K, cost: u64) -> Verdict {
        let expected = self.expect(key.as_ref());
        self.ask(&expected, cost, self.memory.inner.clock.now())
    }

    /// See [`Memory::allows`].
    #[must_use = "let the request pass only if it is allowed"]
    #[inline(always)] // a call of its own would be a tenth more instructions
    pub fn allows<K: AsRef<[u8]> + ?Sized>(&self, key: &K, cost: u64) -> bool {
        let expected = self.expect(key.as_ref());
        let Allowed(allowed) = self.ask(&expected, cost, self.memory.inner.clock.now());
        allowed
    }

    /// See [`Memory::check_many`].
    #[must_use = "let the requests pass only if they are allowed"]
    pub fn check_many<K: AsRef<[u8]>>(&self, asks: &[(K, u64)]) -> Vec<Verdict> {
        let mut verdicts = Vec::with_capacity(asks.len());
        self.ask_many(asks, &mut verdicts, |verdict: Verdict| verdict);
        verdicts
    }

    /// Checks several keys, one after the other, each by itself, and says of each whether it may pass.
    #[must_use = "let the requests pass only if they are allowed"]
    pub fn allows_many<K: AsRef<[u8]>>(&self, asks: &[(K, u64)]) -> Vec<bool> {
        let mut allowed = Vec::with_capacity(asks.len());
        self.allows_many_into(asks, &mut allowed);
        allowed
    }

    /// The same into a list that is used again: `allowed` is cleared first. For many small batches, whose lists would cost as much as a key.
    ///
    /// ```
    /// use tidegate::{Limit, Memory};
    /// let limit: Limit = "1/s".parse()?;
    /// let gate = Memory::new().gate(&limit);
    /// let mut allowed = Vec::new();
    /// for batch in [[("a", 1), ("b", 1)], [("a", 1), ("c", 1)]] {
    ///     gate.allows_many_into(&batch, &mut allowed);
    ///     assert_eq!(allowed.len(), 2);
    /// }
    /// assert_eq!(allowed, [false, true]);
    /// # Ok::<(), tidegate::ParseError>(())
    /// ```
    pub fn allows_many_into<K: AsRef<[u8]>>(&self, asks: &[(K, u64)], allowed: &mut Vec<bool>) {
        allowed.clear();
        self.ask_many(asks, allowed, |Allowed(allowed)| allowed);
    }

    #[inline(always)]
    fn ask_many<K: AsRef<[u8]>, A: Answer, T>(&self, asks: &[(K, u64)], answers: &mut Vec<T>, told: impl Fn(A) -> T) {
        const AHEAD: usize = 16;
        let now = self.memory.inner.clock.now();
        let mut next = [self.memory.inner.expect_nobody(); AHEAD];
        for asks in asks.chunks(AHEAD) {
            for (next, (key, _)) in next.iter_mut().zip(asks) {
                *next = self.expect(key.as_ref());
            }
            answers.extend(
                next.iter().zip(asks).map(|(expected, (_, cost))| told(self.ask_arrived(expected, *cost, now))),
            );
        }
    }

    #[inline(always)]
    fn expect(&self, key: &[u8]) -> Expected<'_> {
        let (order, other) = self.memory.inner.hashing.hash(key);
        self.memory.inner.expect(Hash { order, other: other ^ self.other })
    }

    #[inline(always)]
    fn ask<A: Answer>(&self, expected: &Expected<'_>, cost: u64, now: Timestamp) -> A {
        self.memory.inner.check(expected, &self.limit, cost, now, |_| Some(self.tag))
    }

    #[inline(always)]
    fn ask_arrived<A: Answer>(&self, expected: &Expected<'_>, cost: u64, now: Timestamp) -> A {
        self.memory.inner.check_arrived(expected, &self.limit, cost, now, |_| Some(self.tag))
    }
}

/// What a caller wants to know.
pub(super) trait Answer: From<Verdict> {
    fn of<K: Kernel<State: Copy>>(limit: &Limit, kernel: &K, outcome: (bool, K::State, Timestamp), cost: u64) -> Self;
}

impl Answer for Verdict {
    #[inline(always)]
    fn of<K: Kernel<State: Copy>>(limit: &Limit, kernel: &K, outcome: (bool, K::State, Timestamp), cost: u64) -> Self {
        tidegate_core::report(limit, kernel, outcome, cost)
    }
}

/// Whether it was allowed, and nothing else.
pub(super) struct Allowed(pub(super) bool);

impl From<Verdict> for Allowed {
    fn from(verdict: Verdict) -> Self {
        Allowed(verdict.allowed)
    }
}

impl Answer for Allowed {
    #[inline(always)]
    fn of<K: Kernel<State: Copy>>(_: &Limit, _: &K, outcome: (bool, K::State, Timestamp), _: u64) -> Self {
        Allowed(outcome.0)
    }
}
