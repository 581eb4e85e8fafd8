//! What stands before a remote store: decisions here where that is safe, and an answer in time
//! whatever the store does.
//!
//! ```no_run
//! use tidegate::redis::Redis;
//! use tidegate::resilience::{Resilient, SyncMode};
//! use tidegate::Limiter;
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let resilient = Resilient::new(Redis::new("redis://127.0.0.1/")?);
//! let limiter = Limiter::builder("10000/s".parse()?).resilient(resilient.clone()).sync(SyncMode::Lease).build();
//! let decision = limiter.check("user:7").await?; // within 15 ms or so, also if the server is gone
//! # resilient.close().await; // gives back what was taken ahead
//! # Ok(()) }
//! ```
//!
//! Every question goes the same way: what is certainly denied is denied here ([`last_answer`]);
//! what can be spent of a [`lease`] or charged afterwards ([`async_sync`]) passes here; the rest is
//! one call to the store, with a deadline. If there is no answer, or the [`breaker`] says that none
//! can be expected, this node decides by its [`share`] of the limit, and the answer says so.
//!
//! Those rooms are state machines that know neither clock nor store: time is an argument. This file
//! and [`decide`] are the shell around them, which reads the clock, waits with tokio's timers, and
//! calls the store.

mod async_sync;
mod background;
mod breaker;
mod concurrency_limit;
mod decide;
mod expected;
mod fingerprint;
mod last_answer;
mod lease;
mod nodes;
mod outage;
mod share;
mod state;
mod stats;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate_core::{Decision, Id, Op, Source, Timestamp, Verdict};

pub use self::breaker::BreakerState;
pub use self::nodes::NodesFrom;
pub use self::state::{StoreState, StoreStatus};
pub use self::stats::ResilienceStats;
pub use crate::store::{OnFailure, Policy, SyncMode};

use self::async_sync::{Here, Unsynced};
use self::background::Stray;
use self::breaker::Breaker;
use self::concurrency_limit::ConcurrencyLimit;
use self::fingerprint::{Fingerprint, Fingerprints, Kept, Recent};
use self::last_answer::LastAnswer;
use self::lease::Lease;
use self::nodes::Nodes;
use self::share::Share;
use self::state::Outages;
use self::stats::{Counts, add, one};
use crate::clock::{Clock, SystemClock};
use crate::store::{Charge, Check, Deciding, Store, StoreError};

/// How long one call to the store may take, unless told otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_millis(15);
/// Parts of a store that can fail by themselves and are told apart.
const PARTS: usize = 64;

/// A store before a store: answers near by where that is safe, and in any case in time. Cheap to
/// clone; clones share everything.
///
/// Needs a tokio runtime.
#[derive(Clone)]
pub struct Resilient {
    inner: Arc<Inner>,
}

type OnMiss = Box<dyn Fn(&StoreError) + Send + Sync>;
type OnState = Box<dyn Fn(&StoreStatus) + Send + Sync>;

pub(crate) struct Inner {
    store: Box<dyn Store>,
    settings: Settings,
    clock: Clock,
    names: Fingerprints,
    random: Random,
    breakers: Box<[Mutex<Breaker>]>,
    /// How many of them are open.
    open: AtomicUsize,
    /// Of how many somebody listens whether they are heard again.
    silent: AtomicUsize,
    /// Of which parts, one bit each, a task finds out whether an error was about one call alone.
    doubted: AtomicU64,
    /// Which parts of the store do not decide, and why.
    outages: Mutex<Outages>,
    concurrency_limit: Mutex<ConcurrencyLimit>,
    seen: Recent<LastAnswer>,
    leases: Kept<Lease>,
    unsynced: Kept<Unsynced>,
    /// What could not be given back yet.
    strays: Mutex<VecDeque<Stray>>,
    share: Share,
    nodes: Nodes,
    counts: Counts,
    keeper: AtomicBool,
    closed: AtomicBool,
    on_state: OnceLock<OnState>,
    on_miss: OnceLock<OnMiss>,
}

#[derive(Clone)]
struct Settings {
    deadline: Duration,
    max_in_flight: usize,
    longest_denial_us: u64,
    lease_error_per_mille: u64,
    async_period: Duration,
    async_cap: Option<u64>,
    async_error_per_mille: u64,
    on_failure: OnFailure,
    breaker: breaker::Rules,
}

/// Settings of a [`Resilient`].
#[must_use = "there is no store until `build` is called"]
pub struct ResilientBuilder {
    store: Box<dyn Store>,
    settings: Settings,
    clock: Clock,
    seed: Option<u64>,
    nodes: Option<u64>,
    seen_keys: usize,
    kept_keys: usize,
}

impl ResilientBuilder {
    /// How long one call to the store may take; 15 ms unless told otherwise. What takes longer is
    /// decided here. A decision takes at most 5 ms more than that.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self
    }

    /// How many calls to the store may be under way; 1024 unless told otherwise, and fewer while
    /// calls miss their deadline. What would be one more is decided here.
    pub fn max_in_flight(mut self, calls: usize) -> Self {
        self.settings.max_in_flight = calls;
        self
    }

    /// What happens without an answer to charges whose terms say nothing; [`OnFailure::Local`]
    /// unless told otherwise.
    pub fn on_failure(mut self, policy: OnFailure) -> Self {
        self.settings.on_failure = policy;
        self
    }

    /// By how many nodes limits are divided when each decides alone, and what may be taken ahead.
    /// Unless told, they are counted in the store; a node that has never reached it assumes that it
    /// is alone.
    pub fn nodes(mut self, nodes: u64) -> Self {
        self.nodes = Some(nodes);
        self
    }

    /// How many thousandths of a limit all nodes together may have taken ahead; 10, one per cent,
    /// unless told otherwise.
    pub fn lease_error_per_mille(mut self, thousandths: u64) -> Self {
        self.settings.lease_error_per_mille = thousandths.min(1000);
        self
    }

    /// How often what was decided by [`SyncMode::Async`] is charged; every 50 ms unless told
    /// otherwise.
    pub fn async_period(mut self, period: Duration) -> Self {
        self.settings.async_period = period.max(Duration::from_millis(1));
        self
    }

    /// How many units of a key may be let pass and not yet charged. Unless told: five per cent of
    /// the limit over all nodes, and all of it for a single one. Zero: none, and
    /// [`SyncMode::Async`] is [`SyncMode::Direct`].
    pub fn async_cap(mut self, units: u64) -> Self {
        self.settings.async_cap = Some(units);
        self
    }

    /// How long a denial is certain at most; 1 s unless told otherwise, zero for not at all. What
    /// another node gives back meanwhile is not heard of.
    pub fn longest_denial(mut self, longest: Duration) -> Self {
        self.settings.longest_denial_us = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        self
    }

    /// The clock by which this node counts; it must run while the machine sleeps. The machine's
    /// boot time unless told otherwise.
    pub fn clock(mut self, clock: impl Into<Clock>) -> Self {
        self.clock = clock.into();
        self
    }

    /// Where chance comes from: the moments of probes and the ids of leases. For simulations;
    /// otherwise never the same.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// The store.
    pub fn build(self) -> Resilient {
        let ResilientBuilder { store, settings, clock, seed, nodes, seen_keys, kept_keys } = self;
        let random = Random::new(seed);
        let breakers = (0..PARTS).map(|_| Mutex::new(Breaker::new(settings.breaker))).collect();
        let inner = Inner {
            store,
            share: Share::new(clock.clone()),
            clock,
            names: Fingerprints::new((random.next(), random.next())),
            random,
            breakers,
            open: AtomicUsize::new(0),
            silent: AtomicUsize::new(0),
            doubted: AtomicU64::new(0),
            outages: Mutex::default(),
            concurrency_limit: Mutex::new(ConcurrencyLimit::new(settings.max_in_flight)),
            seen: Recent::new(seen_keys),
            leases: Kept::new(kept_keys),
            unsynced: Kept::new(kept_keys),
            strays: Mutex::default(),
            nodes: Nodes::new(nodes),
            counts: Counts::default(),
            keeper: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            on_state: OnceLock::new(),
            on_miss: OnceLock::new(),
            settings,
        };
        let resilient = Resilient { inner: Arc::new(inner) };
        if tokio::runtime::Handle::try_current().is_ok() {
            resilient.inner.keep();
        }
        resilient
    }
}

impl Resilient {
    /// Before this store, as everybody else.
    pub fn new(store: impl Store) -> Self {
        Self::builder(store).build()
    }

    /// For other settings.
    pub fn builder(store: impl Store) -> ResilientBuilder {
        let settings = Settings {
            deadline: DEFAULT_DEADLINE,
            max_in_flight: 1024,
            longest_denial_us: 1_000_000,
            lease_error_per_mille: 10,
            async_period: Duration::from_millis(50),
            async_cap: None,
            async_error_per_mille: 50,
            on_failure: OnFailure::Local,
            breaker: breaker::Rules::default(),
        };
        ResilientBuilder {
            store: Box::new(store),
            settings,
            clock: Clock::System(SystemClock::new()),
            seed: None,
            nodes: None,
            seen_keys: 1 << 16,
            kept_keys: 1 << 16,
        }
    }

    /// The clock by which this node counts.
    pub fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    /// What was counted since it was made, and what is held.
    pub fn stats(&self) -> ResilienceStats {
        self.inner.stats()
    }

    /// The state of the store, and how limits are enforced while it does not decide.
    pub fn status(&self) -> StoreStatus {
        self.inner.status()
    }

    /// Calls the store once, on a key of its own, and returns its state. Call it when a program
    /// starts, to learn at once whether the store is [unreachable](StoreState::Unreachable) or
    /// [refuses](StoreState::Refused); otherwise the first requests find out.
    ///
    /// A [`Redis`](crate::redis::Redis) has to be connected before, by [`prepare`](crate::redis::Redis::prepare):
    /// a probe has no more time than any other call.
    pub async fn probe(&self) -> StoreStatus {
        self.inner.probe_all().await
    }

    /// Calls `tell` whenever the [state](StoreState) of the store becomes another; it must return
    /// at once and must not hold this store. Only the first `tell` is called.
    pub fn on_state(&self, tell: impl Fn(&StoreStatus) + Send + Sync + 'static) {
        let _ = self.inner.on_state.set(Box::new(tell));
    }

    /// Calls `tell` with the error whenever a single call to the store came to nothing and this
    /// node decides alone; it must return at once. Refusals are not among them:
    /// [`on_state`](Resilient::on_state) reports those. Only the first `tell` is called.
    pub fn on_miss(&self, tell: impl Fn(&StoreError) + Send + Sync + 'static) {
        let _ = self.inner.on_miss.set(Box::new(tell));
    }

    /// Gives back what was taken ahead and charges what is not yet charged, as far as the store
    /// answers; nothing is taken ahead from then on.
    pub async fn close(&self) {
        self.inner.close().await;
    }

    /// Decides a check without asking anybody, if that is possible: it is certainly denied, or can
    /// be spent here. Nobody waits.
    pub fn decide_here(&self, check: &Check<'_>) -> Option<Decision> {
        if check.op() != Op::Check || check.id().is_some() || check.validate().is_err() {
            return None;
        }
        let mut asking = Asking::new(&self.inner, check);
        let decision = asking.here()?;
        if decision.allowed() {
            asking.keep();
        }
        Some(decision)
    }
}

impl fmt::Debug for Resilient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Near").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Store for Resilient {
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        Box::pin(async move {
            check.validate()?;
            match check.op() {
                Op::Check if check.id().is_none() => self.inner.check(check).await,
                Op::Check | Op::Peek | Op::Take | Op::Debit | Op::Book { .. } => {
                    self.inner.through(check).await
                }
                _ => self.inner.give_back(check).await,
            }
        })
    }

    fn parts(&self, check: &Check<'_>) -> u64 {
        self.inner.store.parts(check)
    }
}

/// A check on its way: what of it was spent here is given back if this is dropped before
/// [`keep`](Asking::keep).
struct Asking<'a> {
    inner: &'a Arc<Inner>,
    check: &'a Check<'a>,
    now: Timestamp,
    parts: Vec<Part>,
    kept: bool,
}

/// One charge on its way.
#[derive(Clone, Copy)]
struct Part {
    name: Fingerprint,
    limit: u64,
    done: Done,
}

#[derive(Clone, Copy)]
enum Done {
    /// The store must decide.
    No,
    /// Spent of a lease that ends then.
    Leased(Verdict, Timestamp),
    /// To be charged afterwards.
    Async(Verdict),
}

impl<'a> Asking<'a> {
    fn new(inner: &'a Arc<Inner>, check: &'a Check<'a>) -> Self {
        let part = |charge: &Charge<'_>| Part {
            name: inner.names.of(charge),
            limit: inner.names.limit(&charge.limit),
            done: Done::No,
        };
        let parts = check.charges().iter().map(part).collect();
        Asking { inner, check, now: inner.clock.now(), parts, kept: false }
    }

    /// The decision, if it can be made here. What can be spent here is spent, also if the store
    /// must be asked for the rest.
    fn here(&mut self) -> Option<Decision> {
        if let Some(denial) = self.certain_denial() {
            one(&self.inner.counts.denied_here);
            return Some(denial);
        }
        for at in 0..self.parts.len() {
            let charge = &self.check.charges()[at];
            match self.inner.how(charge) {
                SyncMode::Direct => {}
                SyncMode::Lease => self.parts[at].done = self.lease(at),
                SyncMode::Async => match self.spend(at) {
                    Ok(done) => self.parts[at].done = done,
                    Err(denied) => {
                        if let Some(denial) = self.denial(at, denied) {
                            one(&self.inner.counts.denied_here);
                            return Some(denial);
                        }
                    }
                },
            }
        }
        self.all_here()
    }

    /// The decision, if everything was spent here.
    fn all_here(&self) -> Option<Decision> {
        let verdicts: Option<Vec<Verdict>> = self
            .parts
            .iter()
            .map(|part| match part.done {
                Done::No => None,
                Done::Leased(verdict, _) | Done::Async(verdict) => Some(verdict),
            })
            .collect();
        Some(local(verdicts?, true, self.now))
    }

    /// A denial of which nobody needs to be asked, because the store said a moment ago how long it
    /// lasts.
    fn certain_denial(&self) -> Option<Decision> {
        let charges = self.check.charges();
        if self.inner.settings.longest_denial_us == 0
            || charges.iter().any(|charge| charge.limit.counts_rejected())
        {
            return None;
        }
        let mut verdicts = Vec::with_capacity(charges.len());
        let mut denied = false;
        for (part, charge) in self.parts.iter().zip(charges) {
            // What is held of a lease can be spent, whatever the store would say.
            if self.inner.how(charge) == SyncMode::Lease && self.inner.holds(part.name, charge.cost)
            {
                return None;
            }
            let verdict = self.last_answer(part, |seen| {
                if let Some(crowded) = self.crowded(seen, charge) {
                    denied = true;
                    return Some(crowded);
                }
                denied |= seen.denies(&charge.limit, charge.cost, self.now);
                seen.expected(&charge.limit, charge.cost, 0, self.now)
            })?;
            verdicts.push(verdict);
        }
        // A charge that is certainly denied has these fields only if they agree with that.
        let denied = denied && verdicts.iter().any(|verdict| !verdict.allowed);
        denied.then(|| local(verdicts, false, self.now))
    }

    /// Reads the last answer about a charge under its limit, if it is fresh enough: what other
    /// nodes do meanwhile is not in it.
    fn last_answer<R>(
        &self,
        part: &Part,
        read: impl FnOnce(&LastAnswer) -> Option<R>,
    ) -> Option<R> {
        let fresh = |seen: &LastAnswer| {
            seen.limit == part.limit
                && self.now.micros_since(seen.sent) <= self.inner.settings.longest_denial_us
        };
        self.inner.seen.with(part.name, |seen| if fresh(seen) { read(seen) } else { None })?
    }

    /// The denial of a charge because this node alone has already asked for all that can be left.
    fn crowded(&self, seen: &LastAnswer, charge: &Charge<'_>) -> Option<Verdict> {
        // What is lent may come back any time.
        if self.inner.how(charge) != SyncMode::Direct {
            return None;
        }
        seen.crowded(
            &charge.limit,
            charge.cost,
            self.now,
            self.now.after(self.inner.settings.deadline),
        )
    }

    fn lease(&self, at: usize) -> Done {
        let (charge, part) = (&self.check.charges()[at], &self.parts[at]);
        let Inner { leases, counts, .. } = &**self.inner;
        let most = self.inner.most_lent(charge);
        // What costs more than may be held is never lent, and does not make anybody take more
        // ahead.
        if charge.cost == 0 || most < 2 || charge.cost > most {
            return Done::No;
        }
        let mut shard = leases.shard(part.name);
        let make = || Lease::new(charge.clone().into_owned(), part.limit, self.now);
        let Some(lease) = leases.entry(&mut shard, part.name, make) else { return Done::No };
        if !lease.is_under(part.limit) {
            // The limit has changed: what was taken under the old one is given back, and the next
            // request begins anew.
            let old = std::mem::replace(lease, make());
            drop(shard);
            self.inner.return_soon(old);
            return Done::No;
        }
        add(&counts.lease_units_expired, lease.expire(self.now));
        let until = lease.expires();
        let spent = lease.spend(charge.cost, self.now);
        let more = if self.inner.may_take_ahead() { lease.ask(most, self.now) } else { None };
        drop(shard);
        if let Some(units) = more {
            self.inner.take_ahead(part.name, charge.clone().into_owned(), units);
        }
        match spent {
            Some(verdict) => {
                one(&counts.spent_here);
                add(&counts.lease_units_spent, charge.cost);
                Done::Leased(verdict, until)
            }
            None => Done::No,
        }
    }

    /// Decides a charge that is charged afterwards.
    fn spend(&self, at: usize) -> Result<Done, Verdict> {
        let (charge, part) = (&self.check.charges()[at], &self.parts[at]);
        let Inner { unsynced, counts, .. } = &**self.inner;
        let cap = self.inner.cap(charge);
        if charge.cost == 0 || cap == 0 || self.inner.closed.load(Ordering::Relaxed) {
            return Ok(Done::No);
        }
        let mut shard = unsynced.shard(part.name);
        let make = || Unsynced::new(charge.clone().into_owned(), part.limit, self.now);
        let Some(own) = unsynced.entry(&mut shard, part.name, make) else { return Ok(Done::No) };
        own.is_under(charge, part.limit);
        match own.spend(charge.cost, cap, self.now) {
            Here::Spent(verdict) => {
                one(&counts.async_here);
                Ok(Done::Async(verdict))
            }
            Here::Denied(verdict) => Err(verdict),
            Here::Ask => Ok(Done::No),
        }
    }

    /// A denial by one charge, if the fields of all others are known, too.
    fn denial(&self, at: usize, denied: Verdict) -> Option<Decision> {
        let verdicts =
            self.parts.iter().zip(self.check.charges()).enumerate().map(|(own, (part, charge))| {
                if own == at {
                    return Some(denied);
                }
                let unsynced = self
                    .inner
                    .unsynced
                    .shard(part.name)
                    .get(&part.name)
                    .map_or(0, Unsynced::unsynced);
                self.last_answer(part, |seen| {
                    seen.expected(&charge.limit, charge.cost, unsynced, self.now)
                })
            });
        Some(local(verdicts.collect::<Option<_>>()?, false, self.now))
    }

    /// What was spent here stays spent.
    fn keep(&mut self) {
        self.kept = true;
    }

    /// Puts together what was decided here and what the store said of the rest.
    fn with(&self, asked: &[usize], decision: &Decision) -> Decision {
        let mut from_store = asked.iter().zip(decision.charges()).peekable();
        let verdicts = self.parts.iter().enumerate().map(|(at, part)| {
            if let Some((_, verdict)) = from_store.next_if(|(own, _)| **own == at) {
                return *verdict;
            }
            match part.done {
                Done::Leased(verdict, _) | Done::Async(verdict) if decision.allowed() => verdict,
                Done::Leased(verdict, _) | Done::Async(verdict) => Verdict {
                    granted: 0,
                    remaining: verdict.remaining.saturating_add(verdict.granted),
                    ..verdict
                },
                Done::No => Verdict::default(),
            }
        });
        let (source, at) = (decision.source(), decision.at());
        Decision::of_many(verdicts.collect(), decision.allowed(), at).with_source(source)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        for (part, charge) in self.parts.iter().zip(self.check.charges()) {
            match part.done {
                Done::No => {}
                Done::Leased(_, until) => self.inner.unspend_lease(part.name, charge.cost, until),
                Done::Async(_) => {
                    if let Some(own) = self.inner.unsynced.shard(part.name).get_mut(&part.name) {
                        own.unspend(charge.cost);
                    }
                }
            }
        }
    }
}

/// A decision of this node, from what the store had told it.
fn local(verdicts: Vec<Verdict>, allowed: bool, now: Timestamp) -> Decision {
    let decision = match &verdicts[..] {
        [only] => Decision::of_one(*only, allowed, now),
        _ => Decision::of_many(verdicts, allowed, now),
    };
    decision.with_source(Source::Local)
}

/// Chance, that can be had again from its seed.
struct Random(AtomicU64);

impl Random {
    fn new(seed: Option<u64>) -> Self {
        use std::hash::{BuildHasher, RandomState};
        Random(AtomicU64::new(seed.unwrap_or_else(|| RandomState::new().hash_one(0_u8))))
    }

    fn next(&self) -> u64 {
        let mut z = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn id(&self) -> Id {
        Id(self.next() | 1)
    }
}
