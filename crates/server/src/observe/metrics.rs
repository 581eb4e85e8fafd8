//! Numbers, in the text format of Prometheus.
//!
//! Labels are listeners, outcomes and the names of rules, never anything a client chooses, so the
//! number of series is bounded by the rules file. What is counted for every decision is spread over
//! shards, one for each thread as far as they go, so that threads do not wait for each other's
//! cache lines. Decisions in this process take less time than reading a clock twice would add, so
//! one in [`TIMED`] is timed; decisions that cross a network are all timed.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use tidegate::resilience::{BreakerState, ResilienceStats};

use super::in_force::InForce;
use crate::backend::Backend;
use crate::protocol::Protocol;
use crate::ruling::Ruling;

/// One in so many decisions in this process is timed.
pub const TIMED: u64 = 64;
/// The most rules that are counted by name; the rest, of Envoy's files, is counted together.
pub const MAX_NAMES: usize = 2000;
/// The most shards.
const MAX_SHARDS: usize = 16;
/// Upper bounds of the latency buckets are 1 us, 2 us, 4 us … to about half a second; then
/// infinity.
const BUCKETS: usize = 20;

/// How a question ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It may pass.
    Allowed,
    /// It may not.
    Denied,
    /// It was not a question that can be decided.
    Invalid,
    /// The store had no answer.
    Failed,
}

impl Outcome {
    const ALL: [Outcome; 4] =
        [Outcome::Allowed, Outcome::Denied, Outcome::Invalid, Outcome::Failed];

    const fn name(self) -> &'static str {
        match self {
            Outcome::Allowed => "allowed",
            Outcome::Denied => "denied",
            Outcome::Invalid => "invalid",
            Outcome::Failed => "failed",
        }
    }
}

/// Why somebody at a listener was not served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Too many connections.
    Full,
    /// Too many connections from one address.
    FullForAddress,
    /// No TLS came about.
    Tls,
    /// A wrong token, or none.
    Token,
    /// Somebody who is not trusted spoke for others.
    Untrusted,
    /// Too slow: a head, a body, a command or the reading of answers took too long.
    Slow,
    /// Too many frames of HTTP/2 about nothing: it had to wait.
    Flood,
    /// HTTP/2 was misused: the connection ended, and its place stayed taken for a while.
    Misuse,
    /// The upstream of the proxy did not answer.
    Upstream,
    /// Too many wrong tokens came before: the token was not looked at.
    Guessing,
    /// A web page of another origin sent it, or it was sent to a name that is not known.
    Browser,
}

impl Refusal {
    const ALL: [Refusal; 11] = [
        Refusal::Full,
        Refusal::FullForAddress,
        Refusal::Tls,
        Refusal::Token,
        Refusal::Untrusted,
        Refusal::Slow,
        Refusal::Flood,
        Refusal::Misuse,
        Refusal::Upstream,
        Refusal::Guessing,
        Refusal::Browser,
    ];

    const fn name(self) -> &'static str {
        match self {
            Refusal::Full => "full",
            Refusal::FullForAddress => "full_for_address",
            Refusal::Tls => "tls",
            Refusal::Token => "token",
            Refusal::Untrusted => "untrusted",
            Refusal::Slow => "slow",
            Refusal::Flood => "flood",
            Refusal::Misuse => "misuse",
            Refusal::Upstream => "upstream",
            Refusal::Guessing => "guessing",
            Refusal::Browser => "browser",
        }
    }
}

/// What is read again when it changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reloaded {
    /// The rules.
    Rules,
    /// Certificates.
    Certificates,
    /// Tokens.
    Tokens,
}

impl Reloaded {
    const ALL: [Reloaded; 3] = [Reloaded::Rules, Reloaded::Certificates, Reloaded::Tokens];

    const fn name(self) -> &'static str {
        match self {
            Reloaded::Rules => "rules",
            Reloaded::Certificates => "certificates",
            Reloaded::Tokens => "tokens",
        }
    }
}

/// What the watchdog has found stalled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stall {
    /// The event loop runs no tasks.
    Runtime,
    /// A shard of the store in memory stays locked.
    Store,
}

impl Stall {
    const ALL: [Stall; 2] = [Stall::Runtime, Stall::Store];

    /// The word used in metrics and logs.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Stall::Runtime => "runtime",
            Stall::Store => "store",
        }
    }
}

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

/// All numbers.
#[derive(Debug)]
pub struct Metrics {
    started: Instant,
    shards: Box<[Shard]>,
    rules: ArcSwap<HashMap<Arc<str>, Arc<RuleCounts>>>,
    /// Of rules that are in no file: what Envoy brings in its requests.
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
struct Line {
    allowed: AtomicU64,
    denied: AtomicU64,
}

/// What one rule has said.
#[derive(Debug)]
struct RuleCounts {
    lines: Box<[Line]>,
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
        RuleCounts { lines: (0..shards()).map(|_| Line::default()).collect(), shadow }
    }

    fn count(&self, allowed: bool) {
        let line = &self.lines[thread() & (self.lines.len() - 1)];
        let counter = if allowed { &line.allowed } else { &line.denied };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self) -> (u64, u64) {
        let sum = |of: fn(&Line) -> &AtomicU64| {
            self.lines.iter().map(|line| of(line).load(Ordering::Relaxed)).sum()
        };
        (sum(|line| &line.allowed), sum(|line| &line.denied))
    }
}

impl Metrics {
    /// These are the rules now: name, and whether it is in shadow mode. What was counted under a
    /// name that stays is kept.
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

    /// The same for up to `most` decisions at once in this process, if one of them is to be timed.
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

    /// Every rule that took part is counted by what it said itself.
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

    pub(crate) fn stalled(&self, who: Stall) {
        self.stalls[who as usize].fetch_add(1, Ordering::Relaxed);
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

    /// All numbers as text. Makes a few hundred lines, and twice as many as there are rules.
    pub fn text(&self, store: &Backend, log_lines_lost: u64) -> String {
        let mut page = Page(String::with_capacity(16 << 10));
        self.decisions(&mut page);
        self.of_rules(&mut page);
        self.of_protocols(&mut page);
        self.of_the_store(&mut page, store);
        self.of_the_process(&mut page, log_lines_lost);
        page.0
    }

    fn decisions(&self, page: &mut Page) {
        page.head(
            "tidegate_decisions_total",
            "counter",
            "Questions asked through a listener, by how they ended.",
        );
        for protocol in Protocol::OUTER {
            for outcome in Outcome::ALL {
                let of = |shard: &Shard| {
                    shard.decisions[protocol as usize][outcome as usize].load(Ordering::Relaxed)
                };
                let count = self.shards.iter().map(of).sum::<u64>();
                let labels =
                    format!(r#"protocol="{}",outcome="{}""#, protocol.name(), outcome.name());
                page.line("tidegate_decisions_total", &labels, count);
            }
        }
        page.head(
            "tidegate_decision_seconds",
            "histogram",
            "Time from question to answer within the engine; in this process one in 64 is timed.",
        );
        for protocol in Protocol::OUTER {
            let labels = format!(r#"protocol="{}""#, protocol.name());
            page.histogram(
                "tidegate_decision_seconds",
                &labels,
                self.shards.iter().map(|shard| &shard.protocols[protocol as usize]),
            );
        }
    }

    fn of_rules(&self, page: &mut Page) {
        let rules = self.rules.load();
        let mut names: Vec<_> = rules.iter().collect();
        names.sort_by(|a, b| a.0.cmp(b.0));
        let parts = [
            (false, "tidegate_rule_decisions_total", "What each enforced rule said itself."),
            (
                true,
                "tidegate_shadow_decisions_total",
                "What each rule in shadow mode would have said.",
            ),
        ];
        for (shadow, metric, help) in parts {
            page.head(metric, "counter", help);
            let mut line = |name: &str, counts: &RuleCounts| {
                let (allowed, denied) = counts.read();
                page.line(
                    metric,
                    &format!(r#"rule="{}",outcome="allowed""#, escaped(name)),
                    allowed,
                );
                page.line(metric, &format!(r#"rule="{}",outcome="denied""#, escaped(name)), denied);
            };
            for (name, counts) in names.iter().filter(|(_, counts)| counts.shadow == shadow) {
                line(name, counts);
            }
            if !shadow && self.other.read() != (0, 0) {
                line("other", &self.other);
            }
        }
    }

    fn of_protocols(&self, page: &mut Page) {
        page.head("tidegate_connections", "gauge", "Connections that are open at a listener.");
        for protocol in Protocol::OUTER {
            page.line(
                "tidegate_connections",
                &format!(r#"protocol="{}""#, protocol.name()),
                self.connections(protocol),
            );
        }
        page.head(
            "tidegate_connections_total",
            "counter",
            "Connections that were let in at a listener.",
        );
        for protocol in Protocol::OUTER {
            let accepted = self.protocols[protocol as usize].accepted.load(Ordering::Relaxed);
            page.line(
                "tidegate_connections_total",
                &format!(r#"protocol="{}""#, protocol.name()),
                accepted,
            );
        }
        page.head(
            "tidegate_refused_total",
            "counter",
            "Connections and requests that a listener did not serve, by reason.",
        );
        for protocol in Protocol::OUTER {
            for why in Refusal::ALL {
                let count =
                    self.protocols[protocol as usize].refused[why as usize].load(Ordering::Relaxed);
                let labels = format!(r#"protocol="{}",reason="{}""#, protocol.name(), why.name());
                page.line("tidegate_refused_total", &labels, count);
            }
        }
        page.single(
            "tidegate_accept_errors_total",
            "counter",
            "Times no connection could be accepted, as when files ran out.",
            &self.accept_errors,
        );
    }

    fn of_the_store(&self, page: &mut Page, store: &Backend) {
        let name = if matches!(store, Backend::Memory(_)) { "memory" } else { "redis" };
        page.head(
            "tidegate_store_seconds",
            "histogram",
            "Time the store took; in this process one call in 64 is timed.",
        );
        page.histogram(
            "tidegate_store_seconds",
            &format!(r#"store="{name}""#),
            self.shards.iter().map(|shard| &shard.store),
        );
        let (failed, answered) =
            (self.failed_at.load(Ordering::Relaxed), self.answered_at.load(Ordering::Relaxed));
        page.head(
            "tidegate_store_up",
            "gauge",
            "1 if the store decides; 0 if it is unreachable or refuses.",
        );
        page.line(
            "tidegate_store_up",
            &format!(r#"store="{name}""#),
            u8::from(!store.is_away() && (failed == 0 || answered > failed)),
        );
        if let Backend::Memory(memory) = store {
            page.head("tidegate_store_keys", "gauge", "Keys that are kept.");
            page.line("tidegate_store_keys", "", memory.len());
            page.head("tidegate_store_bytes", "gauge", "Bytes the store has allocated.");
            page.line("tidegate_store_bytes", "", memory.allocated_bytes());
            page.head("tidegate_store_max_bytes", "gauge", "Bytes the store may allocate.");
            page.line("tidegate_store_max_bytes", "", memory.max_bytes());
            page.head(
                "tidegate_store_overflows_total",
                "counter",
                "Charges that found no room in the store.",
            );
            page.line("tidegate_store_overflows_total", "", memory.without_room());
            let number = |number: &AtomicU64| number.load(Ordering::Relaxed);
            let Snapshots { saved, failed, bytes, at, micros } = &self.snapshots;
            page.head(
                "tidegate_snapshots_total",
                "counter",
                "Times that state was written to its file, or could not be.",
            );
            for (result, count) in [("ok", saved), ("failed", failed)] {
                page.line(
                    "tidegate_snapshots_total",
                    &format!(r#"result="{result}""#),
                    number(count),
                );
            }
            page.head(
                "tidegate_snapshot_timestamp_seconds",
                "gauge",
                "When state was last written; 0: not yet.",
            );
            page.line("tidegate_snapshot_timestamp_seconds", "", number(at));
            page.head("tidegate_snapshot_bytes", "gauge", "Bytes that were written then.");
            page.line("tidegate_snapshot_bytes", "", number(bytes));
            page.head("tidegate_snapshot_duration_seconds", "gauge", "How long that took.");
            page.line("tidegate_snapshot_duration_seconds", "", number(micros) as f64 / 1e6);
        }
        if let Backend::Redis(redis) | Backend::Resilient(_, redis) = store {
            let stats = redis.stats();
            for (event, count) in [
                ("call", stats.calls),
                ("coalesced", stats.coalesced),
                ("regression", stats.regressions),
                ("clock_regression", stats.clock_regressions),
                ("repair", stats.repairs),
                ("reconnect", stats.reconnects),
                ("retry", stats.retries),
                ("redirect", stats.redirects),
                ("script_load", stats.script_loads),
                ("timeout", stats.timeouts),
            ] {
                if event == "call" {
                    page.head(
                        "tidegate_store_events_total",
                        "counter",
                        "What the connection to the store has counted.",
                    );
                }
                page.line("tidegate_store_events_total", &format!(r#"event="{event}""#), count);
            }
        }
        if let Backend::Resilient(resilient, _) = store {
            near_the_store(page, &resilient.stats());
        }
    }

    fn of_the_process(&self, page: &mut Page, log_lines_lost: u64) {
        page.head(
            "tidegate_reloads_total",
            "counter",
            "Files read again because they changed, and whether they were good.",
        );
        for what in Reloaded::ALL {
            for (at, result) in ["ok", "failed"].into_iter().enumerate() {
                let count = self.reloads[what as usize][at].load(Ordering::Relaxed);
                page.line(
                    "tidegate_reloads_total",
                    &format!(r#"what="{}",result="{result}""#, what.name()),
                    count,
                );
            }
        }
        page.head(
            "tidegate_config_in_force",
            "gauge",
            "1 if everything that the files say is in force; 0 if a file is refused or a setting needs a restart.",
        );
        page.line("tidegate_config_in_force", "", u8::from(self.in_force.is_whole()));
        page.single(
            "tidegate_panics_total",
            "counter",
            "Requests and tasks that panicked. Expected: 0.",
            &self.panics,
        );
        page.single(
            "tidegate_task_restarts_total",
            "counter",
            "Background tasks that were started again.",
            &self.restarts,
        );
        page.head(
            "tidegate_stalls_total",
            "counter",
            "Times that somebody was stuck for a tenth of a second. Expected: 0.",
        );
        for who in Stall::ALL {
            let count = self.stalls[who as usize].load(Ordering::Relaxed);
            page.line("tidegate_stalls_total", &format!(r#"what="{}""#, who.name()), count);
        }
        page.head("tidegate_log_lines_lost_total", "counter", "Lines of the log that nobody took.");
        page.line("tidegate_log_lines_lost_total", "", log_lines_lost);
        page.head("tidegate_uptime_seconds", "gauge", "Time since the start.");
        page.line("tidegate_uptime_seconds", "", self.started.elapsed().as_secs());
        page.head("tidegate_info", "gauge", "What is running.");
        page.line("tidegate_info", concat!(r#"version=""#, env!("CARGO_PKG_VERSION"), r#"""#), 1);
    }
}

/// What stands before a remote store.
fn near_the_store(page: &mut Page, stats: &ResilienceStats) {
    let open = u8::from(stats.breaker == BreakerState::Open);
    for (name, help, value) in [
        (
            "tidegate_breaker_open",
            "1 if the store is not called now: it does not answer, or refuses for good.",
            u64::from(open),
        ),
        (
            "tidegate_store_calls_in_flight",
            "Calls to the store that are under way.",
            stats.in_flight,
        ),
        ("tidegate_leases", "Keys of which this node has taken units ahead.", stats.leases),
        (
            "tidegate_lease_units_held",
            "Units that were taken ahead and can still be spent.",
            stats.lease_units_held,
        ),
        (
            "tidegate_unsynced_units",
            "Units that were let pass and are not yet charged.",
            stats.unsynced_units,
        ),
        ("tidegate_nodes", "By how many nodes limits are divided.", stats.nodes),
    ] {
        page.head(name, "gauge", help);
        page.line(name, "", value);
    }
    page.head("tidegate_mode_changes_total", "counter", "Times the breaker opened and closed.");
    for (to, count) in [("open", stats.opened), ("closed", stats.closed)] {
        page.line("tidegate_mode_changes_total", &format!(r#"to="{to}""#), count);
    }
    page.head(
        "tidegate_local_decisions_total",
        "counter",
        "Decisions made here from what the store had told, by kind.",
    );
    for (kind, count) in
        [("denial", stats.denied_here), ("lease", stats.spent_here), ("async", stats.async_here)]
    {
        page.line("tidegate_local_decisions_total", &format!(r#"kind="{kind}""#), count);
    }
    page.head(
        "tidegate_fallback_decisions_total",
        "counter",
        "Decisions made here because the store did not answer.",
    );
    for (outcome, count) in [("allowed", stats.fallback_allowed), ("denied", stats.fallback_denied)]
    {
        page.line("tidegate_fallback_decisions_total", &format!(r#"outcome="{outcome}""#), count);
    }
    page.head(
        "tidegate_store_missed_total",
        "counter",
        "Questions the store did not answer or was not asked, by reason.",
    );
    for (reason, count) in
        [("no_answer", stats.misses), ("breaker", stats.not_asked), ("overload", stats.overloads)]
    {
        page.line("tidegate_store_missed_total", &format!(r#"reason="{reason}""#), count);
    }
    page.head(
        "tidegate_lease_units_total",
        "counter",
        "Units taken ahead, and what became of them.",
    );
    for (fate, count) in [
        ("granted", stats.lease_units_granted),
        ("spent", stats.lease_units_spent),
        ("returned", stats.lease_units_returned),
        ("expired", stats.lease_units_expired),
    ] {
        page.line("tidegate_lease_units_total", &format!(r#"fate="{fate}""#), count);
    }
    page.head("tidegate_synced_units_total", "counter", "Units that were charged afterwards.");
    page.line("tidegate_synced_units_total", "", stats.synced_units);
    page.head(
        "tidegate_fail_open_total",
        "counter",
        "Requests that passed uncharged, because a rule fails open.",
    );
    page.line("tidegate_fail_open_total", "", stats.fail_open);
}

/// Text in the making.
struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn line(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        _ = if labels.is_empty() {
            writeln!(self.0, "{name} {value}")
        } else {
            writeln!(self.0, "{name}{{{labels}}} {value}")
        };
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: &AtomicU64) {
        self.head(name, kind, help);
        self.line(name, "", value.load(Ordering::Relaxed));
    }

    fn histogram<'a>(
        &mut self,
        name: &str,
        labels: &str,
        parts: impl Iterator<Item = &'a Histogram>,
    ) {
        let (mut buckets, mut sum_ns) = ([0u64; BUCKETS + 1], 0u64);
        for part in parts {
            for (sum, own) in buckets.iter_mut().zip(&part.buckets) {
                *sum += own.load(Ordering::Relaxed);
            }
            sum_ns = sum_ns.saturating_add(part.sum_ns.load(Ordering::Relaxed));
        }
        let mut count = 0;
        for (at, bucket) in buckets.iter().enumerate() {
            count += bucket;
            let bound = if at < BUCKETS { seconds(1000 << at) } else { "+Inf".into() };
            self.line(&format!("{name}_bucket"), &format!(r#"{labels},le="{bound}""#), count);
        }
        self.line(&format!("{name}_sum"), labels, seconds(sum_ns));
        self.line(&format!("{name}_count"), labels, count);
    }
}

/// Nanoseconds as a decimal number of seconds, exactly.
fn seconds(ns: u64) -> String {
    let text = format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// The value of a label: names of rules need no escaping, those of Envoy's files may.
fn escaped(name: &str) -> String {
    name.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n")
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

    #[test]
    fn seconds_are_written_exactly() {
        for (ns, expected) in
            [(0, "0"), (1000, "0.000001"), (1_500_000_000, "1.5"), (1_000 << 19, "0.524288")]
        {
            assert_eq!(seconds(ns), expected);
        }
    }
}
