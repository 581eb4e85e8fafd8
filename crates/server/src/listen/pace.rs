//! Whether a connection moves. The clock is not read on the way of a request: whoever watches looks
//! every few seconds at what has changed.

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

use super::frames::{Allowance, PREFACE, Tail};

/// What a connection has done so far.
#[derive(Debug, Default)]
pub(crate) struct Pace {
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
    /// How often somebody has looked.
    looks: AtomicU64,
    /// Answers of HTTP/2 that wait for a window since the last look, and since the one before: who
    /// opens none can take all bytes and not these.
    waiting: [AtomicUsize; 2],
    /// It speaks HTTP/2, where bytes need not be about a request.
    second: AtomicBool,
    /// Over HTTP/2, one more than the number of the head that has begun to come and is not all
    /// here; 0: there is none.
    open_head: AtomicU64,
    /// Turns it has had.
    turns: AtomicUsize,
    /// It sent so much about nothing that it had to wait.
    flooded: AtomicBool,
    /// It was told to go, and why. Its socket is kept open by this.
    misused: Mutex<Option<OwnedFd>>,
    /// The next answer is the last.
    pub(crate) last: AtomicBool,
}

/// The same at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Seen {
    asked: u64,
    busy: bool,
    begun: bool,
    open_head: u64,
    taken: u64,
    stuck: bool,
    /// An answer has waited for a window since before the last look.
    waits: bool,
}

/// What has become of a connection between two looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Moved {
    /// It was about something.
    Yes,
    /// Nothing was asked.
    Idle,
    /// It began something and does not go on.
    Stuck,
    /// It does not take what it asked for.
    Unread,
}

impl Pace {
    pub(crate) fn look(&self) -> Seen {
        let looks = self.looks.fetch_add(1, Relaxed);
        Seen {
            asked: self.asked.load(Relaxed),
            busy: self.busy.load(Relaxed) > 0,
            begun: self.begun.load(Relaxed) && !self.second.load(Relaxed),
            open_head: self.open_head.load(Relaxed),
            taken: self.taken.load(Relaxed),
            stuck: self.stuck.load(Relaxed),
            waits: self.waiting_since(looks + 1).load(Relaxed) > 0,
        }
    }

    /// Those that wait since this look, or one that was two looks before: nobody waits as long as
    /// that.
    fn waiting_since(&self, look: u64) -> &AtomicUsize {
        &self.waiting[usize::from(look % 2 == 1)]
    }

    pub(crate) fn is_second(&self) -> bool {
        self.second.load(Relaxed)
    }

    /// It is this connection's turn.
    pub(crate) fn begin_turn(&self) {
        self.turns.fetch_add(1, Relaxed);
    }

    /// Whether it ever sent so much about nothing that it had to wait.
    pub(crate) fn was_flooded(&self) -> bool {
        self.flooded.load(Relaxed)
    }

    /// The socket, if it ended because HTTP/2 was misused. Then whoever did was told so, and it is
    /// still open.
    pub(crate) fn misused(&self) -> Option<OwnedFd> {
        self.misused.lock().take()
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Relaxed) > 0
    }

    /// A request has arrived; until the result is dropped it is being answered.
    pub(crate) fn request(self: &Arc<Self>) -> Answering {
        self.asked.fetch_add(1, Relaxed);
        self.busy.fetch_add(1, Relaxed);
        self.begun.store(false, Relaxed);
        Answering(Arc::clone(self))
    }
}

impl Seen {
    /// What has become of it since `before`.
    pub(crate) fn since(self, before: Seen) -> Moved {
        let same_request = self.asked == before.asked;
        let slow_reader = self.stuck && before.stuck && self.taken == before.taken;
        // Whatever else is under way on a connection of HTTP/2: nothing can come before the rest of
        // a head.
        let slow_head = self.open_head > 0 && self.open_head == before.open_head;
        if slow_reader || self.waits {
            Moved::Unread
        } else if slow_head || same_request && !self.busy && self.begun && before.begun {
            Moved::Stuck
        } else if same_request && !self.busy && !self.stuck {
            Moved::Idle
        } else {
            Moved::Yes
        }
    }
}

#[derive(Debug)]
pub(crate) struct Answering(Arc<Pace>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Relaxed);
    }
}

/// The body of an answer over HTTP/2. A part that it gave waits for a window until it is asked for
/// the next one, or is done with.
#[derive(Debug)]
pub(crate) struct Awaited {
    body: Body,
    pace: Arc<Pace>,
    /// The look since which it waits, if it does.
    since: Option<u64>,
}

impl Awaited {
    pub(crate) fn of(body: Body, pace: &Arc<Pace>) -> Body {
        if body.is_end_stream() {
            return body;
        }
        let mut own = Awaited { body, pace: Arc::clone(pace), since: None };
        own.wait(true);
        Body::new(own)
    }

    fn wait(&mut self, waits: bool) {
        let since = waits.then(|| self.pace.looks.load(Relaxed));
        if let Some(since) = since {
            self.pace.waiting_since(since).fetch_add(1, Relaxed);
        }
        if let Some(before) = std::mem::replace(&mut self.since, since) {
            self.pace.waiting_since(before).fetch_sub(1, Relaxed);
        }
    }
}

impl HttpBody for Awaited {
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

impl Drop for Awaited {
    fn drop(&mut self) {
        self.wait(false);
    }
}

/// What is read before it is known what is spoken: there is room in it for the frames of about one
/// turn.
const FIRST_BYTES: u64 = 2 << 10;

/// A stream whose pace is seen.
#[derive(Debug)]
pub(crate) struct Paced<S> {
    stream: Take<S>,
    pace: Arc<Pace>,
    /// How many bytes of the preface of HTTP/2 have come; nothing once it is known what is spoken.
    preface: Option<usize>,
    /// What may come of frames, over HTTP/2, and which turn that is about.
    allowance: Option<(Allowance, usize)>,
    /// The last that was said.
    tail: Tail,
}

impl<S: AsyncRead> Paced<S> {
    pub(crate) fn new(stream: S, pace: Arc<Pace>) -> Self {
        Paced {
            stream: stream.take(u64::MAX),
            pace,
            preface: Some(0),
            allowance: None,
            tail: Tail::default(),
        }
    }

    /// Something has arrived.
    fn heard(&mut self, bytes: &[u8]) {
        let (pace, mut bytes) = (&self.pace, bytes);
        if let Some(have) = self.preface {
            let new = bytes.len().min(PREFACE.len() - have);
            // Until all of it is here, it has as long as the head of any request: it may be one
            // whose method is `PRI`.
            self.preface = (bytes[..new] == PREFACE[have..have + new]).then_some(have + new);
            if self.preface == Some(PREFACE.len()) {
                self.preface = None;
                bytes = &bytes[new..];
                pace.second.store(true, Relaxed);
                self.allowance = Some((Allowance::new(), pace.turns.load(Relaxed)));
            }
        }
        if let Some((allowance, _)) = &mut self.allowance {
            allowance.arrived(bytes, pace.taken.load(Relaxed));
            pace.open_head.store(allowance.open_head().map_or(0, |head| head + 1), Relaxed);
            if allowance.was_used_up {
                pace.flooded.store(true, Relaxed);
            }
        }
        if !pace.is_busy() {
            pace.begun.store(true, Relaxed);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Paced { stream, pace, allowance, preface, .. } = &mut *self;
        let most = match allowance {
            None if preface.is_some() => FIRST_BYTES,
            Some((allowance, turn)) => {
                let turns = pace.turns.load(Relaxed);
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
            self.heard(new);
        }
        polled
    }
}

impl<S> Paced<S> {
    fn seen<'a>(
        &mut self,
        said: impl IntoIterator<Item = &'a [u8]>,
        polled: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match &polled {
            Poll::Ready(Ok(bytes)) => {
                if self.pace.is_second() {
                    self.tail.add(said, *bytes);
                }
                self.pace.taken.fetch_add(*bytes as u64, Relaxed);
                self.pace.stuck.store(false, Relaxed);
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.pace.stuck.store(true, Relaxed),
        }
        polled
    }
}

impl<S: AsyncRead + AsyncWrite + AsFd + Unpin> AsyncWrite for Paced<S> {
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
        // TLS takes bytes before the other side does.
        if polled.is_pending() {
            self.pace.stuck.store(true, Relaxed);
        }
        polled
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.pace.is_second() && self.tail.is_a_reproach() {
            // Whoever is to stay a while is not told that he may go. If there are no files left, he
            // goes.
            if let Ok(socket) = self.stream.get_ref().as_fd().try_clone_to_owned() {
                *self.pace.misused.lock() = Some(socket);
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
        assert_eq!(pace.look().since(stuck), Moved::Unread);
        pace.taken.fetch_add(1, Relaxed);
        assert_eq!(pace.look().since(stuck), Moved::Yes);
    }

    #[test]
    fn an_answer_for_which_no_window_is_opened_is_seen() {
        let pace = Arc::new(Pace::default());
        let first = pace.look();
        let mut body = Awaited::of(Body::from("answer"), &pace);
        let fresh = pace.look();
        assert_eq!(fresh.since(first), Moved::Idle, "it may wait since just now");
        let _ = pace.request();
        assert_eq!(pace.look().since(fresh), Moved::Unread, "whatever else is asked");
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(matches!(Pin::new(&mut body).poll_frame(&mut context), Poll::Ready(Some(Ok(_)))));
        assert_ne!(pace.look().since(fresh), Moved::Unread, "it was asked");
        assert_eq!(pace.look().since(fresh), Moved::Unread, "and what it said waits");
        drop(body);
        let done = pace.look();
        drop(Awaited::of(Body::from("nobody wants it"), &pace));
        assert!(Awaited::of(Body::empty(), &pace).is_end_stream());
        pace.look();
        assert_eq!(pace.look().since(done), Moved::Idle);
    }

    #[test]
    fn a_head_of_http_2_that_stands_still_is_seen_whatever_else_goes_on() {
        let pace = Arc::new(Pace::default());
        pace.second.store(true, Relaxed);
        let before = pace.look();
        pace.open_head.store(3, Relaxed);
        let begun = pace.look();
        assert_eq!(begun.since(before), Moved::Idle, "it may have begun just now");
        let _answering = pace.request();
        assert_eq!(pace.look().since(begun), Moved::Stuck, "although another request is answered");
        pace.open_head.store(4, Relaxed);
        assert_eq!(pace.look().since(begun), Moved::Yes, "it is another one");
    }

    /// What each of these first bytes makes of a connection, however they are cut: whether it
    /// speaks HTTP/2, and whether a head is open.
    #[tokio::test]
    async fn the_preface_is_known_in_pieces_and_nothing_else_is_taken_for_it() {
        for (bytes, is_second, is_open) in [
            (&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], true, false),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", true, false),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0", true, true),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r", false, false),
            (b"PRI / HTTP/1.1\r\nHost: x\r\nX-Long: aaaaaaaaaaaaaaaaaaaa", false, false),
            (b"GET / HTTP/1.1\r\n", false, false),
        ] {
            for cut in [1, 3, 4, 5, 23, 24, 25, bytes.len()] {
                let pace = Arc::new(Pace::default());
                let mut paced = Paced::new(tokio::io::empty(), Arc::clone(&pace));
                bytes.chunks(cut).for_each(|piece| paced.heard(piece));
                let found = (pace.is_second(), pace.open_head.load(Relaxed) > 0, pace.look().begun);
                assert_eq!(
                    found,
                    (is_second, is_open, !is_second),
                    "{} in pieces of {cut}",
                    bytes.escape_ascii()
                );
            }
        }
    }

    /// Also of what has arrived before anybody knew what is spoken, others do not have to wait for
    /// very much.
    #[tokio::test]
    async fn the_first_turn_is_no_longer_than_the_others() {
        let request = [0, 0, 1, 1, 5, 0, 0, 0, 1, 0x82];
        let bytes = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &request.repeat(10_000)].concat();
        let mut paced = Paced::new(&bytes[..], Arc::new(Pace::default()));
        let (mut context, mut room) =
            (Context::from_waker(std::task::Waker::noop()), vec![0; 64 << 10]);
        let mut turn = || {
            paced.pace.turns.fetch_add(1, Relaxed);
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
