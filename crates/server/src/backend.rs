//! The store behind the engine, as it is configured.

use tidegate::redis::Redis;
use tidegate::resilience::{OnFailure, Resilient};
use tidegate::{Check, Decision, LeaseReleaser, Memory, Store, StoreError, SystemClock};

/// The store behind the engine.
#[derive(Clone, Debug)]
pub enum Backend {
    /// State in this process.
    Memory(Memory),
    /// State in Redis or Valkey. A check without an answer is an error.
    Redis(Redis),
    /// State in Redis or Valkey behind the resilience layer, which answers every check by its
    /// deadline.
    Resilient(Resilient, Redis),
}

impl Backend {
    /// Decides a check.
    ///
    /// # Errors
    /// If the check is not valid or the store has no answer.
    pub async fn decide(&self, check: &Check<'_>) -> Result<Decision, StoreError> {
        match self {
            Backend::Memory(memory) => Ok(memory.decide(check)?),
            Backend::Redis(redis) => redis.decide(check).await,
            Backend::Resilient(resilient, _) => resilient.decide(check).await,
        }
    }

    /// Whether this node decides locally, because the remote store is unreachable or refuses calls.
    pub fn is_degraded(&self) -> bool {
        matches!(self, Backend::Resilient(resilient, _) if !resilient.status().state.is_healthy())
    }

    /// The configured policy without a store; `None` if there is no resilience layer.
    pub(crate) fn on_failure(&self) -> Option<OnFailure> {
        match self {
            Backend::Resilient(resilient, _) => Some(resilient.status().on_failure),
            Backend::Memory(_) | Backend::Redis(_) => None,
        }
    }

    /// Ends leases of this store in the background.
    pub(crate) fn lease_releaser(&self) -> LeaseReleaser {
        match self {
            Backend::Memory(memory) => LeaseReleaser::of_memory(memory.clone()),
            Backend::Redis(redis) => LeaseReleaser::of_store(redis.clone(), SystemClock::new()),
            Backend::Resilient(resilient, _) => {
                LeaseReleaser::of_store(resilient.clone(), resilient.clock().clone())
            }
        }
    }
}
