//! One connection as its callers see it: a line in which everybody has a place.
//!
//! Callers write their commands into one buffer under a short lock and wait. The driver
//! ([`super::driver`]) takes the buffer, gives it to the socket, and puts replies into the places
//! of those who wait. Whoever goes away leaves their place behind, to be cleared by the driver when
//! the reply has come, so nobody can ever read a reply that is not theirs. A command whose caller
//! went away before the driver took it is not sent at all.

mod drive;
mod line;

use std::future::poll_fn;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

pub(super) use self::drive::Taken;
use self::line::{Line, Place, State};
pub(super) use self::line::{Queued, Reply, Shape, Stage};
use super::counters::Counting;
use super::dial::Dialer;
use super::outcome::{Failure, FailureKind};
use super::{Settings, driver};
use tidegate_bounded::in_time;

/// How long a connection must have lived before it is let go in the hope of a better one.
const MIN_LIFE: Duration = Duration::from_millis(100);

/// A connection, or the attempt to have one.
pub(super) struct Conn {
    line: Mutex<Line>,
    pub(super) dialer: Dialer,
    pub(super) settings: Arc<Settings>,
    pub(super) counting: Arc<Counting>,
}

impl Conn {
    pub(super) fn new(
        dialer: Dialer,
        settings: Arc<Settings>,
        counting: Arc<Counting>,
    ) -> Arc<Self> {
        Arc::new(Conn { line: Mutex::new(Line::new()), dialer, settings, counting })
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
        match in_time(deadline, answer).await {
            Some(reply) => reply,
            None => ticket.give_up(),
        }
    }

    /// Whether a call would be sent without delay.
    pub(super) fn is_up(&self) -> bool {
        matches!(self.line.lock().state, State::Up)
    }

    /// Whether a call would be sent without delay. If nobody has tried to connect yet, that is
    /// begun.
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
    fn join(
        self: &Arc<Self>,
        shape: Shape,
        encode: &impl Fn(&mut Vec<u8>),
        waker: &Waker,
    ) -> Result<u32, Failure> {
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
            State::Closed => {
                return Err(Failure::local(
                    FailureKind::Disconnected,
                    "the connection was closed here",
                ));
            }
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
            let text = format!(
                "too many calls are waiting for the server: {calls} calls, {before} bytes unsent"
            );
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
                _ => unreachable!(
                    "a place is freed only by its owner, or after its owner has left it"
                ),
            },
        }
    }

    /// Gives up a place. Says how far its command has come, or what the reply was, if it came after
    /// all.
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

    /// Lets go of connection `epoch`, because the next one may lead to another server or be better
    /// authenticated. Says whether a call has a chance to fare better: not if this connection was
    /// made a moment ago, because it would be made again at every call.
    pub(super) fn retire(&self, epoch: u64) -> bool {
        let mut line = self.line.lock();
        if line.epoch != epoch || !matches!(line.state, State::Up) {
            return matches!(
                line.state,
                State::Up | State::Retiring | State::Connecting | State::Idle
            );
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

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}
