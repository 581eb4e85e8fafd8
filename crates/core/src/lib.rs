//! The rule of Tidegate: *state, time, cost → decision, new state*. Pure and exact.
//!
//! The crate has no clock, no IO, no floats, no dependencies and no `unsafe`. A store keeps the
//! [`Record`]s and brings the time; [`decide()`] returns the decision and changes the records. All
//! numbers are integers below 2^53, so a Redis script, whose numbers are doubles, can give the same
//! answers to the bit.
//!
//! ```
//! use tidegate_core::{Charge, Limit, Op, Record, Timestamp, decide};
//! let limit: Limit = "240/h sliding step 1m".parse()?;
//! let mut record = Record::default();
//! let now = Timestamp::from_secs(1_760_000_000);
//! let decision = decide(Op::Check, &mut [Charge::new(&limit, &mut record, 1)], now);
//! assert!(decision.allowed());
//! assert_eq!(decision.remaining(), 239);
//! # Ok::<(), tidegate_core::ParseError>(())
//! ```
//!
//! In reading order:
//! - [`Limit`]: the amount, the period and the algorithm; valid once it is built, and written
//!   `240/h sliding step 1m`.
//! - [`Timestamp`] and [`Period`]: microseconds, measured by the caller.
//! - [`algorithm`]: one file and one small state per algorithm, behind one trait.
//! - [`decide()`]: the operations, written once for all algorithms.
//! - [`Decision`] and [`Verdict`]: the answer, and the part of each limit in it.
//! - [`State`]: what a store keeps, and how it is read after the limit has changed.

#![no_std]

extern crate alloc;
#[cfg(any(test, doctest))]
extern crate std;

mod admit;
pub mod algorithm;
mod decide;
mod decision;
mod exact;
mod limit;
mod meter;
mod notation;
mod reading;
mod rebase;
mod state;
mod time;
mod words;

pub use admit::{admit, report};
pub use algorithm::Algorithm;
pub use decide::{Charge, Op, decide};
pub use decision::{Decision, Retry, Source, Verdict};
pub use limit::{
    BucketSpec, Builder, ConcurrentSpec, EstimateSpec, Limit, LimitError, LogSpec, MAX_LOG_AMOUNT,
    MAX_STEPS, Parameter, SlidingSpec, Spec, WindowSpec,
};
pub use notation::{Limits, MAX_LIMITS, ParseError};
pub use reading::{Done, Reading};
pub use rebase::decide_on_store_clock;
pub use state::{Receipt, Receipts, Record, State};
pub use time::{CLOCK_TOLERANCE_US, EXACT, MAX_WAIT_US, Period, Timestamp};

/// The id of a charge or lease, chosen by the caller, by which it can be settled, refunded or
/// released once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Id(pub u64);

impl Id {
    /// The id of charges without an id.
    pub const NONE: Id = Id(0);
}

/// Compiles and runs the code on the page with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/notation.md")]
struct PageOnTheNotation;
