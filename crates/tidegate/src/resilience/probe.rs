//! The calls that find out whether the store decides again. They run in the background.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::{Limit, Op, Period};
use tokio::time::Instant;

use super::Policy;
use super::breaker::BreakerChange;
use super::layer::ResilienceLayer;
use super::state::{StoreState, StoreStatus};
use crate::store::{Charge, Check, Diagnosis, Scope, Subject};
use tidegate_bounded::in_time;

/// A scope that no rule can have: the names of rules have no spaces.
const SCOPE: &str = "tidegate probe";
/// How many keys are tried to find one that a certain part of the store decides about.
const MAX_TRIES: u32 = 4096;
/// The pause between two calls of a probe that fail immediately; less, if the deadline is shorter.
const MIN_PAUSE: Duration = Duration::from_millis(15);
/// How many probes must fail at the start before the store counts as unreachable.
const FIRST_PROBES: usize = 3;

/// A task that calls an unresponsive part of the store until it answers or its breaker opens.
pub(super) struct UnresponsiveProbe {
    pub(super) layer: Arc<ResilienceLayer>,
    pub(super) part: usize,
}

impl UnresponsiveProbe {
    pub(super) async fn run(self, check: Check<'static>) {
        let UnresponsiveProbe { layer, part } = &self;
        while Arc::strong_count(layer) > 1 {
            let (start, sent) = (Instant::now(), layer.clock.now());
            let diagnosis = layer.test(&check).await;
            let now = layer.clock.now();
            if !matches!(diagnosis, Diagnosis::Unresponsive { .. }) {
                layer.breakers[*part].lock().answered(now);
            }
            let (why, advice) = match diagnosis {
                Diagnosis::Unresponsive { why, advice, .. } => (why, advice),
                Diagnosis::Healthy => return,
                Diagnosis::CallFailed { .. } => return layer.suspect(1 << part),
                Diagnosis::Refused { why, advice, is_permanent } => {
                    return layer.refused(1 << part, why, advice, is_permanent, now);
                }
            };
            let change = {
                let mut breaker = layer.breakers[*part].lock();
                if !breaker.is_unresponsive() {
                    return; // another call was answered, or the breaker is open
                }
                breaker.missed(sent, now)
            };
            if change == Some(BreakerChange::Opened) {
                return layer.opened(*part, StoreState::Unreachable { why, advice }, check);
            }
            // A call may fail immediately.
            tokio::time::sleep_until(start + layer.options.deadline.min(MIN_PAUSE)).await;
        }
    }
}

impl Drop for UnresponsiveProbe {
    fn drop(&mut self) {
        self.layer.breakers[self.part].lock().not_unresponsive();
        self.layer.unresponsive_parts.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A task that finds out whether an error reply concerned one call only.
pub(super) struct RefusalTest {
    pub(super) layer: Arc<ResilienceLayer>,
    pub(super) part: usize,
}

impl RefusalTest {
    pub(super) async fn run(self) {
        let RefusalTest { layer, part } = &self;
        let start = Instant::now();
        if let Diagnosis::Refused { why, advice, is_permanent } =
            layer.test_own(&layer.charge_for(*part)).await
        {
            layer.refused(1 << part, why, advice, is_permanent, layer.clock.now());
        }
        // One test for all errors that arrive meanwhile.
        tokio::time::sleep_until(start + layer.options.deadline.max(MIN_PAUSE)).await;
    }
}

impl Drop for RefusalTest {
    fn drop(&mut self) {
        self.layer.suspected_parts.fetch_and(!(1 << self.part), Ordering::Relaxed);
    }
}

impl ResilienceLayer {
    /// Makes one call and says what it means.
    async fn test(&self, check: &Check<'_>) -> Diagnosis {
        match in_time(Instant::now() + self.options.deadline, self.store.decide(check)).await {
            Some(Ok(_)) => Diagnosis::Healthy,
            Some(Err(error)) => self.store.diagnose(&error),
            None => Diagnosis::Unresponsive {
                why: self.unresponsive().why().into(),
                advice: "",
                is_disconnected: false,
            },
        }
    }

    /// The same with a charge on a key of this layer. An error cannot concern that key, so it is a
    /// refusal.
    async fn test_own(&self, charge: &Check<'_>) -> Diagnosis {
        match self.test(charge).await {
            Diagnosis::CallFailed { why, advice } => {
                Diagnosis::Refused { why, advice, is_permanent: false }
            }
            diagnosis => diagnosis,
        }
    }

    /// Probes a part of the store from time to time until its outage ends.
    pub(super) async fn probe(self: &Arc<Self>, part: usize, mut peek: Option<Check<'static>>) {
        let charge = self.charge_for(part);
        loop {
            let pause_us = self.breakers[part].lock().pause_us(self.random.number());
            tokio::time::sleep(Duration::from_micros(pause_us)).await;
            // A server that takes no writes may still answer reads.
            let is_refused = self.outages.lock().is_refused(part);
            let diagnosis = match &peek {
                Some(peek) if !is_refused => self.test(peek).await,
                _ => self.test_own(&charge).await,
            };
            let is_healthy = diagnosis == Diagnosis::Healthy;
            let change = self.breakers[part].lock().probed(is_healthy, self.clock.now());
            if change == Some(BreakerChange::Closed) {
                self.count_breaker_change(BreakerChange::Closed);
            }
            match diagnosis {
                Diagnosis::Healthy => match self.end_outage(part) {
                    Some(true) => return self.report_state(),
                    Some(false) => return,
                    None => {}
                },
                // It answers, but not this read: the next probe is a charge.
                Diagnosis::CallFailed { .. } => peek = None,
                Diagnosis::Refused { why, advice, is_permanent } => {
                    self.set_outage(part, StoreState::Refused { why, advice, is_permanent }, None);
                }
                // While the connection is established again, calls have no answer: that does not
                // end the refusal.
                Diagnosis::Unresponsive { is_disconnected: false, .. } if is_refused => {}
                Diagnosis::Unresponsive { why, advice, .. } => {
                    self.set_outage(part, StoreState::Unreachable { why, advice }, None);
                }
            }
            if Arc::strong_count(self) == 1 {
                return; // only this task is left
            }
        }
    }

    /// Probes every part of the store once; see [`Resilient::probe`](super::Resilient::probe).
    pub(super) async fn probe_all(self: &Arc<Self>) -> StoreStatus {
        let mut done = 0;
        for number in 0..MAX_TRIES {
            let check = probe_charge(number);
            let parts = self.store.parts(&check);
            if parts & !done == 0 {
                if number > 256 {
                    break;
                }
                continue;
            }
            done |= parts;
            self.probe_first(&check, parts).await;
        }
        self.status()
    }

    /// Probes some parts of the store; the breaker opens if several probes have no answer.
    async fn probe_first(self: &Arc<Self>, check: &Check<'static>, parts: u64) {
        let mut unreachable = None;
        for _ in 0..FIRST_PROBES {
            match self.test_own(check).await {
                Diagnosis::Unresponsive { why, advice, .. } => {
                    unreachable = Some(StoreState::Unreachable { why, advice });
                }
                Diagnosis::Refused { why, advice, is_permanent } => {
                    return self.refused(parts, why, advice, is_permanent, self.clock.now());
                }
                Diagnosis::Healthy | Diagnosis::CallFailed { .. } => return,
            }
        }
        let Some(state) = unreachable else { return };
        for part in self.parts(parts) {
            if self.breakers[part].lock().open(self.clock.now()).is_some() {
                self.opened(part, state.clone(), check.clone());
            }
        }
    }

    /// A charge that a part of the store decides about.
    fn charge_for(&self, part: usize) -> Check<'static> {
        let fits = |check: &Check<'_>| self.store.parts(check) >> part & 1 == 1;
        (0..MAX_TRIES).map(probe_charge).find(fits).unwrap_or_else(|| probe_charge(0))
    }
}

/// A charge on a key of this layer. It drains within a microsecond, so no state stays.
fn probe_charge(number: u32) -> Check<'static> {
    let limit =
        Limit::bucket(1_000_000, Period::SECOND).build().expect("a million per second is a limit");
    let key = Cow::Owned(number.to_string().into_bytes());
    let subject = Subject { scope: Scope::Rule(Cow::Borrowed(SCOPE)), key };
    let charge =
        Charge { subject, limit, position: 0, cost: 1, reserved: 0, policy: Policy::default() };
    Check::of(Op::Check).with_charges(vec![charge])
}
