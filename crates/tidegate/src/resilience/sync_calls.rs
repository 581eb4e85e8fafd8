//! The calls that charge what [`SyncMode::Async`](super::SyncMode::Async) has allowed.

use std::sync::Arc;

use tidegate_core::{Decision, Id, Op, Timestamp};

use super::call::NoDecision;
use super::fingerprint::Fingerprint;
use super::last_answer::LastAnswer;
use super::layer::ResilienceLayer;
use super::stats::add;
use crate::store::{Charge, Check};

/// How many keys are charged concurrently.
const MAX_CONCURRENT: usize = 64;

impl ResilienceLayer {
    /// Charges what was allowed, of all keys.
    pub(super) async fn sync_all(self: &Arc<Self>) {
        let mut due: Vec<Fingerprint> = Vec::new();
        for mut shard in self.unsynced.shards() {
            if shard.is_empty() {
                continue;
            }
            let now = self.clock.now();
            due.extend(shard.iter().filter(|(_, key)| key.unsynced() > 0).map(|(name, _)| *name));
            shard.retain(|_, key| !key.is_idle(now));
        }
        for names in due.chunks(MAX_CONCURRENT) {
            let mut calls = tokio::task::JoinSet::new();
            for &name in names {
                let layer = Arc::clone(self);
                calls.spawn(async move { layer.sync(name).await });
            }
            while calls.join_next().await.is_some() {}
        }
    }

    /// Charges what was allowed, of one key.
    pub(super) async fn sync(self: &Arc<Self>, name: Fingerprint) {
        let Some((charge, call)) = ({
            let mut shard = self.unsynced.shard(name);
            shard.get_mut(&name).and_then(|key| {
                let (id, units) = key.send(self.random.id())?;
                let charge = Charge { cost: units, ..key.charge.clone() };
                Some((charge, DebitCall { layer: self, name, id, units, is_done: false }))
            })
        }) else {
            return;
        };
        call.run(charge).await;
    }
}

/// Units that are being charged. If the call is dropped, the same units are sent again under the
/// same id.
struct DebitCall<'a> {
    layer: &'a Arc<ResilienceLayer>,
    name: Fingerprint,
    id: Id,
    units: u64,
    is_done: bool,
}

impl DebitCall<'_> {
    async fn run(mut self, charge: Charge<'static>) {
        let check = Check::of(Op::Debit).with_charges(vec![charge]).with_id(self.id);
        let sent = self.layer.clock.now();
        let answer = self.layer.call(&check).await;
        let now = self.layer.clock.now();
        self.is_done = true;
        let mut shard = self.layer.unsynced.shard(self.name);
        let Some(key) = shard.get_mut(&self.name) else { return };
        match answer {
            Ok(decision) if decision.allowed() => {
                add(&self.layer.counters.synced_units, self.units);
                key.synced(self.last_answer(&check, &decision, sent, now));
            }
            // The limit has no room, not even for debt: the units stay here and count as used.
            Ok(decision) => {
                key.not_synced(false);
                key.record(self.last_answer(&check, &decision, sent, now));
            }
            Err(NoDecision::Failed(_)) => key.not_synced(true),
            Err(_) => key.not_synced(false),
        }
    }

    fn last_answer(
        &self,
        check: &Check<'_>,
        decision: &Decision,
        sent: Timestamp,
        now: Timestamp,
    ) -> LastAnswer {
        let limit = self.layer.fingerprints.limit(&check.charges()[0].limit);
        LastAnswer::new(limit, decision.binding(), decision.at(), sent, now)
    }
}

impl Drop for DebitCall<'_> {
    fn drop(&mut self) {
        if !self.is_done
            && let Some(key) = self.layer.unsynced.shard(self.name).get_mut(&self.name)
        {
            key.not_synced(true);
        }
    }
}
