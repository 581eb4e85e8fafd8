//! On which terms a charge is decided: how near to the store, and what happens without an answer,
//! or without room.

use crate::memory::Overflow;

/// How near to a remote store a charge is decided.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum SyncMode {
    /// The store decides every time, but for denials that are still certain.
    #[default]
    Direct,
    /// This node takes a slice of the budget ahead and spends it by itself. The long-run rate is
    /// exact.
    Lease,
    /// This node decides from what the store said last, and charges afterwards, in the background.
    Async,
}

impl SyncMode {
    /// The word used in configuration and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            SyncMode::Direct => "direct",
            SyncMode::Lease => "lease",
            SyncMode::Async => "async",
        }
    }
}

/// What happens to a charge when the store does not answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum OnFailure {
    /// This node decides alone, under the limit divided by the number of nodes.
    #[default]
    Local,
    /// Everything passes, and is counted.
    Open,
    /// Nothing passes.
    Closed,
}

impl OnFailure {
    /// The word used in configuration and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            OnFailure::Local => "local",
            OnFailure::Open => "open",
            OnFailure::Closed => "closed",
        }
    }
}

/// The terms of a charge: what becomes of it where it cannot be decided as usual.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Policy {
    /// How near to the store it is decided.
    pub sync: SyncMode,
    /// What happens without an answer; what the store's builder says, if nothing.
    pub on_failure: Option<OnFailure>,
    /// What happens in a [store in memory](crate::Memory) that has no room for it; what that
    /// store's builder says, if nothing.
    pub overflow: Option<Overflow>,
}
