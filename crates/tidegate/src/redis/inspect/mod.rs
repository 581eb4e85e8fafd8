//! The startup check: is this a server that limits can be kept on, and what would go wrong?
//!
//! Every server that takes writes is looked at. What is found is a [`Finding`]: how bad it is, why
//! it matters, what to do. [`facts`] judges what the server says about itself, [`rights`] finds out
//! by trying what the user may do, [`clock`] compares the clocks. Nobody's keys are touched: what
//! is tried is tried on keys of the store's own, which end by themselves.

mod clock;
mod facts;
mod rights;

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use self::clock::Reading;
use self::facts::Info;
pub(super) use self::facts::{Shard, shards};
pub(super) use self::rights::{missing_rights, probe};
use super::Redis;
use tidegate_redis_client::{Failure, FailureKind, NodeId, Outcome, Value};

/// How long one question may take. A server that is slower than this is not one to keep limits on.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often the clock is read. The quickest answer says most.
const READINGS: usize = 5;

/// What the startup check found; see [`Redis::inspect`]. `Display` is for people.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// The servers that take writes, by address.
    pub servers: Vec<String>,
    /// What was found, in the order in which it was looked at.
    pub findings: Vec<Finding>,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was looked at.
    pub topic: Topic,
    /// On which of the servers.
    pub servers: Vec<String>,
    /// What was found.
    pub found: String,
    /// Why it matters, in a sentence or two; empty where nothing is wrong.
    pub why: String,
    /// What to do about it; empty where nothing has to be done.
    pub advice: String,
}

/// How bad a finding is, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// It works, and under some circumstances it will admit too much or have no answer.
    Warning,
    /// It does not work, or what it tells callers is wrong.
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

/// What a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Topic {
    /// Whether the server answers.
    Reach,
    /// Which server it is, and how old.
    Version,
    /// Whether it takes writes.
    Role,
    /// What it drops when its memory is full.
    Eviction,
    /// What it knows after a restart.
    Persistence,
    /// Who takes over when it is lost.
    Replicas,
    /// Whether all slots of a cluster are served.
    Cluster,
    /// What the user may do.
    Rights,
    /// Whether a decision can be made.
    Decision,
    /// How its clock differs from this machine's.
    Clock,
    /// How long it takes to answer.
    RoundTrip,
}

impl Topic {
    /// One word, or two with a dash.
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
    /// How bad the worst finding is.
    pub fn worst(&self) -> Severity {
        self.findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
    }

    /// Adds a finding about one server. What is the same on several is told once.
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
    /// The startup check: looks at every server that takes writes, and says what would go wrong
    /// with limits kept there. Takes a few dozen round trips; nothing is changed.
    ///
    /// What the user may not look at is a note, so it may be run with the rights of the store.
    ///
    /// # Errors
    /// If no server can be reached, or it does not let us in.
    pub async fn inspect(&self) -> Result<Inspection, Failure> {
        let router = &self.inner.router;
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
                // It may not be asked for; which right is missing is told below.
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

    /// Judges what one server says about itself.
    async fn look_at(&self, master: &NodeId, inspection: &mut Inspection) {
        let server = master.to_string();
        match self.ask(master, &["INFO"]).await {
            Ok(text) => {
                let info = Info::parse(text.as_str().unwrap_or_default());
                let cluster = self.inner.router.is_cluster();
                for finding in facts::judge(&info, cluster) {
                    inspection.add(&server, finding);
                }
            }
            Err(failure) => inspection.add(&server, rights::unseen("INFO", &failure)),
        }
    }

    /// What only a cluster has: its state, and slots to try out on every server.
    async fn look_at_cluster(&self, reached: &[&NodeId], inspection: &mut Inspection) {
        for master in reached {
            let server = master.to_string();
            match self.ask(master, &["CLUSTER", "INFO"]).await {
                Ok(text) => {
                    let info = Info::parse(text.as_str().unwrap_or_default());
                    inspection.add(&server, facts::judge_cluster(&info));
                }
                Err(failure) => inspection.add(&server, rights::unseen("CLUSTER INFO", &failure)),
            }
        }
        let Some(master) = reached.first() else { return };
        let shards = match self.ask(master, &["CLUSTER", "SLOTS"]).await {
            Ok(slots) => shards(&slots),
            Err(_) => Vec::new(), // it has been asked before, or we would not be here
        };
        for Shard { master, slots } in shards {
            self.try_out(&master, slots, inspection).await;
        }
    }

    /// One command on one server.
    async fn ask(&self, node: &NodeId, words: &[&str]) -> Result<Value, Failure> {
        match self.inner.router.command(node, words, patience()).await {
            Outcome::Applied(value) => Ok(value),
            Outcome::NotApplied(failure) | Outcome::Unknown(failure) => Err(failure),
        }
    }

    /// The server's clock beside ours.
    async fn clock_of(&self, node: &NodeId) -> Result<Reading, Failure> {
        // The first question may have to wait for the connection.
        self.ask(node, &["TIME"]).await?;
        let mut best: Option<Reading> = None;
        for _ in 0..READINGS {
            let (wall, began) = (clock::wall_us(), Instant::now());
            let time = self.ask(node, &["TIME"]).await?;
            let round_trip = began.elapsed();
            if let Some(server_us) = clock::time_us(&time) {
                let reading = Reading::new(wall, server_us, round_trip);
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

/// Whether it is useless to ask on. Everything else is an answer of the server itself.
fn cannot_talk(kind: FailureKind) -> bool {
    !matches!(kind, FailureKind::NoPerm | FailureKind::Loading | FailureKind::Busy)
}
