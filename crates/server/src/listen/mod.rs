//! The entrance that all listeners have in common: listening, bounds, TLS, and the end.
//!
//! A listener is an [`Entrance`] and somebody who talks to whoever comes in:
//!
//! ```text
//! entrance.receive(shutdown, move |visitor| talk(visitor)).await
//! ```
//!
//! `talk` gets a [`Visitor`]: a [`Stream`] (plain or TLS, the handshake is done), the address of
//! the other side, and a number. Bounds on connections, the TLS handshake with its time limit and
//! certificates that change, running out of files, counting, and panics are dealt with here. A
//! listener that speaks HTTP, and gRPC is one, hands its visitors to a [`http::HttpServer`], which adds
//! the bounds of HTTP, tokens and the orderly end.
//!
//! When `shutdown` says so, what has already connected is still let in, then nobody; `receive`
//! returns when the last conversation is over. Whoever talks watches `shutdown` itself, so as to
//! come to an end.

pub(crate) mod frames;
pub mod http;
pub(crate) mod pace;
mod places;
pub mod tls;
pub(crate) mod turns;
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

pub use self::places::Place;
use self::places::Places;
use self::tls::Tls;
use crate::observe::Observer;
use crate::observe::metrics::Refusal;
use crate::parse::values;
use crate::protocol::Protocol;

/// How long to wait before accepting again when there are no files left, or the like.
const BREATH: Duration = Duration::from_millis(50);

/// So many who find no place are turned away before the listener rests: whoever comes again and
/// again leaves time for those who are here.
const TURNED_AWAY: u32 = 8;
/// How long it rests.
const REST: Duration = Duration::from_millis(1);

/// How many are still let in after the order to stop: more than the operating system lets wait.
const MAX_WAITING: usize = 4096;

/// Files that connections leave for others: the store, certificates, rules, and whatever the
/// libraries open.
const RESERVED_FILES: u64 = 64;

/// As many places as there are files to open in this process, less [`RESERVED_FILES`]; all
/// listeners share them.
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

/// Files for connections to an upstream. They are taken out of those that client connections may
/// use, at most half of them, so that clients cannot keep the proxy from reaching its upstream.
/// What is needed beyond that is shared with clients.
#[derive(Debug)]
pub(crate) struct UpstreamFiles {
    own: Arc<Semaphore>,
    shared: Arc<Semaphore>,
    /// How many are for the upstream alone.
    pub(crate) reserved: usize,
}

impl UpstreamFiles {
    /// So many, if there are as many for clients.
    pub(crate) fn reserve(wanted: usize) -> Self {
        Self::of(files(), wanted)
    }

    fn of(shared: Arc<Semaphore>, wanted: usize) -> Self {
        let reserved = shared.forget_permits(wanted.min(shared.available_permits() / 2));
        UpstreamFiles { own: Arc::new(Semaphore::new(reserved)), shared, reserved }
    }

    /// A file for one connection, as soon as there is one.
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

/// Bounds of every listener.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bounds {
    /// Connections at once, at each listener.
    #[serde(rename = "max", deserialize_with = "values::count")]
    pub max_connections: usize,
    /// Connections at once from one address, at each listener.
    #[serde(rename = "max_per_ip", deserialize_with = "values::count")]
    pub max_connections_per_ip: usize,
    /// How long a TLS handshake may take.
    #[serde(skip)]
    pub handshake: Duration,
    /// How long a head, a body or a command may take once begun, and answers to be read.
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

/// Bounds that can change while connections are open; clones share them. A connection keeps the
/// times with which it began, the numbers hold for each new connection.
#[derive(Clone, Debug)]
pub struct SharedBounds(Arc<ArcSwap<Bounds>>);

impl SharedBounds {
    /// The bounds as they are now.
    pub fn get(&self) -> Guard<Arc<Bounds>> {
        self.0.load()
    }

    /// Puts others in their place, for every connection from now on.
    pub fn set(&self, bounds: Bounds) {
        self.0.store(Arc::new(bounds));
    }
}

impl From<Bounds> for SharedBounds {
    fn from(bounds: Bounds) -> Self {
        SharedBounds(Arc::new(ArcSwap::from_pointee(bounds)))
    }
}

/// Where visitors come in.
#[derive(Debug)]
pub struct Entrance {
    protocol: Protocol,
    listener: TcpListener,
    tls: Option<Tls>,
    bounds: SharedBounds,
    observer: Observer,
}

/// Somebody who came in.
#[derive(Debug)]
pub struct Visitor {
    /// To talk to them.
    pub stream: Stream,
    /// Where they are.
    pub peer: SocketAddr,
    /// Visitors are counted from 1.
    pub number: u64,
    /// Theirs until it is dropped.
    pub place: Place,
}

impl Entrance {
    /// An entrance with these bounds.
    pub fn new(
        protocol: Protocol,
        listener: TcpListener,
        tls: Option<Tls>,
        bounds: impl Into<SharedBounds>,
        observer: Observer,
    ) -> Self {
        Entrance { protocol, listener, tls, bounds: bounds.into(), observer }
    }

    /// Which listener it is.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Where it listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Its bounds.
    pub fn bounds(&self) -> &SharedBounds {
        &self.bounds
    }

    /// Whoever is told what happens.
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Lets visitors in until `shutdown` says so, has `talk` talk to each, and returns when all
    /// conversations are over.
    ///
    /// # Errors
    /// Never while it can accept at all: running out of files is waited out.
    pub async fn receive<T, F>(self, mut shutdown: watch::Receiver<bool>, talk: T) -> io::Result<()>
    where
        T: Fn(Visitor) -> F + Clone + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let Entrance { protocol, listener, tls, bounds, observer } = self;
        let handshake = bounds.get().handshake;
        let places = Places::new(protocol, bounds, files(), observer.clone());
        let reception = Reception { protocol, places, tls, handshake, observer };
        let (mut number, mut turned_away) = (0, 0);
        let mut conversations = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = shutdown.wait_for(|down| *down) => break,
                Some(ended) = conversations.join_next() => {
                    reception.note(ended);
                    continue;
                }
            };
            match accepted {
                Ok((stream, peer)) => {
                    number += 1;
                    if !reception.let_in(stream, peer, number, &talk, &mut conversations) {
                        turned_away += 1;
                        if turned_away % TURNED_AWAY == 0 {
                            tokio::time::sleep(REST).await;
                        }
                    }
                }
                Err(error) => {
                    // Out of files, most likely: those who are here are served on, and soon
                    // somebody leaves.
                    reception.observer.metrics().accept_failed();
                    reception
                        .observer
                        .log()
                        .warn("cannot accept", &[("listener", &protocol.name()), ("why", &error)]);
                    tokio::time::sleep(BREATH).await;
                }
            }
        }
        // Whoever had connected before we were told to stop is still let in.
        for (stream, peer) in waiting(listener) {
            number += 1;
            reception.let_in(stream, peer, number, &talk, &mut conversations);
        }
        while let Some(ended) = conversations.join_next().await {
            reception.note(ended);
        }
        Ok(())
    }
}

/// The connections that are already there; afterwards nobody listens any more. The operating system
/// is asked directly: the runtime may not have heard of them yet.
fn waiting(listener: TcpListener) -> Vec<(TcpStream, SocketAddr)> {
    let Ok(listener) = listener.into_std() else { return Vec::new() };
    let accepted = std::iter::from_fn(|| listener.accept().ok()).take(MAX_WAITING);
    let ours = accepted.filter_map(|(stream, peer)| {
        stream.set_nonblocking(true).ok()?;
        Some((TcpStream::from_std(stream).ok()?, peer))
    });
    ours.collect()
}

struct Reception {
    protocol: Protocol,
    places: Places,
    tls: Option<Tls>,
    handshake: Duration,
    observer: Observer,
}

impl Reception {
    /// Starts a conversation, or closes the connection at once if there is no place. Says whether
    /// there was one.
    fn let_in<T, F>(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        number: u64,
        talk: &T,
        conversations: &mut JoinSet<()>,
    ) -> bool
    where
        T: Fn(Visitor) -> F + Clone + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let place = match self.places.take(peer.ip()) {
            Ok(place) => place,
            Err(why) => {
                self.observer.metrics().refused(self.protocol, why);
                return false;
            }
        };
        let _ = stream.set_nodelay(true);
        let (talk, tls, handshake) = (talk.clone(), self.tls.clone(), self.handshake);
        conversations.spawn(async move {
            let stream = match tls {
                None => Stream::Plain(stream),
                Some(tls) => {
                    let shaken = tokio::time::timeout(
                        handshake,
                        tls.acceptor(place.protocol).accept(stream),
                    )
                    .await;
                    match shaken {
                        Ok(Ok(stream)) => Stream::Tls(Box::new(stream)),
                        failed => {
                            let why = failed.map_or("too slow".into(), |end| {
                                end.err().map_or(String::new(), |e| e.to_string())
                            });
                            place.observer.metrics().refused(place.protocol, Refusal::Tls);
                            let fields: [crate::observe::log::Field<'_>; 3] = [
                                ("listener", &place.protocol.name()),
                                ("peer", &peer),
                                ("why", &why),
                            ];
                            return place.observer.log().debug("no TLS", &fields);
                        }
                    }
                }
            };
            talk(Visitor { stream, peer, number, place }).await;
        });
        true
    }

    fn note(&self, ended: Result<(), tokio::task::JoinError>) {
        if ended.is_err_and(|error| error.is_panic()) {
            self.observer.metrics().panicked();
            self.observer
                .log()
                .error("a conversation panicked", &[("listener", &self.protocol.name())]);
        }
    }
}

/// A connection, plain or encrypted.
#[derive(Debug)]
pub enum Stream {
    /// As it is.
    Plain(TcpStream),
    /// By TLS.
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
    async fn upstream_connections_have_files_of_their_own_and_share_the_rest() {
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
