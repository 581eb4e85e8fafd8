//! What the connection layer counts, for metrics and tests.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What has happened so far.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The same while it is being counted.
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
    /// Connections that were made, the first ones included.
    connects,
    /// Connections that were made in place of one that broke.
    reconnects,
    /// Attempts to connect that failed.
    failed_connects,
    /// Calls that were sent once more.
    retries,
    /// Redirects that were followed.
    redirects,
    /// Scripts that were loaded because a server did not have them.
    script_loads,
    /// Calls that were not answered in time.
    timeouts,
    /// Connections dropped because of what came over them.
    protocol_errors,
    /// Replies to callers who had gone.
    dropped_replies,
    /// Calls refused because too many waited.
    overloads,
    /// Times the map of a cluster was read, or Sentinel was asked for the primary.
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
