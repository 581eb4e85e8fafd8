//! A proxy between a client and a server that does to their bytes whatever a bad network would.
//!
//! It knows nothing of what the bytes mean: what one side wrote in one piece, the other reads in
//! one piece, and a fault befalls such a piece. A call of a client with one small command is one
//! piece there and one back, so faults befall calls.

mod pump;

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::Server;
use crate::port::{Port, close};
use tidegate_trace::Random;

/// More concurrent connections than this are closed as soon as they come.
const CONNECTIONS: usize = 1024;
/// How long the server behind may take to accept a connection, and the proxy's own port to open or
/// close.
const PATIENCE: Duration = Duration::from_secs(10);

/// What happens to what passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Nothing.
    Pass,
    /// It arrives later, each way by its own delay. Calls that overlap are all late by as much, as
    /// on a long line.
    Delay {
        /// On the way to the server.
        request: Duration,
        /// On the way back.
        reply: Duration,
        /// Up to this much is added to each, as the seed decides.
        jitter: Duration,
    },
    /// Requests do not reach the server until another fault is set.
    StallRequests,
    /// Requests reach the server. Replies wait until another fault is set.
    StallReplies,
    /// Requests reach the server. Replies are lost, and the connection stays open.
    SwallowReplies,
    /// The connection is closed when a request comes; the server does not see the request.
    CutBeforeRequest,
    /// The connection is closed when the reply comes; the server has executed the command.
    CutAfterRequest,
    /// The connection is closed after this many bytes of the reply.
    CutInReply {
        /// None is the same as [`Fault::CutAfterRequest`].
        bytes: usize,
    },
    /// Replies arrive in crumbs.
    Drip {
        /// How many bytes in one piece; at least one.
        bytes: usize,
        /// How long between two crumbs.
        pause: Duration,
    },
    /// Instead of each reply come as many bytes of nonsense, as the seed decides. The first is
    /// never one that a reply of Redis begins with.
    Garbage,
    /// The port is closed: new connections are refused. Connections that are open stay;
    /// [`FaultProxy::cut`] ends them.
    Refuse,
}

/// What has passed through so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Connections that were accepted.
    pub connections: u64,
    /// How many of them are open now.
    pub open: u64,
    /// Bytes that were handed to the server.
    pub request_bytes: u64,
    /// Bytes that were handed to clients, nonsense included.
    pub reply_bytes: u64,
    /// Pieces that something was done to.
    pub faults: u64,
}

/// A proxy on a port of its own, in front of a server. It passes everything until it is set
/// otherwise. When it is dropped, its connections and its port are closed.
///
/// ```
/// use std::io::ErrorKind;
/// use tidegate_testkit::{Client, Fault, FaultProxy, Flavor, Reply, Server};
///
/// let server = Server::start(Flavor::Redis7);
/// let proxy = FaultProxy::start(&server);
/// proxy.once(Fault::CutAfterRequest);
/// let mut client = Client::connect(proxy.port())?;
/// assert_eq!(client.command(&["INCR", "n"]).unwrap_err().kind(), ErrorKind::UnexpectedEof);
/// assert_eq!(server.command(&["GET", "n"]), Reply::Text("1".into())); // it was done all the same
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct FaultProxy {
    shared: Arc<Shared>,
    port: Port,
    url: String,
    /// A byte here makes the thread that listens look at the fault.
    bell: UnixStream,
    listener: Option<JoinHandle<()>>,
}

impl FaultProxy {
    /// Puts a proxy in front of a server.
    ///
    /// # Panics
    /// If the server has no port.
    #[track_caller]
    pub fn start(server: &Server) -> FaultProxy {
        FaultProxy::with_seed(server, 0)
    }

    /// The same; what is left to chance is decided by this seed, the number of the connection, and
    /// nothing else.
    ///
    /// # Panics
    /// If the server has no port.
    #[track_caller]
    pub fn with_seed(server: &Server, seed: u64) -> FaultProxy {
        let port = Port::free(false);
        let behind = format!("127.0.0.1:{}", server.port());
        assert!(
            server.url().contains(&behind),
            "the server at {}: expected one with a port",
            server.url()
        );
        let url = server.url().replace(&behind, &format!("127.0.0.1:{}", port.number()));
        let (bell, rung) = UnixStream::pair().expect("a pair of sockets can be made");
        let shared = Arc::new(Shared {
            target: SocketAddr::from((Ipv4Addr::LOCALHOST, server.port())),
            seed,
            state: Mutex::new(State {
                fault: Fault::Pass,
                befalls: Befalls::Every,
                closed: false,
                listening: false,
            }),
            changed: Condvar::new(),
            connections: Mutex::new(Vec::new()),
            counters: Counters::default(),
        });
        let run = {
            let (shared, number) = (Arc::clone(&shared), port.number());
            move || listen(&shared, number, rung)
        };
        let listener = thread::Builder::new()
            .name("proxy".into())
            .spawn(run)
            .expect("a thread can be started");
        let proxy = FaultProxy { shared, port, url, bell, listener: Some(listener) };
        proxy.set(Fault::Pass);
        proxy
    }

    /// The port that clients connect to, on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The URL of the server with the port of the proxy.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// From now on this fault befalls every piece, also on connections that are open.
    pub fn set(&self, fault: Fault) {
        self.change(fault, Befalls::Every);
    }

    /// This fault befalls the next piece that it can befall, and then all is well again.
    ///
    /// # Panics
    /// If the fault is one that lasts: a stall, or refusing.
    #[track_caller]
    pub fn once(&self, fault: Fault) {
        assert!(!lasts(fault), "{fault:?} lasts until another fault is set: expected `set`");
        self.change(fault, Befalls::Once);
    }

    /// From now on this fault befalls so many pieces of a hundred, as the seed decides.
    ///
    /// # Panics
    /// If the fault is one that lasts, a stall or refusing, or if it is more than a hundred.
    #[track_caller]
    pub fn sometimes(&self, percent: u8, fault: Fault) {
        assert!(!lasts(fault), "{fault:?} lasts until another fault is set: expected `set`");
        assert!(percent <= 100, "{percent} percent: expected at most 100");
        self.change(fault, Befalls::Percent(percent));
    }

    /// Closes all connections. New ones are welcome.
    pub fn cut(&self) {
        for connection in self.shared.connections().iter() {
            connection.cut();
        }
        self.shared.wake();
    }

    /// What has passed through so far.
    pub fn counts(&self) -> Counts {
        let Counters { connections, request_bytes, reply_bytes, faults } = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        let open =
            self.shared.connections().iter().filter(|connection| !connection.has_ended()).count();
        Counts {
            connections: read(connections),
            open: open as u64,
            request_bytes: read(request_bytes),
            reply_bytes: read(reply_bytes),
            faults: read(faults),
        }
    }

    /// Comes back when the port is open or closed as the fault wants it.
    fn change(&self, fault: Fault, befalls: Befalls) {
        {
            let mut state = self.shared.state();
            (state.fault, state.befalls) = (fault, befalls);
        }
        self.shared.wake();
        self.ring();
        let wrong = |state: &mut State| state.listening == (state.fault == Fault::Refuse);
        let state = self.shared.changed.wait_timeout_while(self.shared.state(), PATIENCE, wrong);
        let (_state, waited) = state.unwrap_or_else(PoisonError::into_inner);
        assert!(!waited.timed_out(), "port {} could not be opened again", self.port());
    }

    fn ring(&self) {
        use std::io::Write;
        // If it cannot be rung the listener has ended, and needs no message.
        let _ = (&self.bell).write_all(&[0]);
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.state().closed = true;
        self.ring();
        self.cut();
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

fn lasts(fault: Fault) -> bool {
    matches!(fault, Fault::Refuse | Fault::StallRequests | Fault::StallReplies)
}

/// What all threads of a proxy see.
#[derive(Debug)]
struct Shared {
    target: SocketAddr,
    seed: u64,
    state: Mutex<State>,
    /// The state is another.
    changed: Condvar,
    connections: Mutex<Vec<Arc<Connection>>>,
    counters: Counters,
}

#[derive(Debug)]
struct State {
    fault: Fault,
    befalls: Befalls,
    /// The proxy was dropped.
    closed: bool,
    listening: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Befalls {
    Every,
    Once,
    Percent(u8),
}

#[derive(Debug, Default)]
struct Counters {
    connections: AtomicU64,
    request_bytes: AtomicU64,
    reply_bytes: AtomicU64,
    faults: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Request,
    Reply,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Arc<Connection>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes waiting threads look again.
    fn wake(&self) {
        // Under the lock, so that no thread is between looking and waiting.
        let _state = self.state();
        self.changed.notify_all();
    }

    /// What is to be done to a piece that goes this way. It waits as long as pieces this way are
    /// stalled; nothing is to be done any more if the connection or the proxy ends meanwhile.
    fn fault(&self, way: Way, random: &mut Random, connection: &Connection) -> Option<Fault> {
        let mut state = self.state();
        loop {
            if state.closed || connection.has_ended() {
                return None;
            }
            let stalls = match way {
                Way::Request => Fault::StallRequests,
                Way::Reply => Fault::StallReplies,
            };
            if state.fault != stalls {
                break;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let fault = state.fault;
        let concerns = match fault {
            Fault::Pass | Fault::Refuse | Fault::StallRequests | Fault::StallReplies => false,
            Fault::Delay { .. } => true,
            Fault::CutBeforeRequest => way == Way::Request,
            _ => way == Way::Reply,
        };
        let befalls = concerns
            && match state.befalls {
                Befalls::Every | Befalls::Once => true,
                Befalls::Percent(percent) => random.below(100) < u64::from(percent),
            };
        if !befalls {
            return Some(Fault::Pass);
        }
        // A delay is over when the reply was delayed too.
        if state.befalls == Befalls::Once && (way == Way::Reply || fault == Fault::CutBeforeRequest)
        {
            state.fault = Fault::Pass;
        }
        self.counters.faults.fetch_add(1, Ordering::SeqCst);
        Some(fault)
    }

    /// Waits until then, or until the connection or the proxy ends: then it says no.
    fn wait_until(&self, then: Instant, connection: &Connection) -> bool {
        let mut state = self.state();
        loop {
            if state.closed || connection.has_ended() {
                return false;
            }
            let left = then.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            (state, _) =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A client and the connection to the server that was opened for it.
#[derive(Debug)]
struct Connection {
    client: TcpStream,
    /// Once it is there.
    server: std::sync::OnceLock<TcpStream>,
    ended: std::sync::atomic::AtomicBool,
}

impl Connection {
    /// Closes both sides. Threads that read from them find the end.
    fn cut(&self) {
        self.ended.store(true, Ordering::SeqCst);
        for side in [Some(&self.client), self.server.get()].into_iter().flatten() {
            let _ = side.shutdown(Shutdown::Both);
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }
}

/// The thread that listens, until the proxy is dropped. It waits for a client or for the bell.
fn listen(shared: &Arc<Shared>, port: u16, rung: UnixStream) {
    let open = || {
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("the port is reserved for the proxy")
    };
    let mut listener = Some(open());
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    let mut number = 0;
    loop {
        let refuse = {
            let mut state = shared.state();
            if state.closed {
                break;
            }
            let refuse = state.fault == Fault::Refuse;
            if refuse {
                listener.take().inspect(close);
            } else {
                listener.get_or_insert_with(open);
            }
            state.listening = !refuse;
            shared.changed.notify_all();
            refuse
        };
        let client = wait_for_client(listener.as_ref().filter(|_| !refuse), &rung);
        threads.retain(|thread| !thread.is_finished());
        let Some(client) = client else { continue };
        shared.connections().retain(|connection| !connection.has_ended());
        if threads.len() >= CONNECTIONS {
            continue;
        }
        shared.counters.connections.fetch_add(1, Ordering::SeqCst);
        let connection =
            Connection { client, server: std::sync::OnceLock::new(), ended: false.into() };
        let connection = Arc::new(connection);
        shared.connections().push(Arc::clone(&connection));
        let run = {
            let (shared, seed) = (Arc::clone(shared), shared.seed);
            move || pump::run(&shared, &connection, Random::of_stream(seed, number))
        };
        number += 1;
        threads.push(
            thread::Builder::new()
                .name("proxied".into())
                .spawn(run)
                .expect("a thread can be started"),
        );
    }
    listener.take().inspect(close);
    for connection in shared.connections().drain(..) {
        connection.cut();
    }
    for thread in threads {
        let _ = thread.join();
    }
}

/// A client, or nothing if the bell was rung.
fn wait_for_client(listener: Option<&TcpListener>, mut rung: &UnixStream) -> Option<TcpStream> {
    use std::io::Read;
    let mut waited_for = vec![PollFd::new(rung, PollFlags::IN)];
    waited_for.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
    // It may be interrupted by a signal; then it looks around and waits again.
    poll(&mut waited_for, None).ok()?;
    let ready = |index: usize| waited_for.get(index).is_some_and(|fd| !fd.revents().is_empty());
    if ready(0) {
        let _ = rung.read(&mut [0; 64]);
        return None;
    }
    if !ready(1) {
        return None;
    }
    listener.and_then(|listener| listener.accept().ok()).map(|(client, _)| client)
}

/// Opens the connection to the server. It is on this machine, so it is there immediately or not at
/// all.
fn connect(target: SocketAddr) -> io::Result<TcpStream> {
    let server = TcpStream::connect_timeout(&target, PATIENCE)?;
    server.set_nodelay(true)?;
    Ok(server)
}
