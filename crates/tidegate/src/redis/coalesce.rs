//! Many checks of one key at once: the first few are sent as they come, the rest waits for one of
//! them to be answered and goes as one call.
//!
//! The script decides them in the order in which they came, at one instant, as if they had come one
//! by one. So a hot key costs the server a few calls per round trip, however many ask.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use tidegate_core::{Algorithm, Decision, Limit, Op};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::call::Time;
use super::{Asked, FailureKind, Inner, NoAnswer};
use crate::store::{Charge, Check, StoreError};
use tidegate_redis_client::Failure;

/// So many calls of one key are sent as they come.
const ALONE: usize = 4;
/// The most checks in one call.
pub(super) const MOST: usize = 64;
/// The most checks that wait for a call of one key; more are sent as they come, and the connection
/// bounds those.
const MOST_WAITING: usize = 1024;
const SHARDS: usize = 32;

/// Who asks about which key.
pub(super) struct Coalescer {
    hasher: RandomState,
    shards: Box<[Mutex<Shard>]>,
}

/// By the name of the key.
type Shard = HashMap<Vec<u8>, HotKey>;

struct HotKey {
    /// Calls that are under way.
    calls: usize,
    /// One of them is for several. There is never more than one, or the second could overtake the
    /// first.
    together: bool,
    /// Those who wait share this charge, but for its limit and cost.
    charge: Option<Charge<'static>>,
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    cost: u64,
    limit: Limit,
    /// The time at which it is asked.
    time: Time,
    answer: oneshot::Sender<Result<Decision, Arc<StoreError>>>,
}

/// What becomes of a check.
pub(super) enum Turn<'a> {
    /// It is sent now.
    Now(Call<'a>),
    /// Somebody sends it with others.
    Later(oneshot::Receiver<Result<Decision, Arc<StoreError>>>),
}

/// A call that is under way. When it ends, whoever waits is sent.
pub(super) struct Call<'a> {
    inner: &'a Arc<Inner>,
    name: Vec<u8>,
    together: bool,
}

/// Whether several of these checks can be one call.
pub(super) fn can_share(check: &Check<'_>) -> bool {
    let alone = |charge: &Charge<'_>| !matches!(charge.limit.algorithm(), Algorithm::Concurrent(_));
    check.op() == Op::Check
        && check.id().is_none()
        && matches!(check.charges(), [charge] if alone(charge))
}

impl Coalescer {
    pub(super) fn new() -> Self {
        Coalescer {
            hasher: RandomState::new(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
        }
    }

    fn shard(&self, name: &[u8]) -> &Mutex<Shard> {
        let hash = usize::try_from(self.hasher.hash_one(name) & 0xffff).unwrap_or(0);
        &self.shards[hash % SHARDS]
    }
}

impl Inner {
    /// Joins those who ask about a key.
    pub(super) fn join<'a>(self: &'a Arc<Self>, asked: &Asked<'_>) -> Turn<'a> {
        let mut shard = self.coalescer.shard(&asked.name).lock();
        let Some(crowd) = shard.get_mut(&asked.name) else {
            let name = asked.name.clone();
            shard.insert(
                name.clone(),
                HotKey { calls: 1, together: false, charge: None, waiting: VecDeque::new() },
            );
            return Turn::Now(Call { inner: self, name, together: false });
        };
        // Nobody goes before those who wait.
        let first = crowd.calls < ALONE && !crowd.together && crowd.waiting.is_empty();
        if first || crowd.waiting.len() >= MOST_WAITING {
            crowd.calls += 1;
            return Turn::Now(Call { inner: self, name: asked.name.clone(), together: false });
        }
        if crowd.charge.is_none() {
            crowd.charge = Some(asked.charge.clone().into_owned());
        }
        let (answer, later) = oneshot::channel();
        let (cost, limit, time) = (asked.charge.cost, asked.charge.limit, self.time());
        crowd.waiting.push_back(Waiting { cost, limit, time, answer });
        Turn::Later(later)
    }

    /// Sends checks of one key as one call, and tells everybody what was decided. They have limit
    /// and time in common.
    async fn send(self: &Arc<Self>, charge: Charge<'static>, batch: Vec<Waiting>) {
        let Some((limit, time)) = batch.first().map(|first| (first.limit, first.time)) else {
            return;
        };
        let charge = Charge { limit, ..charge };
        let costs: Vec<u64> = batch.iter().map(|waiting| waiting.cost).collect();
        self.coalesced.fetch_add(costs.len() as u64, Ordering::Relaxed);
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

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut shard = self.inner.coalescer.shard(&self.name).lock();
        let Some(crowd) = shard.get_mut(&self.name) else { return };
        crowd.together &= !self.together;
        let mut batch = Vec::new();
        while batch.len() < MOST
            && !crowd.together
            && let Some(waiting) = crowd.waiting.pop_front_if(|next| {
                // One call has one limit and one time. Whoever has another comes next.
                batch.first().is_none_or(|first: &Waiting| {
                    (first.limit, first.time) == (next.limit, next.time)
                })
            })
        {
            // Whoever has gone away meanwhile is not charged.
            if !waiting.answer.is_closed() {
                batch.push(waiting);
            }
        }
        let charge =
            if crowd.waiting.is_empty() { crowd.charge.take() } else { crowd.charge.clone() };
        let (Some(charge), false, Ok(runtime)) = (charge, batch.is_empty(), Handle::try_current())
        else {
            crowd.calls -= 1;
            if crowd.calls == 0 {
                shard.remove(&self.name); // without a runtime nobody sends those who wait: they hear that nobody answers
            }
            return;
        };
        crowd.together = true;
        drop(shard);
        // This call goes on as the next one.
        let (inner, name) = (Arc::clone(self.inner), std::mem::take(&mut self.name));
        runtime.spawn(async move {
            let call = Call { inner: &inner, name, together: true };
            inner.send(charge, batch).await;
            drop(call);
        });
    }
}

/// What somebody is told whose check was sent with others.
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

/// Nobody has sent it in time.
pub(super) fn nobody_answered(applied: bool) -> StoreError {
    let failure =
        Failure::local(FailureKind::Timeout, "the server did not answer those before in time");
    StoreError::Unavailable(Box::new(NoAnswer { applied, failure }))
}
