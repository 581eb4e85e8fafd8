//! One connection that many callers share.
//!
//! A call appends its command to one buffer under a short lock, adds an entry to the queue, and
//! waits. The task of the connection ([`driver`]) writes the buffer to the socket and stores
//! replies in the entries. A cancelled call leaves its entry behind until its reply has arrived, so
//! no call reads the reply of another. A command that is cancelled before the driver takes it is
//! not sent.

mod driver;
mod handover;
mod queue;
mod serving;

use std::future::poll_fn;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use self::queue::{CallQueue, Entry, Queued, State};
pub(super) use self::queue::{Reply, Shape, Stage};
use super::Settings;
use super::counters::Counting;
use super::dial::Dialer;
use super::outcome::{Failure, FailureKind};
use tidegate_bounded::in_time;

/// How old a connection must be before it is retired for a better one.
const MIN_LIFE: Duration = Duration::from_millis(100);

/// A connection, or the attempt to make one.
pub(super) struct Conn {
    queue: Mutex<CallQueue>,
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
        Arc::new(Conn { queue: Mutex::new(CallQueue::new()), dialer, settings, counting })
    }

    /// Sends what `encode` writes and waits for the reply until `deadline`.
    pub(super) async fn call(
        self: &Arc<Self>,
        shape: Shape,
        encode: impl Fn(&mut Vec<u8>),
        deadline: Instant,
    ) -> Reply {
        let mut ticket = Ticket { conn: self, entry: None };
        let answer = poll_fn(|context| {
            let Some(entry) = ticket.entry else {
                return match self.join(shape, &encode, context.waker()) {
                    Ok(entry) => {
                        ticket.entry = Some(entry);
                        Poll::Pending
                    }
                    Err(failure) => Poll::Ready(Reply::Failed { failure, stage: Stage::Refused }),
                };
            };
            let reply = self.poll_entry(entry, context);
            if reply.is_ready() {
                ticket.entry = None;
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
        matches!(self.queue.lock().state, State::Up)
    }

    /// Whether a call would be sent without delay. Starts the driver if it has not run yet.
    pub(super) fn is_up_or_starts(self: &Arc<Self>) -> bool {
        let mut queue = self.queue.lock();
        if matches!(queue.state, State::Idle) {
            queue.state = State::Connecting;
            drop(queue);
            driver::start(self);
            return false;
        }
        matches!(queue.state, State::Up)
    }

    /// Queues a command. Returns its entry.
    fn join(
        self: &Arc<Self>,
        shape: Shape,
        encode: &impl Fn(&mut Vec<u8>),
        waker: &Waker,
    ) -> Result<u32, Failure> {
        let mut queue = self.queue.lock();
        let mut start = false;
        match &queue.state {
            State::Up | State::Retiring | State::Connecting => {}
            State::Idle => start = true,
            State::Down(failure) => {
                let failure = failure.clone();
                queue.demand = true;
                let driver = queue.driver.take();
                drop(queue);
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
        let before = queue.bytes.len();
        let full = queue.waiting >= self.settings.max_in_flight;
        if !full {
            encode(&mut queue.bytes);
        }
        if full || queue.bytes.len() > self.settings.max_queued_bytes {
            queue.bytes.truncate(before);
            let calls = queue.waiting;
            drop(queue);
            self.counting.overloads.one();
            let text = format!(
                "too many calls are waiting for the server: {calls} calls, {before} bytes unsent"
            );
            return Err(Failure::local(FailureKind::Overloaded, text));
        }
        let new = Entry::Queued(waker.clone());
        let entry = match queue.free.pop() {
            Some(entry) => {
                queue.entries[entry as usize] = new;
                entry
            }
            None => {
                queue.entries.push(new);
                u32::try_from(queue.entries.len() - 1).expect("max_in_flight is far below 2^32")
            }
        };
        let len = queue.bytes.len() - before;
        queue.queued.push_back(Queued { entry, len, shape });
        queue.waiting += 1;
        if start {
            queue.state = State::Connecting;
        }
        let driver = queue.driver.take();
        drop(queue);
        wake(driver);
        if start {
            driver::start(self);
        }
        Ok(entry)
    }

    /// The reply, once it has arrived.
    fn poll_entry(&self, entry: u32, context: &mut Context<'_>) -> Poll<Reply> {
        // Dropped after the lock: dropping a waker may run code of the executor.
        let _old;
        let mut queue = self.queue.lock();
        match &mut queue.entries[entry as usize] {
            Entry::Queued(waker) | Entry::Sent(waker) => {
                if !waker.will_wake(context.waker()) {
                    _old = mem::replace(waker, context.waker().clone());
                }
                Poll::Pending
            }
            done => match mem::replace(done, Entry::Free) {
                Entry::Done(reply) => {
                    queue.free.push(entry);
                    Poll::Ready(reply)
                }
                _ => unreachable!(
                    "an entry is freed only by its call, or after its call was cancelled"
                ),
            },
        }
    }

    /// Cancels a call. Returns how far its command got, or the reply if it has arrived after all.
    fn leave(&self, entry: u32) -> Result<Reply, Stage> {
        // As in `poll_entry`.
        let _waker;
        let mut queue = self.queue.lock();
        let slot = &mut queue.entries[entry as usize];
        match mem::replace(slot, Entry::Free) {
            Entry::Queued(waker) => {
                _waker = waker;
                *slot = Entry::Cancelled;
                queue.cancelled += 1;
                // Not worth a pass for one, but cancelled commands must not accumulate.
                if queue.cancelled > 64 && queue.cancelled > queue.queued.len() / 2 {
                    queue.clear_cancelled();
                }
                Err(Stage::Queued)
            }
            Entry::Sent(waker) => {
                _waker = waker;
                *slot = Entry::Left;
                Err(Stage::Begun)
            }
            Entry::Done(reply) => {
                queue.free.push(entry);
                Ok(reply)
            }
            _ => unreachable!("a call is cancelled once"),
        }
    }

    /// Ends the connection; its driver stops.
    pub(super) fn close(&self) {
        let failure = Failure::local(FailureKind::Disconnected, "the connection was closed here");
        self.settle(State::Closed, &failure);
    }

    /// Retires connection `epoch`, because the next one may lead to another server or authenticate
    /// with other credentials. Returns whether a retry may succeed: not if this connection is only
    /// moments old, which would mean a new connection for every call.
    pub(super) fn retire(&self, epoch: u64) -> bool {
        let mut queue = self.queue.lock();
        if queue.epoch != epoch || !matches!(queue.state, State::Up) {
            return matches!(
                queue.state,
                State::Up | State::Retiring | State::Connecting | State::Idle
            );
        }
        if queue.since.elapsed() < MIN_LIFE {
            return false;
        }
        queue.state = State::Retiring;
        let driver = queue.driver.take();
        drop(queue);
        wake(driver);
        true
    }

    /// Sets the state and fails every waiting call with `failure`.
    fn settle(&self, state: State, failure: &Failure) {
        let mut queue = self.queue.lock();
        if matches!(queue.state, State::Closed) {
            return;
        }
        let woken = queue.fail_all(state, failure);
        let driver = queue.driver.take();
        drop(queue);
        wake(driver);
        woken.into_iter().for_each(Waker::wake);
    }
}

/// The entry of a call in progress. Dropping it cancels the call.
struct Ticket<'a> {
    conn: &'a Conn,
    entry: Option<u32>,
}

impl Ticket<'_> {
    /// Cancels the call at its deadline.
    fn give_up(mut self) -> Reply {
        let Some(entry) = self.entry.take() else {
            // The deadline had passed before the first poll.
            return timed_out(&self.conn.counting, Stage::Refused);
        };
        match self.conn.leave(entry) {
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
        if let Some(entry) = self.entry.take() {
            let _ = self.conn.leave(entry);
        }
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}
