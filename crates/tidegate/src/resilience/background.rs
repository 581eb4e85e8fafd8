//! The background tasks of a node: returning leases, charging what was allowed, counting nodes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::async_sync::UnsyncedKey;
use super::breaker::BreakerState;
use super::call::NoDecision;
use super::layer::ResilienceLayer;
use super::lease::KeyLease;
use super::nodes::Nodes;
use super::stats::ResilienceStats;

/// How often leases are checked for units to return.
const SWEEP_PERIOD: Duration = Duration::from_millis(50);
/// How often a node renews its entry among the nodes; more often the first two times.
const HEARTBEAT_PERIOD: Duration = Duration::from_secs(1);
const FIRST_HEARTBEAT_PERIOD: Duration = Duration::from_millis(100);

impl ResilienceLayer {
    /// Starts the background tasks, once. They end when the last other user of the layer is gone.
    pub(super) fn start_background(self: &Arc<Self>) {
        if self.has_background.load(Ordering::Relaxed)
            || self.has_background.swap(true, Ordering::Relaxed)
        {
            return;
        }
        let (for_sweep, for_sync) = (Arc::downgrade(self), Arc::downgrade(self));
        tokio::spawn(async move {
            while let Some(layer) = after(&for_sweep, SWEEP_PERIOD).await {
                layer.sweep(false).await;
            }
        });
        let period = self.options.async_period;
        tokio::spawn(async move {
            while let Some(layer) = after(&for_sync, period).await {
                layer.sync_all().await;
            }
        });
        if self.nodes.are_counted() {
            tokio::spawn(count_nodes(Arc::downgrade(self)));
        }
    }

    /// Renews the entry of this node. Says whether the store took it.
    async fn renew_node(self: &Arc<Self>) -> bool {
        if self.is_closed.load(Ordering::Relaxed) {
            return false;
        }
        let id = self.random.id();
        match self.call(&Nodes::renewal(id)).await {
            Ok(_) => {
                for release in self.nodes.renewed(id) {
                    let _ = self.call(&release).await;
                }
                true
            }
            Err(NoDecision::Failed(_)) => {
                self.nodes.may_be_renewed(id);
                false
            }
            Err(NoDecision::NotCalled | NoDecision::Overloaded) => false,
        }
    }

    pub(super) async fn close(self: &Arc<Self>) {
        self.is_closed.store(true, Ordering::Relaxed);
        self.sweep(true).await;
        self.unreturned.lock().drain(..).for_each(|grant| self.lose(&grant));
        self.sync_all().await;
        for release in self.nodes.leave() {
            let _ = self.call(&release).await;
        }
    }

    pub(super) fn stats(&self) -> ResilienceStats {
        let mut stats = self.counters.read();
        for shard in self.leases.shards() {
            stats.lease_units_held += shard.values().map(KeyLease::held).sum::<u64>();
            stats.leases += shard.values().filter(|lease| lease.held() > 0).count() as u64;
        }
        stats.lease_units_held += self.unreturned_units();
        for shard in self.unsynced.shards() {
            stats.unsynced_units += shard.values().map(UnsyncedKey::unsynced).sum::<u64>();
        }
        let is_open = self.open_breakers.load(Ordering::Relaxed) > 0;
        stats.breaker = if is_open { BreakerState::Open } else { BreakerState::Closed };
        stats.in_flight = self.concurrency_limit.lock().in_flight() as u64;
        (stats.nodes, stats.nodes_from) = self.nodes.known();
        stats
    }
}

/// Renews the entry of this node and counts all entries, again and again.
async fn count_nodes(layer: Weak<ResilienceLayer>) {
    let (mut renewals, mut pause) = (0_u32, Duration::ZERO);
    while let Some(own) = after(&layer, pause).await {
        let is_counted = own.renew_node().await;
        renewals = renewals.saturating_add(1);
        let period = if renewals < 3 { FIRST_HEARTBEAT_PERIOD } else { HEARTBEAT_PERIOD };
        // Count in the middle of the period, at a time that differs between nodes.
        let jitter = u32::try_from(own.random.number() % 1024).unwrap_or(0);
        let until_count = period / 4 + period / 2048 * jitter;
        drop(own);
        let Some(own) = after(&layer, until_count).await else { return };
        // A store that does not take the entry of this node takes no entry of the others either:
        // counting would miss nodes that run.
        if is_counted && let Ok(counted) = own.call(&Nodes::count()).await {
            own.nodes.counted(counted.remaining());
        }
        pause = period - until_count;
    }
}

/// The layer after a pause, unless it is dropped.
async fn after(layer: &Weak<ResilienceLayer>, pause: Duration) -> Option<Arc<ResilienceLayer>> {
    if layer.strong_count() == 0 {
        return None;
    }
    tokio::time::sleep_until(Instant::now() + pause).await;
    layer.upgrade()
}
