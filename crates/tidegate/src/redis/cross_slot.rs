//! A check over several slots of a cluster, as a transaction: one call per slot, and a charge is
//! given back if another slot denies.
//!
//! Each slot decides its charges atomically, and a check is allowed only if every slot allowed it,
//! so no limit is ever exceeded. The slot most likely to deny is called first: its denial costs no
//! other slot anything. The others are called in parallel. If one of them denies, each slot that
//! charged gets a second call, which gives the charge back and counts the denial where the limit
//! counts those. An operation that cannot be denied, or charges nothing, is sent to all slots in
//! parallel.
//!
//! The transaction runs to its end even if the caller is cancelled.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use tidegate_core::{Algorithm, Decision, Id, Op, Timestamp};

use super::call::{CallHead, ChargeAnswer, ScriptAnswer};
use super::script_op;
use super::shared::{NamedCharge, Shared};
use crate::store::{Charge, Check, StoreError};

pub(super) async fn decide(
    shared: &Arc<Shared>,
    check: Check<'static>,
) -> Result<Decision, StoreError> {
    let shared = Arc::clone(shared);
    let transaction = tokio::spawn(async move { CrossSlot::new(&shared, &check).run().await });
    transaction.await.unwrap_or_else(|ended| Err(StoreError::Unavailable(Box::new(ended))))
}

struct CrossSlot<'a> {
    shared: &'a Shared,
    check: &'a Check<'a>,
    head: CallHead,
    /// The charges of each slot; the slot most likely to deny comes first.
    slots: Vec<SlotCharges<'a>>,
}

struct SlotCharges<'a> {
    /// The positions of the charges in the check.
    positions: Vec<usize>,
    charges: Vec<NamedCharge<'a>>,
}

type Answers = Vec<Result<ScriptAnswer, StoreError>>;

impl<'a> CrossSlot<'a> {
    fn new(shared: &'a Shared, check: &'a Check<'a>) -> Self {
        let mut by_slot: BTreeMap<u16, SlotCharges<'a>> = BTreeMap::new();
        for (position, charge) in check.charges().iter().enumerate() {
            let named = shared.named(charge);
            let slot = by_slot
                .entry(named.slot)
                .or_insert_with(|| SlotCharges { positions: Vec::new(), charges: Vec::new() });
            slot.positions.push(position);
            slot.charges.push(named);
        }
        let mut slots: Vec<SlotCharges<'a>> = by_slot.into_values().collect();
        slots.sort_by_cached_key(|slot| slot.charges.iter().map(|named| shared.left(named)).min());
        let op = script_op(check);
        // Without an id, a lease to give back is not distinguishable from other leases.
        let takes = matches!(op, Op::Check | Op::Debit | Op::Take);
        let leases = check
            .charges()
            .iter()
            .any(|charge| matches!(charge.limit.algorithm(), Algorithm::Concurrent(_)));
        let id = check.id().filter(|id| *id != Id::NONE);
        let id = id.or_else(|| (takes && leases).then(|| shared.fresh_id()));
        let head = CallHead { op, id, time: shared.time(), denied: false };
        CrossSlot { shared, check, head, slots }
    }

    async fn run(self) -> Result<Decision, StoreError> {
        match self.head.op {
            Op::Check | Op::Debit => self.all_or_nothing().await,
            Op::Take => self.take().await,
            _ => {
                let answers = self.call(self.head, 0..self.slots.len(), None).await;
                let answers = answers.into_iter().collect::<Result<Vec<_>, _>>()?;
                let allowed = answers.iter().all(|answer| answer.allowed);
                Ok(self.decision(answers, allowed))
            }
        }
    }

    async fn all_or_nothing(self) -> Result<Decision, StoreError> {
        let mut answers = self.call(self.head, 0..1, None).await;
        if matches!(&answers[0], Ok(answer) if answer.allowed) {
            answers.extend(self.call(self.head, 1..self.slots.len(), None).await);
            if answers.iter().all(|answer| matches!(answer, Ok(answer) if answer.allowed)) {
                return Ok(
                    self.decision(answers.into_iter().filter_map(Result::ok).collect(), true)
                );
            }
        }
        // Denied, or unanswered: slots that charged give back. After a denial, slots not called yet
        // report their state, and count the denial if their limits count those. A missing answer is
        // not a denial, and no limit counts it.
        let answered = answers.iter().all(Result::is_ok);
        let denied = CallHead { denied: true, ..self.head };
        if !answered {
            self.give_back(&answers).await;
            let error = answers.into_iter().find_map(Result::err);
            return Err(error.unwrap_or_else(not_called));
        }
        let second = join_all(self.slots.iter().enumerate().map(|(at, slot)| {
            let undo = match answers.get(at) {
                Some(Ok(answer)) if answer.allowed => Some(slot.charged(answer)),
                Some(_) => None,
                None => Some(vec![None; slot.charges.len()]),
            };
            async move {
                let undo = undo?;
                Some(self.shared.call(denied, &slot.charges, &undo, self.shared.deadline()).await)
            }
        }))
        .await;
        let last = second.into_iter().enumerate().map(|(at, answer)| match answer {
            Some(answer) => answer,
            None => answers
                .get_mut(at)
                .map_or(Err(not_called()), |answer| std::mem::replace(answer, Err(not_called()))),
        });
        Ok(self.decision(last.collect::<Result<_, _>>()?, false))
    }

    /// Gives back the charges of the slots that answered.
    async fn give_back(&self, answers: &Answers) {
        let refund = CallHead { op: Op::Refund, ..self.head };
        join_all(self.slots.iter().zip(answers).map(|(slot, answer)| async move {
            let Ok(answer) = answer else { return };
            // A charge known by its id was made earlier, and stays.
            let taken = slot
                .charges
                .iter()
                .zip(slot.charged(answer))
                .filter(|(_, charged)| charged.is_some());
            let (taken, charged): (Vec<_>, Vec<_>) =
                taken.map(|(named, charged)| (self.shared.named(named.charge), charged)).unzip();
            if answer.allowed && !taken.is_empty() {
                // If this fails, nothing more can be done.
                let _ = self.shared.call(refund, &taken, &charged, self.shared.deadline()).await;
            }
        }))
        .await;
    }

    /// Takes what every slot can give: each slot is called with what the ones before it gave, and
    /// the surplus is given back.
    async fn take(self) -> Result<Decision, StoreError> {
        let mut charges = self.check.charges().to_vec();
        let mut answers: Vec<ScriptAnswer> = Vec::new();
        let mut failed = None;
        for slot in &self.slots {
            let named: Vec<NamedCharge<'_>> = slot
                .positions
                .iter()
                .map(|&position| self.shared.named(&charges[position]))
                .collect();
            match self.shared.call(self.head, &named, &[], self.shared.deadline()).await {
                Ok(answer) => {
                    let granted =
                        answer.charges.iter().map(|found| found.granted).min().unwrap_or(0);
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
        let refund = CallHead { op: Op::Refund, ..self.head };
        let peek = CallHead { op: Op::Peek, id: None, ..self.head };
        let last = join_all(self.slots.iter().enumerate().map(|(at, slot)| {
            let before = answers.get(at);
            async move {
                let Some(before) = before else {
                    // Not called, because another slot gave nothing. Peek whether this one would
                    // have given anything.
                    let one = slot.costing(|cost| cost.min(1));
                    let one: Vec<NamedCharge<'_>> =
                        one.iter().map(|charge| self.shared.named(charge)).collect();
                    return self.shared.call(peek, &one, &[], self.shared.deadline()).await;
                };
                // Units known by their id were given earlier, and are not given back.
                let charged = slot.charged(before);
                let surplus =
                    before.charges.first().map_or(0, |found| found.granted).saturating_sub(granted);
                if surplus == 0 || charged.iter().all(Option::is_none) {
                    return Ok(before.clone());
                }
                let back = slot.costing(|_| surplus);
                let back: Vec<NamedCharge<'_>> =
                    back.iter().map(|charge| self.shared.named(charge)).collect();
                let answer =
                    self.shared.call(refund, &back, &charged, self.shared.deadline()).await?;
                let found = answer.charges.into_iter().zip(&before.charges);
                let found = found.map(|(found, before)| ChargeAnswer {
                    granted,
                    fits: before.fits,
                    ..found
                });
                Ok(ScriptAnswer { charges: found.collect(), ..answer })
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

    /// Calls some slots in parallel.
    async fn call(
        &self,
        head: CallHead,
        slots: std::ops::Range<usize>,
        undo: Option<Timestamp>,
    ) -> Answers {
        let deadline = self.shared.deadline();
        let calls = self.slots[slots].iter().map(|slot| async move {
            let undo = vec![undo; slot.charges.len()];
            self.shared.call(head, &slot.charges, &undo, deadline).await
        });
        join_all(calls).await
    }

    /// Joins the answers of all slots, in the order of the check.
    fn decision(&self, answers: Vec<ScriptAnswer>, allowed: bool) -> Decision {
        let mut verdicts = vec![tidegate_core::Verdict::default(); self.check.charges().len()];
        let mut now = Timestamp::EPOCH;
        for (slot, answer) in self.slots.iter().zip(&answers) {
            now = now.max(answer.now);
            for ((position, named), found) in
                slot.positions.iter().zip(&slot.charges).zip(&answer.charges)
            {
                verdicts[*position] =
                    found.verdict(self.check.op(), named.charge, allowed, answer.now);
            }
        }
        Decision::of_many(verdicts, allowed, now).with_id(self.head.id)
    }
}

impl<'a> SlotCharges<'a> {
    /// The moment of each charge, to give it back; `None` for those known by their id, which were
    /// not charged again.
    fn charged(&self, answer: &ScriptAnswer) -> Vec<Option<Timestamp>> {
        answer.charges.iter().map(|found| found.charged_at).collect()
    }

    /// The charges at other costs.
    fn costing(&self, cost: impl Fn(u64) -> u64) -> Vec<Charge<'a>> {
        self.charges
            .iter()
            .map(|named| Charge { cost: cost(named.charge.cost), ..named.charge.clone() })
            .collect()
    }
}

fn not_called() -> StoreError {
    StoreError::Unavailable("a slot was not called".into())
}

impl Shared {
    /// How close a limit is to denying: the thousandths left, as far as known, then the capacity.
    fn left(&self, named: &NamedCharge<'_>) -> (u64, u64) {
        let capacity = named.charge.limit.capacity();
        let thousandths =
            self.remembered(named).map_or(1000, |left| left.saturating_mul(1000) / capacity.max(1));
        (thousandths, capacity)
    }
}

/// Runs all futures concurrently and waits for all.
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
