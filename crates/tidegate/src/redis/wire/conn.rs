//! One connection as its callers see it: a line in which everybody has a place.
//!
//! Callers write their commands into one buffer under a short lock and wait. The driver ([`super::driver`]) takes the buffer,
//! gives it to the socket, and puts replies into the places of those who wait. Whoever goes away leaves their place behind, to
//! be cleared by the driver when the reply has come, so nobody can ever read a reply that is not theirs. A command whose
//! caller went away before the driver took it is not sent at all.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use super::counters::Counting;
use super::dial::Dialer;
use super::outcome::{Failure, FailureKind};
use super::resp::Value;
use super::{Settings, driver};

/// How long a connection must have lived before it is let go in the hope of a better one.
const MIN_LIFE: Duration = Duration::from_millis(100);

/// What a call got.
#[derive(Debug)]
pub(super) enum Reply {
    /// A value.
    Value(Value),
    /// The server answered with an error, over the connection of this number.
    Error { text: String, epoch: u64 },
    /// There is no answer.
    Failed { failure: Failure, stage: Stage },
}

/// How far a call came that was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It was not taken: there is no connection, or no room.
    Refused,
    /// It was waiting to be sent. The server has never heard of it.
    Queued,
    /// A byte of it, at least, was given to the socket.
    Begun,
}

/// What a command expects.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// How many replies it gets; the caller is given the last.
    pub(super) replies: u8,
    /// Whether the reply may be large.
    pub(super) large: bool,
}

impl Shape {
    pub(super) const SCRIPT: Shape = Shape { replies: 1, large: false };
    pub(super) const COMMAND: Shape = Shape { replies: 1, large: true };
}

/// A connection, or the attempt to have one.
pub(super) struct Conn {
    line: Mutex<Line>,
    pub(super) dialer: Dialer,
    pub(super) settings: Arc<Settings>,
    pub(super) counting: Arc<Counting>,
}

/// Everybody who waits, in order.
struct Line {
    state: State,
    /// Commands that have not been given to the socket.
    bytes: Vec<u8>,
    /// Whose commands those are.
    queued: VecDeque<Queued>,
    /// How many of them were left by their callers.
    cancelled: usize,
    places: Vec<Place>,
    free: Vec<u32>,
    /// Places whose command has not been answered.
    waiting: usize,
    /// Wakes the driver, when it has nothing to do.
    driver: Option<Waker>,
    /// Somebody has asked since the last attempt to connect.
    demand: bool,
    /// Counts the connections that were made, so that what is said of one does not hit the next.
    epoch: u64,
    /// When the last one was.
    since: Instant,
}

enum State {
    /// There is no driver; the first caller starts it.
    Idle,
    /// The first attempt, or the first after a break. Worth waiting for.
    Connecting,
    Up,
    /// The server is the wrong one. What was sent is still answered; everybody else waits for the next connection.
    Retiring,
    /// The last attempt failed. Callers are told at once; the driver tries on.
    Down(Failure),
    Closed,
}

/// A command in the buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queued {
    pub(super) place: u32,
    pub(super) len: usize,
    pub(super) shape: Shape,
}

enum Place {
    Free,
    /// The command is in the buffer.
    Queued(Waker),
    /// The command was given to the socket, or is just being.
    Sent(Waker),
    /// The caller has gone; the command is in the buffer and must not be sent.
    Cancelled,
    /// The caller has gone; the reply will still come.
    Left,
    Done(Reply),
}

impl Conn {
    pub(super) fn new(dialer: Dialer, settings: Arc<Settings>, counting: Arc<Counting>) -> Arc<Self> {
        let line = Line {
            state: State::Idle,
            bytes: Vec::new(),
            queued: VecDeque::new(),
            cancelled: 0,
            places: Vec::new(),
            free: Vec::new(),
            waiting: 0,
            driver: None,
            demand: false,
            epoch: 0,
            since: Instant::now(),
        };
        Arc::new(Conn { line: Mutex::new(line), dialer, settings, counting })
    }

    /// Sends what `encode` writes and waits for the answer, until `deadline` at the latest.
    pub(super) async fn call(
        self: &Arc<Self>,
        shape: Shape,
        encode: impl Fn(&mut Vec<u8>),
        deadline: Instant,
    ) -> Reply {
        let mut ticket = Ticket { conn: self, place: None };
        let answer = poll_fn(|context| {
            let Some(place) = ticket.place else {
                return match self.join(shape, &encode, context.waker()) {
                    Ok(place) => {
                        ticket.place = Some(place);
                        Poll::Pending
                    }
                    Err(failure) => Poll::Ready(Reply::Failed { failure, stage: Stage::Refused }),
                };
            };
            let reply = self.look(place, context);
            if reply.is_ready() {
                ticket.place = None;
            }
            reply
        });
        match timeout_at(deadline, answer).await {
            Ok(reply) => reply,
            Err(_) => ticket.give_up(),
        }
    }

    /// Whether a call would be sent without delay.
    pub(super) fn is_up(&self) -> bool {
        matches!(self.line.lock().state, State::Up)
    }

    /// Whether a call would be sent without delay. If nobody has tried to connect yet, that is begun.
    pub(super) fn is_up_or_starts(self: &Arc<Self>) -> bool {
        let mut line = self.line.lock();
        if matches!(line.state, State::Idle) {
            line.state = State::Connecting;
            drop(line);
            driver::start(self);
            return false;
        }
        matches!(line.state, State::Up)
    }

    /// Takes a place in line.
    fn join(self: &Arc<Self>, shape: Shape, encode: &impl Fn(&mut Vec<u8>), waker: &Waker) -> Result<u32, Failure> {
        let mut line = self.line.lock();
        let mut start = false;
        match &line.state {
            State::Up | State::Retiring | State::Connecting => {}
            State::Idle => start = true,
            State::Down(failure) => {
                let failure = failure.clone();
                line.demand = true;
                let driver = line.driver.take();
                drop(line);
                wake(driver);
                return Err(failure);
            }
            State::Closed => return Err(Failure::local(FailureKind::Disconnected, "the connection was closed here")),
        }
        let before = line.bytes.len();
        let full = line.waiting >= self.settings.max_in_flight;
        if !full {
            encode(&mut line.bytes);
        }
        if full || line.bytes.len() > self.settings.max_queued_bytes {
            line.bytes.truncate(before);
            let calls = line.waiting;
            drop(line);
            self.counting.overloads.one();
            let text = format!("too many calls are waiting for the server: {calls} calls, {before} bytes unsent");
            return Err(Failure::local(FailureKind::Overloaded, text));
        }
        let taken = Place::Queued(waker.clone());
        let place = match line.free.pop() {
            Some(place) => {
                line.places[place as usize] = taken;
                place
            }
            None => {
                line.places.push(taken);
                u32::try_from(line.places.len() - 1).expect("max_in_flight is far below 2^32")
            }
        };
        let len = line.bytes.len() - before;
        line.queued.push_back(Queued { place, len, shape });
        line.waiting += 1;
        if start {
            line.state = State::Connecting;
        }
        let driver = line.driver.take();
        drop(line);
        wake(driver);
        if start {
            driver::start(self);
        }
        Ok(place)
    }

    /// Whether the reply has come.
    fn look(&self, place: u32, context: &mut Context<'_>) -> Poll<Reply> {
        // Dropped after the lock: nobody knows what the waker of an executor does when it goes.
        let _old;
        let mut line = self.line.lock();
        match &mut line.places[place as usize] {
            Place::Queued(waker) | Place::Sent(waker) => {
                if !waker.will_wake(context.waker()) {
                    _old = mem::replace(waker, context.waker().clone());
                }
                Poll::Pending
            }
            done => match mem::replace(done, Place::Free) {
                Place::Done(reply) => {
                    line.free.push(place);
                    Poll::Ready(reply)
                }
                _ => unreachable!("a place is freed only by its owner, or after its owner has left it"),
            },
        }
    }

    /// Gives up a place. Says how far its command has come, or what the reply was, if it came after all.
    fn leave(&self, place: u32) -> Result<Reply, Stage> {
        // As in `look`.
        let _waker;
        let mut line = self.line.lock();
        let slot = &mut line.places[place as usize];
        match mem::replace(slot, Place::Free) {
            Place::Queued(waker) => {
                _waker = waker;
                *slot = Place::Cancelled;
                line.cancelled += 1;
                // Not worth the walk for one, but a line of the departed must not grow.
                if line.cancelled > 64 && line.cancelled > line.queued.len() / 2 {
                    line.clear_cancelled();
                }
                Err(Stage::Queued)
            }
            Place::Sent(waker) => {
                _waker = waker;
                *slot = Place::Left;
                Err(Stage::Begun)
            }
            Place::Done(reply) => {
                line.free.push(place);
                Ok(reply)
            }
            _ => unreachable!("a place is left once, by its owner"),
        }
    }

    /// Ends the connection; its driver stops.
    pub(super) fn close(&self) {
        let failure = Failure::local(FailureKind::Disconnected, "the connection was closed here");
        self.settle(State::Closed, &failure);
    }

    /// Lets go of connection `epoch`, because the next one may lead to another server or be better authenticated. Says whether a call has a
    /// chance to fare better: not if this connection was made a moment ago, because it would be made again at every call.
    pub(super) fn retire(&self, epoch: u64) -> bool {
        let mut line = self.line.lock();
        if line.epoch != epoch || !matches!(line.state, State::Up) {
            return matches!(line.state, State::Up | State::Retiring | State::Connecting | State::Idle);
        }
        if line.since.elapsed() < MIN_LIFE {
            return false;
        }
        line.state = State::Retiring;
        let driver = line.driver.take();
        drop(line);
        wake(driver);
        true
    }

    /// What the driver found out. Everybody who waits is told why there is no reply.
    fn settle(&self, state: State, failure: &Failure) {
        let mut line = self.line.lock();
        if matches!(line.state, State::Closed) {
            return;
        }
        let woken = line.fail_all(state, failure);
        let driver = line.driver.take();
        drop(line);
        wake(driver);
        woken.into_iter().for_each(Waker::wake);
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl Line {
    /// Tells everybody who waits that there will be no reply. Those who must be woken are returned.
    fn fail_all(&mut self, state: State, failure: &Failure) -> Vec<Waker> {
        self.state = state;
        self.bytes.clear();
        self.queued.clear();
        self.cancelled = 0;
        self.waiting = 0;
        let mut woken = Vec::new();
        for (index, place) in self.places.iter_mut().enumerate() {
            let (waker, stage) = match mem::replace(place, Place::Free) {
                Place::Queued(waker) => (waker, Stage::Queued),
                Place::Sent(waker) => (waker, Stage::Begun),
                Place::Cancelled | Place::Left => {
                    self.free.push(u32::try_from(index).expect("places are numbered by u32"));
                    continue;
                }
                other @ (Place::Done(_) | Place::Free) => {
                    *place = other;
                    continue;
                }
            };
            *place = Place::Done(Reply::Failed { failure: failure.clone(), stage });
            woken.push(waker);
        }
        woken
    }

    /// Takes the commands of those who left out of the buffer.
    fn clear_cancelled(&mut self) {
        if self.cancelled == 0 {
            return;
        }
        let (mut from, mut to) = (0, 0);
        let Line { bytes, queued, places, free, waiting, .. } = self;
        queued.retain(|command| {
            let range = from..from + command.len;
            from = range.end;
            let place = &mut places[command.place as usize];
            if matches!(place, Place::Cancelled) {
                *place = Place::Free;
                free.push(command.place);
                *waiting -= 1;
                return false;
            }
            bytes.copy_within(range, to);
            to += command.len;
            true
        });
        bytes.truncate(to);
        self.cancelled = 0;
    }
}

/// A caller's hold on their place. Dropping it leaves the line.
struct Ticket<'a> {
    conn: &'a Conn,
    place: Option<u32>,
}

impl Ticket<'_> {
    /// Leaves because there is no more time.
    fn give_up(mut self) -> Reply {
        let Some(place) = self.place.take() else {
            // Not even the first step was made: the deadline had passed before.
            return timed_out(&self.conn.counting, Stage::Refused);
        };
        match self.conn.leave(place) {
            Ok(reply) => reply,
            Err(stage) => timed_out(&self.conn.counting, stage),
        }
    }
}

fn timed_out(counting: &Counting, stage: Stage) -> Reply {
    counting.timeouts.one();
    let text = match stage {
        Stage::Begun => "the server did not answer in time",
        Stage::Queued | Stage::Refused => "there was no time left to send the call",
    };
    Reply::Failed { failure: Failure::local(FailureKind::Timeout, text), stage }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            let _ = self.conn.leave(place);
        }
    }
}

/// What the driver takes from the line.
pub(super) enum Taken {
    /// So many commands to send.
    Commands(usize),
    /// Nothing now. The driver will be woken.
    Nothing,
    /// Nothing more on this connection: it ends when everything sent is answered.
    NoMore,
    /// Nothing, and nobody waits: the connection ends now.
    Stop,
}

/// The driver's side.
impl Conn {
    /// Moves what waits to be sent into `out`, which must be empty, and its owners behind `sent`.
    pub(super) fn take(&self, out: &mut Vec<u8>, sent: &mut VecDeque<Queued>, context: &Context<'_>) -> Taken {
        let mut line = self.line.lock();
        match line.state {
            State::Up => {}
            State::Retiring => return Taken::NoMore,
            _ => return Taken::Stop,
        }
        line.clear_cancelled();
        if line.queued.is_empty() {
            match &mut line.driver {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            return Taken::Nothing;
        }
        mem::swap(&mut line.bytes, out);
        let Line { queued, places, .. } = &mut *line;
        let count = queued.len();
        for command in queued.drain(..) {
            let place = &mut places[command.place as usize];
            if let Place::Queued(waker) = mem::replace(place, Place::Free) {
                *place = Place::Sent(waker);
            }
            sent.push_back(command);
        }
        Taken::Commands(count)
    }

    /// Gives back the commands in `out` of which the socket took nothing, when it took `at` bytes. They belong to the last `count` of `sent`.
    pub(super) fn give_back(&self, out: &mut Vec<u8>, at: usize, sent: &mut VecDeque<Queued>, count: usize) {
        if count == 0 {
            return;
        }
        // Who had their first byte taken stays; everybody after goes back to the front of the line.
        let mut keep = sent.len() - count;
        let mut start = 0;
        while keep < sent.len() && start < at {
            start += sent[keep].len;
            keep += 1;
        }
        let mut line = self.line.lock();
        if !matches!(line.state, State::Up | State::Retiring) {
            // Everybody has been told already.
            sent.truncate(keep);
            out.truncate(start);
            return;
        }
        let Line { queued, places, cancelled, bytes, .. } = &mut *line;
        for command in sent.drain(keep..).rev() {
            let place = &mut places[command.place as usize];
            *place = match mem::replace(place, Place::Free) {
                Place::Sent(waker) => Place::Queued(waker),
                // Its caller was told that it is unknown; now it will certainly not be sent.
                Place::Left => {
                    *cancelled += 1;
                    Place::Cancelled
                }
                other => other,
            };
            queued.push_front(command);
        }
        bytes.splice(..0, out.drain(start..));
    }

    /// Puts replies into the places of those who wait for them, and wakes them.
    pub(super) fn deliver(&self, replies: &mut Vec<(u32, Reply)>, woken: &mut Vec<Waker>) {
        let mut dropped = 0;
        let mut line = self.line.lock();
        for (index, reply) in replies.drain(..) {
            let Line { places, free, waiting, .. } = &mut *line;
            let Some(place) = places.get_mut(index as usize) else { continue };
            match mem::replace(place, Place::Free) {
                Place::Sent(waker) => {
                    *place = Place::Done(reply);
                    *waiting -= 1;
                    woken.push(waker);
                }
                Place::Left => {
                    free.push(index);
                    *waiting -= 1;
                    dropped += 1;
                }
                // The line was failed in between; the place may have a new owner by now.
                other => *place = other,
            }
        }
        drop(line);
        if dropped > 0 {
            self.counting.dropped_replies.add(dropped);
        }
        woken.drain(..).for_each(Waker::wake);
    }

    /// The connection is there. Returns its number, if anybody still wants it.
    pub(super) fn opened(&self) -> Option<u64> {
        let mut line = self.line.lock();
        if matches!(line.state, State::Closed) {
            return None;
        }
        line.state = State::Up;
        line.epoch += 1;
        line.since = Instant::now();
        Some(line.epoch)
    }

    /// The connection was let go and everything sent over it is answered. Those in line wait for the next.
    pub(super) fn retired(&self) {
        let mut line = self.line.lock();
        if matches!(line.state, State::Retiring) {
            line.state = State::Connecting;
        }
    }

    /// The connection broke, and is to be made anew at once.
    pub(super) fn broke(&self, failure: &Failure) {
        self.settle(State::Connecting, failure);
    }

    /// There is no connection, and callers need not wait for one.
    pub(super) fn failed(&self, failure: &Failure) {
        self.settle(State::Down(failure.clone()), failure);
    }

    /// There is no driver any more. The next caller starts another.
    pub(super) fn abandoned(&self) {
        let failure = Failure::local(FailureKind::Disconnected, "the runtime of the connection has ended");
        self.settle(State::Idle, &failure);
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(self.line.lock().state, State::Closed)
    }

    /// Waits until somebody asks, or the connection is closed.
    pub(super) async fn demanded(&self) {
        poll_fn(|context| {
            let mut line = self.line.lock();
            if line.demand || matches!(line.state, State::Closed) {
                return Poll::Ready(());
            }
            line.driver = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Forgets who has asked so far.
    pub(super) fn begin_attempt(&self) {
        self.line.lock().demand = false;
    }
}
