//! Connections to an upstream that speaks HTTP/1.1.
//!
//! The task of the client's connection drives the upstream connection, first for the head of the
//! response, then for each piece of its body, so no data crosses tasks. Between requests a
//! connection is in the pool. It is checked before it is reused, and dropped if the upstream closed
//! it. The [fast path](super::fast_path) uses the same connections without hyper.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use tokio::time::Instant;

use super::body::RequestBody;
use super::socket::Socket;
use crate::listen::wire::Prefixed;

/// The most bytes of a response's head, and of one read of a body.
const BUFFER_BYTES: usize = 64 << 10;

/// Idle connections, kept for the next request.
#[derive(Debug)]
pub(super) struct Pool {
    idle: Mutex<VecDeque<PooledConnection>>,
    most: usize,
    keep: Duration,
}

#[derive(Debug)]
struct PooledConnection {
    kept: IdleConnection,
    since: Instant,
}

/// A connection between two requests.
#[derive(Debug)]
pub(super) enum IdleConnection {
    /// Owned by a hyper connection.
    Hyper(Http1Connection),
    /// A bare socket.
    Bare(Socket),
}

/// One connection, with its hyper client.
pub(super) struct Http1Connection {
    sender: SendRequest<RequestBody>,
    connection: Box<Connection<TokioIo<ReplayStream>, RequestBody>>,
    over: bool,
    /// Whether the fast path sent its first request, without hyper.
    resumed: bool,
}

impl std::fmt::Debug for Http1Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Http1Connection").field("over", &self.over).finish_non_exhaustive()
    }
}

/// A request without a response; the request itself, if no byte of it was sent.
pub(super) struct SendError {
    pub(super) error: hyper::Error,
    pub(super) request: Option<Request<RequestBody>>,
}

impl Pool {
    pub(super) fn new(most: usize, keep: Duration) -> Self {
        Pool { idle: Mutex::default(), most, keep }
    }

    /// A usable connection: the one that was used last.
    pub(super) fn take(&self) -> Option<IdleConnection> {
        loop {
            let mut idle = self.idle.lock().pop_back()?;
            if idle.since.elapsed() < self.keep && idle.kept.is_good() {
                return Some(idle.kept);
            }
        }
    }

    /// A usable connection without hyper.
    pub(super) fn take_bare(&self) -> Option<Socket> {
        loop {
            if let Some(stream) = self.take()?.into_bare() {
                return Some(stream);
            }
        }
    }

    /// Keeps a connection, if it can carry another request.
    pub(super) fn keep(&self, kept: impl Into<IdleConnection>) {
        let mut kept = kept.into();
        if self.most == 0 || !kept.is_good() {
            return;
        }
        if let IdleConnection::Hyper(Http1Connection { resumed: true, .. }) = kept {
            // Its stream would drop the next request as well.
            let Some(stream) = kept.into_bare() else { return };
            kept = IdleConnection::Bare(stream);
        }
        let kept = PooledConnection { kept, since: Instant::now() };
        let mut idle = self.idle.lock();
        let oldest = if idle.len() >= self.most { idle.pop_front() } else { None };
        idle.push_back(kept);
        drop(idle);
        drop(oldest);
    }

    /// Drops connections that were idle for too long or that the upstream closed.
    pub(super) fn sweep(&self) {
        let looked_at = self.idle.lock().len();
        for _ in 0..looked_at {
            let Some(mut idle) = self.idle.lock().pop_front() else { return };
            if idle.since.elapsed() < self.keep && idle.kept.is_good() {
                // The order changes for a moment; which connection is used next does not matter.
                self.idle.lock().push_back(idle);
            }
        }
    }
}

impl From<Http1Connection> for IdleConnection {
    fn from(http1: Http1Connection) -> Self {
        IdleConnection::Hyper(http1)
    }
}

impl From<Socket> for IdleConnection {
    fn from(stream: Socket) -> Self {
        IdleConnection::Bare(stream)
    }
}

impl IdleConnection {
    /// Whether another request can be sent.
    fn is_good(&mut self) -> bool {
        match self {
            IdleConnection::Hyper(http1) => http1.is_good(),
            // Data before the next request, the end included, makes it unusable. `try_read` makes
            // no system call unless the socket is readable.
            IdleConnection::Bare(stream) => {
                let read = stream.try_read(&mut [0]);
                read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            }
        }
    }

    pub(super) async fn into_hyper(self) -> Result<Http1Connection, hyper::Error> {
        match self {
            IdleConnection::Hyper(http1) => Ok(http1),
            IdleConnection::Bare(stream) => Http1Connection::on(stream).await,
        }
    }

    fn into_bare(self) -> Option<Socket> {
        match self {
            IdleConnection::Hyper(http1) => {
                let parts = http1.connection.into_parts();
                let wire = parts.io.into_inner();
                (parts.read_buf.is_empty() && wire.read.at == wire.read.bytes.len())
                    .then_some(wire.read.stream)
            }
            IdleConnection::Bare(stream) => Some(stream),
        }
    }
}

/// The stream under a hyper connection. If the fast path sent the request already, hyper's copy of
/// it is discarded, and hyper reads the bytes of the response that have arrived.
#[derive(Debug)]
struct ReplayStream {
    read: Prefixed<Socket>,
    sent: Option<Replay>,
}

/// Whether hyper has written its copy of a request that the fast path sent.
#[derive(Debug)]
enum Replay {
    /// Not yet; reads wait until it has.
    Waiting(Option<Waker>),
    /// It has begun to.
    Written,
}

impl ReplayStream {
    /// Whether the bytes written now are to be discarded.
    fn was_sent(&mut self) -> bool {
        if let Some(Replay::Waiting(Some(reader))) = self.sent.as_ref() {
            reader.wake_by_ref();
        }
        self.sent = self.sent.take().map(|_| Replay::Written);
        self.sent.is_some()
    }
}

impl AsyncRead for ReplayStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(Replay::Waiting(reader)) = &mut self.sent {
            *reader = Some(context.waker().clone());
            return Poll::Pending;
        }
        Pin::new(&mut self.read).poll_read(context, buf)
    }
}

impl AsyncWrite for ReplayStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.was_sent() {
            Poll::Ready(Ok(buf.len()))
        } else {
            Pin::new(&mut self.read).poll_write(context, buf)
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.was_sent() {
            return Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()));
        }
        Pin::new(&mut self.read).poll_write_vectored(context, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.read).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.read).poll_shutdown(context)
    }
}

impl Http1Connection {
    /// A new connection on this stream.
    pub(super) async fn on(stream: Socket) -> Result<Http1Connection, hyper::Error> {
        Self::of(ReplayStream { read: Prefixed { bytes: Vec::new(), at: 0, stream }, sent: None })
            .await
    }

    /// A connection on which the fast path sent a request, with the bytes of the response so far.
    /// The caller sends the same request again.
    pub(super) async fn resumed(
        stream: Socket,
        bytes: Vec<u8>,
    ) -> Result<Http1Connection, hyper::Error> {
        Self::of(ReplayStream {
            read: Prefixed { bytes, at: 0, stream },
            sent: Some(Replay::Waiting(None)),
        })
        .await
    }

    async fn of(wire: ReplayStream) -> Result<Http1Connection, hyper::Error> {
        let resumed = wire.sent.is_some();
        let (sender, connection) =
            Builder::new().max_buf_size(BUFFER_BYTES).handshake(TokioIo::new(wire)).await?;
        Ok(Http1Connection { sender, connection: Box::new(connection), over: false, resumed })
    }

    /// Reads and writes as much as possible without waiting.
    pub(super) fn drive(&mut self, context: &mut Context<'_>) {
        // The response or its body reports how the connection ended.
        if !self.over && Pin::new(&mut *self.connection).poll(context).is_ready() {
            self.over = true;
        }
    }

    /// Whether another request can be sent.
    fn is_good(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.over && self.sender.is_ready()
    }

    /// Sends a request, and waits for the head of the response.
    pub(super) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        let mut answer = pin!(self.sender.try_send_request(request));
        let polled = poll_fn(|context| {
            if !self.over && Pin::new(&mut *self.connection).poll(context).is_ready() {
                self.over = true;
            }
            answer.as_mut().poll(context)
        });
        polled.await.map_err(|mut failed| {
            let request = failed.take_message();
            SendError { error: failed.into_error(), request }
        })
    }

    /// The stream after an upgrade, and the bytes of the new protocol that were read already.
    pub(super) async fn into_stream(mut self) -> (Socket, Bytes) {
        poll_fn(|context| {
            self.drive(context);
            if self.over { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let parts = self.connection.into_parts();
        (parts.io.into_inner().read.stream, parts.read_buf)
    }
}
