//! Coalesces concurrent checks of one key: the first few are sent immediately, the others wait
//! until one of those is answered and share the next call.
//!
//! The script decides them in their order, at one instant, as if they had arrived one by one. So a
//! hot key costs the server a few calls per round trip, however many checks there are.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use tidegate_core::{Algorithm, Decision, Limit, Op};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::call::CallTime;
use super::shared::{NamedCharge, Shared};
use super::{FailureKind, NoAnswer};
use crate::store::{Charge, Check, StoreError};
use tidegate_redis_client::Failure;

/// The calls of one key that are sent immediately.
const MOST_CALLS: usize = 4;
/// The most checks in one call.
pub(super) const MOST: usize = 64;
/// The most checks of one key that wait; more are sent immediately, and the connection bounds
/// those.
const MOST_WAITING: usize = 1024;
const SHARDS: usize = 32;

/// Keys with calls in progress.
pub(super) struct Coalescer {
    hasher: RandomState,
    shards: Box<[Mutex<HotKeys>]>,
}

/// By the name of the key.
type HotKeys = HashMap<Vec<u8>, HotKey>;

struct HotKey {
    /// Calls in progress.
    calls: usize,
    /// One of them is shared by several checks. There is at most one, or the second could overtake
    /// the first.
    is_shared: bool,
    /// The charge of the waiting checks, except for limit and cost.
    charge: Option<Charge<'static>>,
    waiting: VecDeque<WaitingCheck>,
}

struct WaitingCheck {
    cost: u64,
    limit: Limit,
    /// The time at which it is decided.
    time: CallTime,
    answer: oneshot::Sender<Result<Decision, Arc<StoreError>>>,
}

/// How a check that joined a key goes on.
pub(super) enum Joined<'a> {
    /// It is sent now.
    Send(InFlight<'a>),
    /// A call in progress sends it with others when it ends.
    Wait(oneshot::Receiver<Result<Decision, Arc<StoreError>>>),
}

/// A call in progress. When it is dropped, the waiting checks are sent.
pub(super) struct InFlight<'a> {
    shared: &'a Arc<Shared>,
    name: Vec<u8>,
    is_shared: bool,
}

/// Whether checks like this one can share a call.
pub(super) fn can_share(check: &Check<'_>) -> bool {
    let is_countable =
        |charge: &Charge<'_>| !matches!(charge.limit.algorithm(), Algorithm::Concurrent(_));
    check.op() == Op::Check
        && check.id().is_none()
        && matches!(check.charges(), [charge] if is_countable(charge))
}

impl Coalescer {
    pub(super) fn new() -> Self {
        Coalescer {
            hasher: RandomState::new(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
        }
    }

    fn shard(&self, name: &[u8]) -> &Mutex<HotKeys> {
        let hash = usize::try_from(self.hasher.hash_one(name) & 0xffff).unwrap_or(0);
        &self.shards[hash % SHARDS]
    }
}

impl Shared {
    /// Sends or queues a check of a key.
    pub(super) fn join<'a>(self: &'a Arc<Self>, named: &NamedCharge<'_>) -> Joined<'a> {
        let mut shard = self.coalescer.shard(&named.name).lock();
        let Some(key) = shard.get_mut(&named.name) else {
            let name = named.name.clone();
            shard.insert(
                name.clone(),
                HotKey { calls: 1, is_shared: false, charge: None, waiting: VecDeque::new() },
            );
            return Joined::Send(InFlight { shared: self, name, is_shared: false });
        };
        // No check overtakes waiting ones.
        let first = key.calls < MOST_CALLS && !key.is_shared && key.waiting.is_empty();
        if first || key.waiting.len() >= MOST_WAITING {
            key.calls += 1;
            return Joined::Send(InFlight {
                shared: self,
                name: named.name.clone(),
                is_shared: false,
            });
        }
        if key.charge.is_none() {
            key.charge = Some(named.charge.clone().into_owned());
        }
        let (answer, later) = oneshot::channel();
        let (cost, limit, time) = (named.charge.cost, named.charge.limit, self.time());
        key.waiting.push_back(WaitingCheck { cost, limit, time, answer });
        Joined::Wait(later)
    }

    /// Sends checks of one key, limit and time as one call, and answers each of them.
    async fn send(self: &Arc<Self>, charge: Charge<'static>, batch: Vec<WaitingCheck>) {
        let Some((limit, time)) = batch.first().map(|first| (first.limit, first.time)) else {
            return;
        };
        let charge = Charge { limit, ..charge };
        let costs: Vec<u64> = batch.iter().map(|waiting| waiting.cost).collect();
        self.counts.coalesced.fetch_add(costs.len() as u64, Ordering::Relaxed);
        match self.call_many(time, &charge, &costs).await {
            Ok(decisions) => {
                for (waiting, decision) in batch.into_iter().zip(decisions) {
                    let _ = waiting.answer.send(Ok(decision));
                }
            }
            Err(error) => {
                let error = Arc::new(error);
                batch
                    .into_iter()
                    .for_each(|waiting| _ = waiting.answer.send(Err(Arc::clone(&error))));
            }
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let mut shard = self.shared.coalescer.shard(&self.name).lock();
        let Some(key) = shard.get_mut(&self.name) else { return };
        key.is_shared &= !self.is_shared;
        let mut batch = Vec::new();
        while batch.len() < MOST
            && !key.is_shared
            && let Some(waiting) = key.waiting.pop_front_if(|next| {
                // One call has one limit and one time; a check with others starts the next call.
                batch.first().is_none_or(|first: &WaitingCheck| {
                    (first.limit, first.time) == (next.limit, next.time)
                })
            })
        {
            // A check that was cancelled is not charged.
            if !waiting.answer.is_closed() {
                batch.push(waiting);
            }
        }
        let charge = if key.waiting.is_empty() { key.charge.take() } else { key.charge.clone() };
        let (Some(charge), false, Ok(runtime)) = (charge, batch.is_empty(), Handle::try_current())
        else {
            key.calls -= 1;
            if key.calls == 0 {
                // Without a runtime the waiting checks are not sent: they fail.
                shard.remove(&self.name);
            }
            return;
        };
        key.is_shared = true;
        drop(shard);
        // The next call runs in a task of its own.
        let (shared, name) = (Arc::clone(self.shared), std::mem::take(&mut self.name));
        runtime.spawn(async move {
            let call = InFlight { shared: &shared, name, is_shared: true };
            shared.send(charge, batch).await;
            drop(call);
        });
    }
}

/// The error for each check of a shared call.
pub(super) fn shared_error(error: &StoreError) -> StoreError {
    match error {
        StoreError::Unavailable(why) => match why.downcast_ref::<NoAnswer>() {
            Some(no_answer) => StoreError::Unavailable(Box::new(no_answer.clone())),
            None => StoreError::Unavailable(why.to_string().into()),
        },
        StoreError::Corrupt { key, reason } => {
            StoreError::Corrupt { key: key.clone(), reason: reason.clone() }
        }
        StoreError::Invalid(invalid) => StoreError::Invalid(invalid.clone()),
    }
}

/// The error for a waiting check that was not answered before its deadline.
pub(super) fn no_answer(applied: bool) -> StoreError {
    let failure =
        Failure::local(FailureKind::Timeout, "the server did not answer those before in time");
    StoreError::Unavailable(Box::new(NoAnswer { applied, failure }))
}
