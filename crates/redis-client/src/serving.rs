//! A connection at work: one write for everybody who waits, one read for everybody who is answered.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::conn::{Conn, Queued, Reply, Shape, Taken};
use super::dial::{Opened, Stream};
use super::outcome::{Failure, FailureKind, escaped, rule};
use super::resp::{Scanner, Value, decode, put_command};
use super::sentinel::Primary;

/// How much is read at once.
const READ: usize = 16 << 10;
/// With so many calls unanswered a server has something to do until the next write. Fewer, and it
/// may run idle: then every call is sent at once.
const ENOUGH: usize = 32;
/// How large a buffer may stay when it is empty.
const KEEP: usize = 256 << 10;
/// The place of commands that the driver sends by itself.
const NOBODY: u32 = u32::MAX;
/// Into how many parts the time of allowed silence is cut.
const TICKS: u32 = 4;

/// How a connection ended.
pub(super) enum Ended {
    /// Nobody wants the connection any more.
    Stopped,
    /// Let go, to be made anew.
    Retired,
    Broken(Failure),
}

/// A connection at work.
pub(super) struct Serving<'a> {
    conn: &'a Conn,
    stream: Stream,
    epoch: u64,
    /// Where Sentinel led.
    primary: Option<Primary>,
    /// What is being given to the socket, and how much of it was.
    out: Vec<u8>,
    out_at: usize,
    /// How many of `sent`, from the back, have their commands in `out`.
    in_out: usize,
    unflushed: bool,
    /// Whether those in line have been made to wait for the others already.
    waited: bool,
    /// Who waits for a reply, in the order of the replies.
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
    /// Whether anything came since the last tick, and for how many ticks nothing has while somebody
    /// waited, or nobody has.
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

    /// Reads once and delivers what is complete. Says whether there may be more.
    fn read(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, Failure>> {
        if self.end == self.input.len() {
            if self.start > 0 {
                self.input.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                self.start = 0;
            } else {
                // Only ever as large as twice what has come; how much may come is bounded by the
                // scanner.
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

    /// Makes replies of what was read.
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
                // We asked for none, but a server may say what it likes in between.
                continue;
            }
            let Some(front) = self.sent.front_mut() else { return Err(self.unasked(value)) };
            if front.shape.replies > 1 {
                front.shape.replies -= 1;
                continue;
            }
            let place = front.place;
            self.sent.pop_front();
            if place != NOBODY {
                let reply = match value {
                    Value::Error(text) => Reply::Error { text, epoch: self.epoch },
                    value => Reply::Value(value),
                };
                self.replies.push((place, reply));
            }
        }
        self.start = 0;
        self.end = 0;
        if self.input.len() > 4 * READ {
            self.input = vec![0; READ];
        }
        Ok(())
    }

    /// A reply that nobody waits for. An error may be worth repeating: a server that wants to be
    /// rid of us says so.
    fn unasked(&self, value: Value) -> Failure {
        if let Value::Error(text) = value {
            return Failure::said(rule(&text).kind, &text);
        }
        self.conn.counting.protocol_errors.one();
        let text = format!("{} sent a reply to nothing", self.conn.dialer);
        Failure::local(FailureKind::Protocol, text)
    }

    /// Gives the socket what waits, as much as it takes.
    fn write(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        loop {
            if self.out_at == self.out.len() {
                self.out.clear();
                self.out.shrink_to(KEEP);
                self.out_at = 0;
                self.in_out = 0;
                // While the server has enough to do, whoever else is about to call is let in first:
                // one write for all of them.
                let may_wait = self.sent.len() >= ENOUGH && !self.waited;
                match self.conn.take(&mut self.out, &mut self.sent, may_wait, context) {
                    Taken::Commands(count) => {
                        self.in_out = count;
                        self.waited = false;
                    }
                    Taken::Later => {
                        self.waited = true;
                        // Behind everybody who is ready to run.
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
                Poll::Ready(Ok(0)) => return self.deaf("it takes no more bytes", context),
                Poll::Ready(Ok(count)) => {
                    self.out_at += count;
                    self.unflushed = true;
                }
                Poll::Ready(Err(error)) => return self.deaf(&error.to_string(), context),
                Poll::Pending => {
                    // Who has not begun may still go away, so they wait in line and not here.
                    self.conn.give_back(&mut self.out, self.out_at, &mut self.sent, self.in_out);
                    self.in_out = 0;
                    break;
                }
            }
        }
        if self.unflushed {
            match Pin::new(&mut self.stream).poll_flush(context) {
                Poll::Ready(Ok(())) => self.unflushed = false,
                Poll::Ready(Err(error)) => return self.deaf(&error.to_string(), context),
                Poll::Pending => {}
            }
        }
        Poll::Pending
    }

    /// The server takes no more. What it said before is still read: it may be replies, or why.
    fn deaf(&mut self, why: &str, context: &mut Context<'_>) -> Poll<Ended> {
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

    /// Looks after a connection on which nothing happens: too long a silence ends it, and a long
    /// idle time is worth a question.
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
                place: NOBODY,
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
