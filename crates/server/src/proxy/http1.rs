//! Connections to an upstream that speaks HTTP/1.1.
//!
//! A connection is driven by whoever has a request on it, in the same task: first for the head of
//! the response, then with every piece of its body. Nothing is handed from task to task on the way.
//! Between requests a connection lies in the pool, and is looked at before it is used again: one
//! that the upstream has closed is dropped. Whoever goes the [short way](super::fast_path) uses the
//! same connections, without hyper.

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

use super::body::Sent;
use super::socket::Socket;
use crate::listen::quick::Begun;

/// The most bytes of a response's head, and what is read of a body at once.
const BUFFER_BYTES: usize = 64 << 10;

/// Connections that wait for the next request.
#[derive(Debug)]
pub(super) struct Pool {
    idle: Mutex<VecDeque<Idle>>,
    most: usize,
    keep: Duration,
}

#[derive(Debug)]
struct Idle {
    kept: Kept,
    since: Instant,
}

/// A connection between two requests.
#[derive(Debug)]
pub(super) enum Kept {
    /// As hyper has it.
    Line(Line),
    /// As it is.
    Bare(Socket),
}

/// One connection.
pub(super) struct Line {
    sender: SendRequest<Sent>,
    connection: Box<Connection<TokioIo<Wire>, Sent>>,
    over: bool,
    /// It was begun without hyper.
    resumed: bool,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").field("over", &self.over).finish_non_exhaustive()
    }
}

/// There is no answer; the request, if nothing of it was sent.
pub(super) struct Unanswered {
    pub(super) error: hyper::Error,
    pub(super) request: Option<Request<Sent>>,
}

impl Pool {
    pub(super) fn new(most: usize, keep: Duration) -> Self {
        Pool { idle: Mutex::default(), most, keep }
    }

    /// A connection that is still good: the one that was used last.
    pub(super) fn take(&self) -> Option<Kept> {
        loop {
            let mut idle = self.idle.lock().pop_back()?;
            if idle.since.elapsed() < self.keep && idle.kept.is_good() {
                return Some(idle.kept);
            }
        }
    }

    /// The same without hyper.
    pub(super) fn take_bare(&self) -> Option<Socket> {
        loop {
            if let Some(stream) = self.take()?.into_bare() {
                return Some(stream);
            }
        }
    }

    /// Keeps a connection, if it is good for another request.
    pub(super) fn keep(&self, kept: impl Into<Kept>) {
        let mut kept = kept.into();
        if self.most == 0 || !kept.is_good() {
            return;
        }
        if let Kept::Line(Line { resumed: true, .. }) = kept {
            // It would drop the next request, too.
            let Some(stream) = kept.into_bare() else { return };
            kept = Kept::Bare(stream);
        }
        let kept = Idle { kept, since: Instant::now() };
        let mut idle = self.idle.lock();
        let oldest = if idle.len() >= self.most { idle.pop_front() } else { None };
        idle.push_back(kept);
        drop(idle);
        drop(oldest);
    }

    /// Drops those that nobody needs, and those that the upstream has closed.
    pub(super) fn sweep(&self) {
        let looked_at = self.idle.lock().len();
        for _ in 0..looked_at {
            let Some(mut idle) = self.idle.lock().pop_front() else { return };
            if idle.since.elapsed() < self.keep && idle.kept.is_good() {
                // Behind the others for a moment: which of them is used next does not matter.
                self.idle.lock().push_back(idle);
            }
        }
    }
}

impl From<Line> for Kept {
    fn from(line: Line) -> Self {
        Kept::Line(line)
    }
}

impl From<Socket> for Kept {
    fn from(stream: Socket) -> Self {
        Kept::Bare(stream)
    }
}

impl Kept {
    /// Whether another request can be sent.
    fn is_good(&mut self) -> bool {
        match self {
            Kept::Line(line) => line.is_good(),
            // What comes before anything was asked, the end included, makes it useless. The
            // operating system is asked only if it said that there is something.
            Kept::Bare(stream) => {
                matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
        }
    }

    pub(super) async fn into_line(self) -> Result<Line, hyper::Error> {
        match self {
            Kept::Line(line) => Ok(line),
            Kept::Bare(stream) => Line::on(stream).await,
        }
    }

    fn into_bare(self) -> Option<Socket> {
        match self {
            Kept::Line(line) => {
                let parts = line.connection.into_parts();
                let wire = parts.io.into_inner();
                (parts.read_buf.is_empty() && wire.read.at == wire.read.bytes.len())
                    .then_some(wire.read.stream)
            }
            Kept::Bare(stream) => Some(stream),
        }
    }
}

/// The stream of a connection. If its request was sent before hyper came to it, what hyper writes
/// of it goes nowhere, and what was read of the response comes first.
#[derive(Debug)]
struct Wire {
    read: Begun<Socket>,
    sent: Option<Again>,
}

/// A request that was sent is written again.
#[derive(Debug)]
enum Again {
    /// Not yet; who wants to read the response before that waits, as for any response.
    Not(Option<Waker>),
    Begun,
}

impl Wire {
    /// Whether what is written now was sent before.
    fn was_sent(&mut self) -> bool {
        if let Some(Again::Not(Some(reader))) = self.sent.as_ref() {
            reader.wake_by_ref();
        }
        self.sent = self.sent.take().map(|_| Again::Begun);
        self.sent.is_some()
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(Again::Not(reader)) = &mut self.sent {
            *reader = Some(context.waker().clone());
            return Poll::Pending;
        }
        Pin::new(&mut self.read).poll_read(context, buf)
    }
}

impl AsyncWrite for Wire {
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

impl Line {
    /// A new connection on this stream.
    pub(super) async fn on(stream: Socket) -> Result<Line, hyper::Error> {
        Self::of(Wire { read: Begun { bytes: Vec::new(), at: 0, stream }, sent: None }).await
    }

    /// A connection on which a request was sent already, and so much of the response has come. It
    /// is to be asked the same.
    pub(super) async fn resumed(stream: Socket, bytes: Vec<u8>) -> Result<Line, hyper::Error> {
        Self::of(Wire { read: Begun { bytes, at: 0, stream }, sent: Some(Again::Not(None)) }).await
    }

    async fn of(wire: Wire) -> Result<Line, hyper::Error> {
        let resumed = wire.sent.is_some();
        let (sender, connection) =
            Builder::new().max_buf_size(BUFFER_BYTES).handshake(TokioIo::new(wire)).await?;
        Ok(Line { sender, connection: Box::new(connection), over: false, resumed })
    }

    /// Lets it read and write what it can.
    pub(super) fn drive(&mut self, context: &mut Context<'_>) {
        // How it ended is told by the response or its body.
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
    pub(super) async fn ask(
        &mut self,
        request: Request<Sent>,
    ) -> Result<Response<Incoming>, Unanswered> {
        let mut answer = pin!(self.sender.try_send_request(request));
        let polled = poll_fn(|context| {
            if !self.over && Pin::new(&mut *self.connection).poll(context).is_ready() {
                self.over = true;
            }
            answer.as_mut().poll(context)
        });
        polled.await.map_err(|mut failed| {
            let request = failed.take_message();
            Unanswered { error: failed.into_error(), request }
        })
    }

    /// The stream, once HTTP is over on it because something else is spoken from now on; and what
    /// of that was read already.
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
