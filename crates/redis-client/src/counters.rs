//! Counters of the connections, for metrics and tests.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of the connections.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The counters while connections increment them.
        #[derive(Debug, Default)]
        pub(super) struct Counting {
            $(pub(super) $name: Count,)*
        }

        impl Counting {
            pub(super) fn read(&self) -> Counters {
                Counters { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Connections made, the first ones included.
    connects,
    /// Connections made after one that broke.
    reconnects,
    /// Failed attempts to connect.
    failed_connects,
    /// Calls that were retried.
    retries,
    /// Redirects followed.
    redirects,
    /// Scripts loaded because a server did not have them.
    script_loads,
    /// Calls without a reply before their deadline.
    timeouts,
    /// Connections closed because of a malformed or oversized reply.
    protocol_errors,
    /// Replies to cancelled calls.
    dropped_replies,
    /// Calls refused because too many were waiting.
    overloads,
    /// Reads of the cluster map, and queries to Sentinel.
    discoveries,
}

#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn one(&self) {
        self.add(1);
    }

    pub(super) fn add(&self, many: u64) {
        self.0.fetch_add(many, Ordering::Relaxed);
    }
}
