//! One server: its connections, and the scripts being loaded into it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::address::Address;
use super::conn::{Conn, Reply, Shape};
use super::connect::Profile;
use super::counters::Counting;
use super::dial::Dialer;
use super::outcome::{FailureKind, rule};
use super::resp::put_command;
use super::sentinel::Sentinels;
use super::{Script, Settings};

/// How often a call runs a script by its digest without success before it sends the text.
const MAX_MISSES: usize = 3;

/// A server. `Display` is its address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NodeId(pub(super) Address);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What nodes need to connect.
pub(super) struct Means {
    pub(super) profile: Arc<Profile>,
    pub(super) sentinels: Option<Arc<Sentinels>>,
    pub(super) settings: Arc<Settings>,
    pub(super) counting: Arc<Counting>,
}

/// A server and the connections to it. They end when it is dropped.
pub(super) struct Node {
    id: NodeId,
    conns: Box<[Arc<Conn>]>,
    /// Whether a redirect named it since the map was last read. Then it stays a node even without
    /// slots.
    pub(super) pointed_at: AtomicBool,
    next: AtomicUsize,
    /// Loads in progress.
    loading: Mutex<Vec<Arc<Load>>>,
    /// How many loads have succeeded.
    loads: AtomicU64,
    /// Notified when a load ends.
    loaded: Notify,
    counting: Arc<Counting>,
}

/// A script on its way to the server.
struct Load {
    sha: String,
    conn: Arc<Conn>,
    /// The load was written: later commands on the same connection run after it.
    is_sent: AtomicBool,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.conns.iter().for_each(|conn| conn.close());
    }
}

impl Node {
    pub(super) fn new(place: Address, means: &Means) -> Arc<Self> {
        let connect = |_| {
            let dialer =
                Dialer::new(place.clone(), Arc::clone(&means.profile), means.sentinels.clone());
            Conn::new(dialer, Arc::clone(&means.settings), Arc::clone(&means.counting))
        };
        let conns = (0..means.settings.connections_per_node).map(connect).collect();
        Arc::new(Node {
            id: NodeId(place.clone()),
            conns,
            pointed_at: AtomicBool::new(false),
            next: AtomicUsize::new(0),
            loading: Mutex::default(),
            loads: AtomicU64::new(0),
            loaded: Notify::new(),
            counting: Arc::clone(&means.counting),
        })
    }

    pub(super) fn id(&self) -> &NodeId {
        &self.id
    }

    /// Whether Sentinel names its address.
    pub(super) fn is_discovered(&self) -> bool {
        matches!(self.id.0, Address::Service(_))
    }

    /// Whether a call would be sent without delay.
    pub(super) fn is_up(&self) -> bool {
        self.conns.iter().any(|conn| conn.is_up())
    }

    /// The connection for the next call: round robin over those that are up, if any is.
    pub(super) fn conn(&self) -> &Arc<Conn> {
        let [only] = &*self.conns else {
            let start = self.next.fetch_add(1, Ordering::Relaxed) % self.conns.len();
            let mut turns = (start..self.conns.len()).chain(0..start);
            let up = turns.find(|&at| self.conns[at].is_up_or_starts());
            return &self.conns[up.unwrap_or(start)];
        };
        only
    }

    /// Runs a script by its digest. On NOSCRIPT, one call loads the script; other calls retry,
    /// immediately behind the load on the same connection, or after the load on another. A call
    /// that keeps getting NOSCRIPT, because scripts are flushed repeatedly, sends the text.
    pub(super) async fn eval<K: AsRef<[u8]>, A: AsRef<[u8]>>(
        &self,
        conn: &Arc<Conn>,
        call: &ScriptCall<'_, K, A>,
        asking: bool,
        deadline: Instant,
    ) -> Reply {
        let by_digest = CallForm { asking, load: None, text: false };
        for _ in 0..MAX_MISSES {
            // Read before the run: a load that ends later makes a retry worthwhile.
            let loads = self.loads.load(Ordering::Acquire);
            let reply = call.run(conn, by_digest, deadline).await;
            if !lacks_script(&reply) {
                return reply;
            }
            let mut ended = std::pin::pin!(self.loaded.notified());
            ended.as_mut().enable();
            match self.load_turn(call.script.sha(), conn, loads) {
                LoadTurn::Mine(loading) => {
                    let reply = call
                        .run(conn, CallForm { load: Some(&loading.load), ..by_digest }, deadline)
                        .await;
                    if !matches!(reply, Reply::Failed { .. }) {
                        self.counting.script_loads.one();
                        loading.succeeded();
                    }
                    if !lacks_script(&reply) {
                        return reply;
                    }
                    break;
                }
                LoadTurn::Loaded | LoadTurn::Behind => {}
                LoadTurn::Others => {
                    if timeout_at(deadline, ended).await.is_err() {
                        return reply;
                    }
                }
            }
        }
        let reply = call.run(conn, CallForm { text: true, ..by_digest }, deadline).await;
        if !matches!(reply, Reply::Failed { .. }) {
            self.counting.script_loads.one();
        }
        reply
    }

    /// Which call loads a script that was missing when `loads` loads had succeeded.
    fn load_turn(&self, sha: &str, conn: &Arc<Conn>, loads: u64) -> LoadTurn<'_> {
        let mut loading = self.loading.lock();
        if self.loads.load(Ordering::Acquire) != loads {
            return LoadTurn::Loaded;
        }
        if let Some(other) = loading.iter().find(|other| other.sha == sha) {
            let is_before_us =
                Arc::ptr_eq(&other.conn, conn) && other.is_sent.load(Ordering::Acquire);
            return if is_before_us { LoadTurn::Behind } else { LoadTurn::Others };
        }
        let load = Arc::new(Load {
            sha: sha.into(),
            conn: Arc::clone(conn),
            is_sent: AtomicBool::new(false),
        });
        loading.push(Arc::clone(&load));
        LoadTurn::Mine(Loading { node: self, load })
    }
}

enum LoadTurn<'a> {
    /// This call loads it.
    Mine(Loading<'a>),
    /// A load has succeeded meanwhile, of this or another script.
    Loaded,
    /// Another call is loading it on the same connection, so a retry runs after the load.
    Behind,
    /// Another call is loading it on another connection.
    Others,
}

/// The right to load a script. Dropping it gives the right to another call.
struct Loading<'a> {
    node: &'a Node,
    load: Arc<Load>,
}

impl Loading<'_> {
    fn succeeded(self) {
        self.node.loads.fetch_add(1, Ordering::Release);
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.node.loading.lock().retain(|other| !Arc::ptr_eq(other, &self.load));
        self.node.loaded.notify_waiters();
    }
}

/// A script with its keys and arguments.
pub(super) struct ScriptCall<'a, K, A> {
    pub(super) script: &'a Script,
    pub(super) keys: &'a [K],
    pub(super) args: &'a [A],
}

/// How a script is sent.
#[derive(Clone, Copy)]
struct CallForm<'a> {
    /// Precede it with ASKING: the slot is moving to this server.
    asking: bool,
    /// Load the script first.
    load: Option<&'a Load>,
    /// Send the text, not the digest.
    text: bool,
}

impl<K: AsRef<[u8]>, A: AsRef<[u8]>> ScriptCall<'_, K, A> {
    async fn run(&self, conn: &Arc<Conn>, how: CallForm<'_>, deadline: Instant) -> Reply {
        let replies = 1 + u8::from(how.asking) + u8::from(how.load.is_some());
        let encode = |out: &mut Vec<u8>| {
            if let Some(load) = how.load {
                self.script.put_load(out);
                // The queue is locked, so no other call is between the load and the flag.
                load.is_sent.store(true, Ordering::Release);
            }
            if how.asking {
                put_command(out, &["ASKING"]);
            }
            if how.text {
                self.script.put_eval(out, self.keys, self.args);
            } else {
                self.script.put_evalsha(out, self.keys, self.args);
            }
        };
        conn.call(Shape { replies, large: false }, encode, deadline).await
    }
}

fn lacks_script(reply: &Reply) -> bool {
    matches!(reply, Reply::Error { text, .. } if rule(text).kind == FailureKind::NoScript)
}
