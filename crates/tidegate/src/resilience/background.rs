//! What happens in the background: taking ahead, giving back, charging afterwards, counting nodes.
//! Nobody waits for any of it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tidegate_core::{Op, Timestamp};
use tokio::time::Instant;

use super::breaker::BreakerState;
use super::fingerprint::Fingerprint;
use super::last_answer::LastAnswer;
use super::lease::{Grant, Lease};
use super::nodes::Nodes;
use super::stats::{ResilienceStats, add};
use super::{Inner, decide};
use crate::store::{Charge, Check};

/// How often leases are looked through.
const SWEEP: Duration = Duration::from_millis(50);
/// How often a node says that it is there; the first two times sooner.
const BEAT: Duration = Duration::from_secs(1);
const FIRST_BEATS: Duration = Duration::from_millis(100);
/// How many calls at once are made to charge afterwards.
const AT_ONCE: usize = 64;

/// So many wait to be given back at most, and so long: then they stay charged until the limit
/// forgets them.
const MOST_STRAYS: usize = 4096;
const STRAY_LIFE_US: u64 = 10_000_000;

/// Units that nobody will spend, and that could not be given back.
#[derive(Debug)]
pub(super) struct Stray {
    charge: Charge<'static>,
    grant: Grant,
    /// Whether they are among those that were granted; otherwise nobody knows whether they were.
    counted: bool,
    since: Timestamp,
}

impl Inner {
    /// Starts what runs in the background, once. It ends with the last of those who use it.
    pub(super) fn keep(self: &Arc<Self>) {
        if self.keeper.load(Ordering::Relaxed) || self.keeper.swap(true, Ordering::Relaxed) {
            return;
        }
        let (sweeping, syncing, beating) =
            (Arc::downgrade(self), Arc::downgrade(self), Arc::downgrade(self));
        tokio::spawn(async move {
            while let Some(inner) = later(&sweeping, SWEEP).await {
                inner.sweep(false).await;
            }
        });
        let period = self.settings.async_period;
        tokio::spawn(async move {
            while let Some(inner) = later(&syncing, period).await {
                inner.sync_all().await;
            }
        });
        if self.nodes.are_counted() {
            tokio::spawn(async move {
                let (mut beats, mut pause) = (0_u32, Duration::ZERO);
                while let Some(inner) = later(&beating, pause).await {
                    let is_counted = inner.beat().await;
                    beats = beats.saturating_add(1);
                    let beat = if beats < 3 { FIRST_BEATS } else { BEAT };
                    // Counted somewhere in the middle, at a moment of its own.
                    let until = beat / 4
                        + beat / 2048 * u32::try_from(inner.random.next() % 1024).unwrap_or(0);
                    drop(inner);
                    let Some(inner) = later(&beating, until).await else { return };
                    // A store that takes no lease of this node takes none of the others: they are
                    // there and not counted.
                    if is_counted {
                        inner.count().await;
                    }
                    pause = beat - until;
                }
            });
        }
    }

    /// Whether units may be taken ahead.
    pub(super) fn may_take_ahead(&self) -> bool {
        !self.closed.load(Ordering::Relaxed) && self.open.load(Ordering::Relaxed) == 0
    }

    /// Takes units ahead.
    pub(super) fn take_ahead(
        self: &Arc<Self>,
        name: Fingerprint,
        charge: Charge<'static>,
        units: u64,
    ) {
        let inner = Arc::clone(self);
        tokio::spawn(async move {
            let id = inner.random.id();
            let check = Check::of(Op::Take)
                .with_charges(vec![Charge { cost: units, ..charge }])
                .with_id(id);
            let sent = inner.clock.now();
            let answer = inner.ask(&check).await;
            let now = inner.clock.now();
            let charge = &check.charges()[0];
            let Ok(decision) = answer else {
                let limit = inner.names.limit(&charge.limit);
                if let Some(lease) =
                    inner.leases.shard(name).get_mut(&name).filter(|lease| lease.is_under(limit))
                {
                    lease.not_granted(units, now);
                }
                if let Err(decide::Missed::Failed(_)) = answer {
                    // It may have been taken; nobody will spend it.
                    inner.return_grant(charge, Grant::unknown(id, units), false).await;
                }
                return;
            };
            let limit = inner.names.limit(&charge.limit);
            let seen = LastAnswer::new(limit, decision.binding(), decision.at(), sent, now);
            let granted = decision.granted();
            add(&inner.counts.lease_units_granted, granted);
            let stray = {
                let mut shard = inner.leases.shard(name);
                match shard.get_mut(&name).filter(|lease| lease.is_under(limit)) {
                    Some(lease) if !inner.closed.load(Ordering::Relaxed) => {
                        lease.granted(id, units, granted, seen);
                        None
                    }
                    _ => (granted > 0).then(|| Grant::unknown(id, granted)),
                }
            };
            if let Some(stray) = stray {
                inner.return_grant(charge, stray, true).await;
            }
        });
    }

    /// Gives back what was taken ahead under a limit that has changed.
    pub(super) fn return_soon(self: &Arc<Self>, mut lease: Lease) {
        let inner = Arc::clone(self);
        tokio::spawn(async move {
            let now = inner.clock.now();
            add(&inner.counts.lease_units_expired, lease.expire(now));
            for grant in lease.returned(true, now) {
                inner.return_grant(&lease.charge, grant, true).await;
            }
        });
    }

    /// Gives back what is held of a key. Says whether that was anything.
    pub(super) async fn return_held(self: &Arc<Self>, name: Fingerprint) -> bool {
        let now = self.clock.now();
        let held = self
            .leases
            .shard(name)
            .get_mut(&name)
            .map(|lease| (lease.charge.clone(), lease.returned(true, now)));
        let Some((charge, grants)) = held else { return false };
        let any = grants.iter().any(Grant::can_be_given_back);
        let inner = Arc::clone(self);
        // A task of its own: it is done also if nobody waits for it any more.
        let giving = tokio::spawn(async move {
            let mut all = tokio::task::JoinSet::new();
            for grant in grants {
                let (inner, charge) = (Arc::clone(&inner), charge.clone());
                all.spawn(async move { inner.return_grant(&charge, grant, true).await });
            }
            while all.join_next().await.is_some() {}
        });
        giving.await.is_ok() && any
    }

    async fn return_grant(self: &Arc<Self>, charge: &Charge<'static>, grant: Grant, counted: bool) {
        let stray = Stray { charge: charge.clone(), grant, counted, since: self.clock.now() };
        if let Err(stray) = self.try_return(stray).await {
            self.try_later(stray);
        }
    }

    /// Keeps it for the next time, if there is one.
    fn try_later(&self, stray: Stray) {
        let mut strays = self.strays.lock();
        if self.closed.load(Ordering::Relaxed) || strays.len() >= MOST_STRAYS {
            self.lose(&stray);
        } else {
            strays.push_back(stray);
        }
    }

    /// Gives it back, if the store answers. Otherwise it may be tried again, unless the store may
    /// have done it already and would do it once more.
    async fn try_return(self: &Arc<Self>, stray: Stray) -> Result<(), Stray> {
        if !stray.grant.can_be_given_back() {
            self.lose(&stray);
            return Ok(());
        }
        let charge = Charge { cost: stray.grant.left, ..stray.charge.clone() };
        let check = Check::of(Op::Refund).with_charges(vec![charge]).with_id(stray.grant.id);
        let answer = self.ask(&check).await;
        self.seen.with(self.names.of(&check.charges()[0]), LastAnswer::forget_denials);
        match answer {
            Ok(_) if stray.counted => add(&self.counts.lease_units_returned, stray.grant.left),
            Ok(_) => {}
            Err(decide::Missed::Failed(_)) if !stray.grant.is_whole() => self.lose(&stray),
            Err(_) => return Err(stray),
        }
        Ok(())
    }

    /// It stays charged until the limit forgets it.
    fn lose(&self, stray: &Stray) {
        if stray.counted {
            add(&self.counts.lease_units_expired, stray.grant.left);
        }
    }

    /// Tries again to give back what could not be given back, until the store does not answer.
    async fn return_strays(self: &Arc<Self>) {
        let waiting = self.strays.lock().len();
        for _ in 0..waiting {
            let Some(stray) = self.strays.lock().pop_front() else { return };
            if self.clock.now().micros_since(stray.since) > STRAY_LIFE_US {
                self.lose(&stray);
                continue;
            }
            if let Err(stray) = self.try_return(stray).await {
                return self.try_later(stray);
            }
        }
    }

    /// Gives back what is not spent, and forgets what nobody asks about.
    async fn sweep(self: &Arc<Self>, all: bool) {
        let mut back: Vec<(Charge<'static>, Grant)> = Vec::new();
        for mut shard in self.leases.shards() {
            if shard.is_empty() {
                continue;
            }
            let now = self.clock.now();
            for lease in shard.values_mut() {
                add(&self.counts.lease_units_expired, lease.expire(now));
                let returned = lease.returned(all, now);
                back.extend(returned.into_iter().map(|grant| (lease.charge.clone(), grant)));
            }
            shard.retain(|_, lease| !lease.is_idle(now));
        }
        for (charge, grant) in back {
            self.return_grant(&charge, grant, true).await;
        }
        self.return_strays().await;
    }

    /// Charges what was let pass.
    async fn sync_all(self: &Arc<Self>) {
        let mut due: Vec<Fingerprint> = Vec::new();
        for mut shard in self.unsynced.shards() {
            if shard.is_empty() {
                continue;
            }
            let now = self.clock.now();
            due.extend(shard.iter().filter(|(_, own)| own.unsynced() > 0).map(|(name, _)| *name));
            shard.retain(|_, own| !own.is_idle(now));
        }
        for names in due.chunks(AT_ONCE) {
            let mut calls = tokio::task::JoinSet::new();
            for &name in names {
                let inner = Arc::clone(self);
                calls.spawn(async move { inner.sync(name).await });
            }
            while calls.join_next().await.is_some() {}
        }
    }

    /// Charges what was let pass of one key.
    pub(super) async fn sync(self: &Arc<Self>, name: Fingerprint) {
        let Some((charge, sending)) = ({
            let mut shard = self.unsynced.shard(name);
            shard.get_mut(&name).and_then(|own| {
                let (id, units) = own.send(self.random.id())?;
                let charge = Charge { cost: units, ..own.charge.clone() };
                Some((charge, Sending { inner: self, name, id, units, done: false }))
            })
        }) else {
            return;
        };
        sending.run(charge).await;
    }

    /// Renews the lease of this node. Says whether the store took it.
    async fn beat(self: &Arc<Self>) -> bool {
        if self.closed.load(Ordering::Relaxed) {
            return false;
        }
        let id = self.random.id();
        match self.ask(&Nodes::beat(id)).await {
            Ok(_) => {
                for end in self.nodes.took(id) {
                    let _ = self.ask(&end).await;
                }
                true
            }
            Err(decide::Missed::Failed(_)) => {
                self.nodes.may_have_taken(id);
                false
            }
            Err(decide::Missed::NotAsked | decide::Missed::Overload) => false,
        }
    }

    async fn count(self: &Arc<Self>) {
        if let Ok(counted) = self.ask(&Nodes::count()).await {
            self.nodes.heard(counted.remaining());
        }
    }

    pub(super) async fn close(self: &Arc<Self>) {
        self.closed.store(true, Ordering::Relaxed);
        self.sweep(true).await;
        self.strays.lock().drain(..).for_each(|stray| self.lose(&stray));
        self.sync_all().await;
        for leave in self.nodes.leave() {
            let _ = self.ask(&leave).await;
        }
    }

    pub(super) fn stats(&self) -> ResilienceStats {
        let mut stats = self.counts.read();
        for shard in self.leases.shards() {
            stats.lease_units_held += shard.values().map(Lease::held).sum::<u64>();
            stats.leases += shard.values().filter(|lease| lease.held() > 0).count() as u64;
        }
        let strays = self.strays.lock();
        stats.lease_units_held +=
            strays.iter().filter(|stray| stray.counted).map(|stray| stray.grant.left).sum::<u64>();
        drop(strays);
        for shard in self.unsynced.shards() {
            stats.unsynced_units += shard.values().map(super::Unsynced::unsynced).sum::<u64>();
        }
        let open = self.open.load(Ordering::Relaxed) > 0;
        stats.breaker = if open { BreakerState::Open } else { BreakerState::Closed };
        stats.in_flight = self.concurrency_limit.lock().under_way() as u64;
        (stats.nodes, stats.nodes_from) = self.nodes.known();
        stats
    }
}

/// Units on their way to be charged. If nobody waits for the answer any more they are sent again,
/// under the same id.
struct Sending<'a> {
    inner: &'a Arc<Inner>,
    name: Fingerprint,
    id: tidegate_core::Id,
    units: u64,
    done: bool,
}

impl Sending<'_> {
    async fn run(mut self, charge: Charge<'static>) {
        let check = Check::of(Op::Debit).with_charges(vec![charge]).with_id(self.id);
        let sent = self.inner.clock.now();
        let answer = self.inner.ask(&check).await;
        let now = self.inner.clock.now();
        self.done = true;
        let mut shard = self.inner.unsynced.shard(self.name);
        let Some(own) = shard.get_mut(&self.name) else { return };
        match answer {
            Ok(decision) if decision.allowed() => {
                add(&self.inner.counts.synced_units, self.units);
                own.synced(seen_of(self.inner, &check, &decision, sent, now));
            }
            // No room, not even for debt: it stays here and counts as used.
            Ok(decision) => {
                own.not_synced(false);
                own.saw(seen_of(self.inner, &check, &decision, sent, now));
            }
            Err(decide::Missed::Failed(_)) => own.not_synced(true),
            Err(_) => own.not_synced(false),
        }
    }
}

fn seen_of(
    inner: &Inner,
    check: &Check<'_>,
    decision: &tidegate_core::Decision,
    sent: Timestamp,
    now: Timestamp,
) -> LastAnswer {
    let limit = inner.names.limit(&check.charges()[0].limit);
    LastAnswer::new(limit, decision.binding(), decision.at(), sent, now)
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        if !self.done
            && let Some(own) = self.inner.unsynced.shard(self.name).get_mut(&self.name)
        {
            own.not_synced(true);
        }
    }
}

/// After a pause, if there is still somebody.
async fn later(weak: &Weak<Inner>, pause: Duration) -> Option<Arc<Inner>> {
    if weak.strong_count() == 0 {
        return None;
    }
    tokio::time::sleep_until(Instant::now() + pause).await;
    weak.upgrade()
}
