//! A simulation decided by a server: the same requests, at the time of the trace, in a namespace of
//! their own.
//!
//! Some hundred requests are in flight at a time. They are sent in the order of the trace over one
//! connection, and a server executes the commands of a connection in order, so the decisions are
//! those of one request at a time.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tidegate::redis::{Redis, RedisStats};
use tidegate::{Check, ManualClock, Store, StoreError, Timestamp};
use tidegate_core::Decision;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::contender::Contender;
use super::progress::Progress;
use super::source::Source;
use super::{Answers, Event};
use crate::args::StoreUrl;
use crate::commands::store::{self, Remote};

/// The most decisions in flight.
const MAX_IN_FLIGHT: usize = 1024;
/// The timeout of the cleanup. Keys that are left expire by themselves.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(20);
/// The script takes state this far ahead of the time of a request for the work of a broken clock.
const HOUR_US: u64 = 3_600_000_000;

pub(super) struct Elsewhere {
    remote: Remote,
    clock: ManualClock,
    /// The counters when the first request was sent.
    before: RedisStats,
    /// Held while requests are in flight. The cleanup after an interrupt waits for it, so that no
    /// request writes a key after the cleanup.
    under_way: Arc<Mutex<()>>,
}

impl Elsewhere {
    /// `None` if the simulation is decided in this process.
    pub(super) fn open(url: &StoreUrl) -> Result<Option<Self>> {
        let clock = ManualClock::new();
        let random = RandomState::new().hash_one(std::process::id());
        let namespace = format!("sim-{:08x}", random & 0xffff_ffff);
        // The witness is for lost state, which a simulation does not have.
        let settings = |builder: tidegate::redis::RedisBuilder| {
            builder.namespace(&namespace).clock(clock.clone()).witness_keys(0)
        };
        let Some(remote) = Remote::open(url, settings)? else { return Ok(None) };
        // Loads the script first, so that no request waits for it and is overtaken.
        remote.prepare()?;
        eprintln!("note: decided by {}, in the namespace {namespace}", remote.shown);
        let before = remote.redis.stats();
        let under_way = Arc::new(Mutex::new(()));
        remote
            .runtime
            .spawn(clean_up_when_interrupted(remote.redis.clone(), Arc::clone(&under_way)));
        Ok(Some(Elsewhere { remote, clock, before, under_way }))
    }

    /// Feeds the trace to the server.
    pub(super) fn feed(
        &self,
        source: &mut Source,
        contenders: &mut [Contender],
        answers: &mut Answers<'_>,
        progress: &mut Progress,
    ) -> Result<u64> {
        let names: Vec<String> = (0..contenders.len()).map(|index| index.to_string()).collect();
        let events_at_once = (MAX_IN_FLIGHT / contenders.len().max(1)).max(1);
        let mut batch: Vec<Event> = Vec::with_capacity(events_at_once);
        let (mut events, mut latest_us, mut warned) = (0, 0, false);
        loop {
            batch.clear();
            let mut ended = Ok(false);
            while batch.len() < events_at_once {
                match source.next() {
                    Ok(Some(event)) => batch.push(event.clone()),
                    Ok(None) => {
                        ended = Ok(true);
                        break;
                    }
                    // What came before the error is answered first.
                    Err(error) => {
                        ended = Err(error);
                        break;
                    }
                }
                progress.advance(source);
            }
            let checks: Vec<(&Event, Check<'_>)> = batch
                .iter()
                .flat_map(|event| {
                    contenders
                        .iter()
                        .zip(&names)
                        .map(move |(one, name)| (event, one.check(name, event)))
                })
                .collect();
            let mut decisions = self.decide(&checks).into_iter();
            drop(checks);
            for event in &batch {
                latest_us = latest_us.max(event.at_us);
                if !warned && latest_us - event.at_us > HOUR_US {
                    warned = true;
                    eprintln!(
                        "note: request {}: time goes back by more than an hour; a server takes what it wrote before for damage, and \
                         answers may differ from those in memory",
                        event.number
                    );
                }
                events += 1;
                for (index, contender) in contenders.iter_mut().enumerate() {
                    let decision = decisions.next().context("a request has no answer")?;
                    let decision = decision
                        .map_err(store::explained)
                        .with_context(|| format!("request {}", event.number))?;
                    contender.observe(event, &decision);
                    answers.add(index, event, contender, &decision)?;
                }
            }
            self.check_order()?;
            if ended? {
                return Ok(events);
            }
        }
    }

    /// Sends all of them, in order, and waits for all.
    fn decide(&self, checks: &[(&Event, Check<'_>)]) -> Vec<Result<Decision, StoreError>> {
        self.remote.run(async {
            let _under_way = self.under_way.lock().await;
            let (clock, redis) = (&self.clock, &self.remote.redis);
            let mut waiting = VecDeque::with_capacity(checks.len());
            let mut unsent = checks.iter();
            let mut decisions = Vec::with_capacity(checks.len());
            poll_fn(|context| {
                // A call reads the clock and takes its place in line when it is polled first.
                for (event, check) in unsent.by_ref() {
                    clock.set(Timestamp::from_micros(event.at_us));
                    let mut deciding = redis.decide(check);
                    let polled = deciding.as_mut().poll(context);
                    waiting.push_back((deciding, polled));
                }
                while let Some((deciding, polled)) = waiting.front_mut() {
                    if polled.is_pending() {
                        *polled = deciding.as_mut().poll(context);
                    }
                    if polled.is_pending() {
                        return Poll::Pending;
                    }
                    if let Some((_, Poll::Ready(decision))) = waiting.pop_front() {
                        decisions.push(decision);
                    }
                }
                Poll::Ready(())
            })
            .await;
            decisions
        })
    }

    /// Fails if a call was retried: the next call of its key may have overtaken it, and then the
    /// answers are unreliable.
    fn check_order(&self) -> Result<()> {
        let (before, now) = (&self.before, self.remote.redis.stats());
        let again = |stats: &RedisStats| {
            [stats.retries, stats.redirects, stats.reconnects, stats.script_loads]
        };
        if again(before) != again(&now) {
            bail!(
                "the connection broke, a slot moved or the server forgot the script in the middle of the simulation, so requests may have \
                 overtaken each other: run it again"
            );
        }
        Ok(())
    }

    /// Removes the keys. If that fails, they expire by themselves.
    pub(super) fn clean_up(self) {
        self.remote.run(async {
            let _under_way = self.under_way.lock().await;
            remove(&self.remote.redis).await;
        });
    }
}

async fn remove(redis: &Redis) {
    let why = match timeout(CLEANUP_TIMEOUT, redis.clear()).await {
        Ok(Ok(_)) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it took too long".into(),
    };
    eprintln!(
        "note: the keys of the simulation could not be removed ({why}); they expire by themselves, after an hour or when they are idle"
    );
}

/// Waits for Ctrl-C or SIGTERM, and removes the keys. A second signal skips the cleanup.
async fn clean_up_when_interrupted(redis: Redis, under_way: Arc<Mutex<()>>) {
    end_signal().await;
    let cleaned = async {
        let _under_way = under_way.lock().await;
        remove(&redis).await;
    };
    tokio::select! {
        () = cleaned => {}
        () = end_signal() => {}
    }
    crate::interrupted()
}

async fn end_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}
