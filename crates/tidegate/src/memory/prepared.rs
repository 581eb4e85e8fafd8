//! A memory store prepared for many keys under one limit.

use tidegate_core::algorithm::Kernel;
use tidegate_core::{Limit, Timestamp, Verdict};

use super::Memory;
use super::hash::Named;
use super::inner::{ExpectedKey, other_of};
use super::packed::LimitTag;
use super::pinned::Pinned;
use super::slots::Hash;
use crate::store::Scope;

/// The number of keys whose memory is fetched while the first of them is decided.
const AHEAD: usize = 16;

/// A memory store with one limit and one scope, for checks that differ in their key and cost.
///
/// Everything that the checks have in common is computed once. Cloning is cheap.
///
/// ```
/// use tidegate::{Limit, Memory, Scope};
/// let limit: Limit = "10/s".parse()?;
/// let prepared = Memory::new().prepare(&Scope::AdHoc, &limit);
/// assert!(prepared.allows("user:7", 1));
/// assert_eq!(prepared.check("user:7", 1).remaining, 8);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Prepared {
    pinned: Pinned,
    limit: Limit,
    tag: LimitTag,
    /// Distinguishes the state of a key under this limit from its other states.
    other: u64,
    /// The hash of the rule's name, if the scope is a rule.
    named: Option<Named>,
}

impl Prepared {
    pub(super) fn new(memory: &Memory, scope: &Scope<'_>, limit: &Limit) -> Self {
        let named = match scope {
            Scope::AdHoc => None,
            Scope::Rule(name) => Some(memory.inner.hashing.begin_named(name)),
        };
        let pinned = Pinned::new(memory, limit, false);
        let tag = LimitTag::of(pinned.number());
        Prepared { pinned, limit: *limit, tag, other: other_of(scope, limit, 0), named }
    }

    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// The store.
    pub fn memory(&self) -> &Memory {
        &self.pinned.memory
    }

    /// Checks one key, as a [`Check`](crate::Check) with one charge does. A cost of 0 takes
    /// nothing.
    #[must_use = "continue with the request only if it is allowed"]
    #[inline(always)] // a separate function would be a tenth more instructions
    pub fn check<K: AsRef<[u8]> + ?Sized>(&self, key: &K, cost: u64) -> Verdict {
        self.check_at(key.as_ref(), cost, self.pinned.memory.inner.clock.now())
    }

    /// Checks one key and returns whether it is allowed. Faster than [`check`](Prepared::check),
    /// whose numbers take a few divisions.
    #[must_use = "continue with the request only if it is allowed"]
    #[inline(always)] // a separate function would be a tenth more instructions
    pub fn allows<K: AsRef<[u8]> + ?Sized>(&self, key: &K, cost: u64) -> bool {
        self.check_at(key.as_ref(), cost, self.pinned.memory.inner.clock.now())
    }

    /// Checks each key and cost independently, in order, at one reading of the clock. `result`
    /// gets each key with its result before the next key is checked.
    ///
    /// The result is a [`Verdict`] or a `bool`, whichever the closure takes; `bool` is faster. A
    /// batch is faster than single checks when there are many keys, because the memory of the next
    /// keys is fetched while one is decided.
    ///
    /// ```
    /// use tidegate::{Limit, Memory, Scope, Verdict};
    /// let limit: Limit = "10/s".parse()?;
    /// let prepared = Memory::new().prepare(&Scope::Rule("per-ip".into()), &limit);
    /// let batch = [("192.0.2.7", 1), ("192.0.2.8", 11), ("192.0.2.7", 2)];
    /// let mut remaining = Vec::new();
    /// prepared.check_each(&batch, |_, verdict: Verdict| remaining.push(verdict.remaining));
    /// assert_eq!(remaining, [9, 10, 7]);
    /// prepared.check_each(&batch, |key, allowed: bool| println!("{key}: {allowed}"));
    /// # Ok::<(), tidegate::ParseError>(())
    /// ```
    #[inline]
    pub fn check_each<K: AsRef<[u8]>, R: CheckResult>(
        &self,
        charges: &[(K, u64)],
        mut result: impl FnMut(&K, R),
    ) {
        let inner = &*self.pinned.memory.inner;
        let now = inner.clock.now();
        let mut next = [inner.expect_none(); AHEAD];
        for charges in charges.chunks(AHEAD) {
            for (next, (key, _)) in next.iter_mut().zip(charges) {
                *next = self.expect(key.as_ref());
            }
            for (expected, (key, cost)) in next.iter().zip(charges) {
                result(
                    key,
                    inner.check_prefetched(expected, &self.limit, *cost, now, |_| Some(self.tag)),
                );
            }
        }
    }

    /// Checks one key at a reading of the store's clock.
    #[inline(always)]
    pub(crate) fn check_at<R: CheckResult>(&self, key: &[u8], cost: u64, now: Timestamp) -> R {
        let inner = &self.pinned.memory.inner;
        inner.check(&self.expect(key), &self.limit, cost, now, |_| Some(self.tag))
    }

    #[inline(always)]
    fn expect(&self, key: &[u8]) -> ExpectedKey<'_> {
        let hashing = &self.pinned.memory.inner.hashing;
        let (order, other) = match &self.named {
            None => hashing.hash(key),
            Some(named) => hashing.hash_begun(named, key),
        };
        self.pinned.memory.inner.expect(Hash { order, other: other ^ self.other })
    }
}

/// The result of a check in a batch: a [`Verdict`], or a `bool` that is true if it is allowed. The
/// trait is sealed.
///
/// ```
/// use tidegate::batch::{CheckResult, Prepared};
/// fn count<R: CheckResult>(prepared: &Prepared, batch: &[(&str, u64)]) -> usize {
///     let mut results = 0;
///     prepared.check_each(batch, |_, _: R| results += 1);
///     results
/// }
/// ```
pub trait CheckResult: sealed::FromOutcome {}

impl CheckResult for Verdict {}
impl CheckResult for bool {}

pub(super) mod sealed {
    use super::{Kernel, Limit, Timestamp, Verdict};

    /// Built from what the core decided.
    pub trait FromOutcome {
        /// From a verdict.
        fn from_verdict(verdict: Verdict) -> Self;

        /// From whether it fits, and the state with its time.
        fn from_outcome<K: Kernel<State: Copy>>(
            limit: &Limit,
            kernel: &K,
            outcome: (bool, K::State, Timestamp),
            cost: u64,
        ) -> Self;
    }

    impl FromOutcome for Verdict {
        #[inline(always)]
        fn from_verdict(verdict: Verdict) -> Self {
            verdict
        }

        #[inline(always)]
        fn from_outcome<K: Kernel<State: Copy>>(
            limit: &Limit,
            kernel: &K,
            outcome: (bool, K::State, Timestamp),
            cost: u64,
        ) -> Self {
            tidegate_core::report(limit, kernel, outcome, cost)
        }
    }

    impl FromOutcome for bool {
        #[inline(always)]
        fn from_verdict(verdict: Verdict) -> Self {
            verdict.allowed
        }

        #[inline(always)]
        fn from_outcome<K: Kernel<State: Copy>>(
            _: &Limit,
            _: &K,
            outcome: (bool, K::State, Timestamp),
            _: u64,
        ) -> Self {
            outcome.0
        }
    }
}
