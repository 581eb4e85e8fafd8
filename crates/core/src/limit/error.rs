//! What is wrong with a parameter, in words that say what was expected.

use core::fmt;

use super::{MAX_LOG_AMOUNT, MAX_STEPS};
use crate::time::Period;

/// A parameter of a limit, by the name the notation and the builders use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Parameter {
    /// The units per period.
    Amount,
    /// The length of the period.
    Period,
    /// The capacity of a bucket.
    Burst,
    /// The step of a sliding window.
    Step,
    /// The time after which a lease ends by itself.
    Ttl,
    /// The units that debits may go below empty.
    Debt,
    /// Whether denied requests are charged.
    CountRejected,
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Parameter::Amount => "amount",
            Parameter::Period => "period",
            Parameter::Burst => "burst",
            Parameter::Step => "step",
            Parameter::Ttl => "ttl",
            Parameter::Debt => "debt",
            Parameter::CountRejected => "count rejected",
        })
    }
}

/// A parameter outside the exact domain, with its value and what was expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LimitError {
    pub(super) parameter: Parameter,
    pub(super) value: u64,
    pub(super) problem: Problem,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Problem {
    NotWithin { least: u64, most: u64 },
    TooFine { least: u64 },
    TooManyLeases,
    NoGrid,
    TooSlow,
    NotForConcurrent,
}

impl LimitError {
    pub(crate) fn new(parameter: Parameter, value: u64, problem: Problem) -> Self {
        LimitError { parameter, value, problem }
    }

    /// The parameter that is wrong.
    pub fn parameter(&self) -> Parameter {
        self.parameter
    }

    /// The value of the parameter; periods, steps and ttls in microseconds.
    pub fn value(&self) -> u64 {
        self.value
    }
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timed = matches!(self.parameter, Parameter::Period | Parameter::Step | Parameter::Ttl);
        let number = |f: &mut fmt::Formatter<'_>, n: u64| match timed {
            true if n == Period::MAX.as_micros() => f.write_str("3723w (71 years)"),
            true => fmt::Display::fmt(&Period::micros(n), f),
            false => fmt::Display::fmt(&n, f),
        };
        write!(f, "{} ", self.parameter)?;
        // A length beyond 64 bits of microseconds is not the number that was written.
        let is_saturated = timed && self.value == u64::MAX;
        if self.parameter != Parameter::CountRejected && !is_saturated {
            number(f, self.value)?;
            f.write_str(" ")?;
        }
        match self.problem {
            Problem::NotWithin { least, .. } if self.value < least => {
                f.write_str("is too small: expected at least ")?;
                number(f, least)
            }
            Problem::NotWithin { most, .. } => {
                f.write_str("is too large: expected at most ")?;
                number(f, most)?;
                match self.parameter {
                    Parameter::Step => f.write_str(", the period"),
                    Parameter::Amount if most == MAX_LOG_AMOUNT => {
                        f.write_str(", because every hit is kept (`sliding` has no such bound)")
                    }
                    _ => Ok(()),
                }
            }
            Problem::TooFine { least } => {
                write!(f, "is too fine: expected at least ")?;
                number(f, least)?;
                write!(f, ", so that the period has at most {MAX_STEPS} steps")
            }
            Problem::TooManyLeases => {
                write!(f, "is too large: expected at most {MAX_LOG_AMOUNT}, because every lease is kept")
            }
            Problem::NoGrid => f.write_str(
                "is too large for exact arithmetic on any clock grid (1us to 1s): expected a smaller amount, burst or debt, \
                 or an amount and period with a common divisor",
            ),
            Problem::TooSlow => f.write_str(
                "would take more than 142 years to drain with its debt: expected a smaller burst or debt, or a faster rate",
            ),
            Problem::NotForConcurrent => {
                f.write_str("does not apply to `concurrent`: expected only an amount and a ttl")
            }
        }
    }
}

impl core::error::Error for LimitError {}
