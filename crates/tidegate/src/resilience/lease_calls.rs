//! The calls that take lease units from the store and return unused ones.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::{Op, Timestamp};

use super::call::NoDecision;
use super::fingerprint::Fingerprint;
use super::last_answer::LastAnswer;
use super::layer::ResilienceLayer;
use super::lease::{Grant, KeyLease};
use super::stats::add;
use crate::store::{Charge, Check};

/// The most grants that wait to be returned; the others stay charged until the limit forgets them.
const MAX_UNRETURNED: usize = 4096;
/// How long a grant waits to be returned; later it stays charged.
const MAX_UNRETURNED_US: u64 = 10_000_000;

/// Units that will not be spent and could not be returned yet.
#[derive(Debug)]
pub(super) struct UnreturnedGrant {
    charge: Charge<'static>,
    grant: Grant,
    /// Whether the store is known to have granted them.
    is_granted: bool,
    since: Timestamp,
}

impl ResilienceLayer {
    /// Takes units ahead, in the background.
    pub(super) fn take_ahead(
        self: &Arc<Self>,
        name: Fingerprint,
        charge: Charge<'static>,
        units: u64,
    ) {
        let layer = Arc::clone(self);
        tokio::spawn(async move {
            let id = layer.random.id();
            let check = Check::of(Op::Take)
                .with_charges(vec![Charge { cost: units, ..charge }])
                .with_id(id);
            let sent = layer.clock.now();
            let answer = layer.call(&check).await;
            let now = layer.clock.now();
            let charge = &check.charges()[0];
            let limit = layer.fingerprints.limit(&charge.limit);
            let decision = match answer {
                Ok(decision) => decision,
                Err(missed) => {
                    if let Some(lease) =
                        layer.leases.shard(name).get_mut(&name).filter(|own| own.is_under(limit))
                    {
                        lease.not_granted(units, now);
                    }
                    if let NoDecision::Failed(_) = missed {
                        // The store may have charged units that this node will not spend.
                        layer.return_grant(charge, Grant::unused(id, units), false).await;
                    }
                    return;
                }
            };
            let answer = LastAnswer::new(limit, decision.binding(), decision.at(), sent, now);
            let granted = decision.granted();
            add(&layer.counters.lease_units_granted, granted);
            let unused = {
                let mut shard = layer.leases.shard(name);
                match shard.get_mut(&name).filter(|own| own.is_under(limit)) {
                    Some(lease) if !layer.is_closed.load(Ordering::Relaxed) => {
                        lease.granted(id, units, granted, answer);
                        None
                    }
                    _ => (granted > 0).then(|| Grant::unused(id, granted)),
                }
            };
            if let Some(grant) = unused {
                layer.return_grant(charge, grant, true).await;
            }
        });
    }

    /// Returns a lease under a limit that has changed, in the background.
    pub(super) fn return_soon(self: &Arc<Self>, mut lease: KeyLease) {
        let layer = Arc::clone(self);
        tokio::spawn(async move {
            let now = layer.clock.now();
            add(&layer.counters.lease_units_expired, lease.expire(now));
            for grant in lease.take_unused(true, now) {
                layer.return_grant(&lease.charge, grant, true).await;
            }
        });
    }

    /// Returns all units held of a key. Says whether there were any.
    pub(super) async fn return_held(self: &Arc<Self>, name: Fingerprint) -> bool {
        let now = self.clock.now();
        let held = self
            .leases
            .shard(name)
            .get_mut(&name)
            .map(|lease| (lease.charge.clone(), lease.take_unused(true, now)));
        let Some((charge, grants)) = held else { return false };
        let has_any = grants.iter().any(Grant::can_be_returned);
        let layer = Arc::clone(self);
        // A task of its own completes also if the caller stops waiting.
        let returning = tokio::spawn(async move {
            let mut calls = tokio::task::JoinSet::new();
            for grant in grants {
                let (layer, charge) = (Arc::clone(&layer), charge.clone());
                calls.spawn(async move { layer.return_grant(&charge, grant, true).await });
            }
            while calls.join_next().await.is_some() {}
        });
        returning.await.is_ok() && has_any
    }

    async fn return_grant(
        self: &Arc<Self>,
        charge: &Charge<'static>,
        grant: Grant,
        is_granted: bool,
    ) {
        let charge = charge.clone();
        let grant = UnreturnedGrant { charge, grant, is_granted, since: self.clock.now() };
        if let Err(grant) = self.try_return(grant).await {
            self.return_later(grant);
        }
    }

    fn return_later(&self, grant: UnreturnedGrant) {
        let mut unreturned = self.unreturned.lock();
        if self.is_closed.load(Ordering::Relaxed) || unreturned.len() >= MAX_UNRETURNED {
            self.lose(&grant);
        } else {
            unreturned.push_back(grant);
        }
    }

    /// Returns a grant. The error is a grant that can be tried again: without an answer only a
    /// whole grant can, because the store returns a part of one twice.
    async fn try_return(
        self: &Arc<Self>,
        unreturned: UnreturnedGrant,
    ) -> Result<(), UnreturnedGrant> {
        let grant = unreturned.grant;
        if !grant.can_be_returned() {
            self.lose(&unreturned);
            return Ok(());
        }
        let charge = Charge { cost: grant.left, ..unreturned.charge.clone() };
        let check = Check::of(Op::Refund).with_charges(vec![charge]).with_id(grant.id);
        let answer = self.call(&check).await;
        let name = self.fingerprints.of(&check.charges()[0]);
        self.last_answers.with(name, LastAnswer::forget_denials);
        match answer {
            Ok(_) if unreturned.is_granted => {
                add(&self.counters.lease_units_returned, grant.left);
            }
            Ok(_) => {}
            Err(NoDecision::Failed(_)) if !grant.is_whole() => self.lose(&unreturned),
            Err(_) => return Err(unreturned),
        }
        Ok(())
    }

    /// Gives up a grant: it stays charged until the limit forgets it.
    pub(super) fn lose(&self, unreturned: &UnreturnedGrant) {
        if unreturned.is_granted {
            add(&self.counters.lease_units_expired, unreturned.grant.left);
        }
    }

    /// Tries again to return grants, until the store does not answer.
    async fn return_unreturned(self: &Arc<Self>) {
        let waiting = self.unreturned.lock().len();
        for _ in 0..waiting {
            let Some(grant) = self.unreturned.lock().pop_front() else { return };
            if self.clock.now().micros_since(grant.since) > MAX_UNRETURNED_US {
                self.lose(&grant);
                continue;
            }
            if let Err(grant) = self.try_return(grant).await {
                return self.return_later(grant);
            }
        }
    }

    /// The units that are known to be granted and wait to be returned.
    pub(super) fn unreturned_units(&self) -> u64 {
        let unreturned = self.unreturned.lock();
        unreturned.iter().filter(|own| own.is_granted).map(|own| own.grant.left).sum()
    }

    /// Returns unused units, or all of them, and removes idle leases.
    pub(super) async fn sweep(self: &Arc<Self>, all: bool) {
        let mut unused: Vec<(Charge<'static>, Grant)> = Vec::new();
        for mut shard in self.leases.shards() {
            if shard.is_empty() {
                continue;
            }
            let now = self.clock.now();
            for lease in shard.values_mut() {
                add(&self.counters.lease_units_expired, lease.expire(now));
                let grants = lease.take_unused(all, now);
                unused.extend(grants.into_iter().map(|grant| (lease.charge.clone(), grant)));
            }
            shard.retain(|_, lease| !lease.is_idle(now));
        }
        for (charge, grant) in unused {
            self.return_grant(&charge, grant, true).await;
        }
        self.return_unreturned().await;
    }
}
