//! One check over several slots of a cluster: slot by slot, and what was taken is given back if
//! another slot denies.
//!
//! Each slot decides by itself, atomically; nobody is admitted who does not hold everything
//! everywhere, so no limit is ever exceeded. The slot that is most likely to deny is asked first
//! and alone: a denial there costs nobody anything. The others are asked together. If one of them
//! denies, all that took are told so in one more call each, give back what they took and count the
//! denial where the limit counts those. What cannot be denied, or takes nothing, is sent to all
//! slots at once.
//!
//! It runs to its end even if the caller goes away in the middle.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use tidegate_core::{Algorithm, Decision, Id, Op, Timestamp};

use super::call::{Answer, Found, Head};
use super::{Asked, Inner, script_op};
use crate::store::{Charge, Check, StoreError};

pub(super) async fn decide(
    inner: &Arc<Inner>,
    check: Check<'static>,
) -> Result<Decision, StoreError> {
    let inner = Arc::clone(inner);
    let saga = tokio::spawn(async move { CrossSlot::new(&inner, &check).run().await });
    saga.await.unwrap_or_else(|ended| Err(StoreError::Unavailable(Box::new(ended))))
}

struct CrossSlot<'a> {
    inner: &'a Inner,
    check: &'a Check<'a>,
    head: Head,
    /// The charges of each slot, by their place in the check; the slot most likely to deny comes
    /// first.
    slots: Vec<Slot<'a>>,
}

struct Slot<'a> {
    places: Vec<usize>,
    charges: Vec<Asked<'a>>,
}

type Answers = Vec<Result<Answer, StoreError>>;

impl<'a> CrossSlot<'a> {
    fn new(inner: &'a Inner, check: &'a Check<'a>) -> Self {
        let mut by_slot: BTreeMap<u16, Slot<'a>> = BTreeMap::new();
        for (place, charge) in check.charges().iter().enumerate() {
            let asked = inner.ask(charge);
            let slot = by_slot
                .entry(asked.slot)
                .or_insert_with(|| Slot { places: Vec::new(), charges: Vec::new() });
            slot.places.push(place);
            slot.charges.push(asked);
        }
        let mut slots: Vec<Slot<'a>> = by_slot.into_values().collect();
        slots.sort_by_cached_key(|slot| slot.charges.iter().map(|asked| inner.left(asked)).min());
        let op = script_op(check);
        // Without an id a lease that must be given back could not be told from those of others.
        let takes = matches!(op, Op::Check | Op::Debit | Op::Take);
        let leases = check
            .charges()
            .iter()
            .any(|charge| matches!(charge.limit.algorithm(), Algorithm::Concurrent(_)));
        let id = check.id().filter(|id| *id != Id::NONE);
        let id = id.or_else(|| (takes && leases).then(|| inner.fresh_id()));
        let head = Head { op, id, time: inner.time(), denied: false };
        CrossSlot { inner, check, head, slots }
    }

    async fn run(self) -> Result<Decision, StoreError> {
        match self.head.op {
            Op::Check | Op::Debit => self.all_or_nothing().await,
            Op::Take => self.take().await,
            _ => {
                let answers = self.ask(self.head, 0..self.slots.len(), None).await;
                let answers = answers.into_iter().collect::<Result<Vec<_>, _>>()?;
                let allowed = answers.iter().all(|answer| answer.allowed);
                Ok(self.decision(answers, allowed))
            }
        }
    }

    async fn all_or_nothing(self) -> Result<Decision, StoreError> {
        let mut answers = self.ask(self.head, 0..1, None).await;
        if matches!(&answers[0], Ok(answer) if answer.allowed) {
            answers.extend(self.ask(self.head, 1..self.slots.len(), None).await);
            if answers.iter().all(|answer| matches!(answer, Ok(answer) if answer.allowed)) {
                return Ok(
                    self.decision(answers.into_iter().filter_map(Result::ok).collect(), true)
                );
            }
        }
        // Denied, or unanswered: whoever took gives back. After a denial whoever was not asked yet
        // says how it stands, and counts the denial if its limit counts those. No answer is not a
        // denial, and nobody counts it.
        let answered = answers.iter().all(Result::is_ok);
        let denied = Head { denied: true, ..self.head };
        if !answered {
            self.give_back(&answers).await;
            let error = answers.into_iter().find_map(Result::err);
            return Err(error.unwrap_or_else(unasked));
        }
        let told = join_all(self.slots.iter().enumerate().map(|(at, slot)| {
            let undo = match answers.get(at) {
                Some(Ok(answer)) if answer.allowed => Some(slot.charged(answer)),
                Some(_) => None,
                None => Some(vec![None; slot.charges.len()]),
            };
            async move {
                let undo = undo?;
                Some(self.inner.call(denied, &slot.charges, &undo, self.inner.deadline()).await)
            }
        }))
        .await;
        let last = told.into_iter().enumerate().map(|(at, told)| match told {
            Some(told) => told,
            None => answers
                .get_mut(at)
                .map_or(Err(unasked()), |answer| std::mem::replace(answer, Err(unasked()))),
        });
        Ok(self.decision(last.collect::<Result<_, _>>()?, false))
    }

    /// Gives back what was taken where there was an answer.
    async fn give_back(&self, answers: &Answers) {
        let refund = Head { op: Op::Refund, ..self.head };
        join_all(self.slots.iter().zip(answers).map(|(slot, answer)| async move {
            let Ok(answer) = answer else { return };
            // What was known by its id has been charged before, and stays charged.
            let taken = slot
                .charges
                .iter()
                .zip(slot.charged(answer))
                .filter(|(_, charged)| charged.is_some());
            let (taken, charged): (Vec<_>, Vec<_>) =
                taken.map(|(asked, charged)| (self.inner.ask(asked.charge), charged)).unzip();
            if answer.allowed && !taken.is_empty() {
                // Whether it works or not, there is nothing more that could be done.
                let _ = self.inner.call(refund, &taken, &charged, self.inner.deadline()).await;
            }
        }))
        .await;
    }

    /// Takes what every slot can give: each is asked for what the ones before it gave, and what was
    /// too much is given back.
    async fn take(self) -> Result<Decision, StoreError> {
        let mut charges = self.check.charges().to_vec();
        let mut answers: Vec<Answer> = Vec::new();
        let mut failed = None;
        for slot in &self.slots {
            let asked: Vec<Asked<'_>> =
                slot.places.iter().map(|&place| self.inner.ask(&charges[place])).collect();
            match self.inner.call(self.head, &asked, &[], self.inner.deadline()).await {
                Ok(answer) => {
                    let granted = answer.found.iter().map(|found| found.granted).min().unwrap_or(0);
                    let none = !answer.allowed;
                    answers.push(answer);
                    charges.iter_mut().for_each(|charge| charge.cost = granted);
                    if none {
                        break;
                    }
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        let granted =
            if failed.is_some() { 0 } else { charges.first().map_or(0, |charge| charge.cost) };
        let refund = Head { op: Op::Refund, ..self.head };
        let peek = Head { op: Op::Peek, id: None, ..self.head };
        let last = join_all(self.slots.iter().enumerate().map(|(at, slot)| {
            let before = answers.get(at);
            async move {
                let Some(before) = before else {
                    // It was not asked, because nothing is to be had elsewhere. Would it have given
                    // anything?
                    let one = slot.costing(|cost| cost.min(1));
                    let one: Vec<Asked<'_>> =
                        one.iter().map(|charge| self.inner.ask(charge)).collect();
                    return self.inner.call(peek, &one, &[], self.inner.deadline()).await;
                };
                // What was known by its id has been given before, and is nothing to give back.
                let charged = slot.charged(before);
                let surplus =
                    before.found.first().map_or(0, |found| found.granted).saturating_sub(granted);
                if surplus == 0 || charged.iter().all(Option::is_none) {
                    return Ok(before.clone());
                }
                let back = slot.costing(|_| surplus);
                let back: Vec<Asked<'_>> =
                    back.iter().map(|charge| self.inner.ask(charge)).collect();
                let answer =
                    self.inner.call(refund, &back, &charged, self.inner.deadline()).await?;
                let found = answer.found.into_iter().zip(&before.found);
                let found =
                    found.map(|(found, before)| Found { granted, fits: before.fits, ..found });
                Ok(Answer { found: found.collect(), ..answer })
            }
        }))
        .await;
        match failed {
            Some(error) => Err(error),
            None => {
                let allowed = answers.len() == self.slots.len()
                    && answers.iter().all(|answer| answer.allowed);
                Ok(self.decision(last.into_iter().collect::<Result<_, _>>()?, allowed))
            }
        }
    }

    /// Asks some slots at once.
    async fn ask(
        &self,
        head: Head,
        slots: std::ops::Range<usize>,
        undo: Option<Timestamp>,
    ) -> Answers {
        let deadline = self.inner.deadline();
        let calls = self.slots[slots].iter().map(|slot| async move {
            let undo = vec![undo; slot.charges.len()];
            self.inner.call(head, &slot.charges, &undo, deadline).await
        });
        join_all(calls).await
    }

    /// Puts the answers of all slots together, in the order of the check.
    fn decision(&self, answers: Vec<Answer>, allowed: bool) -> Decision {
        let mut verdicts = vec![tidegate_core::Verdict::default(); self.check.charges().len()];
        let mut now = Timestamp::EPOCH;
        for (slot, answer) in self.slots.iter().zip(&answers) {
            now = now.max(answer.now);
            for ((place, asked), found) in slot.places.iter().zip(&slot.charges).zip(&answer.found)
            {
                verdicts[*place] =
                    found.verdict(self.check.op(), asked.charge, allowed, answer.now);
            }
        }
        Decision::of_many(verdicts, allowed, now).with_id(self.head.id)
    }
}

impl<'a> Slot<'a> {
    /// When each charge was taken, for giving it back; nothing for those that were known by their
    /// id and not taken again.
    fn charged(&self, answer: &Answer) -> Vec<Option<Timestamp>> {
        answer.found.iter().map(|found| found.charged_at).collect()
    }

    /// The charges at another cost.
    fn costing(&self, cost: impl Fn(u64) -> u64) -> Vec<Charge<'a>> {
        self.charges
            .iter()
            .map(|asked| Charge { cost: cost(asked.charge.cost), ..asked.charge.clone() })
            .collect()
    }
}

fn unasked() -> StoreError {
    StoreError::Unavailable("a slot was not asked".into())
}

impl Inner {
    /// How near a limit is to denying: thousandths left as far as is known, then the smaller limit.
    fn left(&self, asked: &Asked<'_>) -> (u64, u64) {
        let capacity = asked.charge.limit.capacity();
        let thousandths =
            self.remembered(asked).map_or(1000, |left| left.saturating_mul(1000) / capacity.max(1));
        (thousandths, capacity)
    }
}

/// Runs all of them at once and waits for all.
pub(super) async fn join_all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<Pin<Box<F>>> = futures.map(Box::pin).collect();
    let mut outputs: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (future, output) in running.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let Poll::Ready(ready) = future.as_mut().poll(context)
            {
                *output = Some(ready);
            }
        }
        if outputs.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}
