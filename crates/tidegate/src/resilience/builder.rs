//! The options of the resilience layer.

use std::sync::Arc;
use std::time::Duration;

use super::layer::ResilienceLayer;
use super::random::Random;
use super::{OnFailure, Resilient, breaker};
use crate::clock::{Clock, SystemClock};
use crate::store::Store;

/// How long one call to the store may take by default.
pub const DEFAULT_DEADLINE: Duration = Duration::from_millis(15);

/// What the layer reads of its options after it is built.
#[derive(Clone)]
pub(super) struct ResilienceOptions {
    pub(super) deadline: Duration,
    pub(super) max_in_flight: usize,
    pub(super) longest_denial_us: u64,
    pub(super) lease_error_per_mille: u64,
    pub(super) async_period: Duration,
    pub(super) async_cap: Option<u64>,
    pub(super) async_error_per_mille: u64,
    pub(super) on_failure: OnFailure,
    pub(super) breaker: breaker::BreakerRules,
}

impl Default for ResilienceOptions {
    fn default() -> Self {
        ResilienceOptions {
            deadline: DEFAULT_DEADLINE,
            max_in_flight: 1024,
            longest_denial_us: 1_000_000,
            lease_error_per_mille: 10,
            async_period: Duration::from_millis(50),
            async_cap: None,
            async_error_per_mille: 50,
            on_failure: OnFailure::Local,
            breaker: breaker::BreakerRules::default(),
        }
    }
}

/// The options of a [`Resilient`] store.
#[must_use = "there is no store until `build` is called"]
pub struct ResilientBuilder {
    store: Box<dyn Store>,
    options: ResilienceOptions,
    clock: Clock,
    seed: Option<u64>,
    nodes: Option<u64>,
}

impl ResilientBuilder {
    pub(super) fn new(store: Box<dyn Store>) -> Self {
        ResilientBuilder {
            store,
            options: ResilienceOptions::default(),
            clock: Clock::System(SystemClock::new()),
            seed: None,
            nodes: None,
        }
    }

    /// How long one call to the store may take; 15 ms by default.
    ///
    /// A check that takes longer is decided locally. A decision takes at most 5 ms more than this.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.options.deadline = deadline;
        self
    }

    /// The most calls to the store in flight; 1024 by default, fewer while calls miss their
    /// deadline.
    ///
    /// Checks beyond that are decided locally.
    pub fn max_in_flight(mut self, calls: usize) -> Self {
        self.options.max_in_flight = calls;
        self
    }

    /// What happens without an answer to charges whose policy does not say; [`OnFailure::Local`] by
    /// default.
    pub fn on_failure(mut self, policy: OnFailure) -> Self {
        self.options.on_failure = policy;
        self
    }

    /// The number of nodes that share the store.
    ///
    /// It divides each limit while nodes decide locally, and what may be taken ahead. By default
    /// the nodes are counted in the store; a node that has never reached it assumes that it is the
    /// only one.
    pub fn nodes(mut self, nodes: u64) -> Self {
        self.nodes = Some(nodes);
        self
    }

    /// How many thousandths of a limit all nodes together may hold as leases; 10, one per cent, by
    /// default.
    pub fn lease_error_per_mille(mut self, thousandths: u64) -> Self {
        self.options.lease_error_per_mille = thousandths.min(1000);
        self
    }

    /// The period of the background charges of [`SyncMode::Async`](super::SyncMode::Async); 50 ms
    /// by default.
    pub fn async_period(mut self, period: Duration) -> Self {
        self.options.async_period = period.max(Duration::from_millis(1));
        self
    }

    /// The most units per key that may be allowed and not yet charged.
    ///
    /// By default five per cent of the limit over all nodes, and all of it for a single node. With
    /// zero, [`SyncMode::Async`](super::SyncMode::Async) behaves like
    /// [`SyncMode::Direct`](super::SyncMode::Direct).
    pub fn async_cap(mut self, units: u64) -> Self {
        self.options.async_cap = Some(units);
        self
    }

    /// How long a denial is cached at most; 1 s by default, zero disables the deny cache.
    ///
    /// Within this time the node does not see what other nodes give back.
    pub fn longest_denial(mut self, longest: Duration) -> Self {
        self.options.longest_denial_us = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        self
    }

    /// The clock of this node; the machine's boot time by default.
    ///
    /// It must run while the machine sleeps.
    pub fn clock(mut self, clock: impl Into<Clock>) -> Self {
        self.clock = clock.into();
        self
    }

    /// Makes probe times and lease ids reproducible, for simulations.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Builds the store.
    pub fn build(self) -> Resilient {
        let ResilientBuilder { store, options, clock, seed, nodes } = self;
        let random = seed.map_or_else(Random::default, Random::of_seed);
        let layer = Arc::new(ResilienceLayer::new(store, options, clock, random, nodes));
        if tokio::runtime::Handle::try_current().is_ok() {
            layer.start_background();
        }
        Resilient { layer }
    }
}
