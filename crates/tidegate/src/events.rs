//! Events for `tracing`: whenever limits are not enforced as configured. Without the feature
//! `tracing` there are none.

#[cfg(not(feature = "tracing"))]
pub(crate) use self::off::*;
#[cfg(feature = "tracing")]
pub(crate) use self::on::*;

#[cfg(feature = "tracing")]
mod on {
    use crate::resilience::{StoreState, StoreStatus};
    use crate::store::StoreError;

    /// The state of a remote store is another now.
    pub(crate) fn store(status: &StoreStatus) {
        let (why, advice) = (status.state.why(), status.state.advice());
        let (nodes, nodes_from) = (status.nodes, status.nodes_from.name());
        let enforced = status.enforced();
        match status.state {
            StoreState::Healthy => tracing::info!("the store decides again"),
            StoreState::Unreachable { .. } => {
                tracing::warn!(why, advice, nodes, nodes_from, %enforced, "the store is unreachable");
            }
            StoreState::Refused { .. } => {
                tracing::warn!(why, advice, nodes, nodes_from, %enforced, "the store refuses charges");
            }
        }
    }

    /// A call to the store had no decision, and this node decides locally; `total` times so far.
    /// Reported when that has doubled.
    pub(crate) fn missed(total: u64, why: &StoreError) {
        if total.is_power_of_two() {
            tracing::warn!(total, %why, "a call to the store had no decision: this node decided locally");
        }
    }

    /// A call was not sent to the store because too many are under way; `total` times so far.
    /// Reported when that has doubled.
    pub(crate) fn overloaded(total: u64) {
        if total.is_power_of_two() {
            tracing::warn!(
                total,
                "too many calls to the store are under way: this node decided locally"
            );
        }
    }

    /// A store without the resilience layer has failed a call of the tower layer.
    #[cfg(feature = "tower")]
    pub(crate) fn layer_without_store(why: &StoreError, enforced: &str) {
        tracing::warn!(%why, enforced, "the store has no answer");
    }

    /// It answers the calls of the tower layer again.
    #[cfg(feature = "tower")]
    pub(crate) fn layer_with_store() {
        tracing::info!("the store decides again");
    }

    /// A key held less than had been seen before, and was restored; `total` times so far. Reported
    /// when that has doubled.
    #[cfg(feature = "redis")]
    pub(crate) fn restored(total: u64) {
        if total.is_power_of_two() {
            tracing::warn!(
                total,
                "the store has lost state that this process remembers, and was given it back"
            );
        }
    }

    /// The clock of the store went back, at least by this much. Reported once for each step.
    #[cfg(feature = "redis")]
    pub(crate) fn clock_went_back(by: std::time::Duration) {
        tracing::warn!(
            ?by,
            "the clock of the store went back: usage is kept and counted from the new time on, and window limits may start a new window early"
        );
    }

    /// A key held something that Tidegate did not write; `total` times so far. Reported when that
    /// has doubled.
    #[cfg(feature = "redis")]
    pub(crate) fn repaired(total: u64) {
        if total.is_power_of_two() {
            tracing::warn!(
                total,
                "a key held something that Tidegate did not write, and counts as used up"
            );
        }
    }
}

#[cfg(not(feature = "tracing"))]
mod off {
    use crate::store::StoreError;

    pub(crate) fn store(_: &crate::resilience::StoreStatus) {}

    pub(crate) fn missed(_: u64, _: &StoreError) {}

    pub(crate) fn overloaded(_: u64) {}

    #[cfg(feature = "tower")]
    pub(crate) fn layer_without_store(_: &StoreError, _: &str) {}

    #[cfg(feature = "tower")]
    pub(crate) fn layer_with_store() {}

    #[cfg(feature = "redis")]
    pub(crate) fn restored(_: u64) {}

    #[cfg(feature = "redis")]
    pub(crate) fn clock_went_back(_: std::time::Duration) {}

    #[cfg(feature = "redis")]
    pub(crate) fn repaired(_: u64) {}
}
