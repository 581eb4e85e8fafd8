//! Events for `tracing`, emitted while limits are not enforced as configured. Without the feature
//! `tracing` the functions do nothing.

#[cfg(not(feature = "tracing"))]
pub(crate) use self::off::*;
#[cfg(feature = "tracing")]
pub(crate) use self::on::*;

/// An outage of a remote store.
#[cfg_attr(not(feature = "tracing"), allow(dead_code, reason = "only events read it"))]
pub(crate) struct StoreOutage<'a> {
    /// The cause.
    pub(crate) why: &'a str,
    /// What to do about it.
    pub(crate) advice: &'a str,
    /// The number of nodes that share the limits.
    pub(crate) nodes: u64,
    /// The source of that number.
    pub(crate) nodes_from: &'a str,
    /// How limits are enforced meanwhile.
    pub(crate) enforced: &'a str,
}

#[cfg(feature = "tracing")]
mod on {
    use super::StoreOutage;
    use crate::store::StoreError;

    /// A remote store decides again.
    pub(crate) fn store_decides() {
        tracing::info!("the store decides again");
    }

    /// A remote store is unreachable.
    pub(crate) fn store_unreachable(outage: &StoreOutage<'_>) {
        let StoreOutage { why, advice, nodes, nodes_from, enforced } = *outage;
        tracing::warn!(why, advice, nodes, nodes_from, %enforced, "the store is unreachable");
    }

    /// A remote store answers, and refuses charges.
    pub(crate) fn store_refuses(outage: &StoreOutage<'_>) {
        let StoreOutage { why, advice, nodes, nodes_from, enforced } = *outage;
        tracing::warn!(why, advice, nodes, nodes_from, %enforced, "the store refuses charges");
    }

    /// A call to the store had no decision, so this node decides locally. `total` is the count so
    /// far; each power of two is reported.
    pub(crate) fn missed(total: u64, why: &StoreError) {
        if total.is_power_of_two() {
            let what = "a call to the store had no decision: this node decided locally";
            tracing::warn!(total, %why, "{what}");
        }
    }

    /// A call was not sent to the store because too many are in flight. `total` is the count so
    /// far; each power of two is reported.
    pub(crate) fn overloaded(total: u64) {
        if total.is_power_of_two() {
            tracing::warn!(
                total,
                "too many calls to the store are under way: this node decided locally"
            );
        }
    }

    /// A call of the tower layer to a store without the resilience layer failed.
    #[cfg(feature = "tower")]
    pub(crate) fn layer_without_store(why: &StoreError, enforced: &str) {
        tracing::warn!(%why, enforced, "the store has no answer");
    }

    /// The store of a tower layer answers again.
    #[cfg(feature = "tower")]
    pub(crate) fn layer_with_store() {
        tracing::info!("the store decides again");
    }

    /// A key held less usage than a decision before, and was restored. `total` is the count so far;
    /// each power of two is reported.
    #[cfg(feature = "redis")]
    pub(crate) fn restored(total: u64) {
        if total.is_power_of_two() {
            tracing::warn!(
                total,
                "the store has lost state that this process remembers, and was given it back"
            );
        }
    }

    /// The clock of the store went back, at least `by` this much. Each step is reported once.
    #[cfg(feature = "redis")]
    pub(crate) fn clock_went_back(by: std::time::Duration) {
        tracing::warn!(
            ?by,
            "the clock of the store went back: usage is kept and counted from the new time on, \
             and window limits may start a new window early"
        );
    }

    /// A key held something that Tidegate did not write. `total` is the count so far; each power of
    /// two is reported.
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

    pub(crate) fn store_decides() {}

    pub(crate) fn store_unreachable(_: &super::StoreOutage<'_>) {}

    pub(crate) fn store_refuses(_: &super::StoreOutage<'_>) {}

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
