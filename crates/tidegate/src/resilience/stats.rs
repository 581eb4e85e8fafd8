//! The counters of the resilience layer.

use std::sync::atomic::{AtomicU64, Ordering};

use super::breaker::BreakerState;
use super::nodes::NodesFrom;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of a resilience layer since it was built, and what it holds now.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct ResilienceStats {
            /// Whether the store is called; of a cluster, whether all of it is.
            pub breaker: BreakerState,
            /// Calls to the store in flight.
            pub in_flight: u64,
            /// Lease units that this node holds and can still spend.
            pub lease_units_held: u64,
            /// Keys that this node holds lease units of.
            pub leases: u64,
            /// Units that were allowed and are not charged yet.
            pub unsynced_units: u64,
            /// The number of nodes that limits are divided by.
            pub nodes: u64,
            /// The source of that number.
            pub nodes_from: NodesFrom,
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            pub(crate) fn read(&self) -> ResilienceStats {
                ResilienceStats { $($name: self.$name.load(Ordering::Relaxed),)* ..ResilienceStats::default() }
            }
        }
    };
}

counters! {
    /// Calls to the store.
    calls,
    /// Calls without an answer, or without one in time.
    misses,
    /// Times the breaker opened.
    opened,
    /// Times the breaker closed again.
    closed,
    /// Calls that were not made because the breaker was open.
    not_called,
    /// Calls that were not made because too many were in flight.
    overloads,
    /// Denials that were answered from the deny cache.
    denied_here,
    /// Charges that were spent from a lease.
    spent_here,
    /// Charges that were allowed in async mode, to be charged later.
    async_here,
    /// Checks allowed without the store.
    fallback_allowed,
    /// Checks denied without the store.
    fallback_denied,
    /// Checks allowed without the store that were not charged anywhere, because a policy is `open`.
    fail_open,
    /// Lease units that the store granted.
    lease_units_granted,
    /// Lease units that were spent.
    lease_units_spent,
    /// Lease units that were returned to the store.
    lease_units_returned,
    /// Lease units that expired before they were spent or returned.
    lease_units_expired,
    /// Units that were charged in the background.
    synced_units,
}

pub(crate) fn add(counter: &AtomicU64, units: u64) {
    counter.fetch_add(units, Ordering::Relaxed);
}

pub(crate) fn one(counter: &AtomicU64) {
    add(counter, 1);
}

/// Adds one and returns the sum.
pub(crate) fn next(counter: &AtomicU64) -> u64 {
    counter.fetch_add(1, Ordering::Relaxed) + 1
}
