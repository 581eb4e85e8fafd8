//! Connections that are not sockets: bytes wait in a pipe until the world carries them.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tidegate::redis::{Connect, Connecting, Link};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How a connection stands, as its client sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Dialing,
    Up,
    Refused,
    /// Cut off.
    Reset,
}

/// The client's end of a connection.
#[derive(Debug)]
pub(crate) struct Pipe {
    pub(crate) phase: Phase,
    /// What has come and was not read.
    pub(crate) inbox: Vec<u8>,
    /// What was written and not carried away.
    pub(crate) outbox: Vec<u8>,
    /// The client has let go of it.
    pub(crate) dropped: bool,
    waker: Option<Waker>,
}

pub(crate) type SharedPipe = Arc<Mutex<Pipe>>;

/// Wakes the task that waits at the client's end.
pub(crate) fn happened(pipe: &SharedPipe, change: impl FnOnce(&mut Pipe)) {
    let waker = {
        let mut pipe = pipe.lock();
        change(&mut pipe);
        pipe.waker.take()
    };
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// The way out of a node: where its store asks for connections.
#[derive(Clone, Default)]
pub(crate) struct Port {
    dialled: Arc<Mutex<Vec<SharedPipe>>>,
}

impl Port {
    /// Connections that were opened since the last time.
    pub(crate) fn dialled(&self) -> Vec<SharedPipe> {
        std::mem::take(&mut *self.dialled.lock())
    }
}

impl Connect for Port {
    fn connect(&self, _address: &str) -> Connecting {
        let pipe = Pipe {
            phase: Phase::Dialing,
            inbox: Vec::new(),
            outbox: Vec::new(),
            dropped: false,
            waker: None,
        };
        let pipe = Arc::new(Mutex::new(pipe));
        self.dialled.lock().push(Arc::clone(&pipe));
        let end = End(pipe);
        Box::pin(async move {
            let phase = poll_fn(|context| {
                let mut pipe = end.0.lock();
                if pipe.phase == Phase::Dialing {
                    pipe.waker = Some(context.waker().clone());
                    return Poll::Pending;
                }
                Poll::Ready(pipe.phase)
            });
            match phase.await {
                Phase::Up => Ok(Box::new(end) as Box<dyn Link>),
                Phase::Reset => Err(io::ErrorKind::ConnectionReset.into()),
                _ => Err(io::ErrorKind::ConnectionRefused.into()),
            }
        })
    }
}

/// What the client holds.
struct End(SharedPipe);

impl Drop for End {
    fn drop(&mut self) {
        self.0.lock().dropped = true;
    }
}

impl AsyncRead for End {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut pipe = self.0.lock();
        if pipe.inbox.is_empty() {
            if pipe.phase == Phase::Reset {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            pipe.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        let count = buffer.remaining().min(pipe.inbox.len());
        buffer.put_slice(&pipe.inbox[..count]);
        pipe.inbox.drain(..count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut pipe = self.0.lock();
        if pipe.phase == Phase::Reset {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        pipe.outbox.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
