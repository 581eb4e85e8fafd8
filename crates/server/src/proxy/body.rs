//! Request and response bodies: streamed piece by piece, with timeouts.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::http1::Http1Connection;
use super::in_flight::Slot;
use super::settings::MinRate;
use super::settlement::Settlement;
use super::slow_start::StartPermit;
use super::upstream::{ForwardError, Upstreams};
use super::window::WindowWait;
use crate::listen::progress::RequestInProgress;

/// Why relaying a body failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum RelayError {
    /// No data arrived for too long.
    #[error("no data for {} seconds", .0.as_secs())]
    Stalled(Duration),
    /// The client sent fewer bytes a second than the minimum rate.
    #[error("slower than {0} bytes a second")]
    Slow(u32),
    /// The sender failed.
    #[error(transparent)]
    Lost(#[from] hyper::Error),
}

/// Measures how long a body has stalled. Reads the clock only while it does.
#[derive(Debug)]
struct IdleTimer {
    most: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    /// Whether data arrived since the timer was set.
    moved: bool,
}

impl IdleTimer {
    fn new(most: Duration) -> Self {
        IdleTimer { most, timer: None, moved: true }
    }

    /// Called when no data is available: ready when the timeout has passed.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<RelayError> {
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.most)));
        if std::mem::replace(&mut self.moved, false) {
            timer.as_mut().reset(Instant::now() + self.most);
        }
        timer.as_mut().poll(context).map(|()| RelayError::Stalled(self.most))
    }
}

/// The body of a request, streamed to the upstream.
#[derive(Debug)]
pub(super) struct RequestBody {
    body: Incoming,
    /// The first frame (or the end), read before the request had a slot at the upstream.
    first: Option<Option<Frame<Bytes>>>,
    /// How long it may stall.
    idle: Duration,
    min_rate: MinRate,
    /// Bytes received.
    bytes: u64,
    /// How long the proxy has waited for the client, up to the last piece. Time that the upstream
    /// takes to read does not count.
    waited: Duration,
    /// When the current wait for the client began. The clock is read only during a wait.
    since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
    progress: Arc<Progress>,
}

/// How much of a request was sent, for the timeouts of its response.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pieces: AtomicU64,
    /// Why the client's body was given up, if it was: [`STALLED`] or [`SLOW`].
    late: AtomicU8,
    /// The minimum rate, in bytes a second.
    min_rate: u32,
    /// Whether the response has begun: from then on the minimum rate does not apply.
    is_answered: AtomicBool,
}

const STALLED: u8 = 1;
const SLOW: u8 = 2;

impl Progress {
    /// How many pieces have been sent.
    pub(super) fn pieces(&self) -> u64 {
        self.pieces.load(Ordering::Relaxed)
    }

    /// Why the client's body was given up, if it was.
    pub(super) fn late(&self) -> Option<ForwardError> {
        match self.late.load(Ordering::Relaxed) {
            STALLED => Some(ForwardError::BodyTimeout),
            SLOW => Some(ForwardError::BodySlow(self.min_rate)),
            _ => None,
        }
    }

    pub(super) fn set_answered(&self) {
        self.is_answered.store(true, Ordering::Relaxed);
    }
}

impl RequestBody {
    pub(super) fn new(body: Incoming, idle: Duration, min_rate: MinRate) -> (Self, Arc<Progress>) {
        let progress =
            Arc::new(Progress { min_rate: min_rate.bytes_per_second, ..Progress::default() });
        let (bytes, waited, own) = (0, Duration::ZERO, Arc::clone(&progress));
        (
            RequestBody {
                body,
                first: None,
                idle,
                min_rate,
                bytes,
                waited,
                since: None,
                timer: None,
                progress: own,
            },
            progress,
        )
    }

    /// Waits for the first piece, or the end.
    pub(super) async fn begin(&mut self) -> Result<(), ForwardError> {
        let first = poll_fn(|context| Pin::new(&mut *self).poll_frame(context)).await;
        self.first = Some(
            first
                .transpose()
                .map_err(|_| self.progress.late().unwrap_or(ForwardError::BodyLost))?,
        );
        Ok(())
    }

    /// Called when no data is available: ready when the body is too late.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<RelayError> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let stalled = since + self.idle;
        let is_dialogue = self.progress.is_answered.load(Ordering::Relaxed);
        let longest = self.min_rate.longest(self.bytes).filter(|_| !is_dialogue);
        let slow = longest
            .map(|longest| since + longest.saturating_sub(self.waited))
            .filter(|slow| *slow < stalled);
        let until = slow.unwrap_or(stalled);
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(until)));
        if timer.deadline() != until {
            timer.as_mut().reset(until);
        }
        ready!(timer.as_mut().poll(context));
        let (late, broken) = match slow {
            Some(_) => (SLOW, RelayError::Slow(self.min_rate.bytes_per_second)),
            None => (STALLED, RelayError::Stalled(self.idle)),
        };
        self.progress.late.store(late, Ordering::Relaxed);
        Poll::Ready(broken)
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = RelayError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RelayError>>> {
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
                Poll::Ready(frame.map(|frame| frame.map_err(RelayError::from)))
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

/// The body of a response, streamed to the client.
#[derive(Debug)]
pub(super) struct ResponseBody {
    source: BodySource,
    idle_timer: IdleTimer,
    /// An error to return once the bytes before it are written.
    broken: Option<RelayError>,
    /// Marks the connection as busy until this is dropped.
    pub(super) answering: Option<RequestInProgress>,
    /// The settlement, due when the body ends.
    pub(super) settlement: Option<Box<Settlement>>,
    /// Tracks a closed flow-control window, over HTTP/2.
    pub(super) waiting: Option<WindowWait>,
    /// The start permit, until the client reads the body, over HTTP/2.
    pub(super) start: Option<StartPermit>,
}

#[derive(Debug)]
enum BodySource {
    /// Written by the proxy itself.
    Own(Option<Bytes>),
    /// From an HTTP/1.1 upstream, with the connection that it is read from.
    Http1(Incoming, Option<Box<ReadingConnection>>),
    /// From an HTTP/2 upstream.
    Http2(Incoming, Option<Slot>),
}

impl BodySource {
    fn is_end_stream(&self) -> bool {
        match self {
            BodySource::Own(text) => text.is_none(),
            BodySource::Http1(body, _) | BodySource::Http2(body, _) => body.is_end_stream(),
        }
    }
}

/// An upstream connection whose response is being read.
#[derive(Debug)]
pub(super) struct ReadingConnection {
    pub(super) http1: Http1Connection,
    pub(super) home: Arc<Upstreams>,
    pub(super) slot: Slot,
}

impl ReadingConnection {
    /// Returns the connection to the pool after the response.
    pub(super) fn end(self) {
        drop(self.slot);
        self.home.pool.keep(self.http1);
    }
}

impl ResponseBody {
    fn new(source: BodySource, most: Duration) -> Self {
        let idle_timer = IdleTimer::new(most);
        ResponseBody {
            source,
            idle_timer,
            broken: None,
            answering: None,
            settlement: None,
            waiting: None,
            start: None,
        }
    }

    pub(super) fn own(text: impl Into<Bytes>) -> Self {
        let text = Some(text.into()).filter(|text: &Bytes| !text.is_empty());
        Self::new(BodySource::Own(text), Duration::ZERO)
    }

    pub(super) fn from_http1(body: Incoming, reading: ReadingConnection, most: Duration) -> Self {
        if body.is_end_stream() {
            reading.end();
            return Self::own(Bytes::new());
        }
        Self::new(BodySource::Http1(body, Some(Box::new(reading))), most)
    }

    pub(super) fn from_http2(body: Incoming, slot: Slot, most: Duration) -> Self {
        Self::new(BodySource::Http2(body, Some(slot)), most)
    }
}

/// Polls the next piece of a response on this connection.
fn poll_http1(
    body: &mut Incoming,
    reading: &mut Option<Box<ReadingConnection>>,
    context: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
    // Twice: the connection reads only what the body requests, and the poll is the request.
    for _ in 0..2 {
        if let Some(reading) = reading {
            reading.http1.drive(context);
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

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = RelayError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RelayError>>> {
        let this = &mut *self;
        if let Some(broken) = this.broken.take() {
            return Poll::Ready(Some(Err(broken)));
        }
        this.waiting.iter().for_each(WindowWait::polled);
        if let Some(start) = this.start.take() {
            start.response_read();
        }
        let polled = match &mut this.source {
            BodySource::Own(text) => {
                return Poll::Ready(text.take().map(|text| Ok(Frame::data(text))));
            }
            BodySource::Http1(body, reading) => poll_http1(body, reading, context),
            BodySource::Http2(body, slot) => {
                let polled = Pin::new(body).poll_frame(context);
                if let Poll::Ready(None) = polled {
                    drop(slot.take());
                }
                polled
            }
        };
        match polled {
            Poll::Ready(Some(Err(error))) => {
                this.settlement = None;
                // An error closes the connection and drops what is still to be written. One poll
                // later less of it is left.
                this.broken = Some(error.into());
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Ready(frame) => {
                this.idle_timer.moved = true;
                this.waiting.iter().for_each(WindowWait::sent);
                if let (Some(settlement), Some(Ok(frame))) = (&mut this.settlement, &frame) {
                    settlement.bytes += data_bytes(frame);
                }
                // Settle before the last piece is sent: a client that has read it finds its lease
                // ended.
                if frame.is_none() || (this.settlement.is_some() && this.source.is_end_stream()) {
                    this.settlement = None;
                }
                Poll::Ready(frame.map(|frame| frame.map_err(RelayError::from)))
            }
            Poll::Pending => {
                let broken = ready!(this.idle_timer.poll(context));
                this.settlement = None;
                Poll::Ready(Some(Err(broken)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.source.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            BodySource::Own(text) => {
                SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64))
            }
            BodySource::Http1(body, _) | BodySource::Http2(body, _) => body.size_hint(),
        }
    }
}
