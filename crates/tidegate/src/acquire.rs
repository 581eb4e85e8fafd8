//! Waiting until it is allowed: in order, bounded, and not in vain.
//!
//! Under a single bucket a call books its place: the bucket is charged at once, for the moment when there will be room, and
//! the call sleeps until then. Places are kept in the store, so the order holds over every process that shares it. Under
//! any other limits the calls of this process form a queue per key: the first in line asks, sleeps as long as the answer
//! says, and asks again; whoever comes later stands behind it.

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
use crate::store::StoreError;

/// How often to look for a lease that was released by another process.
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
            [limit] if matches!(limit.algorithm(), Algorithm::Bucket(_)) => self.book().await.map(Pass),
            _ => self.stand_in(&line, deadline).await.map(Pass),
        }
    }

    /// Under a single bucket: charge now, sleep until it is our turn.
    async fn book(&self) -> Result<Decision, AcquireError> {
        let shared = self.limiter.shared();
        let max_wait_us = u64::try_from(self.max_wait.as_micros()).unwrap_or(u64::MAX);
        let check = self.limiter.check_of(Op::Book { max_wait_us }, self.key, self.cost);
        let asked_at = shared.clock.now();
        let booked = shared.decide(check).await?;
        if !booked.allowed() {
            return Err(AcquireError::TooLong(booked));
        }
        let wait_us = booked.retry().micros().unwrap_or(0);
        // If this future is dropped while it sleeps, the place is given back.
        let place = Place::new(self.limiter, self.key, self.cost, booked.clone());
        if wait_us > 0 {
            shared.clock.sleep_until(asked_at.after_micros(wait_us)).await;
        }
        Ok(place.used().unwrap_or(booked))
    }

    /// Under anything else: first in line asks, the others wait behind it.
    async fn stand_in(&self, line: &InLine<'_>, deadline: Timestamp) -> Result<Decision, AcquireError> {
        let shared = self.limiter.shared();
        let _turn = if let Ok(turn) = line.front.turn.try_lock() {
            turn
        } else {
            // The one in front sleeps until then; whoever must be gone before need not wait for it.
            let front_wakes = Timestamp::from_micros(line.front.wakes_us.load(Ordering::Acquire));
            if front_wakes > deadline {
                return Err(AcquireError::TooLong(self.peek().await?));
            }
            match before(line.front.turn.lock(), shared.clock.sleep_until(deadline)).await {
                Some(turn) => turn,
                None => return Err(AcquireError::TooLong(self.peek().await?)),
            }
        };
        let leases = self.limiter.limits().iter().any(|limit| matches!(limit.algorithm(), Algorithm::Concurrent(_)));
        loop {
            let mut released = pin!(line.front.released.notified());
            released.as_mut().enable(); // before asking, so that no release is missed
            let asked_at = shared.clock.now();
            let decision = shared.decide(self.limiter.check_of(Op::Check, self.key, self.cost)).await?;
            if decision.allowed() {
                return Ok(decision);
            }
            let Retry::After(micros) = decision.retry() else { return Err(AcquireError::TooLong(decision)) };
            let wakes = asked_at.after_micros(micros);
            if leases && asked_at < deadline {
                // A lease may be released at any moment: here, which wakes us, or elsewhere, which only asking again shows.
                let again = if shared.is_shared() { asked_at.after(POLL) } else { wakes };
                before(released, shared.clock.sleep_until(again.min(wakes).min(deadline))).await;
                continue;
            }
            if wakes > deadline {
                return Err(AcquireError::TooLong(decision));
            }
            line.front.wakes_us.store(wakes.as_micros(), Ordering::Release);
            shared.clock.sleep_until(wakes).await;
        }
    }

    async fn peek(&self) -> Result<Decision, StoreError> {
        self.limiter.shared().decide(self.limiter.check_of(Op::Peek, self.key, self.cost)).await
    }
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
}

/// The front of a line: whoever holds the lock is first, and the lock is given in order of arrival.
#[derive(Debug, Default)]
struct Front {
    turn: tokio::sync::Mutex<()>,
    wakes_us: AtomicU64,
    released: Notify,
}

impl Waiting {
    pub(crate) fn new(max: usize, max_per_key: usize) -> Self {
        Waiting { lines: Mutex::default(), max, max_per_key }
    }

    /// A lease of `key` has been released: whoever waits for one in front looks again.
    pub(crate) fn released(&self, key: &[u8]) {
        if let Some(line) = self.lines.lock().by_key.get(key) {
            line.front.released.notify_waiters();
        }
    }

    fn join<'a>(&'a self, key: &'a [u8]) -> Result<InLine<'a>, AcquireError> {
        let mut lines = self.lines.lock();
        if lines.total >= self.max {
            return Err(AcquireError::QueueFull { waiting: lines.total });
        }
        let line = match lines.by_key.get_mut(key) {
            Some(line) => line,
            None => lines.by_key.entry(key.into()).or_default(),
        };
        if line.waiting >= self.max_per_key {
            return Err(AcquireError::QueueFull { waiting: line.waiting });
        }
        line.waiting += 1;
        let front = Arc::clone(&line.front);
        lines.total += 1;
        Ok(InLine { waiting: self, key, front })
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
