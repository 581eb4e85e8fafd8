//! State in Redis or Valkey: the same decisions as in memory, in one round trip, for every process
//! that shares the server.
//!
//! ```no_run
//! use tidegate::redis::Redis;
//! use tidegate::Limiter;
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let redis = Redis::new("redis://127.0.0.1/")?;
//! let limiter = Limiter::builder("10/s; 120/m".parse()?).redis(redis).build();
//! let decision = limiter.check("user:7").await?;
//! # Ok(()) }
//! ```
//!
//! One decision is one call of one script, whatever the operation and however many limits: it reads
//! the server's clock once, reads each key, decides, and writes what changed together with the time
//! at which it may be forgotten. The script is put together from `lua/`, where each algorithm
//! stands as the twin of its Rust.
//!
//! In reading order: [`keys`] names the states, [`call`] writes the call and reads its answer,
//! [`witness`] remembers what was seen, [`cross_slot`] decides over several slots of a cluster, and
//! [`tidegate_redis_client`] talks to the servers. Beside them stand what is done before the first decision,
//! [`prepare`], the startup check, [`inspect`], what measures, [`measure`], and what cleans up,
//! [`clear`].

mod call;
mod clear;
mod coalesce;
mod cross_slot;
mod inspect;
mod keys;
mod measure;
mod prepare;
mod steps;
mod witness;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidegate_core::{Algorithm, Decision, Done, Id, Op, Timestamp};
use tokio::time::Instant;

use self::call::{Answer, Head, Time};
use self::coalesce::{Coalescer, Turn};
use self::keys::{InvalidKeys, Keys};
use self::steps::Steps;
use self::witness::Witness;
use crate::clock::Clock;
use crate::events;
use crate::store::{Charge, Check, Deciding, Diagnosis, Store, StoreError};
use tidegate_bounded::in_time;
use tidegate_redis_client::{Chance, Connector, Outcome, Router, Script, Secret, Settings, Value};

pub use self::clear::ClearError;
pub use self::inspect::{Finding, Inspection, Severity, Topic};
pub use self::keys::{InvalidNamespace, MAX_NAMESPACE_BYTES};
pub use self::measure::{RoundTrips, SlowStore, Times};
pub use tidegate_redis_client::{
    Connect, Connecting, Failure, FailureKind, InvalidSecret, Link, RedisUrl, RedisUrlError,
};

/// The whole script, in the order in which it runs.
pub(crate) const SCRIPT: &str = concat!(
    include_str!("lua/fast.lua"),
    include_str!("lua/exact.lua"),
    include_str!("lua/bucket.lua"),
    include_str!("lua/window.lua"),
    include_str!("lua/estimate.lua"),
    include_str!("lua/pieces.lua"),
    include_str!("lua/concurrent.lua"),
    include_str!("lua/receipts.lua"),
    include_str!("lua/state.lua"),
    include_str!("lua/decide.lua"),
);

/// How many keys are remembered in case the server forgets them.
pub const DEFAULT_WITNESS_KEYS: usize = 16_384;

/// Whoever waits longer waits for ever, and a clock cannot count that far.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// A store in Redis or Valkey. Cheap to clone; clones share the connections.
#[derive(Clone)]
pub struct Redis {
    inner: Arc<Inner>,
}

/// Is told by how much a server's clock went back.
type OnClockStep = Box<dyn Fn(Duration) + Send + Sync>;

struct Inner {
    router: Router,
    script: Script,
    keys: Keys,
    witness: Witness,
    /// Whose time is sent along; usually nobody's, and the server's counts.
    clock: Option<Clock>,
    /// It is the server's that the clock stands in for.
    is_stand_in: bool,
    timeout: Duration,
    started: Instant,
    /// The time a server has told last; of a clock of this process, the newest.
    latest_us: AtomicU64,
    regressions: AtomicU64,
    clock_regressions: AtomicU64,
    /// The steps back of the servers' clocks that were reported.
    steps: Steps,
    on_clock_step: OnceLock<OnClockStep>,
    repairs: AtomicU64,
    calls: AtomicU64,
    coalesced: AtomicU64,
    coalescer: Coalescer,
    together: bool,
    chance: Chance,
}

/// There is no such store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisError {
    /// The URL says something that cannot be.
    #[error(transparent)]
    Url(#[from] RedisUrlError),
    /// The namespace cannot be used.
    #[error(transparent)]
    Namespace(#[from] InvalidNamespace),
    /// The secret cannot be used.
    #[error("secret: {0}")]
    Secret(#[from] InvalidSecret),
    /// The settings or the files they name cannot be used.
    #[error("{0}")]
    Settings(Failure),
}

/// A call to the server that came to nothing.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{failure}; {}", if *.applied { "it may have been charged" } else { "nothing was charged" })]
pub struct NoAnswer {
    applied: bool,
    #[source]
    failure: Failure,
}

impl NoAnswer {
    /// Whether it may have been counted all the same: the call was on its way when the connection
    /// broke or time was up.
    pub fn may_have_been_counted(&self) -> bool {
        self.applied
    }

    /// What went wrong.
    pub fn failure(&self) -> &Failure {
        &self.failure
    }
}

/// What a store has counted since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct RedisStats {
    /// Calls of the script.
    pub calls: u64,
    /// Checks of hot keys that were sent together with others, in one call.
    pub coalesced: u64,
    /// Times a key held less than had been seen before, and was restored: state was lost by a
    /// failover, an eviction, a flush, or a step forward of the server's clock.
    pub regressions: u64,
    /// States that were more than a second ahead of the server's clock, and were rebased: the clock
    /// went back, or a server with an earlier clock took over. Usage is kept; see `docs/redis.md`.
    pub clock_regressions: u64,
    /// Times a key held something that Tidegate did not write, and was taken as used up.
    pub repairs: u64,
    /// Connections that were made again.
    pub reconnects: u64,
    /// Calls that were sent a second time, because the server had said that the first did nothing.
    pub retries: u64,
    /// Calls that were sent on to another server of the cluster.
    pub redirects: u64,
    /// Times the script was loaded into a server.
    pub script_loads: u64,
    /// Calls that had no answer in time.
    pub timeouts: u64,
}

/// Settings of a [`Redis`] store.
#[derive(Clone, Debug)]
#[must_use = "there is no store until `build` is called"]
pub struct RedisBuilder {
    url: RedisUrl,
    namespace: Option<String>,
    secret: Option<Secret>,
    clock: Option<Clock>,
    is_stand_in: bool,
    together: Option<bool>,
    witness_keys: usize,
    settings: Settings,
}

impl RedisBuilder {
    /// Keeps the keys apart from those of other stores on the same server. Letters, digits, `.`,
    /// `_` and `-`.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Keeps others from choosing slots: keys are spread over a cluster by a digest that this
    /// secret is part of, so that whoever does not know it cannot search for keys that all fall on
    /// one server. 16 to 512 bytes, best at random; the same in every process that shares the
    /// store, or they do not share it. With another secret all keys have other names, and budgets
    /// start afresh. Counts instead of one in the URL, and is never shown.
    pub fn secret(mut self, secret: impl Into<String>) -> Self {
        self.secret = Some(Secret::new(secret));
        self
    }

    /// How long one call may take, everything included; 100 ms unless told otherwise, and at most a
    /// day. A check over several slots of a cluster is up to three calls after each other.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout.min(LONGEST_TIMEOUT);
        // A server may say nothing for as long as a call may take.
        self.settings.silence = self.settings.silence.max(self.settings.timeout);
        self
    }

    /// How long connecting may take; 1 s unless told otherwise, and at most a day. Calls do not
    /// wait that long.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.settings.connect_timeout = timeout.min(LONGEST_TIMEOUT);
        self
    }

    /// How many connections to each server; 1 unless told otherwise, which is nearly always best.
    pub fn connections(mut self, connections: usize) -> Self {
        self.settings.connections_per_node = connections;
        self
    }

    /// How many keys to remember in case the server forgets them; 16 384 unless told otherwise, 0
    /// for none.
    pub fn witness_keys(mut self, keys: usize) -> Self {
        self.witness_keys = keys;
        self
    }

    /// Judges by this clock instead of the server's: for tests and simulations, never for several
    /// machines. Keys are then kept for at least an hour, since nobody knows how this clock runs.
    pub fn clock(mut self, clock: impl Into<Clock>) -> Self {
        (self.clock, self.is_stand_in) = (Some(clock.into()), false);
        self
    }

    /// Judges as if the server's clock said what this one says, also when it goes back: for tests
    /// of such steps.
    #[doc(hidden)]
    pub fn server_clock(mut self, clock: impl Into<Clock>) -> Self {
        (self.clock, self.is_stand_in) = (Some(clock.into()), true);
        self
    }

    /// Whether checks of one key that are asked about by many at once are sent together, in one
    /// call. They are, unless told otherwise or judged by a [clock](RedisBuilder::clock) of this
    /// process: checks keep their order among each other, but another operation may come before
    /// those that wait.
    pub fn coalesce(mut self, together: bool) -> Self {
        self.together = Some(together);
        self
    }

    /// Reaches servers by streams that `connector` makes, instead of sockets and TLS of our own:
    /// for simulations, and for whoever has another way.
    pub fn connector(mut self, connector: impl Connect) -> Self {
        self.settings.connector = Some(Connector::new(connector));
        self
    }

    /// Where chance comes from: when to connect again, whom of a cluster to ask. For simulations;
    /// otherwise never the same.
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.chance = Chance::of_seed(seed);
        self
    }

    /// The store. Needs a tokio runtime. A server that is down does not matter yet: connections are
    /// made in the background.
    ///
    /// # Errors
    /// If the namespace, the secret or the settings cannot be used.
    pub fn build(self) -> Result<Redis, RedisError> {
        let secret = self.secret.as_ref().or(self.url.secret());
        let keys =
            Keys::new(self.namespace.as_deref(), secret).map_err(|invalid| match invalid {
                InvalidKeys::Namespace(invalid) => RedisError::Namespace(invalid),
                InvalidKeys::Secret(invalid) => RedisError::Secret(invalid),
            })?;
        let (timeout, chance) = (self.settings.timeout, self.settings.chance.clone());
        let together = self.together.unwrap_or(self.clock.is_none());
        let router = Router::new(self.url, self.settings).map_err(RedisError::Settings)?;
        Ok(Redis {
            inner: Arc::new(Inner {
                router,
                script: Script::new(SCRIPT),
                keys,
                witness: Witness::new(self.witness_keys, &chance),
                chance,
                clock: self.clock,
                is_stand_in: self.is_stand_in,
                timeout,
                started: Instant::now(),
                latest_us: AtomicU64::new(0),
                regressions: AtomicU64::new(0),
                clock_regressions: AtomicU64::new(0),
                steps: Steps::new(),
                on_clock_step: OnceLock::new(),
                repairs: AtomicU64::new(0),
                calls: AtomicU64::new(0),
                coalesced: AtomicU64::new(0),
                coalescer: Coalescer::new(),
                together,
            }),
        })
    }
}

impl Redis {
    /// A store at this URL: `redis://…`, `rediss://…`, `redis+unix://…`,
    /// `redis+sentinel://…/service` or `redis+cluster://…`; see `docs/redis.md`. Needs a tokio
    /// runtime.
    ///
    /// # Errors
    /// If the URL says something that cannot be. A server that is down is not an error yet.
    pub fn new(url: &str) -> Result<Self, RedisError> {
        Self::builder(url.parse()?).build()
    }

    /// For other settings.
    pub fn builder(url: RedisUrl) -> RedisBuilder {
        RedisBuilder {
            url,
            namespace: None,
            secret: None,
            clock: None,
            is_stand_in: false,
            together: None,
            witness_keys: DEFAULT_WITNESS_KEYS,
            settings: Settings::default(),
        }
    }

    /// Calls `tell` with how far the server's clock went back, at the least, when states are found
    /// ahead of it: once for each step. It must return at once. Only the first `tell` is called.
    pub fn on_clock_step(&self, tell: impl Fn(Duration) + Send + Sync + 'static) {
        let _ = self.inner.on_clock_step.set(Box::new(tell));
    }

    /// What was counted since it was made.
    pub fn stats(&self) -> RedisStats {
        let Inner { router, regressions, clock_regressions, repairs, calls, coalesced, .. } =
            &*self.inner;
        let client = router.counters();
        RedisStats {
            calls: calls.load(Ordering::Relaxed),
            coalesced: coalesced.load(Ordering::Relaxed),
            regressions: regressions.load(Ordering::Relaxed),
            clock_regressions: clock_regressions.load(Ordering::Relaxed),
            repairs: repairs.load(Ordering::Relaxed),
            reconnects: client.reconnects,
            retries: client.retries,
            redirects: client.redirects,
            script_loads: client.script_loads,
            timeouts: client.timeouts,
        }
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("prefix", &self.inner.keys.prefix()).finish_non_exhaustive()
    }
}

impl Store for Redis {
    fn diagnose(&self, error: &StoreError) -> Diagnosis {
        let no_answer = match error {
            StoreError::Unavailable(cause) => cause.downcast_ref::<NoAnswer>(),
            _ => None,
        };
        no_answer.map_or_else(|| Diagnosis::of(error), |own| diagnosis(own.failure()))
    }

    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        Box::pin(async move {
            check.validate()?;
            let charges: Vec<Asked<'_>> =
                check.charges().iter().map(|charge| self.inner.ask(charge)).collect();
            let single = !self.inner.router.is_cluster()
                || charges.iter().all(|asked| asked.slot == charges[0].slot);
            if !single {
                return cross_slot::decide(&self.inner, check.clone().into_owned()).await;
            }
            let _call = if self.inner.together && coalesce::can_share(check) {
                match self.inner.join(&charges[0]) {
                    Turn::Now(call) => Some(call),
                    Turn::Later(later) => {
                        return match in_time(self.inner.deadline(), later).await {
                            Some(Ok(answer)) => {
                                answer.map_err(|error| coalesce::shared_error(&error))
                            }
                            Some(Err(_)) => Err(coalesce::nobody_answered(false)),
                            None => Err(coalesce::nobody_answered(true)),
                        };
                    }
                }
            } else {
                None
            };
            let head = Head {
                op: script_op(check),
                id: check.id(),
                time: self.inner.time(),
                denied: false,
            };
            let answer = self.inner.call(head, &charges, &[], self.inner.deadline()).await?;
            let verdicts = charges.iter().zip(&answer.found);
            let verdict = |(asked, found): (&Asked<'_>, &call::Found)| {
                found.verdict(check.op(), asked.charge, answer.allowed, answer.now)
            };
            let decision = match &charges[..] {
                [_] => Decision::of_one(
                    verdicts.map(verdict).next().unwrap_or_default(),
                    answer.allowed,
                    answer.now,
                ),
                _ => Decision::of_many(verdicts.map(verdict).collect(), answer.allowed, answer.now),
            };
            Ok(decision.with_id(check.id()))
        })
    }

    fn parts(&self, check: &Check<'_>) -> u64 {
        let router = &self.inner.router;
        if !router.is_cluster() {
            return 1;
        }
        let places = check
            .charges()
            .iter()
            .map(|charge| router.place(self.inner.keys.tag(&charge.subject).slot()));
        places.fold(0, |parts, place| parts | 1 << (place % 64))
    }
}

/// Only a single bucket can keep a place; booking anything else is a check.
fn script_op(check: &Check<'_>) -> Op {
    match (check.op(), check.charges()) {
        (book @ Op::Book { .. }, [charge])
            if matches!(charge.limit.algorithm(), Algorithm::Bucket(_)) =>
        {
            book
        }
        (Op::Book { .. }, _) => Op::Check,
        (op, _) => op,
    }
}

/// A charge with the name of its state.
struct Asked<'a> {
    charge: &'a Charge<'a>,
    slot: u16,
    name: Vec<u8>,
}

impl AsRef<[u8]> for Asked<'_> {
    fn as_ref(&self) -> &[u8] {
        &self.name
    }
}

impl Inner {
    fn ask<'a>(&self, charge: &'a Charge<'a>) -> Asked<'a> {
        let tag = self.keys.tag(&charge.subject);
        Asked { charge, slot: tag.slot(), name: self.keys.name(tag, charge) }
    }

    fn time(&self) -> Time {
        match &self.clock {
            None => Time::Server,
            Some(clock) if self.is_stand_in => Time::StandIn(clock.now()),
            Some(clock) => Time::Caller(clock.now()),
        }
    }

    /// The time by which memories end. A server's clock may step, so it is the time that has passed
    /// here; of a clock of this process, the newest time it has told: what was worth nothing then
    /// is worth nothing for ever.
    fn memory_now(&self) -> Timestamp {
        Timestamp::from_micros(match self.judges_by_server() {
            true => self.passed_us(),
            false => self.latest_us.load(Ordering::Relaxed),
        })
    }

    fn judges_by_server(&self) -> bool {
        self.clock.is_none() || self.is_stand_in
    }

    fn passed_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// One call of the script over charges that share a slot. `undo` may say for each what it was
    /// charged under before.
    async fn call(
        &self,
        head: Head,
        charges: &[Asked<'_>],
        undo: &[Option<Timestamp>],
        deadline: Instant,
    ) -> Result<Answer, StoreError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let now = self.memory_now();
        let parts = charges.iter().enumerate();
        let parts = parts.map(|(at, asked)| call::Part {
            charge: asked.charge,
            undo: undo.get(at).copied().flatten(),
        });
        let recall = |at: usize, scale: &[u8]| self.witness.recall(&charges[at].name, scale, now);
        let args = call::arguments(&head, parts, recall);
        let bytes = self.eval(charges, &args, deadline).await?;
        let answer =
            Answer::decode(&bytes, charges.iter().map(|asked| asked.charge)).map_err(garbled)?;
        self.note(charges, &answer);
        Ok(answer)
    }

    /// One call of the script that decides checks of one charge at these costs, in this order.
    async fn call_many(
        &self,
        time: Time,
        charge: &Charge<'_>,
        costs: &[u64],
    ) -> Result<Vec<Decision>, StoreError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let asked = [self.ask(charge)];
        let now = self.memory_now();
        let recall = |scale: &[u8]| self.witness.recall(&asked[0].name, scale, now);
        let args = call::arguments_of_many(time, charge, costs, recall);
        let bytes = self.eval(&asked, &args, self.deadline()).await?;
        let answers = call::decode_many(&bytes, charge).map_err(garbled)?;
        if answers.len() != costs.len() {
            return Err(garbled(call::Garbled));
        }
        let decisions = answers.iter().zip(costs).map(|(answer, cost)| {
            self.note(&asked, answer);
            let charge = Charge { cost: *cost, ..charge.clone() };
            let verdict = answer.found[0].verdict(Op::Check, &charge, answer.allowed, answer.now);
            Decision::of_one(verdict, answer.allowed, answer.now)
        });
        Ok(decisions.collect())
    }

    async fn eval(
        &self,
        charges: &[Asked<'_>],
        args: &[Vec<u8>],
        deadline: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        let slot = charges.first().map_or(0, |asked| asked.slot);
        match self.router.eval(&self.script, slot, charges, args, deadline).await {
            Outcome::Applied(Value::Bulk(bytes)) => Ok(bytes),
            Outcome::Applied(_) => Err(garbled(call::Garbled)),
            Outcome::NotApplied(failure) => Err(no_answer(false, failure, charges)),
            Outcome::Unknown(failure) => Err(no_answer(true, failure, charges)),
        }
    }

    /// Remembers what was seen.
    fn note(&self, charges: &[Asked<'_>], answer: &Answer) {
        let now = if self.judges_by_server() {
            self.latest_us.store(answer.now.as_micros(), Ordering::Relaxed);
            let passed_us = self.passed_us();
            let slot = charges.first().map_or(0, |asked| asked.slot);
            self.steps.saw(self.router.place(slot), answer.now, passed_us);
            Timestamp::from_micros(passed_us)
        } else {
            self.latest_us.fetch_max(answer.now.as_micros(), Ordering::Relaxed);
            answer.now
        };
        for (asked, found) in charges.iter().zip(&answer.found) {
            self.witness.remember(
                &asked.name,
                &call::scale(&asked.charge.limit),
                found,
                answer.now,
                now,
            );
            if let Some(by_us) = found.rebased_us {
                self.clock_went_back(asked.slot, by_us, answer.now);
            }
            if found.restored {
                events::restored(self.regressions.fetch_add(1, Ordering::Relaxed) + 1);
            }
            if found.repaired {
                events::repaired(self.repairs.fetch_add(1, Ordering::Relaxed) + 1);
            }
        }
    }

    /// A state was ahead of the clock of the server of this slot by so much. Each step is reported
    /// once.
    fn clock_went_back(&self, slot: u16, by_us: u64, server: Timestamp) {
        self.clock_regressions.fetch_add(1, Ordering::Relaxed);
        if self.steps.is_new(self.router.place(slot), by_us, server, self.passed_us()) {
            let by = Duration::from_micros(by_us);
            events::clock_went_back(by);
            if let Some(tell) = self.on_clock_step.get() {
                tell(by);
            }
        }
    }

    /// How many units were left when the key was last asked about, if that is remembered.
    fn remembered(&self, asked: &Asked<'_>) -> Option<u64> {
        let limit = &asked.charge.limit;
        let latest = Timestamp::from_micros(self.latest_us.load(Ordering::Relaxed));
        let seen = self.witness.recall(&asked.name, &call::scale(limit), self.memory_now())?;
        let reading = call::reading(&seen, limit)?;
        let done =
            Done { op: Op::Peek, cost: 0, reserved: 0, fits: true, granted: 0, booked_us: 0 };
        Some(reading.verdict(limit, &done, true, latest).remaining)
    }

    /// A number nobody else uses, for a check that is decided in several steps.
    fn fresh_id(&self) -> Id {
        Id(self.chance.number() | 1)
    }
}

fn garbled(garbled: call::Garbled) -> StoreError {
    StoreError::Unavailable(Box::new(garbled))
}

/// What a failure says about the server as a whole.
fn diagnosis(failure: &Failure) -> Diagnosis {
    use FailureKind as K;
    let (why, advice) = (failure.to_string().into(), failure.advice());
    if failure.is_refusal() {
        return Diagnosis::Refused { why, advice, is_permanent: failure.is_permanent() };
    }
    match failure.kind() {
        K::Refused | K::Disconnected | K::Unresolved => {
            Diagnosis::Unresponsive { why, advice, is_disconnected: true }
        }
        K::Timeout | K::Loading | K::Busy | K::MaxClients | K::Protocol => {
            Diagnosis::Unresponsive { why, advice, is_disconnected: false }
        }
        K::Overloaded => Diagnosis::Healthy, // this process has too many calls under way
        _ => Diagnosis::CallFailed { why, advice },
    }
}

fn no_answer(applied: bool, failure: Failure, charges: &[Asked<'_>]) -> StoreError {
    if failure.kind() == FailureKind::WrongType {
        let name =
            charges.first().map(|asked| asked.name.escape_ascii().to_string()).unwrap_or_default();
        let key = if charges.len() > 1 {
            format!("{name} or one of {} others", charges.len() - 1)
        } else {
            name
        };
        let reason =
            "it is not a string: some other program has written it, delete it or use a namespace"
                .into();
        return StoreError::Corrupt { key: key.chars().take(200).collect(), reason };
    }
    StoreError::Unavailable(Box::new(NoAnswer { applied, failure }))
}
