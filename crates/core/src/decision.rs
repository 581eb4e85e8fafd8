//! What a limiter answers. A denial is an answer, never an error.

use alloc::vec::Vec;
use core::slice;
use core::time::Duration;

use crate::Id;
use crate::time::Timestamp;

/// When the same request would pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Retry {
    /// Now: it was allowed.
    #[default]
    Now,
    /// After so many microseconds, if nobody takes anything more. Tight: one microsecond earlier is
    /// too early.
    After(u64),
    /// Never: it costs more than the limit can ever hold.
    Never,
}

impl Retry {
    /// Microseconds to wait: zero for now, `None` for never.
    pub const fn micros(self) -> Option<u64> {
        match self {
            Retry::Now => Some(0),
            Retry::After(micros) => Some(micros),
            Retry::Never => None,
        }
    }

    /// How long to wait: zero for now, `None` for never.
    pub const fn duration(self) -> Option<Duration> {
        match self.micros() {
            Some(micros) => Some(Duration::from_micros(micros)),
            None => None,
        }
    }

    /// For comparing waits: never is the longest.
    pub(crate) fn rank(self) -> u64 {
        self.micros().unwrap_or(u64::MAX)
    }
}

/// What one limit says about one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Verdict {
    /// Whether this limit alone would allow it.
    pub allowed: bool,
    /// Units moved: taken by `check`, `take` and `debit`, given back by `refund`, `settle` and
    /// `release`.
    pub granted: u64,
    /// The most that can be left: a bucket's capacity, otherwise the amount.
    pub amount: u64,
    /// Whole units left.
    pub remaining: u64,
    /// When the same request would pass this limit.
    pub retry: Retry,
    /// Microseconds until everything is available again.
    pub reset_after_us: u64,
    /// Microseconds until anything more is available; zero when everything is.
    pub next_after_us: u64,
}

impl Verdict {
    /// How long until everything is available again.
    pub const fn reset_after(&self) -> Duration {
        Duration::from_micros(self.reset_after_us)
    }

    /// How long until anything more is available; zero when everything is.
    pub const fn next_after(&self) -> Duration {
        Duration::from_micros(self.next_after_us)
    }
}

/// Who decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Source {
    /// The store.
    #[default]
    Store,
    /// This node alone, from what the store had told it.
    Local,
    /// This node alone, because the store did not answer in time.
    Fallback,
    /// Nobody enforces it: the answer is what would have been.
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

/// The answer to a check: allowed or denied, with the numbers a client needs.
///
/// Its own numbers are those of the *binding* charge: of a denial, the one with the longest wait;
/// otherwise the one with the least left, relative to its amount. [`charges`](Decision::charges)
/// has them all.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "a decision does nothing by itself: let the request pass only if it is allowed"]
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

    /// The decision over several charges, in the order in which they were listed; there must be at
    /// least one.
    ///
    /// The binding one is found here, so that every store and every listener names the same.
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

    /// The same decision, made by somebody else.
    pub fn with_source(mut self, source: Source) -> Self {
        self.source = source;
        self
    }

    /// The same decision, under the id by which it can be settled, refunded or released.
    pub fn with_id(mut self, id: Option<Id>) -> Self {
        self.id = id;
        self
    }

    /// Whether the request may pass.
    #[inline]
    pub fn allowed(&self) -> bool {
        self.allowed
    }

    /// Which charge binds, as an index into [`charges`](Decision::charges).
    pub fn binding_index(&self) -> usize {
        self.binding
    }

    /// What the binding charge says.
    pub fn binding(&self) -> &Verdict {
        &self.charges()[self.binding]
    }

    /// What every charge says, in the order in which they were listed.
    pub fn charges(&self) -> &[Verdict] {
        match &self.verdicts {
            Verdicts::One(verdict) => slice::from_ref(verdict),
            Verdicts::Many(verdicts) => verdicts,
        }
    }

    /// Units moved; see [`Verdict::granted`].
    pub fn granted(&self) -> u64 {
        self.binding().granted
    }

    /// The most that can be left under the binding limit.
    pub fn amount(&self) -> u64 {
        self.binding().amount
    }

    /// Whole units left under the binding limit.
    pub fn remaining(&self) -> u64 {
        self.binding().remaining
    }

    /// When the same request would pass.
    pub fn retry(&self) -> Retry {
        self.binding().retry
    }

    /// How long to wait before trying again: zero when allowed, `None` when it can never pass.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry().duration()
    }

    /// How long until everything under the binding limit is available again.
    pub fn reset_after(&self) -> Duration {
        self.binding().reset_after()
    }

    /// How long until anything more is available under the binding limit; zero when everything is.
    pub fn next_after(&self) -> Duration {
        self.binding().next_after()
    }

    /// When it was decided, by the clock of whoever decided.
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// Who decided.
    pub fn source(&self) -> Source {
        self.source
    }

    /// The id by which it can be settled, refunded or released, if it has one.
    pub fn id(&self) -> Option<Id> {
        self.id
    }
}
