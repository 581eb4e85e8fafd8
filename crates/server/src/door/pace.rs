//! Whether a connection moves. The clock is not read on the way of a request: whoever watches looks every few seconds at what has changed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What a connection has done so far.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Requests whose heads have arrived.
    asked: AtomicU64,
    /// Of these, those not yet answered.
    busy: AtomicUsize,
    /// Something has arrived since the last answer that is not yet a request.
    begun: AtomicBool,
    /// Bytes taken by the other side.
    taken: AtomicU64,
    /// There are more, and it does not take them.
    stuck: AtomicBool,
    /// It speaks HTTP/2, where bytes need not be about a request.
    second: AtomicBool,
    /// The next answer is the last.
    pub(super) last: AtomicBool,
}

/// The same at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Seen {
    asked: u64,
    busy: bool,
    begun: bool,
    taken: u64,
    stuck: bool,
}

/// What has become of a connection between two looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moved {
    /// It was about something.
    Yes,
    /// Nothing was asked.
    Idle,
    /// It began something and does not go on, or does not take what it asked for.
    Stuck,
}

impl Pace {
    pub(super) fn look(&self) -> Seen {
        Seen {
            asked: self.asked.load(Relaxed),
            busy: self.busy.load(Relaxed) > 0,
            begun: self.begun.load(Relaxed) && !self.second.load(Relaxed),
            taken: self.taken.load(Relaxed),
            stuck: self.stuck.load(Relaxed),
        }
    }

    pub(super) fn is_second(&self) -> bool {
        self.second.load(Relaxed)
    }

    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Relaxed) > 0
    }

    /// A request has arrived; until the result is dropped it is being answered.
    pub(super) fn request(self: &Arc<Self>) -> Answering {
        self.asked.fetch_add(1, Relaxed);
        self.busy.fetch_add(1, Relaxed);
        self.begun.store(false, Relaxed);
        Answering(Arc::clone(self))
    }
}

impl Seen {
    /// What has become of it since `before`.
    pub(super) fn since(self, before: Seen) -> Moved {
        let (same_request, slow_reader) =
            (self.asked == before.asked, self.stuck && before.stuck && self.taken == before.taken);
        if slow_reader || (same_request && !self.busy && self.begun && before.begun) {
            Moved::Stuck
        } else if same_request && !self.busy && !self.stuck {
            Moved::Idle
        } else {
            Moved::Yes
        }
    }
}

#[derive(Debug)]
pub(super) struct Answering(Arc<Pace>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Relaxed);
    }
}

/// A stream whose pace is seen.
#[derive(Debug)]
pub(super) struct Paced<S> {
    stream: S,
    pace: Arc<Pace>,
    first: bool,
}

impl<S> Paced<S> {
    pub(super) fn new(stream: S, pace: Arc<Pace>) -> Self {
        Paced { stream, pace, first: true }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        let new = &buf.filled()[before..];
        if !new.is_empty() {
            if self.first {
                self.first = false;
                self.pace.second.store(new.starts_with(b"PRI "), Relaxed);
            }
            if !self.pace.is_busy() {
                self.pace.begun.store(true, Relaxed);
            }
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> Paced<S> {
    fn seen(&self, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match &polled {
            Poll::Ready(Ok(bytes)) => {
                self.pace.taken.fetch_add(*bytes as u64, Relaxed);
                self.pace.stuck.store(false, Relaxed);
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.pace.stuck.store(true, Relaxed),
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.seen(polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.seen(polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        // TLS takes bytes before the other side does.
        if polled.is_pending() {
            self.pace.stuck.store(true, Relaxed);
        }
        polled
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_still_is_seen() {
        let pace = Arc::new(Pace::default());
        let first = pace.look();
        assert_eq!(pace.look().since(first), Moved::Idle);
        pace.begun.store(true, Relaxed);
        let begun = pace.look();
        assert_eq!(begun.since(first), Moved::Idle, "it may have begun just now");
        assert_eq!(pace.look().since(begun), Moved::Stuck);
        let answering = pace.request();
        assert_eq!(pace.look().since(begun), Moved::Yes);
        let busy = pace.look();
        assert_eq!(pace.look().since(busy), Moved::Yes, "we are slow, not they");
        drop(answering);
        assert_eq!(pace.look().since(busy), Moved::Idle);
        pace.stuck.store(true, Relaxed);
        let stuck = pace.look();
        assert_eq!(pace.look().since(stuck), Moved::Stuck);
        pace.taken.fetch_add(1, Relaxed);
        assert_eq!(pace.look().since(stuck), Moved::Yes);
    }
}
