//! Connections to an upstream that speaks HTTP/1.1.
//!
//! A connection is driven by whoever has a request on it, in the same task: first for the head of the response, then with every piece of its body.
//! Nothing is handed from task to task on the way. Between requests a connection lies in the pool, and is looked at before it is used again: one that
//! the upstream has closed is dropped.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::body::Sent;

/// The most bytes of a response's head, and what is read of a body at once.
const BUFFER_BYTES: usize = 64 << 10;

/// Connections that wait for the next request.
#[derive(Debug)]
pub(super) struct Pool {
    idle: Mutex<VecDeque<Line>>,
    most: usize,
    keep: Duration,
}

/// One connection.
pub(super) struct Line {
    sender: SendRequest<Sent>,
    connection: Box<Connection<TokioIo<TcpStream>, Sent>>,
    over: bool,
    since: Instant,
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
    pub(super) fn take(&self) -> Option<Line> {
        loop {
            let mut line = self.idle.lock().pop_back()?;
            if line.since.elapsed() < self.keep && line.is_good() {
                return Some(line);
            }
        }
    }

    /// Keeps a connection, if it is good for another request.
    pub(super) fn keep(&self, mut line: Line) {
        if self.most == 0 || !line.is_good() {
            return;
        }
        line.since = Instant::now();
        let mut idle = self.idle.lock();
        let oldest = if idle.len() >= self.most { idle.pop_front() } else { None };
        idle.push_back(line);
        drop(idle);
        drop(oldest);
    }

    /// Drops those that nobody needs, and those that the upstream has closed.
    pub(super) fn sweep(&self) {
        let looked_at = self.idle.lock().len();
        for _ in 0..looked_at {
            let Some(mut line) = self.idle.lock().pop_front() else { return };
            if line.since.elapsed() < self.keep && line.is_good() {
                // Behind the others for a moment: which of them is used next does not matter.
                self.idle.lock().push_back(line);
            }
        }
    }
}

impl Line {
    /// A new connection on this stream.
    pub(super) async fn on(stream: TcpStream) -> Result<Line, hyper::Error> {
        let (sender, connection) = Builder::new().max_buf_size(BUFFER_BYTES).handshake(TokioIo::new(stream)).await?;
        Ok(Line { sender, connection: Box::new(connection), over: false, since: Instant::now() })
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
    pub(super) async fn ask(&mut self, request: Request<Sent>) -> Result<Response<Incoming>, Unanswered> {
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

    /// The stream, once HTTP is over on it because something else is spoken from now on; and what of that was read already.
    pub(super) async fn into_stream(mut self) -> (TcpStream, Bytes) {
        poll_fn(|context| {
            self.drive(context);
            if self.over { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let parts = self.connection.into_parts();
        (parts.io.into_inner(), parts.read_buf)
    }
}
