//! Sends calls to the server that must answer them, and decides by the table what to do when it does not.

use std::sync::Arc;

use tokio::time::Instant;

use super::conn::{Conn, Reply, Shape};
use super::counters::Counting;
use super::dial::{Place, Profile};
use super::node::{Call, Node};
use super::outcome::{Failure, FailureKind, Outcome, Then, rule};
use super::resp::put_command;
use super::url::Servers;
use super::{Counters, MAX_CONNECTIONS, NodeId, RedisUrl, Script, Settings};

/// Calls to the servers behind one address. Cheap to clone; everything ends when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Router(Arc<Inner>);

struct Inner {
    topology: Topology,
    settings: Arc<Settings>,
    counting: Arc<Counting>,
}

enum Topology {
    One(Arc<Node>),
}

impl Router {
    /// Checks address and settings. Connects when the first call is made, so a server that is down stops nobody from starting.
    pub(crate) fn new(url: RedisUrl, settings: Settings) -> Result<Router, Failure> {
        check(&settings)?;
        let settings = Arc::new(settings);
        let counting = Arc::new(Counting::default());
        let profile = Arc::new(Profile {
            login: url.login.clone(),
            database: url.database,
            protocol: url.protocol,
            client_name: settings.client_name.clone(),
        });
        let topology = match url.servers {
            Servers::One(host) => Topology::One(Node::new(Place::Tcp(host), &profile, &settings, &counting)),
            Servers::Unix(path) => Topology::One(Node::new(Place::Unix(path), &profile, &settings, &counting)),
            _ => return Err(Failure::local(FailureKind::Other, "this kind of address is not known yet")),
        };
        Ok(Router(Arc::new(Inner { topology, settings, counting })))
    }

    /// When a call that begins now must have ended.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.0.settings.timeout
    }

    /// Runs a script once on the server that owns `slot`. A server that does not have the script is given it.
    pub(crate) async fn eval<K: AsRef<[u8]>, A: AsRef<[u8]>>(
        &self,
        script: &Script,
        slot: u16,
        keys: &[K],
        args: &[A],
        deadline: Instant,
    ) -> Outcome {
        let _ = slot;
        let call = Call { script, keys, args };
        let Topology::One(node) = &self.0.topology;
        let mut may_retry = true;
        loop {
            let conn = node.conn();
            let reply = node.eval(conn, &call, false, deadline).await;
            let outcome = match self.judge(conn, reply) {
                (outcome, Next::GiveUp) => return outcome,
                (outcome, Next::Retry) => outcome,
            };
            if !may_retry || Instant::now() >= deadline {
                return outcome;
            }
            may_retry = false;
            self.0.counting.retries.one();
        }
    }

    /// Runs one command on one server.
    pub(crate) async fn command<W: AsRef<[u8]>>(&self, node: &NodeId, words: &[W], deadline: Instant) -> Outcome {
        let Topology::One(known) = &self.0.topology;
        if known.id() != node {
            let text = format!("{node} is not one of the servers");
            return Outcome::NotApplied(Failure::local(FailureKind::Other, text));
        }
        let conn = known.conn();
        let reply = conn.call(Shape::COMMAND, |out| put_command(out, words), deadline).await;
        self.judge(conn, reply).0
    }

    /// The servers that take writes.
    pub(crate) async fn masters(&self, _deadline: Instant) -> Result<Vec<NodeId>, Failure> {
        let Topology::One(node) = &self.0.topology;
        Ok(vec![node.id().clone()])
    }

    /// Whether keys are spread over slots, so that a script must not touch two.
    pub(crate) fn is_cluster(&self) -> bool {
        false
    }

    /// What has happened so far.
    pub(crate) fn counters(&self) -> Counters {
        self.0.counting.read()
    }

    /// What became of a call, and what to do about it.
    fn judge(&self, conn: &Conn, reply: Reply) -> (Outcome, Next) {
        match reply {
            Reply::Value(value) => (Outcome::Applied(value), Next::GiveUp),
            Reply::Failed { failure, begun: true } => (Outcome::Unknown(failure), Next::GiveUp),
            Reply::Failed { failure, begun: false } => {
                // The connection broke before the call was sent; the next one is being made. Everything else would meet the same again.
                let next = if failure.kind() == FailureKind::Disconnected { Next::Retry } else { Next::GiveUp };
                (Outcome::NotApplied(failure), next)
            }
            Reply::Error { text, epoch } => {
                let ruling = rule(&text);
                let failure = Failure::said(ruling.kind, &text);
                let next = match ruling.then {
                    Then::Rediscover if conn.retire(epoch) => Next::Retry,
                    Then::Reconnect => {
                        conn.retire(epoch);
                        Next::GiveUp
                    }
                    _ => Next::GiveUp,
                };
                let outcome =
                    if ruling.not_applied { Outcome::NotApplied(failure) } else { Outcome::Unknown(failure) };
                (outcome, next)
            }
        }
    }
}

enum Next {
    GiveUp,
    Retry,
}

fn check(settings: &Settings) -> Result<(), Failure> {
    let wrong = |text: String| Err(Failure::local(FailureKind::Other, text));
    if !(1..=MAX_CONNECTIONS).contains(&settings.connections_per_node) {
        let found = settings.connections_per_node;
        return wrong(format!("connections_per_node {found}: expected 1 to {MAX_CONNECTIONS}"));
    }
    if !(1..=1 << 20).contains(&settings.max_in_flight) {
        return wrong(format!("max_in_flight {}: expected 1 to {}", settings.max_in_flight, 1 << 20));
    }
    for (name, value) in [
        ("timeout", settings.timeout),
        ("connect_timeout", settings.connect_timeout),
        ("silence", settings.silence),
        ("ping_every", settings.ping_every),
    ] {
        if value.is_zero() {
            return wrong(format!("{name} 0: expected more than nothing"));
        }
    }
    Ok(())
}
