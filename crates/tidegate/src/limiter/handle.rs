//! A store together with what its callers share: ids of calls, the queues of `acquire`, releases
//! that are retried, and a runtime for calls that no task waits for.

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};

use tidegate_core::{Algorithm, Decision, Id, Op, Source};
use tokio::runtime::Handle;

use super::acquire::Queues;
use super::held::UndoGuard;
use super::retries::Retries;
use crate::clock::Clock;
use crate::memory::Memory;
use crate::store::{Charge, Check, Store, StoreError};

/// The most calls of `acquire` that wait, over all keys, unless configured otherwise.
pub(super) const MAX_WAITING: usize = 10_000;
/// The most calls of `acquire` that wait for one key, unless configured otherwise.
pub(super) const MAX_WAITING_PER_KEY: usize = 1_000;

/// A store and what its callers share.
pub(crate) struct StoreHandle {
    pub(crate) backend: Backend,
    pub(crate) clock: Clock,
    pub(super) queues: Queues,
    pub(super) retries: Retries,
    ids: Ids,
    runtime: OnceLock<Handle>,
}

/// The store itself. The memory store is called directly, without the boxed future of [`Store`].
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

/// Ids that no two calls share. They are hard to guess and never zero.
struct Ids {
    secret: RandomState,
    next: AtomicU64,
}

impl Ids {
    fn next(&self) -> Id {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Id(self.secret.hash_one(number) | 1)
    }
}

impl StoreHandle {
    pub(crate) fn new(backend: Backend, clock: Clock) -> Self {
        Self::with_queues(backend, clock, Queues::new(MAX_WAITING, MAX_WAITING_PER_KEY))
    }

    pub(crate) fn of_memory(memory: Memory) -> Self {
        let clock = memory.clock().clone();
        Self::new(Backend::Memory(memory), clock)
    }

    pub(super) fn with_queues(backend: Backend, clock: Clock, queues: Queues) -> Self {
        let runtime = Handle::try_current().map_or_else(|_| OnceLock::new(), OnceLock::from);
        let ids = Ids { secret: RandomState::new(), next: AtomicU64::new(0) };
        StoreHandle { backend, clock, queues, retries: Retries::default(), ids, runtime }
    }

    pub(crate) fn next_id(&self) -> Id {
        self.ids.next()
    }

    /// Decides a check. A check without an id that takes a lease gets an id.
    pub(crate) async fn decide(self: &Arc<Self>, check: Check<'_>) -> Result<Decision, StoreError> {
        let takes = matches!(check.op(), Op::Check | Op::Take | Op::Debit | Op::Book { .. });
        let is_lease =
            |charge: &Charge<'_>| matches!(charge.limit.algorithm(), Algorithm::Concurrent(_));
        let needs_id = takes && check.id().is_none() && check.charges().iter().any(is_lease);
        if needs_id {
            return self.decide_or_undo(&check.with_id(self.next_id())).await;
        }
        let decision = self.backend.decide(&check).await?;
        self.wake(&check);
        Ok(decision)
    }

    /// Decides a check under an id of its own. If the decision reaches no caller, because the call
    /// was dropped or the store did not answer, the units it may have taken are refunded. That is
    /// safe because no other call has the id.
    pub(crate) async fn decide_or_undo(
        self: &Arc<Self>,
        check: &Check<'_>,
    ) -> Result<Decision, StoreError> {
        if let Backend::Memory(memory) = &self.backend {
            return Ok(memory.decide(check)?);
        }
        if self.runtime.get().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            let _ = self.runtime.set(runtime);
        }
        let undo = UndoGuard::arm(self, check.clone().into_owned().into_op(Op::Refund));
        match self.backend.decide(check).await {
            // `undo` is dropped and refunds.
            Err(StoreError::Unavailable(error)) => Err(StoreError::Unavailable(error)),
            // A local denial after the store did not answer: the store may have taken the units.
            Ok(decision) if !decision.allowed() && decision.source() == Source::Fallback => {
                Ok(decision)
            }
            answered => {
                undo.disarm();
                answered
            }
        }
    }

    /// The runtime for calls in the background: the caller's, or else the one last seen.
    fn runtime(&self) -> Option<Handle> {
        Handle::try_current().ok().or_else(|| self.runtime.get().cloned())
    }

    /// Makes a call that no task waits for: directly in memory, in the background elsewhere.
    pub(crate) fn call_in_background(self: &Arc<Self>, check: Check<'static>) {
        self.start(check, false);
    }

    /// Ends leases. If the store granted them and does not answer now, the call is retried.
    pub(crate) fn release(self: &Arc<Self>, leases: Check<'static>, source: Source) {
        self.start(leases.into_op(Op::Release), source != Source::Fallback);
    }

    fn start(self: &Arc<Self>, check: Check<'static>, retries: bool) {
        if let Backend::Memory(memory) = &self.backend {
            let _ = memory.decide(&check);
            return self.wake(&check);
        }
        let Some(runtime) = self.runtime() else { return };
        let handle = Arc::clone(self);
        let mut call = Box::pin(async move {
            let answer = handle.backend.decide(&check).await;
            handle.wake(&check);
            if retries && matches!(answer, Err(StoreError::Unavailable(_))) {
                handle.retry_later(check);
            }
        });
        // The first poll is here, so that the call is sent before this thread goes on, for example
        // before it sends the end of a response that held a lease. Not while this thread panics: a
        // second panic, in the store, would abort the process.
        let is_done = !std::thread::panicking() && {
            let _entered = runtime.enter();
            call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
        };
        if !is_done {
            runtime.spawn(call);
        }
    }

    /// Gives a booked place back, and the places before it that were left earlier and are now at
    /// the end of the queue.
    pub(super) fn leave_place(self: &Arc<Self>, unbook: Check<'static>) {
        match &self.backend {
            Backend::Memory(memory) => {
                let mut next = Some(unbook);
                while let Some(unbook) = next {
                    let Ok(decision) = memory.decide(&unbook) else { return };
                    next = self.queues.leave(unbook, &decision);
                }
            }
            Backend::Other(_) => {
                if let Some(runtime) = self.runtime() {
                    let handle = Arc::clone(self);
                    runtime.spawn(async move {
                        let mut next = Some(unbook);
                        while let Some(unbook) = next {
                            let Ok(decision) = handle.backend.decide(&unbook).await else { return };
                            next = handle.queues.leave(unbook, &decision);
                        }
                    });
                }
            }
        }
    }

    /// Wakes the calls of `acquire` that wait for units which `check` may have given back.
    pub(super) fn wake(&self, check: &Check<'_>) {
        if matches!(check.op(), Op::Refund | Op::Reset | Op::Settle | Op::Release) {
            check.charges().iter().for_each(|charge| self.queues.wake(&charge.subject.key));
        }
    }
}

/// Ends leases in the background: for programs that take leases by calling a store directly.
///
/// Hidden because only the server of this workspace takes leases that way; other programs have
/// [`Lease`](crate::Lease), which ends itself.
#[derive(Clone)]
pub struct LeaseReleaser(Arc<StoreHandle>);

impl LeaseReleaser {
    /// Ends leases in this memory store.
    pub fn of_memory(memory: Memory) -> Self {
        LeaseReleaser(Arc::new(StoreHandle::of_memory(memory)))
    }

    /// Ends leases in any store. By `clock` it knows when a lease has ended by its ttl, after which
    /// it is not retried.
    pub fn of_store(store: impl Store, clock: impl Into<Clock>) -> Self {
        let handle = StoreHandle::new(Backend::Other(Box::new(store)), clock.into());
        LeaseReleaser(Arc::new(handle))
    }

    /// Ends `leases`, which `source` granted under an id that no other caller uses, without waiting
    /// for the store. If the store granted them and does not answer, the call is retried until
    /// their ttl is over.
    pub fn release(&self, leases: Check<'_>, source: Source) {
        self.0.release(leases.into_owned(), source);
    }
}

impl std::fmt::Debug for LeaseReleaser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaseReleaser").finish_non_exhaustive()
    }
}
