//! Bodies on their way: a piece at a time, never more than is read, and not for ever.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::http1::Line;
use super::in_flight::Slot;
use super::settings::MinRate;
use super::settlement::Later;
use super::slow_start::Start;
use super::upstream::{Failed, Upstreams};
use super::window::Waiting;
use crate::listen::pace::Answering;

/// A body that does not go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    /// Nothing has come for too long.
    #[error("nothing has come for {} seconds", .0.as_secs())]
    Stalled(Duration),
    /// It came with fewer bytes a second than it has to.
    #[error("it came with fewer than {0} bytes a second")]
    Slow(u32),
    /// Whoever sends it has failed.
    #[error(transparent)]
    Lost(#[from] hyper::Error),
}

/// How long a body has stood still. The clock is asked only while it does.
#[derive(Debug)]
struct Patience {
    most: Duration,
    bell: Option<Pin<Box<Sleep>>>,
    /// It has moved since the bell was set.
    moved: bool,
}

impl Patience {
    fn new(most: Duration) -> Self {
        Patience { most, bell: None, moved: true }
    }

    /// Nothing has come: whether that is too much by now.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Broken> {
        let bell = self.bell.get_or_insert_with(|| Box::pin(sleep(self.most)));
        if std::mem::replace(&mut self.moved, false) {
            bell.as_mut().reset(Instant::now() + self.most);
        }
        bell.as_mut().poll(context).map(|()| Broken::Stalled(self.most))
    }
}

/// The body of a request, on its way to the upstream.
#[derive(Debug)]
pub(super) struct Sent {
    body: Incoming,
    /// What was read of it, its end included, before there was a slot at the upstream.
    first: Option<Option<Frame<Bytes>>>,
    /// How long it may stand still.
    idle: Duration,
    min_rate: MinRate,
    /// Bytes that have come.
    bytes: u64,
    /// How long the client was waited for until the last piece came. Time that the upstream took to
    /// read does not count.
    waited: Duration,
    /// Since when the client is waited for. The clock is read only while it is.
    since: Option<Instant>,
    bell: Option<Pin<Box<Sleep>>>,
    progress: Arc<Progress>,
}

/// How far a request has come.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pieces: AtomicU64,
    /// The client did not go on with its body, or too slowly: [`STALLED`] or [`SLOW`].
    late: AtomicU8,
    /// At least how many bytes a second were expected.
    min_rate: u32,
    /// The response has begun: from then on each side may take its time.
    is_answered: AtomicBool,
}

const STALLED: u8 = 1;
const SLOW: u8 = 2;

impl Progress {
    /// How many pieces have been sent.
    pub(super) fn pieces(&self) -> u64 {
        self.pieces.load(Ordering::Relaxed)
    }

    /// Why the client's body was not waited for any longer, if so.
    pub(super) fn late(&self) -> Option<Failed> {
        match self.late.load(Ordering::Relaxed) {
            STALLED => Some(Failed::BodyTimeout),
            SLOW => Some(Failed::BodySlow(self.min_rate)),
            _ => None,
        }
    }

    pub(super) fn set_answered(&self) {
        self.is_answered.store(true, Ordering::Relaxed);
    }
}

impl Sent {
    pub(super) fn new(body: Incoming, idle: Duration, min_rate: MinRate) -> (Self, Arc<Progress>) {
        let progress =
            Arc::new(Progress { min_rate: min_rate.bytes_per_second, ..Progress::default() });
        let (bytes, waited, own) = (0, Duration::ZERO, Arc::clone(&progress));
        (
            Sent {
                body,
                first: None,
                idle,
                min_rate,
                bytes,
                waited,
                since: None,
                bell: None,
                progress: own,
            },
            progress,
        )
    }

    /// Waits for the first piece, or the end.
    pub(super) async fn begin(&mut self) -> Result<(), Failed> {
        let first = poll_fn(|context| Pin::new(&mut *self).poll_frame(context)).await;
        self.first =
            Some(first.transpose().map_err(|_| self.progress.late().unwrap_or(Failed::BodyLost))?);
        Ok(())
    }

    /// Nothing has come: whether that is too much by now.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<Broken> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let stalled = since + self.idle;
        let is_dialogue = self.progress.is_answered.load(Ordering::Relaxed);
        let longest = self.min_rate.longest(self.bytes).filter(|_| !is_dialogue);
        let slow = longest
            .map(|longest| since + longest.saturating_sub(self.waited))
            .filter(|slow| *slow < stalled);
        let until = slow.unwrap_or(stalled);
        let bell = self.bell.get_or_insert_with(|| Box::pin(sleep_until(until)));
        if bell.deadline() != until {
            bell.as_mut().reset(until);
        }
        ready!(bell.as_mut().poll(context));
        let (late, broken) = match slow {
            Some(_) => (SLOW, Broken::Slow(self.min_rate.bytes_per_second)),
            None => (STALLED, Broken::Stalled(self.idle)),
        };
        self.progress.late.store(late, Ordering::Relaxed);
        Poll::Ready(broken)
    }
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(first.map(Ok));
        }
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(frame) => {
                if let Some(since) = self.since.take() {
                    self.waited += since.elapsed();
                }
                if let Some(Ok(frame)) = &frame {
                    self.bytes += data_bytes(frame);
                }
                self.progress.pieces.fetch_add(1, Ordering::Relaxed);
                Poll::Ready(frame.map(|frame| frame.map_err(Broken::from)))
            }
            Poll::Pending => self.poll_late(context).map(|broken| Some(Err(broken))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, first) =
            (self.body.size_hint(), self.first.iter().flatten().map(data_bytes).sum::<u64>());
        if first > 0 {
            if let Some(upper) = hint.upper() {
                hint.set_upper(upper + first);
            }
            hint.set_lower(hint.lower() + first);
        }
        hint
    }
}

fn data_bytes(frame: &Frame<Bytes>) -> u64 {
    frame.data_ref().map_or(0, |data| data.len() as u64)
}

/// The body of a response, on its way to the client.
#[derive(Debug)]
pub(super) struct Returned {
    kind: Kind,
    patience: Patience,
    /// Why it does not go on, to be told when what came before is on its way.
    broken: Option<Broken>,
    /// Until it is dropped, the connection is busy with it.
    pub(super) answering: Option<Answering>,
    /// What is settled or ends when it is over.
    pub(super) later: Option<Box<Later>>,
    /// Whether it waits for a window, over HTTP/2.
    pub(super) waiting: Option<Waiting>,
    /// Until it is taken, over HTTP/2.
    pub(super) start: Option<Start>,
}

#[derive(Debug)]
enum Kind {
    /// What we say ourselves.
    Own(Option<Bytes>),
    /// From an upstream that speaks HTTP/1.1, with what it is read by.
    First(Incoming, Option<Box<Reading>>),
    /// From one that speaks HTTP/2.
    Second(Incoming, Option<Slot>),
}

impl Kind {
    fn is_end_stream(&self) -> bool {
        match self {
            Kind::Own(text) => text.is_none(),
            Kind::First(body, _) | Kind::Second(body, _) => body.is_end_stream(),
        }
    }
}

/// A connection whose response is being read.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) line: Line,
    pub(super) home: Arc<Upstreams>,
    pub(super) slot: Slot,
}

impl Reading {
    /// The response is over: the connection is free for the next.
    pub(super) fn end(self) {
        drop(self.slot);
        self.home.pool.keep(self.line);
    }
}

impl Returned {
    fn new(kind: Kind, most: Duration) -> Self {
        let patience = Patience::new(most);
        Returned {
            kind,
            patience,
            broken: None,
            answering: None,
            later: None,
            waiting: None,
            start: None,
        }
    }

    pub(super) fn own(text: impl Into<Bytes>) -> Self {
        let text = Some(text.into()).filter(|text: &Bytes| !text.is_empty());
        Self::new(Kind::Own(text), Duration::ZERO)
    }

    pub(super) fn first(body: Incoming, reading: Reading, most: Duration) -> Self {
        if body.is_end_stream() {
            reading.end();
            return Self::own(Bytes::new());
        }
        Self::new(Kind::First(body, Some(Box::new(reading))), most)
    }

    pub(super) fn second(body: Incoming, slot: Slot, most: Duration) -> Self {
        Self::new(Kind::Second(body, Some(slot)), most)
    }
}

/// The next piece of a response that is read on this connection.
fn poll_first(
    body: &mut Incoming,
    reading: &mut Option<Box<Reading>>,
    context: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
    // Twice: the connection reads only what was asked for, and is asked by the body.
    for _ in 0..2 {
        if let Some(reading) = reading {
            reading.line.drive(context);
        }
        if let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(context) {
            match &frame {
                Some(Ok(_)) if !body.is_end_stream() => {}
                Some(Err(_)) => drop(reading.take()),
                _ => {
                    if let Some(reading) = reading.take() {
                        reading.end();
                    }
                }
            }
            return Poll::Ready(frame);
        }
    }
    Poll::Pending
}

impl HttpBody for Returned {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = &mut *self;
        if let Some(broken) = this.broken.take() {
            return Poll::Ready(Some(Err(broken)));
        }
        this.waiting.iter().for_each(Waiting::was_asked);
        if let Some(start) = this.start.take() {
            start.taken();
        }
        let polled = match &mut this.kind {
            Kind::Own(text) => return Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Kind::First(body, reading) => poll_first(body, reading, context),
            Kind::Second(body, slot) => {
                let polled = Pin::new(body).poll_frame(context);
                if let Poll::Ready(None) = polled {
                    drop(slot.take());
                }
                polled
            }
        };
        match polled {
            Poll::Ready(Some(Err(error))) => {
                this.later = None;
                // An error ends the connection at once, with what is still to be written: a moment
                // later it is not so much.
                this.broken = Some(error.into());
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Ready(frame) => {
                this.patience.moved = true;
                this.waiting.iter().for_each(Waiting::gave);
                if let (Some(later), Some(Ok(frame))) = (&mut this.later, &frame) {
                    later.bytes += data_bytes(frame);
                }
                // Over before the last piece is sent: a client that has read it finds its lease
                // ended.
                if frame.is_none() || (this.later.is_some() && this.kind.is_end_stream()) {
                    this.later = None;
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Broken::from)))
            }
            Poll::Pending => {
                let broken = ready!(this.patience.poll(context));
                this.later = None;
                Poll::Ready(Some(Err(broken)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.kind.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Own(text) => {
                SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64))
            }
            Kind::First(body, _) | Kind::Second(body, _) => body.size_hint(),
        }
    }
}
