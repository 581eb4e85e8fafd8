//! A memory store under one limit, and what its callers want to know.

use tidegate_core::algorithm::Kernel;
use tidegate_core::{Limit, Timestamp, Verdict};

use super::interned::Pinned;
use super::shard::Tag;
use super::slots::Hash;
use super::{Expected, Memory};

/// A memory store under one limit: for a program that asks the same question about many keys, in
/// nanoseconds.
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
    pub(super) pinned: Pinned,
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
        &self.pinned.memory
    }

    /// See [`Memory::check`].
    #[must_use = "let the request pass only if it is allowed"]
    #[inline(always)] // a call of its own would be a tenth more instructions
    pub fn check<K: AsRef<[u8]> + ?Sized>(&self, key: &K, cost: u64) -> Verdict {
        let expected = self.expect(key.as_ref());
        self.ask(&expected, cost, self.pinned.memory.inner.clock.now())
    }

    /// See [`Memory::allows`].
    #[must_use = "let the request pass only if it is allowed"]
    #[inline(always)] // a call of its own would be a tenth more instructions
    pub fn allows<K: AsRef<[u8]> + ?Sized>(&self, key: &K, cost: u64) -> bool {
        let expected = self.expect(key.as_ref());
        let Allowed(allowed) = self.ask(&expected, cost, self.pinned.memory.inner.clock.now());
        allowed
    }

    /// See [`Memory::check_many`].
    #[must_use = "let the requests pass only if they are allowed"]
    pub fn check_many<K: AsRef<[u8]>>(&self, asks: &[(K, u64)]) -> Vec<Verdict> {
        let mut verdicts = Vec::with_capacity(asks.len());
        self.ask_many(asks, &mut verdicts, |verdict: Verdict| verdict);
        verdicts
    }

    /// Checks several keys, one after the other, each by itself, and says of each whether it may
    /// pass.
    #[must_use = "let the requests pass only if they are allowed"]
    pub fn allows_many<K: AsRef<[u8]>>(&self, asks: &[(K, u64)]) -> Vec<bool> {
        let mut allowed = Vec::with_capacity(asks.len());
        self.allows_many_into(asks, &mut allowed);
        allowed
    }

    /// The same into a list that is used again: `allowed` is cleared first. For many small batches,
    /// whose lists would cost as much as a key.
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
    fn ask_many<K: AsRef<[u8]>, A: Answer, T>(
        &self,
        asks: &[(K, u64)],
        answers: &mut Vec<T>,
        told: impl Fn(A) -> T,
    ) {
        const AHEAD: usize = 16;
        let now = self.pinned.memory.inner.clock.now();
        let mut next = [self.pinned.memory.inner.expect_nobody(); AHEAD];
        for asks in asks.chunks(AHEAD) {
            for (next, (key, _)) in next.iter_mut().zip(asks) {
                *next = self.expect(key.as_ref());
            }
            answers.extend(
                next.iter()
                    .zip(asks)
                    .map(|(expected, (_, cost))| told(self.ask_arrived(expected, *cost, now))),
            );
        }
    }

    #[inline(always)]
    fn expect(&self, key: &[u8]) -> Expected<'_> {
        let (order, other) = self.pinned.memory.inner.hashing.hash(key);
        self.pinned.memory.inner.expect(Hash { order, other: other ^ self.other })
    }

    #[inline(always)]
    fn ask<A: Answer>(&self, expected: &Expected<'_>, cost: u64, now: Timestamp) -> A {
        self.pinned.memory.inner.check(expected, &self.limit, cost, now, |_| Some(self.tag))
    }

    #[inline(always)]
    fn ask_arrived<A: Answer>(&self, expected: &Expected<'_>, cost: u64, now: Timestamp) -> A {
        self.pinned.memory.inner.check_arrived(expected, &self.limit, cost, now, |_| Some(self.tag))
    }
}

/// What a caller wants to know.
pub(super) trait Answer: From<Verdict> {
    fn of<K: Kernel<State: Copy>>(
        limit: &Limit,
        kernel: &K,
        outcome: (bool, K::State, Timestamp),
        cost: u64,
    ) -> Self;
}

impl Answer for Verdict {
    #[inline(always)]
    fn of<K: Kernel<State: Copy>>(
        limit: &Limit,
        kernel: &K,
        outcome: (bool, K::State, Timestamp),
        cost: u64,
    ) -> Self {
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
    fn of<K: Kernel<State: Copy>>(
        _: &Limit,
        _: &K,
        outcome: (bool, K::State, Timestamp),
        _: u64,
    ) -> Self {
        Allowed(outcome.0)
    }
}

/// What is told with nearly every answer; everything, if there is more to say than that.
#[cfg(feature = "tower")]
pub(crate) enum Brief {
    /// It was allowed.
    Allowed { remaining: u64, amount: u64, next_after_us: u64 },
    /// It was not.
    Denied(Verdict),
}

#[cfg(feature = "tower")]
impl From<Verdict> for Brief {
    fn from(verdict: Verdict) -> Self {
        let Verdict { allowed, remaining, amount, next_after_us, .. } = verdict;
        if allowed {
            Brief::Allowed { remaining, amount, next_after_us }
        } else {
            Brief::Denied(verdict)
        }
    }
}

#[cfg(feature = "tower")]
impl Answer for Brief {
    #[inline(always)]
    fn of<K: Kernel<State: Copy>>(
        limit: &Limit,
        kernel: &K,
        outcome: (bool, K::State, Timestamp),
        cost: u64,
    ) -> Self {
        let (fits, state, now) = outcome;
        if !fits {
            return Brief::Denied(tidegate_core::report(limit, kernel, outcome, cost));
        }
        let amount = limit.capacity();
        let remaining = kernel.room(&state, now, amount);
        let next_after_us =
            if remaining < amount { kernel.wait(&state, now, remaining + 1, amount) } else { 0 };
        Brief::Allowed { remaining, amount, next_after_us }
    }
}

#[cfg(all(test, feature = "tower"))]
mod tests {
    use super::*;
    use crate::store::Scope;
    use crate::{ManualClock, Memory};

    #[test]
    fn a_brief_answer_says_the_same_as_a_long_one() {
        let limits = [
            "7/s",
            "1000000/s",
            "10/min burst 3",
            "5/s burst 100",
            "5/s window",
            "5/s sliding",
            "5/s log",
            "5/s estimate",
            "3/day",
            "5/s count rejected",
        ];
        for limit in limits {
            let limit: Limit = limit.parse().unwrap_or_else(|error| panic!("{limit}: {error}"));
            let clock = ManualClock::new();
            let [brief, long] = [(); 2].map(|()| Memory::builder().clock(clock.clone()).build());
            let scope = Scope::Rule("rule".into());
            let [brief, long] = [&brief, &long].map(|memory| memory.series(&scope, &limit));
            for step in 0..400_u64 {
                // Three keys, costs of none to more than there is, and time that passes by fits and
                // starts.
                clock.advance(std::time::Duration::from_micros(step * step * 37 % 400_000));
                let (key, cost, now) =
                    ([b'a' + (step % 3) as u8], step * 7 % 5, long.memory().clock().now());
                let verdict = long.check(&key, cost, now);
                match brief.check_briefly(&key, cost, now) {
                    Brief::Allowed { remaining, amount, next_after_us } => {
                        let told = (true, remaining, amount, next_after_us);
                        let expected = (
                            verdict.allowed,
                            verdict.remaining,
                            verdict.amount,
                            verdict.next_after_us,
                        );
                        assert_eq!(told, expected, "{limit}, step {step}");
                    }
                    Brief::Denied(brief) => assert_eq!(brief, verdict, "{limit}, step {step}"),
                }
            }
        }
    }
}
