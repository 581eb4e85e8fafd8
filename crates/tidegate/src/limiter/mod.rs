//! The limiter: limits over a store, and every operation on them.

mod acquire;
mod handle;
mod held;
mod retries;

use std::borrow::Cow;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::{Decision, Id, Limits, Op};

use crate::clock::Clock;
use crate::http::headers::{self, HeaderFamilies};
use crate::memory::Memory;
use crate::resilience::{OnFailure, Policy, Resilient, SyncMode};
use crate::store::{Check, Scope, Store, StoreError, Subject, distinct};
use acquire::Queues;
pub use acquire::{Acquire, AcquireError, Pass};
pub use handle::LeaseReleaser;
pub(crate) use handle::{Backend, StoreHandle};
use handle::{MAX_WAITING, MAX_WAITING_PER_KEY};
pub use held::{Lease, Reservation};

/// Limits over a store: decides whether a key is allowed.
///
/// Cloning is cheap; clones share the store, and everything else but the limits.
///
/// ```
/// use tidegate::Limiter;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new("10/s; 120/m".parse()?);
/// let decision = limiter.check("user:7").await?;
/// if decision.allowed() {
///     // serve the request
/// } else {
///     println!("try again in {:?}", decision.retry_after());
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Limiter {
    limits: Limits,
    name: Option<Arc<str>>,
    policy: Policy,
    store: Arc<StoreHandle>,
}

/// Settings of a [`Limiter`].
///
/// ```
/// use tidegate::{Limiter, Memory};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = Memory::builder().max_keys(100_000).build();
/// let limiter = Limiter::builder("10/s".parse()?).name("logins").memory(memory).build();
/// # Ok(()) }
/// ```
#[must_use = "there is no limiter until `build` is called"]
pub struct LimiterBuilder {
    limits: Limits,
    name: Option<Arc<str>>,
    policy: Policy,
    backend: Option<(Backend, Clock)>,
    max_waiting: usize,
    max_waiting_per_key: usize,
}

impl LimiterBuilder {
    /// Gives the limits a name, which becomes part of the identity of their state.
    ///
    /// Limits that change keep the usage under their name, and keys of limits with different names
    /// are independent. Without a name, all limiters over one store share their keys.
    pub fn name(mut self, name: impl Into<Arc<str>>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Keeps state in this memory store and uses its clock.
    pub fn memory(mut self, memory: Memory) -> Self {
        let clock = memory.clock().clone();
        self.backend = Some((Backend::Memory(memory), clock));
        self
    }

    /// Keeps state in any store.
    ///
    /// The store decides by its own clock; `clock` measures the waits of
    /// [`acquire`](Limiter::acquire).
    pub fn store(mut self, store: impl Store, clock: impl Into<Clock>) -> Self {
        self.backend = Some((Backend::Other(Box::new(store)), clock.into()));
        self
    }

    /// Keeps state in Redis or Valkey, which decides by its own clock.
    #[cfg(feature = "redis")]
    pub fn redis(self, redis: crate::redis::Redis) -> Self {
        self.store(redis, crate::SystemClock::new())
    }

    /// Keeps state in a remote store behind the resilience layer, which decides in time even if the
    /// store does not answer.
    pub fn resilient(self, resilient: Resilient) -> Self {
        let clock = resilient.clock().clone();
        self.store(resilient, clock)
    }

    /// Sets whether each check goes to the remote store. Only [`Resilient`] uses it.
    pub fn sync(mut self, sync: SyncMode) -> Self {
        self.policy.sync = sync;
        self
    }

    /// Sets what happens when a remote store does not answer. Only [`Resilient`] uses it; without
    /// that layer a check then returns an error.
    pub fn on_failure(mut self, policy: OnFailure) -> Self {
        self.policy.on_failure = Some(policy);
        self
    }

    /// Sets how many calls of `acquire` may wait at the same time, over all keys; the default is
    /// 10 000.
    pub fn max_waiting(mut self, calls: usize) -> Self {
        self.max_waiting = calls;
        self
    }

    /// Sets how many calls of `acquire` may wait at the same time for one key; the default is
    /// 1 000.
    pub fn max_waiting_per_key(mut self, calls: usize) -> Self {
        self.max_waiting_per_key = calls;
        self
    }

    /// Builds the limiter.
    pub fn build(self) -> Limiter {
        let queues = Queues::new(self.max_waiting, self.max_waiting_per_key);
        let (backend, clock) = self.backend.unwrap_or_else(|| {
            let memory = Memory::new();
            let clock = memory.clock().clone();
            (Backend::Memory(memory), clock)
        });
        Limiter {
            limits: self.limits,
            name: self.name,
            policy: self.policy,
            store: Arc::new(StoreHandle::with_queues(backend, clock, queues)),
        }
    }
}

impl std::fmt::Debug for LimiterBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LimiterBuilder")
            .field("limits", &self.limits)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Limiter {
    /// Creates a limiter in memory, on the system's clock.
    pub fn new(limits: Limits) -> Self {
        Self::builder(limits).build()
    }

    /// Starts a limiter with other settings.
    pub fn builder(limits: Limits) -> LimiterBuilder {
        LimiterBuilder {
            limits,
            name: None,
            policy: Policy::default(),
            backend: None,
            max_waiting: MAX_WAITING,
            max_waiting_per_key: MAX_WAITING_PER_KEY,
        }
    }

    /// Returns a limiter with other limits over the same store: for tiers, or for one customer.
    ///
    /// A key that moves from one limiter to the other keeps its usage, limit by limit, where the
    /// algorithms are the same or the limiter has a name.
    pub fn with_limits(&self, limits: Limits) -> Limiter {
        Limiter { limits, ..self.clone() }
    }

    /// The limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes one unit, or another [`cost`](LimiterCall::cost), if all limits have room for it.
    pub fn check<'a, K: AsRef<[u8]> + ?Sized>(&'a self, key: &'a K) -> LimiterCall<'a> {
        self.call(Op::Check, key.as_ref(), 1)
    }

    /// Decides like [`check`](Limiter::check), and takes nothing.
    pub fn peek<'a, K: AsRef<[u8]> + ?Sized>(&'a self, key: &'a K) -> LimiterCall<'a> {
        self.call(Op::Peek, key.as_ref(), 1)
    }

    /// Takes as many of `units` as all limits have room for; [`Decision::granted`] is the number.
    pub fn take_up_to<'a, K: AsRef<[u8]> + ?Sized>(
        &'a self,
        key: &'a K,
        units: u64,
    ) -> LimiterCall<'a> {
        self.call(Op::Take, key.as_ref(), units)
    }

    /// Takes `units` even if fewer are left, down to the limit's debt: for work that is done
    /// already.
    pub fn debit<'a, K: AsRef<[u8]> + ?Sized>(&'a self, key: &'a K, units: u64) -> LimiterCall<'a> {
        self.call(Op::Debit, key.as_ref(), units)
    }

    /// Gives `units` back, the newest first, at most until the key is unused.
    pub fn refund<'a, K: AsRef<[u8]> + ?Sized>(
        &'a self,
        key: &'a K,
        units: u64,
    ) -> LimiterCall<'a> {
        self.call(Op::Refund, key.as_ref(), units)
    }

    /// Forgets all usage of the key.
    pub fn reset<'a, K: AsRef<[u8]> + ?Sized>(&'a self, key: &'a K) -> LimiterCall<'a> {
        self.call(Op::Reset, key.as_ref(), 0)
    }

    /// Charges an estimate, to be [settled](Reservation::settle) when the true cost is known:
    /// tokens, bytes, time.
    ///
    /// The store remembers the last 64 reservations of a key. Settling an older one gives nothing
    /// back, but charges what is missing.
    ///
    /// # Errors
    /// If the store does not answer.
    pub async fn reserve<K: AsRef<[u8]> + ?Sized>(
        &self,
        key: &K,
        estimate: u64,
    ) -> Result<Reservation, StoreError> {
        self.reserve_all(self.check_of(Op::Check, key.as_ref(), estimate)).await
    }

    /// Charges estimates over several keys and limits, for example one request and 4000 tokens, to
    /// be settled with [`settle_each`](Reservation::settle_each).
    ///
    /// # Errors
    /// If the check is not valid or the store does not answer.
    pub async fn reserve_all(&self, check: Check<'_>) -> Result<Reservation, StoreError> {
        let check = check.into_op(Op::Check).with_id(self.store.next_id()).into_owned();
        let decision = self.store.decide_or_undo(&check).await?;
        Ok(Reservation::new(Arc::clone(&self.store), check, decision))
    }

    /// Takes a lease under a `concurrent` limit.
    ///
    /// The lease ends when it is [released](Lease::release) or dropped, or at its ttl. Other limits
    /// beside it are charged as by [`check`](Limiter::check) and stay charged.
    ///
    /// # Errors
    /// If the store does not answer.
    pub async fn lease<K: AsRef<[u8]> + ?Sized>(&self, key: &K) -> Result<Lease, StoreError> {
        let (id, key) = (self.store.next_id(), key.as_ref().to_vec());
        let decision =
            self.store.decide_or_undo(&self.check_of(Op::Check, &key, 1).with_id(id)).await?;
        Ok(Lease::new(self.clone(), key, id, decision))
    }

    /// Waits for a lease under a `concurrent` limit, at most `max_wait`.
    ///
    /// # Errors
    /// If no lease is free in time, too many calls wait, or the store does not answer.
    pub async fn acquire_lease<K: AsRef<[u8]> + ?Sized>(
        &self,
        key: &K,
        max_wait: Duration,
    ) -> Result<Lease, AcquireError> {
        let key = key.as_ref();
        let decision = Acquire::new(self, key, max_wait).await?.into_decision();
        let id = decision.id().unwrap_or(Id::NONE);
        Ok(Lease::new(self.clone(), key.to_vec(), id, decision))
    }

    /// The response headers for a decision of this limiter; see [`headers`]. Each limit is named by
    /// its notation.
    pub fn headers(
        &self,
        decision: &Decision,
        families: HeaderFamilies,
    ) -> Vec<(&'static str, String)> {
        let limits = distinct(&self.limits);
        let names: Vec<String> = limits.iter().map(ToString::to_string).collect();
        let limits: Vec<_> = names.iter().map(String::as_str).zip(limits).collect();
        headers::of(decision, &limits, families)
    }

    /// Waits until the key is allowed, at most `max_wait` and in order of arrival. If the wait
    /// would be longer, it fails without waiting.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::Limiter;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new("100/s burst 1".parse()?);
    /// for _ in 0..3 {
    ///     limiter.acquire("job", Duration::from_secs(1)).await?; // one every 10 ms
    /// }
    /// # Ok(()) }
    /// ```
    pub fn acquire<'a, K: AsRef<[u8]> + ?Sized>(
        &'a self,
        key: &'a K,
        max_wait: Duration,
    ) -> Acquire<'a> {
        Acquire::new(self, key.as_ref(), max_wait)
    }

    /// Decides a check over several keys and limits, all or nothing. A check without an id that
    /// takes a lease gets an id.
    ///
    /// # Errors
    /// If the check is not valid or the store does not answer.
    pub async fn decide(&self, check: Check<'_>) -> Result<Decision, StoreError> {
        self.store.decide(check).await
    }

    fn call<'a>(&'a self, op: Op, key: &'a [u8], cost: u64) -> LimiterCall<'a> {
        LimiterCall { limiter: self, op, key, cost, id: None }
    }

    fn store(&self) -> &Arc<StoreHandle> {
        &self.store
    }

    /// A check of `key` under this limiter's limits.
    fn check_of<'a>(&'a self, op: Op, key: &'a [u8], cost: u64) -> Check<'a> {
        let scope = match &self.name {
            Some(name) => Scope::Rule(Cow::Borrowed(name)),
            None => Scope::AdHoc,
        };
        let subject = Subject { scope, key: Cow::Borrowed(key) };
        Check::of(op).policy(self.policy).charge_subject(subject, &self.limits, cost)
    }
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Limiter")
            .field("limits", &self.limits)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A call of a [`Limiter`] with its options; `.await` makes it.
///
/// ```
/// use tidegate::{Id, Limiter};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new("10/s".parse()?);
/// let upload = Id(1234);
/// assert_eq!(limiter.check("user:7").cost(3).id(upload).await?.remaining(), 7);
/// // The same id again, after a timeout for example: charged once.
/// assert_eq!(limiter.check("user:7").cost(3).id(upload).await?.remaining(), 7);
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "nothing is decided until it is awaited"]
pub struct LimiterCall<'a> {
    limiter: &'a Limiter,
    op: Op,
    key: &'a [u8],
    cost: u64,
    id: Option<Id>,
}

impl LimiterCall<'_> {
    /// Sets the cost. A check of cost 0 takes nothing.
    pub fn cost(mut self, units: u64) -> Self {
        self.cost = units;
        self
    }

    /// Sets an id. A check with the id of an earlier one is not charged again; a refund with an id
    /// gives back at most what the check of that id has left in use.
    pub fn id(mut self, id: Id) -> Self {
        self.id = Some(id);
        self
    }
}

impl<'a> IntoFuture for LimiterCall<'a> {
    type Output = Result<Decision, StoreError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let mut check = self.limiter.check_of(self.op, self.key, self.cost);
            if let Some(id) = self.id {
                check = check.with_id(id);
            }
            self.limiter.decide(check).await
        })
    }
}
