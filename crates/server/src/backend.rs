//! The store behind the engine, as it is configured.

use tidegate::redis::Redis;
use tidegate::resilience::Resilient;
use tidegate::{Check, Decision, Memory, Store, StoreError};

/// Where state is kept.
#[derive(Clone, Debug)]
pub enum Backend {
    /// In this process.
    Memory(Memory),
    /// In Redis or Valkey, asked every time; without an answer there is an error.
    Redis(Redis),
    /// In Redis or Valkey, with an answer in time whatever it does.
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

    /// Whether it does not decide: it is unreachable or refuses, and this node decides locally.
    pub fn is_away(&self) -> bool {
        matches!(self, Backend::Resilient(resilient, _) if !resilient.status().state.is_healthy())
    }
}
