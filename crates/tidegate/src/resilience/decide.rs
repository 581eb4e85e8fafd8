//! Asking the store, with a deadline; and deciding without it when there is no answer.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::{Algorithm, Decision, Op, Timestamp};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::last_answer::LastAnswer;
use super::lease::Lease;
use super::outage::{Heard, heard};
use super::stats::{add, next, one};
use super::{Asking, Done, Inner, OnFailure, SyncMode, async_sync, lease};
use crate::events;
use crate::resilience::fingerprint::Fingerprint;
use crate::store::{Charge, Check, StoreError};
use tidegate_bounded::in_time;

/// Why there is no answer.
pub(super) enum Missed {
    /// It was not asked: nobody expects an answer.
    NotAsked,
    /// It was not asked: too many are under way.
    Overload,
    /// It had none.
    Failed(StoreError),
}

/// A call that is under way.
struct InFlight<'a>(&'a Inner);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.concurrency_limit.lock().end();
    }
}

/// A check of one charge that is under way: until it is answered, others count on less being left.
struct Sending<'a> {
    inner: &'a Inner,
    mark: Option<(Fingerprint, u64)>,
}

impl<'a> Sending<'a> {
    fn of(inner: &'a Inner, check: &Check<'_>) -> Self {
        let mark = match check.charges() {
            [charge] if check.op() == Op::Check && check.id().is_none() => {
                let (name, limit) = (inner.names.of(charge), inner.names.limit(&charge.limit));
                let sends =
                    |seen: &mut LastAnswer| (seen.limit == limit).then(|| seen.sends(charge.cost));
                inner.seen.with(name, sends).flatten().map(|mark| (name, mark))
            }
            _ => None,
        };
        Sending { inner, mark }
    }

    /// Waits for the answer. Once it was polled it is in the store's queue: whatever is sent from
    /// then on is done after it, and only that. Between [`of`](Sending::of) and here others may
    /// have overtaken it, so they count as done before it.
    async fn until<F: Future>(&mut self, answer: F) -> F::Output {
        let (mut answer, mut first) = (pin!(answer), true);
        poll_fn(|context| {
            let polled = answer.as_mut().poll(context);
            if std::mem::take(&mut first)
                && let Some((name, mark)) = &mut self.mark
            {
                *mark = self
                    .inner
                    .seen
                    .with(*name, |seen| seen.sent_so_far())
                    .map_or(*mark, |sent| sent.max(*mark));
            }
            polled
        })
        .await
    }

    fn answered(&mut self) -> Option<u64> {
        self.mark.take().map(|(_, mark)| mark)
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        if let Some((name, _)) = self.mark {
            self.inner.seen.with(name, LastAnswer::lost);
        }
    }
}

impl Inner {
    /// A check without an id: as near as its terms allow.
    pub(super) async fn check(self: &Arc<Self>, check: &Check<'_>) -> Result<Decision, StoreError> {
        self.keep();
        let mut asking = Asking::new(self, check);
        if let Some(decision) = asking.here() {
            if decision.allowed() {
                asking.keep();
            }
            return Ok(decision);
        }
        // Whatever it waits for, one after the other, it has no more time than one call; and none
        // if nobody is heard.
        let begun = Instant::now();
        let until = begun + self.settings.deadline;
        let silent = self.is_silent(check);
        if !silent && let Some(decision) = self.wait_for_leases(&mut asking, until).await {
            if decision.allowed() {
                asking.keep();
            }
            return Ok(decision);
        }
        let asked: Vec<usize> = (0..asking.parts.len())
            .filter(|&at| matches!(asking.parts[at].done, Done::No))
            .collect();
        // A node that has let pass as much as it may charges that first; then the store knows what
        // it judges.
        for &at in asked.iter().filter(|_| !silent) {
            if self.how(&check.charges()[at]) == SyncMode::Async {
                let _ = timeout_at(until, self.sync(asking.parts[at].name)).await;
            }
        }
        let waited = begun.elapsed() > self.settings.deadline / 4;
        let all = asked.len() == check.charges().len();
        let rest = (!all).then(|| {
            check.with_charges(asked.iter().map(|&at| check.charges()[at].clone()).collect())
        });
        let rest = rest.as_ref().unwrap_or(check);
        let mut answer =
            if silent { self.not_asked().await } else { self.ask_until(rest, until, waited).await };
        // More than is held, and more than is left without that: then it is given back first. If
        // that comes to nothing, it is denied.
        if let Ok(denial) = &answer
            && !denial.allowed()
            && self.give_way(&asking, &asked, denial, until).await
            && let Ok(decision) = self.ask_until(rest, until, true).await
        {
            answer = Ok(decision);
        }
        let decision = match answer {
            Ok(decision) => decision,
            Err(missed) => self.alone(rest, missed)?,
        };
        if all {
            return Ok(decision);
        }
        if decision.allowed() {
            asking.keep();
        }
        Ok(asking.with(&asked, &decision))
    }

    /// Gives back what is held of the charges that are denied, if they would fit then. Says whether
    /// it is worth asking again.
    async fn give_way(
        self: &Arc<Self>,
        asking: &Asking<'_>,
        asked: &[usize],
        denial: &Decision,
        until: Instant,
    ) -> bool {
        let mut held = Vec::new();
        for (&at, verdict) in
            asked.iter().zip(denial.charges()).filter(|(_, verdict)| !verdict.allowed)
        {
            let (charge, name) = (&asking.check.charges()[at], asking.parts[at].name);
            let missing = charge.cost.saturating_sub(verdict.remaining).max(1);
            if self.how(charge) != SyncMode::Lease || !self.holds(name, missing) {
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

    /// Waits for units that are on their way, and tries again.
    async fn wait_for_leases(&self, asking: &mut Asking<'_>, until: Instant) -> Option<Decision> {
        let mut waited = false;
        for at in 0..asking.parts.len() {
            let (part, charge) = (asking.parts[at], &asking.check.charges()[at]);
            let may_be_lent =
                self.how(charge) == SyncMode::Lease && charge.cost <= self.most_lent(charge);
            if !matches!(part.done, Done::No) || !may_be_lent {
                continue;
            }
            let news = {
                let shard = self.leases.shard(part.name);
                // Made under the lock: whatever is heard from here on wakes it.
                shard.get(&part.name).and_then(Lease::news).map(Notify::notified_owned)
            };
            if let Some(news) = news {
                let _ = timeout_at(until, news).await;
                asking.now = self.clock.now();
                asking.parts[at].done = asking.lease(at);
                waited = true;
            }
        }
        if waited { asking.all_here() } else { None }
    }

    /// Whatever else takes something, or looks.
    pub(super) async fn through(
        self: &Arc<Self>,
        check: &Check<'_>,
    ) -> Result<Decision, StoreError> {
        self.keep();
        let answer =
            if self.is_silent(check) { self.not_asked().await } else { self.ask(check).await };
        match answer {
            Ok(decision) => Ok(decision),
            Err(missed) => self.alone(check, missed),
        }
    }

    /// Whether nobody should wait for an answer to this.
    fn is_silent(&self, check: &Check<'_>) -> bool {
        self.silent.load(Ordering::Relaxed) > 0
            && self
                .lanes(self.store.parts(check))
                .any(|lane| self.breakers[lane].lock().is_silent())
    }

    async fn not_asked(&self) -> Result<Decision, Missed> {
        one(&self.counts.not_asked);
        // Whoever asks again and again without a pause leaves room for those who listen.
        tokio::task::consume_budget().await;
        Err(Missed::NotAsked)
    }

    /// Whatever gives back or forgets. It is done here as well, and no denial of these keys is
    /// certain any more; but only the store can say that it is done.
    pub(super) async fn give_back(
        self: &Arc<Self>,
        check: &Check<'_>,
    ) -> Result<Decision, StoreError> {
        self.keep();
        let mut rest = check.charges().to_vec();
        for charge in &mut rest {
            let name = self.names.of(charge);
            self.seen.with(name, LastAnswer::forget_denials);
            match check.op() {
                Op::Reset => {
                    self.seen.forget(name);
                    let lease = self.leases.shard(name).remove(&name);
                    if let Some(lease) = lease {
                        add(&self.counts.lease_units_returned, lease.held()); // forgotten there, worth nothing here
                    }
                    if let Some(own) = self.unsynced.shard(name).get_mut(&name) {
                        own.reset();
                    }
                }
                Op::Refund if check.id().is_none() => {
                    if let Some(own) = self.unsynced.shard(name).get_mut(&name) {
                        charge.cost -= own.unspend(charge.cost);
                    }
                }
                _ => {}
            }
        }
        self.share.give_back(check, self.nodes.number());
        let result = self.ask(&check.with_charges(rest)).await;
        // Whoever was denied in between was denied before it was given back.
        check.charges().iter().for_each(|charge| {
            _ = self.seen.with(self.names.of(charge), LastAnswer::forget_denials)
        });
        result.map_err(|missed| match missed {
            Missed::Failed(error) => error,
            Missed::NotAsked => StoreError::Unavailable(self.not_asked_because().into()),
            Missed::Overload => StoreError::Unavailable("too many calls are waiting for it".into()),
        })
    }

    /// One call to the store.
    pub(super) async fn ask(self: &Arc<Self>, check: &Check<'_>) -> Result<Decision, Missed> {
        self.ask_until(check, Instant::now() + self.settings.deadline, false).await
    }

    /// One call to the store of which the answer is `late` already: it has less time than others,
    /// and says nothing about the store if that is too little.
    async fn ask_until(
        self: &Arc<Self>,
        check: &Check<'_>,
        until: Instant,
        late: bool,
    ) -> Result<Decision, Missed> {
        let parts = self.store.parts(check);
        if self.open.load(Ordering::Relaxed) > 0
            && self.lanes(parts).any(|lane| self.breakers[lane].lock().is_open())
        {
            return self.not_asked().await;
        }
        let too_late = || StoreError::Unavailable(self.too_late().why().into());
        if late && Instant::now() >= until {
            return Err(Missed::Failed(too_late())); // what would be sent now would be charged for nobody
        }
        if !self.concurrency_limit.lock().begin() {
            events::overloaded(next(&self.counts.overloads));
            return Err(Missed::Overload);
        }
        let in_flight = InFlight(self);
        one(&self.counts.calls);
        let mut sending = Sending::of(self, check);
        let sent = self.clock.now();
        let answer = sending.until(in_time(until, self.store.decide(check))).await;
        let now = self.clock.now();
        match answer {
            Some(Ok(decision)) => {
                self.concurrency_limit.lock().answered();
                drop(in_flight);
                self.lanes(parts).for_each(|lane| self.breakers[lane].lock().answered(now));
                self.saw(check, &decision, sent, now, sending.answered());
                Ok(decision)
            }
            Some(Err(error @ StoreError::Invalid(_))) => Err(Missed::Failed(error)),
            Some(Err(error)) => {
                match heard(&error) {
                    Heard::Answer => self.came_to_nothing(&error),
                    Heard::Error(_) => {
                        self.came_to_nothing(&error);
                        drop(in_flight);
                        self.doubt(parts);
                    }
                    Heard::Refusal { reason, is_permanent } => {
                        one(&self.counts.misses);
                        drop(in_flight);
                        self.refused(parts, reason, is_permanent, now);
                    }
                    Heard::Silence { reason, .. } => {
                        self.came_to_nothing(&error);
                        self.concurrency_limit.lock().missed(sent, now);
                        drop(in_flight);
                        self.missed(check, parts, &reason, sent, now);
                    }
                }
                Err(Missed::Failed(error))
            }
            None => {
                let error = too_late();
                self.came_to_nothing(&error);
                if !late {
                    self.concurrency_limit.lock().missed(sent, now);
                    drop(in_flight);
                    self.missed(check, parts, &self.too_late(), sent, now);
                }
                Err(Missed::Failed(error))
            }
        }
    }

    fn came_to_nothing(&self, error: &StoreError) {
        events::missed(next(&self.counts.misses), error);
        if let Some(tell) = self.on_miss.get() {
            tell(error);
        }
    }

    /// Remembers what the store said.
    fn saw(
        &self,
        check: &Check<'_>,
        decision: &Decision,
        sent: Timestamp,
        now: Timestamp,
        mark: Option<u64>,
    ) {
        if check.charges().len() != decision.charges().len() {
            return;
        }
        for (charge, verdict) in check.charges().iter().zip(decision.charges()) {
            if let Algorithm::Concurrent(_) = charge.limit.algorithm() {
                continue; // what others release nobody hears of
            }
            let name = self.names.of(charge);
            let mut seen =
                LastAnswer::new(self.names.limit(&charge.limit), verdict, decision.at(), sent, now);
            // Of a check that another charge denied, this one says nothing about denials.
            let denied = match check.op() {
                Op::Check if !verdict.allowed => Some(charge.cost),
                Op::Take if !verdict.allowed => Some(1),
                _ => None,
            };
            let longest_us = self.settings.longest_denial_us;
            let mut fresh = seen;
            if let Some(cost) = denied {
                fresh.deny(cost, verdict.retry, longest_us);
            }
            self.seen.update(
                name,
                fresh,
                |known| {
                    if seen.is_older_than(known) {
                        return known.includes(mark);
                    }
                    seen.keep(known, mark, verdict.granted > 0);
                    if let Some(cost) = denied {
                        seen.deny(cost, verdict.retry, longest_us);
                    }
                    *known = seen;
                },
                |known| known.sent.as_micros(),
            );
            if charge.policy.sync == SyncMode::Async
                && let Some(own) = self.unsynced.shard(name).get_mut(&name)
            {
                own.saw(fresh);
            }
        }
    }

    /// Decides without the store.
    pub(super) fn alone(&self, check: &Check<'_>, missed: Missed) -> Result<Decision, StoreError> {
        if let Missed::Failed(error @ StoreError::Invalid(_)) = missed {
            return Err(error);
        }
        let now = self.share.now();
        let policy =
            |charge: &Charge<'_>| charge.policy.on_failure.unwrap_or(self.settings.on_failure);
        let left = |charge: &Charge<'_>| {
            let limit = self.names.limit(&charge.limit);
            let known = |seen: &mut LastAnswer| {
                (seen.limit == limit).then(|| seen.left(&charge.limit, now))
            };
            self.seen.with(self.names.of(charge), known).flatten()
        };
        let decision = self.share.decide(check, self.nodes.number(), policy, left)?;
        if decision.allowed() {
            one(&self.counts.fallback_allowed);
            let takes = !matches!(check.op(), Op::Peek);
            let uncharged =
                |charge: &Charge<'_>| charge.cost > 0 && policy(charge) == OnFailure::Open;
            if takes && check.charges().iter().any(uncharged) {
                one(&self.counts.fail_open);
            }
        } else {
            one(&self.counts.fallback_denied);
        }
        Ok(decision)
    }

    /// How near a charge is really decided: not everything can be.
    pub(super) fn how(&self, charge: &Charge<'_>) -> SyncMode {
        match charge.policy.sync {
            SyncMode::Direct => SyncMode::Direct,
            resilient if lease::lends(&charge.limit) => resilient,
            _ => SyncMode::Direct,
        }
    }

    /// How many units of a charge this node may hold.
    pub(super) fn most_lent(&self, charge: &Charge<'_>) -> u64 {
        lease::most(&charge.limit, self.settings.lease_error_per_mille, self.nodes.taking_ahead())
    }

    pub(super) fn cap(&self, charge: &Charge<'_>) -> u64 {
        let standard = || {
            async_sync::cap(
                &charge.limit,
                self.settings.async_error_per_mille,
                self.nodes.taking_ahead(),
            )
        };
        self.settings.async_cap.unwrap_or_else(standard).min(charge.limit.capacity())
    }

    /// Whether so much of a lease is held.
    pub(super) fn holds(&self, name: Fingerprint, cost: u64) -> bool {
        self.leases.shard(name).get(&name).is_some_and(|lease| lease.held() >= cost)
    }

    pub(super) fn unspend_lease(&self, name: Fingerprint, cost: u64, until: Timestamp) {
        let now = self.clock.now();
        let counted = self
            .leases
            .shard(name)
            .get_mut(&name)
            .is_some_and(|lease: &mut Lease| lease.unspend(cost, until, now));
        self.counts.lease_units_spent.fetch_sub(cost, Ordering::Relaxed);
        if !counted {
            add(&self.counts.lease_units_expired, cost);
        }
    }
}
