//! Tracks whether a connection makes progress, so that stalled ones can be closed. No request reads
//! the clock: a timer compares counters every few seconds.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};

use super::frames::{FrameBudget, LastBytes, PREFACE};

/// The counters of one connection.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Requests whose heads have arrived.
    requests: AtomicU64,
    /// Requests among them without a response.
    busy: AtomicUsize,
    /// Bytes of an incomplete request have arrived.
    begun: AtomicBool,
    /// Bytes that the client has accepted.
    taken: AtomicU64,
    /// The client accepts no further bytes.
    stuck: AtomicBool,
    /// How many snapshots were taken.
    snapshots: AtomicU64,
    /// HTTP/2 responses that wait for a window since the last snapshot, and since the one before. A
    /// client that opens no window can read all bytes and still stall them.
    waiting: [AtomicUsize; 2],
    /// The connection is HTTP/2, where bytes need not belong to a request.
    is_http2: AtomicBool,
    /// In HTTP/2, one more than the number of the head that has arrived in part; 0 if there is
    /// none.
    open_head: AtomicU64,
    /// How many turns it has had.
    turns: AtomicUsize,
    /// Its frame budget was exhausted.
    flooded: AtomicBool,
    /// The socket of a connection that was closed for abuse, kept open.
    abused_socket: Mutex<Option<OwnedFd>>,
    /// The next response is the last.
    pub(crate) last: AtomicBool,
}

/// The counters at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ProgressSnapshot {
    requests: u64,
    busy: bool,
    begun: bool,
    open_head: u64,
    taken: u64,
    stuck: bool,
    /// A response has waited for a window since before the last snapshot.
    waits: bool,
}

/// The progress of a connection between two snapshots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Movement {
    /// It made progress.
    Yes,
    /// It had no request.
    Idle,
    /// A request has begun and does not continue.
    Stuck,
    /// The client does not read its responses.
    Unread,
}

impl Progress {
    pub(crate) fn snapshot(&self) -> ProgressSnapshot {
        let snapshots = self.snapshots.fetch_add(1, Relaxed);
        ProgressSnapshot {
            requests: self.requests.load(Relaxed),
            busy: self.busy.load(Relaxed) > 0,
            begun: self.begun.load(Relaxed) && !self.is_http2.load(Relaxed),
            open_head: self.open_head.load(Relaxed),
            taken: self.taken.load(Relaxed),
            stuck: self.stuck.load(Relaxed),
            waits: self.waiting_since(snapshots + 1).load(Relaxed) > 0,
        }
    }

    /// Responses that wait since this snapshot. The counter is shared with the snapshot two before,
    /// since which no response waits.
    fn waiting_since(&self, snapshot: u64) -> &AtomicUsize {
        &self.waiting[usize::from(snapshot % 2 == 1)]
    }

    pub(crate) fn is_http2(&self) -> bool {
        self.is_http2.load(Relaxed)
    }

    /// Starts a turn of the connection.
    pub(crate) fn begin_turn(&self) {
        self.turns.fetch_add(1, Relaxed);
    }

    /// Whether its frame budget was ever exhausted.
    pub(crate) fn was_flooded(&self) -> bool {
        self.flooded.load(Relaxed)
    }

    /// The socket, if the connection was closed for HTTP/2 abuse: it is still open.
    pub(crate) fn abused_socket(&self) -> Option<OwnedFd> {
        self.abused_socket.lock().take()
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Relaxed) > 0
    }

    /// Counts a request that has arrived. It is in progress until the result is dropped.
    pub(crate) fn request(self: &Arc<Self>) -> RequestInProgress {
        self.requests.fetch_add(1, Relaxed);
        self.busy.fetch_add(1, Relaxed);
        self.begun.store(false, Relaxed);
        RequestInProgress(Arc::clone(self))
    }
}

impl ProgressSnapshot {
    /// The progress since `before`.
    pub(crate) fn since(self, before: ProgressSnapshot) -> Movement {
        let same_request = self.requests == before.requests;
        let slow_reader = self.stuck && before.stuck && self.taken == before.taken;
        // In HTTP/2 no frame can arrive before the rest of a head.
        let slow_head = self.open_head > 0 && self.open_head == before.open_head;
        if slow_reader || self.waits {
            Movement::Unread
        } else if slow_head || same_request && !self.busy && self.begun && before.begun {
            Movement::Stuck
        } else if same_request && !self.busy && !self.stuck {
            Movement::Idle
        } else {
            Movement::Yes
        }
    }
}

#[derive(Debug)]
pub(crate) struct RequestInProgress(Arc<Progress>);

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Relaxed);
    }
}

/// The body of an HTTP/2 response. A frame waits for a window until the next one is polled or the
/// body is dropped.
#[derive(Debug)]
pub(crate) struct TrackedBody {
    body: Body,
    progress: Arc<Progress>,
    /// The snapshot since which it waits.
    since: Option<u64>,
}

impl TrackedBody {
    pub(crate) fn of(body: Body, progress: &Arc<Progress>) -> Body {
        if body.is_end_stream() {
            return body;
        }
        let mut own = TrackedBody { body, progress: Arc::clone(progress), since: None };
        own.wait(true);
        Body::new(own)
    }

    fn wait(&mut self, waits: bool) {
        let since = waits.then(|| self.progress.snapshots.load(Relaxed));
        if let Some(since) = since {
            self.progress.waiting_since(since).fetch_add(1, Relaxed);
        }
        if let Some(before) = std::mem::replace(&mut self.since, since) {
            self.progress.waiting_since(before).fetch_sub(1, Relaxed);
        }
    }
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.wait(matches!(polled, Poll::Ready(Some(Ok(_)))));
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.wait(false);
    }
}

/// Bytes read before the protocol is known: about one turn of frames.
const FIRST_BYTES: u64 = 2 << 10;

/// A stream that counts the progress of its connection.
#[derive(Debug)]
pub(crate) struct Tracked<S> {
    stream: Take<S>,
    progress: Arc<Progress>,
    /// How many bytes of the HTTP/2 preface have arrived; `None` once the protocol is known.
    preface: Option<usize>,
    /// In HTTP/2, the frame budget, and the turn it was last used in.
    allowance: Option<(FrameBudget, usize)>,
    /// The last bytes written.
    tail: LastBytes,
}

impl<S: AsyncRead> Tracked<S> {
    pub(crate) fn new(stream: S, progress: Arc<Progress>) -> Self {
        Tracked {
            stream: stream.take(u64::MAX),
            progress,
            preface: Some(0),
            allowance: None,
            tail: LastBytes::default(),
        }
    }

    /// Counts bytes that have arrived.
    fn count_read(&mut self, bytes: &[u8]) {
        let (progress, mut bytes) = (&self.progress, bytes);
        if let Some(have) = self.preface {
            let new = bytes.len().min(PREFACE.len() - have);
            // An incomplete preface has the time limit of any request: it may be one with the
            // method `PRI`.
            self.preface = (bytes[..new] == PREFACE[have..have + new]).then_some(have + new);
            if self.preface == Some(PREFACE.len()) {
                self.preface = None;
                bytes = &bytes[new..];
                progress.is_http2.store(true, Relaxed);
                self.allowance = Some((FrameBudget::new(), progress.turns.load(Relaxed)));
            }
        }
        if let Some((allowance, _)) = &mut self.allowance {
            allowance.arrived(bytes, progress.taken.load(Relaxed));
            progress.open_head.store(allowance.open_head().map_or(0, |head| head + 1), Relaxed);
            if allowance.was_exhausted {
                progress.flooded.store(true, Relaxed);
            }
        }
        if !progress.is_busy() {
            progress.begun.store(true, Relaxed);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Tracked<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Tracked { stream, progress, allowance, preface, .. } = &mut *self;
        let most = match allowance {
            None if preface.is_some() => FIRST_BYTES,
            Some((allowance, turn)) => {
                let turns = progress.turns.load(Relaxed);
                if std::mem::replace(turn, turns) != turns {
                    allowance.begin_turn();
                }
                ready!(allowance.poll(cx)) as u64
            }
            None => u64::MAX,
        };
        stream.set_limit(most);
        let before = buf.filled().len();
        let polled = Pin::new(stream).poll_read(cx, buf);
        let new = &buf.filled()[before..];
        if !new.is_empty() {
            self.count_read(new);
        }
        polled
    }
}

impl<S> Tracked<S> {
    fn seen<'a>(
        &mut self,
        said: impl IntoIterator<Item = &'a [u8]>,
        polled: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match &polled {
            Poll::Ready(Ok(bytes)) => {
                if self.progress.is_http2() {
                    self.tail.add(said, *bytes);
                }
                self.progress.taken.fetch_add(*bytes as u64, Relaxed);
                self.progress.stuck.store(false, Relaxed);
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.progress.stuck.store(true, Relaxed),
        }
        polled
    }
}

impl<S: AsyncRead + AsyncWrite + AsFd + Unpin> AsyncWrite for Tracked<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(self.stream.get_mut()).poll_write(cx, buf);
        self.seen([buf], polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(self.stream.get_mut()).poll_write_vectored(cx, bufs);
        self.seen(bufs.iter().map(|buf| &**buf), polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.get_ref().is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(self.stream.get_mut()).poll_flush(cx);
        // TLS accepts bytes before the client does.
        if polled.is_pending() {
            self.progress.stuck.store(true, Relaxed);
        }
        polled
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.progress.is_http2() && self.tail.ends_with_calm_goaway() {
            // Keep an abusive client waiting: do not close the connection. Without a free file,
            // close it.
            if let Ok(socket) = self.stream.get_ref().as_fd().try_clone_to_owned() {
                *self.progress.abused_socket.lock() = Some(socket);
                return Poll::Ready(Ok(()));
            }
        }
        Pin::new(self.stream.get_mut()).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalled_connections_are_recognized() {
        let progress = Arc::new(Progress::default());
        let first = progress.snapshot();
        assert_eq!(progress.snapshot().since(first), Movement::Idle);
        progress.begun.store(true, Relaxed);
        let begun = progress.snapshot();
        assert_eq!(begun.since(first), Movement::Idle, "it may have begun just now");
        assert_eq!(progress.snapshot().since(begun), Movement::Stuck);
        let answering = progress.request();
        assert_eq!(progress.snapshot().since(begun), Movement::Yes);
        let busy = progress.snapshot();
        assert_eq!(progress.snapshot().since(busy), Movement::Yes, "we are slow, not they");
        drop(answering);
        assert_eq!(progress.snapshot().since(busy), Movement::Idle);
        progress.stuck.store(true, Relaxed);
        let stuck = progress.snapshot();
        assert_eq!(progress.snapshot().since(stuck), Movement::Unread);
        progress.taken.fetch_add(1, Relaxed);
        assert_eq!(progress.snapshot().since(stuck), Movement::Yes);
    }

    #[test]
    fn a_response_without_a_window_is_recognized() {
        let progress = Arc::new(Progress::default());
        let first = progress.snapshot();
        let mut body = TrackedBody::of(Body::from("answer"), &progress);
        let fresh = progress.snapshot();
        assert_eq!(fresh.since(first), Movement::Idle, "it may wait since just now");
        let _ = progress.request();
        assert_eq!(progress.snapshot().since(fresh), Movement::Unread, "whatever else is requests");
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(matches!(Pin::new(&mut body).poll_frame(&mut context), Poll::Ready(Some(Ok(_)))));
        assert_ne!(progress.snapshot().since(fresh), Movement::Unread, "it was requests");
        assert_eq!(progress.snapshot().since(fresh), Movement::Unread, "and what it said waits");
        drop(body);
        let done = progress.snapshot();
        drop(TrackedBody::of(Body::from("nobody wants it"), &progress));
        assert!(TrackedBody::of(Body::empty(), &progress).is_end_stream());
        progress.snapshot();
        assert_eq!(progress.snapshot().since(done), Movement::Idle);
    }

    #[test]
    fn a_stalled_http_2_head_is_recognized_despite_other_requests() {
        let progress = Arc::new(Progress::default());
        progress.is_http2.store(true, Relaxed);
        let before = progress.snapshot();
        progress.open_head.store(3, Relaxed);
        let begun = progress.snapshot();
        assert_eq!(begun.since(before), Movement::Idle, "it may have begun just now");
        let _answering = progress.request();
        assert_eq!(
            progress.snapshot().since(begun),
            Movement::Stuck,
            "although another request is answered"
        );
        progress.open_head.store(4, Relaxed);
        assert_eq!(progress.snapshot().since(begun), Movement::Yes, "it is another one");
    }

    /// Whether these first bytes, however they are cut, make an HTTP/2 connection, and whether a
    /// head is open.
    #[tokio::test]
    async fn the_preface_is_recognized_in_pieces() {
        for (bytes, is_http2, is_open) in [
            (&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], true, false),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", true, false),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0", true, true),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r", false, false),
            (b"PRI / HTTP/1.1\r\nHost: x\r\nX-Long: aaaaaaaaaaaaaaaaaaaa", false, false),
            (b"GET / HTTP/1.1\r\n", false, false),
        ] {
            for cut in [1, 3, 4, 5, 23, 24, 25, bytes.len()] {
                let progress = Arc::new(Progress::default());
                let mut paced = Tracked::new(tokio::io::empty(), Arc::clone(&progress));
                bytes.chunks(cut).for_each(|piece| paced.count_read(piece));
                let found = (
                    progress.is_http2(),
                    progress.open_head.load(Relaxed) > 0,
                    progress.snapshot().begun,
                );
                assert_eq!(
                    found,
                    (is_http2, is_open, !is_http2),
                    "{} in pieces of {cut}",
                    bytes.escape_ascii()
                );
            }
        }
    }

    /// The first turn, before the protocol is known, is no longer than the others.
    #[tokio::test]
    async fn the_first_turn_is_no_longer_than_the_others() {
        let request = [0, 0, 1, 1, 5, 0, 0, 0, 1, 0x82];
        let bytes = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &request.repeat(10_000)].concat();
        let mut paced = Tracked::new(&bytes[..], Arc::new(Progress::default()));
        let (mut context, mut room) =
            (Context::from_waker(std::task::Waker::noop()), vec![0; 64 << 10]);
        let mut turn = || {
            paced.progress.turns.fetch_add(1, Relaxed);
            let mut read = 0;
            loop {
                let mut buffer = ReadBuf::new(&mut room);
                match Pin::new(&mut paced).poll_read(&mut context, &mut buffer) {
                    Poll::Ready(Ok(())) => read += buffer.filled().len(),
                    Poll::Ready(Err(error)) => panic!("{error}"),
                    Poll::Pending => return read / request.len(),
                }
            }
        };
        let turns = [turn(), turn(), turn()];
        assert!(turns.iter().all(|frames| (50..250).contains(frames)), "{turns:?}");
    }
}
