//! A cluster of six: three masters that share the slots, and a replica of each.

use std::thread;
use std::time::{Duration, Instant};

use crate::{Flavor, Reply, Server, wait_until};

/// How many slots a cluster has.
const SLOTS: u16 = 16_384;
const MASTERS: usize = 3;
/// Forming takes 2 s and a failover 3 s; a machine under load takes longer.
const PATIENCE: Duration = Duration::from_secs(60);
/// How much of the log of each node a failed test shows.
const LAST_LINES: usize = 80;
/// After so long a failover in agreement has come to nothing.
const FAILOVER: Duration = Duration::from_secs(6);

/// A running cluster. Its nodes are ordinary [`Server`]s: each can be stopped, killed and started
/// again by itself, and finds its way back. A master that is unresponsive for two seconds is
/// replaced.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Server>,
}

impl Cluster {
    /// Starts six nodes, makes them one cluster, and comes back when every node says that all is
    /// well and every replica follows its master.
    ///
    /// # Panics
    /// If that takes longer than a minute.
    pub fn start(flavor: Flavor) -> Cluster {
        Self::patient(flavor, Duration::from_secs(2))
    }

    /// The same, whose nodes wait so long before they take an unresponsive one for dead. For tests
    /// in which no node dies: on a busy machine two seconds are not much, and a cluster that takes
    /// a living master for dead says that it is down.
    ///
    /// # Panics
    /// If that takes longer than a minute.
    pub fn patient(flavor: Flavor, silence: Duration) -> Cluster {
        let silence = silence.as_millis().to_string();
        let node = || {
            let node = Server::builder(flavor).cluster_node().follows_at_once();
            node.arg("--cluster-enabled", "yes").arg("--cluster-node-timeout", &silence).start()
        };
        let nodes = thread::scope(|scope| {
            let starts: Vec<_> = (0..2 * MASTERS).map(|_| scope.spawn(node)).collect();
            starts.into_iter().map(|start| start.join().expect("a node starts")).collect()
        });
        let cluster = Cluster { nodes };
        cluster.form();
        cluster
    }

    /// All nodes, running or not. The first three began as masters, in the order of their slots.
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// What a client is given to find the cluster: any three nodes.
    pub fn url(&self) -> String {
        let hosts: Vec<_> =
            self.nodes[..MASTERS].iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// The slot that a key belongs to.
    pub fn slot_of(&self, key: &str) -> u16 {
        let node = self.awake().next().expect("a node is awake");
        u16::try_from(node.command(&["CLUSTER", "KEYSLOT", key]).int())
            .expect("a slot is less than 16384")
    }

    /// The node that serves a slot, by its own account.
    ///
    /// # Panics
    /// None, as between the death of a master and the election of the next.
    #[track_caller]
    pub fn master_of(&self, slot: u16) -> &Server {
        self.find_master(slot).unwrap_or_else(|| panic!("slot {slot} has no master that is awake"))
    }

    /// A replica, neither killed nor stopped, of the node that serves a slot.
    ///
    /// # Panics
    /// If there is none.
    #[track_caller]
    pub fn replica_of(&self, slot: u16) -> &Server {
        let master = self.id(self.master_of(slot));
        let is_replica = |node: &&Server| myself(node).is_some_and(|own| own.master == master);
        self.awake()
            .find(is_replica)
            .unwrap_or_else(|| panic!("slot {slot} has no replica that is awake"))
    }

    /// The name of a node within the cluster, as `CLUSTER SETSLOT` wants it.
    #[track_caller]
    pub fn id(&self, node: &Server) -> String {
        node.command(&["CLUSTER", "MYID"]).text().to_owned()
    }

    /// Lets master and replica of a slot change places, in agreement (`CLUSTER FAILOVER`): nothing
    /// is lost. Returns the new master when all nodes know it.
    #[track_caller]
    pub fn failover(&self, slot: u16) -> &Server {
        let replica = self.replica_of(slot);
        let is_master =
            || self.find_master(slot).is_some_and(|master| master.port() == replica.port());
        let mut asked: Option<Instant> = None;
        wait_until("the replica is the master", PATIENCE, || {
            // It gives up after five seconds: the other masters do not vote about the same master
            // twice in a row, and on a busy machine the two may not catch up with each other in
            // time.
            if asked.is_none_or(|asked| asked.elapsed() > FAILOVER) {
                asked = Some(Instant::now());
                let reply = replica.command(&["CLUSTER", "FAILOVER"]);
                assert!(
                    reply == Reply::Text("OK".into()) || is_master(),
                    "CLUSTER FAILOVER: {reply:?}"
                );
            }
            is_master()
        });
        self.wait_until_ok();
        replica
    }

    /// Kills the master of a slot and says which it was. Its replica takes over some two to four
    /// seconds later: see [`Cluster::wait_for_failover`].
    #[track_caller]
    pub fn kill_master_of(&self, slot: u16) -> &Server {
        let master = self.master_of(slot);
        master.kill();
        master
    }

    /// Comes back when a slot whose master was killed or stopped has another and all nodes know;
    /// with the new master.
    #[track_caller]
    pub fn wait_for_failover(&self, slot: u16) -> &Server {
        wait_until("the slot has a master again", PATIENCE, || self.find_master(slot).is_some());
        self.wait_until_ok();
        self.master_of(slot)
    }

    /// Comes back when all nodes that are neither killed nor stopped say that the cluster is well,
    /// agree on who serves what, and follow their masters if they are replicas.
    #[track_caller]
    pub fn wait_until_ok(&self) {
        wait_until("the cluster is well", PATIENCE, || {
            let views: Vec<_> = self.awake().map(shards).collect();
            let agreed =
                !views.is_empty() && views.iter().all(|view| view.is_some() && *view == views[0]);
            agreed && self.awake().all(is_well)
        });
    }

    /// The keys of all masters that begin with `prefix` and would stay for ever, in order. There
    /// should be none.
    #[track_caller]
    pub fn keys_without_ttl(&self, prefix: &str) -> Vec<String> {
        let is_master = |node: &&Server| myself(node).is_some_and(|own| own.is_master);
        let mut keys: Vec<_> =
            self.awake().filter(is_master).flat_map(|node| node.keys_without_ttl(prefix)).collect();
        keys.sort();
        keys
    }

    fn awake(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().filter(|node| node.is_awake())
    }

    fn find_master(&self, slot: u16) -> Option<&Server> {
        let claims = self.awake().filter_map(|node| Some((node, myself(node)?)));
        // Two may claim it for a moment after a failover. The younger claim is the one that counts.
        let claims = claims.filter(|(_, own)| {
            own.slots.iter().any(|(first, last)| (*first..=*last).contains(&slot))
        });
        claims.max_by_key(|(_, own)| own.epoch).map(|(node, _)| node)
    }

    /// What `redis-cli --cluster create` does, without needing it.
    fn form(&self) {
        let ask = |node: &Server, words: &[&str]| {
            let reply = node.command(&[&["CLUSTER"], words].concat());
            assert_eq!(reply, Reply::Text("OK".into()), "CLUSTER {}", words[0]);
        };
        let (masters, replicas) = self.nodes.split_at(MASTERS);
        let share = SLOTS.div_ceil(3);
        for (master, first) in masters.iter().zip((0..).step_by(usize::from(share))) {
            let slots: Vec<String> =
                (first..SLOTS.min(first + share)).map(|slot| slot.to_string()).collect();
            let words: Vec<&str> =
                ["ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str)).collect();
            ask(master, &words);
        }
        for (number, node) in self.nodes.iter().enumerate() {
            // Masters with the same epoch would first have to settle whose is whose.
            ask(node, &["SET-CONFIG-EPOCH", &(number + 1).to_string()]);
        }
        // Every node is introduced to every other one. One introduction each would do, but gossip
        // takes seconds.
        for (number, node) in self.nodes.iter().enumerate() {
            for other in &self.nodes[number + 1..] {
                ask(node, &["MEET", "127.0.0.1", &other.port().to_string()]);
            }
        }
        let all_nodes = format!("cluster_known_nodes:{}\r\n", self.nodes.len());
        wait_until("the nodes know each other", PATIENCE, || {
            self.nodes.iter().all(|node| {
                info(node).is_some_and(|info| info.contains(&all_nodes))
                    && lines(node).is_some_and(|lines| {
                        !lines.contains("handshake") && !lines.contains("noaddr")
                    })
            })
        });
        for (replica, master) in replicas.iter().zip(masters) {
            ask(replica, &["REPLICATE", &self.id(master)]);
        }
        wait_until("every master has its replica", PATIENCE, || {
            let is_pair = |shard: &Shard| shard.replicas == 1;
            let pairs = |node| {
                shards(node).is_some_and(|all| all.len() == MASTERS && all.iter().all(is_pair))
            };
            self.nodes.iter().all(pairs)
        });
        self.wait_until_ok();
    }
}

/// A test that fails shows what the nodes have to say about it.
impl Drop for Cluster {
    #[allow(clippy::print_stderr, reason = "it shows why a test failed")]
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        for node in &self.nodes {
            let log = node.log();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
            eprintln!(
                "-- the last lines of the node at port {}:\n{}",
                node.port(),
                last.join("\n")
            );
        }
    }
}

/// What a node says of itself.
struct Own {
    is_master: bool,
    /// The id of its master, or `-`.
    master: String,
    epoch: u64,
    slots: Vec<(u16, u16)>,
}

/// The line of `CLUSTER NODES` about the node that answers: `id address flags master ping pong
/// epoch link slot slot-slot ...`. A slot in brackets is on its way and not counted.
fn myself(node: &Server) -> Option<Own> {
    let lines = lines(node)?;
    let words: Vec<&str> = lines.lines().find(|line| line.contains("myself"))?.split(' ').collect();
    let slots = words.get(8..).unwrap_or_default().iter().filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some((first.parse().ok()?, last.parse().ok()?))
    });
    Some(Own {
        is_master: words.get(2)?.contains("master"),
        master: (*words.get(3)?).to_owned(),
        epoch: words.get(6)?.parse().ok()?,
        slots: slots.collect(),
    })
}

fn lines(node: &Server) -> Option<String> {
    match node.try_command(&["CLUSTER", "NODES"]) {
        Ok(Reply::Text(lines)) => Some(lines),
        _ => None,
    }
}

fn info(node: &Server) -> Option<String> {
    match node.try_command(&["CLUSTER", "INFO"]) {
        Ok(Reply::Text(info)) => Some(info),
        _ => None,
    }
}

/// Some slots and the nodes that they are on.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Shard {
    first: i64,
    last: i64,
    /// The port of the master.
    master: i64,
    replicas: usize,
}

/// Who serves which slots, as a node sees it.
fn shards(node: &Server) -> Option<Vec<Shard>> {
    let Ok(Reply::Array(shards)) = node.try_command(&["CLUSTER", "SLOTS"]) else { return None };
    let shard = |shard: &Reply| {
        let [first, last, master, replicas @ ..] = shard.array() else {
            panic!("CLUSTER SLOTS: found {shard:?}")
        };
        Shard {
            first: first.int(),
            last: last.int(),
            master: master.array()[1].int(),
            replicas: replicas.len(),
        }
    };
    let mut shards: Vec<Shard> = shards.iter().map(shard).collect();
    shards.sort();
    Some(shards)
}

fn is_well(node: &Server) -> bool {
    let ok = info(node).is_some_and(|info| {
        info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384")
    });
    let follows = || match node.try_command(&["INFO", "replication"]) {
        Ok(Reply::Text(info)) => {
            info.contains("role:master") || info.contains("master_link_status:up")
        }
        _ => false,
    };
    ok && follows()
}
