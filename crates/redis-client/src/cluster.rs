//! The map of a cluster: which node owns which slot.
//!
//! `CLUSTER SLOTS` of any node returns it; one task at a time reads it, at most ten times a second.
//! In between, a redirect updates one slot immediately.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::NodeId;
use super::address::Address;
use super::chance::Chance;
use super::conn::{Reply, Shape};
use super::node::{Means, Node};
use super::outcome::{Failure, FailureKind, rule};
use super::resp::{Value, put_command};
use super::slot::SLOTS;
use super::url::Host;

/// The shortest time between two reads of the map.
const SPACING: Duration = Duration::from_millis(100);
/// The timeout of one node for its map; there are others.
const PATIENCE: Duration = Duration::from_millis(500);
/// The most nodes that a map may have. Redis itself recommends no more than a thousand.
const MAX_NODES: usize = 2000;
/// A slot without an owner.
const NO_OWNER: u16 = u16::MAX;

/// The nodes and slots of a cluster, by the last map.
pub(super) struct Cluster {
    seeds: Vec<Host>,
    means: Means,
    map: RwLock<Map>,
    reading: Mutex<MapRead>,
    /// Notified when a read of the map ends.
    ended: Notify,
    myself: Weak<Cluster>,
}

struct Map {
    nodes: Vec<Arc<Node>>,
    /// For every slot the index of its owner in `nodes`, or [`NO_OWNER`].
    owners: Box<[u16]>,
}

/// The state of reading the map.
#[derive(Default)]
struct MapRead {
    busy: bool,
    /// When the last read began.
    last: Option<Instant>,
    /// Whether a read has ended.
    has_ended: bool,
    /// Why the last one failed, if it did.
    failure: Option<Failure>,
    /// The node to query first: a redirect named it, so its map is current.
    first: Option<Arc<Node>>,
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Host>, means: Means) -> Arc<Self> {
        let map = Map { nodes: Vec::new(), owners: vec![NO_OWNER; SLOTS].into() };
        Arc::new_cyclic(|myself| Cluster {
            seeds,
            means,
            map: RwLock::new(map),
            reading: Mutex::default(),
            ended: Notify::new(),
            myself: Weak::clone(myself),
        })
    }

    /// The node that owns a slot. Waits for the map if it has never been read.
    pub(super) async fn owner(&self, slot: u16, deadline: Instant) -> Result<Arc<Node>, Failure> {
        if let Some(node) = self.map.read().owner(slot) {
            return Ok(node);
        }
        // A map may be empty: then no node has slots, and another read does not help this call.
        let (first_time, failure) = {
            let reading = self.reading.lock();
            (!reading.has_ended, reading.failure.clone())
        };
        if first_time {
            self.read_now(deadline).await?;
            if let Some(node) = self.map.read().owner(slot) {
                return Ok(node);
            }
        } else {
            self.read_soon(None);
        }
        Err(failure.unwrap_or_else(|| {
            let text = format!("no node of the cluster serves slot {slot}");
            Failure::local(FailureKind::ClusterDown, text)
        }))
    }

    /// The index of a slot's owner, if it has one.
    pub(super) fn place(&self, slot: u16) -> Option<u16> {
        self.map.read().owners.get(usize::from(slot)).copied().filter(|owner| *owner != NO_OWNER)
    }

    /// All nodes that own slots.
    pub(super) async fn masters(&self, deadline: Instant) -> Result<Vec<NodeId>, Failure> {
        if self.map.read().nodes.is_empty() {
            self.read_now(deadline).await?;
        }
        let map = self.map.read();
        let mut owning = vec![false; map.nodes.len()];
        for &owner in &map.owners {
            if let Some(owning) = owning.get_mut(usize::from(owner)) {
                *owning = true;
            }
        }
        let masters = map.nodes.iter().zip(owning).filter(|(_, owning)| *owning);
        Ok(masters.map(|(node, _)| node.id().clone()).collect())
    }

    pub(super) fn node(&self, id: &NodeId) -> Option<Arc<Node>> {
        self.map.read().nodes.iter().find(|node| node.id() == id).cloned()
    }

    /// Records that a slot has moved to `host`, and returns the node there.
    pub(super) fn moved(&self, slot: u16, host: Host) -> Option<Arc<Node>> {
        let node = {
            let mut map = self.map.write();
            let index = map.add(host, &self.means)?;
            if let Some(owner) = map.owners.get_mut(usize::from(slot)) {
                *owner = u16::try_from(index).unwrap_or(NO_OWNER);
            }
            Arc::clone(&map.nodes[index])
        };
        self.read_soon(Some(Arc::clone(&node)));
        Some(node)
    }

    /// The node at `host`, for a single ASK.
    pub(super) fn node_at(&self, host: Host) -> Option<Arc<Node>> {
        let mut map = self.map.write();
        let index = map.add(host, &self.means)?;
        Some(Arc::clone(&map.nodes[index]))
    }

    /// Reads the map and waits for the result.
    pub(super) async fn read_now(&self, deadline: Instant) -> Result<(), Failure> {
        let mut ended = std::pin::pin!(self.ended.notified());
        ended.as_mut().enable();
        self.read_soon(None);
        if timeout_at(deadline, ended).await.is_err() {
            return Err(Failure::local(
                FailureKind::Timeout,
                "the map of the cluster could not be read in time",
            ));
        }
        match &self.reading.lock().failure {
            None => Ok(()),
            Some(failure) => Err(failure.clone()),
        }
    }

    /// Starts a task that reads the map, unless one is running.
    pub(super) fn read_soon(&self, first: Option<Arc<Node>>) {
        let mut reading = self.reading.lock();
        if first.is_some() {
            reading.first = first;
        }
        if std::mem::replace(&mut reading.busy, true) {
            return;
        }
        let not_before = reading.last.map(|last| last + SPACING);
        drop(reading);
        let Some(cluster) = self.myself.upgrade() else { return };
        let task = ReadTask(cluster);
        tokio::spawn(async move {
            if let Some(not_before) = not_before {
                sleep_until(not_before).await;
            }
            task.0.read().await;
        });
    }

    async fn read(&self) {
        self.means.counting.discoveries.one();
        let first = {
            let mut reading = self.reading.lock();
            reading.last = Some(Instant::now());
            reading.first.take()
        };
        let mut failure =
            Failure::local(FailureKind::ClusterDown, "the cluster has no nodes to ask");
        for node in self.candidates(first) {
            match read_from(&node).await.and_then(|shards| self.install(&node, &shards)) {
                Ok(()) => {
                    self.reading.lock().failure = None;
                    return;
                }
                Err(other) => failure = other,
            }
        }
        self.reading.lock().failure = Some(failure);
    }

    /// The nodes to query, in order: one that a redirect named, connected ones from a random start,
    /// the seeds, the rest.
    fn candidates(&self, first: Option<Arc<Node>>) -> Vec<Arc<Node>> {
        let mut nodes = self.map.read().nodes.clone();
        shuffle(&mut nodes, &self.means.settings.chance);
        let (up, down): (Vec<_>, Vec<_>) = nodes.into_iter().partition(|node| node.is_up());
        let mut all: Vec<Arc<Node>> = first.into_iter().chain(up).collect();
        let mut seeds = self.seeds.clone();
        shuffle(&mut seeds, &self.means.settings.chance);
        for seed in seeds {
            let address = Address::Tcp(seed);
            let known = all.iter().chain(&down).find(|node| node.id().0 == address).cloned();
            // Used for this read only, unless the map lists it.
            all.push(known.unwrap_or_else(|| Node::new(address, &self.means)));
        }
        all.extend(down);
        let mut seen = Vec::new();
        all.retain(|node| {
            let new = !seen.contains(node.id());
            seen.push(node.id().clone());
            new
        });
        all
    }

    /// Installs the map that a node returned.
    fn install(&self, source: &Arc<Node>, shards: &Value) -> Result<(), Failure> {
        let shards = read_shards(shards, &source.id().0).ok_or_else(|| {
            let text = format!("{} told a map of the cluster that makes no sense", source.id());
            Failure::local(FailureKind::Protocol, text)
        })?;
        let mut map = self.map.write();
        let mut new = Map { nodes: Vec::new(), owners: vec![NO_OWNER; SLOTS].into() };
        let keep = map.nodes.iter().chain([source]);
        let known: Vec<Arc<Node>> = keep.cloned().collect();
        for (first, last, host) in shards {
            let address = Address::Tcp(host);
            let index =
                new.nodes.iter().position(|node| node.id().0 == address).unwrap_or_else(|| {
                    let node = known.iter().find(|node| node.id().0 == address).cloned();
                    new.nodes.push(node.unwrap_or_else(|| Node::new(address, &self.means)));
                    new.nodes.len() - 1
                });
            new.owners[first..=last].fill(u16::try_from(index).unwrap_or(NO_OWNER));
        }
        // A node that a redirect named may have no slots yet.
        for node in &map.nodes {
            if node.pointed_at.swap(false, Ordering::Relaxed)
                && !new.nodes.iter().any(|other| other.id() == node.id())
            {
                new.nodes.push(Arc::clone(node));
            }
        }
        let old = std::mem::replace(&mut *map, new);
        drop(map);
        // Removed nodes close here, outside the lock, or when the last call to them ends.
        drop(old);
        Ok(())
    }
}

impl Map {
    fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        let owner = *self.owners.get(usize::from(slot))?;
        self.nodes.get(usize::from(owner)).cloned()
    }

    /// The node at `host`, made if there is none.
    fn add(&mut self, host: Host, means: &Means) -> Option<usize> {
        let address = Address::Tcp(host);
        let index = match self.nodes.iter().position(|node| node.id().0 == address) {
            Some(index) => index,
            None if self.nodes.len() >= MAX_NODES => return None,
            None => {
                self.nodes.push(Node::new(address, means));
                self.nodes.len() - 1
            }
        };
        self.nodes[index].pointed_at.store(true, Ordering::Relaxed);
        Some(index)
    }
}

/// Starts at a random item, so that clients do not all query the same node.
fn shuffle<T>(items: &mut [T], chance: &Chance) {
    let start = chance.below(items.len());
    items.rotate_left(start);
}

/// A task that reads the map. When it ends, for whatever reason, waiting calls wake.
struct ReadTask(Arc<Cluster>);

impl Drop for ReadTask {
    fn drop(&mut self) {
        let mut reading = self.0.reading.lock();
        (reading.busy, reading.has_ended) = (false, true);
        drop(reading);
        self.0.ended.notify_waiters();
    }
}

async fn read_from(node: &Node) -> Result<Value, Failure> {
    let deadline = Instant::now() + PATIENCE;
    match node
        .conn()
        .call(Shape::COMMAND, |out| put_command(out, &["CLUSTER", "SLOTS"]), deadline)
        .await
    {
        Reply::Value(value) => Ok(value),
        Reply::Error { text, .. } => Err(Failure::said(rule(&text).kind, &text)
            .during(&format!("{} rejected CLUSTER SLOTS", node.id()))),
        Reply::Failed { failure, .. } => Err(failure),
    }
}

/// Ranges of slots with the master of each.
fn read_shards(value: &Value, source: &Address) -> Option<Vec<(usize, usize, Host)>> {
    let mut shards = Vec::new();
    for shard in value.as_array()? {
        let [first, last, master, ..] = shard.as_array()? else { return None };
        let slot =
            |value: &Value| usize::try_from(value.as_int()?).ok().filter(|slot| *slot < SLOTS);
        let (first, last) = (slot(first)?, slot(last)?);
        let [name, port, ..] = master.as_array()? else { return None };
        let port = u16::try_from(port.as_int()?).ok().filter(|port| *port > 0)?;
        let Some(host) = host_of(name.as_str().unwrap_or(""), port, source) else { continue };
        if first > last {
            return None;
        }
        shards.push((first, last, host));
    }
    let mut hosts: Vec<&Host> = shards.iter().map(|(_, _, host)| host).collect();
    hosts.sort_by(|one, other| (&one.name, one.port).cmp(&(&other.name, other.port)));
    hosts.dedup();
    (hosts.len() <= MAX_NODES).then_some(shards)
}

/// The host that a node names: an empty name means the node itself, `?` an unknown host.
pub(super) fn host_of(name: &str, port: u16, source: &Address) -> Option<Host> {
    match (name, source) {
        ("?", _) => None,
        ("", Address::Tcp(source)) => Some(Host { name: Arc::clone(&source.name), port }),
        ("", _) => None,
        (name, _) => Host::announced(name, port),
    }
}

/// The slot and host of `MOVED 3999 127.0.0.1:6381` or `ASK …`.
pub(super) fn read_redirect(error: &str, source: &Address) -> Option<(u16, Host)> {
    let mut words = error.split(' ');
    let (_, slot, address) = (words.next()?, words.next()?, words.next()?);
    let slot = slot.parse::<u16>().ok().filter(|slot| usize::from(*slot) < SLOTS)?;
    // An IPv6 address has colons itself, and no brackets.
    let (name, port) = address.rsplit_once(':')?;
    let port = port.parse::<u16>().ok().filter(|port| *port > 0)?;
    Some((slot, host_of(name, port, source)?))
}
