//! The state that clones of a store share, and one call of the script.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::{Decision, Done, Id, Op, Timestamp};
use tidegate_redis_client::{Chance, Failure, FailureKind, Outcome, Router, Script, Value};
use tokio::time::Instant;

use super::NoAnswer;
use super::call::{self, CallCharge, CallHead, CallTime, ScriptAnswer};
use super::coalesce::Coalescer;
use super::keys::Keys;
use super::steps::Steps;
use super::witness::Witness;
use crate::clock::Clock;
use crate::events;
use crate::store::{Charge, StoreError};

/// Receives how far a server's clock went back.
pub(super) type OnClockStep = Box<dyn Fn(Duration) + Send + Sync>;

/// The state that clones of a store share.
pub(super) struct Shared {
    pub(super) router: Router,
    pub(super) script: Script,
    pub(super) keys: Keys,
    pub(super) witness: Witness,
    /// The clock that judges; without one, the server's.
    pub(super) clock: Option<Clock>,
    /// The clock stands in for the server's, and may go back.
    pub(super) is_stand_in: bool,
    pub(super) timeout: Duration,
    pub(super) started: Instant,
    /// The time of the last reply; with a clock of this process, the newest.
    pub(super) latest_us: AtomicU64,
    /// Clock steps already reported.
    pub(super) steps: Steps,
    pub(super) on_clock_step: OnceLock<OnClockStep>,
    pub(super) counts: Counts,
    pub(super) coalescer: Coalescer,
    pub(super) is_coalescing: bool,
    pub(super) chance: Chance,
}

/// The counters of [`RedisStats`](super::RedisStats) that the connection does not keep.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) calls: AtomicU64,
    pub(super) coalesced: AtomicU64,
    pub(super) regressions: AtomicU64,
    pub(super) clock_regressions: AtomicU64,
    pub(super) repairs: AtomicU64,
}

/// A charge with the key of its state.
pub(super) struct NamedCharge<'a> {
    pub(super) charge: &'a Charge<'a>,
    pub(super) slot: u16,
    pub(super) name: Vec<u8>,
}

impl AsRef<[u8]> for NamedCharge<'_> {
    fn as_ref(&self) -> &[u8] {
        &self.name
    }
}

impl Shared {
    /// A charge with the key of its state.
    pub(super) fn named<'a>(&self, charge: &'a Charge<'a>) -> NamedCharge<'a> {
        let tag = self.keys.tag(&charge.subject);
        NamedCharge { charge, slot: tag.slot(), name: self.keys.name(tag, charge) }
    }

    pub(super) fn time(&self) -> CallTime {
        match &self.clock {
            None => CallTime::Server,
            Some(clock) if self.is_stand_in => CallTime::StandIn(clock.now()),
            Some(clock) => CallTime::Caller(clock.now()),
        }
    }

    /// The time by which observations expire. A server's clock may step, so it is the time that has
    /// passed in this process; with a clock of this process, its newest time.
    fn witness_now(&self) -> Timestamp {
        Timestamp::from_micros(match self.judges_by_server() {
            true => self.passed_us(),
            false => self.latest_us.load(Ordering::Relaxed),
        })
    }

    fn judges_by_server(&self) -> bool {
        self.clock.is_none() || self.is_stand_in
    }

    fn passed_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// Calls the script once for charges that share a slot. `undo` has, for each, the moment of an
    /// earlier charge to give back.
    pub(super) async fn call(
        &self,
        head: CallHead,
        charges: &[NamedCharge<'_>],
        undo: &[Option<Timestamp>],
        deadline: Instant,
    ) -> Result<ScriptAnswer, StoreError> {
        self.counts.calls.fetch_add(1, Ordering::Relaxed);
        let now = self.witness_now();
        let parts = charges.iter().enumerate();
        let parts = parts.map(|(at, named)| CallCharge {
            charge: named.charge,
            undo: undo.get(at).copied().flatten(),
        });
        let recall = |at: usize, scale: &[u8]| self.witness.recall(&charges[at].name, scale, now);
        let args = call::arguments(&head, parts, recall);
        let bytes = self.eval(charges, &args, deadline).await?;
        let answer = ScriptAnswer::decode(&bytes, charges.iter().map(|named| named.charge))
            .map_err(garbled)?;
        self.note(charges, &answer);
        Ok(answer)
    }

    /// Calls the script once for checks of one charge at these costs, in this order.
    pub(super) async fn call_many(
        &self,
        time: CallTime,
        charge: &Charge<'_>,
        costs: &[u64],
    ) -> Result<Vec<Decision>, StoreError> {
        self.counts.calls.fetch_add(1, Ordering::Relaxed);
        let named = [self.named(charge)];
        let now = self.witness_now();
        let recall = |scale: &[u8]| self.witness.recall(&named[0].name, scale, now);
        let args = call::arguments_of_many(time, charge, costs, recall);
        let bytes = self.eval(&named, &args, self.deadline()).await?;
        let answers = call::decode_many(&bytes, charge).map_err(garbled)?;
        if answers.len() != costs.len() {
            return Err(garbled(call::Garbled));
        }
        let decisions = answers.iter().zip(costs).map(|(answer, cost)| {
            self.note(&named, answer);
            let charge = Charge { cost: *cost, ..charge.clone() };
            let verdict = answer.charges[0].verdict(Op::Check, &charge, answer.allowed, answer.now);
            Decision::of_one(verdict, answer.allowed, answer.now)
        });
        Ok(decisions.collect())
    }

    async fn eval(
        &self,
        charges: &[NamedCharge<'_>],
        args: &[Vec<u8>],
        deadline: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        let slot = charges.first().map_or(0, |named| named.slot);
        match self.router.eval(&self.script, slot, charges, args, deadline).await {
            Outcome::Applied(Value::Bulk(bytes)) => Ok(bytes),
            Outcome::Applied(_) => Err(garbled(call::Garbled)),
            Outcome::NotApplied(failure) => Err(no_answer(false, failure, charges)),
            Outcome::Unknown(failure) => Err(no_answer(true, failure, charges)),
        }
    }

    /// Remembers the states of an answer, and counts what it repaired.
    fn note(&self, charges: &[NamedCharge<'_>], answer: &ScriptAnswer) {
        let now = if self.judges_by_server() {
            self.latest_us.store(answer.now.as_micros(), Ordering::Relaxed);
            let passed_us = self.passed_us();
            let slot = charges.first().map_or(0, |named| named.slot);
            self.steps.saw(self.router.place(slot), answer.now, passed_us);
            Timestamp::from_micros(passed_us)
        } else {
            self.latest_us.fetch_max(answer.now.as_micros(), Ordering::Relaxed);
            answer.now
        };
        for (named, found) in charges.iter().zip(&answer.charges) {
            self.witness.remember(
                &named.name,
                &call::scale(&named.charge.limit),
                found,
                answer.now,
                now,
            );
            if let Some(by_us) = found.rebased_us {
                self.clock_went_back(named.slot, by_us, answer.now);
            }
            if found.restored {
                events::restored(self.counts.regressions.fetch_add(1, Ordering::Relaxed) + 1);
            }
            if found.repaired {
                events::repaired(self.counts.repairs.fetch_add(1, Ordering::Relaxed) + 1);
            }
        }
    }

    /// Reports a state that was `by_us` ahead of the clock of this slot's server, once per clock
    /// step.
    fn clock_went_back(&self, slot: u16, by_us: u64, server: Timestamp) {
        self.counts.clock_regressions.fetch_add(1, Ordering::Relaxed);
        if self.steps.is_new(self.router.place(slot), by_us, server, self.passed_us()) {
            let by = Duration::from_micros(by_us);
            events::clock_went_back(by);
            if let Some(tell) = self.on_clock_step.get() {
                tell(by);
            }
        }
    }

    /// How many units the last answer left, if it is remembered.
    pub(super) fn remembered(&self, named: &NamedCharge<'_>) -> Option<u64> {
        let limit = &named.charge.limit;
        let latest = Timestamp::from_micros(self.latest_us.load(Ordering::Relaxed));
        let seen = self.witness.recall(&named.name, &call::scale(limit), self.witness_now())?;
        let reading = call::reading(&seen, limit)?;
        let done =
            Done { op: Op::Peek, cost: 0, reserved: 0, fits: true, granted: 0, booked_us: 0 };
        Some(reading.verdict(limit, &done, true, latest).remaining)
    }

    /// A random id, for a check that takes several calls.
    pub(super) fn fresh_id(&self) -> Id {
        Id(self.chance.number() | 1)
    }
}

fn garbled(garbled: call::Garbled) -> StoreError {
    StoreError::Unavailable(Box::new(garbled))
}

fn no_answer(applied: bool, failure: Failure, charges: &[NamedCharge<'_>]) -> StoreError {
    if failure.kind() == FailureKind::WrongType {
        let name =
            charges.first().map(|named| named.name.escape_ascii().to_string()).unwrap_or_default();
        let key = if charges.len() > 1 {
            format!("{name} or one of {} others", charges.len() - 1)
        } else {
            name
        };
        let reason =
            "it is not a string: some other program has written it, delete it or use a namespace"
                .into();
        return StoreError::Corrupt { key: key.chars().take(200).collect(), reason };
    }
    StoreError::Unavailable(Box::new(NoAnswer { applied, failure }))
}
