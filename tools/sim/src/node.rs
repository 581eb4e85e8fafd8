//! A node: the product, in a runtime of its own whose clock the world moves. Dropping it is a
//! crash; not moving it is a pause.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::redis::Redis;
use tidegate::resilience::{ResilienceStats, Resilient};
use tidegate::{Check, Decision, ManualClock, Store, StoreError, Timestamp};
use tokio::runtime::{Builder, Runtime};
use tokio::task::AbortHandle;

use crate::net::{Port, SharedPipe};
use crate::plan::{Ask, Plan, Rule};

/// What a request was answered.
pub(crate) type Answer = Result<Decision, StoreError>;

pub(crate) struct Node {
    runtime: Option<Runtime>,
    idle: Arc<Idle>,
    resilient: Resilient,
    clock: ManualClock,
    port: Port,
    answers: Arc<Mutex<Vec<(usize, Answer)>>>,
    closed: Arc<AtomicBool>,
    /// What its machine's clock said when the world began.
    boot_us: u64,
    /// Until when its runtime has run, in the world's time.
    ran_until: u64,
}

/// Says when a runtime has nothing left to do.
#[derive(Default)]
struct Idle {
    parked: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Node {
    /// A node that starts now.
    pub(crate) fn start(plan: &Plan, number: u64, incarnation: u64, now: u64) -> Node {
        let idle = Arc::new(Idle::default());
        let parking = Arc::clone(&idle);
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .on_thread_park(move || {
                parking.parked.store(true, Ordering::Relaxed);
                let waker = parking.waker.lock().take();
                if let Some(waker) = waker {
                    waker.wake();
                }
            })
            .build()
            .expect("a runtime without threads and sockets needs nothing");
        let boot_us = 1_000_000_000
            + plan.boot_us.get(usize::try_from(number).unwrap_or(0)).copied().unwrap_or(0);
        let clock = ManualClock::new();
        clock.set(Timestamp::from_micros(boot_us + now));
        let port = Port::default();
        let seed = plan.seed.wrapping_mul(1000) + number * 100 + incarnation;
        let resilient = {
            let _inside = runtime.enter();
            let url = "redis://server:6379/".parse().expect("it is an address");
            let redis = Redis::builder(url)
                .connector(port.clone())
                .seed(seed)
                .build()
                .expect("nothing is wrong with it");
            let mut resilient = Resilient::builder(redis)
                .clock(clock.clone())
                .seed(seed)
                .lease_error_per_mille(plan.lease_error_per_mille);
            if plan.told_nodes {
                resilient = resilient.nodes(plan.nodes);
            }
            resilient.build()
        };
        let (answers, closed) = (Arc::default(), Arc::default());
        Node {
            runtime: Some(runtime),
            idle,
            resilient,
            clock,
            port,
            answers,
            closed,
            boot_us,
            ran_until: now,
        }
    }

    /// Runs everything that can run at this moment. Its clocks go on to it.
    pub(crate) fn step(&mut self, now: u64) {
        let Some(runtime) = &self.runtime else { return };
        self.clock.set(Timestamp::from_micros(self.boot_us + now));
        let passed = Duration::from_micros(now.saturating_sub(self.ran_until));
        self.ran_until = now;
        let idle = &self.idle;
        runtime.block_on(async {
            tokio::time::advance(passed).await;
            idle.parked.store(false, Ordering::Relaxed);
            poll_fn(|context| {
                if idle.parked.swap(false, Ordering::Relaxed) {
                    return Poll::Ready(());
                }
                *idle.waker.lock() = Some(context.waker().clone());
                Poll::Pending
            })
            .await;
        });
    }

    /// The machine slept until now: timers have not gone on, the clock that runs meanwhile has.
    pub(crate) fn slept_until(&mut self, now: u64) {
        self.ran_until = now;
    }

    /// The clock has stood still as long as the node has.
    pub(crate) fn clock_stood_until(&mut self, now: u64) {
        self.boot_us -= now.saturating_sub(self.ran_until);
    }

    /// A request comes in.
    pub(crate) fn ask(
        &self,
        number: usize,
        ask: &Ask,
        rules: &Arc<Vec<Rule>>,
    ) -> Option<AbortHandle> {
        let runtime = self.runtime.as_ref()?;
        let (resilient, answers, ask, rules) =
            (self.resilient.clone(), Arc::clone(&self.answers), ask.clone(), Arc::clone(rules));
        let task = runtime.spawn(async move {
            let check = ask.check(&rules);
            let answer = resilient.decide(&check).await;
            answers.lock().push((number, answer));
        });
        Some(task.abort_handle())
    }

    /// Asks it to give back what it holds and end.
    pub(crate) fn close(&self) {
        let Some(runtime) = &self.runtime else { return };
        let (resilient, closed) = (self.resilient.clone(), Arc::clone(&self.closed));
        runtime.spawn(async move {
            resilient.close().await;
            closed.store(true, Ordering::Relaxed);
        });
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    pub(crate) fn stats(&self) -> ResilienceStats {
        self.resilient.stats()
    }

    pub(crate) fn answers(&self) -> Vec<(usize, Answer)> {
        std::mem::take(&mut *self.answers.lock())
    }

    pub(crate) fn dialled(&self) -> Vec<SharedPipe> {
        self.port.dialled()
    }

    /// What its machine's clock says at a moment of the world.
    pub(crate) fn clock_at(&self, now: u64) -> u64 {
        self.boot_us + now
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Makes a check of a request; it borrows names and keys from the rules.
impl Ask {
    fn check<'a>(&self, rules: &'a [Rule]) -> Check<'a> {
        let mut check = Check::of(self.op);
        for &(rule, cost) in &self.parts {
            let rule = &rules[rule];
            check = check.policy(rule.policy).charge_named(&rule.name, "k", &rule.limits, cost);
        }
        match self.id {
            Some(id) => check.with_id(tidegate::Id(id)),
            None => check,
        }
    }
}
