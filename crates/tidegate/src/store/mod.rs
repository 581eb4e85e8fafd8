//! The store: decides checks and keeps the state of every key.
//!
//! A [`Check`] goes in, a [`Decision`] comes out. A store is atomic by itself and decides by its
//! own clock, so there is no get, no set and no compare-and-swap.

mod check;
mod diagnosis;
mod policy;

use std::error::Error;
use std::future::Future;
use std::pin::Pin;

use tidegate_core::Decision;

pub(crate) use check::distinct;
pub use check::{Charge, Check, InvalidCheck, MAX_CHARGES, MAX_KEY_BYTES, Scope, Subject};
pub use diagnosis::Diagnosis;
pub use policy::{OnFailure, Overflow, Policy, SyncMode};

/// Keeps the state of every key and decides checks by its own clock.
///
/// ```
/// use tidegate::store::{Deciding, Store};
/// use tidegate::{Check, Memory};
///
/// /// Prints the keys of every check.
/// struct Logged(Memory);
///
/// impl Store for Logged {
///     fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
///         let keys: Vec<_> = check.charges().iter().map(|charge| &charge.subject.key).collect();
///         println!("{keys:?}");
///         Store::decide(&self.0, check)
///     }
/// }
/// ```
pub trait Store: Send + Sync + 'static {
    /// Decides `check` and applies it in one atomic step.
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a>;

    /// The parts of the store that would decide `check`, one bit each, if parts can fail
    /// independently, as the servers of a cluster do. [`Resilient`](crate::resilience::Resilient)
    /// has a circuit breaker for each part.
    fn parts(&self, _check: &Check<'_>) -> u64 {
        1
    }

    /// What a failed call says about the store as a whole.
    ///
    /// By default an [unavailable](StoreError::Unavailable) store is unresponsive, and any other
    /// error is about the call alone.
    fn diagnose(&self, error: &StoreError) -> Diagnosis {
        Diagnosis::of(error)
    }
}

/// The future that [`Store::decide`] returns.
pub type Deciding<'a> = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send + 'a>>;

/// Why there is no decision. A denial is not an error, but a [`Decision`].
///
/// ```
/// use tidegate::{Check, Limiter, StoreError};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new("10/s".parse()?);
/// let error = limiter.decide(Check::new()).await.unwrap_err();
/// assert!(matches!(error, StoreError::Invalid(_)), "a check without charges");
/// # Ok(()) }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No store can decide the check; a retry does not help.
    #[error("invalid check: {0}")]
    Invalid(#[from] InvalidCheck),
    /// The store did not answer; a retry may succeed.
    #[error("the store did not answer: {0}")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
    /// A key of the store holds a value that Tidegate did not write.
    #[error("key {key:?} holds something that Tidegate did not write: {reason}")]
    Corrupt {
        /// The key, escaped and shortened.
        key: String,
        /// What the key holds.
        reason: String,
    },
}
