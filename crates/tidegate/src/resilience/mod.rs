//! The resilience layer in front of a remote store: local decisions where they are safe, and a
//! decision before the deadline whatever the store does.
//!
//! ```no_run
//! use tidegate::redis::Redis;
//! use tidegate::resilience::{Resilient, SyncMode};
//! use tidegate::Limiter;
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let resilient = Resilient::new(Redis::new("redis://127.0.0.1/")?);
//! let limiter = Limiter::builder("10000/s".parse()?).resilient(resilient.clone()).sync(SyncMode::Lease).build();
//! let decision = limiter.check("user:7").await?; // within 20 ms, also if the server is down
//! # resilient.close().await; // returns unused lease units to the store
//! # Ok(()) }
//! ```
//!
//! # How a check is decided
//!
//! Every check takes one path, `decide`:
//!
//! 1. The deny cache: if the last answer proves a denial, `local` denies.
//! 2. Charges with [`SyncMode::Lease`] or [`SyncMode::Async`] are spent here where possible.
//! 3. The other charges are one `call` to the store, with a deadline.
//! 4. Without an answer the `share` of this node decides, and the decision says so.
//!
//! # Reading order
//!
//! State machines; they have no clock and no store, and take the time as an argument:
//!
//! | Module | What it answers |
//! | --- | --- |
//! | `last_answer`, `expected` | what the last answer of the store proves about a check now |
//! | `lease` | how many units to take ahead, and which of them can be spent |
//! | `async_sync` | which checks pass now and are charged later |
//! | `breaker` | whether to call the store |
//! | `concurrency_limit` | how many calls may be in flight |
//! | `nodes`, `share` | how many nodes there are, and what each may allow without the store |
//! | `state` | whether the store decides, and why not |
//!
//! The shell around them reads the clock, waits with tokio's timers and calls the store:
//!
//! | Module | What it does |
//! | --- | --- |
//! | `builder`, `layer` | the options, and what all clones of a [`Resilient`] share |
//! | `decide`, `local` | one check, and the part of it that is decided here |
//! | `call` | one call to the store |
//! | `outage`, `probe` | how an outage begins, is probed and ends |
//! | `background`, `lease_calls`, `sync_calls` | the background tasks and their calls |
//! | `fingerprint`, `table`, `random`, `stats` | names of states, bounded tables, chance, counters |

mod async_sync;
mod background;
mod breaker;
mod builder;
mod call;
mod concurrency_limit;
mod decide;
mod expected;
mod fingerprint;
mod last_answer;
mod layer;
mod lease;
mod lease_calls;
mod local;
mod nodes;
mod outage;
mod probe;
mod random;
mod share;
mod state;
mod stats;
mod sync_calls;
mod table;

use std::fmt;
use std::sync::Arc;

use tidegate_core::Op;

pub use self::breaker::BreakerState;
pub use self::builder::{DEFAULT_DEADLINE, ResilientBuilder};
pub use self::nodes::NodesFrom;
pub use self::state::{StoreState, StoreStatus};
pub use self::stats::ResilienceStats;
pub use crate::store::{OnFailure, Policy, SyncMode};

use self::layer::ResilienceLayer;
use crate::clock::Clock;
use crate::store::{Check, Deciding, Diagnosis, Store, StoreError};

/// A store with the resilience layer in front of it: it decides locally where that is safe, and
/// always before the deadline.
///
/// Cheap to clone; clones share everything. Needs a tokio runtime.
#[derive(Clone)]
pub struct Resilient {
    layer: Arc<ResilienceLayer>,
}

impl Resilient {
    /// Puts the layer in front of `store`, with default options.
    pub fn new(store: impl Store) -> Self {
        Self::builder(store).build()
    }

    /// Puts the layer in front of `store`, with other options.
    pub fn builder(store: impl Store) -> ResilientBuilder {
        ResilientBuilder::new(Box::new(store))
    }

    /// The clock of this node.
    pub fn clock(&self) -> &Clock {
        &self.layer.clock
    }

    /// The counters since the layer was built, and what it holds now.
    pub fn stats(&self) -> ResilienceStats {
        self.layer.stats()
    }

    /// The state of the store, and how limits are enforced while it does not decide.
    pub fn status(&self) -> StoreStatus {
        self.layer.status()
    }

    /// Calls the store once, on a key of its own, and returns its state.
    ///
    /// Call it when a program starts, to learn before the first request whether the store is
    /// [unreachable](StoreState::Unreachable) or [refuses](StoreState::Refused) charges. Connect a
    /// [`Redis`](crate::redis::Redis) first, with [`prepare`](crate::redis::Redis::prepare): a
    /// probe has no more time than any other call.
    pub async fn probe(&self) -> StoreStatus {
        self.layer.probe_all().await
    }

    /// Registers a function that is called whenever the [state](StoreState) of the store changes.
    ///
    /// It must not block and must not hold this store. Only the first one registered is called.
    pub fn on_state(&self, report: impl Fn(&StoreStatus) + Send + Sync + 'static) {
        let _ = self.layer.on_state.set(Box::new(report));
    }

    /// Registers a function that is called with the error of every call that had no decision, so
    /// that this node decides locally.
    ///
    /// It must not block. Refusals are not reported here but by [`on_state`](Resilient::on_state).
    /// Only the first function registered is called.
    pub fn on_miss(&self, report: impl Fn(&StoreError) + Send + Sync + 'static) {
        let _ = self.layer.on_miss.set(Box::new(report));
    }

    /// Returns unused lease units and charges what is not charged yet, as far as the store answers;
    /// takes nothing ahead from then on.
    pub async fn close(&self) {
        self.layer.close().await;
    }
}

impl fmt::Debug for Resilient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resilient").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Store for Resilient {
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        Box::pin(async move {
            check.validate()?;
            match check.op() {
                Op::Check if check.id().is_none() => self.layer.check(check).await,
                Op::Check | Op::Peek | Op::Take | Op::Debit | Op::Book { .. } => {
                    self.layer.forward(check).await
                }
                _ => self.layer.give_back(check).await,
            }
        })
    }

    fn parts(&self, check: &Check<'_>) -> u64 {
        self.layer.store.parts(check)
    }

    fn diagnose(&self, error: &StoreError) -> Diagnosis {
        self.layer.store.diagnose(error)
    }
}
