//! The metrics.
//!
//! Labels are protocols, outcomes and the names of rules, never anything a client chooses, so the
//! number of series is bounded by the rules file. Counters of every decision are sharded by thread,
//! so that threads do not share cache lines. Reading a clock twice takes longer than a decision in
//! memory, so one in [`TIMED`] is timed; all calls over a network are. →
//! docs/decisions/0050-metrics-without-a-crate.md

mod labels;
mod text;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;

pub(crate) use self::labels::Stall;
pub use self::labels::{Outcome, Refusal, Reloaded};
use super::in_force::InForce;
use crate::protocol::Protocol;
use crate::ruling::Ruling;

/// One in this many decisions in memory is timed.
pub const TIMED: u64 = 64;
/// The most rules that are counted by name; the rest, of Envoy's files, is counted together.
pub const MAX_NAMES: usize = 2000;
/// The most shards.
const MAX_SHARDS: usize = 16;
/// Upper bounds of the latency buckets are 1 us, 2 us, 4 us … to about half a second; then
/// infinity.
const BUCKETS: usize = 20;

/// How state was written to its file.
#[derive(Debug, Default)]
struct Snapshots {
    saved: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    /// Seconds since the epoch.
    at: AtomicU64,
    micros: AtomicU64,
}

/// All metrics.
#[derive(Debug)]
pub struct Metrics {
    started: Instant,
    shards: Box<[Shard]>,
    rules: ArcSwap<HashMap<Arc<str>, Arc<RuleCounts>>>,
    /// Rules beyond the bound, and those of Envoy's requests, which are in no file.
    other: RuleCounts,
    protocols: [ProtocolCounts; Protocol::ALL.len()],
    reloads: [[AtomicU64; 2]; Reloaded::ALL.len()],
    in_force: InForce,
    accept_errors: AtomicU64,
    panics: AtomicU64,
    restarts: AtomicU64,
    stalls: [AtomicU64; Stall::ALL.len()],
    snapshots: Snapshots,
    /// When the store last failed, as microseconds since the start plus one; and when it last
    /// answered.
    failed_at: AtomicU64,
    answered_at: AtomicU64,
}

/// What every decision counts. Whole cache lines, so that no two shards share one.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    decisions: [[AtomicU64; Outcome::ALL.len()]; Protocol::ALL.len()],
    protocols: [Histogram; Protocol::ALL.len()],
    store: Histogram,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct RuleShard {
    allowed: AtomicU64,
    denied: AtomicU64,
}

/// The decisions of one rule.
#[derive(Debug)]
struct RuleCounts {
    shards: Box<[RuleShard]>,
    shadow: bool,
}

#[derive(Debug, Default)]
struct ProtocolCounts {
    open: AtomicI64,
    accepted: AtomicU64,
    refused: [AtomicU64; Refusal::ALL.len()],
}

#[derive(Debug, Default)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS + 1],
    sum_ns: AtomicU64,
}

impl Histogram {
    fn record(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        // The bucket of up to 2^n us is number n.
        let bucket = match ns.div_ceil(1000) {
            0 | 1 => 0,
            us => ((us - 1).ilog2() + 1) as usize,
        };
        self.buckets[bucket.min(BUCKETS)].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics {
            started: Instant::now(),
            shards: (0..shards()).map(|_| Shard::default()).collect(),
            rules: ArcSwap::default(),
            other: RuleCounts::new(false),
            protocols: Default::default(),
            reloads: Default::default(),
            in_force: InForce::default(),
            accept_errors: AtomicU64::new(0),
            panics: AtomicU64::new(0),
            restarts: AtomicU64::new(0),
            stalls: Default::default(),
            snapshots: Snapshots::default(),
            failed_at: AtomicU64::new(0),
            answered_at: AtomicU64::new(0),
        }
    }
}

/// As many shards as there are processors, rounded up to a power of two.
fn shards() -> usize {
    std::thread::available_parallelism().map_or(4, usize::from).next_power_of_two().min(MAX_SHARDS)
}

/// The number of this thread; threads count from 0 as they come.
fn thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    OWN.with(|own| {
        if own.get() == usize::MAX {
            own.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        own.get()
    })
}

impl RuleCounts {
    fn new(shadow: bool) -> Self {
        RuleCounts { shards: (0..shards()).map(|_| RuleShard::default()).collect(), shadow }
    }

    fn count(&self, allowed: bool) {
        let line = &self.shards[thread() & (self.shards.len() - 1)];
        let counter = if allowed { &line.allowed } else { &line.denied };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self) -> (u64, u64) {
        let sum = |of: fn(&RuleShard) -> &AtomicU64| {
            self.shards.iter().map(|line| of(line).load(Ordering::Relaxed)).sum()
        };
        (sum(|line| &line.allowed), sum(|line| &line.denied))
    }
}

impl Metrics {
    /// Sets the names of the rules, and whether each is in shadow mode. Counts of names that stay
    /// are kept.
    pub(crate) fn set_rules<'a>(&self, names: impl Iterator<Item = (&'a Arc<str>, bool)>) {
        let known = self.rules.load();
        let fresh = names.map(|(name, shadow)| {
            let counts = known.get(name).filter(|counts| counts.shadow == shadow).cloned();
            (Arc::clone(name), counts.unwrap_or_else(|| Arc::new(RuleCounts::new(shadow))))
        });
        self.rules.store(Arc::new(fresh.take(MAX_NAMES).collect()));
    }

    fn shard(&self) -> &Shard {
        &self.shards[thread() & (self.shards.len() - 1)]
    }

    /// A clock, if this decision is to be timed.
    pub(crate) fn clock(&self, protocol: Protocol, remote: bool) -> Option<Instant> {
        let timed = remote || {
            let own = &self.shard().decisions[protocol as usize];
            (own[0].load(Ordering::Relaxed) + own[1].load(Ordering::Relaxed)).is_multiple_of(TIMED)
        };
        timed.then(Instant::now)
    }

    /// A clock for a batch of up to `most` decisions in memory, if one of them is to be timed.
    pub(crate) fn clock_of_some(&self, protocol: Protocol, most: u64) -> Option<Instant> {
        let own = &self.shard().decisions[protocol as usize];
        let since = (own[0].load(Ordering::Relaxed) + own[1].load(Ordering::Relaxed)) % TIMED;
        (since == 0 || since + most > TIMED).then(Instant::now)
    }

    /// So many decisions in this process, which began then, are made: what one of them took.
    pub(crate) fn some_took(&self, protocol: Protocol, began: Option<Instant>, count: u64) {
        if let (Some(began), 1..) = (began, count) {
            let each = began.elapsed() / u32::try_from(count).unwrap_or(u32::MAX);
            let shard = self.shard();
            shard.store.record(each);
            shard.protocols[protocol as usize].record(each);
            self.answered_at.store(self.now(), Ordering::Relaxed);
        }
    }

    /// The store has answered a call that began then.
    pub(crate) fn store_took(&self, began: Option<Instant>) {
        if let Some(began) = began {
            self.shard().store.record(began.elapsed());
            self.answered_at.store(self.now(), Ordering::Relaxed);
        }
    }

    /// The engine has answered a question of this listener that began then.
    pub(crate) fn protocol_took(&self, protocol: Protocol, began: Option<Instant>) {
        if let Some(began) = began {
            self.shard().protocols[protocol as usize].record(began.elapsed());
        }
    }

    pub(crate) fn store_failed(&self) {
        self.failed_at.store(self.now(), Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX).saturating_add(1)
    }

    pub(crate) fn decided(&self, protocol: Protocol, outcome: Outcome) {
        self.shard().decisions[protocol as usize][outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn decided_some(&self, protocol: Protocol, outcome: Outcome, count: u64) {
        if count > 0 {
            self.shard().decisions[protocol as usize][outcome as usize]
                .fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Counts the decision of each rule that took part.
    pub(crate) fn ruled(&self, ruling: &Ruling) {
        let rules = self.rules.load();
        let of = |name: &Arc<str>| rules.get(name).map_or(&self.other, |counts| &**counts);
        if let Some(refused_by) = &ruling.refused_by {
            of(&refused_by.name).count(false);
        }
        if let Some(exempted_by) = &ruling.exempted_by {
            of(&exempted_by.name).count(true);
        }
        if let Some(decision) = &ruling.decision {
            // The limits of a rule stand next to each other; together they are one answer.
            let mut charges = ruling.charges.iter().zip(decision.charges()).peekable();
            while let Some((charge, verdict)) = charges.next() {
                let mut allowed = verdict.allowed;
                while let Some((_, verdict)) =
                    charges.next_if(|(next, _)| Arc::ptr_eq(&next.rule, &charge.rule))
                {
                    allowed &= verdict.allowed;
                }
                of(&charge.rule.name).count(allowed);
            }
        }
        for shadowed in &ruling.shadow {
            of(&shadowed.rule.name).count(shadowed.allowed);
        }
    }

    pub(crate) fn came(&self, protocol: Protocol) {
        let counts = &self.protocols[protocol as usize];
        counts.accepted.fetch_add(1, Ordering::Relaxed);
        counts.open.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn left(&self, protocol: Protocol) {
        self.protocols[protocol as usize].open.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn refused(&self, protocol: Protocol, why: Refusal) {
        self.protocols[protocol as usize].refused[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn accept_failed(&self) {
        self.accept_errors.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn panicked(&self) {
        self.panics.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn restarted(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
    }

    /// State was written to its file, so many bytes of it, or could not be.
    pub(crate) fn saved(&self, bytes: Option<u64>, took: Duration) {
        let Snapshots { saved, failed, bytes: last, at, micros } = &self.snapshots;
        let Some(bytes) = bytes else {
            failed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        saved.fetch_add(1, Ordering::Relaxed);
        last.store(bytes, Ordering::Relaxed);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        at.store(now.as_secs(), Ordering::Relaxed);
        micros.store(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn stalled(&self, what: Stall) {
        self.stalls[what as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Which files say something else than what is in force.
    pub fn in_force(&self) -> &InForce {
        &self.in_force
    }

    pub(crate) fn reloaded(&self, what: Reloaded, ok: bool) {
        self.reloads[what as usize][usize::from(!ok)].fetch_add(1, Ordering::Relaxed);
    }

    /// Connections that are open at a listener.
    pub fn connections(&self, protocol: Protocol) -> i64 {
        self.protocols[protocol as usize].open.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_fall_into_their_buckets() {
        let histogram = Histogram::default();
        for ns in [0, 1, 1000, 1001, 2000, 2001, 4000, 1_000_000, u64::MAX] {
            histogram.record(Duration::from_nanos(ns));
        }
        let counts: Vec<u64> =
            histogram.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        assert_eq!(counts[..3], [3, 2, 2]);
        assert_eq!((counts[10], counts[BUCKETS]), (1, 1), "1 ms is up to 1.024 ms");
        assert_eq!(counts.iter().sum::<u64>(), 9);
    }
}
