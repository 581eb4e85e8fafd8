//! A limit: amount, period and algorithm. A `Limit` that exists is valid.
//!
//! [`Builder::build`] checks all numbers once and returns an error that names the wrong parameter.
//! No later code checks them again.

use crate::algorithm::{Algorithm, Bucket, Concurrent, Estimate, Log, Sliding, Window};
use crate::decide::Op;
use crate::time::{EXACT, Period};

mod error;

pub(crate) use error::Problem;
pub use error::{LimitError, Parameter};

/// The most steps of a sliding window.
pub const MAX_STEPS: u64 = 1_000;
/// The largest amount of a `log`, which keeps every hit.
pub const MAX_LOG_AMOUNT: u64 = 100_000;

/// A rate limit: the amount, the period and the algorithm.
///
/// ```
/// use tidegate_core::{Limit, Period};
/// let limit = Limit::bucket(30, Period::MINUTE).burst(15).build()?;
/// assert_eq!(limit.to_string(), "30/m burst 15");
/// assert_eq!(limit, "30 per minute burst 15".parse()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Limit {
    algorithm: Algorithm,
    debt: u64,
    count_rejected: bool,
}

impl Limit {
    /// A bucket that regrows `amount` every `period`, evenly, and holds `amount` unless
    /// [`burst`](Builder::burst) says otherwise.
    ///
    /// Exact: 7 per minute regrows seven units a minute for ever, never 6.999.
    pub fn bucket(amount: u64, period: Period) -> Builder<BucketSpec> {
        Builder::new(BucketSpec { amount, period, capacity: None })
    }

    /// A bucket, in the words of the token bucket: `amount` tokens are added every `period`, a
    /// request takes its cost in tokens, and at most [`burst`](Builder::burst) tokens are kept.
    pub fn token_bucket(amount: u64, period: Period) -> Builder<BucketSpec> {
        Self::bucket(amount, period)
    }

    /// A bucket, in the words of the leaky bucket or funnel: `amount` leaks out every `period`, a
    /// request pours its cost in, and a request that would overflow its
    /// [`capacity`](Builder::capacity) is denied.
    pub fn leaky_bucket(amount: u64, period: Period) -> Builder<BucketSpec> {
        Self::bucket(amount, period)
    }

    /// A bucket, in the words of the generic cell rate algorithm: cells are due `period / amount`
    /// apart, and cells may come early as long as at most [`burst`](Builder::burst) come
    /// together.
    pub fn gcra(amount: u64, period: Period) -> Builder<BucketSpec> {
        Self::bucket(amount, period)
    }

    /// A fixed window: `amount` in each `period`, counted from the epoch
    /// (or [from the first hit](Builder::from_first_hit)).
    pub fn window(amount: u64, period: Period) -> Builder<WindowSpec> {
        Builder::new(WindowSpec { amount, period, from_first_hit: false })
    }

    /// A window that slides in steps: `amount` in any span of `period`. A step is a tenth of the
    /// period (rounded up) unless [`step`](Builder::step) says otherwise.
    pub fn sliding(amount: u64, period: Period) -> Builder<SlidingSpec> {
        Builder::new(SlidingSpec { amount, period, step: None, lenient: false })
    }

    /// Two windows: what was used in the previous one counts by how much of it a sliding window
    /// would still cover.
    pub fn estimate(amount: u64, period: Period) -> Builder<EstimateSpec> {
        Builder::new(EstimateSpec { amount, period })
    }

    /// Every hit is kept: exactly `amount` in any span of `period`, at one entry of memory per hit.
    pub fn log(amount: u64, period: Period) -> Builder<LogSpec> {
        Builder::new(LogSpec { amount, period })
    }

    /// `amount` concurrent leases, each of which ends after `ttl` if it is not released.
    pub fn concurrent(amount: u64, ttl: Period) -> Builder<ConcurrentSpec> {
        Builder::new(ConcurrentSpec { amount, ttl })
    }

    /// The algorithm with its parameters.
    pub fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// The largest cost that can be allowed: the burst of a bucket, the amount of other limits.
    pub fn capacity(&self) -> u64 {
        self.algorithm.capacity()
    }

    /// The units that a [debit](crate::Op::Debit) may go below empty.
    pub fn debt(&self) -> u64 {
        self.debt
    }

    /// The most units in use after an operation: the capacity, and for operations that charge after
    /// the fact, the debt below it.
    pub(crate) fn ceiling(&self, op: Op) -> u64 {
        match op {
            Op::Debit | Op::Settle => self.capacity() + self.debt,
            _ => self.capacity(),
        }
    }

    /// Whether denied requests are charged, so that a client that keeps retrying stays denied.
    pub fn counts_rejected(&self) -> bool {
        self.count_rejected
    }

    /// The clock grid of this limit in microseconds: one, unless its numbers need a coarser one to
    /// stay exact.
    pub fn grid_us(&self) -> u64 {
        match self.algorithm {
            Algorithm::Bucket(bucket) => bucket.rate.grid,
            Algorithm::Estimate(estimate) => estimate.grid,
            _ => 1,
        }
    }

    /// The most units that this limit can admit within (t, t + period] for the worst t; for
    /// `concurrent`, at the same time.
    ///
    /// It counts what `check` admits. Debits can charge [`debt`](Limit::debt) more.
    ///
    /// ```
    /// # use tidegate_core::Limit;
    /// assert_eq!("10/s window".parse::<Limit>()?.worst_case(), 20); // both sides of an edge
    /// assert_eq!("10/s log".parse::<Limit>()?.worst_case(), 10);
    /// # Ok::<(), tidegate_core::ParseError>(())
    /// ```
    pub fn worst_case(&self) -> u64 {
        self.algorithm.worst_case()
    }
}

/// Collects the parameters of a [`Limit`]; [`build`](Builder::build) checks them.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is checked and there is no limit until `build` is called"]
pub struct Builder<S> {
    spec: S,
    debt: Option<u64>,
    count_rejected: bool,
}

impl<S: Spec> Builder<S> {
    fn new(spec: S) -> Self {
        Builder { spec, debt: None, count_rejected: false }
    }

    /// The units that a debit may go below empty; one capacity by default.
    pub fn debt(mut self, units: u64) -> Self {
        self.debt = Some(units);
        self
    }

    /// Charges denied requests, too, so that a client that keeps retrying stays denied.
    pub fn count_rejected(mut self) -> Self {
        self.count_rejected = true;
        self
    }

    /// Checks all parameters and builds the limit.
    ///
    /// # Errors
    /// A parameter that is zero, or so large that the arithmetic could not stay exact on any
    /// clock grid.
    pub fn build(self) -> Result<Limit, LimitError> {
        self.spec.build(self.debt, self.count_rejected)
    }
}

impl Builder<BucketSpec> {
    /// The capacity of the bucket: the largest burst.
    pub fn burst(mut self, units: u64) -> Self {
        self.spec.capacity = Some(units);
        self
    }

    /// The same as [`burst`](Builder::burst), in the words of the leaky bucket.
    pub fn capacity(self, units: u64) -> Self {
        self.burst(units)
    }
}

impl Builder<WindowSpec> {
    /// Starts each window with the first hit after the last window, instead of at a multiple of the
    /// period.
    pub fn from_first_hit(mut self) -> Self {
        self.spec.from_first_hit = true;
        self
    }
}

impl Builder<SlidingSpec> {
    /// The step of the window. It need not divide the period.
    pub fn step(mut self, step: Period) -> Self {
        self.spec.step = Some(step);
        self
    }

    /// Removes a step as soon as the window covers only a part of it, up to one step early.
    pub fn lenient(mut self) -> Self {
        self.spec.lenient = true;
        self
    }
}

/// The parameters that a builder collects: one type per algorithm, with its options only.
pub trait Spec: Copy + sealed::Sealed {
    #[doc(hidden)]
    fn build(self, debt: Option<u64>, count_rejected: bool) -> Result<Limit, LimitError>;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! specs {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name { $($field: $type),* }
        impl sealed::Sealed for $name {}
    )*};
}

specs! {
    /// Parameters of a bucket.
    BucketSpec { amount: u64, period: Period, capacity: Option<u64> }
    /// Parameters of a fixed window.
    WindowSpec { amount: u64, period: Period, from_first_hit: bool }
    /// Parameters of a sliding window.
    SlidingSpec { amount: u64, period: Period, step: Option<Period>, lenient: bool }
    /// Parameters of the two-window estimate.
    EstimateSpec { amount: u64, period: Period }
    /// Parameters of a log.
    LogSpec { amount: u64, period: Period }
    /// Parameters of a concurrency limit.
    ConcurrentSpec { amount: u64, ttl: Period }
}

impl Spec for BucketSpec {
    fn build(self, debt: Option<u64>, count_rejected: bool) -> Result<Limit, LimitError> {
        self.checked(debt, count_rejected).map_err(|error| match (error.parameter, self.capacity) {
            // Without a burst of its own it is the amount that is too much.
            (Parameter::Burst, None) => LimitError { parameter: Parameter::Amount, ..error },
            _ => error,
        })
    }
}

impl BucketSpec {
    fn checked(self, debt: Option<u64>, count_rejected: bool) -> Result<Limit, LimitError> {
        let capacity = self.capacity.unwrap_or(self.amount);
        let amount = in_range(Parameter::Amount, self.amount, 1, EXACT - 1)?;
        let period = period_in_range(Parameter::Period, self.period)?;
        in_range(Parameter::Burst, capacity, 1, EXACT / 4 - 1)?;
        let debt = in_range(Parameter::Debt, debt.unwrap_or(capacity), 0, EXACT / 2 - 1)?;
        // Rejected requests are charged up to capacity + amount, which must stay exact too.
        let below = if count_rejected { debt.max(amount) } else { debt };
        let bucket = Bucket::new(amount, period, capacity, below).map_err(|error| {
            // If it is the debt that is too much, or the amount that rejected requests are charged,
            // say so.
            let blame = |parameter, value| LimitError { parameter, value, ..error };
            match Bucket::new(amount, period, capacity, 0) {
                Ok(_) if debt > capacity && debt == below => blame(Parameter::Debt, debt),
                Ok(_) if amount > capacity && amount == below => blame(Parameter::Amount, amount),
                _ => error,
            }
        })?;
        Ok(Limit { algorithm: Algorithm::Bucket(bucket), debt, count_rejected })
    }
}

impl Spec for WindowSpec {
    fn build(self, debt: Option<u64>, count_rejected: bool) -> Result<Limit, LimitError> {
        let (amount, debt) = countable(self.amount, debt)?;
        let period = period_in_range(Parameter::Period, self.period)?;
        let window =
            Window { amount, period: period.as_micros(), from_first_hit: self.from_first_hit };
        Ok(Limit { algorithm: Algorithm::Window(window), debt, count_rejected })
    }
}

impl Spec for SlidingSpec {
    fn build(self, debt: Option<u64>, count_rejected: bool) -> Result<Limit, LimitError> {
        let (amount, debt) = countable(self.amount, debt)?;
        let period = period_in_range(Parameter::Period, self.period)?.as_micros();
        let step = self.step.map_or(period.div_ceil(10), Period::as_micros);
        if step == 0 || step > period {
            return Err(LimitError::new(
                Parameter::Step,
                step,
                Problem::NotWithin { least: 1, most: period },
            ));
        }
        if period.div_ceil(step) > MAX_STEPS {
            return Err(LimitError::new(
                Parameter::Step,
                step,
                Problem::TooFine { least: period.div_ceil(MAX_STEPS) },
            ));
        }
        let sliding = Sliding { amount, period, step, lenient: self.lenient };
        Ok(Limit { algorithm: Algorithm::Sliding(sliding), debt, count_rejected })
    }
}

impl Spec for EstimateSpec {
    fn build(self, debt: Option<u64>, count_rejected: bool) -> Result<Limit, LimitError> {
        let (amount, debt) = countable(self.amount, debt)?;
        let period = period_in_range(Parameter::Period, self.period)?;
        let estimate =
            Estimate::new(amount, period, debt).map_err(|error| {
                match Estimate::new(amount, period, 0) {
                    Ok(_) => LimitError { parameter: Parameter::Debt, value: debt, ..error },
                    Err(_) => error,
                }
            })?;
        Ok(Limit { algorithm: Algorithm::Estimate(estimate), debt, count_rejected })
    }
}

impl Spec for LogSpec {
    fn build(self, debt: Option<u64>, count_rejected: bool) -> Result<Limit, LimitError> {
        let amount = in_range(Parameter::Amount, self.amount, 1, MAX_LOG_AMOUNT)?;
        let debt = in_range(Parameter::Debt, debt.unwrap_or(amount), 0, MAX_LOG_AMOUNT)?;
        let period = period_in_range(Parameter::Period, self.period)?;
        let log = Log { amount, period: period.as_micros() };
        Ok(Limit { algorithm: Algorithm::Log(log), debt, count_rejected })
    }
}

impl Spec for ConcurrentSpec {
    fn build(self, debt: Option<u64>, count_rejected: bool) -> Result<Limit, LimitError> {
        if self.amount > MAX_LOG_AMOUNT {
            return Err(LimitError::new(Parameter::Amount, self.amount, Problem::TooManyLeases));
        }
        let amount = in_range(Parameter::Amount, self.amount, 1, MAX_LOG_AMOUNT)?;
        let ttl = period_in_range(Parameter::Ttl, self.ttl)?;
        if let Some(debt) = debt {
            return Err(LimitError::new(Parameter::Debt, debt, Problem::NotForConcurrent));
        }
        if count_rejected {
            return Err(LimitError::new(Parameter::CountRejected, 1, Problem::NotForConcurrent));
        }
        let concurrent = Concurrent { amount, ttl: ttl.as_micros() };
        Ok(Limit { algorithm: Algorithm::Concurrent(concurrent), debt: 0, count_rejected })
    }
}

fn in_range(parameter: Parameter, value: u64, least: u64, most: u64) -> Result<u64, LimitError> {
    if value < least || value > most {
        return Err(LimitError::new(parameter, value, Problem::NotWithin { least, most }));
    }
    Ok(value)
}

fn period_in_range(parameter: Parameter, period: Period) -> Result<Period, LimitError> {
    in_range(parameter, period.as_micros(), 1, Period::MAX.as_micros()).map(Period::micros)
}

/// An amount and its debt that can be added up exactly, whatever is charged.
fn countable(amount: u64, debt: Option<u64>) -> Result<(u64, u64), LimitError> {
    let amount = in_range(Parameter::Amount, amount, 1, EXACT / 2 - 1)?;
    let debt = in_range(Parameter::Debt, debt.unwrap_or(amount), 0, EXACT / 2 - 1)?;
    Ok((amount, debt))
}
