//! How an outage of the store begins, and how it is reported.
//!
//! A call without an answer counts as a miss; several misses open the breaker. A refusal that
//! waiting cannot fix opens it immediately. An error that may concern one call only is followed by
//! a charge on a key of this layer: if the store answers that with an error, too, it refuses. While
//! a part of the store has an outage, one task [probes](super::probe) it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::{Op, Timestamp};

use super::breaker::BreakerChange;
use super::layer::ResilienceLayer;
use super::probe::{RefusalTest, UnresponsiveProbe};
use super::state::{OutageChange, StoreState, StoreStatus};
use super::stats::one;
use crate::events::{self, StoreOutage};
use crate::store::Check;

impl ResilienceLayer {
    /// The state of the store, and how limits are enforced without it.
    pub(super) fn status(&self) -> StoreStatus {
        let (nodes, nodes_from) = self.nodes.known();
        StoreStatus::new(self.outages.lock().state(), nodes, nodes_from, self.options.on_failure)
    }

    /// The state of a store without an answer within the deadline.
    pub(super) fn unresponsive(&self) -> StoreState {
        let why = format!("no answer within {:?}", self.options.deadline);
        StoreState::Unreachable { why: why.into(), advice: "" }
    }

    /// Why the store is not called now.
    pub(super) fn why_not_called(&self) -> String {
        match self.outages.lock().state() {
            StoreState::Healthy => "it has not answered lately and is not called for now".into(),
            state => format!("{}, and is not called for now", state.why()),
        }
    }

    /// Records a call without an answer; `state` is that of the store if the breaker opens.
    pub(super) fn missed(
        self: &Arc<Self>,
        check: &Check<'_>,
        parts: u64,
        state: StoreState,
        sent: Timestamp,
        now: Timestamp,
    ) {
        let peek = || check.clone().into_owned().into_op(Op::Peek).without_id();
        for part in self.parts(parts) {
            let (change, is_unresponsive) = {
                let mut breaker = self.breakers[part].lock();
                (breaker.missed(sent, now), breaker.becomes_unresponsive(sent))
            };
            if change == Some(BreakerChange::Opened) {
                self.opened(part, state.clone(), peek());
            } else if is_unresponsive {
                self.unresponsive_parts.fetch_add(1, Ordering::Relaxed);
                let probe = UnresponsiveProbe { layer: Arc::clone(self), part };
                tokio::spawn(probe.run(peek()));
            }
        }
    }

    /// Records an error that may concern one call only, and tests whether the store refuses.
    pub(super) fn suspect(self: &Arc<Self>, parts: u64) {
        for part in self.parts(parts) {
            let before = self.suspected_parts.fetch_or(1 << part, Ordering::Relaxed);
            if before >> part & 1 == 0 {
                tokio::spawn(RefusalTest { layer: Arc::clone(self), part }.run());
            }
        }
    }

    /// Records a refusal. If waiting cannot fix it, the breaker opens, so that no other call has to
    /// wait for the same answer.
    pub(super) fn refused(
        self: &Arc<Self>,
        parts: u64,
        why: Arc<str>,
        advice: &'static str,
        is_permanent: bool,
        now: Timestamp,
    ) {
        for part in self.parts(parts) {
            if is_permanent && self.breakers[part].lock().open(now).is_some() {
                self.count_breaker_change(BreakerChange::Opened);
            }
            let state = StoreState::Refused { why: Arc::clone(&why), advice, is_permanent };
            self.set_outage(part, state, None);
        }
    }

    /// Records that the breaker of a part opened; `peek` reads a key that the part decides about.
    pub(super) fn opened(self: &Arc<Self>, part: usize, state: StoreState, peek: Check<'static>) {
        self.count_breaker_change(BreakerChange::Opened);
        self.set_outage(part, state, Some(peek));
    }

    /// Begins the outage of a part, or changes its state.
    pub(super) fn set_outage(
        self: &Arc<Self>,
        part: usize,
        state: StoreState,
        peek: Option<Check<'static>>,
    ) {
        let OutageChange { begins, changes_store } = self.outages.lock().set(part, state);
        if changes_store {
            self.report_state();
        }
        if begins {
            let layer = Arc::clone(self);
            tokio::spawn(async move { layer.probe(part, peek).await });
        }
    }

    /// Ends the outage of a part, unless its breaker is open. Returns whether the state of the
    /// store changes.
    pub(super) fn end_outage(&self, part: usize) -> Option<bool> {
        // A call that opens the breaker meanwhile sets its outage after this: either it is still
        // there, or a new one begins.
        let mut outages = self.outages.lock();
        (!self.breakers[part].lock().is_open()).then(|| outages.end(part))
    }

    pub(super) fn count_breaker_change(&self, change: BreakerChange) {
        match change {
            BreakerChange::Opened => {
                one(&self.counters.opened);
                self.open_breakers.fetch_add(1, Ordering::Relaxed);
            }
            BreakerChange::Closed => {
                one(&self.counters.closed);
                self.concurrency_limit.lock().restart();
                self.open_breakers.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Reports that the state of the store has changed.
    pub(super) fn report_state(&self) {
        let status = self.status();
        let outage = StoreOutage {
            why: status.state.why(),
            advice: status.state.advice(),
            nodes: status.nodes,
            nodes_from: status.nodes_from.name(),
            enforced: &status.enforced(),
        };
        match status.state {
            StoreState::Healthy => events::store_decides(),
            StoreState::Unreachable { .. } => events::store_unreachable(&outage),
            StoreState::Refused { .. } => events::store_refuses(&outage),
        }
        if let Some(report) = self.on_state.get() {
            report(&status);
        }
    }
}
