//! What stands before a remote store, over stores that fail on demand, on a clock that tests move.

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

/// A store elsewhere: in memory, some time away, and silent when told to be.
#[derive(Clone)]
pub(crate) struct Remote {
    memory: Memory,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Nothing is answered, as by a stopped server. What is asked is done when it goes on.
    silent: AtomicBool,
    /// Answers are lost on their way: it is done, and nobody hears of it.
    loses_answers: AtomicBool,
    /// Everything fails at once.
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

    /// The same store over another line, which fails by itself.
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

    /// How much is really left.
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

/// A node before this store, one of `nodes`, the same at every run.
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
