//! One server: its connections, and the scripts that are being loaded into it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::conn::{Conn, Reply, Shape};
use super::counters::Counting;
use super::dial::{Dialer, Place, Profile};
use super::outcome::{FailureKind, rule};
use super::resp::put_command;
use super::sentinel::Sentinels;
use super::{Script, Settings};

/// How often a call runs a script by its digest in vain before it sends the text.
const MAX_MISSES: usize = 3;

/// Which server. `Display` is its address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NodeId(pub(super) Place);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What it takes to connect to servers.
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
    /// Whether a redirect has led here since the map was last read. Then it is a node, whether it
    /// has slots or not.
    pub(super) pointed_at: AtomicBool,
    next: AtomicUsize,
    /// The scripts that somebody is just loading.
    loading: Mutex<Vec<Arc<Load>>>,
    /// How many loads have ended well.
    loads: AtomicU64,
    /// Tells everybody who waits for a load that one has ended.
    loaded: Notify,
    counting: Arc<Counting>,
}

/// A script on its way to the server.
struct Load {
    sha: String,
    conn: Arc<Conn>,
    /// Whatever is asked over the same connection from now on is asked when the server has it.
    is_sent: AtomicBool,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.conns.iter().for_each(|conn| conn.close());
    }
}

impl Node {
    pub(super) fn new(place: Place, means: &Means) -> Arc<Self> {
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

    /// Whether Sentinel says where it is.
    pub(super) fn is_discovered(&self) -> bool {
        matches!(self.id.0, Place::Service(_))
    }

    /// Whether it can be asked without delay.
    pub(super) fn is_up(&self) -> bool {
        self.conns.iter().any(|conn| conn.is_up())
    }

    /// The connection for the next call: in turns, passing over those that are down while another
    /// is up.
    pub(super) fn conn(&self) -> &Arc<Conn> {
        let [only] = &*self.conns else {
            let start = self.next.fetch_add(1, Ordering::Relaxed) % self.conns.len();
            let mut turns = (start..self.conns.len()).chain(0..start);
            let up = turns.find(|&at| self.conns[at].is_up_or_starts());
            return &self.conns[up.unwrap_or(start)];
        };
        only
    }

    /// Runs a script by its digest. If the server does not have it, one caller loads it, and
    /// everybody else who finds that out runs it again, at once behind the script over the same
    /// connection, or when it has been loaded over another. Whoever meets a server without it time
    /// and again, because it is told to forget all scripts, sends the text.
    pub(super) async fn eval<K: AsRef<[u8]>, A: AsRef<[u8]>>(
        &self,
        conn: &Arc<Conn>,
        call: &Call<'_, K, A>,
        asking: bool,
        deadline: Instant,
    ) -> Reply {
        let by_digest = How { asking, load: None, text: false };
        for _ in 0..MAX_MISSES {
            // Before the script is run: a load that ends after this makes it worth another run.
            let loads = self.loads.load(Ordering::Acquire);
            let reply = call.run(conn, by_digest, deadline).await;
            if !lacks_script(&reply) {
                return reply;
            }
            let mut ended = std::pin::pin!(self.loaded.notified());
            ended.as_mut().enable();
            match self.turn(call.script.sha(), conn, loads) {
                Turn::Mine(loading) => {
                    let reply = call
                        .run(conn, How { load: Some(&loading.load), ..by_digest }, deadline)
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
                Turn::Loaded | Turn::Behind => {}
                Turn::Others => {
                    if timeout_at(deadline, ended).await.is_err() {
                        return reply;
                    }
                }
            }
        }
        let reply = call.run(conn, How { text: true, ..by_digest }, deadline).await;
        if !matches!(reply, Reply::Failed { .. }) {
            self.counting.script_loads.one();
        }
        reply
    }

    /// Whose turn it is to load a script, for a caller who found it missing when `loads` loads had
    /// ended.
    fn turn(&self, sha: &str, conn: &Arc<Conn>, loads: u64) -> Turn<'_> {
        let mut loading = self.loading.lock();
        if self.loads.load(Ordering::Acquire) != loads {
            return Turn::Loaded;
        }
        if let Some(other) = loading.iter().find(|other| other.sha == sha) {
            let is_before_us =
                Arc::ptr_eq(&other.conn, conn) && other.is_sent.load(Ordering::Acquire);
            return if is_before_us { Turn::Behind } else { Turn::Others };
        }
        let load = Arc::new(Load {
            sha: sha.into(),
            conn: Arc::clone(conn),
            is_sent: AtomicBool::new(false),
        });
        loading.push(Arc::clone(&load));
        Turn::Mine(Loading { node: self, load })
    }
}

enum Turn<'a> {
    /// The caller's.
    Mine(Loading<'a>),
    /// Somebody has loaded it meanwhile, or another script.
    Loaded,
    /// Somebody is just loading it, and what is asked over this connection comes behind it.
    Behind,
    /// Somebody is just loading it.
    Others,
}

/// The right to load a script. Given up when dropped, so that another may.
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

/// A script with what it is to be run with.
pub(super) struct Call<'a, K, A> {
    pub(super) script: &'a Script,
    pub(super) keys: &'a [K],
    pub(super) args: &'a [A],
}

/// What goes with the script.
#[derive(Clone, Copy)]
struct How<'a> {
    /// The slot is only about to move to this server.
    asking: bool,
    /// Load it first.
    load: Option<&'a Load>,
    /// Run the text, not the digest.
    text: bool,
}

impl<K: AsRef<[u8]>, A: AsRef<[u8]>> Call<'_, K, A> {
    async fn run(&self, conn: &Arc<Conn>, how: How<'_>, deadline: Instant) -> Reply {
        let replies = 1 + u8::from(how.asking) + u8::from(how.load.is_some());
        let encode = |out: &mut Vec<u8>| {
            if let Some(load) = how.load {
                self.script.put_load(out);
                // Nobody else can write before us: the connection is ours for the moment.
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
