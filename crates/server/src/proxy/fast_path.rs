//! A short way for most requests: HTTP/1.1 on both sides, a request that arrives whole, and a
//! response of a length that it says.
//!
//! What is asked, changed and settled is asked, changed and settled by the same functions as on the
//! other way; only hyper is not in between. Whatever else comes goes to hyper, and the connection
//! stays there: a request that is something else with all its bytes; a response that is something
//! else, or none, together with the request, which hyper reads again, and the connection to the
//! upstream, on which hyper finds the response. What it saves:
//! `docs/decisions/0027-proxy-fast-path.md`.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Response, Version};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep};

use super::Guest;
use super::codec::{self, Answered, Asked};
use super::exchange::{Admitted, Desk, No, Passed};
use super::fields::{Fields, Headers};
use super::head::Head;
use super::http1::Line;
use super::in_flight::Slot;
use super::settlement::Later;
use super::socket::Socket;
use super::upstream::{Begun, Failed, TRIES};
use crate::listen::Stream;
use crate::listen::http::{Left, NO_SNIFF, Waits};
use crate::listen::quick::write;
use crate::panics::caught;

/// The most of a request. What is longer goes the other way.
const REQUEST_BYTES: usize = 8 << 10;
/// The longest target that hyper takes.
const MAX_URI_BYTES: usize = u16::MAX as usize - 1;
/// What is read of a response together with its head.
const FIRST_BYTES: usize = 16 << 10;
/// What is read at once.
const READ_BYTES: usize = 64 << 10;

thread_local! {
    /// Where bytes are read to; they stay there for no longer than one turn of a task, so that a
    /// connection without a request needs no memory for them.
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BYTES].into());
}

/// How a conversation goes on.
pub(super) enum Next {
    /// Not at all.
    Over(Left),
    /// On the other way; this was read.
    Other(Vec<u8>),
}

/// Whether the next request may come, or how else it goes on.
type Go = Result<(), Next>;

/// Why something is not waited for any longer.
enum End {
    /// The client has gone.
    Gone,
    /// It took too long.
    Late,
}

/// Why a request that was passed on does not go further on this way.
enum Not {
    /// There is an answer of our own.
    No(No),
    /// Somebody else knows what to do.
    Other(Option<Box<Begun>>),
    /// There is nobody left to answer.
    Over(Left),
}

impl Desk {
    /// Serves requests for as long as they go the short way.
    pub(super) async fn talk_briefly(
        &self,
        stream: &mut Stream,
        guest: &Guest,
        waits: Waits,
        shutdown: &mut watch::Receiver<bool>,
    ) -> Next {
        let settings = &self.upstreams.settings;
        let tick = [waits.patience / 2, waits.unread, waits.idle, settings.answer, settings.idle];
        let bell = Bell::of(tick.into_iter().min().unwrap_or(waits.patience), waits.idle);
        let (bytes, read, out, fields) = (Vec::new(), Vec::new(), Vec::new(), Fields::default());
        let mut talk = Talk { desk: self, guest, waits, stream, bytes, read, fields, out, bell };
        let down = shutdown.clone();
        let mut stop = pin!(shutdown.wait_for(|down| *down));
        loop {
            if talk.bytes.is_empty() {
                talk.bell.set(waits.idle);
                let asked = poll_fn(|context| match talk.poll_client(context) {
                    Poll::Ready(more) => Poll::Ready(more.then_some(())),
                    Poll::Pending if stop.as_mut().poll(context).is_ready() => {
                        Poll::Ready(Some(()))
                    }
                    Poll::Pending => talk.bell.poll(context).map(|()| None),
                });
                if asked.await.is_none() {
                    return Next::Over(Left::Done);
                }
            }
            let Some(asked) = codec::request(&talk.bytes, &mut talk.fields) else {
                return Next::Other(talk.bytes);
            };
            let used = asked.used;
            let gone_on = match caught(talk.exchange(asked, &down)).await {
                Some(gone_on) => gone_on,
                None => talk.say(self.panicked(), &down).await,
            };
            match gone_on {
                Ok(()) => _ = talk.bytes.drain(..used),
                Err(Next::Other(_)) => return Next::Other(talk.bytes),
                Err(over) => return over,
            }
        }
    }
}

/// A conversation.
struct Talk<'a> {
    desk: &'a Desk,
    guest: &'a Guest,
    waits: Waits,
    stream: &'a mut Stream,
    /// What was read of the client: the request that is served, and what came after it.
    bytes: Vec<u8>,
    /// What was read of the upstream: the head of a response, and some of its body.
    read: Vec<u8>,
    /// The headers of the request, and then of the response.
    fields: Fields,
    /// What is to be written, to either side.
    out: Vec<u8>,
    bell: Bell,
}

impl Talk<'_> {
    /// Reads what the client says; false when it has gone.
    fn poll_client(&mut self, context: &mut Context<'_>) -> Poll<bool> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut read = ReadBuf::new(&mut scratch[..REQUEST_BYTES]);
            let ended = ready!(Pin::new(&mut *self.stream).poll_read(context, &mut read));
            self.bytes.extend_from_slice(read.filled());
            Poll::Ready(ended.is_ok() && !read.filled().is_empty())
        })
    }

    /// While something else is waited for: whether the client has gone, or the time is up.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<End> {
        // What comes before its turn waits, but there is an end to that.
        while self.bytes.len() < REQUEST_BYTES {
            match self.poll_client(context) {
                Poll::Ready(true) => {}
                Poll::Ready(false) => return Poll::Ready(End::Gone),
                Poll::Pending => break,
            }
        }
        self.bell.poll(context).map(|()| End::Late)
    }

    /// What `work` comes to, unless the client goes or the time is up before.
    async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> Result<T, End> {
        let mut work = pin!(work);
        poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Ok(done)),
            Poll::Pending => self.poll_end(context).map(Err),
        })
        .await
    }

    /// One request, from the rules to the last byte of the response.
    async fn exchange(&mut self, asked: Asked, down: &watch::Receiver<bool>) -> Go {
        let Asked { method, target, body_at, used } = asked;
        let text = |range: &Range<usize>| {
            std::str::from_utf8(&self.bytes[range.clone()]).unwrap_or_default()
        };
        let (version, headers) = (Version::HTTP_11, &mut self.fields);
        let head = Head {
            method: text(&method),
            target: text(&target),
            authority: None,
            version,
            headers,
        };
        let admitted = self.desk.admit(head, &self.guest.peer, None).await;
        let (mut passed, rewritten) = match admitted {
            Ok(Admitted { passed, target, .. }) => (passed, target),
            Err(no) => return self.say(*no, down).await,
        };
        let base = self.desk.upstreams.settings.upstream.base.as_str();
        if base.len() + target.len() > MAX_URI_BYTES {
            let no = self.desk.unanswered(&Failed::Target, &mut passed).await;
            return self.say(*no, down).await;
        }
        self.out.clear();
        // The host is the one that the client said, where the client said it.
        let target = rewritten.as_ref().map_or(&self.bytes[target], String::as_bytes);
        codec::write_request(&mut self.out, &self.bytes[method], (base, target), &self.fields);
        self.out.extend_from_slice(&self.bytes[body_at..used]);
        match self.ask(&mut passed).await {
            Ok(coming) => self.give(&mut passed, coming, down).await,
            Err(Not::No(no)) => self.say(*no, down).await,
            Err(Not::Over(left)) => Err(Next::Over(left)),
            Err(Not::Other(begun)) => {
                *self.guest.asked.lock() = Some((passed, begun.map(|begun| *begun)));
                Err(Next::Other(Vec::new()))
            }
        }
    }
}

/// A response that has begun to come.
struct Coming {
    answered: Answered,
    source: Source,
}

/// What a response comes from.
struct Source {
    stream: Socket,
    slot: Slot,
}

impl Talk<'_> {
    /// Sends the request that is to be written, and waits for the head of the response.
    async fn ask(&mut self, passed: &mut Passed) -> Result<Coming, Not> {
        let (desk, settings) = (self.desk, &self.desk.upstreams.settings);
        let in_flight = &desk.upstreams.in_flight;
        let share = in_flight.share(passed.client, &self.guest.share);
        let Some(slot) = in_flight.slot_at_once(&share) else { return Err(Not::Other(None)) };
        let mut stream = match self.send().await {
            Ok(stream) => stream,
            Err(Ok(failed)) => return Err(Not::No(desk.unanswered(&failed, passed).await)),
            Err(Err(left)) => return Err(Not::Over(left)),
        };
        self.read.clear();
        self.bell.set(settings.answer);
        let came = poll_fn(|context| match poll_more(&mut stream, &mut self.read, context) {
            Poll::Ready(()) => Poll::Ready(Ok(())),
            Poll::Pending => self.poll_end(context).map(Err),
        });
        match came.await {
            Ok(()) => {}
            Err(End::Gone) => return Err(Not::Over(Left::Done)),
            Err(End::Late) => {
                let late = Failed::AnswerTimeout(settings.answer);
                return Err(Not::No(desk.unanswered(&late, passed).await));
            }
        }
        if let Some(answered) = codec::response(&self.read, &mut self.fields) {
            return Ok(Coming { answered, source: Source { stream, slot } });
        }
        match Line::resumed(stream, std::mem::take(&mut self.read)).await {
            Ok(line) => Err(Not::Other(Some(Box::new(Begun { line, slot })))),
            Err(error) => Err(Not::No(desk.unanswered(&error.into(), passed).await)),
        }
    }

    /// Sends the request, on a connection that is good for it. What failed, or how the conversation
    /// ends.
    async fn send(&mut self) -> Result<Socket, Result<Failed, Left>> {
        let upstreams = &self.desk.upstreams;
        for _ in 0..TRIES {
            let mut stream = match upstreams.pool.take_bare() {
                Some(stream) => stream,
                None => {
                    // It has a bound of its own, which is the smaller one.
                    self.bell.set(upstreams.settings.connect.saturating_mul(2));
                    match self.meanwhile(upstreams.connect()).await {
                        Ok(connected) => connected.map_err(Ok)?,
                        Err(End::Gone) => return Err(Err(Left::Done)),
                        Err(End::Late) => {
                            return Err(Ok(Failed::ConnectTimeout(upstreams.settings.connect)));
                        }
                    }
                }
            };
            let sent = match stream.try_write(&self.out) {
                Ok(sent) if sent == self.out.len() => return Ok(stream),
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                // It was closed while nobody looked; nothing of the request was sent.
                Err(_) => continue,
            };
            let out = std::mem::take(&mut self.out);
            self.bell.set(upstreams.settings.answer);
            return match self.meanwhile(stream.write_all(&out[sent..])).await {
                // If that failed, there is no answer, and whoever looks for it will find out.
                Ok(_) => Ok(stream),
                Err(End::Gone) => Err(Err(Left::Done)),
                Err(End::Late) => Err(Ok(Failed::AnswerTimeout(upstreams.settings.answer))),
            };
        }
        Err(Ok(Failed::Closed))
    }

    /// Gives a response to the client, as it comes.
    async fn give(
        &mut self,
        passed: &mut Passed,
        coming: Coming,
        down: &watch::Receiver<bool>,
    ) -> Go {
        let Coming { answered, source } = coming;
        let later = self.desk.returned(passed, answered.status, &mut self.fields).await;
        let last = *down.borrow();
        if last {
            self.fields.put(CONNECTION, HeaderValue::from_static("close"));
        }
        self.out.clear();
        codec::write_response(&mut self.out, &answered, &self.read, &self.fields);
        let mut rest =
            Rest { left: answered.length, later, source: Some(source), stays: answered.stays };
        let body = rest.take(self.desk, &self.read[answered.body_at..]);
        self.out.extend_from_slice(body);
        self.read.shrink_to(REQUEST_BYTES);
        self.fields.shrink_to(REQUEST_BYTES);
        self.flush().await?;
        while rest.left > 0 {
            self.bell.set(self.desk.upstreams.settings.idle);
            let more = poll_fn(|context| match self.poll_rest(&mut rest, context) {
                Poll::Ready(more) => Poll::Ready(more.is_ok()),
                // Whoever stands still, the response has broken off.
                Poll::Pending => self.poll_end(context).map(|_| false),
            });
            if !more.await {
                return Err(Next::Over(Left::Done));
            }
            self.flush().await?;
        }
        if last { self.end().await } else { Ok(()) }
    }

    /// Takes another piece of a response, and hands on what can be handed on at once.
    fn poll_rest(&mut self, rest: &mut Rest, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let Some(source) = &mut rest.source else { return Poll::Ready(Ok(())) };
            let mut read = ReadBuf::new(scratch);
            ready!(Pin::new(&mut source.stream).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
            let piece = rest.take(self.desk, read.filled());
            let taken = match Pin::new(&mut *self.stream).poll_write(context, piece) {
                Poll::Ready(taken) => taken?,
                Poll::Pending => 0,
            };
            self.out.extend_from_slice(&piece[taken..]);
            Poll::Ready(Ok(()))
        })
    }

    /// Says something of our own.
    async fn say(
        &mut self,
        mut response: Response<axum::body::Body>,
        down: &watch::Receiver<bool>,
    ) -> Go {
        let (name, value) = NO_SNIFF;
        response.headers_mut().insert(name, value);
        if *down.borrow() {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let last = response.headers().contains_key(CONNECTION);
        self.out.clear();
        if write(&mut self.out, response).await.is_none() {
            return Err(Next::Over(Left::Done));
        }
        self.flush().await?;
        if last { self.end().await } else { Ok(()) }
    }

    /// Writes what is to be written to the client.
    async fn flush(&mut self) -> Go {
        let (mut at, mut waits) = (0, false);
        let flushed = poll_fn(|context| {
            loop {
                let stream = Pin::new(&mut *self.stream);
                let polled = match &self.out[at..] {
                    [] => stream.poll_flush(context).map_ok(|()| None),
                    bytes => stream.poll_write(context, bytes).map_ok(Some),
                };
                match polled {
                    Poll::Ready(Ok(None)) => return Poll::Ready(Ok(())),
                    Poll::Ready(Ok(Some(0)) | Err(_)) => return Poll::Ready(Err(Left::Done)),
                    Poll::Ready(Ok(Some(bytes))) => (at, waits) = (at + bytes, false),
                    Poll::Pending => {
                        if !std::mem::replace(&mut waits, true) {
                            self.bell.set(self.waits.unread);
                        }
                        return self.bell.poll(context).map(|()| Err(Left::TooSlow));
                    }
                }
            }
        });
        let flushed = flushed.await;
        self.out.clear();
        self.out.shrink_to(REQUEST_BYTES);
        flushed.map_err(Next::Over)
    }

    /// Ends the conversation in order.
    async fn end(&mut self) -> Go {
        self.bell.set(self.waits.patience);
        poll_fn(|context| match Pin::new(&mut *self.stream).poll_shutdown(context) {
            Poll::Ready(_) => Poll::Ready(()),
            Poll::Pending => self.bell.poll(context),
        })
        .await;
        Err(Next::Over(Left::Done))
    }
}

/// Reads more from an upstream. What is wrong with it is found by whoever reads on.
fn poll_more(stream: &mut Socket, read: &mut Vec<u8>, context: &mut Context<'_>) -> Poll<()> {
    SCRATCH.with_borrow_mut(|scratch| {
        let mut more = ReadBuf::new(&mut scratch[..FIRST_BYTES]);
        let _ = ready!(Pin::new(stream).poll_read(context, &mut more));
        read.extend_from_slice(more.filled());
        Poll::Ready(())
    })
}

/// What is still to come of a response.
struct Rest {
    left: u64,
    later: Option<Box<Later>>,
    /// Until the last byte was read.
    source: Option<Source>,
    stays: bool,
}

impl Rest {
    /// The part of `piece` that belongs to the response. With the last of it, what it came to is
    /// settled, and its connection is free for the next.
    fn take<'a>(&mut self, desk: &Desk, piece: &'a [u8]) -> &'a [u8] {
        let own = usize::try_from(self.left).map_or(piece, |left| &piece[..left.min(piece.len())]);
        self.left -= own.len() as u64;
        if let Some(later) = &mut self.later {
            later.bytes += own.len() as u64;
        }
        if self.left == 0
            && let Some(Source { stream, slot }) = self.source.take()
        {
            drop((self.later.take(), slot));
            // Whoever says more than was asked for is not asked again.
            if self.stays && own.len() == piece.len() {
                desk.upstreams.pool.keep(stream);
            }
        }
        own
    }
}

/// One timer for a whole conversation. It rings more often than it has to, so that it need not be
/// set anew for everything that may take long.
struct Bell {
    sleep: Pin<Box<Sleep>>,
    tick: Duration,
    until: Instant,
}

impl Bell {
    /// For times that are not shorter than `tick`.
    fn of(tick: Duration, first: Duration) -> Self {
        Bell { sleep: Box::pin(sleep(tick)), tick, until: Instant::now() + first }
    }

    /// From now on something else is waited for, and for so long.
    fn set(&mut self, most: Duration) {
        self.until = Instant::now() + most;
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.sleep.as_mut().poll(context));
            let now = Instant::now();
            if now >= self.until {
                return Poll::Ready(());
            }
            self.sleep.as_mut().reset(self.until.min(now + self.tick));
        }
    }
}
