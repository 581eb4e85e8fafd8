//! The startup check: whether a server can hold limits, what would go wrong, and how fast it is.
//!
//! [`Redis::inspect`] checks every server that takes writes and returns [`Finding`]s: how severe,
//! why it matters, what to do. [`Redis::measure`] times round trips and decisions. Both write only
//! keys of their own, which expire.
//!
//! ```no_run
//! use tidegate::redis::inspect::Severity;
//! # async fn example(redis: tidegate::redis::Redis) -> Result<(), Box<dyn std::error::Error>> {
//! let inspection = redis.inspect().await?;
//! if inspection.worst() >= Severity::Warning {
//!     eprintln!("{inspection}");
//! }
//! # Ok(()) }
//! ```
//!
//! `facts.rs` judges `INFO` and `CLUSTER INFO`, `rights.rs` runs every command that decisions need,
//! `clock.rs` compares the clocks, `measure.rs` times calls.

mod clock;
mod facts;
mod measure;
mod rights;

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use self::clock::ClockReading;
use self::facts::Info;
pub(super) use self::facts::{SlotRange, slot_ranges};
pub(super) use self::measure::failure_of;
pub use self::measure::{RoundTrips, SlowStore, Times};
pub(super) use self::rights::{missing_rights, probe};
use super::Redis;
use tidegate_redis_client::{Failure, FailureKind, NodeId, Outcome, Value};

/// The timeout of one command. A slower server cannot hold limits.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often the clock is read; the fastest reply is the most precise.
const READINGS: usize = 5;

/// The findings of [`Redis::inspect`]. `Display` is for people.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// The servers that take writes, by address.
    pub servers: Vec<String>,
    /// The findings, in the order of the checks.
    pub findings: Vec<Finding>,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was checked.
    pub topic: Topic,
    /// The servers with this result.
    pub servers: Vec<String>,
    /// The result, in a few words.
    pub found: String,
    /// Why it matters; empty where nothing is wrong.
    pub why: String,
    /// What to do; empty where nothing has to be done.
    pub advice: String,
}

/// How severe a finding is, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// It works, but sometimes it will allow too much or not answer.
    Warning,
    /// It does not work, or its answers are wrong.
    Problem,
}

impl Severity {
    /// `ok`, `note`, `warning` or `problem`.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Ok => "ok",
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Problem => "problem",
        }
    }
}

/// The subject of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Topic {
    /// Whether the server answers.
    Reach,
    /// Its name and version.
    Version,
    /// Whether it takes writes.
    Role,
    /// What it evicts when its memory is full.
    Eviction,
    /// What it keeps over a restart.
    Persistence,
    /// Whether a replica can take over.
    Replicas,
    /// Whether all slots of a cluster are served.
    Cluster,
    /// The rights of the user.
    Rights,
    /// Whether a decision can be made.
    Decision,
    /// How its clock differs from this machine's.
    Clock,
    /// How long a round trip takes.
    RoundTrip,
}

impl Topic {
    /// The name, as `doctor` prints it: one word, or two with a dash.
    pub fn name(self) -> &'static str {
        match self {
            Topic::Reach => "reach",
            Topic::Version => "version",
            Topic::Role => "role",
            Topic::Eviction => "eviction",
            Topic::Persistence => "persistence",
            Topic::Replicas => "replicas",
            Topic::Cluster => "cluster",
            Topic::Rights => "rights",
            Topic::Decision => "decision",
            Topic::Clock => "clock",
            Topic::RoundTrip => "round-trip",
        }
    }
}

impl Inspection {
    /// The severity of the worst finding.
    pub fn worst(&self) -> Severity {
        self.findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
    }

    /// Adds a finding about one server. Servers with the same finding share it.
    fn add(&mut self, server: &str, finding: Finding) {
        let same = |other: &&mut Finding| {
            (other.severity, other.topic) == (finding.severity, finding.topic)
                && (&other.found, &other.why, &other.advice)
                    == (&finding.found, &finding.why, &finding.advice)
        };
        match self.findings.iter_mut().find(same) {
            Some(other) => other.servers.push(server.into()),
            None => self.findings.push(Finding { servers: vec![server.into()], ..finding }),
        }
    }
}

impl Finding {
    fn new(severity: Severity, topic: Topic, found: impl Into<String>) -> Self {
        let (why, advice) = (String::new(), String::new());
        Finding { severity, topic, servers: Vec::new(), found: found.into(), why, advice }
    }

    fn ok(topic: Topic, found: impl Into<String>) -> Self {
        Self::new(Severity::Ok, topic, found)
    }

    fn because(mut self, why: impl Into<String>) -> Self {
        self.why = why.into();
        self
    }

    fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = advice.into();
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.topic.name(), self.found)
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            write!(f, "{:7}  {finding}", finding.severity.name())?;
            if finding.servers.len() < self.servers.len() {
                write!(f, " ({})", finding.servers.join(", "))?;
            }
            writeln!(f)?;
            for more in [&finding.why, &finding.advice].into_iter().filter(|text| !text.is_empty())
            {
                writeln!(f, "         {more}")?;
            }
        }
        Ok(())
    }
}

impl Redis {
    /// The startup check: checks every server that takes writes for what would go wrong with limits
    /// there, in a few dozen round trips. It changes nothing.
    ///
    /// A check for which the user lacks a right is a note, so the rights of the store are enough.
    ///
    /// # Errors
    /// If no server can be reached, or the login fails.
    pub async fn inspect(&self) -> Result<Inspection, Failure> {
        let router = &self.shared.router;
        let masters = router.masters(patience()).await?;
        let servers = masters.iter().map(NodeId::to_string).collect();
        let mut inspection = Inspection { servers, findings: Vec::new() };
        let (mut clocks, mut round_trips) = (Vec::new(), Vec::new());
        let mut reached = Vec::new();
        for master in &masters {
            let server = master.to_string();
            let time = match self.clock_of(master).await {
                Err(failure) if cannot_talk(failure.kind()) && masters.len() == 1 => {
                    return Err(failure);
                }
                Err(failure) if cannot_talk(failure.kind()) => {
                    let why = "its part of the keys has no answers.";
                    let finding =
                        Finding::new(Severity::Problem, Topic::Reach, failure.to_string())
                            .because(why);
                    inspection.add(
                        &server,
                        finding.advise("Bring it back, or let its replica take over."),
                    );
                    continue;
                }
                // The right to run TIME may be missing; that is a finding below.
                Err(_) => None,
                Ok(reading) => Some(reading),
            };
            reached.push(master);
            self.look_at(master, &mut inspection).await;
            if let Some(reading) = time {
                inspection.add(&server, clock::judge_clock(&reading));
                clocks.push(reading.ahead_us);
                round_trips.push((server, reading.round_trip));
            }
        }
        inspection.findings.extend(clock::judge_round_trips(&round_trips));
        if router.is_cluster() {
            if let Some(finding) = clock::judge_spread(&clocks) {
                let servers = inspection.servers.clone();
                inspection.findings.push(Finding { servers, ..finding });
            }
            self.look_at_cluster(&reached, &mut inspection).await;
        } else if let Some(master) = reached.first() {
            let refused = inspection.findings.iter().any(|finding| finding.topic == Topic::Cluster);
            if !refused {
                self.try_out(&master.to_string(), 0..=u16::MAX, &mut inspection).await;
            }
        }
        Ok(inspection)
    }

    /// Checks `INFO` of one server.
    async fn look_at(&self, master: &NodeId, inspection: &mut Inspection) {
        let server = master.to_string();
        match self.command(master, &["INFO"]).await {
            Ok(text) => {
                let info = Info::parse(text.as_str().unwrap_or_default());
                let cluster = self.shared.router.is_cluster();
                for finding in facts::judge(&info, cluster) {
                    inspection.add(&server, finding);
                }
            }
            Err(failure) => inspection.add(&server, rights::unseen("INFO", &failure)),
        }
    }

    /// Checks the state of a cluster, and a slot of every server.
    async fn look_at_cluster(&self, reached: &[&NodeId], inspection: &mut Inspection) {
        for master in reached {
            let server = master.to_string();
            match self.command(master, &["CLUSTER", "INFO"]).await {
                Ok(text) => {
                    let info = Info::parse(text.as_str().unwrap_or_default());
                    inspection.add(&server, facts::judge_cluster(&info));
                }
                Err(failure) => inspection.add(&server, rights::unseen("CLUSTER INFO", &failure)),
            }
        }
        let Some(master) = reached.first() else { return };
        let slot_ranges = match self.command(master, &["CLUSTER", "SLOTS"]).await {
            Ok(slots) => slot_ranges(&slots),
            Err(_) => Vec::new(), // it succeeded before, or there would be no masters
        };
        for SlotRange { master, slots } in slot_ranges {
            self.try_out(&master, slots, inspection).await;
        }
    }

    /// One command on one server.
    async fn command(&self, node: &NodeId, words: &[&str]) -> Result<Value, Failure> {
        match self.shared.router.command(node, words, patience()).await {
            Outcome::Applied(value) => Ok(value),
            Outcome::NotApplied(failure) | Outcome::Unknown(failure) => Err(failure),
        }
    }

    /// The offset of the server's clock to this machine's.
    async fn clock_of(&self, node: &NodeId) -> Result<ClockReading, Failure> {
        // The first command may have to wait for the connection.
        self.command(node, &["TIME"]).await?;
        let mut best: Option<ClockReading> = None;
        for _ in 0..READINGS {
            let (wall, began) = (clock::wall_us(), Instant::now());
            let time = self.command(node, &["TIME"]).await?;
            let round_trip = began.elapsed();
            if let Some(server_us) = clock::time_us(&time) {
                let reading = ClockReading::new(wall, server_us, round_trip);
                if best.as_ref().is_none_or(|best| reading.round_trip < best.round_trip) {
                    best = Some(reading);
                }
            }
        }
        best.ok_or_else(|| {
            Failure::local(
                FailureKind::Protocol,
                format!("{node} answered TIME with something else"),
            )
        })
    }
}

fn patience() -> Instant {
    Instant::now() + PATIENCE
}

/// Whether further commands would fail, too. Other failures are replies of the server.
fn cannot_talk(kind: FailureKind) -> bool {
    !matches!(kind, FailureKind::NoPerm | FailureKind::Loading | FailureKind::Busy)
}
