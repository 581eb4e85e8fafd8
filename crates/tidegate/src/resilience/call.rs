//! One call to the store: when it is made, what its outcome means, and what is remembered of it.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::{Algorithm, Decision, Op, Timestamp};
use tokio::time::Instant;

use super::SyncMode;
use super::fingerprint::Fingerprint;
use super::last_answer::LastAnswer;
use super::layer::{MAX_PARTS, ResilienceLayer};
use super::state::StoreState;
use super::stats::{next, one};
use crate::events;
use crate::store::{Check, Diagnosis, StoreError};
use tidegate_bounded::in_time;

/// Why the store did not decide.
pub(super) enum NoDecision {
    /// The call was not made: no answer is expected.
    NotCalled,
    /// The call was not made: too many are in flight.
    Overloaded,
    /// The call failed.
    Failed(StoreError),
}

/// A call in flight, counted until it is dropped.
struct InFlight<'a>(&'a ResilienceLayer);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.concurrency_limit.lock().end();
    }
}

/// A check of one charge in flight: until its answer comes, other checks assume that it is charged.
struct InFlightCharge<'a> {
    layer: &'a ResilienceLayer,
    /// The name of the charge, and the [mark](LastAnswer::sends) of this call.
    mark: Option<(Fingerprint, u64)>,
}

impl<'a> InFlightCharge<'a> {
    fn new(layer: &'a ResilienceLayer, check: &Check<'_>) -> Self {
        let mark = match check.charges() {
            [charge] if check.op() == Op::Check && check.id().is_none() => {
                let name = layer.fingerprints.of(charge);
                let limit = layer.fingerprints.limit(&charge.limit);
                let sends =
                    |last: &mut LastAnswer| (last.limit == limit).then(|| last.sends(charge.cost));
                layer.last_answers.with(name, sends).flatten().map(|mark| (name, mark))
            }
            _ => None,
        };
        InFlightCharge { layer, mark }
    }

    /// Waits for the answer.
    ///
    /// After its first poll the call is in the store's queue, and only what is sent later is
    /// decided later. Calls that were sent between [`new`](InFlightCharge::new) and that poll may
    /// be ahead of it, so they count as decided before it.
    async fn wait<F: Future>(&mut self, answer: F) -> F::Output {
        let (mut answer, mut is_first) = (pin!(answer), true);
        poll_fn(|context| {
            let polled = answer.as_mut().poll(context);
            if std::mem::take(&mut is_first)
                && let Some((name, mark)) = &mut self.mark
            {
                *mark = self
                    .layer
                    .last_answers
                    .with(*name, |last| last.sent_so_far())
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

/// Without an answer its outcome is unknown.
impl Drop for InFlightCharge<'_> {
    fn drop(&mut self) {
        if let Some((name, _)) = self.mark {
            self.layer.last_answers.with(name, LastAnswer::lost);
        }
    }
}

impl ResilienceLayer {
    /// Calls the store once, with the deadline.
    pub(super) async fn call(self: &Arc<Self>, check: &Check<'_>) -> Result<Decision, NoDecision> {
        self.call_until(check, Instant::now() + self.options.deadline, false).await
    }

    /// Calls the store once. A call that `is_late` has less time than others; that it has no answer
    /// in time says nothing about the store.
    pub(super) async fn call_until(
        self: &Arc<Self>,
        check: &Check<'_>,
        until: Instant,
        is_late: bool,
    ) -> Result<Decision, NoDecision> {
        let parts = self.store.parts(check);
        if self.open_breakers.load(Ordering::Relaxed) > 0
            && self.parts(parts).any(|part| self.breakers[part].lock().is_open())
        {
            return self.not_called().await;
        }
        if is_late && Instant::now() >= until {
            // A call without time for its answer would only charge the client.
            return Err(NoDecision::Failed(self.no_answer_in_time()));
        }
        if !self.concurrency_limit.lock().begin() {
            events::overloaded(next(&self.counters.overloads));
            return Err(NoDecision::Overloaded);
        }
        let in_flight = InFlight(self);
        one(&self.counters.calls);
        let mut charge = InFlightCharge::new(self, check);
        let sent = self.clock.now();
        let answer = charge.wait(in_time(until, self.store.decide(check))).await;
        let now = self.clock.now();
        let error = match answer {
            Some(Ok(decision)) => {
                self.concurrency_limit.lock().answered();
                drop(in_flight);
                self.parts(parts).for_each(|part| self.breakers[part].lock().answered(now));
                self.record_answer(check, &decision, sent, now, charge.answered());
                return Ok(decision);
            }
            Some(Err(error)) => error,
            None => {
                let error = self.no_answer_in_time();
                self.report_miss(&error);
                if !is_late {
                    self.concurrency_limit.lock().missed(sent, now);
                    drop(in_flight);
                    self.missed(check, parts, self.unresponsive(), sent, now);
                }
                return Err(NoDecision::Failed(error));
            }
        };
        if matches!(error, StoreError::Invalid(_)) {
            return Err(NoDecision::Failed(error));
        }
        match self.store.diagnose(&error) {
            Diagnosis::Healthy => self.report_miss(&error),
            Diagnosis::CallFailed { .. } => {
                self.report_miss(&error);
                drop(in_flight);
                self.suspect(parts);
            }
            Diagnosis::Refused { why, advice, is_permanent } => {
                one(&self.counters.misses);
                drop(in_flight);
                self.refused(parts, why, advice, is_permanent, now);
            }
            Diagnosis::Unresponsive { why, advice, .. } => {
                self.report_miss(&error);
                self.concurrency_limit.lock().missed(sent, now);
                drop(in_flight);
                self.missed(check, parts, StoreState::Unreachable { why, advice }, sent, now);
            }
        }
        Err(NoDecision::Failed(error))
    }

    /// Counts a call that is not made.
    pub(super) async fn not_called(&self) -> Result<Decision, NoDecision> {
        one(&self.counters.not_called);
        // A caller that retries without a pause must not starve the tasks that read answers.
        tokio::task::consume_budget().await;
        Err(NoDecision::NotCalled)
    }

    /// Whether a part of the store that would decide `check` has not answered lately, so that no
    /// check should wait for it.
    pub(super) fn is_unresponsive(&self, check: &Check<'_>) -> bool {
        self.unresponsive_parts.load(Ordering::Relaxed) > 0
            && self
                .parts(self.store.parts(check))
                .any(|part| self.breakers[part].lock().is_unresponsive())
    }

    /// The positions of the bits in `parts`.
    pub(super) fn parts(&self, parts: u64) -> impl Iterator<Item = usize> + use<> {
        (0..MAX_PARTS).filter(move |part| parts >> part & 1 == 1)
    }

    fn no_answer_in_time(&self) -> StoreError {
        StoreError::Unavailable(self.unresponsive().why().into())
    }

    fn report_miss(&self, error: &StoreError) {
        events::missed(next(&self.counters.misses), error);
        if let Some(report) = self.on_miss.get() {
            report(error);
        }
    }

    /// Remembers an answer. `mark` is that of the charge, if it was [in flight](InFlightCharge).
    fn record_answer(
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
                continue; // other nodes release leases without this node knowing
            }
            let name = self.fingerprints.of(charge);
            let limit = self.fingerprints.limit(&charge.limit);
            let mut answer = LastAnswer::new(limit, verdict, decision.at(), sent, now);
            // A check that another charge denied says nothing about denials of this one.
            let denied_cost = match check.op() {
                Op::Check if !verdict.allowed => Some(charge.cost),
                Op::Take if !verdict.allowed => Some(1),
                _ => None,
            };
            let longest_us = self.options.longest_denial_us;
            let mut fresh = answer;
            if let Some(cost) = denied_cost {
                fresh.deny(cost, verdict.retry, longest_us);
            }
            self.last_answers.update(
                name,
                fresh,
                |known| {
                    if answer.is_older_than(known) {
                        return known.includes(mark);
                    }
                    answer.keep(known, mark, verdict.granted > 0);
                    if let Some(cost) = denied_cost {
                        answer.deny(cost, verdict.retry, longest_us);
                    }
                    *known = answer;
                },
                |known| known.sent.as_micros(),
            );
            if charge.policy.sync == SyncMode::Async
                && let Some(key) = self.unsynced.shard(name).get_mut(&name)
            {
                key.record(fresh);
            }
        }
    }
}
