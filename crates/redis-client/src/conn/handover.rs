//! The driver's side of the queue: takes commands, delivers replies, changes the state.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::mem;
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use super::Conn;
use super::queue::{CallQueue, Entry, Queued, Reply, State};
use crate::outcome::{Failure, FailureKind};

/// What the driver takes from the queue.
pub(super) enum Taken {
    /// This many commands to send.
    Commands(usize),
    /// There are commands; sending is deferred once so that more can join the write.
    Later,
    /// The queue is empty. The driver is woken when a call arrives.
    Nothing,
    /// The connection is retired: it ends when every call already sent is answered.
    NoMore,
    /// The connection is closed.
    Stop,
}

impl Conn {
    /// Moves the queued commands into `out`, which must be empty, and appends their entries to
    /// `sent`; not if they `may_wait`.
    pub(super) fn take(
        &self,
        out: &mut Vec<u8>,
        sent: &mut VecDeque<Queued>,
        may_wait: bool,
        context: &Context<'_>,
    ) -> Taken {
        let mut queue = self.queue.lock();
        match queue.state {
            State::Up => {}
            State::Retiring => return Taken::NoMore,
            _ => return Taken::Stop,
        }
        queue.clear_cancelled();
        if queue.queued.is_empty() {
            match &mut queue.driver {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            return Taken::Nothing;
        }
        if may_wait {
            return Taken::Later;
        }
        mem::swap(&mut queue.bytes, out);
        let CallQueue { queued, entries, .. } = &mut *queue;
        let count = queued.len();
        for command in queued.drain(..) {
            let entry = &mut entries[command.entry as usize];
            if let Entry::Queued(waker) = mem::replace(entry, Entry::Free) {
                *entry = Entry::Sent(waker);
            }
            sent.push_back(command);
        }
        Taken::Commands(count)
    }

    /// Returns to the queue the commands in `out` of which the socket took no byte; it took `at`
    /// bytes. The last `count` of `sent` are theirs.
    pub(super) fn give_back(
        &self,
        out: &mut Vec<u8>,
        at: usize,
        sent: &mut VecDeque<Queued>,
        count: usize,
    ) {
        if count == 0 {
            return;
        }
        // A command whose first byte was taken stays; later ones return to the front of the queue.
        let mut keep = sent.len() - count;
        let mut start = 0;
        while keep < sent.len() && start < at {
            start += sent[keep].len;
            keep += 1;
        }
        let mut queue = self.queue.lock();
        if !matches!(queue.state, State::Up | State::Retiring) {
            // The calls have already failed.
            sent.truncate(keep);
            out.truncate(start);
            return;
        }
        let CallQueue { queued, entries, cancelled, bytes, .. } = &mut *queue;
        for command in sent.drain(keep..).rev() {
            let entry = &mut entries[command.entry as usize];
            *entry = match mem::replace(entry, Entry::Free) {
                Entry::Sent(waker) => Entry::Queued(waker),
                // Its caller saw an unknown outcome; now the command is certainly not sent.
                Entry::Left => {
                    *cancelled += 1;
                    Entry::Cancelled
                }
                other => other,
            };
            queued.push_front(command);
        }
        bytes.splice(..0, out.drain(start..));
    }

    /// Stores replies in their entries and wakes the callers.
    pub(super) fn deliver(&self, replies: &mut Vec<(u32, Reply)>, woken: &mut Vec<Waker>) {
        let mut dropped = 0;
        let mut queue = self.queue.lock();
        for (index, reply) in replies.drain(..) {
            let CallQueue { entries, free, waiting, .. } = &mut *queue;
            let Some(entry) = entries.get_mut(index as usize) else { continue };
            match mem::replace(entry, Entry::Free) {
                Entry::Sent(waker) => {
                    *entry = Entry::Done(reply);
                    *waiting -= 1;
                    woken.push(waker);
                }
                Entry::Left => {
                    free.push(index);
                    *waiting -= 1;
                    dropped += 1;
                }
                // The queue failed in between; the entry may belong to a newer call.
                other => *entry = other,
            }
        }
        drop(queue);
        if dropped > 0 {
            self.counting.dropped_replies.add(dropped);
        }
        woken.drain(..).for_each(Waker::wake);
    }

    /// Marks the connection as up. Returns its number, or `None` if it was closed meanwhile.
    pub(super) fn opened(&self) -> Option<u64> {
        let mut queue = self.queue.lock();
        if matches!(queue.state, State::Closed) {
            return None;
        }
        queue.state = State::Up;
        queue.epoch += 1;
        queue.since = Instant::now();
        Some(queue.epoch)
    }

    /// Marks a retired connection as gone: every call sent over it is answered, queued calls wait
    /// for the next.
    pub(super) fn retired(&self) {
        let mut queue = self.queue.lock();
        if matches!(queue.state, State::Retiring) {
            queue.state = State::Connecting;
        }
    }

    /// Fails the waiting calls of a broken connection; the driver reconnects without a wait.
    pub(super) fn broke(&self, failure: &Failure) {
        self.settle(State::Connecting, failure);
    }

    /// Fails waiting and new calls until an attempt succeeds.
    pub(super) fn failed(&self, failure: &Failure) {
        self.settle(State::Down(failure.clone()), failure);
    }

    /// Marks the driver as ended. The next call starts another.
    pub(super) fn abandoned(&self) {
        let failure =
            Failure::local(FailureKind::Disconnected, "the runtime of the connection has ended");
        self.settle(State::Idle, &failure);
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(self.queue.lock().state, State::Closed)
    }

    /// Waits until a call arrives, or the connection is closed.
    pub(super) async fn demanded(&self) {
        poll_fn(|context| {
            let mut queue = self.queue.lock();
            if queue.demand || matches!(queue.state, State::Closed) {
                return Poll::Ready(());
            }
            queue.driver = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Forgets the calls that have arrived so far.
    pub(super) fn begin_attempt(&self) {
        self.queue.lock().demand = false;
    }
}
