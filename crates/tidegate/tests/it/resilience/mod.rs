//! The resilience layer over stores that fail on demand, on a clock that tests move.

mod bounds;
mod breaker;
mod denials;
mod dropped;
mod fields;
mod leases;
mod nodes;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate::resilience::{Resilient, ResilientBuilder};
use tidegate::store::Deciding;
use tidegate::{Check, Decision, Limits, ManualClock, Memory, Op, Store, StoreError};

/// A remote store: in memory, behind a delay, and failing on demand.
#[derive(Clone)]
pub(crate) struct Remote {
    memory: Memory,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// The store does not answer, as a stopped server does not; calls are executed when it resumes.
    silent: AtomicBool,
    /// Answers are lost: calls are executed and not answered.
    loses_answers: AtomicBool,
    /// Every call fails immediately.
    fails: AtomicBool,
    delay_us: AtomicU64,
    calls: AtomicU64,
}

impl Remote {
    pub(crate) fn new(clock: &ManualClock) -> Self {
        let memory = Memory::builder().clock(clock.clone()).max_keys(100_000).build();
        let remote = Remote { memory, shared: Arc::default() };
        remote.shared.delay_us.store(200, Ordering::Relaxed);
        remote
    }

    /// The same store over another connection, which fails independently.
    pub(crate) fn another_line(&self) -> Self {
        let remote = Remote { memory: self.memory.clone(), shared: Arc::default() };
        remote.shared.delay_us.store(200, Ordering::Relaxed);
        remote
    }

    pub(crate) fn calls(&self) -> u64 {
        self.shared.calls.load(Ordering::Relaxed)
    }

    pub(crate) fn silent(&self, silent: bool) {
        self.shared.silent.store(silent, Ordering::Relaxed);
    }

    pub(crate) fn loses_answers(&self, loses: bool) {
        self.shared.loses_answers.store(loses, Ordering::Relaxed);
    }

    pub(crate) fn fails(&self, fails: bool) {
        self.shared.fails.store(fails, Ordering::Relaxed);
    }

    pub(crate) fn delay(&self, delay: Duration) {
        self.shared.delay_us.store(u64::try_from(delay.as_micros()).unwrap(), Ordering::Relaxed);
    }

    /// The units left in the store.
    pub(crate) fn left(&self, key: &str, limits: &Limits) -> u64 {
        self.memory.decide(&Check::of(Op::Peek).charge(key, limits, 1)).unwrap().remaining()
    }
}

impl Store for Remote {
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        Box::pin(async move {
            let shared = &self.shared;
            shared.calls.fetch_add(1, Ordering::Relaxed);
            if shared.fails.load(Ordering::Relaxed) {
                return Err(StoreError::Unavailable("told to fail".into()));
            }
            let delay = Duration::from_micros(shared.delay_us.load(Ordering::Relaxed));
            tokio::time::sleep(delay / 2).await;
            while shared.silent.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let decision = self.memory.decide(check)?;
            if shared.loses_answers.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(delay / 2).await;
            Ok(decision)
        })
    }
}

pub(crate) fn limits(text: &str) -> Limits {
    text.parse().unwrap()
}

/// A node with this store, one of `nodes`, with a fixed seed.
pub(crate) fn node(
    remote: &Remote,
    clock: &ManualClock,
    nodes: u64,
    seed: u64,
) -> ResilientBuilder {
    Resilient::builder(remote.clone()).clock(clock.clone()).nodes(nodes).seed(seed)
}

pub(crate) async fn ask(resilient: &Resilient, key: &str, limits: &Limits, cost: u64) -> Decision {
    resilient.decide(&Check::new().charge(key, limits, cost)).await.unwrap()
}
