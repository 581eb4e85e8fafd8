//! Sends calls to the server that owns their slot, and retries by the table of outcomes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::address::Address;
use super::cluster::{Cluster, read_redirect};
use super::conn::{Conn, Reply, Shape, Stage};
use super::connect::Profile;
use super::counters::Counting;
use super::node::{Means, Node, ScriptCall};
use super::outcome::{Failure, FailureKind, Outcome, Then, rule};
use super::resp::put_command;
use super::sentinel::Sentinels;
use super::url::{self, Login};
use super::{Counters, MAX_CONNECTIONS, NodeId, RedisUrl, Script, Settings};

/// How often one call follows MOVED.
const MAX_REDIRECTS: u32 = 3;

/// The wait before a retry to a cluster that is down, and the largest part of the remaining time
/// that it may take.
const MOMENT: (Duration, u32) = (Duration::from_millis(50), 4);

/// Sends calls to the servers of one [`RedisUrl`]. Cheap to clone; connections close when the last
/// clone is dropped.
#[derive(Clone)]
pub struct Router(Arc<Shared>);

struct Shared {
    topology: Topology,
    settings: Arc<Settings>,
    counting: Arc<Counting>,
}

enum Topology {
    /// One server, or the primary of a service.
    One(Arc<Node>),
    Cluster(Arc<Cluster>),
}

impl Router {
    /// Checks the settings and reads the TLS files. The first call connects, so a server that is
    /// down is not an error here.
    ///
    /// # Errors
    /// If a setting is out of range, a TLS file cannot be used, or TLS is not compiled in.
    pub fn new(url: RedisUrl, settings: Settings) -> Result<Router, Failure> {
        check(&settings)?;
        #[cfg(not(feature = "tls"))]
        if url.tls.is_some() {
            let text = format!(
                "{url} is over TLS: expected tidegate to be built with its feature redis-tls"
            );
            return Err(Failure::local(FailureKind::Tls, text));
        }
        let profile = |login: &Login, database| -> Result<Profile, Failure> {
            Ok(Profile {
                login: login.clone(),
                database,
                protocol: url.protocol,
                client_name: settings.client_name.clone(),
                connector: settings.connector.clone(),
                #[cfg(feature = "tls")]
                tls: url.tls.as_ref().map(super::tls::TlsClient::new).transpose()?,
            })
        };
        let counting = Arc::new(Counting::default());
        let mut means = Means {
            profile: Arc::new(profile(&url.login, url.database)?),
            sentinels: None,
            settings: Arc::new(settings.clone()),
            counting: Arc::clone(&counting),
        };
        let settings = Arc::clone(&means.settings);
        let topology = match &url.servers {
            url::Servers::One(host) => Topology::One(Node::new(Address::Tcp(host.clone()), &means)),
            url::Servers::Unix(path) => {
                Topology::One(Node::new(Address::Unix(path.clone()), &means))
            }
            url::Servers::Sentinel { sentinels, service, login } => {
                let profile = profile(login, 0)?;
                let sentinels =
                    Sentinels::new(service, sentinels.clone(), profile, Arc::clone(&counting));
                let place = Address::Service(Arc::clone(sentinels.service()));
                means.sentinels = Some(Arc::new(sentinels));
                Topology::One(Node::new(place, &means))
            }
            url::Servers::Cluster(seeds) => Topology::Cluster(Cluster::new(seeds.clone(), means)),
        };
        Ok(Router(Arc::new(Shared { topology, settings, counting })))
    }

    /// The deadline of a call that starts now.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.0.settings.timeout
    }

    /// Runs a script once on the server that owns `slot`. Loads the script where it is missing.
    pub async fn eval<K: AsRef<[u8]>, A: AsRef<[u8]>>(
        &self,
        script: &Script,
        slot: u16,
        keys: &[K],
        args: &[A],
        deadline: Instant,
    ) -> Outcome {
        let call = ScriptCall { script, keys, args };
        let counting = &self.0.counting;
        let (mut retries, mut redirects, mut asks) = (1_u32, MAX_REDIRECTS, 1_u32);
        let mut ask_node = None;
        loop {
            let asking = ask_node.is_some();
            let node = match ask_node.take() {
                Some(node) => node,
                None => match self.owner(slot, deadline).await {
                    Ok(node) => node,
                    Err(failure) => return Outcome::NotApplied(failure),
                },
            };
            let conn = node.conn();
            let reply = node.eval(conn, &call, asking, deadline).await;
            let (outcome, next) = self.judge(&node, conn, reply);
            match next {
                Next::GiveUp => return outcome,
                _ if Instant::now() >= deadline => return outcome,
                Next::Retry if retries > 0 => {
                    retries -= 1;
                    counting.retries.one();
                }
                Next::Wait if retries > 0 => {
                    retries -= 1;
                    counting.retries.one();
                    let (moment, part) = MOMENT;
                    sleep(moment.min((deadline - Instant::now()) / part)).await;
                }
                Next::Owner if redirects > 0 => {
                    redirects -= 1;
                    counting.redirects.one();
                }
                Next::Ask(node) if asks > 0 => {
                    asks -= 1;
                    ask_node = Some(node);
                    counting.redirects.one();
                }
                _ => return outcome,
            }
        }
    }

    /// Runs one command on one server, once.
    pub async fn command<W: AsRef<[u8]>>(
        &self,
        node: &NodeId,
        words: &[W],
        deadline: Instant,
    ) -> Outcome {
        let known = match &self.0.topology {
            Topology::One(known) => Some(known).filter(|known| known.id() == node).cloned(),
            Topology::Cluster(cluster) => cluster.node(node),
        };
        let Some(node) = known else {
            let text = format!("{node} is not one of the servers");
            return Outcome::NotApplied(Failure::local(FailureKind::Other, text));
        };
        let conn = node.conn();
        let reply = conn.call(Shape::COMMAND, |out| put_command(out, words), deadline).await;
        self.judge(&node, conn, reply).0
    }

    /// The servers that take writes; reads the map of the cluster if it was never read.
    ///
    /// # Errors
    /// If no node of the cluster returns a map before `deadline`.
    pub async fn masters(&self, deadline: Instant) -> Result<Vec<NodeId>, Failure> {
        match &self.0.topology {
            Topology::One(node) => Ok(vec![node.id().clone()]),
            Topology::Cluster(cluster) => cluster.masters(deadline).await,
        }
    }

    /// The index of the server that owns a slot, by the last map; `u16::MAX` without one. Another
    /// map may have other indices.
    pub fn place(&self, slot: u16) -> u16 {
        match &self.0.topology {
            Topology::One(_) => 0,
            Topology::Cluster(cluster) => cluster.place(slot).unwrap_or(u16::MAX),
        }
    }

    /// Whether keys are spread over slots, so that a script must not touch two.
    pub fn is_cluster(&self) -> bool {
        matches!(self.0.topology, Topology::Cluster(_))
    }

    /// What the connections have counted so far.
    pub fn counters(&self) -> Counters {
        self.0.counting.read()
    }

    async fn owner(&self, slot: u16, deadline: Instant) -> Result<Arc<Node>, Failure> {
        match &self.0.topology {
            Topology::One(node) => Ok(Arc::clone(node)),
            Topology::Cluster(cluster) => cluster.owner(slot, deadline).await,
        }
    }

    /// The outcome of a call, and what to do next.
    fn judge(&self, node: &Node, conn: &Conn, reply: Reply) -> (Outcome, Next) {
        let cluster = match &self.0.topology {
            Topology::One(_) => None,
            Topology::Cluster(cluster) => Some(cluster),
        };
        let (text, epoch) = match reply {
            Reply::Value(value) => return (Outcome::Applied(value), Next::GiveUp),
            Reply::Error { text, epoch } => (text, epoch),
            Reply::Failed { failure, stage } => {
                // Its slots may have another owner now.
                if let Some(cluster) = cluster.filter(|_| !conn.is_up()) {
                    cluster.read_soon(None);
                }
                let kind = failure.kind();
                return match stage {
                    Stage::Begun => (Outcome::Unknown(failure), Next::GiveUp),
                    // The connection broke before the call was sent; the driver reconnects.
                    Stage::Queued if kind == FailureKind::Disconnected => {
                        (Outcome::NotApplied(failure), Next::Retry)
                    }
                    // A retry would meet the same.
                    Stage::Queued | Stage::Refused => (Outcome::NotApplied(failure), Next::GiveUp),
                };
            }
        };
        let ruling = rule(&text);
        let next = match (ruling.then, cluster) {
            (Then::GiveUp | Then::Load, _) => Next::GiveUp,
            // On one server the name, or Sentinel, may lead to another address now.
            (Then::Rediscover, None) if conn.retire(epoch) => Next::Retry,
            (Then::Rediscover, None) => Next::GiveUp,
            (Then::Reconnect, _) => {
                conn.retire(epoch);
                Next::GiveUp
            }
            (Then::Rediscover, Some(cluster)) => {
                cluster.read_soon(None);
                Next::GiveUp
            }
            (Then::Wait, Some(cluster)) => {
                cluster.read_soon(None);
                Next::Wait
            }
            (Then::Follow, Some(cluster)) => {
                let found = read_redirect(&text, &node.id().0)
                    .and_then(|(slot, host)| cluster.moved(slot, host));
                if found.is_some() { Next::Owner } else { Next::GiveUp }
            }
            (Then::Ask, Some(cluster)) => {
                let found =
                    read_redirect(&text, &node.id().0).and_then(|(_, host)| cluster.node_at(host));
                found.map_or(Next::GiveUp, Next::Ask)
            }
            (Then::Follow | Then::Ask, None) => {
                return (
                    Outcome::NotApplied(Failure::said(FailureKind::Topology, &text)),
                    Next::GiveUp,
                );
            }
            (Then::Wait, None) => Next::GiveUp,
        };
        let mut failure = Failure::said(ruling.kind, &text);
        if ruling.then == Then::Rediscover && (cluster.is_some() || node.is_discovered()) {
            failure = failure.passing();
        }
        if ruling.not_applied {
            (Outcome::NotApplied(failure), next)
        } else {
            (Outcome::Unknown(failure), Next::GiveUp)
        }
    }
}

/// What to do next with a call that was not applied.
enum Next {
    GiveUp,
    /// Retry.
    Retry,
    /// Retry after a short wait.
    Wait,
    /// Retry on the new owner of the slot.
    Owner,
    /// Retry on this node, once.
    Ask(Arc<Node>),
}

fn check(settings: &Settings) -> Result<(), Failure> {
    let wrong = |text: String| Err(Failure::local(FailureKind::Other, text));
    if !(1..=MAX_CONNECTIONS).contains(&settings.connections_per_node) {
        let found = settings.connections_per_node;
        return wrong(format!("connections_per_node {found}: expected 1 to {MAX_CONNECTIONS}"));
    }
    if !(1..=1 << 20).contains(&settings.max_in_flight) {
        return wrong(format!(
            "max_in_flight {}: expected 1 to {}",
            settings.max_in_flight,
            1 << 20
        ));
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
