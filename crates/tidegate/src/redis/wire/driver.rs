//! The task behind a connection: connects, writes for everybody, reads for everybody, and connects again.
//!
//! One attempt at a time, never one per call. The first after a break starts at once; the next ones wait, each up to twice as long as the one before
//! and never the same for two clients. Callers who ask in the meantime make it try a little sooner, but not more often
//! than a few times a second.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::conn::{Conn, Queued, Reply, Shape, Taken};
use super::dial::Opened;
use super::outcome::{Failure, FailureKind, rule};
use super::resp::{Scanner, Value, decode, put_command};

/// The shortest and the longest bound of the wait before an attempt. The wait itself is anything from nothing to the bound.
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// With callers asking, the wait is no longer than something between these.
const DEMANDED_WAIT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(250));
/// Wrong credentials do not become right by trying, and servers log every attempt.
const REJECTED_WAIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A connection that lives shorter than this did not really come about.
const SHORT_LIFE: Duration = Duration::from_secs(1);
/// How much is read at once.
const READ: usize = 16 << 10;
/// How large a buffer may stay when it is empty.
const KEEP: usize = 256 << 10;
/// The place of commands that the driver sends by itself.
const NOBODY: u32 = u32::MAX;
/// Into how many parts the time of allowed silence is cut.
const TICKS: u32 = 4;

/// Starts the task. It ends when the connection is closed, or with its runtime.
pub(super) fn start(conn: &Arc<Conn>) {
    let conn = Stopping(Arc::clone(conn));
    tokio::spawn(async move { run(&conn.0).await });
}

/// Tells the callers when the task goes away, whatever the reason.
struct Stopping(Arc<Conn>);

impl Drop for Stopping {
    fn drop(&mut self) {
        self.0.abandoned();
    }
}

async fn run(conn: &Arc<Conn>) {
    let mut failures = 0_u32;
    let mut connected_before = false;
    loop {
        conn.begin_attempt();
        let limit = conn.settings.connect_timeout;
        let opened = match tokio::time::timeout(limit, conn.dialer.open()).await {
            Ok(opened) => opened,
            Err(_) => {
                let text = format!("no connection to {} within {} ms", conn.dialer, limit.as_millis());
                Err(Failure::local(FailureKind::Timeout, text))
            }
        };
        let failure = match opened {
            Ok(opened) => {
                let Some(epoch) = conn.opened() else { return };
                conn.counting.connects.one();
                if connected_before {
                    conn.counting.reconnects.one();
                }
                connected_before = true;
                let since = Instant::now();
                let mut serving = Serving::new(conn, opened, epoch);
                match poll_fn(|context| serving.poll(context)).await {
                    Ended::Stopped => return,
                    Ended::Retired => {
                        drop(serving);
                        conn.retired();
                        continue;
                    }
                    Ended::Broken(failure) if since.elapsed() >= SHORT_LIFE => {
                        drop(serving);
                        failures = 0;
                        conn.broke(&failure);
                        continue;
                    }
                    Ended::Broken(failure) => failure,
                }
            }
            Err(failure) => {
                conn.counting.failed_connects.one();
                failure
            }
        };
        conn.failed(&failure);
        failures = failures.saturating_add(1);
        wait(conn, failures, &failure).await;
        if conn.is_closed() {
            return;
        }
    }
}

/// Waits before the next attempt.
async fn wait(conn: &Conn, failures: u32, failure: &Failure) {
    let doubled =
        |first: Duration, longest: Duration| first.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(longest);
    let (bound, demanded) = match failure.kind() {
        FailureKind::NoAuth | FailureKind::WrongPass | FailureKind::NoPerm => {
            let (first, longest) = REJECTED_WAIT;
            (first + random(doubled(first, longest)), first)
        }
        _ => {
            let (least, most) = DEMANDED_WAIT;
            (random(doubled(FIRST_WAIT, LONGEST_WAIT)), least + random(most - least))
        }
    };
    let start = Instant::now();
    let _ = tokio::time::timeout_at(start + bound, async {
        tokio::time::sleep_until(start + demanded).await;
        conn.demanded().await;
    })
    .await;
}

/// Something from nothing to `most`.
fn random(most: Duration) -> Duration {
    most / (1 << 16) * u32::try_from(random_below(1 << 16)).unwrap_or(0)
}

/// A number below `bound`, or 0.
pub(super) fn random_below(bound: usize) -> usize {
    // A hasher with new keys each time: no generator to seed, and this is rare.
    let number = RandomState::new().hash_one(0_u8);
    usize::try_from(number % u64::try_from(bound.max(1)).unwrap_or(1)).unwrap_or(0)
}

enum Ended {
    /// Nobody wants the connection any more.
    Stopped,
    /// Let go, to be made anew.
    Retired,
    Broken(Failure),
}

/// A connection at work.
struct Serving<'a> {
    conn: &'a Conn,
    stream: super::dial::Stream,
    epoch: u64,
    /// What is being given to the socket, and how much of it was.
    out: Vec<u8>,
    out_at: usize,
    /// How many of `sent`, from the back, have their commands in `out`.
    in_out: usize,
    unflushed: bool,
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
    /// Whether anything came since the last tick, and for how many ticks nothing has while somebody waited, or nobody has.
    heard: bool,
    silent: u32,
    idle: u32,
}

impl<'a> Serving<'a> {
    fn new(conn: &'a Conn, opened: Opened, epoch: u64) -> Self {
        let mut input = opened.early;
        let end = input.len();
        input.resize(end.max(READ), 0);
        let tick_every = conn.settings.silence / TICKS;
        Serving {
            conn,
            stream: opened.stream,
            epoch,
            out: Vec::new(),
            out_at: 0,
            in_out: 0,
            unflushed: false,
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

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
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
                Ok(false) => return Poll::Ready(Ended::Broken(self.broken("the server closed it"))),
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
                // Only ever as large as twice what has come; how much may come is bounded by the scanner.
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
                    let text = format!("the reply of {} was refused: {malformed}", self.conn.dialer);
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

    /// A reply that nobody waits for. An error may be worth repeating: a server that wants to be rid of us says so.
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
                match self.conn.take(&mut self.out, &mut self.sent, context) {
                    Taken::Commands(count) => self.in_out = count,
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

    /// Looks after a connection on which nothing happens: too long a silence ends it, and a long idle time is worth a question.
    fn ticked(&mut self) -> Option<Failure> {
        let waiting = !self.sent.is_empty();
        let heard = std::mem::take(&mut self.heard);
        self.silent = if waiting && !heard { self.silent + 1 } else { 0 };
        self.idle = if waiting || heard { 0 } else { self.idle + 1 };
        if self.silent >= TICKS {
            let text = format!("{} said nothing for {} ms", self.conn.dialer, self.conn.settings.silence.as_millis());
            return Some(Failure::local(FailureKind::Timeout, text));
        }
        if self.tick_every.saturating_mul(self.idle) >= self.conn.settings.ping_every && self.out.is_empty() {
            self.idle = 0;
            put_command(&mut self.out, &["PING"]);
            self.sent.push_back(Queued { place: NOBODY, len: self.out.len(), shape: Shape::SCRIPT });
        }
        None
    }

    fn broken(&self, why: &str) -> Failure {
        let text = format!("the connection to {} broke: {}", self.conn.dialer, super::outcome::escaped(why));
        Failure::local(FailureKind::Disconnected, text)
    }
}
