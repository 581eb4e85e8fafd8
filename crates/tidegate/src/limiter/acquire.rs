//! Waiting until a key is allowed: in order of arrival, bounded, and only if the wait can succeed.
//!
//! Under a single bucket a call books its place: the bucket is charged now for the moment at which
//! it has room, and the call sleeps until then. Places are kept in the store, so the order holds
//! over all processes that share it. Under any other limits the calls of this process form a queue
//! per key. The call at the front checks, sleeps for the time in the denial or until units are
//! given back in this process, and checks again; the calls behind it wait for it.

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

use super::Limiter;
use super::held::BookedPlace;
use crate::store::{Check, StoreError};

/// The interval at which a waiting call looks for leases released by another limiter or process.
const POLL: Duration = Duration::from_millis(50);

/// Why `acquire` returned no pass.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{AcquireError, Limiter};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new("1/h".parse()?);
/// limiter.acquire("job", Duration::ZERO).await?;
/// match limiter.acquire("job", Duration::from_secs(1)).await {
///     Err(AcquireError::TooLong(decision)) => println!("room in {:?}", decision.retry_after()),
///     other => panic!("{other:?}"),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// The wait would be longer than `max_wait`, or without end. The decision has the wait.
    #[error("the wait would be longer than allowed")]
    TooLong(Decision),
    /// The maximum number of calls is waiting already.
    #[error("{waiting} calls are waiting already")]
    QueueFull {
        /// The number of calls that wait.
        waiting: usize,
    },
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The result of a successful [`acquire`](Limiter::acquire).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = tidegate::Limiter::new("10/s".parse()?);
/// let granted = limiter.acquire("job", std::time::Duration::from_secs(1)).await?;
/// assert!(granted.decision().allowed());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Pass(Decision);

impl Pass {
    /// The decision that allowed it.
    pub fn decision(&self) -> &Decision {
        &self.0
    }

    /// The decision that allowed it, by value.
    pub fn into_decision(self) -> Decision {
        self.0
    }
}

/// A call of [`acquire`](Limiter::acquire); `.await` starts it.
///
/// ```
/// # use std::time::Duration;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = tidegate::Limiter::new("10/s".parse()?);
/// limiter.acquire("upload", Duration::from_secs(1)).cost(5).await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "nothing happens until it is awaited"]
pub struct Acquire<'a> {
    limiter: &'a Limiter,
    key: &'a [u8],
    cost: u64,
    max_wait: Duration,
}

impl<'a> Acquire<'a> {
    pub(super) fn new(limiter: &'a Limiter, key: &'a [u8], max_wait: Duration) -> Self {
        Acquire { limiter, key, cost: 1, max_wait }
    }

    /// Sets the cost; the default is 1.
    pub fn cost(mut self, units: u64) -> Self {
        self.cost = units;
        self
    }

    async fn wait(self) -> Result<Pass, AcquireError> {
        let store = self.limiter.store();
        let deadline = store.clock.now().after(self.max_wait);
        let entry = store.queues.join(self.key)?;
        match self.limiter.limits().as_slice() {
            [limit] if matches!(limit.algorithm(), Algorithm::Bucket(_)) => {
                self.book().await.map(Pass)
            }
            _ => self.wait_in_queue(&entry, deadline).await.map(Pass),
        }
    }

    /// Under a single bucket: charges now and sleeps until the booked time.
    async fn book(&self) -> Result<Decision, AcquireError> {
        let store = self.limiter.store();
        let max_wait_us = u64::try_from(self.max_wait.as_micros()).unwrap_or(u64::MAX);
        let check = self.limiter.check_of(Op::Book { max_wait_us }, self.key, self.cost);
        let booked = store.decide(check).await?;
        // The store decided earlier than this, so the sleep never ends too early.
        let answered_at = store.clock.now();
        if !booked.allowed() {
            return Err(AcquireError::TooLong(booked));
        }
        let wait_us = booked.retry().micros().unwrap_or(0);
        // If this future is dropped while it sleeps, the place is given back.
        let place = BookedPlace::new(self.limiter, self.key, self.cost, booked.clone());
        if wait_us > 0 {
            store.clock.sleep_until(answered_at.after_micros(wait_us)).await;
        }
        Ok(place.into_used().unwrap_or(booked))
    }

    /// Under any other limits: the call at the front checks, the others wait behind it.
    async fn wait_in_queue(
        &self,
        entry: &QueueEntry<'_>,
        deadline: Timestamp,
    ) -> Result<Decision, AcquireError> {
        let store = self.limiter.store();
        let _lock = if let Ok(lock) = entry.front.lock.try_lock() {
            lock
        } else {
            // The call at the front sleeps until then: a call with an earlier deadline fails now.
            let front_wakes = Timestamp::from_micros(entry.front.wakes_us.load(Ordering::Acquire));
            if front_wakes > deadline {
                return Err(AcquireError::TooLong(self.peek().await?));
            }
            match before(entry.front.lock.lock(), store.clock.sleep_until(deadline)).await {
                Some(lock) => lock,
                None => return Err(AcquireError::TooLong(self.peek().await?)),
            }
        };
        // Declared after the lock, so dropped before it.
        let front = FrontGuard(&entry.front);
        loop {
            // Registered before the check, so that no wake-up is missed.
            let freed = front.0.freed.notified();
            let check = self.limiter.check_of(Op::Check, self.key, self.cost);
            let leases: Vec<bool> =
                check.charges().iter().map(|charge| is_lease(charge.limit.algorithm())).collect();
            let checked_at = store.clock.now();
            let decision = store.decide(check).await?;
            if decision.allowed() {
                return Ok(decision);
            }
            let Retry::After(micros) = decision.retry() else {
                return Err(AcquireError::TooLong(decision));
            };
            // A lease ends at its ttl at the latest, perhaps sooner. The waits of the other limits
            // are certain.
            let others = decision.verdicts().iter().zip(&leases).filter(|(_, lease)| !**lease);
            let known_us =
                others.filter_map(|(verdict, _)| verdict.retry.micros()).max().unwrap_or(0);
            let not_before = checked_at.after_micros(known_us);
            if not_before > deadline || checked_at >= deadline {
                return Err(AcquireError::TooLong(decision));
            }
            front.0.wakes_us.store(not_before.as_micros(), Ordering::Release);
            let mut wakes = checked_at.after_micros(micros).min(deadline);
            if leases.contains(&true) {
                // The release of a lease by another limiter or process notifies no task here.
                wakes = wakes.min(not_before.max(checked_at.after(POLL)));
            }
            before(freed, store.clock.sleep_until(wakes)).await;
        }
    }

    async fn peek(&self) -> Result<Decision, StoreError> {
        self.limiter.store().decide(self.limiter.check_of(Op::Peek, self.key, self.cost)).await
    }
}

fn is_lease(algorithm: &Algorithm) -> bool {
    matches!(algorithm, Algorithm::Concurrent(_))
}

/// The output of `future`, or nothing if `deadline` completes first.
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

/// The queues of waiting calls, by key. Keys without waiting calls have none.
#[derive(Debug)]
pub(super) struct Queues {
    state: Mutex<QueuesState>,
    max: usize,
    max_per_key: usize,
}

#[derive(Debug, Default)]
struct QueuesState {
    by_key: HashMap<Box<[u8]>, Queue>,
    total: usize,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: usize,
    front: Arc<QueueFront>,
    /// Booked places that were given up while later places were booked.
    left: Vec<Check<'static>>,
}

/// The front of a queue. The call that holds the lock is at the front; the lock is fair.
#[derive(Debug, Default)]
struct QueueFront {
    lock: tokio::sync::Mutex<()>,
    /// The earliest time at which the call at the front can be allowed; zero if it does not sleep.
    wakes_us: AtomicU64,
    /// Notified when units are given back.
    freed: Notify,
}

/// Resets the front of a queue when the call at the front ends.
struct FrontGuard<'a>(&'a QueueFront);

impl Drop for FrontGuard<'_> {
    fn drop(&mut self) {
        self.0.wakes_us.store(0, Ordering::Release);
    }
}

impl Queues {
    pub(super) fn new(max: usize, max_per_key: usize) -> Self {
        Queues { state: Mutex::default(), max, max_per_key }
    }

    fn join<'a>(&'a self, key: &'a [u8]) -> Result<QueueEntry<'a>, AcquireError> {
        let mut queues = self.state.lock();
        if queues.total >= self.max {
            return Err(AcquireError::QueueFull { waiting: queues.total });
        }
        let waiting = queues.by_key.get(key).map_or(0, |queue| queue.waiting);
        if waiting >= self.max_per_key {
            return Err(AcquireError::QueueFull { waiting });
        }
        let queue = match queues.by_key.get_mut(key) {
            Some(queue) => queue,
            None => queues.by_key.entry(key.into()).or_default(),
        };
        queue.waiting += 1;
        let front = Arc::clone(&queue.front);
        queues.total += 1;
        Ok(QueueEntry { queues: self, key, front })
    }

    /// Records the result of `unbook`. If the place could not be given back, because later places
    /// are booked, it is remembered. If it was given back, returns the call that gives back the
    /// place before it, if that one was left, too.
    pub(super) fn leave(
        &self,
        unbook: Check<'static>,
        decision: &Decision,
    ) -> Option<Check<'static>> {
        let mut queues = self.state.lock();
        let queue = queues.by_key.get_mut(&*unbook.charges().first()?.subject.key)?;
        let idle_at = decision.at().after_micros(decision.binding().reset_after_us);
        if decision.granted() == 0 {
            let ahead = |left: &Check<'_>| match left.op() {
                Op::Unbook { idle_at } => idle_at > decision.at(),
                _ => false,
            };
            queue.left.retain(ahead);
            if queue.left.len() < self.max_per_key && ahead(&unbook) {
                queue.left.push(unbook);
            }
            return None;
        }
        let before = queue.left.iter().position(|left| left.op() == Op::Unbook { idle_at })?;
        Some(queue.left.swap_remove(before))
    }

    /// Makes the call at the front of the queue of `key` check again.
    pub(super) fn wake(&self, key: &[u8]) {
        if let Some(queue) = self.state.lock().by_key.get(key) {
            queue.front.freed.notify_waiters();
        }
    }
}

/// A waiting call; dropping it leaves the queue.
struct QueueEntry<'a> {
    queues: &'a Queues,
    key: &'a [u8],
    front: Arc<QueueFront>,
}

impl Drop for QueueEntry<'_> {
    fn drop(&mut self) {
        let mut queues = self.queues.state.lock();
        queues.total -= 1;
        if let Some(queue) = queues.by_key.get_mut(self.key) {
            queue.waiting -= 1;
            if queue.waiting == 0 {
                queues.by_key.remove(self.key);
            }
        }
    }
}
