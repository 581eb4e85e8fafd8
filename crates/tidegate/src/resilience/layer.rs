//! What all clones of a [`Resilient`](super::Resilient) share, and the rules it applies to a charge.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tidegate_core::Timestamp;

use super::async_sync::{self, UnsyncedKey};
use super::breaker::Breaker;
use super::builder::ResilienceOptions;
use super::concurrency_limit::ConcurrencyLimit;
use super::fingerprint::{Fingerprint, Fingerprints};
use super::last_answer::LastAnswer;
use super::lease::{self, KeyLease};
use super::lease_calls::UnreturnedGrant;
use super::nodes::Nodes;
use super::random::Random;
use super::share::Share;
use super::state::{Outages, StoreStatus};
use super::stats::{Counters, add};
use super::table::{FixedTable, RecentTable};
use super::{OnFailure, SyncMode};
use crate::clock::Clock;
use crate::store::{Charge, Store, StoreError};

/// The most parts of a store whose failures are kept apart: the bits of [`Store::parts`].
pub(super) const MAX_PARTS: usize = 64;
/// The most keys in each table.
const MAX_KEYS: usize = 1 << 16;

type OnMiss = Box<dyn Fn(&StoreError) + Send + Sync>;
type OnState = Box<dyn Fn(&StoreStatus) + Send + Sync>;

/// The resilience layer of one store.
pub(super) struct ResilienceLayer {
    pub(super) store: Box<dyn Store>,
    pub(super) options: ResilienceOptions,
    pub(super) clock: Clock,
    pub(super) fingerprints: Fingerprints,
    pub(super) random: Random,
    /// One for each part of the store.
    pub(super) breakers: Box<[Mutex<Breaker>]>,
    pub(super) open_breakers: AtomicUsize,
    /// The number of parts that an [unresponsive probe](super::probe) watches.
    pub(super) unresponsive_parts: AtomicUsize,
    /// The parts, one bit each, for which a task finds out whether an error concerns more than one
    /// call.
    pub(super) suspected_parts: AtomicU64,
    pub(super) outages: Mutex<Outages>,
    pub(super) concurrency_limit: Mutex<ConcurrencyLimit>,
    pub(super) last_answers: RecentTable<LastAnswer>,
    pub(super) leases: FixedTable<KeyLease>,
    pub(super) unsynced: FixedTable<UnsyncedKey>,
    pub(super) unreturned: Mutex<VecDeque<UnreturnedGrant>>,
    pub(super) share: Share,
    pub(super) nodes: Nodes,
    pub(super) counters: Counters,
    pub(super) has_background: AtomicBool,
    pub(super) is_closed: AtomicBool,
    pub(super) on_state: OnceLock<OnState>,
    pub(super) on_miss: OnceLock<OnMiss>,
}

impl ResilienceLayer {
    pub(super) fn new(
        store: Box<dyn Store>,
        options: ResilienceOptions,
        clock: Clock,
        random: Random,
        nodes: Option<u64>,
    ) -> Self {
        let breaker = || Mutex::new(Breaker::new(options.breaker));
        ResilienceLayer {
            store,
            share: Share::new(clock.clone()),
            clock,
            fingerprints: Fingerprints::new((random.number(), random.number())),
            random,
            breakers: (0..MAX_PARTS).map(|_| breaker()).collect(),
            open_breakers: AtomicUsize::new(0),
            unresponsive_parts: AtomicUsize::new(0),
            suspected_parts: AtomicU64::new(0),
            outages: Mutex::default(),
            concurrency_limit: Mutex::new(ConcurrencyLimit::new(options.max_in_flight)),
            last_answers: RecentTable::new(MAX_KEYS),
            leases: FixedTable::new(MAX_KEYS),
            unsynced: FixedTable::new(MAX_KEYS),
            unreturned: Mutex::default(),
            nodes: Nodes::new(nodes),
            counters: Counters::default(),
            has_background: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            on_state: OnceLock::new(),
            on_miss: OnceLock::new(),
            options,
        }
    }

    /// The mode a charge is decided in: not every limit can be leased or charged later.
    pub(super) fn mode(&self, charge: &Charge<'_>) -> SyncMode {
        match charge.policy.sync {
            SyncMode::Direct => SyncMode::Direct,
            ahead if lease::can_be_taken_ahead(&charge.limit) => ahead,
            _ => SyncMode::Direct,
        }
    }

    pub(super) fn on_failure_of(&self, charge: &Charge<'_>) -> OnFailure {
        charge.policy.on_failure.unwrap_or(self.options.on_failure)
    }

    /// The most units of a charge that this node may hold.
    pub(super) fn max_leased(&self, charge: &Charge<'_>) -> u64 {
        lease::max_held(
            &charge.limit,
            self.options.lease_error_per_mille,
            self.nodes.for_taking_ahead(),
        )
    }

    /// The most units of a charge that may be allowed and not yet charged.
    pub(super) fn async_cap(&self, charge: &Charge<'_>) -> u64 {
        let standard = || {
            async_sync::default_cap(
                &charge.limit,
                self.options.async_error_per_mille,
                self.nodes.for_taking_ahead(),
            )
        };
        self.options.async_cap.unwrap_or_else(standard).min(charge.limit.capacity())
    }

    /// Whether units may be taken ahead.
    pub(super) fn may_take_ahead(&self) -> bool {
        !self.is_closed.load(Ordering::Relaxed) && self.open_breakers.load(Ordering::Relaxed) == 0
    }

    /// Whether the lease of a key holds `cost` units.
    pub(super) fn holds(&self, name: Fingerprint, cost: u64) -> bool {
        self.leases.shard(name).get(&name).is_some_and(|lease| lease.held() >= cost)
    }

    /// Returns units to a lease that were spent for a check that was denied.
    pub(super) fn unspend_lease(&self, name: Fingerprint, cost: u64, expires: Timestamp) {
        let now = self.clock.now();
        let is_back = self
            .leases
            .shard(name)
            .get_mut(&name)
            .is_some_and(|lease| lease.unspend(cost, expires, now));
        self.counters.lease_units_spent.fetch_sub(cost, Ordering::Relaxed);
        if !is_back {
            add(&self.counters.lease_units_expired, cost);
        }
    }
}
