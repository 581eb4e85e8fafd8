//! The path of one check through the layer: local decision, one call to the store, and the share of
//! this node when the store does not answer.

use std::sync::Arc;

use tidegate_core::{Decision, Op};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::call::NoDecision;
use super::last_answer::LastAnswer;
use super::layer::ResilienceLayer;
use super::lease::KeyLease;
use super::local::LocalAttempt;
use super::stats::{add, one};
use super::{OnFailure, SyncMode};
use crate::store::{Charge, Check, StoreError};

impl ResilienceLayer {
    /// Decides a check without an id, locally as far as the policies of its charges allow.
    pub(super) async fn check(self: &Arc<Self>, check: &Check<'_>) -> Result<Decision, StoreError> {
        self.start_background();
        let mut attempt = LocalAttempt::new(self, check);
        if let Some(decision) = attempt.decide() {
            if decision.allowed() {
                attempt.keep();
            }
            return Ok(decision);
        }
        // All waits together have the time of one call; none, if the store is unresponsive.
        let start = Instant::now();
        let until = start + self.options.deadline;
        let is_unresponsive = self.is_unresponsive(check);
        if !is_unresponsive && let Some(decision) = self.wait_for_leases(&mut attempt, until).await
        {
            if decision.allowed() {
                attempt.keep();
            }
            return Ok(decision);
        }
        let called: Vec<usize> =
            (0..attempt.charges.len()).filter(|&at| attempt.charges[at].needs_store()).collect();
        // A key at its async cap is charged first, so that the store decides about its full usage.
        for &at in called.iter().filter(|_| !is_unresponsive) {
            if self.mode(&check.charges()[at]) == SyncMode::Async {
                let _ = timeout_at(until, self.sync(attempt.charges[at].name)).await;
            }
        }
        let is_late = start.elapsed() > self.options.deadline / 4;
        let is_all = called.len() == check.charges().len();
        let rest = (!is_all).then(|| {
            check.with_charges(called.iter().map(|&at| check.charges()[at].clone()).collect())
        });
        let rest = rest.as_ref().unwrap_or(check);
        let mut answer = if is_unresponsive {
            self.not_called().await
        } else {
            self.call_until(rest, until, is_late).await
        };
        // If the charge fits with what this node holds as a lease, return that and call once more.
        if let Ok(denial) = &answer
            && !denial.allowed()
            && self.return_leases_of_denied(&attempt, &called, denial, until).await
            && let Ok(decision) = self.call_until(rest, until, true).await
        {
            answer = Ok(decision);
        }
        let decision = match answer {
            Ok(decision) => decision,
            Err(missed) => self.fall_back(rest, missed)?,
        };
        if is_all {
            return Ok(decision);
        }
        if decision.allowed() {
            attempt.keep();
        }
        Ok(attempt.join(&called, &decision))
    }

    /// Returns the leases of the denied charges to the store, if they would fit then. Says whether
    /// another call is worth it.
    async fn return_leases_of_denied(
        self: &Arc<Self>,
        attempt: &LocalAttempt<'_>,
        called: &[usize],
        denial: &Decision,
        until: Instant,
    ) -> bool {
        let mut held = Vec::new();
        for (&at, verdict) in
            called.iter().zip(denial.charges()).filter(|(_, verdict)| !verdict.allowed)
        {
            let (charge, name) = (&attempt.check.charges()[at], attempt.charges[at].name);
            let missing = charge.cost.saturating_sub(verdict.remaining).max(1);
            if self.mode(charge) != SyncMode::Lease || !self.holds(name, missing) {
                return false;
            }
            held.push(name);
        }
        for &name in &held {
            if !timeout_at(until, self.return_held(name)).await.unwrap_or(false) {
                return false;
            }
        }
        !held.is_empty()
    }

    /// Waits for units that a background call is taking, and tries to spend them.
    async fn wait_for_leases(
        &self,
        attempt: &mut LocalAttempt<'_>,
        until: Instant,
    ) -> Option<Decision> {
        let mut has_waited = false;
        for at in 0..attempt.charges.len() {
            let (own, charge) = (attempt.charges[at], &attempt.check.charges()[at]);
            let can_be_leased =
                self.mode(charge) == SyncMode::Lease && charge.cost <= self.max_leased(charge);
            if !own.needs_store() || !can_be_leased {
                continue;
            }
            let taken = {
                let shard = self.leases.shard(own.name);
                // Registered under the lock: any answer from here on wakes it.
                shard.get(&own.name).and_then(KeyLease::taking).map(Notify::notified_owned)
            };
            if let Some(taken) = taken {
                let _ = timeout_at(until, taken).await;
                attempt.now = self.clock.now();
                attempt.charges[at].spent = attempt.spend_lease(at);
                has_waited = true;
            }
        }
        if has_waited { attempt.allowed_here() } else { None }
    }

    /// Decides any other operation that takes or reads something: one call to the store.
    pub(super) async fn forward(
        self: &Arc<Self>,
        check: &Check<'_>,
    ) -> Result<Decision, StoreError> {
        self.start_background();
        let answer = if self.is_unresponsive(check) {
            self.not_called().await
        } else {
            self.call(check).await
        };
        match answer {
            Ok(decision) => Ok(decision),
            Err(missed) => self.fall_back(check, missed),
        }
    }

    /// Does an operation that gives back or resets, here and in the store. It removes cached
    /// denials of its keys. Only the store can confirm it, so there is no fallback.
    pub(super) async fn give_back(
        self: &Arc<Self>,
        check: &Check<'_>,
    ) -> Result<Decision, StoreError> {
        self.start_background();
        let mut rest = check.charges().to_vec();
        for charge in &mut rest {
            let name = self.fingerprints.of(charge);
            self.last_answers.with(name, LastAnswer::forget_denials);
            match check.op() {
                Op::Reset => {
                    self.last_answers.forget(name);
                    let lease = self.leases.shard(name).remove(&name);
                    if let Some(lease) = lease {
                        // The store forgets their charge with the rest.
                        add(&self.counters.lease_units_returned, lease.held());
                    }
                    if let Some(key) = self.unsynced.shard(name).get_mut(&name) {
                        key.reset();
                    }
                }
                Op::Refund if check.id().is_none() => {
                    if let Some(key) = self.unsynced.shard(name).get_mut(&name) {
                        charge.cost -= key.unspend(charge.cost);
                    }
                }
                _ => {}
            }
        }
        self.share.give_back(check, self.nodes.number());
        let result = self.call(&check.with_charges(rest)).await;
        // Denials that arrived during the call were decided before it.
        check.charges().iter().for_each(|charge| {
            _ = self.last_answers.with(self.fingerprints.of(charge), LastAnswer::forget_denials)
        });
        result.map_err(|missed| match missed {
            NoDecision::Failed(error) => error,
            NoDecision::NotCalled => StoreError::Unavailable(self.why_not_called().into()),
            NoDecision::Overloaded => {
                StoreError::Unavailable("too many calls are waiting for it".into())
            }
        })
    }

    /// Decides a check by the share of this node.
    pub(super) fn fall_back(
        &self,
        check: &Check<'_>,
        missed: NoDecision,
    ) -> Result<Decision, StoreError> {
        if let NoDecision::Failed(error @ StoreError::Invalid(_)) = missed {
            return Err(error);
        }
        let now = self.share.now();
        let left = |charge: &Charge<'_>| {
            let limit = self.fingerprints.limit(&charge.limit);
            let known = |last: &mut LastAnswer| {
                (last.limit == limit).then(|| last.left(&charge.limit, now))
            };
            self.last_answers.with(self.fingerprints.of(charge), known).flatten()
        };
        let policy = |charge: &Charge<'_>| self.on_failure_of(charge);
        let decision = self.share.decide(check, self.nodes.number(), policy, left)?;
        if decision.allowed() {
            one(&self.counters.fallback_allowed);
            let is_uncharged =
                |charge: &Charge<'_>| charge.cost > 0 && policy(charge) == OnFailure::Open;
            if !matches!(check.op(), Op::Peek) && check.charges().iter().any(is_uncharged) {
                one(&self.counters.fail_open);
            }
        } else {
            one(&self.counters.fallback_denied);
        }
        Ok(decision)
    }
}
