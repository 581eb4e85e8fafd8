//! The part of a check that this node decides itself.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::{Decision, Source, Timestamp, Verdict};

use super::SyncMode;
use super::async_sync::{AsyncVerdict, UnsyncedKey};
use super::fingerprint::Fingerprint;
use super::last_answer::LastAnswer;
use super::layer::ResilienceLayer;
use super::lease::KeyLease;
use super::stats::{add, one};
use crate::store::{Charge, Check};

/// A check while it is decided. What it has spent here is returned when it is dropped before
/// [`keep`](LocalAttempt::keep).
pub(super) struct LocalAttempt<'a> {
    layer: &'a Arc<ResilienceLayer>,
    pub(super) check: &'a Check<'a>,
    pub(super) now: Timestamp,
    /// One for each charge of the check.
    pub(super) charges: Vec<ChargeAttempt>,
    is_kept: bool,
}

/// One charge while it is decided.
#[derive(Clone, Copy)]
pub(super) struct ChargeAttempt {
    pub(super) name: Fingerprint,
    limit: u64,
    pub(super) spent: LocalSpend,
}

/// Where a charge was spent on this node.
#[derive(Clone, Copy)]
pub(super) enum LocalSpend {
    /// Nowhere: the store must decide.
    Nothing,
    /// From a lease whose units expire then.
    Leased(Verdict, Timestamp),
    /// In [`SyncMode::Async`]; the charge follows.
    Async(Verdict),
}

impl ChargeAttempt {
    pub(super) fn needs_store(&self) -> bool {
        matches!(self.spent, LocalSpend::Nothing)
    }
}

impl<'a> LocalAttempt<'a> {
    pub(super) fn new(layer: &'a Arc<ResilienceLayer>, check: &'a Check<'a>) -> Self {
        let attempt = |charge: &Charge<'_>| ChargeAttempt {
            name: layer.fingerprints.of(charge),
            limit: layer.fingerprints.limit(&charge.limit),
            spent: LocalSpend::Nothing,
        };
        let charges = check.charges().iter().map(attempt).collect();
        LocalAttempt { layer, check, now: layer.clock.now(), charges, is_kept: false }
    }

    /// The decision, if this node can make it. What can be spent here is spent, also if the store
    /// must decide the rest.
    pub(super) fn decide(&mut self) -> Option<Decision> {
        if let Some(denial) = self.cached_denial() {
            one(&self.layer.counters.denied_here);
            return Some(denial);
        }
        for at in 0..self.charges.len() {
            let charge = &self.check.charges()[at];
            match self.layer.mode(charge) {
                SyncMode::Direct => {}
                SyncMode::Lease => self.charges[at].spent = self.spend_lease(at),
                SyncMode::Async => match self.spend_async(at) {
                    Ok(spent) => self.charges[at].spent = spent,
                    Err(denied) => {
                        if let Some(denial) = self.denial_by(at, denied) {
                            one(&self.layer.counters.denied_here);
                            return Some(denial);
                        }
                    }
                },
            }
        }
        self.allowed_here()
    }

    /// The decision, if every charge was spent here.
    pub(super) fn allowed_here(&self) -> Option<Decision> {
        let verdicts: Option<Vec<Verdict>> = self
            .charges
            .iter()
            .map(|own| match own.spent {
                LocalSpend::Nothing => None,
                LocalSpend::Leased(verdict, _) | LocalSpend::Async(verdict) => Some(verdict),
            })
            .collect();
        Some(local_decision(verdicts?, true, self.now))
    }

    /// A denial that the last answers of the store prove.
    fn cached_denial(&self) -> Option<Decision> {
        let charges = self.check.charges();
        if self.layer.options.longest_denial_us == 0
            || charges.iter().any(|charge| charge.limit.counts_rejected())
        {
            return None;
        }
        let mut verdicts = Vec::with_capacity(charges.len());
        let mut is_denied = false;
        for (own, charge) in self.charges.iter().zip(charges) {
            // Held lease units can be spent, whatever the store would say.
            if self.layer.mode(charge) == SyncMode::Lease && self.layer.holds(own.name, charge.cost)
            {
                return None;
            }
            let verdict = self.last_answer(own, |last| {
                if let Some(verdict) = self.denied_by_in_flight(last, charge) {
                    is_denied = true;
                    return Some(verdict);
                }
                is_denied |= last.denies(&charge.limit, charge.cost, self.now);
                last.expected(&charge.limit, charge.cost, 0, self.now)
            })?;
            verdicts.push(verdict);
        }
        // The fields of a cached denial count only if they agree that it is denied.
        let is_denied = is_denied && verdicts.iter().any(|verdict| !verdict.allowed);
        is_denied.then(|| local_decision(verdicts, false, self.now))
    }

    /// Reads the last answer about a charge under its limit, if it is fresh: it does not contain
    /// what other nodes do meanwhile.
    fn last_answer<R>(
        &self,
        own: &ChargeAttempt,
        read: impl FnOnce(&LastAnswer) -> Option<R>,
    ) -> Option<R> {
        let is_fresh = |last: &LastAnswer| {
            last.limit == own.limit
                && self.now.micros_since(last.sent) <= self.layer.options.longest_denial_us
        };
        self.layer
            .last_answers
            .with(own.name, |last| if is_fresh(last) { read(last) } else { None })?
    }

    /// The denial of a charge because this node itself has sent checks for all that can be left.
    fn denied_by_in_flight(&self, last: &LastAnswer, charge: &Charge<'_>) -> Option<Verdict> {
        // Leased units may come back any time.
        if self.layer.mode(charge) != SyncMode::Direct {
            return None;
        }
        let then = self.now.after(self.layer.options.deadline);
        last.denied_by_in_flight(&charge.limit, charge.cost, self.now, then)
    }

    pub(super) fn spend_lease(&self, at: usize) -> LocalSpend {
        let (charge, own) = (&self.check.charges()[at], &self.charges[at]);
        let ResilienceLayer { leases, counters, .. } = &**self.layer;
        let max = self.layer.max_leased(charge);
        // A cost above the most that may be held is never leased and adds no demand.
        if charge.cost == 0 || max < 2 || charge.cost > max {
            return LocalSpend::Nothing;
        }
        let mut shard = leases.shard(own.name);
        let new = || KeyLease::new(charge.clone().into_owned(), own.limit, self.now);
        let Some(lease) = leases.entry(&mut shard, own.name, new) else {
            return LocalSpend::Nothing;
        };
        if !lease.is_under(own.limit) {
            // The limit has changed: return what was taken under the old one. The next request
            // starts a new lease.
            let old = std::mem::replace(lease, new());
            drop(shard);
            self.layer.return_soon(old);
            return LocalSpend::Nothing;
        }
        add(&counters.lease_units_expired, lease.expire(self.now));
        let expires = lease.expires();
        let spent = lease.spend(charge.cost, self.now);
        let more =
            if self.layer.may_take_ahead() { lease.units_to_take(max, self.now) } else { None };
        drop(shard);
        if let Some(units) = more {
            self.layer.take_ahead(own.name, charge.clone().into_owned(), units);
        }
        match spent {
            Some(verdict) => {
                one(&counters.spent_here);
                add(&counters.lease_units_spent, charge.cost);
                LocalSpend::Leased(verdict, expires)
            }
            None => LocalSpend::Nothing,
        }
    }

    /// Spends a charge in [`SyncMode::Async`]; the error is the denial.
    fn spend_async(&self, at: usize) -> Result<LocalSpend, Verdict> {
        let (charge, own) = (&self.check.charges()[at], &self.charges[at]);
        let ResilienceLayer { unsynced, counters, .. } = &**self.layer;
        let cap = self.layer.async_cap(charge);
        if charge.cost == 0 || cap == 0 || self.layer.is_closed.load(Ordering::Relaxed) {
            return Ok(LocalSpend::Nothing);
        }
        let mut shard = unsynced.shard(own.name);
        let new = || UnsyncedKey::new(charge.clone().into_owned(), own.limit, self.now);
        let Some(key) = unsynced.entry(&mut shard, own.name, new) else {
            return Ok(LocalSpend::Nothing);
        };
        key.set_limit(charge, own.limit);
        match key.spend(charge.cost, cap, self.now) {
            AsyncVerdict::Spent(verdict) => {
                one(&counters.async_here);
                Ok(LocalSpend::Async(verdict))
            }
            AsyncVerdict::Denied(verdict) => Err(verdict),
            AsyncVerdict::NeedsStore => Ok(LocalSpend::Nothing),
        }
    }

    /// The denial by one charge, if the fields of all other charges are known, too.
    fn denial_by(&self, at: usize, denied: Verdict) -> Option<Decision> {
        let others = self.charges.iter().zip(self.check.charges()).enumerate();
        let verdicts = others.map(|(index, (own, charge))| {
            if index == at {
                return Some(denied);
            }
            let shard = self.layer.unsynced.shard(own.name);
            let unsynced = shard.get(&own.name).map_or(0, UnsyncedKey::unsynced);
            drop(shard);
            self.last_answer(own, |last| {
                last.expected(&charge.limit, charge.cost, unsynced, self.now)
            })
        });
        Some(local_decision(verdicts.collect::<Option<_>>()?, false, self.now))
    }

    /// Keeps what was spent here.
    pub(super) fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Joins what was decided here with the store's decision about the charges at `called`.
    pub(super) fn join(&self, called: &[usize], decision: &Decision) -> Decision {
        let mut from_store = called.iter().zip(decision.charges()).peekable();
        let verdicts = self.charges.iter().enumerate().map(|(at, own)| {
            if let Some((_, verdict)) = from_store.next_if(|(index, _)| **index == at) {
                return *verdict;
            }
            match own.spent {
                LocalSpend::Nothing => Verdict::default(),
                LocalSpend::Leased(verdict, _) | LocalSpend::Async(verdict)
                    if decision.allowed() =>
                {
                    verdict
                }
                LocalSpend::Leased(verdict, _) | LocalSpend::Async(verdict) => Verdict {
                    granted: 0,
                    remaining: verdict.remaining.saturating_add(verdict.granted),
                    ..verdict
                },
            }
        });
        let (source, at) = (decision.source(), decision.at());
        Decision::of_many(verdicts.collect(), decision.allowed(), at).with_source(source)
    }
}

impl Drop for LocalAttempt<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        for (own, charge) in self.charges.iter().zip(self.check.charges()) {
            match own.spent {
                LocalSpend::Nothing => {}
                LocalSpend::Leased(_, expires) => {
                    self.layer.unspend_lease(own.name, charge.cost, expires);
                }
                LocalSpend::Async(_) => {
                    if let Some(key) = self.layer.unsynced.shard(own.name).get_mut(&own.name) {
                        key.unspend(charge.cost);
                    }
                }
            }
        }
    }
}

fn local_decision(verdicts: Vec<Verdict>, allowed: bool, now: Timestamp) -> Decision {
    let decision = match &verdicts[..] {
        [only] => Decision::of_one(*only, allowed, now),
        _ => Decision::of_many(verdicts, allowed, now),
    };
    decision.with_source(Source::Local)
}
