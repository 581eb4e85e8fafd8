//! The rule of Tidegate: *state, time, cost → decision, new state*. Pure and exact.
//!
//! There is no clock here, no IO, no float, no dependency and no `unsafe`. Somebody else says what
//! time it is and keeps the [`Record`]s; this crate says what to answer and what to keep. All
//! numbers are integers below 2^53, so that a Redis script, whose numbers are doubles, can give the
//! same answers to the bit.
//!
//! In reading order:
//! - [`Limit`] — how much, how often, by which algorithm; valid once built, and written `240/h
//!   sliding step 1m`;
//! - [`Timestamp`] and [`Period`] — microseconds that somebody else measured;
//! - [`algorithm`] — one small state each, and the same six questions to all of them;
//! - [`decide`](decide()) — the operations, written once: check, peek, take, debit, refund, reset,
//!   settle, release, book;
//! - [`Decision`] and [`Verdict`] — what a limiter answers;
//! - [`State`] — what is kept, and how it outlives a change of the limit;
//! - [`headers`] and [`denial`] — a decision as the text of HTTP headers, and of the body of a
//!   denial;
//! - [`trace`] — requests and expected answers as lines of text.

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

/// The name of one charge or lease, given by the caller, by which it can be settled, refunded or
/// released once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Id(pub u64);

impl Id {
    /// The id of what nobody named.
    pub const NONE: Id = Id(0);
}

/// The code on the page is compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/notation.md")]
struct PageOnTheNotation;
