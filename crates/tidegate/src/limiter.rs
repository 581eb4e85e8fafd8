//! The limiter: limits over a store, and every operation on them.

use std::borrow::Cow;
use std::future::{Future, IntoFuture};
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};
use std::time::Duration;

use crate::http::headers::{self, Families};
use tidegate_core::{Algorithm, Decision, Id, Limits, Op, Source};
use tokio::runtime::Handle;

use crate::acquire::{Acquire, AcquireError, Waiting};
use crate::clock::Clock;
use crate::held::{Lease, Reservation, Undo};
use crate::memory::Memory;
use crate::resilience::{OnFailure, Policy, Resilient, SyncMode};
use crate::retries::Retries;
use crate::store::{Charge, Check, Scope, Store, StoreError, Subject, distinct};

/// Decides whether requests may pass. Cheap to clone; clones share everything.
///
/// ```
/// use tidegate::Limiter;
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
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
    shared: Arc<Shared>,
}

/// What all clones share, also those with other limits.
pub(crate) struct Shared {
    pub(crate) backend: Backend,
    pub(crate) clock: Clock,
    pub(crate) waiting: Waiting,
    pub(crate) ids: Ids,
    pub(crate) retries: Retries,
    runtime: OnceLock<Handle>,
}

/// Where decisions come from. The memory store is called directly, without the port's boxed future.
pub(crate) enum Backend {
    Memory(Memory),
    Other(Box<dyn Store>),
}

impl Backend {
    pub(crate) async fn decide(&self, check: &Check<'_>) -> Result<Decision, StoreError> {
        match self {
            Backend::Memory(memory) => Ok(memory.decide(check)?),
            Backend::Other(store) => store.decide(check).await,
        }
    }
}

/// Numbers that no two calls share, unlikely to be guessed and never zero.
pub(crate) struct Ids {
    secret: RandomState,
    next: AtomicU64,
}

impl Ids {
    pub(crate) fn next(&self) -> Id {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Id(self.secret.hash_one(number) | 1)
    }
}

/// Settings of a [`Limiter`].
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
    /// Gives the limits a name. Their state is then known by it: limits that change keep what was
    /// used, and keys of limits with different names never meet. Without a name, all limiters over
    /// one store share their keys.
    pub fn name(mut self, name: impl Into<Arc<str>>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Keeps state in this memory store, and judges by its clock.
    pub fn memory(mut self, memory: Memory) -> Self {
        let clock = memory.clock().clone();
        self.backend = Some((Backend::Memory(memory), clock));
        self
    }

    /// Keeps state in any store; `clock` says how long to wait in [`acquire`](Limiter::acquire),
    /// the store judges by its own.
    pub fn store(mut self, store: impl Store, clock: impl Into<Clock>) -> Self {
        self.backend = Some((Backend::Other(Box::new(store)), clock.into()));
        self
    }

    /// Keeps state in Redis or Valkey, whose clock judges.
    #[cfg(feature = "redis")]
    pub fn redis(self, redis: crate::redis::Redis) -> Self {
        self.store(redis, crate::SystemClock::new())
    }

    /// Keeps state in a remote store, with [`Resilient`] before it: an answer in time, whatever the
    /// store does.
    pub fn resilient(self, resilient: Resilient) -> Self {
        let clock = resilient.clock().clone();
        self.store(resilient, clock)
    }

    /// How near to a remote store its limits are decided. Only [`Resilient`] minds it.
    pub fn sync(mut self, sync: SyncMode) -> Self {
        self.policy.sync = sync;
        self
    }

    /// What happens when a remote store does not answer. Only [`Resilient`] minds it; without it
    /// there is an error.
    pub fn on_failure(mut self, policy: OnFailure) -> Self {
        self.policy.on_failure = Some(policy);
        self
    }

    /// How many calls of `acquire` may wait at once, over all keys; 10 000 unless told otherwise.
    pub fn max_waiting(mut self, calls: usize) -> Self {
        self.max_waiting = calls;
        self
    }

    /// How many calls of `acquire` may wait at once for one key; 1 000 unless told otherwise.
    pub fn max_waiting_per_key(mut self, calls: usize) -> Self {
        self.max_waiting_per_key = calls;
        self
    }

    /// The limiter.
    pub fn build(self) -> Limiter {
        let ids = Ids { secret: RandomState::new(), next: AtomicU64::new(0) };
        let waiting = Waiting::new(self.max_waiting, self.max_waiting_per_key);
        let (backend, clock) = self.backend.unwrap_or_else(|| {
            let memory = Memory::new();
            let clock = memory.clock().clone();
            (Backend::Memory(memory), clock)
        });
        let runtime = Handle::try_current().map_or_else(|_| OnceLock::new(), OnceLock::from);
        let shared = Shared { backend, clock, waiting, ids, retries: Retries::default(), runtime };
        Limiter {
            limits: self.limits,
            name: self.name,
            policy: self.policy,
            shared: Arc::new(shared),
        }
    }
}

impl Limiter {
    /// A limiter in memory, on the machine's clock.
    pub fn new(limits: Limits) -> Self {
        Self::builder(limits).build()
    }

    /// For other settings.
    pub fn builder(limits: Limits) -> LimiterBuilder {
        LimiterBuilder {
            limits,
            name: None,
            policy: Policy::default(),
            backend: None,
            max_waiting: 10_000,
            max_waiting_per_key: 1_000,
        }
    }

    /// The same store under other limits: for tiers, or for one customer. A key that moves from one
    /// to the other keeps what it used, limit by limit, as far as the algorithms are the same or
    /// the limiter has a name.
    pub fn with_limits(&self, limits: Limits) -> Limiter {
        Limiter { limits, ..self.clone() }
    }

    /// The limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes 1, or another [`cost`](Ask::cost), if all limits have room for it.
    pub fn check<'a, K: AsRef<[u8]> + ?Sized>(&'a self, key: &'a K) -> Ask<'a> {
        self.ask(Op::Check, key.as_ref(), 1)
    }

    /// Says what [`check`](Limiter::check) would, and takes nothing.
    pub fn peek<'a, K: AsRef<[u8]> + ?Sized>(&'a self, key: &'a K) -> Ask<'a> {
        self.ask(Op::Peek, key.as_ref(), 1)
    }

    /// Takes as much of `units` as there is; [`granted`](Decision::granted) says how much that was.
    pub fn take_up_to<'a, K: AsRef<[u8]> + ?Sized>(&'a self, key: &'a K, units: u64) -> Ask<'a> {
        self.ask(Op::Take, key.as_ref(), units)
    }

    /// Takes `units` even if there are not so many left, down to the limit's debt below empty: for
    /// what has happened already.
    pub fn debit<'a, K: AsRef<[u8]> + ?Sized>(&'a self, key: &'a K, units: u64) -> Ask<'a> {
        self.ask(Op::Debit, key.as_ref(), units)
    }

    /// Gives `units` back, the newest first, never beyond full.
    pub fn refund<'a, K: AsRef<[u8]> + ?Sized>(&'a self, key: &'a K, units: u64) -> Ask<'a> {
        self.ask(Op::Refund, key.as_ref(), units)
    }

    /// Forgets everything the key has used.
    pub fn reset<'a, K: AsRef<[u8]> + ?Sized>(&'a self, key: &'a K) -> Ask<'a> {
        self.ask(Op::Reset, key.as_ref(), 0)
    }

    /// Takes an estimate now, to be [settled](Reservation::settle) when the true cost is known:
    /// tokens, bytes, time.
    ///
    /// The last 64 reservations of a key are remembered. Settling an older one gives nothing back;
    /// what is missing is taken.
    ///
    /// # Errors
    /// If the store has no answer.
    pub async fn reserve<K: AsRef<[u8]> + ?Sized>(
        &self,
        key: &K,
        estimate: u64,
    ) -> Result<Reservation, StoreError> {
        self.reserve_all(self.check_of(Op::Check, key.as_ref(), estimate)).await
    }

    /// The same over several keys and limits, each with an estimate of its own: one request and
    /// four thousand tokens, say. To be settled with [`settle_each`](Reservation::settle_each).
    ///
    /// # Errors
    /// If the check is not valid or the store has no answer.
    pub async fn reserve_all(&self, check: Check<'_>) -> Result<Reservation, StoreError> {
        let check = check.into_op(Op::Check).with_id(self.shared.ids.next()).into_owned();
        let decision = self.shared.decide_or_undo(&check).await?;
        Ok(Reservation::new(Arc::clone(&self.shared), check, decision))
    }

    /// Takes a lease under a `concurrent` limit; it ends when it is [released](Lease::release),
    /// dropped or its ttl is over. Other limits beside it are charged as by
    /// [`check`](Limiter::check), and stay so.
    ///
    /// # Errors
    /// If the store has no answer.
    pub async fn lease<K: AsRef<[u8]> + ?Sized>(&self, key: &K) -> Result<Lease, StoreError> {
        let (id, key) = (self.shared.ids.next(), key.as_ref().to_vec());
        let decision =
            self.shared.decide_or_undo(&self.check_of(Op::Check, &key, 1).with_id(id)).await?;
        Ok(Lease::new(self.clone(), key, id, decision))
    }

    /// Waits for a lease under a `concurrent` limit, at most `max_wait`: until one is released, or
    /// its ttl is over.
    ///
    /// # Errors
    /// If there is none in time, too many wait already, or the store has no answer.
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

    /// The headers that tell a client about a decision of this limiter; see [`headers`]. Each limit
    /// goes by its notation.
    pub fn headers(&self, decision: &Decision, families: Families) -> Vec<(&'static str, String)> {
        let limits = distinct(&self.limits);
        let names: Vec<String> = limits.iter().map(ToString::to_string).collect();
        let limits: Vec<_> = names.iter().map(String::as_str).zip(limits).collect();
        headers::of(decision, &limits, families)
    }

    /// Waits until the key may pass, at most `max_wait`: in the order of arrival, and not at all if
    /// it would be in vain.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::Limiter;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
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

    /// Decides a check over several keys and limits, all or nothing. Checks without an id that need
    /// one, because a limit is `concurrent`, are given one.
    ///
    /// # Errors
    /// If the check is not valid or the store has no answer.
    pub async fn decide(&self, check: Check<'_>) -> Result<Decision, StoreError> {
        self.shared.decide(check).await
    }

    /// Ends leases that were granted by `source` under an id which no other caller uses, without
    /// waiting for the store: at once in memory, in the background elsewhere. If the store granted
    /// them and does not answer, it is called again, at most until their ttl is over.
    #[doc(hidden)]
    pub fn release(&self, leases: Check<'_>, source: Source) {
        self.shared.release(leases.into_owned(), source);
    }

    fn ask<'a>(&'a self, op: Op, key: &'a [u8], cost: u64) -> Ask<'a> {
        Ask { limiter: self, op, key, cost, id: None }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// A check of `key` under this limiter's limits.
    pub(crate) fn check_of<'a>(&'a self, op: Op, key: &'a [u8], cost: u64) -> Check<'a> {
        let scope = match &self.name {
            Some(name) => Scope::Rule(Cow::Borrowed(name)),
            None => Scope::AdHoc,
        };
        let subject = Subject { scope, key: Cow::Borrowed(key) };
        Check::of(op).policy(self.policy).charge_subject(subject, &self.limits, cost)
    }
}

impl Shared {
    pub(crate) async fn decide(self: &Arc<Self>, check: Check<'_>) -> Result<Decision, StoreError> {
        let takes = matches!(check.op(), Op::Check | Op::Take | Op::Debit | Op::Book { .. });
        let is_lease =
            |charge: &Charge<'_>| matches!(charge.limit.algorithm(), Algorithm::Concurrent(_));
        let needs_id = takes && check.id().is_none() && check.charges().iter().any(is_lease);
        if needs_id {
            return self.decide_or_undo(&check.with_id(self.ids.next())).await;
        }
        let decision = self.backend.decide(&check).await?;
        self.wake(&check);
        Ok(decision)
    }

    /// Decides a check under an id of its own. If nobody learns the answer, because the caller has
    /// gone or the store was not heard of again, what it may have taken is given back: nobody else
    /// knows the id.
    pub(crate) async fn decide_or_undo(
        self: &Arc<Self>,
        check: &Check<'_>,
    ) -> Result<Decision, StoreError> {
        if let Backend::Memory(memory) = &self.backend {
            return Ok(memory.decide(check)?); // answers at once
        }
        if self.runtime.get().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            let _ = self.runtime.set(runtime);
        }
        let undo = Undo::arm(self, check.clone().into_owned().into_op(Op::Refund));
        match self.backend.decide(check).await {
            Err(StoreError::Unavailable(error)) => Err(StoreError::Unavailable(error)), // and `undo` is dropped
            // This node denied it after the store did not answer, which may have taken it.
            Ok(decision) if !decision.allowed() && decision.source() == Source::Fallback => {
                Ok(decision)
            }
            answered => {
                undo.disarm();
                answered
            }
        }
    }

    /// Where work nobody waits for can run: the caller's runtime, or else the one last decided on.
    fn runtime(&self) -> Option<Handle> {
        Handle::try_current().ok().or_else(|| self.runtime.get().cloned())
    }

    /// Makes a call that nobody waits for: at once in memory, in the background elsewhere.
    pub(crate) fn give_up(self: &Arc<Self>, check: Check<'static>) {
        self.make(check, false);
    }

    /// Ends leases. If the store granted them and does not answer now, the call is retried.
    pub(crate) fn release(self: &Arc<Self>, leases: Check<'static>, source: Source) {
        self.make(leases.into_op(Op::Release), source != Source::Fallback);
    }

    fn make(self: &Arc<Self>, check: Check<'static>, retries: bool) {
        if let Backend::Memory(memory) = &self.backend {
            let _ = memory.decide(&check);
            return self.wake(&check);
        }
        let Some(runtime) = self.runtime() else { return };
        let shared = Arc::clone(self);
        let mut making = Box::pin(async move {
            let answer = shared.backend.decide(&check).await;
            shared.wake(&check);
            if retries && matches!(answer, Err(StoreError::Unavailable(_))) {
                shared.retry_later(check);
            }
        });
        // Polled here first, the call is on its way before what this thread does next, such as to
        // send the end of a response that held a lease. A store that panics must not do so while
        // this thread panics already.
        let is_done = !std::thread::panicking() && {
            let _entered = runtime.enter();
            making.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
        };
        if !is_done {
            runtime.spawn(making);
        }
    }

    /// Gives a booked place back, and with it those before it that were left earlier and now have
    /// nobody behind them.
    pub(crate) fn leave_place(self: &Arc<Self>, unbook: Check<'static>) {
        match &self.backend {
            Backend::Memory(memory) => {
                let mut next = Some(unbook);
                while let Some(unbook) = next {
                    let Ok(decision) = memory.decide(&unbook) else { return };
                    next = self.waiting.left(unbook, &decision);
                }
            }
            Backend::Other(_) => {
                if let Some(runtime) = self.runtime() {
                    let shared = Arc::clone(self);
                    runtime.spawn(async move {
                        let mut next = Some(unbook);
                        while let Some(unbook) = next {
                            let Ok(decision) = shared.backend.decide(&unbook).await else { return };
                            next = shared.waiting.left(unbook, &decision);
                        }
                    });
                }
            }
        }
    }

    /// Tells those who wait that something may have been given back.
    pub(crate) fn wake(&self, check: &Check<'_>) {
        if matches!(check.op(), Op::Refund | Op::Reset | Op::Settle | Op::Release) {
            check.charges().iter().for_each(|charge| self.waiting.wake(&charge.subject.key));
        }
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

/// A question to a [`Limiter`]; `.await` asks it.
#[derive(Debug)]
#[must_use = "nothing is decided until it is awaited"]
pub struct Ask<'a> {
    limiter: &'a Limiter,
    op: Op,
    key: &'a [u8],
    cost: u64,
    id: Option<Id>,
}

impl Ask<'_> {
    /// How much it costs, instead of what the operation was given: 1 for a check. A cost of 0 only
    /// looks.
    pub fn cost(mut self, units: u64) -> Self {
        self.cost = units;
        self
    }

    /// Under which id. A check is not taken twice under one id; a refund gives back only what the
    /// charge of that id still weighs.
    pub fn id(mut self, id: Id) -> Self {
        self.id = Some(id);
        self
    }
}

impl<'a> IntoFuture for Ask<'a> {
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
