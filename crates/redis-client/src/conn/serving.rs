//! A connection that is up: one write for all queued commands, one read for all replies.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::Conn;
use super::handover::Taken;
use super::queue::{Queued, Reply, Shape};
use crate::dial::Opened;
use crate::outcome::{Failure, FailureKind, escaped, rule};
use crate::resp::{Scanner, Value, decode, put_command};
use crate::sentinel::Primary;
use crate::stream::Stream;

/// The size of one read.
const READ: usize = 16 << 10;
/// With this many calls unanswered the server stays busy until the next write, so a write waits for
/// more calls. With fewer, every call is sent immediately.
const ENOUGH: usize = 32;
/// The largest capacity that an empty buffer keeps.
const KEEP: usize = 256 << 10;
/// The entry of commands that the driver itself sends.
const NO_ENTRY: u32 = u32::MAX;
/// Ticks in `silence`, the time without a byte after which the connection counts as dead.
const TICKS: u32 = 4;

/// How a connection ended.
pub(super) enum Ended {
    /// The connection was closed.
    Stopped,
    /// Retired, to be replaced.
    Retired,
    Broken(Failure),
}

/// A connection that is up.
pub(super) struct Serving<'a> {
    conn: &'a Conn,
    stream: Stream,
    epoch: u64,
    /// The primary that Sentinel named.
    primary: Option<Primary>,
    /// What is being written to the socket, and how much of it was.
    out: Vec<u8>,
    out_at: usize,
    /// How many of `sent`, from the back, have their commands in `out`.
    in_out: usize,
    unflushed: bool,
    /// Whether the queued commands were already deferred once.
    waited: bool,
    /// Commands without a reply, in the order of the replies.
    sent: VecDeque<Queued>,
    /// What was read: `input[start..end]`.
    input: Vec<u8>,
    start: usize,
    end: usize,
    scanner: Scanner,
    replies: Vec<(u32, Reply)>,
    woken: Vec<Waker>,
    tick: Pin<Box<Sleep>>,
    tick_every: Duration,
    /// Whether a byte arrived since the last tick; how many ticks passed without one while calls
    /// waited; how many passed without a call.
    heard: bool,
    silent: u32,
    idle: u32,
}

impl<'a> Serving<'a> {
    pub(super) fn new(conn: &'a Conn, opened: Opened, epoch: u64) -> Self {
        let mut input = opened.early;
        let end = input.len();
        input.resize(end.max(READ), 0);
        let tick_every = conn.settings.silence / TICKS;
        Serving {
            conn,
            stream: opened.stream,
            epoch,
            primary: opened.primary,
            out: Vec::new(),
            out_at: 0,
            in_out: 0,
            unflushed: false,
            waited: false,
            sent: VecDeque::new(),
            input,
            start: 0,
            end,
            scanner: Scanner::default(),
            replies: Vec::new(),
            woken: Vec::new(),
            tick: Box::pin(tokio::time::sleep(tick_every)),
            tick_every,
            heard: false,
            silent: 0,
            idle: 0,
        }
    }

    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        let ended = match self.work(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(ended) => ended,
        };
        self.conn.give_back(&mut self.out, self.out_at, &mut self.sent, self.in_out);
        Poll::Ready(ended)
    }

    fn work(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        while let Poll::Ready(read) = self.read(context) {
            match read {
                Ok(true) => {}
                Ok(false) => {
                    return Poll::Ready(Ended::Broken(self.broken("the server closed it")));
                }
                Err(failure) => return Poll::Ready(Ended::Broken(failure)),
            }
        }
        while self.tick.as_mut().poll(context).is_ready() {
            if let Some(failure) = self.ticked() {
                return Poll::Ready(Ended::Broken(failure));
            }
            self.tick.as_mut().reset(Instant::now() + self.tick_every);
        }
        self.write(context)
    }

    /// Reads once and delivers complete replies. Returns whether there may be more.
    fn read(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, Failure>> {
        if self.end == self.input.len() {
            if self.start > 0 {
                self.input.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                self.start = 0;
            } else {
                // At most twice what has arrived, which the scanner bounds.
                self.input.resize(self.input.len() * 2, 0);
            }
        }
        let mut buffer = ReadBuf::new(&mut self.input[self.end..]);
        if let Err(error) = ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer)) {
            return Poll::Ready(Err(self.broken(&error.to_string())));
        }
        let count = buffer.filled().len();
        if count == 0 {
            return Poll::Ready(Ok(false));
        }
        self.end += count;
        self.heard = true;
        let parsed = self.parse();
        self.conn.deliver(&mut self.replies, &mut self.woken);
        Poll::Ready(parsed.map(|()| true))
    }

    /// Decodes the replies in the input.
    fn parse(&mut self) -> Result<(), Failure> {
        let settings = &self.conn.settings;
        while self.start < self.end {
            let large = self.sent.front().is_some_and(|waiting| waiting.shape.large);
            let max = if large { settings.max_command_reply } else { settings.max_script_reply };
            let bytes = &self.input[self.start..self.end];
            let found = self.scanner.scan(bytes, max).and_then(|found| match found {
                Some(length) => decode(&bytes[..length]).map(|value| Some((length, value))),
                None => Ok(None),
            });
            let (length, value) = match found {
                Ok(Some(found)) => found,
                Ok(None) => return Ok(()),
                Err(malformed) => {
                    self.conn.counting.protocol_errors.one();
                    let text =
                        format!("the reply of {} was refused: {malformed}", self.conn.dialer);
                    return Err(Failure::local(FailureKind::Protocol, text));
                }
            };
            self.start += length;
            if let Value::Push(_) = value {
                // Nothing subscribes to pushes, but a server may send them at any time.
                continue;
            }
            let Some(front) = self.sent.front_mut() else { return Err(self.unexpected(value)) };
            if front.shape.replies > 1 {
                front.shape.replies -= 1;
                continue;
            }
            let entry = front.entry;
            self.sent.pop_front();
            if entry != NO_ENTRY {
                let reply = match value {
                    Value::Error(text) => Reply::Error { text, epoch: self.epoch },
                    value => Reply::Value(value),
                };
                self.replies.push((entry, reply));
            }
        }
        self.start = 0;
        self.end = 0;
        if self.input.len() > 4 * READ {
            self.input = vec![0; READ];
        }
        Ok(())
    }

    /// The failure for a reply without a call. An error reply says why the server closes the
    /// connection.
    fn unexpected(&self, value: Value) -> Failure {
        if let Value::Error(text) = value {
            return Failure::said(rule(&text).kind, &text);
        }
        self.conn.counting.protocol_errors.one();
        let text = format!("{} sent a reply to nothing", self.conn.dialer);
        Failure::local(FailureKind::Protocol, text)
    }

    /// Writes the queued commands, as much as the socket takes.
    fn write(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        loop {
            if self.out_at == self.out.len() {
                self.out.clear();
                self.out.shrink_to(KEEP);
                self.out_at = 0;
                self.in_out = 0;
                // While the server is busy, tasks about to call run first: one write for all.
                let may_wait = self.sent.len() >= ENOUGH && !self.waited;
                match self.conn.take(&mut self.out, &mut self.sent, may_wait, context) {
                    Taken::Commands(count) => {
                        self.in_out = count;
                        self.waited = false;
                    }
                    Taken::Later => {
                        self.waited = true;
                        // Behind all tasks that are ready to run.
                        context.waker().wake_by_ref();
                        break;
                    }
                    Taken::Nothing => break,
                    Taken::NoMore if self.sent.is_empty() => return Poll::Ready(Ended::Retired),
                    Taken::NoMore => break,
                    Taken::Stop => return Poll::Ready(Ended::Stopped),
                }
            }
            match Pin::new(&mut self.stream).poll_write(context, &self.out[self.out_at..]) {
                Poll::Ready(Ok(0)) => return self.write_failed("it takes no more bytes", context),
                Poll::Ready(Ok(count)) => {
                    self.out_at += count;
                    self.unflushed = true;
                }
                Poll::Ready(Err(error)) => return self.write_failed(&error.to_string(), context),
                Poll::Pending => {
                    // Commands not begun can still be cancelled, so they return to the queue.
                    self.conn.give_back(&mut self.out, self.out_at, &mut self.sent, self.in_out);
                    self.in_out = 0;
                    break;
                }
            }
        }
        if self.unflushed {
            match Pin::new(&mut self.stream).poll_flush(context) {
                Poll::Ready(Ok(())) => self.unflushed = false,
                Poll::Ready(Err(error)) => return self.write_failed(&error.to_string(), context),
                Poll::Pending => {}
            }
        }
        Poll::Pending
    }

    /// Handles a failed write. Input is still read: it may hold replies, or the reason.
    fn write_failed(&mut self, why: &str, context: &mut Context<'_>) -> Poll<Ended> {
        loop {
            match self.read(context) {
                Poll::Ready(Ok(true)) => {}
                Poll::Ready(Err(failure)) if failure.kind() != FailureKind::Disconnected => {
                    return Poll::Ready(Ended::Broken(failure));
                }
                _ => return Poll::Ready(Ended::Broken(self.broken(why))),
            }
        }
    }

    /// Ends a connection that has not answered within `silence`, and sends a PING after a long idle
    /// time.
    fn ticked(&mut self) -> Option<Failure> {
        let waiting = !self.sent.is_empty();
        let heard = std::mem::take(&mut self.heard);
        self.silent = if waiting && !heard { self.silent + 1 } else { 0 };
        self.idle = if waiting || heard { 0 } else { self.idle + 1 };
        if self.silent >= TICKS {
            let text = format!(
                "{} said nothing for {} ms",
                self.conn.dialer,
                self.conn.settings.silence.as_millis()
            );
            return Some(Failure::local(FailureKind::Timeout, text));
        }
        if self.conn.dialer.is_replaced(self.primary.as_ref()) {
            self.conn.retire(self.epoch);
        }
        if self.tick_every.saturating_mul(self.idle) >= self.conn.settings.ping_every
            && self.out.is_empty()
        {
            self.idle = 0;
            put_command(&mut self.out, &["PING"]);
            self.sent.push_back(Queued {
                entry: NO_ENTRY,
                len: self.out.len(),
                shape: Shape::SCRIPT,
            });
        }
        None
    }

    fn broken(&self, why: &str) -> Failure {
        let text = format!("the connection to {} broke: {}", self.conn.dialer, escaped(why));
        Failure::local(FailureKind::Disconnected, text)
    }
}
