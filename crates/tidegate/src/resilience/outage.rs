//! When the store does not decide: how an outage begins, how it is probed, and how it ends.
//!
//! A call that has no answer counts as a miss; several of them open the breaker. A refusal that
//! waiting cannot mend opens it at once. An error reply that may be about one call alone is
//! followed by a charge on a key of this layer: if the store answers that with an error, too, it
//! refuses. While a part of the store has an outage, one task probes it; nobody waits for that.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::{Limit, Op, Period, Timestamp};
use tokio::time::Instant;

use super::breaker::Change;
use super::state::{Changed, StoreState, StoreStatus};
use super::stats::one;
use super::{Inner, PARTS, Policy};
use crate::events::{self, StoreOutage};
use crate::store::{Charge, Check, Scope, StoreError, Subject};
use tidegate_bounded::in_time;

/// A scope that no rule can have: the names of rules have no spaces.
const SCOPE: &str = "tidegate probe";
/// How many keys are tried to find one that a certain part of the store decides about.
const TRIES: u32 = 4096;
/// How long after one call that nobody waits for the next is made, if it failed at once; less, if a
/// deadline is less.
const BETWEEN: Duration = Duration::from_millis(15);
/// How often the store is probed at the start before it counts as unreachable.
const FIRST_PROBES: usize = 3;

/// What a call tells about the store.
#[derive(Debug)]
pub(super) enum Heard {
    /// It decides.
    Answer,
    /// It answers this call with an error. That may be about the call alone.
    #[cfg_attr(
        not(feature = "redis"),
        allow(dead_code, reason = "only Redis has errors that are told apart")
    )]
    Error(Reason),
    /// It does not answer.
    Silence {
        reason: Reason,
        /// There is nobody to answer: the connection was refused or broke.
        is_gone: bool,
    },
    /// It answers and takes no charges.
    Refusal {
        reason: Reason,
        /// Waiting cannot mend it.
        is_permanent: bool,
    },
}

/// Why, and what to do about it.
#[derive(Clone, Debug)]
pub(super) struct Reason {
    why: Arc<str>,
    advice: &'static str,
}

impl Reason {
    pub(super) fn why(&self) -> &str {
        &self.why
    }

    fn unreachable(self) -> StoreState {
        StoreState::Unreachable { why: self.why, advice: self.advice }
    }

    fn refused(self, is_permanent: bool) -> StoreState {
        StoreState::Refused { why: self.why, advice: self.advice, is_permanent }
    }
}

/// What an error of a call tells about the store.
pub(super) fn heard(error: &StoreError) -> Heard {
    let StoreError::Unavailable(why) = error else { return Heard::Answer };
    #[cfg(feature = "redis")]
    if let Some(no_answer) = why.downcast_ref::<crate::redis::NoAnswer>() {
        use crate::redis::FailureKind as K;
        let failure = no_answer.failure();
        let reason = Reason { why: failure.to_string().into(), advice: failure.advice() };
        if failure.is_refusal() {
            return Heard::Refusal { reason, is_permanent: failure.is_permanent() };
        }
        return match failure.kind() {
            K::Refused | K::Disconnected | K::Unresolved => {
                Heard::Silence { reason, is_gone: true }
            }
            K::Timeout | K::Loading | K::Busy | K::MaxClients | K::Protocol => {
                Heard::Silence { reason, is_gone: false }
            }
            K::Overloaded => Heard::Answer, // this process has too many calls under way
            _ => Heard::Error(reason),
        };
    }
    Heard::Silence { reason: Reason { why: why.to_string().into(), advice: "" }, is_gone: false }
}

/// A task that listens while a part of the store is silent, until it is heard or the breaker opens.
struct Listening {
    inner: Arc<Inner>,
    lane: usize,
}

impl Listening {
    async fn run(self, check: Check<'static>) {
        let Listening { inner, lane } = &self;
        while Arc::strong_count(inner) > 1 {
            let (began, sent) = (Instant::now(), inner.clock.now());
            let heard = inner.try_out(&check).await;
            let now = inner.clock.now();
            let reason = match heard {
                Heard::Silence { reason, .. } => reason,
                Heard::Answer => return inner.breakers[*lane].lock().answered(now),
                Heard::Error(_) => {
                    inner.breakers[*lane].lock().answered(now);
                    return inner.doubt(1 << lane);
                }
                Heard::Refusal { reason, is_permanent } => {
                    inner.breakers[*lane].lock().answered(now);
                    return inner.refused(1 << lane, reason, is_permanent, now);
                }
            };
            let change = {
                let mut breaker = inner.breakers[*lane].lock();
                if !breaker.is_silent() {
                    return; // another call was answered, or it is open
                }
                breaker.missed(sent, now)
            };
            if change == Some(Change::Opened) {
                return inner.opened(*lane, reason.unreachable(), check);
            }
            // A call may fail at once.
            tokio::time::sleep_until(began + inner.settings.deadline.min(BETWEEN)).await;
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.inner.breakers[self.lane].lock().not_silent();
        self.inner.silent.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A task that finds out whether an error reply was about one call alone.
struct Doubt {
    inner: Arc<Inner>,
    lane: usize,
}

impl Doubt {
    async fn run(self) {
        let Doubt { inner, lane } = &self;
        let began = Instant::now();
        if let Heard::Refusal { reason, is_permanent } =
            inner.try_own(&inner.charge_for(*lane)).await
        {
            inner.refused(1 << lane, reason, is_permanent, inner.clock.now());
        }
        // Errors may be many: one charge for all that arrive meanwhile.
        tokio::time::sleep_until(began + inner.settings.deadline.max(BETWEEN)).await;
    }
}

impl Drop for Doubt {
    fn drop(&mut self) {
        self.inner.doubted.fetch_and(!(1 << self.lane), Ordering::Relaxed);
    }
}

impl Inner {
    /// The state of the store, and how limits are enforced without it.
    pub(super) fn status(&self) -> StoreStatus {
        let (nodes, nodes_from) = self.nodes.known();
        StoreStatus::new(self.outages.lock().state(), nodes, nodes_from, self.settings.on_failure)
    }

    /// One call that nobody waits for.
    async fn try_out(&self, check: &Check<'_>) -> Heard {
        match in_time(Instant::now() + self.settings.deadline, self.store.decide(check)).await {
            Some(Ok(_)) => Heard::Answer,
            Some(Err(error)) => heard(&error),
            None => Heard::Silence { reason: self.too_late(), is_gone: false },
        }
    }

    /// The same with a charge on a key of this layer. An error cannot be about that key: the store
    /// takes no charges.
    async fn try_own(&self, charge: &Check<'_>) -> Heard {
        match self.try_out(charge).await {
            Heard::Error(reason) => Heard::Refusal { reason, is_permanent: false },
            heard => heard,
        }
    }

    /// A call was answered with an error that may be about that call alone.
    pub(super) fn doubt(self: &Arc<Self>, parts: u64) {
        for lane in self.lanes(parts) {
            let is_doubted = self.doubted.fetch_or(1 << lane, Ordering::Relaxed) >> lane & 1 == 1;
            if !is_doubted {
                tokio::spawn(Doubt { inner: Arc::clone(self), lane }.run());
            }
        }
    }

    pub(super) fn too_late(&self) -> Reason {
        Reason { why: format!("no answer within {:?}", self.settings.deadline).into(), advice: "" }
    }

    /// Why the store is not called now.
    pub(super) fn not_asked_because(&self) -> String {
        match self.outages.lock().state() {
            StoreState::Healthy => "it has not answered lately and is not asked for now".into(),
            state => format!("{}, and is not asked for now", state.why()),
        }
    }

    /// A call had no answer.
    pub(super) fn missed(
        self: &Arc<Self>,
        check: &Check<'_>,
        parts: u64,
        reason: &Reason,
        sent: Timestamp,
        now: Timestamp,
    ) {
        let probe = || check.clone().into_owned().into_op(Op::Peek).without_id();
        for lane in self.lanes(parts) {
            let (change, silent) = {
                let mut breaker = self.breakers[lane].lock();
                (breaker.missed(sent, now), breaker.falls_silent(sent))
            };
            if change == Some(Change::Opened) {
                self.opened(lane, reason.clone().unreachable(), probe());
            } else if silent {
                self.silent.fetch_add(1, Ordering::Relaxed);
                let listening = Listening { inner: Arc::clone(self), lane };
                tokio::spawn(listening.run(probe()));
            }
        }
    }

    /// The store refused a call. If waiting cannot mend that, no other call pays for it: the
    /// breaker opens.
    pub(super) fn refused(
        self: &Arc<Self>,
        parts: u64,
        reason: Reason,
        is_permanent: bool,
        now: Timestamp,
    ) {
        for lane in self.lanes(parts) {
            if is_permanent && self.breakers[lane].lock().open_at_once(now).is_some() {
                self.changed(Change::Opened);
            }
            self.outage(lane, reason.clone().refused(is_permanent), None);
        }
    }

    fn opened(self: &Arc<Self>, lane: usize, state: StoreState, probe: Check<'static>) {
        self.changed(Change::Opened);
        self.outage(lane, state, Some(probe));
    }

    /// A part of the store has an outage; `probe` is a look at a key it decides about.
    fn outage(self: &Arc<Self>, lane: usize, state: StoreState, probe: Option<Check<'static>>) {
        let Changed { begins, whole } = self.outages.lock().set(lane, state);
        if whole {
            self.tell();
        }
        if begins {
            let inner = Arc::clone(self);
            tokio::spawn(async move { inner.probe(lane, probe).await });
        }
    }

    /// Probes a part of the store from time to time until its outage ends.
    async fn probe(self: &Arc<Self>, lane: usize, mut look: Option<Check<'static>>) {
        let charge = self.charge_for(lane);
        loop {
            let pause_us = self.breakers[lane].lock().pause_us(self.random.next());
            tokio::time::sleep(Duration::from_micros(pause_us)).await;
            // A server that takes no writes may still answer looks.
            let is_refused = self.outages.lock().is_refused(lane);
            let heard = match &look {
                Some(look) if !is_refused => self.try_out(look).await,
                _ => self.try_own(&charge).await,
            };
            let answered = matches!(heard, Heard::Answer);
            let change = self.breakers[lane].lock().probed(answered, self.clock.now());
            if change == Some(Change::Closed) {
                self.changed(Change::Closed);
            }
            match heard {
                Heard::Answer => match self.end(lane) {
                    Some(true) => return self.tell(),
                    Some(false) => return,
                    None => {}
                },
                // It answers, but not this look: the next probe is a charge.
                Heard::Error(_) => look = None,
                Heard::Refusal { reason, is_permanent } => {
                    self.outage(lane, reason.refused(is_permanent), None)
                }
                // While a connection is made anew, calls get no answer: that does not mean that the
                // refusal is over.
                Heard::Silence { is_gone: false, .. } if is_refused => {}
                Heard::Silence { reason, .. } => self.outage(lane, reason.unreachable(), None),
            }
            if Arc::strong_count(self) == 1 {
                return; // only this task is left
            }
        }
    }

    /// Ends the outage of a part, unless its breaker is open. Says whether the state of the whole
    /// store is another now.
    fn end(&self, lane: usize) -> Option<bool> {
        // Whoever opens the breaker adds an outage afterwards: it is added to this one, or begins
        // another.
        let mut outages = self.outages.lock();
        (!self.breakers[lane].lock().is_open()).then(|| outages.end(lane))
    }

    /// Probes every part of the store once; see [`Resilient::probe`](super::Resilient::probe).
    pub(super) async fn probe_all(self: &Arc<Self>) -> StoreStatus {
        let mut seen = 0;
        for number in 0..TRIES {
            let check = charge_of(number);
            let parts = self.store.parts(&check);
            if parts & !seen == 0 {
                if number > 256 {
                    break;
                }
                continue;
            }
            seen |= parts;
            let mut silence = None;
            for _ in 0..FIRST_PROBES {
                silence = match self.try_own(&check).await {
                    Heard::Silence { reason, .. } => Some(reason),
                    Heard::Refusal { reason, is_permanent } => {
                        self.refused(parts, reason, is_permanent, self.clock.now());
                        None
                    }
                    Heard::Answer | Heard::Error(_) => None,
                };
                if silence.is_none() {
                    break;
                }
            }
            if let Some(reason) = silence {
                for lane in self.lanes(parts) {
                    if self.breakers[lane].lock().open_at_once(self.clock.now()).is_some() {
                        self.opened(lane, reason.clone().unreachable(), check.clone());
                    }
                }
            }
        }
        self.status()
    }

    /// A charge that a part of the store decides about. It drains within a microsecond, so that
    /// nothing stays.
    fn charge_for(&self, lane: usize) -> Check<'static> {
        let fits = |check: &Check<'_>| self.store.parts(check) >> lane & 1 == 1;
        (0..TRIES).map(charge_of).find(fits).unwrap_or_else(|| charge_of(0))
    }

    pub(super) fn lanes(&self, parts: u64) -> impl Iterator<Item = usize> + use<> {
        (0..PARTS).filter(move |lane| parts >> lane & 1 == 1)
    }

    fn changed(&self, change: Change) {
        match change {
            Change::Opened => {
                one(&self.counts.opened);
                self.open.fetch_add(1, Ordering::Relaxed);
            }
            Change::Closed => {
                one(&self.counts.closed);
                self.concurrency_limit.lock().begin_anew();
                self.open.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Reports that the state of the store is another now.
    fn tell(&self) {
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
        if let Some(tell) = self.on_state.get() {
            tell(&status);
        }
    }
}

fn charge_of(number: u32) -> Check<'static> {
    let limit =
        Limit::bucket(1_000_000, Period::SECOND).build().expect("a million a second are a limit");
    let key = Cow::Owned(number.to_string().into_bytes());
    let subject = Subject { scope: Scope::Rule(Cow::Borrowed(SCOPE)), key };
    let charge =
        Charge { subject, limit, position: 0, cost: 1, reserved: 0, policy: Policy::default() };
    Check::of(Op::Check).with_charges(vec![charge])
}
