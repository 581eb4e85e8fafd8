//! What is counted.

use std::sync::atomic::{AtomicU64, Ordering};

use super::breaker::BreakerState;
use super::nodes::NodesFrom;

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What stands before a store has counted since it was made, and what it holds.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct ResilienceStats {
            /// Whether the store is asked; of a cluster, whether all of it is.
            pub breaker: BreakerState,
            /// Calls to the store that are under way.
            pub in_flight: u64,
            /// Units that were taken ahead and can still be spent here.
            pub lease_units_held: u64,
            /// Keys that units were taken ahead of.
            pub leases: u64,
            /// Units that were let pass and are not yet charged.
            pub unsynced_units: u64,
            /// By how many nodes limits are divided.
            pub nodes: u64,
            /// How that number is known.
            pub nodes_from: NodesFrom,
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counts {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counts {
            pub(crate) fn read(&self) -> ResilienceStats {
                ResilienceStats { $($name: self.$name.load(Ordering::Relaxed),)* ..ResilienceStats::default() }
            }
        }
    };
}

counts! {
    /// Calls to the store.
    calls,
    /// Calls that had no answer in time, or none at all.
    misses,
    /// Times the breaker opened.
    opened,
    /// Times it closed again.
    closed,
    /// Questions that were not sent because the breaker was open.
    not_asked,
    /// Questions that were not sent because too many calls were under way.
    overloads,
    /// Denials that were certain without asking.
    denied_here,
    /// Checks that were let pass with units taken ahead.
    spent_here,
    /// Checks that were decided from the last known state, to be charged afterwards.
    async_here,
    /// Decisions without the store that let a request pass,
    fallback_allowed,
    /// and that denied one.
    fallback_denied,
    /// Requests that passed without being charged anywhere, because a rule says `open`.
    fail_open,
    /// Units taken ahead,
    lease_units_granted,
    /// spent,
    lease_units_spent,
    /// given back
    lease_units_returned,
    /// or lost because their time was over.
    lease_units_expired,
    /// Units charged in the background.
    synced_units,
}

pub(crate) fn add(counter: &AtomicU64, units: u64) {
    counter.fetch_add(units, Ordering::Relaxed);
}

pub(crate) fn one(counter: &AtomicU64) {
    add(counter, 1);
}

/// Counts one more, and returns how many there are now.
pub(crate) fn next(counter: &AtomicU64) -> u64 {
    counter.fetch_add(1, Ordering::Relaxed) + 1
}
