//! Decisions. A denial is a decision, never an error.

use alloc::vec::Vec;
use core::slice;
use core::time::Duration;

use crate::Id;
use crate::time::Timestamp;

/// When the same request would be allowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Retry {
    /// Now: the request was allowed.
    #[default]
    Now,
    /// After this many microseconds, if no other request takes units. Tight: one microsecond
    /// earlier is too early.
    After(u64),
    /// Never: the cost exceeds the capacity of the limit.
    Never,
}

impl Retry {
    /// The wait in microseconds: zero for now, `None` for never.
    pub const fn micros(self) -> Option<u64> {
        match self {
            Retry::Now => Some(0),
            Retry::After(micros) => Some(micros),
            Retry::Never => None,
        }
    }

    /// The wait: zero for now, `None` for never.
    pub const fn duration(self) -> Option<Duration> {
        match self.micros() {
            Some(micros) => Some(Duration::from_micros(micros)),
            None => None,
        }
    }

    /// A number that orders waits; never is the longest.
    pub(crate) fn rank(self) -> u64 {
        self.micros().unwrap_or(u64::MAX)
    }
}

/// The result of one limit for one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Verdict {
    /// Whether this limit alone would allow the request.
    pub allowed: bool,
    /// The units taken by `check`, `take` and `debit`, or given back by `refund`, `settle` and
    /// `release`.
    pub granted: u64,
    /// The maximum of `remaining`: a bucket's capacity, otherwise the amount.
    pub amount: u64,
    /// The units left, rounded down.
    pub remaining: u64,
    /// When this limit would allow the same request.
    pub retry: Retry,
    /// Microseconds until all units are available.
    pub reset_after_us: u64,
    /// Microseconds until another unit is available; zero if all are.
    pub next_after_us: u64,
}

impl Verdict {
    /// The time until all units are available.
    pub const fn reset_after(&self) -> Duration {
        Duration::from_micros(self.reset_after_us)
    }

    /// The time until another unit is available; zero if all are.
    pub const fn next_after(&self) -> Duration {
        Duration::from_micros(self.next_after_us)
    }
}

/// What made a decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Source {
    /// The store.
    #[default]
    Store,
    /// This node, from what it knew from the store.
    Local,
    /// This node, because the store did not answer in time.
    Fallback,
    /// A rule in shadow mode: the decision is not enforced.
    Shadow,
}

impl Source {
    /// The word used in JSON, headers and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Source::Store => "store",
            Source::Local => "local",
            Source::Fallback => "fallback",
            Source::Shadow => "shadow",
        }
    }
}

/// The result of a check: allowed or denied, with the numbers for the client.
///
/// Its own numbers are those of the *binding* charge: of a denial, the one with the longest wait;
/// otherwise the one with the least left, relative to its amount. [`verdicts`](Decision::verdicts)
/// has the numbers of all charges.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "a decision does nothing by itself: continue only if it is allowed"]
pub struct Decision {
    allowed: bool,
    binding: usize,
    verdicts: Verdicts,
    at: Timestamp,
    source: Source,
    id: Option<Id>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Verdicts {
    One(Verdict),
    Many(Vec<Verdict>),
}

impl Decision {
    /// The decision over one charge.
    #[inline]
    pub fn of_one(verdict: Verdict, allowed: bool, at: Timestamp) -> Self {
        Decision {
            allowed,
            binding: 0,
            verdicts: Verdicts::One(verdict),
            at,
            source: Source::Store,
            id: None,
        }
    }

    /// The decision over several charges, in their order; there must be at least one.
    ///
    /// The binding charge is selected here, so that all stores and protocols agree on it.
    pub fn of_many(verdicts: Vec<Verdict>, allowed: bool, at: Timestamp) -> Self {
        let mut binding = 0;
        for (index, verdict) in verdicts.iter().enumerate() {
            let best = &verdicts[binding];
            let tighter = if allowed {
                // remaining / amount < best.remaining / best.amount, without dividing
                u128::from(verdict.remaining) * u128::from(best.amount)
                    < u128::from(best.remaining) * u128::from(verdict.amount)
            } else {
                verdict.retry.rank() > best.retry.rank()
            };
            if tighter {
                binding = index;
            }
        }
        let verdicts = if verdicts.is_empty() {
            Verdicts::One(Verdict::default())
        } else {
            Verdicts::Many(verdicts)
        };
        Decision { allowed, binding, verdicts, at, source: Source::Store, id: None }
    }

    /// The decision with another source.
    pub fn with_source(mut self, source: Source) -> Self {
        self.source = source;
        self
    }

    /// The decision with the id by which it can be settled, refunded or released.
    pub fn with_id(mut self, id: Option<Id>) -> Self {
        self.id = id;
        self
    }

    /// Whether the request is allowed.
    #[inline]
    pub fn allowed(&self) -> bool {
        self.allowed
    }

    /// The index of the binding charge in [`verdicts`](Decision::verdicts).
    pub fn binding_index(&self) -> usize {
        self.binding
    }

    /// The verdict of the binding charge.
    pub fn binding(&self) -> &Verdict {
        &self.verdicts()[self.binding]
    }

    /// The verdicts of all charges, in their order.
    pub fn verdicts(&self) -> &[Verdict] {
        match &self.verdicts {
            Verdicts::One(verdict) => slice::from_ref(verdict),
            Verdicts::Many(verdicts) => verdicts,
        }
    }

    /// The verdicts of all charges, under the name of earlier versions.
    #[doc(hidden)]
    pub fn charges(&self) -> &[Verdict] {
        self.verdicts()
    }

    /// The units taken or given back; see [`Verdict::granted`].
    pub fn granted(&self) -> u64 {
        self.binding().granted
    }

    /// The maximum of `remaining` under the binding limit.
    pub fn amount(&self) -> u64 {
        self.binding().amount
    }

    /// The units left under the binding limit, rounded down.
    pub fn remaining(&self) -> u64 {
        self.binding().remaining
    }

    /// When the same request would be allowed.
    pub fn retry(&self) -> Retry {
        self.binding().retry
    }

    /// The wait before a retry: zero if allowed, `None` if it can never be allowed.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry().duration()
    }

    /// The time until all units of the binding limit are available.
    pub fn reset_after(&self) -> Duration {
        self.binding().reset_after()
    }

    /// The time until another unit of the binding limit is available; zero if all are.
    pub fn next_after(&self) -> Duration {
        self.binding().next_after()
    }

    /// The time of the decision, by the clock of its store.
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// What made the decision.
    pub fn source(&self) -> Source {
        self.source
    }

    /// The id by which it can be settled, refunded or released, if there is one.
    pub fn id(&self) -> Option<Id> {
        self.id
    }
}
