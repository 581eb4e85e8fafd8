//! Waiting until it is allowed: in order, bounded, and not in vain.
//!
//! Under a single bucket a call books its place: the bucket is charged at once, for the moment when
//! there will be room, and the call sleeps until then. Places are kept in the store, so the order
//! holds over every process that shares it. Under any other limits the calls of this process form a
//! queue per key: the first in line asks, sleeps as long as the answer says or until something is
//! given back in this process, and asks again; whoever comes later stands behind it.

use std::collections::HashMap;
use std::future::{Future, IntoFuture, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tidegate_core::{Algorithm, Decision, Op, Retry, Timestamp};
use tokio::sync::Notify;

use crate::held::Place;
use crate::limiter::Limiter;
use crate::store::{Check, StoreError};

/// How often to look for a lease that was released by another limiter or process.
const POLL: Duration = Duration::from_millis(50);

/// Why `acquire` came back without a pass.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// It would have to wait longer than it may, or for ever. The decision says for how long.
    #[error("the wait would be longer than allowed")]
    TooLong(Decision),
    /// Too many are waiting already.
    #[error("{waiting} calls are waiting already")]
    QueueFull {
        /// How many.
        waiting: usize,
    },
    /// The store has no answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What [`acquire`](Limiter::acquire) comes to: a pass. There is nothing to check; it was allowed.
#[derive(Clone, Debug)]
pub struct Pass(Decision);

impl Pass {
    /// The decision that let it through.
    pub fn decision(&self) -> &Decision {
        &self.0
    }

    /// The decision that let it through.
    pub fn into_decision(self) -> Decision {
        self.0
    }
}

/// A call that waits; `.await` begins it.
#[derive(Debug)]
#[must_use = "nothing happens until it is awaited"]
pub struct Acquire<'a> {
    limiter: &'a Limiter,
    key: &'a [u8],
    cost: u64,
    max_wait: Duration,
}

impl<'a> Acquire<'a> {
    pub(crate) fn new(limiter: &'a Limiter, key: &'a [u8], max_wait: Duration) -> Self {
        Acquire { limiter, key, cost: 1, max_wait }
    }

    /// How much it costs; 1 unless told otherwise.
    pub fn cost(mut self, units: u64) -> Self {
        self.cost = units;
        self
    }

    async fn wait(self) -> Result<Pass, AcquireError> {
        let clock = &self.limiter.shared().clock;
        let deadline = clock.now().after(self.max_wait);
        let line = self.limiter.shared().waiting.join(self.key)?;
        match self.limiter.limits().as_slice() {
            [limit] if matches!(limit.algorithm(), Algorithm::Bucket(_)) => {
                self.book().await.map(Pass)
            }
            _ => self.stand_in(&line, deadline).await.map(Pass),
        }
    }

    /// Under a single bucket: charge now, sleep until it is our turn.
    async fn book(&self) -> Result<Decision, AcquireError> {
        let shared = self.limiter.shared();
        let max_wait_us = u64::try_from(self.max_wait.as_micros()).unwrap_or(u64::MAX);
        let check = self.limiter.check_of(Op::Book { max_wait_us }, self.key, self.cost);
        let booked = shared.decide(check).await?;
        let answered_at = shared.clock.now(); // the store judged before: never too early
        if !booked.allowed() {
            return Err(AcquireError::TooLong(booked));
        }
        let wait_us = booked.retry().micros().unwrap_or(0);
        // If this future is dropped while it sleeps, the place is given back.
        let place = Place::new(self.limiter, self.key, self.cost, booked.clone());
        if wait_us > 0 {
            shared.clock.sleep_until(answered_at.after_micros(wait_us)).await;
        }
        Ok(place.used().unwrap_or(booked))
    }

    /// Under anything else: first in line asks, the others wait behind it.
    async fn stand_in(
        &self,
        line: &InLine<'_>,
        deadline: Timestamp,
    ) -> Result<Decision, AcquireError> {
        let shared = self.limiter.shared();
        let _lock = if let Ok(lock) = line.front.turn.try_lock() {
            lock
        } else {
            // The one in front sleeps until then; whoever must be gone before need not wait for it.
            let front_wakes = Timestamp::from_micros(line.front.wakes_us.load(Ordering::Acquire));
            if front_wakes > deadline {
                return Err(AcquireError::TooLong(self.peek().await?));
            }
            match before(line.front.turn.lock(), shared.clock.sleep_until(deadline)).await {
                Some(lock) => lock,
                None => return Err(AcquireError::TooLong(self.peek().await?)),
            }
        };
        let turn = Turn(&line.front); // ends before the lock is given on
        loop {
            // From here on nothing that is given back is missed.
            let freed = turn.0.freed.notified();
            let check = self.limiter.check_of(Op::Check, self.key, self.cost);
            let leases: Vec<bool> =
                check.charges().iter().map(|charge| is_lease(charge.limit.algorithm())).collect();
            let asked_at = shared.clock.now();
            let decision = shared.decide(check).await?;
            if decision.allowed() {
                return Ok(decision);
            }
            let Retry::After(micros) = decision.retry() else {
                return Err(AcquireError::TooLong(decision));
            };
            // When a lease ends nobody knows: at its ttl at the latest. What is known is how long
            // all others make it wait.
            let others = decision.charges().iter().zip(&leases).filter(|(_, lease)| !**lease);
            let known_us =
                others.filter_map(|(verdict, _)| verdict.retry.micros()).max().unwrap_or(0);
            let not_before = asked_at.after_micros(known_us);
            if not_before > deadline || asked_at >= deadline {
                return Err(AcquireError::TooLong(decision));
            }
            turn.0.wakes_us.store(not_before.as_micros(), Ordering::Release);
            let mut wakes = asked_at.after_micros(micros).min(deadline);
            if leases.contains(&true) {
                // A lease that is released elsewhere, by another limiter or process, wakes nobody
                // here: only asking shows it.
                wakes = wakes.min(not_before.max(asked_at.after(POLL)));
            }
            before(freed, shared.clock.sleep_until(wakes)).await;
        }
    }

    async fn peek(&self) -> Result<Decision, StoreError> {
        self.limiter.shared().decide(self.limiter.check_of(Op::Peek, self.key, self.cost)).await
    }
}

fn is_lease(algorithm: &Algorithm) -> bool {
    matches!(algorithm, Algorithm::Concurrent(_))
}

/// What `future` comes to, if it does so before `deadline`.
async fn before<F: Future>(future: F, deadline: impl Future) -> Option<F::Output> {
    let (mut future, mut deadline) = (pin!(future), pin!(deadline));
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => deadline.as_mut().poll(context).map(|_| None),
    })
    .await
}

impl<'a> IntoFuture for Acquire<'a> {
    type Output = Result<Pass, AcquireError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.wait())
    }
}

/// Who is waiting, by key. Keys nobody waits for are not in it.
#[derive(Debug)]
pub(crate) struct Waiting {
    lines: Mutex<Lines>,
    max: usize,
    max_per_key: usize,
}

#[derive(Debug, Default)]
struct Lines {
    by_key: HashMap<Box<[u8]>, Line>,
    total: usize,
}

#[derive(Debug, Default)]
struct Line {
    waiting: usize,
    front: Arc<Front>,
    /// Booked places that were left while somebody stood behind them.
    left: Vec<Check<'static>>,
}

/// The front of a line: whoever holds the lock is first, and the lock is given in order of arrival.
#[derive(Debug, Default)]
struct Front {
    turn: tokio::sync::Mutex<()>,
    /// Until when the first in line sleeps at least; zero if it does not.
    wakes_us: AtomicU64,
    /// Something was given back.
    freed: Notify,
}

/// Being first in line.
struct Turn<'a>(&'a Front);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.wakes_us.store(0, Ordering::Release);
    }
}

impl Waiting {
    pub(crate) fn new(max: usize, max_per_key: usize) -> Self {
        Waiting { lines: Mutex::default(), max, max_per_key }
    }

    fn join<'a>(&'a self, key: &'a [u8]) -> Result<InLine<'a>, AcquireError> {
        let mut lines = self.lines.lock();
        if lines.total >= self.max {
            return Err(AcquireError::QueueFull { waiting: lines.total });
        }
        let waiting = lines.by_key.get(key).map_or(0, |line| line.waiting);
        if waiting >= self.max_per_key {
            return Err(AcquireError::QueueFull { waiting });
        }
        let line = match lines.by_key.get_mut(key) {
            Some(line) => line,
            None => lines.by_key.entry(key.into()).or_default(),
        };
        line.waiting += 1;
        let front = Arc::clone(&line.front);
        lines.total += 1;
        Ok(InLine { waiting: self, key, front })
    }

    /// After `unbook` was decided: if the place could not be given back it is remembered; if it
    /// could, returns what gives back the place before it, should that have been left too.
    pub(crate) fn left(
        &self,
        unbook: Check<'static>,
        decision: &Decision,
    ) -> Option<Check<'static>> {
        let mut lines = self.lines.lock();
        let line = lines.by_key.get_mut(&*unbook.charges().first()?.subject.key)?;
        let idle_at = decision.at().after_micros(decision.binding().reset_after_us);
        if decision.granted() == 0 {
            let ahead = |left: &Check<'_>| matches!(left.op(), Op::Unbook { idle_at } if idle_at > decision.at());
            line.left.retain(ahead);
            if line.left.len() < self.max_per_key && ahead(&unbook) {
                line.left.push(unbook);
            }
            return None;
        }
        let before = line.left.iter().position(|left| left.op() == Op::Unbook { idle_at })?;
        Some(line.left.swap_remove(before))
    }

    /// Lets the first in line for `key` ask again: something was given back.
    pub(crate) fn wake(&self, key: &[u8]) {
        if let Some(line) = self.lines.lock().by_key.get(key) {
            line.front.freed.notify_waiters();
        }
    }
}

/// One that waits; leaves the line when dropped.
struct InLine<'a> {
    waiting: &'a Waiting,
    key: &'a [u8],
    front: Arc<Front>,
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let mut lines = self.waiting.lines.lock();
        lines.total -= 1;
        if let Some(line) = lines.by_key.get_mut(self.key) {
            line.waiting -= 1;
            if line.waiting == 0 {
                lines.by_key.remove(self.key);
            }
        }
    }
}
