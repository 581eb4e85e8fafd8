//! The driver's side of the line: what it takes, what it brings back, and what it tells everybody.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::mem;
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use super::super::outcome::{Failure, FailureKind};
use super::Conn;
use super::line::{Line, Place, Queued, Reply, State};

/// What the driver takes from the line.
pub(in super::super) enum Taken {
    /// So many commands to send.
    Commands(usize),
    /// There are commands, but they can wait for a moment.
    Later,
    /// Nothing now. The driver will be woken.
    Nothing,
    /// Nothing more on this connection: it ends when everything sent is answered.
    NoMore,
    /// Nothing, and nobody waits: the connection ends now.
    Stop,
}

impl Conn {
    /// Moves what waits to be sent into `out`, which must be empty, and its owners behind `sent`;
    /// unless they `may_wait`.
    pub(in super::super) fn take(
        &self,
        out: &mut Vec<u8>,
        sent: &mut VecDeque<Queued>,
        may_wait: bool,
        context: &Context<'_>,
    ) -> Taken {
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
        if may_wait {
            return Taken::Later;
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

    /// Gives back the commands in `out` of which the socket took nothing, when it took `at` bytes.
    /// They belong to the last `count` of `sent`.
    pub(in super::super) fn give_back(
        &self,
        out: &mut Vec<u8>,
        at: usize,
        sent: &mut VecDeque<Queued>,
        count: usize,
    ) {
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
    pub(in super::super) fn deliver(
        &self,
        replies: &mut Vec<(u32, Reply)>,
        woken: &mut Vec<Waker>,
    ) {
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
    pub(in super::super) fn opened(&self) -> Option<u64> {
        let mut line = self.line.lock();
        if matches!(line.state, State::Closed) {
            return None;
        }
        line.state = State::Up;
        line.epoch += 1;
        line.since = Instant::now();
        Some(line.epoch)
    }

    /// The connection was let go and everything sent over it is answered. Those in line wait for
    /// the next.
    pub(in super::super) fn retired(&self) {
        let mut line = self.line.lock();
        if matches!(line.state, State::Retiring) {
            line.state = State::Connecting;
        }
    }

    /// The connection broke, and is to be made anew at once.
    pub(in super::super) fn broke(&self, failure: &Failure) {
        self.settle(State::Connecting, failure);
    }

    /// There is no connection, and callers need not wait for one.
    pub(in super::super) fn failed(&self, failure: &Failure) {
        self.settle(State::Down(failure.clone()), failure);
    }

    /// There is no driver any more. The next caller starts another.
    pub(in super::super) fn abandoned(&self) {
        let failure =
            Failure::local(FailureKind::Disconnected, "the runtime of the connection has ended");
        self.settle(State::Idle, &failure);
    }

    pub(in super::super) fn is_closed(&self) -> bool {
        matches!(self.line.lock().state, State::Closed)
    }

    /// Waits until somebody asks, or the connection is closed.
    pub(in super::super) async fn demanded(&self) {
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
    pub(in super::super) fn begin_attempt(&self) {
        self.line.lock().demand = false;
    }
}
