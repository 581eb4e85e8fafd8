//! What all listeners share: accepting connections, their limits, TLS, and the end.
//!
//! ```text
//! listener.serve(shutdown, move |connection| converse(connection)).await
//! ```
//!
//! The function gets a [`Connection`]: a [`Stream`] (plain or TLS, after the handshake), the address
//! of the peer, and a number. Limits on connections, the TLS handshake and its timeout, certificates
//! that change, exhausted file descriptors, counting and panics are handled here. Protocols over HTTP
//! pass their connections to an [`http::HttpServer`], which adds the limits of HTTP, tokens and the
//! graceful end.
//!
//! When `shutdown` becomes true, connections in the backlog are still served. `serve` returns when
//! the last connection has ended; each connection watches `shutdown` itself.

mod connections;
pub(crate) mod frames;
pub mod http;
pub(crate) mod progress;
pub(crate) mod scheduler;
pub mod tls;
pub(crate) mod wire;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::server::TlsStream;

use self::connections::ConnectionLimits;
pub use self::connections::ConnectionSlot;
use self::tls::Tls;
use crate::observe::Observer;
use crate::observe::metrics::Refusal;
use crate::parse::values;
use crate::protocol::Protocol;

/// How long to wait after a failed accept, which most likely means that no file is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// After this many refused connections the listener pauses, so that reconnecting clients leave time
/// for open connections.
const REFUSALS_PER_PAUSE: u32 = 8;
/// How long the listener pauses.
const REFUSAL_PAUSE: Duration = Duration::from_millis(1);

/// The most connections accepted after shutdown has begun: more than the backlog holds.
const MAX_BACKLOG: usize = 4096;

/// File descriptors reserved for everything but connections: the store, certificates, rules, and
/// files that libraries open.
const RESERVED_FILES: u64 = 64;

/// The file descriptors for connections: the limit of the process less [`RESERVED_FILES`], shared by
/// all listeners.
fn files() -> Arc<Semaphore> {
    static FILES: OnceLock<Arc<Semaphore>> = OnceLock::new();
    let places = || {
        let most = rustix::process::getrlimit(rustix::process::Resource::Nofile)
            .current
            .unwrap_or(u64::MAX);
        let places = most.saturating_sub(RESERVED_FILES).max(most / 2);
        Arc::new(Semaphore::new(
            usize::try_from(places).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS),
        ))
    };
    Arc::clone(FILES.get_or_init(places))
}

/// File descriptors for connections to an upstream. At most half of those for client connections are
/// reserved, so that clients cannot keep the proxy from its upstream. The upstream shares the others
/// with clients.
#[derive(Debug)]
pub(crate) struct UpstreamFiles {
    own: Arc<Semaphore>,
    shared: Arc<Semaphore>,
    /// How many only the upstream may use.
    pub(crate) reserved: usize,
}

impl UpstreamFiles {
    /// Reserves `wanted` file descriptors, at most half of those that are free.
    pub(crate) fn reserve(wanted: usize) -> Self {
        Self::of(files(), wanted)
    }

    fn of(shared: Arc<Semaphore>, wanted: usize) -> Self {
        let reserved = shared.forget_permits(wanted.min(shared.available_permits() / 2));
        UpstreamFiles { own: Arc::new(Semaphore::new(reserved)), shared, reserved }
    }

    /// A file descriptor for one connection; waits until one is free.
    pub(crate) async fn take(&self) -> OwnedSemaphorePermit {
        let at_once = |files: &Arc<Semaphore>| Arc::clone(files).try_acquire_owned().ok();
        match at_once(&self.own).or_else(|| at_once(&self.shared)) {
            Some(file) => file,
            None => Arc::clone(&self.own).acquire_owned().await.expect("it is never closed"),
        }
    }
}

impl Drop for UpstreamFiles {
    fn drop(&mut self) {
        self.shared.add_permits(self.reserved);
    }
}

/// The limits of a listener.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bounds {
    /// The most open connections.
    #[serde(rename = "max", deserialize_with = "values::count")]
    pub max_connections: usize,
    /// The most open connections from one address (IPv6: from one /64).
    #[serde(rename = "max_per_ip", deserialize_with = "values::count")]
    pub max_connections_per_ip: usize,
    /// How long a TLS handshake may take.
    #[serde(skip)]
    pub handshake: Duration,
    /// How long a head, a body or a command may take to arrive, and how long a response may take to
    /// be read.
    #[serde(skip)]
    pub patience: Duration,
    /// How long an HTTP connection may be kept without a request.
    #[serde(rename = "idle_secs", deserialize_with = "values::secs::<1, 1_000_000, _>")]
    #[serde(serialize_with = "values::as_secs")]
    pub idle: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            max_connections: 10_000,
            max_connections_per_ip: 1024,
            handshake: Duration::from_secs(3),
            patience: Duration::from_secs(5),
            idle: Duration::from_secs(75),
        }
    }
}

/// Limits that can change while connections are open; clones share them. Timeouts hold for new
/// connections, connection limits immediately.
#[derive(Clone, Debug)]
pub struct SharedBounds(Arc<ArcSwap<Bounds>>);

impl SharedBounds {
    /// The current limits.
    pub fn get(&self) -> Guard<Arc<Bounds>> {
        self.0.load()
    }

    /// Replaces the limits.
    pub fn set(&self, bounds: Bounds) {
        self.0.store(Arc::new(bounds));
    }
}

impl From<Bounds> for SharedBounds {
    fn from(bounds: Bounds) -> Self {
        SharedBounds(Arc::new(ArcSwap::from_pointee(bounds)))
    }
}

/// An address with a protocol.
#[derive(Debug)]
pub struct Listener {
    protocol: Protocol,
    listener: TcpListener,
    tls: Option<Tls>,
    bounds: SharedBounds,
    observer: Observer,
}

/// An accepted connection.
#[derive(Debug)]
pub struct Connection {
    /// The bytes.
    pub stream: Stream,
    /// The address of the peer.
    pub peer: SocketAddr,
    /// The number of this connection at its listener, from 1.
    pub number: u64,
    /// Counts the connection until it is dropped.
    pub slot: ConnectionSlot,
}

impl Listener {
    /// A listener with these limits.
    pub fn new(
        protocol: Protocol,
        listener: TcpListener,
        tls: Option<Tls>,
        bounds: impl Into<SharedBounds>,
        observer: Observer,
    ) -> Self {
        Listener { protocol, listener, tls, bounds: bounds.into(), observer }
    }

    /// The protocol of this listener.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// The address of this listener.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// The limits of this listener.
    pub fn bounds(&self) -> &SharedBounds {
        &self.bounds
    }

    /// Counts and logs what happens.
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Accepts connections until `shutdown` is true, runs `converse` for each, and returns when all
    /// have ended.
    ///
    /// # Errors
    /// Never while it can accept connections: it waits when no file is free.
    pub async fn serve<T, F>(
        self,
        mut shutdown: watch::Receiver<bool>,
        converse: T,
    ) -> io::Result<()>
    where
        T: Fn(Connection) -> F + Clone + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let Listener { protocol, listener, tls, bounds, observer } = self;
        let handshake = bounds.get().handshake;
        let places = ConnectionLimits::new(protocol, bounds, files(), observer.clone());
        let acceptor = Acceptor { protocol, places, tls, handshake, observer };
        let (mut number, mut refused) = (0, 0);
        let mut tasks = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = shutdown.wait_for(|down| *down) => break,
                Some(ended) = tasks.join_next() => {
                    acceptor.reap(ended);
                    continue;
                }
            };
            match accepted {
                Ok((stream, peer)) => {
                    number += 1;
                    if !acceptor.start(stream, peer, number, &converse, &mut tasks) {
                        refused += 1;
                        if refused % REFUSALS_PER_PAUSE == 0 {
                            tokio::time::sleep(REFUSAL_PAUSE).await;
                        }
                    }
                }
                Err(error) => {
                    // Most likely no file is free until a connection ends.
                    acceptor.observer.metrics().accept_failed();
                    acceptor
                        .observer
                        .log()
                        .warn("cannot accept", &[("listener", &protocol.name()), ("why", &error)]);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        // Serve the connections that are in the backlog.
        for (stream, peer) in backlog(listener) {
            number += 1;
            acceptor.start(stream, peer, number, &converse, &mut tasks);
        }
        while let Some(ended) = tasks.join_next().await {
            acceptor.reap(ended);
        }
        Ok(())
    }
}

/// The connections in the backlog; then the listener is closed. Accepts directly, because the runtime
/// may not have noticed them yet.
fn backlog(listener: TcpListener) -> Vec<(TcpStream, SocketAddr)> {
    let Ok(listener) = listener.into_std() else { return Vec::new() };
    let accepted = std::iter::from_fn(|| listener.accept().ok()).take(MAX_BACKLOG);
    let ours = accepted.filter_map(|(stream, peer)| {
        stream.set_nonblocking(true).ok()?;
        Some((TcpStream::from_std(stream).ok()?, peer))
    });
    ours.collect()
}

struct Acceptor {
    protocol: Protocol,
    places: ConnectionLimits,
    tls: Option<Tls>,
    handshake: Duration,
    observer: Observer,
}

impl Acceptor {
    /// Starts serving a connection, or closes it if a limit is reached. Returns whether it was
    /// started.
    fn start<T, F>(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        number: u64,
        converse: &T,
        tasks: &mut JoinSet<()>,
    ) -> bool
    where
        T: Fn(Connection) -> F + Clone + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let slot = match self.places.take(peer.ip()) {
            Ok(slot) => slot,
            Err(why) => {
                self.observer.metrics().refused(self.protocol, why);
                return false;
            }
        };
        let _ = stream.set_nodelay(true);
        let (converse, tls, handshake) = (converse.clone(), self.tls.clone(), self.handshake);
        tasks.spawn(async move {
            let stream = match tls {
                None => Stream::Plain(stream),
                Some(tls) => {
                    let shaken =
                        tokio::time::timeout(handshake, tls.acceptor(slot.protocol).accept(stream))
                            .await;
                    match shaken {
                        Ok(Ok(stream)) => Stream::Tls(Box::new(stream)),
                        failed => {
                            let why = failed.map_or("handshake timeout".into(), |end| {
                                end.err().map_or(String::new(), |e| e.to_string())
                            });
                            slot.observer.metrics().refused(slot.protocol, Refusal::Tls);
                            let fields: [crate::observe::log::Field<'_>; 3] = [
                                ("listener", &slot.protocol.name()),
                                ("peer", &peer),
                                ("why", &why),
                            ];
                            return slot.observer.log().debug("TLS handshake failed", &fields);
                        }
                    }
                }
            };
            converse(Connection { stream, peer, number, slot }).await;
        });
        true
    }

    fn reap(&self, ended: Result<(), tokio::task::JoinError>) {
        if ended.is_err_and(|error| error.is_panic()) {
            self.observer.metrics().panicked();
            self.observer
                .log()
                .error("a connection task panicked", &[("listener", &self.protocol.name())]);
        }
    }
}

/// The bytes of a connection, plain or encrypted.
#[derive(Debug)]
pub enum Stream {
    /// Plain TCP.
    Plain(TcpStream),
    /// TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

macro_rules! either {
    ($self:expr, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Stream::Plain($stream) => {
                let $stream = Pin::new($stream);
                $call
            }
            Stream::Tls($stream) => {
                let $stream = Pin::new(&mut **$stream);
                $call
            }
        }
    };
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Plain(stream) => stream.as_fd(),
            Stream::Tls(stream) => stream.get_ref().0.as_fd(),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn upstream_connections_have_reserved_files_and_share_the_rest() {
        let shared = Arc::new(Semaphore::new(10));
        let files = UpstreamFiles::of(Arc::clone(&shared), 3);
        assert_eq!((files.reserved, shared.available_permits()), (3, 7));
        let mut taken = Vec::new();
        for left in [7, 7, 7, 6, 5] {
            taken.push(files.take().await);
            assert_eq!(shared.available_permits(), left);
        }
        // Clients have all that is shared: the upstream has its own.
        let clients = Arc::clone(&shared).acquire_many_owned(5).await.unwrap();
        drop(taken.remove(0));
        taken.push(files.take().await);
        drop(taken.remove(0));
        let waiting = files.take();
        drop((clients, waiting.await, taken, files));
        assert_eq!(shared.available_permits(), 10);
        // No more than half, however many are wanted.
        assert_eq!(UpstreamFiles::of(Arc::clone(&shared), 4352).reserved, 5);
    }
}
