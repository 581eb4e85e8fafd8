//! The fast path of the proxy: HTTP/1.1 on both sides, without hyper.
//!
//! It serves requests that arrive complete in one read, and responses with a `Content-Length`.
//! Rules, headers and settlement are the functions of the general path. Everything else moves the
//! connection to the general path for good: an unsupported request with all its bytes; an
//! unsupported response together with its request, which hyper parses again, and with the upstream
//! connection, on which hyper finds the response. `tests/it/proxy/fast_path.rs` compares both
//! paths; measurements are in `docs/decisions/0027-proxy-fast-path.md`.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Response, Version};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::watch;

use super::ProxyConnection;
use super::codec::{self, ParsedRequest, ParsedResponse};
use super::exchange::{AllowedRequest, Forwarder, OwnResponse, PreparedRequest};
use super::fields::{Fields, Headers};
use super::head::RequestHead;
use super::http1::Http1Connection;
use super::in_flight::Slot;
use super::settlement::Settlement;
use super::socket::Socket;
use super::timer::ConnectionTimer;
use super::upstream::{ForwardError, SentRequest, TRIES};
use crate::listen::Stream;
use crate::listen::http::{Ending, NO_SNIFF, Timeouts};
use crate::listen::wire::write;
use crate::panics::caught;

/// The longest request. Longer ones take the general path.
const REQUEST_BYTES: usize = 8 << 10;
/// The longest target that hyper accepts.
const MAX_URI_BYTES: usize = u16::MAX as usize - 1;
/// The most that is read of a response together with its head.
const FIRST_BYTES: usize = 16 << 10;
/// The most that one read returns.
const READ_BYTES: usize = 64 << 10;
thread_local! {
    /// The read buffer of all connections on this thread. Bytes stay in it for one poll only, so
    /// that an idle connection needs no buffer.
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BYTES].into());
}

/// What follows when the fast path is done with a connection.
pub(super) enum AfterFastPath {
    /// The connection is over.
    Ended(Ending),
    /// The general path serves it from here; these bytes were read already.
    GeneralPath(Vec<u8>),
}

/// `Ok` when the fast path reads the next request.
type FastPathResult = Result<(), AfterFastPath>;

/// Why waiting ended early.
enum Interruption {
    /// The client closed the connection.
    ClientGone,
    /// The deadline passed.
    TimedOut,
}

/// Why the fast path has no upstream response for an allowed request.
enum NotForwarded {
    /// The proxy answers itself.
    Answer(OwnResponse),
    /// The general path continues, with the request if it was sent.
    GeneralPath(Option<Box<SentRequest>>),
    /// The client is gone.
    Ended(Ending),
}

impl Forwarder {
    /// Serves requests until one needs the general path or the connection ends.
    pub(super) async fn serve_fast_path(
        &self,
        stream: &mut Stream,
        shared: &ProxyConnection,
        waits: Timeouts,
        shutdown: &mut watch::Receiver<bool>,
    ) -> AfterFastPath {
        let settings = &self.upstreams.settings;
        let tick = [waits.patience / 2, waits.unread, waits.idle, settings.answer, settings.idle];
        let timer =
            ConnectionTimer::of(tick.into_iter().min().unwrap_or(waits.patience), waits.idle);
        let (bytes, read, out, fields) = (Vec::new(), Vec::new(), Vec::new(), Fields::default());
        let mut connection = FastConnection {
            forwarder: self,
            shared,
            waits,
            stream,
            bytes,
            read,
            fields,
            out,
            timer,
        };
        let down = shutdown.clone();
        let mut stop = pin!(shutdown.wait_for(|down| *down));
        loop {
            if connection.bytes.is_empty() {
                connection.timer.set(waits.idle);
                let readable = poll_fn(|context| match connection.poll_client(context) {
                    Poll::Ready(more) => Poll::Ready(more.then_some(())),
                    Poll::Pending if stop.as_mut().poll(context).is_ready() => {
                        Poll::Ready(Some(()))
                    }
                    Poll::Pending => connection.timer.poll(context).map(|()| None),
                });
                if readable.await.is_none() {
                    return AfterFastPath::Ended(Ending::Done);
                }
            }
            let Some(request) = codec::request(&connection.bytes, &mut connection.fields) else {
                return AfterFastPath::GeneralPath(connection.bytes);
            };
            let used = request.used;
            let next = match caught(connection.exchange(request, &down)).await {
                Some(next) => next,
                None => connection.respond(self.panicked(), &down).await,
            };
            match next {
                Ok(()) => _ = connection.bytes.drain(..used),
                Err(AfterFastPath::GeneralPath(_)) => {
                    return AfterFastPath::GeneralPath(connection.bytes);
                }
                Err(over) => return over,
            }
        }
    }
}

/// One client connection on the fast path.
struct FastConnection<'a> {
    forwarder: &'a Forwarder,
    shared: &'a ProxyConnection,
    waits: Timeouts,
    stream: &'a mut Stream,
    /// Bytes from the client: the request being served, and what came after it.
    bytes: Vec<u8>,
    /// Bytes from the upstream: the head of a response, and the start of its body.
    read: Vec<u8>,
    /// The headers of the request, later those of the response.
    fields: Fields,
    /// Bytes to write, to either side.
    out: Vec<u8>,
    timer: ConnectionTimer,
}

impl FastConnection<'_> {
    /// Reads from the client; false when it closed the connection.
    fn poll_client(&mut self, context: &mut Context<'_>) -> Poll<bool> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut read = ReadBuf::new(&mut scratch[..REQUEST_BYTES]);
            let ended = ready!(Pin::new(&mut *self.stream).poll_read(context, &mut read));
            self.bytes.extend_from_slice(read.filled());
            Poll::Ready(ended.is_ok() && !read.filled().is_empty())
        })
    }

    /// Watches the client and the deadline while something else is awaited.
    fn poll_interruption(&mut self, context: &mut Context<'_>) -> Poll<Interruption> {
        // Pipelined requests wait here, up to a bound.
        while self.bytes.len() < REQUEST_BYTES {
            match self.poll_client(context) {
                Poll::Ready(true) => {}
                Poll::Ready(false) => return Poll::Ready(Interruption::ClientGone),
                Poll::Pending => break,
            }
        }
        self.timer.poll(context).map(|()| Interruption::TimedOut)
    }

    /// Runs `work` until it is done, the client closes the connection, or the deadline passes.
    async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Interruption> {
        let mut work = pin!(work);
        poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Ok(done)),
            Poll::Pending => self.poll_interruption(context).map(Err),
        })
        .await
    }

    /// Serves one request, from the rules to the last byte of the response.
    async fn exchange(
        &mut self,
        ParsedRequest { method, target, body_at, used }: ParsedRequest,
        down: &watch::Receiver<bool>,
    ) -> FastPathResult {
        let text = |range: &Range<usize>| {
            std::str::from_utf8(&self.bytes[range.clone()]).unwrap_or_default()
        };
        let head = RequestHead {
            method: text(&method),
            target: text(&target),
            authority: None,
            version: Version::HTTP_11,
            headers: &mut self.fields,
        };
        let prepared = self.forwarder.admit(head, &self.shared.peer, None).await;
        let (mut allowed, rewritten) = match prepared {
            Ok(PreparedRequest { allowed, target, .. }) => (allowed, target),
            Err(response) => return self.respond(*response, down).await,
        };
        let base = self.forwarder.upstreams.settings.upstream.base.as_str();
        if base.len() + target.len() > MAX_URI_BYTES {
            let response = self.forwarder.error_response(&ForwardError::Target, &mut allowed).await;
            return self.respond(*response, down).await;
        }
        self.out.clear();
        // `Host` stays where the client wrote it.
        let target = rewritten.as_ref().map_or(&self.bytes[target], String::as_bytes);
        codec::write_request(&mut self.out, &self.bytes[method], (base, target), &self.fields);
        self.out.extend_from_slice(&self.bytes[body_at..used]);
        match self.forward(&mut allowed).await {
            Ok(response) => self.relay(&mut allowed, response, down).await,
            Err(NotForwarded::Answer(response)) => self.respond(*response, down).await,
            Err(NotForwarded::Ended(left)) => Err(AfterFastPath::Ended(left)),
            Err(NotForwarded::GeneralPath(sent_request)) => {
                *self.shared.handed_over.lock() =
                    Some((allowed, sent_request.map(|sent_request| *sent_request)));
                Err(AfterFastPath::GeneralPath(Vec::new()))
            }
        }
    }
}

/// A response whose head has arrived.
struct IncomingResponse {
    head: ParsedResponse,
    source: ResponseConnection,
}

/// The upstream connection that a response arrives on, and the slot of its request.
struct ResponseConnection {
    stream: Socket,
    slot: Slot,
}

impl FastConnection<'_> {
    /// Sends the request in `out` and waits for the head of the response.
    async fn forward(
        &mut self,
        allowed: &mut AllowedRequest,
    ) -> Result<IncomingResponse, NotForwarded> {
        let (forwarder, settings) = (self.forwarder, &self.forwarder.upstreams.settings);
        let in_flight = &forwarder.upstreams.in_flight;
        let share = in_flight.share(allowed.client, &self.shared.share);
        let Some(slot) = in_flight.try_slot(&share) else {
            return Err(NotForwarded::GeneralPath(None));
        };
        let mut stream = match self.send().await {
            Ok(stream) => stream,
            Err(Ok(failed)) => {
                return Err(NotForwarded::Answer(forwarder.error_response(&failed, allowed).await));
            }
            Err(Err(left)) => return Err(NotForwarded::Ended(left)),
        };
        self.read.clear();
        self.timer.set(settings.answer);
        let came = poll_fn(|context| match poll_more(&mut stream, &mut self.read, context) {
            Poll::Ready(()) => Poll::Ready(Ok(())),
            Poll::Pending => self.poll_interruption(context).map(Err),
        });
        match came.await {
            Ok(()) => {}
            Err(Interruption::ClientGone) => return Err(NotForwarded::Ended(Ending::Done)),
            Err(Interruption::TimedOut) => {
                let late = ForwardError::AnswerTimeout(settings.answer);
                return Err(NotForwarded::Answer(forwarder.error_response(&late, allowed).await));
            }
        }
        if let Some(head) = codec::response(&self.read, &mut self.fields) {
            return Ok(IncomingResponse { head, source: ResponseConnection { stream, slot } });
        }
        match Http1Connection::resumed(stream, std::mem::take(&mut self.read)).await {
            Ok(http1) => {
                Err(NotForwarded::GeneralPath(Some(Box::new(SentRequest { http1, slot }))))
            }
            Err(error) => {
                Err(NotForwarded::Answer(forwarder.error_response(&error.into(), allowed).await))
            }
        }
    }

    /// Sends the request on an open connection. An error is the failure to report, or how the
    /// client connection ended.
    async fn send(&mut self) -> Result<Socket, Result<ForwardError, Ending>> {
        let upstreams = &self.forwarder.upstreams;
        for _ in 0..TRIES {
            let mut stream = match upstreams.pool.take_bare() {
                Some(stream) => stream,
                None => {
                    // `connect` has a shorter timeout of its own.
                    self.timer.set(upstreams.settings.connect.saturating_mul(2));
                    match self.meanwhile(upstreams.connect()).await {
                        Ok(connected) => connected.map_err(Ok)?,
                        Err(Interruption::ClientGone) => return Err(Err(Ending::Done)),
                        Err(Interruption::TimedOut) => {
                            return Err(Ok(ForwardError::ConnectTimeout(
                                upstreams.settings.connect,
                            )));
                        }
                    }
                }
            };
            let sent = match stream.try_write(&self.out) {
                Ok(sent) if sent == self.out.len() => return Ok(stream),
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                // The upstream closed it while it was idle; no byte of the request was sent.
                Err(_) => continue,
            };
            let out = std::mem::take(&mut self.out);
            self.timer.set(upstreams.settings.answer);
            return match self.meanwhile(stream.write_all(&out[sent..])).await {
                // A failed write shows as a missing response when the head is read.
                Ok(_) => Ok(stream),
                Err(Interruption::ClientGone) => Err(Err(Ending::Done)),
                Err(Interruption::TimedOut) => {
                    Err(Ok(ForwardError::AnswerTimeout(upstreams.settings.answer)))
                }
            };
        }
        Err(Ok(ForwardError::Closed))
    }

    /// Relays a response to the client as it arrives.
    async fn relay(
        &mut self,
        allowed: &mut AllowedRequest,
        IncomingResponse { head, source }: IncomingResponse,
        down: &watch::Receiver<bool>,
    ) -> FastPathResult {
        let settlement =
            self.forwarder.prepare_response(allowed, head.status, &mut self.fields).await;
        let last = *down.borrow();
        if last {
            self.fields.put(CONNECTION, HeaderValue::from_static("close"));
        }
        self.out.clear();
        codec::write_response(&mut self.out, &head, &self.read, &self.fields);
        let mut rest = RemainingBody {
            left: head.length,
            settlement,
            source: Some(source),
            is_reusable: head.is_reusable,
        };
        let body = rest.take(self.forwarder, &self.read[head.body_at..]);
        self.out.extend_from_slice(body);
        self.read.shrink_to(REQUEST_BYTES);
        self.fields.shrink_to(REQUEST_BYTES);
        self.flush().await?;
        while rest.left > 0 {
            self.timer.set(self.forwarder.upstreams.settings.idle);
            let more = poll_fn(|context| match self.poll_rest(&mut rest, context) {
                Poll::Ready(more) => Poll::Ready(more.is_ok()),
                // Whichever side stalls, the response is incomplete.
                Poll::Pending => self.poll_interruption(context).map(|_| false),
            });
            if !more.await {
                return Err(AfterFastPath::Ended(Ending::Done));
            }
            self.flush().await?;
        }
        if last { self.end().await } else { Ok(()) }
    }

    /// Reads more of a response, and writes as much as the client takes without waiting.
    fn poll_rest(
        &mut self,
        rest: &mut RemainingBody,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let Some(source) = &mut rest.source else { return Poll::Ready(Ok(())) };
            let mut read = ReadBuf::new(scratch);
            ready!(Pin::new(&mut source.stream).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
            let piece = rest.take(self.forwarder, read.filled());
            let taken = match Pin::new(&mut *self.stream).poll_write(context, piece) {
                Poll::Ready(taken) => taken?,
                Poll::Pending => 0,
            };
            self.out.extend_from_slice(&piece[taken..]);
            Poll::Ready(Ok(()))
        })
    }

    /// Answers without the upstream.
    async fn respond(
        &mut self,
        mut response: Response<axum::body::Body>,
        down: &watch::Receiver<bool>,
    ) -> FastPathResult {
        let (name, value) = NO_SNIFF;
        response.headers_mut().insert(name, value);
        if *down.borrow() {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let last = response.headers().contains_key(CONNECTION);
        self.out.clear();
        if write(&mut self.out, response).await.is_none() {
            return Err(AfterFastPath::Ended(Ending::Done));
        }
        self.flush().await?;
        if last { self.end().await } else { Ok(()) }
    }

    /// Writes `out` to the client.
    async fn flush(&mut self) -> FastPathResult {
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
                    Poll::Ready(Ok(Some(0)) | Err(_)) => return Poll::Ready(Err(Ending::Done)),
                    Poll::Ready(Ok(Some(bytes))) => (at, waits) = (at + bytes, false),
                    Poll::Pending => {
                        if !std::mem::replace(&mut waits, true) {
                            self.timer.set(self.waits.unread);
                        }
                        return self.timer.poll(context).map(|()| Err(Ending::TooSlow));
                    }
                }
            }
        });
        let flushed = flushed.await.map_err(AfterFastPath::Ended);
        self.out.clear();
        self.out.shrink_to(REQUEST_BYTES);
        flushed
    }

    /// Shuts the client connection down.
    async fn end(&mut self) -> FastPathResult {
        self.timer.set(self.waits.patience);
        poll_fn(|context| match Pin::new(&mut *self.stream).poll_shutdown(context) {
            Poll::Ready(_) => Poll::Ready(()),
            Poll::Pending => self.timer.poll(context),
        })
        .await;
        Err(AfterFastPath::Ended(Ending::Done))
    }
}

/// Reads more from an upstream. An error shows as a response that cannot be parsed.
fn poll_more(stream: &mut Socket, read: &mut Vec<u8>, context: &mut Context<'_>) -> Poll<()> {
    SCRATCH.with_borrow_mut(|scratch| {
        let mut more = ReadBuf::new(&mut scratch[..FIRST_BYTES]);
        let _ = ready!(Pin::new(stream).poll_read(context, &mut more));
        read.extend_from_slice(more.filled());
        Poll::Ready(())
    })
}

/// The part of a response that has not arrived yet.
struct RemainingBody {
    left: u64,
    settlement: Option<Box<Settlement>>,
    /// The connection, until the last byte is read.
    source: Option<ResponseConnection>,
    is_reusable: bool,
}

impl RemainingBody {
    /// The part of `piece` that belongs to the response. The last part settles the request and
    /// returns the connection to the pool.
    fn take<'a>(&mut self, forwarder: &Forwarder, piece: &'a [u8]) -> &'a [u8] {
        let own = usize::try_from(self.left).map_or(piece, |left| &piece[..left.min(piece.len())]);
        self.left -= own.len() as u64;
        if let Some(settlement) = &mut self.settlement {
            settlement.bytes += own.len() as u64;
        }
        if self.left == 0
            && let Some(ResponseConnection { stream, slot }) = self.source.take()
        {
            drop((self.settlement.take(), slot));
            // An upstream that sends more than its response is not reused.
            if self.is_reusable && own.len() == piece.len() {
                forwarder.upstreams.pool.keep(stream);
            }
        }
        own
    }
}
